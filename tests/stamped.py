"""Envs and a policy whose every row can be judged by itself and by the row before it; and who judges them.

An observation says whose it is, of which life (the seed of the env's first reset), which episode and which step; the
rest repeats a number made of these, so that a torn row shows. The policy's action is a function of the observation
alone. So what each env must have done follows from its seeds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.random import SeedSequence
from torch import nn

from shmcollect import AsyncBatchedCollector, Batch

WIDTH = 24
_ENV, _LIFE, _EPISODE, _IN_EPISODE, _STEPS, _STAMP = range(6)
NUM_ACTIONS = 7

Fault = Callable[["Stamped"], None]


def mix(*numbers: int) -> int:
    """A number below 2**31 that depends on every one of these."""
    value = 0x9E3779B9
    for number in numbers:
        value = (value ^ (int(number) & 0xFFFFFFFF)) * 0x85EBCA6B & 0xFFFFFFFF
        value ^= value >> 13
    return value & 0x7FFFFFFF


def episode_length(life: int, episode: int) -> int:
    return 1 + mix(life, episode) % 9


def observation(env: int, life: int, episode: int, in_episode: int, steps: int) -> np.ndarray[Any, Any]:
    obs = np.empty(WIDTH, np.int64)
    obs[:_STAMP] = env, life, episode, in_episode, steps
    obs[_STAMP:] = mix(*obs[:_STAMP].tolist())
    return obs


def action_of(obs: torch.Tensor) -> torch.Tensor:
    return obs[:, _STAMP] % NUM_ACTIONS


class Stamped(gym.Env):
    """See the module. A fault, if there is one, is called in the middle of every step."""

    observation_space = spaces.Box(0, 2**40, (WIDTH,), np.int64)
    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self, index: int, fault: Fault | None = None) -> None:
        self.index, self.fault = index, fault
        self.life, self.episode, self.in_episode, self.steps = 0, -1, 0, 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.life = seed
        self.episode, self.in_episode = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        reward = float(action) + self.steps % 1000
        self.steps, self.in_episode = self.steps + 1, self.in_episode + 1
        if self.fault is not None:
            self.fault(self)
        over = self.in_episode >= episode_length(self.life, self.episode)
        return self._obs(), reward, over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}

    def _obs(self):
        return observation(self.index, self.life, self.episode, self.in_episode, self.steps)


def at_step(step: int, does: Callable[[], object], *, life: int | None = None) -> Fault:
    """A fault at one step of every life of an env, or of one."""

    def fault(env: Stamped) -> None:
        if env.steps == step and life in (None, env.life):
            does()

    return fault


class StampedPolicy(nn.Module):
    """Acts as `action_of` says, and tells what it saw and which weights it had."""

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(64))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        low, high = self.version.min(), self.version.max()
        ones = torch.ones(len(obs))
        return action_of(obs), {"seen": obs[:, _STAMP].clone(), "low": ones * low, "high": ones * high}


def weights(version: int) -> dict[str, torch.Tensor]:
    """Weights that say which version they are."""
    return {"version": torch.full((64,), float(version))}


def life_seeds(seed: int, env: int, restarts: int) -> int:
    """The seed of an env's life after so many restarts."""
    key = (env, restarts) if restarts else (env,)
    return int(SeedSequence(seed, spawn_key=key).generate_state(1)[0])


@dataclasses.dataclass
class Judge:
    """Looks at every row of every batch of a run over `Stamped` envs with `StampedPolicy`.

    Args:
        seed: The run's seed.
        num_envs: Its envs.

    Attributes:
        rows: Rows judged.
        interrupted: How many of them were marked so, by env.
        versions: How many rows were by each version of the weights.
    """

    seed: int
    num_envs: int
    rows: int = 0
    interrupted: Counter[int] = dataclasses.field(default_factory=Counter)
    versions: Counter[int] = dataclasses.field(default_factory=Counter)

    def __post_init__(self) -> None:
        lives = [life_seeds(self.seed, env, 0) for env in range(self.num_envs)]
        self._next = [(0, observation(env, lives[env], 0, 0, 0)) for env in range(self.num_envs)]
        self._restarts = [0] * self.num_envs

    @property
    def rows_by_env(self) -> list[int]:
        """How many rows of each env were judged."""
        return [sequence for sequence, _ in self._next]

    def look(self, batch: Batch) -> None:
        """Judges the rows of a batch, which came after those before."""
        for row, env in enumerate(batch.env_index.tolist()):
            self._look_at_rollout(batch, row, env)
        used = batch.policy_version
        assert torch.equal(batch.extras["low"], used.float()), "rows by other weights than they say"
        assert torch.equal(batch.extras["high"], used.float()), "rows by torn weights"
        assert torch.equal(batch.extras["seen"], batch.obs[..., _STAMP]), "the policy saw another observation"
        assert torch.equal(batch.action, batch.obs[..., _STAMP] % NUM_ACTIONS), "another row's action"
        assert (batch.obs[..., _STAMP:] == batch.obs[..., _STAMP : _STAMP + 1]).all(), "a torn observation"
        self.versions.update(used.flatten().tolist())
        self.rows += batch.num_frames

    def _look_at_rollout(self, batch: Batch, row: int, env: int) -> None:
        columns = ("sequence", "reward", "terminated", "truncated", "interrupted", "episode_start")
        steps = zip(*(getattr(batch, name)[row].tolist() for name in columns), strict=True)
        observations, following = batch.obs[row].numpy(), batch.next_obs[row].numpy()
        for t, (sequence, reward, terminated, truncated, interrupted, start) in enumerate(steps):
            expected_sequence, obs = self._next[env]
            assert sequence == expected_sequence, f"env {env}: lost, repeated or out of order"
            if self._lives_again(env, observations[t], start):
                obs = observations[t]
            where = f"env {env}, step {sequence}"
            assert (observations[t] == obs).all(), f"{where}: expected {obs}, got {observations[t]}"
            assert start == (obs[_IN_EPISODE] == 0), where
            if interrupted:
                assert (reward, terminated, truncated) == (0.0, False, True), where
                assert (following[t] == obs).all(), f"{where}: the final observation is the published one"
                self.interrupted[env] += 1
                self._next[env] = sequence + 1, np.zeros(0, np.int64)  # a life that is not known yet
            else:
                self._next[env] = (
                    sequence + 1,
                    self._check_step(where, obs, following[t], reward, terminated, truncated),
                )

    def _lives_again(self, env: int, obs: np.ndarray[Any, Any], start: bool) -> bool:
        """Whether an interrupted env begins a new life, as it must, with one of the seeds that are its own."""
        if len(self._next[env][1]):
            return False
        assert start
        last = self._restarts[env]
        lives = [life_seeds(self.seed, env, restarts) for restarts in range(last + 1, last + 200)]
        assert obs[_LIFE] in lives, f"env {env}: a life with a seed that is not its own"
        self._restarts[env] += lives.index(obs[_LIFE]) + 1
        assert (obs == observation(env, obs[_LIFE], 0, 0, 0)).all()
        return True

    def _check_step(
        self, where: str, obs: np.ndarray[Any, Any], following: np.ndarray[Any, Any], reward: float, *flags: bool
    ) -> np.ndarray[Any, Any]:
        """Checks what a step brought and returns the next row's observation."""
        env, life, episode, in_episode, steps, stamp = obs[: _STAMP + 1].tolist()
        assert reward == float(stamp % NUM_ACTIONS + steps % 1000), where
        over = in_episode + 1 == episode_length(life, episode)
        assert flags == (over and episode % 2 == 0, over and episode % 2 == 1), where
        assert (following == observation(env, life, episode, in_episode + 1, steps + 1)).all(), where
        return observation(env, life, episode + 1, 0, steps + 1) if over else following


def make(
    num_envs: int = 6, fault: Callable[[int], Fault | None] = lambda _: None, env_class: Any = Stamped, **kwargs: Any
) -> Any:
    """A run that restarts what fails, over stamped envs, with its judge."""
    options: dict[str, Any] = {
        "num_workers": 2,
        "frames_per_batch": 4 * num_envs,
        "rollout_length": 4,
        "seed": 11,
        "on_worker_failure": "restart",
        "max_restarts": 1000,
    }
    options |= kwargs
    factories = [partial(env_class, env, fault(env)) for env in range(num_envs)]
    return AsyncBatchedCollector(factories, StampedPolicy(), **options), Judge(options["seed"], num_envs)
