"""The numbers of a run: what is derived, and what is refused with a text that says what would work."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmcollect import config
from shmcollect.config import CollectorConfig, check_duration, usable_cores
from shmcollect.errors import ConfigError


def build(**kwargs: Any) -> CollectorConfig:
    return CollectorConfig.build(**{"num_envs": 4, "frames_per_batch": 64, "num_workers": 1, **kwargs})


# ---- what is derived


@given(st.integers(1, 100), st.integers(1, 3000))
def test_t_defaults_to_the_largest_divisor_that_gives_every_env_a_rollout(num_envs: int, frames: int) -> None:
    made = build(num_envs=num_envs, frames_per_batch=frames)
    length = made.rollout_length
    assert frames % length == 0
    assert length <= max(1, frames // num_envs)
    assert not [t for t in range(length + 1, frames // num_envs + 1) if frames % t == 0]
    assert made.batch_rollouts == frames // length
    assert made.batch_rollouts >= num_envs or length == 1


@given(
    num_envs=st.integers(1, 20),
    length=st.integers(1, 20),
    k=st.integers(1, 5),
    rest=st.integers(0, 19),
    sync=st.booleans(),
)
def test_the_default_ring_has_room_for_what_is_made_meanwhile(
    num_envs: int, length: int, k: int, rest: int, sync: bool
) -> None:
    rollouts = k * num_envs if sync else (k - 1) * num_envs + 1 + rest % num_envs
    made = build(num_envs=num_envs, frames_per_batch=rollouts * length, rollout_length=length, sync=sync)
    assert made.capacity % length == 0
    assert made.capacity >= max(2 * length, length + 1)
    assert made.capacity == ((k + 1) * length if sync else 2 * k * length)
    assert made.rollouts_per_env == (k if sync else 0)


@given(st.integers(1, 10_000), st.integers(1, 50))
def test_total_frames_is_rounded_up_to_whole_rollouts(total: int, length: int) -> None:
    made = build(frames_per_batch=4 * length, rollout_length=length, total_frames=total)
    assert made.total_rollouts is not None
    assert 0 <= made.total_rollouts * length - total < length
    assert build().total_rollouts is None


@given(st.integers(1, 200), st.data())
def test_envs_are_dealt_out_evenly(num_envs: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, num_envs))
    counts = build(num_envs=num_envs, num_workers=workers).worker_envs
    assert len(counts) == workers and sum(counts) == num_envs
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1


def test_workers_default_to_one_less_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, num_envs, expected in [(1, 4, 1), (2, 4, 1), (4, 4, 3), (64, 4, 4), (4, 1, 1)]:
        monkeypatch.setattr(config, "usable_cores", lambda cores=cores: cores)
        assert build(num_envs=num_envs, num_workers=None).num_workers == expected


def test_a_batch_of_inference_defaults_to_all_envs() -> None:
    made = build()
    assert (made.min_batch_size, made.max_batch_size, made.server_timeout) == (1, 4, 0.01)
    assert (made.sync, made.zero_copy, made.final_obs, made.total_frames) == (False, False, True, -1)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_envs": 1, "frames_per_batch": 1},
        {"num_envs": 1024, "frames_per_batch": 1024, "num_workers": 7},
        {"rollout_length": 16, "capacity": 17},
        {"rollout_length": 1, "capacity": 2},
        {"rollout_length": 64},  # one rollout a batch, from whichever env is first
        {"sync": True, "zero_copy": True},
        {"sync": True, "zero_copy": True, "capacity": 48},
        {"min_batch_size": 4, "max_batch_size": 4, "server_timeout": None},
        {"server_timeout": 0},
        {"server_timeout": math.inf, "startup_timeout": math.inf},
        {"total_frames": 1},
        {"num_workers": 4, "workers_per_process": 3},
        {"workers_per_process": 1000},
    ],
)
def test_extremes_that_work_are_taken(kwargs: dict[str, Any]) -> None:
    made = build(**kwargs)
    assert all(getattr(made, name) == value for name, value in kwargs.items())


def test_workers_share_processes_in_order() -> None:
    shared = build(num_envs=8, num_workers=7, workers_per_process=3)
    assert shared.processes == (range(3), range(3, 6), range(6, 7))
    assert build(num_envs=8, num_workers=3).processes == (range(1), range(1, 2), range(2, 3))


# ---- what is refused


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"num_envs": 0}, r"num_envs=0: expected an integer >= 1"),
        ({"num_envs": -3}, r"num_envs=-3: expected an integer >= 1"),
        ({"num_envs": 2.0}, r"num_envs=2\.0: expected an integer"),
        ({"num_envs": True}, r"num_envs=True: expected an integer"),
        ({"num_envs": "4"}, r"num_envs='4': expected an integer"),
        ({"frames_per_batch": 0}, r"frames_per_batch=0: expected an integer >= 1"),
        ({"frames_per_batch": None}, r"frames_per_batch=None"),
        ({"rollout_length": 0}, r"rollout_length=0: expected an integer >= 1"),
        ({"rollout_length": 10}, r"frames_per_batch=64 is not a multiple of rollout_length=10; nearest: 60 or 70"),
        ({"rollout_length": 100}, r"not a multiple of rollout_length=100; nearest: 100$"),
        (
            {"sync": True, "frames_per_batch": 66, "rollout_length": 3},
            r"num_envs \* rollout_length = 4 \* 3; nearest: 60 or 72",
        ),
        ({"sync": True, "frames_per_batch": 2}, r"with sync=True .* = 4 \* 1; nearest: 4$"),
        ({"total_frames": 0}, r"total_frames=0: expected an integer >= 1, or -1 for no end"),
        ({"total_frames": -2}, r"total_frames=-2"),
        ({"total_frames": 1e6}, r"total_frames=1000000\.0: expected an integer"),
        ({"total_frames": None}, r"total_frames=None"),
        ({"num_workers": 0}, r"num_workers=0: expected an integer >= 1"),
        ({"num_workers": 5}, r"num_workers=5 exceeds num_envs=4"),
        ({"capacity": 16}, r"capacity=16: a rollout of 16 steps needs the observation after it, so at least 17"),
        ({"capacity": 0}, r"capacity=0: expected an integer"),
        ({"capacity": 32.0}, r"capacity=32\.0: expected an integer"),
        ({"min_batch_size": 0}, r"min_batch_size=0: expected an integer >= 1"),
        ({"max_batch_size": 0}, r"max_batch_size=0: expected an integer >= 1"),
        ({"min_batch_size": 5}, r"min_batch_size=5, max_batch_size=4, num_envs=4: expected 1 <= min_batch_size"),
        ({"min_batch_size": 3, "max_batch_size": 2}, r"min_batch_size=3, max_batch_size=2"),
        ({"max_batch_size": 5}, r"max_batch_size=5, num_envs=4"),
        ({"server_timeout": -0.1}, r"server_timeout=-0\.1: expected seconds >= 0, or None to wait for min_batch_size"),
        ({"server_timeout": math.nan}, r"server_timeout=nan"),
        ({"server_timeout": "1"}, r"server_timeout='1'"),
        ({"server_timeout": True}, r"server_timeout=True"),
        ({"startup_timeout": None}, r"startup_timeout=None: expected seconds >= 0$"),
        ({"startup_timeout": -1}, r"startup_timeout=-1"),
        ({"zero_copy": True}, r"else one rollout \(frames_per_batch = rollout_length\).*got sync=False"),
        ({"zero_copy": True, "sync": True, "rollout_length": 8}, r"one rollout per env in a batch.*rollout_length=8"),
        ({"zero_copy": True, "sync": True, "capacity": 33}, r"a multiple of rollout_length.*capacity=33"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        build(**kwargs)
    assert isinstance(caught.value, ValueError)


@given(st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=200)
def test_the_nearest_values_it_names_do_work(frames: int, length: int) -> None:
    try:
        build(frames_per_batch=frames, rollout_length=length)
    except ConfigError as error:
        nearest = [int(each) for each in str(error).partition("nearest: ")[2].split(" or ")]
        assert nearest and all(build(frames_per_batch=each, rollout_length=length) for each in nearest)
    else:
        assert frames % length == 0


def test_numpy_numbers_become_pythons() -> None:
    given = {"num_envs": 4, "frames_per_batch": 64, "rollout_length": 16, "num_workers": 2, "capacity": 33}
    given |= {"total_frames": 100, "min_batch_size": 2, "max_batch_size": 3}
    made = build(**{name: np.int16(value) for name, value in given.items()}, server_timeout=np.float64(0.5))
    assert made == build(**given, server_timeout=0.5)
    assert all(type(getattr(made, name)) is int for name in given)


@pytest.mark.parametrize("good", [0, 1, 0.5, math.inf, 10**30])
def test_durations_are_seconds_from_zero_on(good: float) -> None:
    check_duration("timeout", good)


@pytest.mark.parametrize("bad", [None, -1, math.nan, "1", True, [1], -math.inf])
def test_other_durations_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout=.*: expected seconds >= 0$"):
        check_duration("timeout", bad)


# ---- cores


def fake_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, quotas: dict[str, str]) -> None:
    """Another /proc/self/cgroup and /sys/fs/cgroup."""
    root = tmp_path / "sys/fs/cgroup"
    for folder, quota in quotas.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "cpu.max").write_text(quota)
    (tmp_path / "cgroup").write_text(f"12:cpuset:/else\n0::{group}\n")
    places = {"/sys/fs/cgroup": root, "/proc/self/cgroup": tmp_path / "cgroup"}
    monkeypatch.setattr(config, "Path", lambda path: places[path])


@pytest.mark.parametrize(
    ("quotas", "affinity", "expected"),
    [
        ({"a/b": "max 100000\n"}, 8, 8),
        ({"a/b": "250000 100000\n"}, 8, 3),
        ({"a/b": "50000 100000\n"}, 8, 1),
        ({"a/b": "max 100000\n", "a": "400000 100000\n"}, 8, 4),
        ({"a/b": "600000 100000\n", "a": "400000 100000\n", "": "200000 100000\n"}, 8, 2),
        ({"a/b": "600000 100000\n"}, 2, 2),
        ({}, 5, 5),
    ],
)
def test_usable_cores_respect_affinity_and_every_cgroup_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quotas: dict[str, str], affinity: int, expected: int
) -> None:
    fake_cgroups(tmp_path, monkeypatch, "/a/b", quotas)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    assert usable_cores() == expected


def test_usable_cores_are_those_of_this_machine() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
