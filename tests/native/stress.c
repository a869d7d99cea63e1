/* Two and three threads on the words and bells of _sync.h, for the thread sanitizer.
 *
 * publish   a producer and a reader of a ring of the smallest legal capacity: plain payload, many turns
 * chain     worker -> inference -> worker -> learner: the learner reads what inference wrote, through `observed` alone
 * bells     ping-pong of two sleepers that never spin
 *
 * Forbidden: a data race (the sanitizer ends the run), a row that is torn, lost, repeated or out of order, and a lost
 * wake-up: a sleep that lasts its whole second although what it waited for had been published.
 */
#include "_sync.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { CAPACITY = 2, ROW = 16, STEPS = 200000, ROUNDS = 50000, SECOND_NS = 1000000000, ENOUGH = 10 };

typedef struct {
    int64_t start; /* where the cursors begin */
    _Alignas(128) word_t observed;
    _Alignas(128) word_t acted;
    _Alignas(128) word_t released;
    int64_t obs[CAPACITY][ROW], action[CAPACITY][ROW], reward[CAPACITY][ROW];
} ring_t;

typedef void *role_t(void *); /* returns how many wrong rows it saw */

static void fill(int64_t *row, int64_t value)
{
    for (int i = 0; i < ROW; i++)
        row[i] = value + i;
}

static bool holds(const int64_t *row, int64_t value)
{
    bool right = true;
    for (int i = 0; i < ROW; i++)
        right &= row[i] == value + i;
    return right;
}

static void wait_for(const word_t *cursor, int64_t at_least)
{
    while (word_load(cursor) < at_least)
        sched_yield();
}

/* ---- publish ------------------------------------------------------------------------------------------------ */

static void *produce(void *argument)
{
    ring_t *ring = argument;
    for (int64_t sequence = ring->start; sequence < ring->start + STEPS; sequence++) {
        wait_for(&ring->released, sequence - CAPACITY + 1);
        fill(ring->obs[sequence % CAPACITY], sequence);
        word_store(&ring->observed, sequence + 1);
    }
    return NULL;
}

static void *consume(void *argument)
{
    ring_t *ring = argument;
    long wrong = 0;
    for (int64_t sequence = ring->start; sequence < ring->start + STEPS; sequence++) {
        wait_for(&ring->observed, sequence + 1);
        wrong += !holds(ring->obs[sequence % CAPACITY], sequence);
        word_store(&ring->released, sequence + 1);
    }
    return (void *)wrong;
}

/* ---- chain -------------------------------------------------------------------------------------------------- */

static void *work(void *argument)
{
    ring_t *ring = argument;
    long wrong = 0;
    for (int64_t sequence = ring->start; sequence <= ring->start + STEPS; sequence++) {
        int64_t before = sequence - 1;
        if (sequence > ring->start) {
            wait_for(&ring->acted, sequence);
            wrong += !holds(ring->action[before % CAPACITY], -before);
            fill(ring->reward[before % CAPACITY], 2 * before);
        }
        fill(ring->obs[sequence % CAPACITY], sequence);
        word_store(&ring->observed, sequence + 1);
    }
    return (void *)wrong;
}

static void *infer(void *argument)
{
    ring_t *ring = argument;
    long wrong = 0;
    for (int64_t sequence = ring->start; sequence < ring->start + STEPS; sequence++) {
        wait_for(&ring->observed, sequence + 1);
        wait_for(&ring->released, sequence - CAPACITY + 2); /* granted <= released + capacity - 1 */
        wrong += !holds(ring->obs[sequence % CAPACITY], sequence);
        fill(ring->action[sequence % CAPACITY], -sequence);
        word_store(&ring->acted, sequence + 1);
    }
    return (void *)wrong;
}

static void *learn(void *argument)
{
    ring_t *ring = argument;
    long wrong = 0;
    for (int64_t sequence = ring->start; sequence < ring->start + STEPS; sequence++) {
        wait_for(&ring->observed, sequence + 2);
        int64_t slot = sequence % CAPACITY;
        wrong += !holds(ring->obs[slot], sequence) || !holds(ring->action[slot], -sequence) ||
                 !holds(ring->reward[slot], 2 * sequence);
        word_store(&ring->released, sequence + 1);
    }
    return (void *)wrong;
}

/* ---- bells -------------------------------------------------------------------------------------------------- */

typedef struct {
    _Alignas(128) bell_t bell;
    _Alignas(128) word_t published;
    int64_t payload, published_ns;
} side_t;

typedef struct {
    side_t *mine, *theirs;
    bool begins;
    long lost, wrong, slept;
} player_t;

/* For a random time between a nanosecond and the cost of waking a sleeper: every step meets every other one. */
static void dawdle(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    for (uint32_t i = (*state >> 8) % (1u << (*state >> 28)); i > 0; i--)
        atomic_signal_fence(memory_order_seq_cst);
}

static void give_up(int64_t round)
{
    printf("bells: %d lost wake-ups in %lld rounds\n", ENOUGH, (long long)round);
    exit(EXIT_FAILURE);
}

/* Sleeps until the other side has published `round`. */
static void await(player_t *self, int64_t round, uint32_t *state)
{
    while (true) {
        dawdle(state);
        uint32_t key = bell_prepare(&self->mine->bell);
        if (word_load(&self->theirs->published) >= round)
            break;
        self->slept++;
        if (bell_sleep(&self->mine->bell, key, monotonic_ns() + SECOND_NS) == ETIMEDOUT &&
            word_load(&self->theirs->published) >= round && monotonic_ns() - self->theirs->published_ns > SECOND_NS / 2)
            self->lost++; /* half a second ago is no close call on a busy machine */
        if (self->lost == ENOUGH)
            give_up(round);
    }
    bell_cancel(&self->mine->bell);
}

static void *play(void *argument)
{
    player_t *self = argument;
    uint32_t state = self->begins;
    for (int64_t round = 1; round <= ROUNDS; round++) {
        if (!self->begins) {
            await(self, round, &state);
            self->wrong += self->theirs->payload != round;
        }
        self->mine->payload = round;
        dawdle(&state);
        self->mine->published_ns = monotonic_ns();
        word_store(&self->mine->published, round);
        bell_notify(&self->theirs->bell);
        if (self->begins) {
            await(self, round, &state);
            self->wrong += self->theirs->payload != round;
        }
    }
    return NULL;
}

/* ---- runs --------------------------------------------------------------------------------------------------- */

static long run_ring(const char *name, int64_t start, role_t *const roles[], int count)
{
    ring_t *ring = aligned_alloc(128, sizeof *ring);
    memset(ring, 0, sizeof *ring);
    ring->start = start;
    atomic_init(&ring->observed, start);
    atomic_init(&ring->acted, start);
    atomic_init(&ring->released, start);
    pthread_t threads[3];
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, roles[i], ring);
    long wrong = 0;
    for (int i = 0; i < count; i++) {
        void *result;
        pthread_join(threads[i], &result);
        wrong += (long)result;
    }
    printf("%s from %lld: %d steps, %ld wrong rows\n", name, (long long)start, STEPS, wrong);
    free(ring);
    return wrong;
}

static long run_bells(void)
{
    static side_t a, b;
    player_t players[2] = {{.mine = &a, .theirs = &b, .begins = true}, {.mine = &b, .theirs = &a}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, play, &players[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    long lost = players[0].lost + players[1].lost, wrong = players[0].wrong + players[1].wrong;
    printf("bells: %d rounds, %ld sleeps, %ld lost wake-ups, %ld wrong payloads\n", ROUNDS,
           players[0].slept + players[1].slept, lost, wrong);
    return lost + wrong;
}

int main(void)
{
    const int64_t starts[] = {0, INT64_C(0x7fffffff) - STEPS / 2, INT64_C(0xffffffff) - STEPS / 2};
    long failures = run_bells();
    for (int i = 0; i < 3; i++) {
        failures += run_ring("publish", starts[i], (role_t *const[]){produce, consume}, 2);
        failures += run_ring("chain", starts[i], (role_t *const[]){work, infer, learn}, 3);
    }
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
