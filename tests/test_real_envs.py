"""Real environments are collected, each for some seconds; one whose package is missing is skipped with the reason."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from shmcollect import AsyncBatchedCollector

SECONDS = 3.0


def make_pong() -> gym.Env:
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, frame_skip=4)
    return gym.wrappers.FrameStackObservation(env, 4)


def make_minigrid() -> gym.Env:
    import minigrid  # noqa: F401 - registers the env

    return gym.make("MiniGrid-Empty-5x5-v0")


def discrete(n: int) -> Any:
    return lambda obs: torch.randint(n, (len(next(_leaves(obs))),))


def continuous(low: float, high: float, size: int) -> Any:
    return lambda obs: torch.empty(len(obs), size).uniform_(low, high)


def _leaves(obs: Any) -> Any:
    yield from obs.values() if isinstance(obs, dict) else (obs,)


def collect(make: Any, policy: Any, **kwargs: Any) -> list[Any]:
    with AsyncBatchedCollector(
        make, policy, num_envs=4, num_workers=2, frames_per_batch=4 * 32, seed=0, **kwargs
    ) as collector:
        batches, stop = [], time.monotonic() + SECONDS
        while time.monotonic() < stop or not batches:
            batches.append(collector.next_batch())
    assert sum(batch.num_frames for batch in batches) == 128 * len(batches)
    return batches


def test_cartpole_is_collected() -> None:
    batches = collect("CartPole-v1", discrete(2))
    episodes = [episode for batch in batches for episode in batch.episodes]
    assert episodes
    assert all(episode.episode_return == episode.length for episode in episodes), "one reward a step"
    assert all(torch.isfinite(batch.next_obs).all() for batch in batches)


def test_pendulum_is_collected() -> None:
    batches = collect("Pendulum-v1", continuous(-2, 2, 1))
    assert all((batch.reward <= 0).all() for batch in batches)
    assert not any(batch.terminated.any() for batch in batches)
    radius = torch.cat([batch.obs[..., 0] ** 2 + batch.obs[..., 1] ** 2 for batch in batches])
    torch.testing.assert_close(radius, torch.ones_like(radius))


def test_atari_pong_with_preprocessing_and_frame_stacking_is_collected() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    batches = collect(make_pong, discrete(6))
    for batch in batches:
        assert batch.obs.shape == (4, 32, 4, 84, 84) and batch.obs.dtype == torch.uint8
        same_episode = ~batch.episode_start[:, 1:]
        shifted = batch.obs[:, 1:, :3] == batch.obs[:, :-1, 1:]
        assert shifted.flatten(2).all(2)[same_episode].all(), "each stack is the one before, moved by a frame"


def test_minigrid_without_its_mission_is_collected() -> None:
    pytest.importorskip("minigrid")
    batches = collect(make_minigrid, discrete(7), drop_obs=("mission",))
    for batch in batches:
        assert set(batch.obs) == {"image", "direction"}
        assert batch.obs["image"].shape == (4, 32, 7, 7, 3)
        assert batch.obs["direction"].dtype == torch.int64


def test_half_cheetah_is_collected() -> None:
    pytest.importorskip("mujoco")
    batches = collect("HalfCheetah-v5", continuous(-1, 1, 6))
    obs = torch.cat([batch.obs for batch in batches])
    assert obs.shape[-1] == 17 and obs.dtype == torch.float64
    assert np.isfinite(obs.numpy()).all() and obs.std() > 0
