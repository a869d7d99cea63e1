"""EnvStepper: one environment, stepped into its ring; the hot path of an env worker. Imports no torch.

action in slot t -> env.step -> outcome into slot t, next observation into slot t + 1 -> ``observed``
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np

from shmcollect.activity import IDLE, RESETTING, STEPPING, Activity
from shmcollect.envs import Env
from shmcollect.errors import RoleFailure, SpecError
from shmcollect.ring import OBSERVED, Rings
from shmcollect.spec import Tree


class SlotWriter:
    """How observations, actions and episodes lie in the slots; shared by the envs of a worker.

    Args:
        rings: The rings, mapped for writing.
        obs: The observation's tree.
        action: The action's tree.
        activity: Where to say what each env is doing.
        announce_steps: Whether to say so of steps too.

    Attributes:
        episodes: Episodes that have been kept.
    """

    def __init__(
        self, rings: Rings, obs: Tree, action: Tree, activity: Activity, *, announce_steps: bool = False
    ) -> None:
        self.native = rings.native
        self.activity = activity
        self.announce_steps = announce_steps
        self.episodes = 0
        self.capacity = rings.capacity
        self.is_bare = obs.leaves[0].path == () and obs.leaves[0].low is None
        self._action = action
        self._action_views = [rings.view(field) for field in rings.fields["action"]]
        self._obs = obs
        self._obs_views = [rings.view(field) for field in rings.fields["obs"]]
        self._final_fields = rings.fields["final_obs"]
        (self._episode_field,) = rings.fields["episode"]
        # Leaves whose values have a range are looked at in Python; the others only if they do not fit exactly.
        self._ranged = [i for i, leaf in enumerate(obs.leaves) if leaf.low is not None]
        self.leaves = self._checked_leaves if self._ranged else obs.flatten

    def _checked_leaves(self, obs: Any) -> tuple[Any, ...]:
        leaves = list(self._obs.flatten(obs))
        for i in self._ranged:
            leaves[i] = self._obs.coerce(i, leaves[i])
        return tuple(leaves)

    def actions_of(self, env: int) -> Any:
        """The env's actions, to be indexed by slot; each is the env's own copy."""
        if self._action.leaves[0].path == () and self._action.leaves[0].is_scalar:
            return self._action_views[0][env]  # indexing makes a NumPy scalar, without a call
        return _Actions(self._action.reader(self._action_views), env)

    def publish(self, write: Callable[[tuple[Any, ...]], int], leaves: tuple[Any, ...]) -> None:
        """Publishes an observation by ``write``, which says what does not fit exactly.

        Raises:
            SpecError: It does not fit the space.
        """
        if write(leaves) >= 0:
            unfit = write(tuple(self._obs.coerce(i, leaf) for i, leaf in enumerate(leaves)))
            if unfit >= 0:
                raise SpecError(f"{self._obs.describe(unfit)}: cannot be stored, got {_shape_of(leaves[unfit])}")

    def keep_episode(self, env: int, sequence: int, obs: Any, record: tuple[float, int, float]) -> None:
        """Keeps what ends with this step: the final observation, and return, length and seconds of the episode."""
        if self._final_fields:
            for i, (field, leaf) in enumerate(zip(self._final_fields, self.leaves(obs), strict=True)):
                write = partial(self.native.write, field, env, sequence)
                if not write(leaf) and not write(self._obs.coerce(i, leaf)):
                    raise SpecError(f"{self._obs.describe(i)}: cannot be stored, got {_shape_of(leaf)}")
        self.native.write(self._episode_field, env, sequence, array("d", record))
        self.episodes += 1

    def keep_published(self, env: int, sequence: int) -> None:
        """Keeps the observation that lies in a slot as the final one of its own step."""
        if self._final_fields:
            for field, view in zip(self._final_fields, self._obs_views, strict=True):
                self.native.write(field, env, sequence, view[env, sequence % self.capacity, ...])


class _Actions:
    """The actions of one env that are more than a scalar."""

    def __init__(self, read: Callable[[int, int], Any], env: int) -> None:
        self._read, self._env = read, env

    def __getitem__(self, slot: int) -> Any:
        return self._read(self._env, slot)


class EnvStepper:
    """One env of a worker. `step` is the hot path: few calls, and what is rare is elsewhere.

    Args:
        index: The env's index in the run.
        env: The environment.
        writer: How its slots are written.

    Attributes:
        sequence: Of its newest observation; -1 before the first.
        truncate: Set it to end the episode with the next step, unless it has just begun.
    """

    __slots__ = (
        "_actions",
        "_began_ns",
        "_began_sequence",
        "_env",
        "_native",
        "_return",
        "_step_env",
        "_writer",
        "index",
        "sequence",
        "truncate",
    )

    def __init__(self, index: int, env: Env, writer: SlotWriter) -> None:
        self.index = index
        self._env = env
        self._writer = writer
        self._native = writer.native
        self._actions = writer.actions_of(index)
        self._step_env: Callable[[Any], Any] = self._announced_step if writer.announce_steps else env.step
        self.sequence = writer.native.cursor(OBSERVED, index) - 1
        self.truncate = False
        self._return = 0.0
        self._began_sequence = self._began_ns = 0

    def start(self, seed: int) -> None:
        """Resets the env for the first time and publishes what it observes.

        Raises:
            RoleFailure: The env raised, or what it returned does not fit.
        """
        first = self.sequence + 1
        try:
            leaves = self._writer.leaves(self._reset(seed))
            self._writer.publish(partial(self._native.observe, self.index, first), leaves)
        except BaseException as error:
            raise RoleFailure(env_index=self.index, step=first, during="reset") from error
        self.sequence = first

    def interrupt(self, seed: int) -> int:
        """Ends an episode whose env is gone, once the newest observation has its action; a new one begins.

        The row of that action says what happened: no reward, truncated and interrupted, the same observation as the
        final one. What an earlier process has published stays as it is.

        Returns:
            The sequence of the next observation.

        Raises:
            RoleFailure: The env raised, or what it returned does not fit.
        """
        env, sequence, writer = self.index, self.sequence, self._writer
        try:
            leaves = writer.leaves(self._reset(seed))
            writer.keep_published(env, sequence)
            writer.publish(partial(self._native.step, env, sequence, 0.0, False, True, True), leaves)
        except BaseException as error:
            raise RoleFailure(env_index=env, step=sequence + 1, during="reset") from error
        self.sequence = sequence + 1
        return self.sequence

    def step(self) -> int:
        """Steps the env with the action of its newest observation; returns the sequence of the next one.

        Raises:
            RoleFailure: reset() raised, or what it returned does not fit.
            Exception: step() raised it; or a SpecError: what it returned does not fit.
        """
        env, sequence, writer = self.index, self.sequence, self._writer
        result = self._step_env(self._actions[sequence % writer.capacity])
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            expected = "expected (obs, reward, terminated, truncated, info)"
            raise SpecError(f"step() returned {_shape_of(result)}; {expected}") from None
        if type(reward) is not float:
            reward = _reward(reward)
        if type(terminated) is not bool or type(truncated) is not bool:
            terminated, truncated = _flag(terminated, "terminated"), _flag(truncated, "truncated")
        self._return += reward
        if self.truncate:
            self.truncate = False
            truncated = truncated or sequence > self._began_sequence
        if terminated or truncated:
            obs = self._end_episode(obs, info)
        leaves = (obs,) if writer.is_bare else writer.leaves(obs)
        if self._native.step(env, sequence, reward, terminated, truncated, False, leaves) >= 0:
            writer.publish(partial(self._native.step, env, sequence, reward, terminated, truncated, False), leaves)
        self.sequence = sequence = sequence + 1
        return sequence

    def _end_episode(self, obs: Any, info: Any) -> Any:
        """Keeps the final observation, before reset() may reuse its buffer; returns the next episode's first."""
        length = self.sequence + 1 - self._began_sequence
        record = (self._return, length, (time.monotonic_ns() - self._began_ns) / 1e9)
        self._writer.keep_episode(self.index, self.sequence, obs, _recorded_episode(info) or record)
        try:
            return self._reset(None)
        except BaseException as error:
            raise RoleFailure(env_index=self.index, step=self.sequence + 1, during="reset") from error

    def _announced_step(self, action: Any) -> Any:
        """Steps the env, and says so."""
        activity = self._writer.activity
        activity[self.index] = STEPPING
        result = self._env.step(action)
        activity[self.index] = IDLE
        return result

    def _reset(self, seed: int | None) -> Any:
        activity = self._writer.activity
        activity[self.index] = RESETTING
        result = self._env.reset() if seed is None else self._env.reset(seed=seed)
        activity[self.index] = IDLE
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise SpecError(f"reset() returned {_shape_of(result)}; expected (obs, info)")
        self._return, self._began_sequence, self._began_ns = 0.0, self.sequence + 1, time.monotonic_ns()
        return result[0]


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
    if not isinstance(info, Mapping):
        raise SpecError(f"step() returned the info {_shape_of(info)}; expected a dict")
    episode = info.get("episode")
    if not (isinstance(episode, Mapping) and {"r", "l", "t"} <= episode.keys()):
        return None
    try:
        return _reward(episode["r"]), int(_reward(episode["l"])), _reward(episode["t"])
    except (SpecError, ValueError, OverflowError):  # somebody else's entry of this name
        return None


def _shape_of(value: object) -> str:
    """What a value is, for an error text: a type and size rather than a page of numbers."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
