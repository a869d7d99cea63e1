"""Double DQN on CartPole-v1 from a replay buffer of plain tensors: how off-policy learners use the collector.

    python examples/dqn_replay.py

`rollout_length=1` makes every rollout one transition, and envs run on while the learner learns.
"""

import argparse
import copy
import time
from collections import deque

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from shmcollect import AsyncBatchedCollector, Batch

NUM_ENVS, FRAMES_PER_BATCH = 16, 128
BUFFER_SIZE, MINIBATCH, UPDATES_PER_BATCH = 50_000, 128, 32
GAMMA, LEARNING_RATE, TARGET_RATE = 0.99, 1e-3, 0.01
EPSILON, EPSILON_FRAMES = (1.0, 0.02), 10_000
GOAL = 300.0


class EpsilonGreedy(nn.Module):
    """What the collector runs. Epsilon is a buffer, so it is published with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.register_buffer("epsilon", torch.tensor(EPSILON[0]))

    def forward(self, obs: Tensor) -> Tensor:
        greedy = self.values(obs).argmax(1)
        explores = torch.rand(len(obs)) < self.epsilon
        return torch.where(explores, torch.randint_like(greedy, 2), greedy)


class Replay:
    """The last transitions, each field one tensor."""

    def __init__(self, size: int) -> None:
        self._size, self._added = size, 0
        self._fields: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return min(self._size, self._added)

    def add(self, batch: Batch) -> None:
        # Of a transition that ended an episode, next_obs is the episode's last observation, not the reset one.
        rows = {"next_obs": batch.next_obs.flatten(0, 1)}
        rows |= {name: getattr(batch, name).flatten(0, 1) for name in ("obs", "action", "reward", "terminated")}
        places = (self._added + torch.arange(batch.num_frames)) % self._size
        for name, values in rows.items():
            if name not in self._fields:
                self._fields[name] = values.new_zeros((self._size, *values.shape[1:]))
            self._fields[name][places] = values
        self._added += batch.num_frames

    def sample(self, n: int) -> dict[str, Tensor]:
        rows = torch.randint(len(self), (n,))
        return {name: values[rows] for name, values in self._fields.items()}


def learn(policy: EpsilonGreedy, target: nn.Module, optimizer: torch.optim.Optimizer, rows: dict[str, Tensor]) -> None:
    """One step of double DQN. Only a terminated episode is worth nothing afterwards; a truncated one would go on."""
    with torch.no_grad():
        best = policy.values(rows["next_obs"]).argmax(1, keepdim=True)
        following = target(rows["next_obs"]).gather(1, best).squeeze(1)
        wanted = rows["reward"] + GAMMA * following * ~rows["terminated"]
    values = policy.values(rows["obs"]).gather(1, rows["action"][:, None]).squeeze(1)
    optimizer.zero_grad()
    smooth_l1_loss(values, wanted).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), policy.values.parameters(), strict=True):
            slow.lerp_(fast, TARGET_RATE)


def train(seed: int, max_frames: int, goal: float = GOAL) -> list[tuple[int, float]]:
    """Trains until the mean return of 100 episodes reaches the goal; returns (frames, mean return) per batch."""
    torch.manual_seed(seed)
    policy = EpsilonGreedy()
    target = copy.deepcopy(policy.values)
    optimizer = torch.optim.Adam(policy.values.parameters(), LEARNING_RATE)
    replay, returns, curve, frames = Replay(BUFFER_SIZE), deque(maxlen=100), [], 0
    with AsyncBatchedCollector(
        "CartPole-v1",
        policy,
        num_envs=NUM_ENVS,
        frames_per_batch=FRAMES_PER_BATCH,
        rollout_length=1,
        total_frames=max_frames,
        seed=seed,
    ) as collector:
        for batch in collector:
            frames += batch.num_frames
            replay.add(batch)
            returns.extend(episode.episode_return for episode in batch.episodes)
            curve.append((frames, sum(returns) / max(1, len(returns))))
            if len(returns) == 100 and curve[-1][1] >= goal:
                break
            policy.epsilon.fill_(max(EPSILON[1], EPSILON[0] - (EPSILON[0] - EPSILON[1]) * frames / EPSILON_FRAMES))
            for _ in range(UPDATES_PER_BATCH):
                learn(policy, target, optimizer, replay.sample(MINIBATCH))
            collector.update_policy_weights_(policy)
        print(f"policy lag of the frames: {collector.stats()['policy_lag']}")
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Double DQN on CartPole-v1", allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=150_000, help="at most so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    frames, mean = train(arguments.seed, arguments.frames)[-1]
    print(f"seed {arguments.seed}: mean return {mean:.1f} after {frames:,} frames, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
