"""The policies: small enough that the engine around them shows, real enough to be a policy."""

import torch
from torch import Tensor, nn

from benchmarks.workloads import IMAGE_SHAPE, Workload

PIXEL_STRIDE = 8

Answer = tuple[Tensor, dict[str, Tensor]]


def sample(logits: Tensor) -> Answer:
    """Draws from the categorical by the Gumbel-max trick; the log-probability goes along as an extra."""
    negative_gumbel = torch.empty_like(logits).exponential_().log_()
    log_probs = logits.log_softmax(-1)
    action = (log_probs - negative_gumbel).argmax(-1, keepdim=True)
    return action.squeeze(-1), {"log_prob": log_probs.gather(-1, action).squeeze(-1)}


class VectorPolicy(nn.Module):
    """Two hidden layers of 64."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_actions)
        )

    def forward(self, obs: Tensor) -> Answer:
        return sample(self.net(obs))


class ImagePolicy(nn.Module):
    """One linear layer on every eighth pixel of every eighth row."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        height, width, channels = IMAGE_SHAPE
        num_inputs = len(range(0, height, PIXEL_STRIDE)) * len(range(0, width, PIXEL_STRIDE)) * channels
        self.linear = nn.Linear(num_inputs, num_actions)

    def forward(self, obs: Tensor) -> Answer:
        pixels = obs[:, ::PIXEL_STRIDE, ::PIXEL_STRIDE].flatten(1).float()
        return sample(self.linear(pixels / 255))


def make_policy(workload: Workload) -> nn.Module:
    """The policy of a workload, with the same weights in every process."""
    torch.manual_seed(0)
    if workload.shape == IMAGE_SHAPE:
        return ImagePolicy(workload.num_actions)
    return VectorPolicy(workload.shape[0], workload.num_actions)
