"""EnvWorker: steps K environments, each whenever it has an action. Imports no torch.

action in slot t -> env.step -> outcome into slot t, next observation into slot t + 1 -> ``observed``
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from shmcollect.control import ChildSession
from shmcollect.counters import Counters
from shmcollect.envs import Env, action_tree, close_envs, distinct_spaces, make_envs, observation_tree
from shmcollect.errors import RoleFailure, SpecError
from shmcollect.ring import OBSERVED, Rings
from shmcollect.run_state import RunState
from shmcollect.runner import run
from shmcollect.segment import Segment

# Waking somebody for every single row would cost more than the row. A sweep over many envs tells the others at its
# end, and on the way once it has made its share of the rows inference waits for, but not more often than this ...
_NOTIFY_NS = 100_000
# ... and anyway after this long: how long the oldest row may wait is measured from when inference hears of it.
_NOTIFY_ANYWAY_NS = 1_000_000


@dataclass(frozen=True)
class WorkerPayload:
    """What a worker needs to make its envs.

    Attributes:
        index: The worker's number.
        first_env: Index of its first env.
        factories: One per env: a callable, or an ``EnvSpec`` for `gymnasium.make`.
        env_seeds: Seed of each env's first reset.
        global_seed: Seed of the process's global generators.
        drop_obs: Dict entries to leave out.
    """

    index: int
    first_env: int
    factories: Sequence[Any]
    env_seeds: Sequence[int]
    global_seed: int
    drop_obs: tuple[Any, ...]


@dataclass(frozen=True)
class JoinMessage:
    """What a worker needs to join the run once its segment exists.

    Attributes:
        name: The run's name.
        run_id: The run's id.
        observation_space: That of env 0.
        action_space: That of env 0.
        rows_worth_telling: The worker's share of the rows inference waits for.
    """

    name: str
    run_id: int
    observation_space: Any
    action_space: Any
    rows_worth_telling: int = 1


def main(session: ChildSession, payload: WorkerPayload) -> None:
    """The life of a worker process."""
    seed_globals(payload.global_seed)
    envs = make_envs(payload.factories, payload.first_env)
    try:
        session.report(distinct_spaces(envs, payload.first_env))
        message: JoinMessage = session.receive()
        segment = session.attach(message.name, message.run_id)
        worker = EnvWorker(payload, envs, segment, message)
        session.report("joined")
        worker.run()
    finally:
        for warning in close_envs(envs, payload.first_env):
            session.warn(warning)


def seed_globals(seed: int) -> None:
    """Seeds the generators that libraries share in a process; torch's only if somebody has imported it."""
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


class EnvWorker:
    """Steps its envs; see the module.

    Args:
        payload: Which envs these are.
        envs: The environments, in order.
        segment: The run's segment, mapped for writing.
        message: The spaces all envs share.
    """

    def __init__(self, payload: WorkerPayload, envs: Sequence[Env], segment: Segment, message: JoinMessage) -> None:
        self._index = payload.index
        self._first = payload.first_env
        self._envs = envs
        self._seeds = payload.env_seeds
        self._rows_worth_telling = message.rows_worth_telling
        self._global_seed = payload.global_seed
        self._torch_seeded = False
        self._state = RunState(segment)
        self._inference_bell = self._state.bells["inference"]
        self._learner_bell = self._state.bells["learner"]
        self.counters = Counters(segment, f"worker {payload.index}")
        self._rings = Rings(segment)
        self._native = self._rings.native
        self._capacity = segment.layout.capacity
        self._rollout_length = segment.layout.rollout_length
        self._obs = observation_tree(message.observation_space, payload.drop_obs)
        # Leaves whose values have a range are looked at in Python; the others only if they don't fit exactly.
        self._ranged = tuple(i for i, leaf in enumerate(self._obs.leaves) if leaf.low is not None)
        fields = self._rings.fields
        self._final_fields = fields["final_obs"]
        self._episode_views = [
            self._rings.view(fields[kind][0]) for kind in ("episode_return", "episode_length", "episode_duration")
        ]
        actions = [self._rings.view(i) for i in fields["action"]]
        self._read_action = action_tree(message.action_space).reader(actions)
        self._sequences = [self._native.cursor(OBSERVED, self._first + k) - 1 for k in range(len(envs))]
        self._returns = [0.0] * len(envs)
        self._lengths = [0] * len(envs)
        self._starts_ns = [0] * len(envs)
        self._reset_count = self._state.reset_count
        self._resets_seen = [self._reset_count] * len(envs)

    def run(self) -> None:
        """Publishes the first observations, then works until the run ends."""
        self._state.mark_running(self._index, True)
        try:
            self.reset_all()
            run(self, self._state.bells[f"worker {self._index}"], self._state)
        finally:
            self._state.mark_running(self._index, False)

    def reset_all(self) -> None:
        """Resets every env with its seed and publishes what it observes."""
        for k, seed in enumerate(self._seeds):
            try:
                self._publish(k, self._reset(k, seed), episode_start=True)
            except BaseException as error:
                raise RoleFailure(env_index=self._first + k, step=0, during="reset") from error
            self._inference_bell.notify()

    def do_work(self) -> int:
        """Steps every env that has an action; returns how many."""
        acted = self._native.acted(self._first, len(self._envs))
        if not acted:
            return 0
        self._reset_count = self._state.reset_count
        rollout_ended = False
        rows, notified_ns = 0, time.monotonic_ns()
        for env in acted:
            k = env - self._first
            try:
                self._step(k)
            except RoleFailure:
                raise
            except BaseException as error:
                raise RoleFailure(env_index=env, step=self._sequences[k], during="step") from error
            rollout_ended |= self._sequences[k] % self._rollout_length == 0
            rows += 1
            since_ns = time.monotonic_ns() - notified_ns
            if since_ns > _NOTIFY_NS and (rows >= self._rows_worth_telling or since_ns > _NOTIFY_ANYWAY_NS):
                self._notify(rollout_ended)
                rollout_ended = False
                rows, notified_ns = 0, notified_ns + since_ns
                if not self._state.is_running():
                    break
        self._notify(rollout_ended)
        self.counters.values["steps"] += len(acted)
        return len(acted)

    def patience_s(self) -> float:
        """Nothing waits for a worker that has no action."""
        return float("inf")

    def _notify(self, rollout_ended: bool) -> None:
        self._inference_bell.notify()
        if rollout_ended:
            self._learner_bell.notify()

    def _step(self, k: int) -> None:
        env, sequence = self._first + k, self._sequences[k]
        result = self._envs[k].step(self._read_action(env, sequence % self._capacity))
        if not isinstance(result, tuple) or len(result) != 5:
            raise SpecError(f"step() returned {_shape_of(result)}; expected (obs, reward, terminated, truncated, info)")
        obs, reward, terminated, truncated, info = result
        reward = reward if type(reward) is float else _reward(reward)
        terminated = terminated if type(terminated) is bool else _flag(terminated, "terminated")
        truncated = truncated if type(truncated) is bool else _flag(truncated, "truncated")
        if self._resets_seen[k] != self._reset_count:
            truncated = truncated or self._lengths[k] > 0  # an episode that is to end, unless it has just begun
            self._resets_seen[k] = self._reset_count
        self._returns[k] += reward
        self._lengths[k] += 1
        ended = terminated or truncated
        if ended:
            obs = self._end_episode(k, obs, info)
        self._native.complete(env, sequence, reward, terminated, truncated, False)
        self._publish(k, obs, episode_start=ended)

    def _end_episode(self, k: int, obs: Any, info: Any) -> Any:
        """Keeps the final observation and the episode's record; returns the first observation of the next one."""
        env, sequence = self._first + k, self._sequences[k]
        if self._final_fields:  # before reset(): envs reuse their buffers
            for i, (field, value) in enumerate(zip(self._final_fields, self._leaves(obs), strict=True)):
                if not self._native.write(field, env, sequence, value):
                    fit = self._native.write(field, env, sequence, self._obs.coerce(i, value))
                    assert fit, f"coerce() left {self._obs.describe(i)} unfit"
        record = (self._returns[k], self._lengths[k], (time.monotonic_ns() - self._starts_ns[k]) / 1e9)
        record = _recorded_episode(info) or record
        for view, number in zip(self._episode_views, record, strict=True):
            view[env, sequence % self._capacity] = number
        self.counters.values["episodes"] += 1
        try:
            return self._reset(k, None)
        except BaseException as error:
            raise RoleFailure(env_index=env, step=sequence + 1, during="reset") from error

    def _reset(self, k: int, seed: int | None) -> Any:
        result = self._envs[k].reset() if seed is None else self._envs[k].reset(seed=seed)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise SpecError(f"reset() returned {_shape_of(result)}; expected (obs, info)")
        if not self._torch_seeded and "torch" in sys.modules:  # the env imported it late
            sys.modules["torch"].manual_seed(self._global_seed)
            self._torch_seeded = True
        self._returns[k], self._lengths[k], self._starts_ns[k] = 0.0, 0, time.monotonic_ns()
        self.counters.values["resets"] += 1
        return result[0]

    def _publish(self, k: int, obs: Any, *, episode_start: bool) -> None:
        env, sequence = self._first + k, self._sequences[k] + 1
        leaves = self._leaves(obs)
        if self._native.observe(env, sequence, leaves, episode_start) >= 0:
            exact = tuple(self._obs.coerce(i, value) for i, value in enumerate(leaves))
            unfit = self._native.observe(env, sequence, exact, episode_start)
            assert unfit < 0, f"coerce() left {self._obs.describe(unfit)} unfit"
        self._sequences[k] = sequence

    def _leaves(self, obs: Any) -> tuple[Any, ...]:
        leaves = self._obs.flatten(obs)
        if not self._ranged:
            return leaves
        checked = list(leaves)
        for i in self._ranged:
            checked[i] = self._obs.coerce(i, checked[i])
        return tuple(checked)


def _reward(value: object) -> float:
    """A reward as a float: any real number, or an array with one element."""
    if isinstance(value, Real):
        return float(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise SpecError(f"reward: expected a number or a numeric array of one element, got {_shape_of(value)}")
    return float(array.item())


def _flag(value: object, name: str) -> bool:
    """A flag as a bool: a bool, 0 or 1, or a boolean array with one element."""
    if isinstance(value, np.bool_) or (isinstance(value, Integral) and value in (0, 1)):
        return bool(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind != "b":
        raise SpecError(f"{name}: expected a bool, got {_shape_of(value)}")
    return bool(array.item())


def _recorded_episode(info: Mapping[str, Any]) -> tuple[float, int, float] | None:
    """Return, length and duration as ``gymnasium.wrappers.RecordEpisodeStatistics`` saw them, if the env has it."""
    episode = info.get("episode")
    if not (isinstance(episode, Mapping) and {"r", "l", "t"} <= episode.keys()):
        return None
    return _reward(episode["r"]), int(_reward(episode["l"])), _reward(episode["t"])


def _shape_of(value: object) -> str:
    """What a value is, for an error text: a type and size rather than a page of numbers."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
