"""The roles of a run in one process and one thread, stepped by hand in whatever order a test likes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import plain_loop
import torch
from plain_loop import Case, act_counter

from shmcollect import _native
from shmcollect.batch import Batch
from shmcollect.config import CollectorConfig
from shmcollect.counters import counter_names
from shmcollect.env_worker import EnvWorker, JoinMessage, WorkerPayload
from shmcollect.envs import action_tree, observation_tree
from shmcollect.errors import ExhaustedError
from shmcollect.inference_server import InferencePayload, InferenceServer
from shmcollect.layout import Field, Layout, slot_fields
from shmcollect.learner import Learner, make_learner
from shmcollect.policy import PolicyCaller
from shmcollect.ring import ACTED, GRANTED, OBSERVED, RELEASED, Rings
from shmcollect.rollouts import RolloutReader
from shmcollect.run_state import STOPPING, RunState
from shmcollect.segment import Segment, new_name

REFERENCE_STEPS = 400  # of the plain loop that rows are compared with


class Counter(plain_loop.Counter):
    """The counter env, different for every number; remembers what really happened."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.steps, self.episodes = 1000 * number, number - 1
        self.log: list[tuple[Any, ...]] = []  # obs, action, reward, terminated, truncated, next obs
        self.resets = self.closes = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        self._last, info = super().reset(seed=seed)
        return self._last, info

    def step(self, action):
        following, reward, terminated, truncated, info = super().step(action)
        self.log.append((self._last, action, reward, terminated, truncated, following))
        self._last = following
        return following, reward, terminated, truncated, info

    def close(self):
        self.closes += 1


def act(obs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A policy whose rows do not depend on the batch they are in."""
    return act_counter(obs), {"steps": obs[:, 0], "half": obs[:, 1].double() / 2}


def config(**kwargs: Any) -> CollectorConfig:
    """A config without a timeout, so that nothing depends on the clock."""
    return CollectorConfig.build(**{"server_timeout": None, "num_workers": 1, **kwargs})


@dataclass
class InProcess:
    """A run without processes.

    Attributes:
        roles: What makes each role try to work, by name: ``"worker 0"``, ..., ``"inference"``, ``"learner"``.
        batches: What the learner has delivered, with everything it may still share with the rings copied out.
    """

    config: CollectorConfig
    segment: Segment
    state: RunState
    rings: Rings
    envs: list[Any]
    workers: list[EnvWorker]
    server: InferenceServer
    learner: Learner
    roles: dict[str, Callable[[], None]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    exhausted: bool = False
    is_waiting: bool = False  # the last poll gave no batch

    def __post_init__(self) -> None:
        for w, worker in enumerate(self.workers):
            self.roles[f"worker {w}"] = self._starting(w, worker)
        self.roles["inference"] = lambda: self.server.do_work() and None
        self.roles["learner"] = self.poll

    def _starting(self, w: int, worker: EnvWorker) -> Callable[[], None]:
        steps = itertools.count()

        def work() -> None:
            if next(steps):
                worker.do_work()
            else:
                self.state.mark_running(w, True)
                worker.take_over()

        return work

    def poll(self) -> None:
        could, before = self.is_waiting and self.learner.can_go_on(), self.cursors()
        self.is_waiting = False
        try:
            batch = self.learner.poll()
        except ExhaustedError:
            self.exhausted = True
            return
        self.is_waiting = batch is None
        if batch is None:
            assert not self.learner.can_go_on(), "a poll left something undone, or looking again would be in vain"
            assert not could or (self.cursors() != before).any(), "looked as if there was something to do"
        else:
            self.batches.append(copied(batch) if self.config.zero_copy else batch)

    def cursors(self) -> np.ndarray[Any, Any]:
        """observed, acted, released, granted: int64[4, num_envs]."""
        return np.stack([self.rings.cursors(which) for which in (OBSERVED, ACTED, RELEASED, GRANTED)])

    def do(self, role: str) -> None:
        """Lets a role work once and checks what must hold at any time."""
        before = self.cursors()
        self.roles[role]()
        now = self.cursors()
        observed, acted, released, granted = now
        assert (now >= before).all(), "a cursor went back"
        assert (granted <= released + self.config.capacity - 1).all(), "granted beyond the ring"
        assert (acted <= granted).all(), "acted without a grant"
        assert ((acted <= observed) & (observed <= acted + 1)).all()
        assert ((released == before[2]) | (released < observed)).all(), "released before it was complete"

    def everyone(self) -> bool:
        """Lets every role work once, the learner last; says whether that changed anything."""
        before, batches, exhausted = self.cursors(), len(self.batches), self.exhausted
        for role in self.roles:
            self.do(role)
        if self.exhausted:
            return not exhausted
        changed = bool((self.cursors() != before).any())
        return changed or self.learner.granted_news or len(self.batches) > batches

    def follow(self, schedule: Sequence[str], batches: int) -> list[Batch]:
        """Works by a schedule, over and over, until there are so many batches or all frames have been delivered.

        Whoever the schedule leaves out works once a round, so nothing can stand still unless it is stuck.
        """

        def wanted() -> bool:
            return len(self.batches) < batches and not self.exhausted

        while wanted():
            for role in schedule:
                if wanted():
                    self.do(role)
            if wanted():
                assert self.everyone(), f"deadlock after {len(self.batches)} batches: {self.cursors()}"
        return self.batches


@contextmanager
def in_process(
    config: CollectorConfig,
    policy: Callable[[Any], Any] = act,
    envs: Sequence[Any] | None = None,
    *,
    first_sequence: int = 0,
) -> Iterator[InProcess]:
    """A run of this config in one process, over numbered counters unless other envs are given.

    ``first_sequence``, a multiple of the rollouts' length, is where all cursors start.
    """
    made = [Counter(i) for i in range(config.num_envs)] if envs is None else list(envs)
    spaces = made[0].observation_space, made[0].action_space
    obs, action = observation_tree(spaces[0]), action_tree(spaces[1])
    caller = PolicyCaller(policy, obs, action, None)
    with torch.inference_mode():
        extras = caller.probe()
    fields = slot_fields(
        [Field("obs", leaf.path, leaf.dtype, leaf.shape) for leaf in obs.leaves],
        [Field("action", leaf.path, leaf.dtype, leaf.shape) for leaf in action.leaves],
        [Field("extras", (each.name,), np.dtype(each.dtype), each.shape) for each in extras],
        final_obs=config.final_obs,
    )
    counters = counter_names(config.num_workers)
    layout = Layout(config.worker_envs, config.capacity, config.rollout_length, fields, counters, {})
    segment = Segment.create(new_name(), layout)
    try:
        for offset in layout.cursors[: GRANTED + 1].ravel().tolist():
            _native.store(segment.buffer, offset, first_sequence)
        message = JoinMessage(
            name=segment.name,
            run_id=segment.run_id,
            rows_worth_telling=1,
            observation_space=spaces[0],
            action_space=spaces[1],
        )
        workers = []
        for w, count in enumerate(config.worker_envs):
            first = layout.first_env(w)
            payload = WorkerPayload(w, first, count, range(first, first + count), 0, ())
            workers.append(EnvWorker(payload, made[first : first + count], segment, message, RunState(segment)))
        server = InferenceServer(
            caller,
            segment,
            InferencePayload(None, 0, 1, config.min_batch_size, config.max_batch_size, config.server_timeout),
            RunState(segment),
        )
        rings = Rings(segment)
        learner = make_learner(RolloutReader(rings, obs, action), config)
        state = RunState(segment)
        yield InProcess(config, segment, state, rings, made, workers, server, learner)
        state.end(STOPPING)
    finally:
        segment.unlink()
        segment.close()


@contextmanager
def small_segment(
    *fields: Field, worker_envs: tuple[int, ...] = (2, 1), capacity: int = 4, length: int = 2
) -> Iterator[Segment]:
    """A segment nobody works on, with these fields beside those that every slot has."""
    counters = counter_names(len(worker_envs))
    kinds = [[each for each in fields if each.kind == kind] for kind in ("obs", "action", "extras")]
    layout = Layout(worker_envs, capacity, length, slot_fields(*kinds, final_obs=True), counters, {})
    segment = Segment.create(new_name(), layout)
    try:
        yield segment
    finally:
        segment.unlink()
        segment.close()


def copied(value: Any) -> Any:
    """A batch, or a part of one, that shares no memory with the original."""
    if isinstance(value, Batch):
        return Batch(**{name: copied(each) for name, each in vars(value).items()})
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: copied(each) for key, each in value.items()} if isinstance(value, dict) else value


# ---- comparing with a plain loop


@cache
def reference(number: int) -> dict[str, Any]:
    """What a plain loop over one numbered counter makes: arrays [REFERENCE_STEPS, ...], and its episodes."""
    rows = plain_loop.plain_loop(Case(lambda: Counter(number), act), seed=number, steps=REFERENCE_STEPS)
    names = ("obs", "action", "terminated", "truncated", "episode_start", "next_obs")
    arrays: dict[str, Any] = {name: np.stack(getattr(rows, name)) for name in names}
    arrays["reward"] = np.array(rows.reward, np.float32)
    for name in rows.extras[0]:
        arrays[name] = np.stack([each[name] for each in rows.extras])
    arrays["episodes"] = rows.episodes
    return arrays


def rows_of(batches: Sequence[Batch], env: int, *, next_obs: bool = True) -> dict[str, Any]:
    """The delivered transitions of one env in order of delivery: arrays [n, ...], and its episodes."""
    names = ("obs", "action", "reward", "terminated", "truncated", "episode_start", "sequence", "policy_version")
    parts: dict[str, list[Any]] = {name: [] for name in (*names, "steps", "half", *(["next_obs"] * next_obs))}
    for batch in batches:
        mine = batch.env_index == env
        values = {name: getattr(batch, name) for name in parts if name not in batch.extras} | batch.extras
        for name, part in parts.items():
            part.append(values[name][mine].flatten(0, 1).numpy())
    arrays: dict[str, Any] = {name: np.concatenate(each) for name, each in parts.items()}
    episodes = [each for batch in batches for each in batch.episodes if each.env_index == env]
    arrays["episodes"] = [(each.episode_return, each.length) for each in episodes]
    return arrays


def assert_equals_plain_loop(
    batches: Sequence[Batch], num_envs: int, *, next_obs: bool = True, first_sequence: int = 0
) -> None:
    """Checks that every env's rows are those of a plain loop, in order and without a gap, bit for bit."""
    assert all(not batch.interrupted.any() for batch in batches)
    for env in range(num_envs):
        got, expected = rows_of(batches, env, next_obs=next_obs), reference(env)
        n = len(got["reward"])
        assert n <= REFERENCE_STEPS
        assert got.pop("sequence").tolist() == list(range(first_sequence, first_sequence + n)), (
            f"env {env}: lost, repeated or out of order"
        )
        assert not got.pop("policy_version").any()
        ended = int((expected["terminated"][:n] | expected["truncated"][:n]).sum())
        assert got.pop("episodes") == expected["episodes"][:ended]
        for name, mine in got.items():
            theirs = expected[name][:n]
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, f"{name} of env {env}"
            assert mine.tobytes() == theirs.tobytes(), f"{name} of env {env}: {mine} != {theirs}"


def envs_of(batch: Batch) -> list[int]:
    """The env of every rollout of a batch."""
    return [int(env) for env in batch.env_index]


def assert_same_batch(one: Batch, two: Batch) -> None:
    """Checks that two batches are equal but for the time episodes took."""
    mine, theirs = vars(one), vars(two)
    assert [each[:3] for each in mine["episodes"]] == [each[:3] for each in theirs["episodes"]]
    for name in mine.keys() - {"episodes", "final_obs"}:
        left, right = (each[name] if isinstance(each[name], dict) else {"": each[name]} for each in (mine, theirs))
        for key in left | right:
            assert torch.equal(left[key], right[key]), name
    assert torch.equal(one.next_obs, two.next_obs)
