"""Default policies, made from the spaces: what the command line runs. Also a start for training.

body: observation -> features; one linear layer; per leaf of the action space a head: its outputs -> a distribution
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from shmcollect.errors import ConfigError
from shmcollect.spec import Leaf, Space, Tree, describe
from shmcollect.values import Array

KINDS = ("auto", "mlp", "cnn", "random")

_HIDDEN = 64
_SMALLEST_IMAGE = 36  # pixels; the Nature network turns these into one
_MOST_CATEGORIES = 2**16  # per leaf; above that, one number per category is no sensible network
_MOST_INTEGERS = 256  # values of an element of an integer Box that are told apart; any byte fits
_WIDEST_INTERVAL = 1e6  # bounds further apart were declared by an env that has none in mind


def make_policy(kind: str, observation_space: Space, action_space: Space) -> Callable[[Any], Any]:
    """A stochastic policy for these spaces.

    Args:
        kind: ``"mlp"``: two hidden layers on the flattened observation. ``"cnn"``: the Nature network, for images.
            ``"auto"``: cnn for images of bytes, else mlp. ``"random"``: uniform actions, no network.
        observation_space: Box, Discrete, MultiBinary, MultiDiscrete, or Dict and Tuple of these.
        action_space: Likewise.

    Returns:
        A `StochasticPolicy`, or for ``"random"`` a `RandomPolicy`. Both take observations with leading dimension n,
        tensors nested like the space, and return actions in the dtypes of their space.

    Raises:
        ConfigError: An unknown kind, or spaces it cannot work with.
        SpecError: A space that does not fit a fixed slot.
    """
    if kind == "auto":
        kind = "cnn" if _is_byte_image(observation_space) else "mlp"
    if kind == "random":
        return RandomPolicy(observation_space, action_space)
    if kind == "mlp":
        return StochasticPolicy(MLP(observation_space), action_space)
    if kind == "cnn":
        return StochasticPolicy(NatureCNN(observation_space), action_space)
    raise ConfigError(f"policy {kind!r}: expected one of {', '.join(KINDS)}")


class RandomPolicy:
    """Uniform actions; normal or exponential where a Box has no bound, as ``Box.sample`` draws them.

    Args:
        observation_space: Says how many rows an observation has.
        action_space: What to draw from; the draws follow torch's seed at construction.
    """

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self._obs = Tree.from_space(observation_space, root="obs")
        self._action = Tree.from_space(action_space, root="action")
        self._spaces = [_space_at(action_space, leaf) for leaf in self._action.leaves]
        self._generator = np.random.default_rng(int(torch.randint(2**31, ())))

    def __call__(self, obs: Any) -> Any:
        """Actions with the leading dimension of ``obs``, as tensors nested like the action space."""
        n = len(self._obs.flatten(obs)[0])
        pairs = zip(self._action.leaves, self._spaces, strict=True)
        return self._action.unflatten([torch.from_numpy(self._draw(leaf, space, n)) for leaf, space in pairs])

    def _draw(self, leaf: Leaf, space: Space, n: int) -> Array:
        size = (n, *leaf.shape)
        if isinstance(space, spaces.Box) and leaf.dtype.kind == "f":
            return _draw_floats(self._generator, space, size).astype(leaf.dtype).clip(space.low, space.high)
        bounded: Any = space if isinstance(space, spaces.Box) else leaf
        return np.asarray(self._generator.integers(bounded.low, bounded.high, size, leaf.dtype, endpoint=True))


class StochasticPolicy(nn.Module):
    """A body, one linear layer, and a distribution per leaf of the action space.

    Args:
        body: Maps observations to features [n, ``body.features``].
        action_space: What to sample from.
    """

    def __init__(self, body: Body, action_space: Space) -> None:
        super().__init__()
        self._action = Tree.from_space(action_space, root="action")
        self._heads: list[Head] = [_head(_space_at(action_space, leaf), leaf) for leaf in self._action.leaves]
        self.body = body
        self.heads = nn.ModuleList(self._heads)
        self._sizes = [head.size for head in self._heads]
        self.out = _linear(body.features, sum(self._sizes))

    def forward(self, obs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Samples actions.

        Args:
            obs: Tensors with leading dimension n, nested like the observation space.

        Returns:
            Actions with leading dimension n, nested like the action space, in its dtypes, and
            ``{"log_prob": float32[n]}``, which gradients flow through (not through the actions).
        """
        outputs = self._outputs(obs)
        with torch.no_grad():
            leaves = [head.sample(each) for head, each in zip(self._heads, outputs, strict=True)]
        return self._action.unflatten(leaves), {"log_prob": self._log_prob(outputs, leaves)}

    def log_prob(self, obs: Any, action: Any) -> Tensor:
        """The log-probability (of a Box: density) of given actions, float32[n], e.g. of a batch from the past."""
        return self._log_prob(self._outputs(obs), self._action.flatten(action))

    def _outputs(self, obs: Any) -> tuple[Tensor, ...]:
        outputs: Tensor = self.out(self.body(obs))
        return torch.split(outputs, self._sizes, dim=1)

    def _log_prob(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tensor:
        parts = [head.log_prob(*each) for head, *each in zip(self._heads, outputs, leaves, strict=True)]
        return sum(parts[1:], parts[0])


# ---- bodies: observation -> features


class Body(nn.Module):
    """Maps observations, or one leaf of them, to features [n, ``features``]."""

    features: int


class MLP(Body):
    """Two hidden layers on the flattened observation: one-hot integers, bytes scaled to [0, 1], other numbers as such.

    Raises:
        ConfigError: Discrete leaves with too many values for a one-hot.
    """

    features = _HIDDEN

    def __init__(self, observation_space: Space) -> None:
        super().__init__()
        self._obs = Tree.from_space(observation_space, root="obs")
        self._encoders: list[Body] = [
            _OneHot(leaf) if _is_categorical(leaf) else _Numbers(leaf) for leaf in self._obs.leaves
        ]
        self.encoders = nn.ModuleList(self._encoders)
        width = sum(encoder.features for encoder in self._encoders)
        self.layers = nn.Sequential(_linear(width, _HIDDEN), nn.Tanh(), _linear(_HIDDEN, _HIDDEN), nn.Tanh())

    def forward(self, obs: Any) -> Tensor:
        """Features [n, 64]."""
        leaves = self._obs.flatten(obs)
        parts = [encoder(leaf) for encoder, leaf in zip(self._encoders, leaves, strict=True)]
        features: Tensor = self.layers(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        return features


class NatureCNN(Body):
    """The network of Mnih et al. (2015), "Human-level control through deep reinforcement learning", Nature 518.

    Args:
        observation_space: A Box [H, W, C], [C, H, W] or [S, H, W] (a stack of S images): the smaller one of the first
            and the last axis is the channels.

    Raises:
        ConfigError: Another space, or an image too small for the network.
    """

    features = 512

    def __init__(self, observation_space: Space) -> None:
        super().__init__()
        shape = getattr(observation_space, "shape", None)
        if not isinstance(observation_space, spaces.Box) or shape is None or len(shape) != 3:
            raise ConfigError(f"policy 'cnn': expected an image, a Box of 3 axes; got {observation_space}")
        self._channels_last = _channel_axis(shape) == 2
        channels, height, width = _image_shape(shape)
        if min(height, width) < _SMALLEST_IMAGE or channels == 0:
            raise ConfigError(
                f"policy 'cnn': expected an image of at least {_SMALLEST_IMAGE} x {_SMALLEST_IMAGE} pixels; got shape "
                f"{shape}, which reads as {channels} channels of {height} x {width}"
            )
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        positions = math.prod(_conv_size(_conv_size(_conv_size(side, 8, 4), 4, 2), 3, 1) for side in (height, width))
        self.dense = nn.Sequential(nn.Linear(64 * positions, self.features), nn.ReLU())

    def forward(self, obs: Tensor) -> Tensor:
        """Features [n, 512]."""
        image = obs.permute(0, 3, 1, 2) if self._channels_last else obs
        features: Tensor = self.dense(self.convolutions(_as_floats(image)))
        return features


class _OneHot(Body):
    """The elements of a Discrete or MultiDiscrete, each as a one-hot, side by side."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        lows, counts = _categories(leaf.low, leaf.high, describe(leaf.path, "obs"))
        self.features = sum(counts)
        self._shifts: Tensor
        ends = np.cumsum(counts, dtype=np.int64)
        self.register_buffer("_shifts", torch.from_numpy(ends - counts - lows), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        positions = values.reshape(len(values), len(self._shifts)).long() + self._shifts
        return torch.zeros(len(values), self.features, device=values.device).scatter_(1, positions, 1.0)


class _Numbers(Body):
    """A Box or MultiBinary, flat."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.features = math.prod(leaf.shape)

    def forward(self, values: Tensor) -> Tensor:
        return _as_floats(values.reshape(len(values), self.features))


# ---- heads: outputs -> a distribution over one leaf of the action space


class Head(nn.Module):
    """A distribution given by the outputs [n, ``size``] of a network.

    Attributes:
        size: How many outputs it takes.
    """

    size: int

    def sample(self, outputs: Tensor) -> Tensor:
        """Values [n, *shape] of the leaf's dtype."""
        raise NotImplementedError

    def log_prob(self, outputs: Tensor, values: Tensor) -> Tensor:
        """Their joint log-probability [n]."""
        raise NotImplementedError


class _Categorical(Head):
    """Independent categoricals, one per element, each over the integers from its lowest to its highest value."""

    def __init__(self, leaf: Leaf, low: Any, high: Any) -> None:
        super().__init__()
        lows, counts = _categories(low, high, describe(leaf.path, "action"))
        self.size = sum(counts)
        self._shape, self._dtype = leaf.shape, _torch_dtype(leaf)
        self._elements, self._longest = len(counts), max(counts, default=1)
        self._equal = self.size == self._elements * self._longest
        self._lows: Tensor
        self._used: Tensor
        self.register_buffer("_lows", torch.from_numpy(lows), persistent=False)
        used = torch.arange(self._longest) < torch.tensor(counts, dtype=torch.int64)[:, None]
        self.register_buffer("_used", used, persistent=False)

    def sample(self, outputs: Tensor) -> Tensor:
        logits = self._logits(outputs)
        # Gumbel-max: the largest logit, each plus Gumbel noise, is a sample of their softmax; -log(exponential) is
        # such noise. It is finite, so that categories an element does not have stay at -inf.
        noise = torch.empty_like(logits).exponential_().log_()
        indices = (logits - noise).argmax(dim=2)
        return (indices + self._lows).to(self._dtype).reshape(len(outputs), *self._shape)

    def log_prob(self, outputs: Tensor, values: Tensor) -> Tensor:
        indices = values.reshape(len(outputs), self._elements).long() - self._lows
        chosen = self._logits(outputs).log_softmax(dim=2).gather(2, indices[:, :, None])
        return chosen.sum(dim=(1, 2))

    def _logits(self, outputs: Tensor) -> Tensor:
        """Outputs as [n, elements, categories], -inf where an element has fewer categories than others."""
        if self._equal:
            return outputs.reshape(len(outputs), self._elements, self._longest)
        logits = outputs.new_full((len(outputs), self._elements, self._longest), -math.inf)
        logits[:, self._used] = outputs
        return logits


class _Bernoulli(Head):
    """Independent bits."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.size = math.prod(leaf.shape)
        self._shape, self._dtype = leaf.shape, _torch_dtype(leaf)

    def sample(self, outputs: Tensor) -> Tensor:
        bits = torch.rand_like(outputs) < outputs.sigmoid()
        return bits.to(self._dtype).reshape(len(outputs), *self._shape)

    def log_prob(self, outputs: Tensor, values: Tensor) -> Tensor:
        bits = values.reshape(outputs.shape) != 0
        return functional.logsigmoid(torch.where(bits, outputs, -outputs)).sum(dim=1)


class _Gaussian(Head):
    """Independent normals with a standard deviation of their own, clamped into the bounds of a Box of floats.

    An interval sets the scale of its element: output 0 is its centre, a standard deviation at first a quarter of it.
    What lies beyond a bound becomes the bound, so there the log-probability is that of the whole tail.
    """

    def __init__(self, leaf: Leaf, space: spaces.Box) -> None:
        super().__init__()
        self.size = math.prod(leaf.shape)
        self._shape, self._dtype = leaf.shape, _torch_dtype(leaf)
        low, high = (np.asarray(bound, leaf.dtype).reshape(-1) for bound in (space.low, space.high))
        centre, scale = _location(low.astype(np.float64), high.astype(np.float64))
        self.log_std = nn.Parameter(torch.full((self.size,), math.log(0.5)))
        self._low: Tensor
        self._high: Tensor
        self._centre: Tensor
        self._scale: Tensor
        self.register_buffer("_low", torch.from_numpy(low), persistent=False)
        self.register_buffer("_high", torch.from_numpy(high), persistent=False)
        self.register_buffer("_centre", torch.from_numpy(centre).float(), persistent=False)
        self.register_buffer("_scale", torch.from_numpy(scale).float(), persistent=False)

    def sample(self, outputs: Tensor) -> Tensor:
        mean, std = self._mean_std(outputs)
        values = (mean + std * torch.randn_like(mean)).to(self._dtype)
        return values.clamp(self._low, self._high).reshape(len(outputs), *self._shape)

    def log_prob(self, outputs: Tensor, values: Tensor) -> Tensor:
        values = values.reshape(outputs.shape)
        mean, std = self._mean_std(outputs)
        distance = (values.float() - mean) / std
        inside = -0.5 * distance.square() - std.log() - 0.5 * math.log(2 * math.pi)
        at_low, at_high = values <= self._low, values >= self._high
        tail = torch.special.log_ndtr(torch.where(at_high, -distance, distance))
        log_prob = torch.where(at_low | at_high, tail, inside)
        return torch.where(at_low & at_high, 0.0, log_prob).sum(dim=1)

    def _mean_std(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return self._centre + self._scale * outputs, self._scale * self.log_std.exp()


def _head(space: Space, leaf: Leaf) -> Head:
    if isinstance(space, spaces.MultiBinary) or leaf.dtype.kind == "b":
        return _Bernoulli(leaf)
    if not isinstance(space, spaces.Box):
        return _Categorical(leaf, leaf.low, leaf.high)
    if leaf.dtype.kind == "f":
        return _Gaussian(leaf, space)
    bounds = zip(space.low.flat, space.high.flat, strict=True)
    if any(int(high) - int(low) >= _MOST_INTEGERS for low, high in bounds):
        raise ConfigError(
            f"{describe(leaf.path, 'action')}: expected a Box of at most {_MOST_INTEGERS} integers per element; got "
            f"{space}; the policy 'random' takes it"
        )
    return _Categorical(leaf, space.low, space.high)


# ---- spaces


def _space_at(space: Any, leaf: Leaf) -> Space:
    for step in leaf.path:
        space = space[step]
    assert isinstance(space, spaces.Space)
    return space


def _is_categorical(leaf: Leaf) -> bool:
    return leaf.is_scalar or isinstance(leaf.low, np.ndarray)


def _categories(low: Any, high: Any, name: str) -> tuple[Array, list[int]]:
    """The lowest value of each element, int64, and how many values it has."""
    lows, highs = ([int(bound) for bound in np.ravel(bounds)] for bounds in (low, high))
    counts = [most - least + 1 for least, most in zip(lows, highs, strict=True)]
    if sum(counts) > _MOST_CATEGORIES:
        raise ConfigError(
            f"{name}: expected at most {_MOST_CATEGORIES} categories, got {sum(counts)}; the policy 'random' takes it"
        )
    return np.array(lows, np.int64), counts


def _channel_axis(shape: tuple[int, ...]) -> int:
    return 0 if shape[0] < shape[2] else 2


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height, width."""
    return (shape[0], shape[1], shape[2]) if _channel_axis(shape) == 0 else (shape[2], shape[0], shape[1])


def _is_byte_image(space: Space) -> bool:
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
        return False
    channels, height, width = _image_shape(space.shape)
    return channels > 0 and min(height, width) >= _SMALLEST_IMAGE


def _conv_size(side: int, kernel: int, stride: int) -> int:
    return (side - kernel) // stride + 1


def _location(low: Array, high: Array) -> tuple[Array, Array]:
    """Centre and half width of each interval; the bounded value nearest to 0 and 1 where there is none."""
    is_interval = (low < high) & (high < low + _WIDEST_INTERVAL)
    low_or_0, high_or_0 = np.where(is_interval, low, 0.0), np.where(is_interval, high, 0.0)
    centre = np.where(is_interval, (low_or_0 + high_or_0) / 2, np.clip(0.0, low, high))
    return centre, np.where(is_interval, (high_or_0 - low_or_0) / 2, 1.0)


def _draw_floats(generator: np.random.Generator, space: spaces.Box, size: tuple[int, ...]) -> Array:
    below, above = np.isfinite(space.low), np.isfinite(space.high)
    low, high = (np.where(np.isfinite(bound), bound, 0.0).astype(np.float64) for bound in (space.low, space.high))
    share = generator.random(size)
    exponential = -np.log1p(-share)
    # A weighted mean rather than low + share * (high - low), which overflows for the whole range of float64.
    between = low * (1 - share) + high * share
    drawn = [between, low + exponential, high - exponential]
    return np.select([below & above, below, above], drawn, generator.standard_normal(size))


# ---- tensors


def _as_floats(values: Tensor) -> Tensor:
    floats = values.to(torch.float32)
    return floats / 255 if values.dtype == torch.uint8 else floats


def _torch_dtype(leaf: Leaf) -> torch.dtype:
    return torch.from_numpy(np.empty(0, leaf.dtype)).dtype


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer, also without inputs or outputs: spaces of no elements are legal, and torch warns about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return nn.Linear(inputs, outputs)
