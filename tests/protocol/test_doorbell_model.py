"""An exhaustive check of the doorbell's protocol and of the ring's bound.

Each party is a generator that takes one atomic step between two yields, and every interleaving of their steps is tried,
as on a sequentially consistent machine; that the real ones behave like that is the business of the orderings in
``_sync.h``. The orders that lose wake-ups and the bound that loses rows are tried too: a check that found nothing wrong
with those would prove nothing about the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

Party = Generator[Callable[[], bool] | None, None, None]
World = tuple[SimpleNamespace, list[Party]]


def explore(make: Callable[[], World]) -> list[tuple[SimpleNamespace, int]]:
    """All states in which nothing can happen any more, each with the number of parties that have not finished.

    A party yields None before a step it can always take, or a function that says whether it can.
    """
    seen: set[Any] = set()
    ends = []
    schedules: list[tuple[int, ...]] = [()]
    while schedules:
        schedule = schedules.pop()
        shared, parties = make()
        blockers = [next(party, None) for party in parties]
        for who in schedule:
            blockers[who] = next(parties[who], None)
        frames = [party.gi_frame for party in parties]
        state = (
            repr(vars(shared)),
            *(frame and (frame.f_lasti, repr({**frame.f_locals, "shared": None})) for frame in frames),
        )
        if state in seen:
            continue
        seen.add(state)
        able = [who for who, blocker in enumerate(blockers) if frames[who] and (blocker is None or blocker())]
        if not able:
            ends.append((shared, sum(frame is not None for frame in frames)))
        schedules += [(*schedule, who) for who in able]
    return ends


# ---- the doorbell ---------------------------------------------------------------------------------------------------


def sleeper(shared: SimpleNamespace, wanted: tuple[int, ...]) -> Party:
    """Waits for so many publications, again and again: what bell_prepare, a check, bell_wait or bell_cancel do."""
    for count in wanted:
        while True:
            yield None
            shared.announced = True
            yield None
            key = shared.key
            yield None
            if shared.published >= count:
                break
            yield None
            shared.asleep = shared.key == key  # the kernel compares and puts to sleep in one step
            yield lambda: not shared.asleep
            shared.announced = False
        yield None
        shared.announced = False


def sleeper_that_reads_the_key_after_the_check(shared: SimpleNamespace, wanted: tuple[int, ...]) -> Party:
    for count in wanted:
        while True:
            yield None
            shared.announced = True
            yield None
            if shared.published >= count:
                break
            yield None
            key = shared.key
            yield None
            shared.asleep = shared.key == key
            yield lambda: not shared.asleep
            shared.announced = False
        yield None
        shared.announced = False


def sleeper_that_skips_the_check(shared: SimpleNamespace, wanted: tuple[int, ...]) -> Party:
    for count in wanted:
        yield None
        while shared.published < count:  # looked before it announced itself, and not again
            yield None
            shared.announced = True
            yield None
            key = shared.key
            yield None
            shared.asleep = shared.key == key
            yield lambda: not shared.asleep
            shared.announced = False
            yield None


def sleeper_that_announces_itself_last(shared: SimpleNamespace, wanted: tuple[int, ...]) -> Party:
    for count in wanted:
        while True:
            yield None
            key = shared.key
            yield None
            if shared.published >= count:
                break
            yield None
            shared.asleep = shared.key == key
            yield None
            shared.announced = True
            yield lambda: not shared.asleep
            shared.announced = False


def notifier(shared: SimpleNamespace, rounds: int) -> Party:
    """Publishes, then does what bell_notify does."""
    for _ in range(rounds):
        yield None
        shared.published += 1
        yield None
        shared.key += 1
        yield None
        if shared.announced:
            yield None
            shared.asleep = False


def notifier_that_clears_the_flag_it_sees(shared: SimpleNamespace, rounds: int) -> Party:
    for _ in range(rounds):
        yield None
        shared.published += 1
        yield None
        shared.key += 1
        yield None
        if shared.announced:
            shared.announced = False  # in one step, as an exchange would
            yield None
            shared.asleep = False


def notifier_that_clears_the_flag_after_waking(shared: SimpleNamespace, rounds: int) -> Party:
    for _ in range(rounds):
        yield None
        shared.published += 1
        yield None
        shared.key += 1
        yield None
        if shared.announced:
            yield None
            shared.asleep = False
            yield None
            shared.announced = False


def notifier_that_publishes_last(shared: SimpleNamespace, rounds: int) -> Party:
    for _ in range(rounds):
        yield None
        shared.key += 1
        yield None
        if shared.announced:
            yield None
            shared.asleep = False
        yield None
        shared.published += 1


def notifier_that_bumps_no_key(shared: SimpleNamespace, rounds: int) -> Party:
    for _ in range(rounds):
        yield None
        shared.published += 1
        yield None
        if shared.announced:
            yield None
            shared.asleep = False


CASES = {  # what the sleeper waits for, and how often each notifier publishes
    "one wait": ((1,), (1,)),
    "a wait after a wait": ((1, 2), (2,)),
    "a notification that is not enough": ((2,), (2,)),
    "two notifiers": ((1, 2), (1, 1)),
    "two notifiers, one of them not enough": ((2, 3), (1, 2)),
}


def lost_wakeups(sleep: Callable[..., Party], notify: Callable[..., Party], case: str) -> int:
    """In how many states the sleeper sleeps for ever, although everything was published and notified."""
    wanted, rounds = CASES[case]

    def make() -> World:
        shared = SimpleNamespace(published=0, key=0, announced=False, asleep=False)
        return shared, [sleep(shared, wanted), *(notify(shared, each) for each in rounds)]

    ends = explore(make)
    assert ends and all(shared.published == sum(rounds) for shared, _ in ends), "the notifiers never wait"
    return sum(unfinished for _, unfinished in ends)


@pytest.mark.parametrize("case", CASES)
def test_no_interleaving_loses_a_wakeup(case: str) -> None:
    assert lost_wakeups(sleeper, notifier, case) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        sleeper_that_reads_the_key_after_the_check,
        sleeper_that_skips_the_check,
        sleeper_that_announces_itself_last,
        notifier_that_clears_the_flag_it_sees,
        notifier_that_clears_the_flag_after_waking,
        notifier_that_publishes_last,
        notifier_that_bumps_no_key,
    ],
)
def test_each_wrong_order_loses_a_wakeup(wrong: Callable[..., Party]) -> None:
    pair = (wrong, notifier) if wrong.__name__.startswith("sleeper") else (sleeper, wrong)
    assert any(lost_wakeups(*pair, case) for case in CASES)


# ---- the ring's bound -----------------------------------------------------------------------------------------------


def worker(shared: SimpleNamespace, steps: int) -> Party:
    """Writes the first observation, then one for every action."""
    while shared.observed <= steps:
        yield lambda: shared.acted == shared.observed
        slot = shared.observed % len(shared.slots)
        shared.overwritten |= shared.slots[slot] >= shared.released
        shared.slots[slot] = shared.observed
        yield None
        shared.observed += 1


def inference(shared: SimpleNamespace, steps: int) -> Party:
    """Acts on every observation whose step was granted."""
    while shared.acted < steps:
        yield lambda: shared.observed > shared.acted and shared.acted < shared.granted
        shared.acted += 1


def learner(shared: SimpleNamespace, steps: int, length: int, bound: int) -> Party:
    """Grants steps, reads finished rollouts slot by slot, and releases them."""
    while shared.released < steps:
        yield None
        shared.granted = min(steps, shared.released + bound)
        yield lambda: shared.observed >= shared.released + length + 1
        for sequence in range(shared.released, shared.released + length + 1):  # with the observation that follows
            yield None
            shared.wrong |= shared.slots[sequence % len(shared.slots)] != sequence
        yield None
        shared.released += length


def ring_ends(capacity: int, length: int, bound: int) -> list[tuple[SimpleNamespace, int]]:
    """How runs of a few turns of the ring can end."""
    steps = 3 * capacity * length

    def make() -> World:
        shared = SimpleNamespace(observed=0, acted=0, released=0, granted=0, slots=[-1] * capacity)
        shared.overwritten = shared.wrong = False
        parties = [worker(shared, steps), inference(shared, steps), learner(shared, steps, length, bound)]
        return shared, parties

    return explore(make)


RINGS = [(capacity, length) for capacity in (2, 3, 4) for length in range(1, capacity)]


@pytest.mark.parametrize(("capacity", "length"), RINGS)
def test_no_interleaving_overwrites_a_row_that_is_not_released(capacity: int, length: int) -> None:
    for shared, unfinished in ring_ends(capacity, length, bound=capacity - 1):
        assert not unfinished, "a deadlock"
        assert not shared.overwritten and not shared.wrong


@pytest.mark.parametrize(("capacity", "length"), RINGS)
def test_one_step_more_overwrites_a_row_that_is_not_released(capacity: int, length: int) -> None:
    assert any(shared.overwritten for shared, _ in ring_ends(capacity, length, bound=capacity))
    assert any(shared.wrong for shared, _ in ring_ends(capacity, length, bound=capacity))


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_capacity_of_no_more_than_a_rollout_deadlocks(length: int) -> None:
    assert all(unfinished for _, unfinished in ring_ends(length, length, bound=length - 1))
