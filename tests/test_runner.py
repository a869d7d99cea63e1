"""The loop around every role: it works while there is work, sleeps without, and ends with the run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from in_process import assert_equals_plain_loop, config, in_process, small_segment

from shmcollect.counters import Counters
from shmcollect.doorbell import Doorbell
from shmcollect.run_state import ABORTED, STOPPING, RunState
from shmcollect.runner import run
from shmcollect.segment import Segment

LONG_S = 60.0


@pytest.fixture
def segment() -> Iterator[Segment]:
    with small_segment() as made:
        yield made


class Role:
    """Does what a function says, given how often it was asked before."""

    def __init__(self, segment: Segment, work: Callable[[int], int], patience_s: float = math.inf) -> None:
        self.counters = Counters(segment, "inference")
        self.calls = 0
        self.patience = patience_s
        self._work = work

    def do_work(self) -> int:
        self.calls += 1
        return self._work(self.calls)

    def patience_s(self) -> float:
        return self.patience


class Recorder(Doorbell):
    """A bell that sleeps not at all, and remembers how long it was to."""

    sleeps: list[float]

    def wait(self, key: int, timeout_s: float) -> bool:
        self.cancel()
        self.sleeps.append(timeout_s)
        return False


def recorder(segment: Segment) -> Recorder:
    bell = Recorder(segment.buffer, segment.layout.bells["inference"])
    bell.sleeps = []
    return bell


@contextmanager
def running(target: Callable[[], None]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=target)
    thread.start()
    yield thread
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("ending", [STOPPING, ABORTED])
def test_a_role_works_until_the_run_ends(segment: Segment, ending: int) -> None:
    state = RunState(segment)
    role = Role(segment, lambda n: int(n < 5) or int(state.end(ending)))
    run(role, state.bells["inference"], state)
    assert role.calls == 5


def test_in_a_run_that_has_ended_nothing_is_done(segment: Segment) -> None:
    state = RunState(segment)
    state.end(STOPPING)
    role = Role(segment, lambda n: 1)
    run(role, state.bells["inference"], state)
    assert role.calls == 0


def test_what_a_role_raises_ends_the_loop(segment: Segment) -> None:
    state = RunState(segment)
    for nth in (1, 2, 5):

        def work(n: int, nth: int = nth) -> int:
            if n == nth:
                raise ZeroDivisionError
            return 0

        with pytest.raises(ZeroDivisionError):
            run(Role(segment, work, patience_s=0.001), state.bells["inference"], state)
    assert state.is_running(), "to report it is the business of whoever runs the loop"


def test_a_sleeping_role_is_woken_by_its_bell(segment: Segment) -> None:
    state = RunState(segment)
    work, done = threading.Event(), threading.Event()

    def do(_: int) -> int:
        if not work.is_set():
            return 0
        work.clear()
        done.set()
        return 1

    with running(lambda: run(Role(segment, do), state.bells["inference"], state)):
        for _ in range(20):
            time.sleep(0.002)
            done.clear()
            work.set()
            state.bells["inference"].notify()
            assert done.wait(LONG_S)
        state.end(STOPPING)


def test_an_idle_role_hardly_looks(segment: Segment) -> None:
    state = RunState(segment)
    role = Role(segment, lambda n: 0)
    with running(lambda: run(role, state.bells["inference"], state)):
        time.sleep(2.0)  # by now it has given up yielding
        before = role.calls
        time.sleep(0.5)
        state.end(STOPPING)
    assert role.calls - before < 50


def test_a_role_sleeps_no_longer_than_its_patience(segment: Segment) -> None:
    state, bell = RunState(segment), recorder(segment)
    role = Role(segment, lambda n: int(n == 100 and state.end(STOPPING)), patience_s=0.003)
    run(role, bell, state)
    assert bell.sleeps and max(bell.sleeps) <= 0.003


def test_patience_that_ends_while_looking_shortens_the_sleep(segment: Segment) -> None:
    """Rows may come while the role looks about before sleeping: from then on there is a time limit."""
    state, bell = RunState(segment), recorder(segment)

    def work(n: int) -> int:
        if n == 2:
            role.patience = 0.001
        return int(n == 100 and state.end(STOPPING))

    role = Role(segment, work)
    run(role, bell, state)
    assert bell.sleeps and max(bell.sleeps) <= 0.001


def test_time_spent_waiting_is_counted_and_a_heartbeat_kept(segment: Segment) -> None:
    state = RunState(segment)
    started_ns = time.monotonic_ns()

    def work(n: int) -> int:
        time.sleep(0.02 if n <= 2 else 0)
        if n == 30:
            state.end(STOPPING)
        return int(n <= 2)

    role = Role(segment, work, patience_s=0.005)
    run(role, state.bells["inference"], state)
    counts = Counters(segment, "inference").read()
    ended_ns = time.monotonic_ns()
    assert started_ns <= counts["started_ns"] <= ended_ns - 40_000_000
    assert counts["started_ns"] <= counts["heartbeat_ns"] <= ended_ns
    assert 5_000_000 <= counts["waiting_ns"] <= ended_ns - started_ns - 40_000_000


def test_what_a_role_has_counted_is_published_before_it_sleeps(segment: Segment) -> None:
    state, bell = RunState(segment), recorder(segment)
    reader = Counters(segment, "inference")
    seen: list[int] = []

    def work(n: int) -> int:
        role.counters.values["rows"] = n
        if n == 2:
            seen.append(reader.read()["rows"])
            state.end(STOPPING)
        return 0

    bell.yields = False
    role = Role(segment, work)
    run(role, bell, state)
    assert seen == [1] and reader.read()["rows"] == 2


@pytest.mark.parametrize("sync", [False, True])
def test_the_roles_in_threads_make_what_a_plain_loop_makes(sync: bool) -> None:
    settings = config(num_envs=4, num_workers=2, frames_per_batch=20, rollout_length=5, sync=sync, server_timeout=0.001)
    with in_process(settings) as roles:
        threads = [threading.Thread(target=each.run) for each in (*roles.workers, roles.server)]
        for each in threads:
            each.start()
        bell = roles.state.bells["learner"]

        def look() -> bool:
            count = len(roles.batches)
            roles.poll()
            if roles.learner.granted_news:
                roles.state.bells["inference"].notify()
            return len(roles.batches) > count

        while len(roles.batches) < 20:
            bell.wait_until(look, LONG_S)
        roles.state.end(STOPPING)
        for each in threads:
            each.join(LONG_S)
            assert not each.is_alive()
        assert_equals_plain_loop(roles.batches, 4)
