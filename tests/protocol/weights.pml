/* The banks of the policy's weights (shmcollect/parameter_buffer.py), for spin: one writer, one reader, who may die.
 *
 * An image has two cells, so that a torn one shows. The writer never waits; a reader may give up after some attempts.
 * Every interleaving is explored, under sequential consistency.
 *
 * NO_ANNOUNCEMENT: the writer pays no heed to announcements. The counts alone must keep every copy whole and its version
 * true; a reader may then get a version that is not committed yet.
 */
#ifndef VERSIONS
#define VERSIONS 4
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#define BANKS 3 /* readers + 2 */
#define READS 3

byte count[BANKS]; /* 2v + 1 while version v is being written, 2v when it is there */
byte first[BANKS], second[BANKS];
byte latest, announced; /* 0: no bank, else one more than its number */
bool crash_writer, crash_reader, finished;

proctype Writer()
{
    byte bank, version;

life:
    {
        d_step { /* a successor goes on with the numbers of the banks at rest */
            version = 0;
            for (bank : 0 .. BANKS - 1) {
                if
                :: count[bank] % 2 == 0 && count[bank] / 2 > version -> version = count[bank] / 2
                :: else
                fi
            }
            bank = 0
        }
        do
        :: version == VERSIONS -> break
        :: version < VERSIONS ->
            atomic {
                if
#ifdef NO_ANNOUNCEMENT
                :: latest != 0 -> bank = 0
                :: latest != 1 -> bank = 1
                :: latest != 2 -> bank = 2
#else
                :: latest != 0 && announced != 1 -> bank = 0
                :: latest != 1 && announced != 2 -> bank = 1
                :: latest != 2 && announced != 3 -> bank = 2
#endif
                :: else -> assert(false) /* there is always a bank to write to */
                fi
            }
#ifdef EVEN_FIRST
            count[bank] = 2 * (version + 1);
#else
            count[bank] = 2 * (version + 1) + 1;
#endif
            first[bank] = version + 1;
            second[bank] = version + 1;
            count[bank] = 2 * (version + 1);
            version++;
            latest = bank
        od;
        finished = true
    } unless { crash_writer };

    if
    :: crash_writer -> crash_writer = false; goto life
    :: else
    fi
}

proctype Reader()
{
    byte bank, before, one, two, reads, seen;

life:
    {
        announced = 0;
        do
        :: reads == READS -> break
        :: reads < READS ->
            reads++;
            bank = latest;
            announced = bank + 1;
            if
            :: latest != bank -> skip
            :: else ->
                before = count[bank];
                if
#ifdef ODD_IGNORED
                :: true ->
#else
                :: before % 2 == 0 ->
#endif
                    one = first[bank];
                    two = second[bank];
                    if
#ifdef NO_REVALIDATION
                    :: true ->
#else
                    :: count[bank] == before ->
#endif
                        assert(one == two); /* not torn */
#ifdef VERSION_OF_LATEST
                        before = count[latest];
#endif
                        assert(one == before / 2); /* the version it says it is */
#ifndef NO_ANNOUNCEMENT
                        assert(before / 2 >= seen); /* versions never go back */
#endif
                        seen = before / 2
#ifndef NO_REVALIDATION
                    :: else
#endif
                    fi
#ifndef ODD_IGNORED
                :: else
#endif
                fi
            fi;
            announced = 0
        od
    } unless { crash_reader };

    if
    :: crash_reader -> d_step { crash_reader = false; bank = 0; before = 0; one = 0; two = 0; seen = 0 } goto life
    :: else
    fi
}

proctype Killer()
{
    byte crashes;
    do
    :: crashes < CRASHES -> crashes++; crash_writer = true
    :: crashes < CRASHES -> crashes++; crash_reader = true
    :: true -> break
    od
}

init
{
    atomic {
        run Writer();
        run Reader();
        run Killer()
    }
}
