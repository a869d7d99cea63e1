"""The examples learn, and bootstrap where they should. The full curves are `make learn`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shmcollect import Batch
from shmcollect.batch import FinalObs

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import dqn_replay  # noqa: E402
import ppo_cartpole  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ppo_learns() -> None:
    run = ppo_cartpole.train(seed=0, max_frames=100_000, goal=100.0)
    assert run.curve[0][1] < 50 and run.curve[-1][1] >= 100
    assert run.lag == {"mean": 0.0, "max": 0}


def test_dqn_learns() -> None:
    curve = dqn_replay.train(seed=0, max_frames=30_000, goal=40.0)
    assert curve[20][1] < 30 and curve[-1][1] >= 40


def test_the_script_prints_a_row_per_seed_and_the_lag_and_draws_the_curve(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    command = [sys.executable, "ppo_cartpole.py", "--frames", "6000", "--async", "--plot", str(path)]
    result = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=True, timeout=100)
    assert re.search(r"^ +0 +6,016 +[\d.]+ +[\d.]+   mean [\d.]+, max \d+$", result.stdout, re.MULTILINE), result.stdout
    assert path.read_bytes().startswith(b"\x89PNG")


def batch_of(terminated: list[int], truncated: list[int]) -> Batch:
    """Two rollouts of six steps; the steps given end an episode of the first one."""
    torch.manual_seed(0)
    ends = torch.zeros(2, 2, 6, dtype=torch.bool)
    ends[0, 0, terminated] = ends[1, 0, truncated] = True
    steps = sorted({*terminated, *truncated})
    index = torch.tensor([[0, step] for step in steps], dtype=torch.int64).reshape(-1, 2)
    zeros = torch.zeros(2, 6, dtype=torch.int64)
    return Batch(
        obs=torch.randn(2, 6, 4),
        action=zeros,
        extras={},
        reward=torch.randn(2, 6),
        terminated=ends[0],
        truncated=ends[1],
        interrupted=zeros.bool(),
        episode_start=zeros.bool(),
        policy_version=zeros,
        sequence=zeros,
        env_index=zeros[:, 0],
        final_obs=FinalObs(index, torch.randn(len(steps), 4)),
        episodes=[],
        following_obs=torch.randn(2, 4),
    )


@pytest.mark.parametrize(
    ("terminated", "truncated"), [([], []), ([2], []), ([], [2]), ([1], [4]), ([5], []), ([], [5]), ([3], [3])]
)
def test_advantages_are_sums_within_the_episode_bootstrapped_unless_it_terminated(terminated, truncated) -> None:
    policy, batch = ppo_cartpole.ActorCritic(), batch_of(terminated, truncated)
    with torch.no_grad():
        value, following = policy.value(batch.obs), policy.value(batch.next_obs)
    advantages, targets = ppo_cartpole.advantages_and_targets(policy, batch)
    for b in range(2):
        for t in range(6):
            total, weight = 0.0, 1.0
            for step in range(t, 6):
                afterwards = 0.0 if batch.terminated[b, step] else following[b, step]
                error = batch.reward[b, step] + ppo_cartpole.GAMMA * afterwards - value[b, step]
                total += weight * error
                weight *= ppo_cartpole.GAMMA * ppo_cartpole.LAMBDA
                if batch.terminated[b, step] or batch.truncated[b, step]:
                    break
            torch.testing.assert_close(advantages[b, t], total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(targets, advantages + value)
