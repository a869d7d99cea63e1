/* The protocol of a run, for spin: rings, cursors, doorbells, the end of the run, crashes and successors.
 *
 * One worker per env, one inference process, one learner. The learner ends the run after ROLLOUTS rollouts of each env.
 * A process may crash between any two steps; a successor takes its place at some later time. There are no time-outs:
 * those of the engine would hide a lost wake-up, which here is a deadlock. Every interleaving is explored, under
 * sequential consistency; what weaker memory adds is the business of test_litmus.py.
 *
 * A slot's parts hold the sequence they belong to, or WRITING between the two halves of a write.
 */
#ifndef ENVS
#define ENVS 1
#endif
#ifndef LENGTH
#define LENGTH 1 /* T, steps of a rollout */
#endif
#ifndef CAPACITY
#define CAPACITY 2
#endif
#ifndef ROLLOUTS
#define ROLLOUTS 3
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#define STEPS (ROLLOUTS * LENGTH)
#define WRITING 255
#define INFERENCE ENVS
#define LEARNER (ENVS + 1)
#define BELLS (ENVS + 2)

byte observed[ENVS], acted[ENVS], released[ENVS], granted[ENVS];
byte obs[ENVS * CAPACITY] = WRITING, action[ENVS * CAPACITY] = WRITING, outcome[ENVS * CAPACITY] = WRITING;
bool stopping;

/* A bell: `rung` says whether its key has changed since the sleeper read it, which is all that a key can tell. */
bool rung[BELLS], announced[BELLS], asleep[BELLS];
bool crash[BELLS]; /* of workers and inference */

#define SLOT(env, sequence) (env) * CAPACITY + (sequence) % CAPACITY
#define READY(env) (observed[env] > acted[env] && acted[env] < granted[env])
#define FINISHED(env) (observed[env] >= released[env] + LENGTH + 1)

inline notify(bell)
{
    rung[bell] = true;
    if
    :: announced[bell] ->
        asleep[bell] = false;
#ifdef NOTIFIER_CLEARS
        announced[bell] = false;
#endif
    :: else
    fi
}

/* Sleeps on the futex, unless the key has changed. */
inline sleep_on(bell)
{
    d_step {
        if
        :: !rung[bell] -> asleep[bell] = true
        :: else
        fi
    }
    !asleep[bell]
}

/* Checks two conditions one after the other before it sleeps: those of different envs are never seen at once. */
inline sleep_unless(bell, condition, other)
{
    announced[bell] = true;
#ifndef KEY_AFTER_CHECK
    rung[bell] = false;
#endif
    if
#ifdef NO_RECHECK
    :: true ->
#else
    :: (condition) -> announced[bell] = false
    :: else ->
        if
        :: (other) -> announced[bell] = false
        :: else ->
#endif
#ifdef KEY_AFTER_CHECK
            rung[bell] = false;
#endif
            sleep_on(bell)
#ifndef NO_RECHECK
        fi
#endif
    fi
}

inline write_observation(env, sequence)
{
    assert(sequence < released[env] + CAPACITY); /* nothing unreleased is overwritten */
#ifdef PUBLISH_FIRST
    observed[env] = sequence + 1;
#endif
    obs[SLOT(env, sequence)] = WRITING;
    obs[SLOT(env, sequence)] = sequence;
#ifndef PUBLISH_FIRST
    observed[env] = sequence + 1;
#endif
}

proctype Worker(byte env)
{
    byte at;
    bool is_successor = false;

life:
    {
        if
        :: observed[env] == 0 -> write_observation(env, 0)
        :: else
#ifdef REWRITES
            ; at = observed[env] - 1;
            obs[SLOT(env, at)] = WRITING;
            obs[SLOT(env, at)] = at
#endif
        fi;
        if
        :: !is_successor -> notify(INFERENCE)
        :: else
#ifndef RINGS_NO_BELL
            ; notify(INFERENCE);
            notify(LEARNER)
#endif
        fi;
        do
        :: stopping -> break
        :: !stopping && acted[env] == observed[env] ->
            /* A step, or the row of an interrupted episode: the same writes. */
            at = observed[env] - 1;
            assert(obs[SLOT(env, at)] == at && action[SLOT(env, at)] == at);
            outcome[SLOT(env, at)] = WRITING;
            outcome[SLOT(env, at)] = at;
            write_observation(env, at + 1);
            notify(INFERENCE);
            if
            :: (at + 1) % LENGTH == 0 -> notify(LEARNER)
            :: else
            fi
        :: !stopping && acted[env] != observed[env] ->
            sleep_unless(env, stopping || acted[env] == observed[env], false)
        od
    } unless { crash[env] };

    if
    :: crash[env] ->
        d_step { crash[env] = false; asleep[env] = false; at = 0; is_successor = true }
        goto life
    :: else
    fi
}

proctype Inference()
{
    byte env, at;
    bool is_successor = false;

life:
    {
#ifndef RINGS_NO_BELL
        env = (is_successor -> 0 : BELLS);
        do
        :: env < BELLS -> notify(env); env++
        :: else -> break
        od;
#endif
        do
        :: stopping -> break
        :: else ->
            if
            :: READY(0) -> env = 0
            :: READY(ENVS - 1) -> env = ENVS - 1
            :: else -> env = ENVS
            fi;
            if
            :: env < ENVS ->
                at = acted[env];
                assert(obs[SLOT(env, at)] == at); /* as the gathering begins */
                assert(obs[SLOT(env, at)] == at); /* and as it ends */
                action[SLOT(env, at)] = WRITING;
                action[SLOT(env, at)] = at;
                acted[env] = at + 1;
                notify(env)
            :: else ->
                sleep_unless(INFERENCE, stopping || READY(0), READY(ENVS - 1))
            fi
        od
    } unless { crash[INFERENCE] };

    if
    :: crash[INFERENCE] ->
        d_step { crash[INFERENCE] = false; asleep[INFERENCE] = false; env = 0; at = 0; is_successor = true }
        goto life
    :: else
    fi
}

#ifdef GRANT_ONE_MORE
#define ROOM(env) (released[env] + CAPACITY)
#else
#define ROOM(env) (released[env] + CAPACITY - 1)
#endif

inline grant(env)
{
    granted[env] = (ROOM(env) < STEPS -> ROOM(env) : STEPS);
}

proctype Learner()
{
    byte env, at, delivered;

    for (env : 0 .. ENVS - 1) {
        grant(env)
    }
    notify(INFERENCE);
    do
    :: delivered == ENVS * ROLLOUTS -> break
    :: else ->
        if
        :: FINISHED(0) -> env = 0
        :: FINISHED(ENVS - 1) -> env = ENVS - 1
        :: else -> env = ENVS
        fi;
        if
        :: env < ENVS ->
            at = released[env];
            do
            :: at < released[env] + LENGTH ->
                assert(obs[SLOT(env, at)] == at && action[SLOT(env, at)] == at && outcome[SLOT(env, at)] == at);
                assert(obs[SLOT(env, at)] == at && action[SLOT(env, at)] == at && outcome[SLOT(env, at)] == at);
                at++
            :: else -> break
            od;
            assert(obs[SLOT(env, at)] == at); /* the observation after the rollout */
            released[env] = at;
            grant(env);
            delivered++;
            notify(INFERENCE)
        :: else ->
            sleep_unless(LEARNER, FINISHED(0), FINISHED(ENVS - 1))
        fi
    od;
    stopping = true;
    for (env : 0 .. BELLS - 1) {
        notify(env)
    }
}

#if CRASHES > 0
proctype Killer()
{
    byte crashes, victim;
    do
    :: crashes < CRASHES ->
        select(victim : 0 .. INFERENCE);
        crash[victim] = true;
        crashes++
    :: true -> break
    od
}
#endif

init
{
    byte env;
    atomic {
        for (env : 0 .. ENVS - 1) {
            run Worker(env)
        }
        run Inference();
        run Learner();
#if CRASHES > 0
        run Killer();
#endif
    }
}
