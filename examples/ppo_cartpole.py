"""PPO on CartPole-v1: reaches a mean return of 475 over 100 episodes on two CPU cores in well under a minute.

python examples/ppo_cartpole.py                   # one run, learning curve in ppo_cartpole.png
python examples/ppo_cartpole.py --seeds 0 1 2 3 4
python examples/ppo_cartpole.py --async           # envs run on while the learner learns; prints the policy lag
"""

import argparse
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from shmcollect import AsyncBatchedCollector, Batch

NUM_ENVS, ROLLOUT_LENGTH = 32, 64
GAMMA, LAMBDA = 0.99, 0.95
EPOCHS, MINIBATCH = 8, 256
LEARNING_RATE, CLIP, VALUE_COEFFICIENT, ENTROPY_COEFFICIENT, MAX_GRADIENT = 2e-3, 0.2, 0.5, 0.005, 0.5
SOLVED = 475.0


class ActorCritic(nn.Module):
    """`forward` is what the collector runs; the learner uses the rest too."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        nn.init.orthogonal_(self.actor[-1].weight, 0.01)

    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        actions = self.actions(obs)
        action = actions.sample()
        return action, {"log_prob": actions.log_prob(action)}

    def actions(self, obs: Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs), validate_args=False)

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


@torch.no_grad()
def advantages_and_targets(policy: ActorCritic, batch: Batch) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates and the targets of the value function, [B, T].

    An observation is worth something unless the episode terminated before it: also the last one of an episode that was
    merely truncated, and the one after the end of the rollout. `next_obs` has the true observation in both places. An
    advantage, on the other hand, collects nothing from beyond the end of its episode, however it ended.
    """
    values, next_values = policy.value(batch.obs), policy.value(batch.next_obs)
    errors = batch.reward + GAMMA * next_values * ~batch.terminated - values
    goes_on = ~(batch.terminated | batch.truncated)
    advantages = torch.zeros_like(errors)
    following = torch.zeros(len(batch))
    for t in reversed(range(errors.shape[1])):
        advantages[:, t] = following = errors[:, t] + GAMMA * LAMBDA * goes_on[:, t] * following
    return advantages, advantages + values


def learn(policy: ActorCritic, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Some epochs of PPO on one batch."""
    advantages, targets = (each.flatten() for each in advantages_and_targets(policy, batch))
    obs, action, old_log_prob = (each.flatten(0, 1) for each in (batch.obs, batch.action, batch.extras["log_prob"]))
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(obs)).split(MINIBATCH):
            actions = policy.actions(obs[rows])
            ratio = (actions.log_prob(action[rows]) - old_log_prob[rows]).exp()
            gain = torch.min(ratio * advantages[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[rows]).mean()
            value_loss = (policy.value(obs[rows]) - targets[rows]).square().mean()
            loss = VALUE_COEFFICIENT * value_loss - gain - ENTROPY_COEFFICIENT * actions.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRADIENT)
            optimizer.step()


@dataclass
class Run:
    """What came of one seed; the curve has (frames, mean return of the last 100 episodes)."""

    seed: int
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    lag: dict[str, float] = field(default_factory=dict)


def train(seed: int, max_frames: int = 600_000, sync: bool = True, goal: float = SOLVED) -> Run:
    """Trains until the mean return of 100 episodes reaches the goal, or for all the frames."""
    torch.manual_seed(seed)
    policy = ActorCritic()
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE, eps=1e-5)
    run, returns, frames, started = Run(seed), deque(maxlen=100), 0, time.monotonic()
    with AsyncBatchedCollector(
        "CartPole-v1",
        policy,
        num_envs=NUM_ENVS,
        frames_per_batch=NUM_ENVS * ROLLOUT_LENGTH,
        rollout_length=ROLLOUT_LENGTH,
        total_frames=max_frames,
        sync=sync,
        seed=seed,
    ) as collector:
        for batch in collector:
            frames += batch.num_frames
            returns.extend(episode.episode_return for episode in batch.episodes)
            mean = sum(returns) / max(1, len(returns))
            run.curve.append((frames, mean))
            if len(returns) == 100 and mean >= goal:
                break
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - frames / (max_frames + 1))
            learn(policy, optimizer, batch)
            collector.update_policy_weights_(policy)
        run.lag = collector.stats()["policy_lag"]
    run.seconds = time.monotonic() - started
    return run


def plot(runs: list[Run], path: str) -> None:
    """Writes the learning curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(*zip(*run.curve, strict=True), label=f"seed {run.seed}")
    axes.axhline(SOLVED, color="gray", linestyle=":")
    axes.set(xlabel="frames", ylabel="mean return of the last 100 episodes", title="PPO on CartPole-v1", ylim=(0, 510))
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--frames", type=int, default=600_000, help="at most so many per seed")
    parser.add_argument("--async", action="store_true", dest="run_on", help="collect while learning")
    parser.add_argument("--plot", default="ppo_cartpole.png", help="where the learning curve goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # networks this small gain nothing from more, and the envs need the cores
    print(f"{'seed':>4} {'frames':>9} {'seconds':>8} {'final return':>13}" + "   policy lag" * arguments.run_on)
    runs = []
    for seed in arguments.seeds:
        run = train(seed, arguments.frames, sync=not arguments.run_on)
        frames, final = run.curve[-1]
        lag = f"   mean {run.lag['mean']:.2f}, max {run.lag['max']}" if arguments.run_on else ""
        print(f"{seed:>4} {frames:>9,} {run.seconds:>8.1f} {final:>13.1f}{lag}", flush=True)
        runs.append(run)
    plot(runs, arguments.plot)
    print(f"learning curve: {arguments.plot}")


if __name__ == "__main__":
    main()
