"""Whatever the order in which the roles get to work, the learner delivers what a plain loop would have made."""

from __future__ import annotations

import math
import sys
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import (
    InProcess,
    assert_equals_plain_loop,
    assert_same_batch,
    config,
    envs_of,
    in_process,
    rows_of,
)

from shmcollect import grants, learner, rollouts
from shmcollect.config import CollectorConfig
from shmcollect.errors import ConfigError, ExhaustedError

few = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LENGTHS = st.sampled_from([1, 2, 5])


@st.composite
def configs(draw: st.DrawFn, *, sync: bool | None = None, endless: bool = True) -> CollectorConfig:
    num_envs = draw(st.integers(1, 4))
    length = draw(LENGTHS)
    sync = draw(st.booleans()) if sync is None else sync
    rollouts = draw(st.sampled_from([1, 3]).map(lambda k: k * num_envs) if sync else st.integers(1, 2 * num_envs + 1))
    smallest = draw(st.integers(1, num_envs))
    return config(
        num_envs=num_envs,
        num_workers=draw(st.integers(1, num_envs)),
        frames_per_batch=rollouts * length,
        rollout_length=length,
        sync=sync,
        capacity=draw(st.none() | st.integers(length + 1, 4 * length + 1)),
        min_batch_size=smallest,
        max_batch_size=draw(st.integers(smallest, num_envs)),
        final_obs=draw(st.booleans()),
        total_frames=-1 if endless else draw(st.integers(1, 60)),
    )


def schedules(config: CollectorConfig) -> st.SearchStrategy[list[str]]:
    """Turns of the roles, to be gone through again and again."""
    workers = [f"worker {w}" for w in range(config.num_workers)]
    return st.lists(st.sampled_from([*workers, "inference", "learner"]), max_size=12)


def run(settings: CollectorConfig, data: st.DataObject, batches: int) -> InProcess:
    with in_process(settings) as roles:
        roles.follow(data.draw(schedules(settings), "schedule"), batches)
    return roles


# ---- any order of work


@few
@given(configs(), st.integers(1, 6), st.data())
def test_in_any_order_of_work_the_rows_equal_a_plain_loop(
    settings: CollectorConfig, batches: int, data: st.DataObject
) -> None:
    delivered = run(settings, data, batches).batches
    assert_equals_plain_loop(delivered, settings.num_envs, next_obs=settings.final_obs)
    assert len(delivered) == batches
    assert {batch.reward.shape for batch in delivered} == {(settings.batch_rollouts, settings.rollout_length)}


@few
@given(configs(endless=False), st.data())
def test_total_frames_gives_exactly_the_rollouts_it_rounds_up_to(
    settings: CollectorConfig, data: st.DataObject
) -> None:
    roles = run(settings, data, 10_000)
    rollouts, size = math.ceil(settings.total_frames / settings.rollout_length), settings.batch_rollouts
    full, rest = divmod(rollouts, size)
    assert [len(batch) for batch in roles.batches] == [size] * full + [rest] * (rest > 0)
    assert_equals_plain_loop(roles.batches, settings.num_envs, next_obs=settings.final_obs)
    assert sum(len(env.log) for env in roles.envs) == rollouts * settings.rollout_length, "stepped for nothing"


@few
@given(configs(sync=True, endless=False), st.data())
def test_sync_batches_are_rounds_of_all_envs_in_order(settings: CollectorConfig, data: st.DataObject) -> None:
    num_envs, length = settings.num_envs, settings.rollout_length
    begun = [0] * num_envs
    for batch in run(settings, data, 10_000).batches:
        assert envs_of(batch) == [row % num_envs for row in range(len(batch))]
        for row, env in enumerate(envs_of(batch)):
            assert batch.sequence[row].tolist() == list(range(begun[env], begun[env] + length))
            begun[env] += length


@few
@given(configs(sync=True), st.data())
def test_sync_envs_are_stepped_only_while_a_batch_is_asked_for(settings: CollectorConfig, data: st.DataObject) -> None:
    with in_process(settings) as roles:
        others = [role for role in roles.roles if role != "learner"]
        for _ in range(10):
            for role in others:
                roles.do(role)
        assert sum(len(env.log) for env in roles.envs) == 0
        for batches in (1, 2):
            roles.follow(data.draw(schedules(settings)), batches)
            for _ in range(10):
                for role in others:
                    roles.do(role)
            assert sum(len(env.log) for env in roles.envs) == batches * settings.frames_per_batch


@pytest.mark.parametrize("length", [1, 2, 5])
@given(data=st.data())
@settings(few, max_examples=12)
def test_views_in_place_equal_copies(length: int, data: st.DataObject) -> None:
    num_envs = data.draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "num_envs": num_envs,
        "frames_per_batch": num_envs * length,
        "sync": True,
        "capacity": data.draw(st.integers(2, 4)) * length,
        "total_frames": data.draw(st.integers(1, 40)),
    }
    views = run(config(**options, zero_copy=True), data, 10_000).batches
    copies = run(config(**options), data, 10_000).batches
    for one, two in zip(views, copies, strict=True):
        assert_same_batch(one, two)


@few
@given(LENGTHS, st.integers(1, 4), st.integers(1, 40), st.data())
def test_single_rollouts_in_place_equal_a_plain_loop(
    length: int, num_envs: int, rollouts: int, data: st.DataObject
) -> None:
    settings = config(
        num_envs=num_envs,
        num_workers=data.draw(st.integers(1, num_envs)),
        frames_per_batch=length,
        rollout_length=length,
        capacity=data.draw(st.integers(2, 4)) * length,
        total_frames=rollouts * length,
        zero_copy=True,
    )
    batches = run(settings, data, 10_000).batches
    assert [len(batch) for batch in batches] == [1] * rollouts
    assert_equals_plain_loop(batches, num_envs)


def test_views_stay_as_they_are_until_the_next_batch_is_asked_for() -> None:
    with in_process(config(num_envs=2, frames_per_batch=4, sync=True, zero_copy=True)) as roles:
        for _ in range(5):
            batch = None
            while batch is None:
                roles.do("worker 0")
                roles.do("inference")
                batch = roles.learner.poll()
            before = batch.obs.clone(), batch.action.clone(), batch.next_obs
            for _ in range(5):
                roles.do("worker 0")
                roles.do("inference")
            for now, then in zip((batch.obs, batch.action, batch.next_obs), before, strict=True):
                assert now.equal(then)
            roles.rings.view(roles.rings.fields["reward"][0])[:] = 7.0
            assert (batch.reward == 7.0).all(), "a copy, not a view"


def test_views_need_a_capacity_of_whole_rollouts() -> None:
    with (
        in_process(config(num_envs=1, frames_per_batch=2, capacity=5)) as roles,
        pytest.raises(ConfigError, match=r"capacity=5 is not a multiple of 2"),
    ):
        roles.learner._reader.view(range(1), 0)


def test_nothing_is_granted_before_the_first_batch_is_asked_for() -> None:
    with in_process(config(num_envs=3, frames_per_batch=6)) as roles:
        for _ in range(5):
            roles.do("worker 0")
            roles.do("inference")
        assert roles.cursors().tolist() == [[1] * 3, [0] * 3, [0] * 3, [0] * 3]


def test_after_the_last_frame_every_poll_says_so() -> None:
    with in_process(config(num_envs=2, frames_per_batch=4, total_frames=8)) as roles:
        roles.follow([], 10)
        for _ in range(3):
            with pytest.raises(ExhaustedError, match="total_frames"):
                roles.learner.poll()


# ---- fairness


def most_of_one_env(settings: CollectorConfig) -> int:
    return 2 * math.ceil(settings.batch_rollouts / settings.num_envs)


@st.composite
def races(draw: st.DrawFn, *, endless: bool) -> tuple[CollectorConfig, list[str]]:
    """Envs that are served as they come, some of which work far more often than the others."""
    num_envs = draw(st.integers(2, 4))
    length = draw(st.sampled_from([1, 2]))
    settings = config(
        num_envs=num_envs,
        num_workers=num_envs,
        frames_per_batch=draw(st.integers(1, 2 * num_envs + 1)) * length,
        rollout_length=length,
        capacity=draw(st.integers(length + 1, 8 * length)),
        total_frames=-1 if endless else draw(st.integers(1, 60)),
    )
    favourites = draw(st.sets(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs - 1))
    turn = [role for w in sorted(favourites) for role in (f"worker {w}", "inference")]
    return settings, [*turn, "learner"] * draw(st.integers(1, 30))


@few
@given(races(endless=True), st.integers(1, 6))
def test_no_env_fills_a_batch_while_others_can_deliver(race: tuple[CollectorConfig, list[str]], batches: int) -> None:
    settings, schedule = race
    with in_process(settings) as roles:
        for batch in roles.follow(schedule, batches):
            assert max(Counts(envs_of(batch)).values()) <= most_of_one_env(settings)
    assert_equals_plain_loop(roles.batches, settings.num_envs)


@few
@given(races(endless=False))
def test_only_when_all_others_are_done_does_one_env_fill_a_batch(race: tuple[CollectorConfig, list[str]]) -> None:
    settings, schedule = race
    with in_process(settings) as roles:
        batches = roles.follow(schedule, 10_000)
    assert_equals_plain_loop(batches, settings.num_envs)
    assert sum(map(len, batches)) == settings.total_rollouts
    for i, batch in enumerate(batches):
        counts = Counts(envs_of(batch))
        if max(counts.values()) > most_of_one_env(settings):
            under = {env for env in range(settings.num_envs) if counts[env] < most_of_one_env(settings)}
            assert not under & {env for later in batches[i + 1 :] for env in envs_of(later)}


def test_the_last_frames_are_delivered_though_only_one_env_has_them() -> None:
    """Env 0 rests until the others have used the budget up; then a whole batch is its, against the rule."""
    settings = config(
        num_envs=3, num_workers=3, frames_per_batch=3, rollout_length=1, capacity=4, total_frames=12, min_batch_size=1
    )
    with in_process(settings) as roles:
        for _ in range(20):
            for role in ("worker 1", "inference", "worker 2", "inference", "learner"):
                roles.do(role)
        roles.follow([], 10_000)
    assert [envs_of(batch) for batch in roles.batches][-1] == [0, 0, 0]
    assert_equals_plain_loop(roles.batches, 3)


@few
@given(configs(sync=False).filter(lambda c: c.batch_rollouts >= c.num_envs), st.data())
def test_a_finished_rollout_is_delivered_within_two_batches(settings: CollectorConfig, data: st.DataObject) -> None:
    schedule = data.draw(schedules(settings))
    due: dict[int, int] = {}
    with in_process(settings) as roles:
        for count in range(1, 8):
            roles.follow(schedule, count)
            for env in envs_of(roles.batches[-1]):
                due.pop(env, None)
            assert all(last > count for last in due.values()), due
            observed, _, released, _ = roles.cursors()
            for env in np.flatnonzero(observed > released + settings.rollout_length):
                due.setdefault(int(env), count + 2)


# ---- what the caller may ask for at any time


def ended(rows: dict[str, Any]) -> np.ndarray[Any, Any]:
    return rows["terminated"] | rows["truncated"]


@few
@given(configs(), st.data())
def test_reset_ends_each_episode_with_its_next_step_and_every_row_is_real(
    settings: CollectorConfig, data: st.DataObject
) -> None:
    turns = st.lists(st.sampled_from(["reset", "worker 0", "inference", "learner"]), max_size=10)
    schedule = data.draw(turns, "schedule")
    with in_process(settings) as roles:
        asked: list[set[int]] = [set() for _ in roles.envs]  # the steps that were to come next

        def ask() -> None:
            for env, observed in enumerate(roles.cursors()[0]):
                asked[env].add(max(0, int(observed) - 1))
            roles.state.reset_count += 1

        roles.roles["reset"] = ask
        roles.follow(schedule, 5)
        for env, made in enumerate(roles.envs):
            rows = rows_of(roles.batches, env, next_obs=settings.final_obs)
            n = len(rows["reward"])
            names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
            logged = dict(zip(names, zip(*made.log, strict=True), strict=True))
            for name in ("obs", "action", "terminated", *(["next_obs"] * settings.final_obs)):
                assert np.array_equal(rows[name], np.array(logged[name][:n])), name
            assert np.array_equal(rows["reward"], np.array(logged["reward"][:n], np.float32))
            forced = rows["truncated"] & ~np.array(logged["truncated"][:n], bool)
            assert set(np.flatnonzero(forced)) <= asked[env]
            for step in (each for each in asked[env] if each < n):
                assert ended(rows)[step] or rows["episode_start"][step]
            assert np.array_equal(rows["episode_start"][1:], ended(rows)[:-1])


@few
@given(configs(), st.data())
def test_a_pause_is_acknowledged_and_then_no_action_is_served(settings: CollectorConfig, data: st.DataObject) -> None:
    schedule = data.draw(schedules(settings))
    with in_process(settings) as roles:
        for batches in range(1, 4):
            roles.follow(schedule, batches)
            roles.state.pause_count += 1
            roles.do("inference")
            assert roles.state.pause_acknowledged == roles.state.pause_count
            acted = roles.cursors()[1]
            for _ in range(3):
                roles.everyone()
            assert (roles.cursors()[1] == acted).all()
            assert roles.server.patience_s() == math.inf
            roles.state.pause_count += 1
        roles.follow(schedule, len(roles.batches) + 1)
        assert_equals_plain_loop(roles.batches, settings.num_envs, next_obs=settings.final_obs)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("near", [2**31, 2**32])
def test_sequences_go_on_beyond_what_32_bits_hold(near: int, sync: bool) -> None:
    settings = config(num_envs=2, frames_per_batch=10, rollout_length=5, sync=sync)
    start = (near // 5 - 2) * 5
    with in_process(settings, first_sequence=start) as roles:
        roles.follow(["learner", "inference"], 8)
        assert roles.cursors().min() > near
        assert_equals_plain_loop(roles.batches, 2, first_sequence=start)


# ---- interrupts


@contextmanager
def interrupt_at(nth: int) -> Iterator[list[tuple[str, int]]]:
    """Raises KeyboardInterrupt before the n-th line that the learner's modules run; lists the lines."""
    files = {learner.__file__, grants.__file__, rollouts.__file__}
    lines: list[tuple[str, int]] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == nth:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def collect_interrupted(settings: CollectorConfig, nth: int) -> tuple[InProcess, list[tuple[str, int]]]:
    """Collects all frames, with an interrupt before the n-th line of the learner; returns its lines, too."""
    with in_process(settings) as roles:
        with interrupt_at(nth) as lines, suppress(KeyboardInterrupt):
            roles.follow([], 100)
        roles.follow([], 100)
    return roles, lines


@pytest.mark.parametrize(
    "options",
    [
        {"sync": False, "frames_per_batch": 6},
        {"sync": True, "frames_per_batch": 8},
        {"sync": True, "frames_per_batch": 4, "zero_copy": True},
        {"sync": False, "frames_per_batch": 2, "zero_copy": True},
    ],
)
def test_after_an_interrupt_anywhere_at_most_one_batch_is_missing(options: dict[str, Any]) -> None:
    """Ctrl-C may come at any line: whoever goes on gets no torn, repeated or made-up row, and no deadlock."""
    settings = config(num_envs=2, rollout_length=2, total_frames=8, **options)
    _, lines = collect_interrupted(settings, 0)
    first = {line: nth for nth, line in reversed(list(enumerate(lines, 1)))}
    last = {line: nth for nth, line in enumerate(lines, 1)}
    assert len(first) > 50
    for nth in sorted({*first.values(), *last.values()}):
        roles, _ = collect_interrupted(settings, nth)
        lost = 8 - sum(batch.num_frames for batch in roles.batches)
        assert lost in (0, settings.frames_per_batch, 8 % settings.frames_per_batch), lines[nth - 1]
        if lost:
            assert_a_batch_is_missing(roles)
        else:
            assert_equals_plain_loop(roles.batches, 2)


def assert_a_batch_is_missing(roles: InProcess) -> None:
    """Every row is the one that really happened, in order."""
    for env, made in enumerate(roles.envs):
        if roles.batches:
            rows = rows_of(roles.batches, env)
            assert (np.diff(rows["sequence"]) > 0).all()
            for name, column in (("obs", 0), ("action", 1), ("terminated", 3), ("truncated", 4), ("next_obs", 5)):
                happened = [made.log[each][column] for each in rows["sequence"]]
                assert np.array_equal(rows[name], np.array(happened).reshape(rows[name].shape)), name
