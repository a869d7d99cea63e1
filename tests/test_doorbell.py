"""The doorbell: no wake-up is lost, nobody sleeps for ever, and nobody is taken for a sleeper who is none."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest
from in_process import small_segment

from shmcollect import _native, doorbell
from shmcollect.doorbell import LONGEST_SLEEP_S, Doorbell
from shmcollect.segment import Segment

PATIENCE_S = 60.0  # as good as for ever: only a lost wake-up makes anybody wait so long


@pytest.fixture
def segment() -> Iterator[Segment]:
    with small_segment() as made:
        yield made


@pytest.fixture
def bell(segment: Segment) -> Doorbell:
    return Doorbell(segment.buffer, segment.layout.bells["learner"])


def has_sleeper(segment: Segment) -> bool:
    return _native.bell_notify(segment.buffer, segment.layout.bells["learner"])


def test_a_ring_between_prepare_and_wait_is_not_lost(bell: Doorbell) -> None:
    key = bell.prepare()
    bell.notify()
    assert bell.wait(key, PATIENCE_S)


def test_a_ring_before_prepare_is_over(bell: Doorbell) -> None:
    bell.notify()
    assert not bell.wait(bell.prepare(), 0.01)


def test_a_wait_without_a_ring_lasts_as_long_as_asked(bell: Doorbell) -> None:
    started = time.monotonic()
    assert not bell.wait(bell.prepare(), 0.05)
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 1e-12])
def test_a_wait_of_nothing_returns_at_once(bell: Doorbell, timeout_s: float) -> None:
    assert not bell.wait_until(lambda: False, timeout_s)


def test_the_sleeper_is_announced_until_it_wakes_or_cancels(segment: Segment, bell: Doorbell) -> None:
    assert not has_sleeper(segment)
    bell.prepare()
    assert has_sleeper(segment) and has_sleeper(segment), "only the sleeper withdraws its announcement"
    bell.cancel()
    assert not has_sleeper(segment)
    bell.wait(bell.prepare(), 0.0)
    assert not has_sleeper(segment)


def test_bells_do_not_hear_each_other(segment: Segment) -> None:
    bells = [Doorbell(segment.buffer, at) for at in segment.layout.bells.values()]
    keys = [each.prepare() for each in bells]
    bells[1].notify()
    assert [
        each.wait(key, 0.0 if i != 1 else PATIENCE_S) for i, (each, key) in enumerate(zip(bells, keys, strict=True))
    ] == [i == 1 for i in range(len(bells))]


def test_the_key_goes_round_after_32_bits(segment: Segment, bell: Doorbell) -> None:
    _native.store(segment.buffer, segment.layout.bells["learner"], 2**32 - 1)  # the key is the lower half
    key = bell.prepare()
    assert key == 2**32 - 1
    bell.notify()
    assert bell.wait(key, PATIENCE_S)
    assert bell.prepare() == 0
    bell.cancel()


# ---- wait_until


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_look_that_succeeds_at_any_time_ends_the_wait(segment: Segment, bell: Doorbell, nth: int) -> None:
    looks = count(1)
    while not bell.wait_until(lambda: next(looks) >= nth, 0.001):
        pass
    assert next(looks) >= nth + 1
    assert not has_sleeper(segment)


def test_what_is_there_already_is_found_by_the_first_look(bell: Doorbell) -> None:
    looks = count()
    assert bell.wait_until(lambda: next(looks) >= 0, PATIENCE_S)
    assert next(looks) == 1


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_look_that_raises_withdraws_the_announcement(segment: Segment, bell: Doorbell, nth: int) -> None:
    looks = count(1)

    def look() -> bool:
        if next(looks) == nth:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        while True:
            bell.wait_until(look, 0.001)
    assert not has_sleeper(segment)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 3600.0])
def test_no_sleep_is_longer_than_the_longest(bell: Doorbell, timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Doorbell, "wait", lambda self, key, timeout_s: asked.append(timeout_s))
    assert not bell.wait_until(lambda: False, timeout_s)
    assert asked == [LONGEST_SLEEP_S]


def test_what_is_published_just_before_sleeping_is_seen(bell: Doorbell) -> None:
    """Published and rung after the last look of the yielding phase: the look after prepare() must find it."""
    published = False
    prepare = bell.prepare

    class Late(Doorbell):
        def prepare(self) -> int:
            nonlocal published
            key = prepare()
            published = True
            return key

        def wait(self, key: int, timeout_s: float) -> bool:
            raise AssertionError("slept although there was work")

    assert Late(bell._buffer, bell._offset).wait_until(lambda: published, PATIENCE_S)


def test_yielding_in_vain_is_given_up_and_taken_up_again(bell: Doorbell, monkeypatch: pytest.MonkeyPatch) -> None:
    yields = 0

    def count_yield() -> None:
        nonlocal yields
        yields += 1

    monkeypatch.setattr(doorbell.os, "sched_yield", count_yield)
    assert not bell.wait_until(lambda: False, 0.001)
    assert yields > 0
    for _ in range(50):
        bell.wait_until(lambda: False, 0.001)
    yields = 0
    bell.wait_until(lambda: False, 0.001)
    assert yields == 0
    for _ in range(1000):  # rung while about to sleep: such a short sleep that yielding pays
        looks = count()
        bell.wait_until(lambda looks=looks: next(looks) == 0 and bell.notify(), PATIENCE_S)
        if yields:
            break
    assert yields > 0


# ---- nobody sleeps through a ring


def test_no_ring_is_lost_between_threads(segment: Segment) -> None:
    turns = 2000
    ball = [0]
    bells = [Doorbell(segment.buffer, segment.layout.bells[name]) for name in ("learner", "inference")]
    lost: list[int] = []

    def play(player: int) -> None:
        for turn in range(player, turns, 2):
            while ball[0] != turn:
                key = bells[player].prepare()
                if ball[0] == turn:
                    bells[player].cancel()
                elif not bells[player].wait(key, PATIENCE_S):
                    lost.append(turn)
                    return
            ball[0] = turn + 1
            bells[1 - player].notify()

    players = [threading.Thread(target=play, args=(player,)) for player in range(2)]
    for each in players:
        each.start()
    for each in players:
        each.join()
    assert not lost and ball[0] == turns


OTHER_PLAYER = """
import sys
from shmcollect import _native
from shmcollect.doorbell import Doorbell
from shmcollect.segment import Segment

segment = Segment.attach(sys.argv[1], writable=True)
turns, player = int(sys.argv[2]), int(sys.argv[3])
bells = [Doorbell(segment.buffer, segment.layout.bells[name]) for name in ("learner", "inference")]
ball = segment.layout.words["reset_count"]
for turn in range(player, turns, 2):
    while _native.load(segment.buffer, ball) != turn:
        key = bells[player].prepare()
        if _native.load(segment.buffer, ball) == turn:
            bells[player].cancel()
        elif not bells[player].wait(key, 60.0):
            sys.exit(f"lost the ring of turn {turn}")
    _native.store(segment.buffer, ball, turn + 1)
    bells[1 - player].notify()
"""


def test_no_ring_is_lost_between_processes(segment: Segment) -> None:
    turns = 4000
    arguments = [sys.executable, "-c", OTHER_PLAYER, segment.name, str(turns)]
    players = [subprocess.Popen([*arguments, str(player)]) for player in range(2)]
    assert [each.wait(timeout=100) for each in players] == [0, 0]
    assert _native.load(segment.buffer, segment.layout.words["reset_count"]) == turns
