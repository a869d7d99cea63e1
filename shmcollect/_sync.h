/* Every memory ordering of the project, in one place and free of Python, so that the thread sanitizer can
 * exercise exactly what the extension runs (tests/native/stress.c).
 *
 * Both halves of a synchronisation carry the same label: grep "SYNC: observed" and you see the pair.
 */
#ifndef SHMCOLLECT_SYNC_H
#define SHMCOLLECT_SYNC_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "shared words must be lock-free: a lock would live in one process only");
_Static_assert(sizeof(_Atomic int64_t) == 8 && sizeof(_Atomic uint32_t) == 4, "atomics must be plain words");

typedef _Atomic int64_t word_t;

/* ---- words --------------------------------------------------------------------------------------------- */

static inline int64_t word_load(const word_t *word) { return atomic_load_explicit(word, memory_order_acquire); }

static inline void word_store(word_t *word, int64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- the sequence of a slot, a seqlock for readers outside the protocol ---------------------------------- */

#define SLOT_BEING_WRITTEN (-1)

static inline void slot_begin(word_t *sequence)
{
    atomic_store_explicit(sequence, SLOT_BEING_WRITTEN, memory_order_relaxed);
#ifndef __SANITIZE_THREAD__ /* GCC's thread sanitizer does not know fences; none of its tests reads this way */
    atomic_thread_fence(memory_order_release); /* SYNC: slot sequence */
#endif
}

static inline void slot_end(word_t *sequence, int64_t value)
{
    word_store(sequence, value); /* SYNC: slot sequence */
}

/* ---- doorbell: an eventcount on a futex word -------------------------------------------------------------
 *
 * Sleeper: announce, *then* read the key, *then* check every condition, then sleep on the key.
 * Notifier: publish, bump the key, then look for a sleeper.
 * All four accesses are sequentially consistent: whichever of "announce" and "bump" comes first, either the
 * notifier sees the sleeper or the sleeper sees what was published. Only the sleeper writes `sleeping`.
 */
typedef struct {
    _Atomic uint32_t key;      /* written by every notifier */
    _Atomic uint32_t sleeping; /* written by the one sleeper */
} bell_t;

/* No FUTEX_PRIVATE_FLAG: the word is shared between address spaces. */
static inline long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *deadline)
{
    return syscall(SYS_futex, word, operation, value, deadline, NULL, FUTEX_BITSET_MATCH_ANY);
}

static inline uint32_t bell_prepare(bell_t *bell)
{
    atomic_store(&bell->sleeping, 1); /* SYNC: bell */
    return atomic_load(&bell->key);
}

static inline void bell_cancel(bell_t *bell) { atomic_store(&bell->sleeping, 0); }

static inline bool bell_notify(bell_t *bell)
{
    atomic_fetch_add(&bell->key, 1);
    if (!atomic_load(&bell->sleeping)) /* SYNC: bell */
        return false;
    futex(&bell->key, FUTEX_WAKE_BITSET, INT_MAX, NULL);
    return true;
}

/* Sleeps while the key is unchanged, until an absolute CLOCK_MONOTONIC deadline.
 * Returns 0 (rung, or woken for no reason), ETIMEDOUT or EINTR. The caller stays announced. */
static inline int bell_sleep(bell_t *bell, uint32_t key, int64_t deadline_ns)
{
    struct timespec deadline = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    if (futex(&bell->key, FUTEX_WAIT_BITSET, key, &deadline) == 0 || errno == EAGAIN)
        return 0;
    return errno;
}

#endif
