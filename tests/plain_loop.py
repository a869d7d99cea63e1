"""What the engine must equal, bit for bit: a plain loop over one env. And the envs and policies to show it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces


class Counter(gym.Env):
    """Episodes of length 1, 2, 3 in turn, ending terminated, truncated, both; observes how often it was stepped."""

    observation_space = spaces.Box(0, 2**40, (2,), np.int64)
    action_space = spaces.Discrete(7, start=-3)

    def __init__(self) -> None:
        self.steps, self.episodes, self.in_episode = 0, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes, self.in_episode = self.episodes + 1, 0
        return self._obs(), {}

    def step(self, action):
        assert type(action) is np.int64 and -3 <= action <= 3
        self.steps += 1
        self.in_episode += 1
        length, ending = self.episodes % 3 + 1, self.episodes // 3 % 3
        over = self.in_episode == length
        reward = float(action) + self.steps / 3
        return self._obs(), reward, over and ending != 1, over and ending != 0, {}

    def _obs(self):
        return np.array([self.steps, self.episodes], np.int64)


class Nested(gym.Env):
    """A Dict of Tuples of everything, in every dtype, that hands out buffers it uses again."""

    observation_space = spaces.Dict(
        {
            "a/b": spaces.Box(-1, 1, (3,), np.float16),
            "t": spaces.Tuple((spaces.Discrete(5, start=2), spaces.Dict({"m": spaces.MultiBinary(3)}))),
            "z": spaces.Box(0, 1, (0, 2), np.float64),
            "u": spaces.Box(0, 2**32 - 1, (), np.uint32),
            "d": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, -2]]),
        }
    )
    action_space = spaces.Tuple(
        (spaces.Discrete(3), spaces.Dict({"x": spaces.Box(-2, 2, (2,), np.float32), "m": spaces.MultiBinary(2)}))
    )

    def __init__(self) -> None:
        self._buffer = np.zeros(3, np.float16)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 9))
        self.time, self.total = 0, 0.0
        return self._obs(), {}

    def step(self, action):
        kind, rest = action
        self.time += 1
        self.total += float(kind) + float(rest["x"].sum()) + float(rest["m"].sum())
        return self._obs(), np.float32(self.total), self.time >= self.length, False, {}

    def _obs(self):
        self._buffer[:] = self.np_random.uniform(-1, 1, 3)
        return {
            "d": self.np_random.integers([[1, 0], [0, -2]], [[3, 3], [4, 3]]),
            "u": np.uint32(self.np_random.integers(2**32)),
            "t": (int(self.np_random.integers(2, 7)), {"m": self.np_random.integers(0, 2, 3).astype(np.int8)}),
            "z": np.zeros((0, 2)),
            "a/b": self._buffer,
        }


class Image(gym.Env):
    """Random frames, flipped: their strides are negative."""

    observation_space = spaces.Box(0, 255, (12, 10, 3), np.uint8)
    action_space = spaces.MultiDiscrete([4, 6], start=[1, -2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._frame(), {}

    def step(self, action):
        self.time += 1
        return self._frame(), int(action[0]) - int(action[1]), False, self.time == 11, {}

    def _frame(self):
        return self.np_random.integers(0, 256, (12, 10, 3), dtype=np.uint8)[::-1, :, ::-1]


class Continuous(gym.Env):
    """A point that is pushed about; returns float64 for the float32 it declares."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (3,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=3)
        self.time = 0
        return self.position, {}

    def step(self, action):
        self.time += 1
        self.position = self.position + 0.125 * action + self.np_random.normal(size=3)
        return self.position, [-float(np.abs(self.position).sum())], bool(self.position[0] > 3), self.time == 20, {}


def act_cartpole(obs):
    return (obs[:, 2] + 0.5 * obs[:, 3] > 0).long(), {"obs_again": obs, "angle": obs[:, 2]}


def act_counter(obs):
    return (obs[:, 0] * 5 + obs[:, 1]) % 7 - 3


def act_nested(obs):
    kind = (obs["t"][0] + obs["d"].sum((1, 2))) % 3
    return (kind, {"m": obs["t"][1]["m"][:, :2], "x": obs["a/b"][:, :2].float() * 0.5}), {"rows": kind.double() / 3}


def act_image(obs):
    total = obs.long().sum((1, 2, 3))
    return torch.stack((total % 4 + 1, total % 6 - 2), 1)


def act_continuous(obs):
    return (obs.double() * 0.25).clamp(-1, 1), {"sign": obs > 0}


@dataclass(frozen=True)
class Case:
    """An environment with a policy whose rows do not depend on the batch they are in."""

    make: Callable[[], gym.Env]
    policy: Callable[[Any], Any]


CASES = {
    "cartpole": Case(lambda: gym.make("CartPole-v1"), act_cartpole),
    "counter": Case(Counter, act_counter),
    "nested": Case(Nested, act_nested),
    "image": Case(Image, act_image),
    "continuous": Case(Continuous, act_continuous),
}


@dataclass
class Rows:
    """The transitions of one env, in order; episodes by the step they ended in."""

    obs: list[Any] = field(default_factory=list)
    action: list[Any] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    episode_start: list[bool] = field(default_factory=list)
    next_obs: list[Any] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)
    episodes: list[tuple[float, int]] = field(default_factory=list)


def plain_loop(case: Case, seed: int, steps: int, actions: Sequence[Any] | None = None) -> Rows:
    """Steps one env by hand, with the policy on a batch of one or with recorded actions."""
    env, rows = case.make(), Rows()
    obs, _ = env.reset(seed=seed)
    obs, start, episode_return, length = stored(obs, env.observation_space), True, 0.0, 0
    for t in range(steps):
        action, extras = act(case, obs, env.action_space) if actions is None else (actions[t], {})
        following, reward, terminated, truncated, _ = env.step(action)
        following = stored(following, env.observation_space)
        reward = float(np.asarray(reward).item())
        episode_return, length = episode_return + reward, length + 1
        rows.obs.append(obs)
        rows.action.append(action)
        rows.reward.append(reward)
        rows.terminated.append(bool(terminated))
        rows.truncated.append(bool(truncated))
        rows.episode_start.append(start)
        rows.next_obs.append(following)
        rows.extras.append(extras)
        start = terminated or truncated
        if start:
            rows.episodes.append((episode_return, length))
            following, _ = env.reset()
            following = stored(following, env.observation_space)
            episode_return, length = 0.0, 0
        obs = following
    env.close()
    return rows


def act(case: Case, obs: Any, action_space: gym.Space) -> tuple[Any, dict[str, Any]]:
    with torch.inference_mode():
        result = case.policy(nest(lambda leaf: torch.from_numpy(leaf[None].copy()), obs))
    action, extras = (
        result
        if isinstance(result, tuple) and isinstance(result[1], dict) and "x" not in result[1]
        else (
            result,
            {},
        )
    )
    action = nest(lambda leaf: leaf.numpy()[0], action)
    return stored(action, action_space, scalars=True), {name: each.numpy()[0] for name, each in extras.items()}


def nest(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: nest(function, each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(nest(function, each) for each in value)
    return function(value)


def stored(value: Any, space: gym.Space, *, scalars: bool = False) -> Any:
    """The value in the dtypes of its space, as a copy; Discrete as a NumPy scalar where the env is to get it."""
    if isinstance(space, spaces.Dict):
        return {key: stored(value[key], inner, scalars=scalars) for key, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stored(each, inner, scalars=scalars) for each, inner in zip(value, space, strict=True))
    array = np.array(value, space.dtype)
    return array[()] if scalars and isinstance(space, spaces.Discrete) else array


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, tuple | list):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]
