"""The envs. Each is built by a picklable factory, counts its own steps, and imports no torch."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import DTypeLike, NDArray

from benchmarks import counters

EPISODE_STEPS = 200
VECTOR_SHAPE = (4,)
IMAGE_SHAPE = (84, 84, 4)
IMAGE_ACTIONS = 6

Env = gym.Env[NDArray[Any], np.int64]
Step = tuple[NDArray[Any], float, bool, bool, dict[str, Any]]


class NullEnv(gym.Env[NDArray[Any], np.int64]):
    """Does nothing at all, in episodes of 200 steps; the others add their work to it."""

    shape: tuple[int, ...] = VECTOR_SHAPE
    dtype: DTypeLike = np.float32
    num_actions = 2

    def __init__(self, counters_path: str, index: int) -> None:
        high = 255 if np.issubdtype(self.dtype, np.integer) else np.inf
        low = 0 if np.issubdtype(self.dtype, np.integer) else -np.inf
        self.observation_space = gym.spaces.Box(low, high, self.shape, self.dtype)  # type: ignore[arg-type]
        self.action_space = gym.spaces.Discrete(self.num_actions)
        self._count = counters.attach(counters_path, index)
        self._obs = np.zeros(self.shape, self.dtype)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._obs, {}

    def step(self, action: np.int64) -> Step:
        self._steps += 1
        self._count[0] += 1
        return self._obs, 1.0, False, self._steps == EPISODE_STEPS, {}


class SpinEnv(NullEnv):
    """Keeps a core busy for a fixed time per step, with image observations.

    The time is the thread's own CPU time. By the wall clock a step would also end while its process is preempted, and
    whoever runs more processes than there are cores would be given work for nothing.
    """

    shape = IMAGE_SHAPE
    dtype = np.uint8
    num_actions = IMAGE_ACTIONS

    def __init__(self, counters_path: str, index: int, busy_us: int) -> None:
        super().__init__(counters_path, index)
        self._busy_ns = busy_us * 1000

    def step(self, action: np.int64) -> Step:
        end = time.thread_time_ns() + self._busy_ns
        while time.thread_time_ns() < end:
            pass
        return super().step(action)


class LagEnv(NullEnv):
    """Waits as for a remote simulator: 1 ms a step, 10 ms in one of twenty. Measures how long steps really take."""

    def __init__(self, counters_path: str, index: int) -> None:
        super().__init__(counters_path, index)
        self._random = random.Random(index)

    def step(self, action: np.int64) -> Step:
        begin = time.perf_counter_ns()
        time.sleep(0.010 if self._random.random() < 0.05 else 0.001)
        result = super().step(action)
        self._count[counters.STEP_NS] += time.perf_counter_ns() - begin
        return result


class ImageEnv(NullEnv):
    """Draws a new random image each step, from a generator of its own."""

    shape = IMAGE_SHAPE
    dtype = np.uint8
    num_actions = IMAGE_ACTIONS

    def __init__(self, counters_path: str, index: int) -> None:
        super().__init__(counters_path, index)
        self._generator = np.random.default_rng(index)

    def step(self, action: np.int64) -> Step:
        self._obs = self._generator.integers(0, 256, self.shape, np.uint8)
        return super().step(action)


class CountedSteps(gym.Wrapper[NDArray[Any], np.int64, NDArray[Any], np.int64]):
    """Counts the steps of an env that can't do it itself."""

    def __init__(self, env: Env, counters_path: str, index: int) -> None:
        super().__init__(env)
        self._count = counters.attach(counters_path, index)

    def step(self, action: np.int64) -> Any:
        result = self.env.step(action)
        self._count[0] += 1
        return result


def make_cartpole(counters_path: str, index: int) -> Env:
    return CountedSteps(gym.make("CartPole-v1"), counters_path, index)


@dataclass(frozen=True)
class Workload:
    """An env and what one must know of it without making one.

    `rollout_length` is T, chosen so that one batch holds a fraction of a second of frames and fits in memory.
    """

    make: Callable[[str, int], Env]
    shape: tuple[int, ...]
    dtype: DTypeLike
    num_actions: int
    rollout_length: int


WORKLOADS = {
    "cartpole": Workload(make_cartpole, VECTOR_SHAPE, np.float32, 2, 64),
    "null": Workload(NullEnv, VECTOR_SHAPE, np.float32, 2, 64),
    "spin100": Workload(partial(SpinEnv, busy_us=100), IMAGE_SHAPE, np.uint8, IMAGE_ACTIONS, 16),
    "spin1000": Workload(partial(SpinEnv, busy_us=1000), IMAGE_SHAPE, np.uint8, IMAGE_ACTIONS, 16),
    "lag": Workload(LagEnv, VECTOR_SHAPE, np.float32, 2, 16),
    "image": Workload(ImageEnv, IMAGE_SHAPE, np.uint8, IMAGE_ACTIONS, 16),
}


def make_factories(workload: str, num_envs: int, counters_path: str) -> list[Callable[[], Env]]:
    """One factory per env; env i counts in line i of the file at `counters_path`."""
    make = WORKLOADS[workload].make
    return [partial(make, counters_path, index) for index in range(num_envs)]
