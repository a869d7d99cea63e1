"""The transitions of every env, in order, equal those of a plain loop bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from plain_loop import CASES, Case, Rows, leaves, plain_loop

from shmcollect import AsyncBatchedCollector, Batch


def collect(case: Case, batches: int, **kwargs: Any) -> tuple[list[Batch], list[int]]:
    with AsyncBatchedCollector(case.make, case.policy, **kwargs) as collector:
        return [collector.next_batch() for _ in range(batches)], collector.env_seeds


def step_of(value: Any, b: int, t: int) -> Any:
    if isinstance(value, dict):
        return {key: step_of(each, b, t) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(step_of(each, b, t) for each in value)
    return value[b, t].numpy()


def per_env(batches: list[Batch], num_envs: int) -> list[Rows]:
    """The delivered transitions of each env, checked to arrive in order without a gap."""
    envs = [Rows() for _ in range(num_envs)]
    for batch in batches:
        next_obs = batch.next_obs
        for b in range(len(batch)):
            rows = envs[int(batch.env_index[b])]
            for t in range(batch.reward.shape[1]):
                assert batch.sequence[b, t] == len(rows.reward), "lost, repeated or out of order"
                for name in ("obs", "action", "extras"):
                    getattr(rows, name).append(step_of(getattr(batch, name), b, t))
                rows.next_obs.append(step_of(next_obs, b, t))
                rows.reward.append(batch.reward[b, t].item())
                for name in ("terminated", "truncated", "episode_start"):
                    getattr(rows, name).append(bool(getattr(batch, name)[b, t]))
        assert not batch.interrupted.any()
        for episode in batch.episodes:
            assert episode.duration_s >= 0
            envs[episode.env_index].episodes.append((episode.episode_return, episode.length))
    return envs


def assert_same(got: Any, expected: Any, what: str) -> None:
    for mine, theirs in zip(leaves(got), leaves(expected), strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, what
        assert mine.tobytes() == theirs.tobytes(), f"{what}: {mine} != {theirs}"


def assert_equal_rows(got: Rows, expected: Rows) -> None:
    for name in ("obs", "action", "next_obs", "extras"):
        for t, (mine, theirs) in enumerate(zip(getattr(got, name), getattr(expected, name), strict=True)):
            assert_same(mine, theirs, f"{name} of step {t}")
    assert got.reward == [np.float32(reward).item() for reward in expected.reward]
    for name in ("terminated", "truncated", "episode_start", "episodes"):
        assert getattr(got, name) == getattr(expected, name), name


def check(kind: str, batches: int, num_envs: int, **kwargs: Any) -> list[Batch]:
    case = CASES[kind]
    collected, seeds = collect(case, batches, num_envs=num_envs, **kwargs)
    for got, seed in zip(per_env(collected, num_envs), seeds, strict=True):
        assert_equal_rows(got, plain_loop(case, seed, len(got.reward)))
    return collected


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("sync", [False, True])
def test_every_kind_of_env_equals_a_plain_loop(kind: str, sync: bool) -> None:
    batches = check(kind, 12, num_envs=5, num_workers=2, frames_per_batch=5 * 16, rollout_length=16, sync=sync, seed=3)
    assert all(len(batch) == 5 and batch.reward.shape == (5, 16) for batch in batches)


@pytest.mark.parametrize(
    ("rollout_length", "capacity", "k", "workers"),
    [(1, 2, 1, 1), (1, None, 3, 2), (5, 6, 3, 3), (5, 20, 1, 2), (16, 17, 1, 1), (16, 64, 3, 3)],
)
@pytest.mark.parametrize("sync", [False, True])
def test_many_turns_of_the_ring_equal_a_plain_loop(
    rollout_length: int, capacity: int | None, k: int, workers: int, sync: bool
) -> None:
    frames = 6 * rollout_length * k
    check(
        "counter",
        max(6, 400 // frames),
        num_envs=6,
        num_workers=workers,
        frames_per_batch=frames,
        rollout_length=rollout_length,
        capacity=capacity,
        sync=sync,
        seed=11,
    )


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_combination_equals_a_plain_loop(data: st.DataObject) -> None:
    num_envs = data.draw(st.integers(1, 7), "num_envs")
    length = data.draw(st.sampled_from([1, 2, 5, 16]), "rollout_length")
    sync = data.draw(st.booleans(), "sync")
    rollouts = data.draw(st.integers(1, 3).map(lambda k: k * num_envs) if sync else st.integers(1, 12), "B")
    smallest = data.draw(st.integers(1, num_envs), "min_batch_size")
    check(
        data.draw(st.sampled_from(sorted(CASES)), "kind"),
        data.draw(st.integers(1, 8), "batches"),
        num_envs=num_envs,
        num_workers=data.draw(st.integers(1, min(3, num_envs)), "num_workers"),
        workers_per_process=data.draw(st.integers(1, 3), "workers_per_process"),
        frames_per_batch=rollouts * length,
        rollout_length=length,
        capacity=data.draw(st.none() | st.integers(length + 1, 4 * length + 3), "capacity"),
        sync=sync,
        min_batch_size=smallest,
        max_batch_size=data.draw(st.integers(smallest, num_envs), "max_batch_size"),
        server_timeout=data.draw(st.sampled_from([None, 0.0, 0.01]), "server_timeout"),
        seed=data.draw(st.integers(0, 2**32), "seed"),
    )


@pytest.mark.parametrize(("sync", "frames_per_batch"), [(True, 20), (False, 5)])
def test_views_in_place_equal_a_plain_loop(sync: bool, frames_per_batch: int) -> None:
    case = CASES["counter"]
    options = {"num_envs": 4, "num_workers": 2, "frames_per_batch": frames_per_batch, "sync": sync, "seed": 1}
    options |= {"rollout_length": 5, "zero_copy": True}
    with AsyncBatchedCollector(case.make, case.policy, **options) as collector:
        kept = []
        for _ in range(20):
            batch = collector.next_batch()
            kept.append(Batch(**{name: _copied(value) for name, value in vars(batch).items()}))
        seeds = collector.env_seeds
    for got, seed in zip(per_env(kept, 4), seeds, strict=True):
        assert_equal_rows(got, plain_loop(case, seed, len(got.reward)))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value


class Network(torch.nn.Module):
    """A policy whose rows may differ in the last bit with the batch they are in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = self.body(obs)
        return torch.distributions.Categorical(logits=logits).sample(), {"logits": logits}


@pytest.mark.parametrize("sync", [False, True])
def test_a_networks_actions_replay_bit_for_bit_and_its_outputs_within_1e_5(sync: bool) -> None:
    network = Network()
    case = Case(CASES["cartpole"].make, network)
    batches, seeds = collect(case, 6, num_envs=6, num_workers=2, frames_per_batch=6 * 32, sync=sync, seed=9)
    for got, seed in zip(per_env(batches, 6), seeds, strict=True):
        replayed = plain_loop(case, seed, len(got.reward), actions=got.action)
        for name in ("obs", "next_obs"):
            for mine, theirs in zip(getattr(got, name), getattr(replayed, name), strict=True):
                assert_same(mine, theirs, name)
        assert got.reward == replayed.reward
        assert (got.terminated, got.truncated) == (replayed.terminated, replayed.truncated)
        assert got.episodes == replayed.episodes
        with torch.inference_mode():
            logits = network(torch.from_numpy(np.stack(got.obs)))[1]["logits"]
        recorded = torch.from_numpy(np.stack([each["logits"] for each in got.extras]))
        torch.testing.assert_close(recorded, logits, rtol=0, atol=1e-5)
