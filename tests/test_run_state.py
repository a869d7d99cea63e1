"""The run state: the first reason to end a run wins, and everybody hears of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from in_process import small_segment

from shmcollect import _native
from shmcollect.run_state import ABORTED, RUNNING, STOPPING, RunState
from shmcollect.segment import Segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    with small_segment() as made:
        yield made


def test_a_new_run_is_running_and_at_zero(segment: Segment) -> None:
    state = RunState(segment)
    assert state.is_running() and state.value == RUNNING == 0
    assert (state.pause_count, state.pause_acknowledged, state.reset_count) == (0, 0, 0)


@pytest.mark.parametrize("first", [STOPPING, ABORTED])
@pytest.mark.parametrize("second", [STOPPING, ABORTED])
def test_the_first_reason_wins(segment: Segment, first: int, second: int) -> None:
    state, other = RunState(segment), RunState(segment)
    assert state.end(first)
    assert not other.end(second)
    assert state.value == other.value == first and not other.is_running()


def test_every_bell_rings_when_a_run_ends_also_the_second_time(segment: Segment) -> None:
    state = RunState(segment)
    assert set(state.bells) == {"worker 0", "worker 1", "inference", "learner"}
    for value in (ABORTED, STOPPING):
        keys = {name: bell.prepare() for name, bell in state.bells.items()}
        RunState(segment).end(value)
        assert all(bell.wait(keys[name], 60.0) for name, bell in state.bells.items())


def test_of_many_reasons_at_once_exactly_one_is_the_first(segment: Segment) -> None:
    for _ in range(50):
        _native.store(segment.buffer, segment.layout.words["run_state"], RUNNING)
        reasons = [STOPPING, ABORTED] * 4
        start = threading.Barrier(len(reasons))
        won: list[int] = []

        def end(reason: int, start: threading.Barrier = start, won: list[int] = won) -> None:
            state = RunState(segment)
            start.wait()
            if state.end(reason):
                won.append(reason)

        threads = [threading.Thread(target=end, args=(reason,)) for reason in reasons]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert won == [RunState(segment).value]


def test_each_word_is_its_own(segment: Segment) -> None:
    state, other = RunState(segment), RunState(segment)
    state.pause_count, state.pause_acknowledged, state.reset_count = 3, 2**40, 5
    assert (other.pause_count, other.pause_acknowledged, other.reset_count) == (3, 2**40, 5)
    assert other.is_running()


def test_workers_mark_themselves_running(segment: Segment) -> None:
    state = RunState(segment)

    def marks() -> list[int]:
        return [_native.load(segment.buffer, at) for at in segment.layout.running]

    assert marks() == [0, 0]
    state.mark_running(1, True)
    assert marks() == [0, 1]
    state.mark_running(0, True)
    state.mark_running(1, False)
    assert marks() == [1, 0]
