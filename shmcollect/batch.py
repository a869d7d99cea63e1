"""Batch: B rollouts of T steps as tensors ``[B, T, ...]``, and what a learner computes from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Nested = Any  # a tensor, or dicts and tuples of them, nested like the space


def map_nested(function: Callable[..., Any], value: Nested, *others: Nested) -> Nested:
    """Applies a function to every tensor of nested dicts and tuples (and to those at the same place in others)."""
    if isinstance(value, dict):
        return {key: map_nested(function, value[key], *(other[key] for other in others)) for key in value}
    if isinstance(value, tuple):
        return tuple(map_nested(function, *parts) for parts in zip(value, *others, strict=True))
    return function(value, *others)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _put(target: Tensor, index: tuple[Tensor, ...], values: Tensor) -> None:
    """``target[index] = values``, also for the unsigned types torch cannot index: the same bits, read as signed."""
    signed = _SIGNED.get(target.dtype, target.dtype)
    target.view(signed).index_put_(index, values.view(signed))


@dataclass(frozen=True, eq=False)
class FinalObs:
    """The true last observation of every episode that ended in a batch.

    Attributes:
        index: ``[M, 2]`` int64, (rollout, step) of the M ends.
        obs: Nested observations ``[M, ...]``.
    """

    index: Tensor
    obs: Nested


class Episode(NamedTuple):
    """An episode that ended in a batch, wherever it began.

    Attributes:
        env_index: Its env.
        episode_return: Sum of its raw rewards, in float64.
        length: Its steps.
        duration_s: Seconds from its reset to its end.
    """

    env_index: int
    episode_return: float
    length: int
    duration_s: float


_PER_STEP = (
    "obs",
    "action",
    "extras",
    "reward",
    "terminated",
    "truncated",
    "interrupted",
    "episode_start",
    "policy_version",
    "sequence",
)


@dataclass(frozen=True, eq=False)
class Batch:
    """B rollouts of T consecutive steps of one env each.

    Attributes:
        obs: Nested observations ``[B, T, ...]``, in the space's dtypes.
        action: Nested actions ``[B, T, ...]``, in the space's dtypes.
        extras: What the policy returned beside the action, ``{name: [B, T, ...]}``.
        reward: ``[B, T]`` float32.
        terminated: ``[B, T]`` bool, as the env gave it.
        truncated: ``[B, T]`` bool, as the env gave it.
        interrupted: ``[B, T]`` bool: the row ends an episode that was cut off by a failure; mask it in losses.
        episode_start: ``[B, T]`` bool: ``obs`` is the first of its episode.
        policy_version: ``[B, T]`` int64: the version that chose the action.
        sequence: ``[B, T]`` int64: number of the step in its env's life.
        env_index: ``[B]`` int64.
        final_obs: The true last observations of the episodes that ended; None with ``final_obs=False``.
        episodes: Records of the episodes that ended.
        following_obs: Nested ``[B, ...]``: the observation published after the last step, which is the reset
            observation where an episode ended there. `bootstrap_obs` is what a value function wants.
    """

    obs: Nested
    action: Nested
    extras: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    interrupted: Tensor
    episode_start: Tensor
    policy_version: Tensor
    sequence: Tensor
    env_index: Tensor
    final_obs: FinalObs | None
    episodes: list[Episode]
    following_obs: Nested

    def __len__(self) -> int:
        """B, the rollouts."""
        return len(self.env_index)

    @property
    def num_frames(self) -> int:
        """B * T."""
        return self.reward.numel()

    @property
    def next_obs(self) -> Nested:
        """What every step led to, nested ``[B, T, ...]``; the final observation where an episode ended. Made anew.

        Raises:
            ValueError: An episode ended and ``final_obs=False`` left its final observation out.
        """
        final = self._final_obs(self.terminated | self.truncated)
        last = map_nested(lambda obs, after: torch.cat((obs[:, 1:], after[:, None]), 1), self.obs, self.following_obs)
        if len(final.index):
            rollout, step = final.index.unbind(1)
            map_nested(lambda obs, true: _put(obs, (rollout, step), true), last, final.obs)
        return last

    @property
    def bootstrap_obs(self) -> Nested:
        """``next_obs[:, -1]``, nested ``[B, ...]``, made anew.

        Raises:
            ValueError: An episode ended in a last step and ``final_obs=False`` left its final observation out.
        """
        final = self._final_obs((self.terminated | self.truncated)[:, -1:])
        result = map_nested(torch.clone, self.following_obs)
        at_end = final.index[:, 1] == self.reward.shape[1] - 1
        rollout = final.index[at_end, 0]
        if len(rollout):
            map_nested(lambda obs, true: _put(obs, (rollout,), true[at_end]), result, final.obs)
        return result

    def _final_obs(self, ended: Tensor) -> FinalObs:
        if self.final_obs is not None:
            return self.final_obs
        if ended.any():
            raise ValueError("final_obs=False left out the final observations, and an episode ended here")
        return FinalObs(self.env_index.new_empty((0, 2)), map_nested(lambda obs: obs[:0], self.following_obs))

    def to(self, device: torch.device | str) -> Batch:
        """The batch with every tensor on a device; the same one where it already is."""
        names = (*_PER_STEP, "env_index", "following_obs")
        moved = {name: map_nested(lambda t: t.to(device), getattr(self, name)) for name in names}
        final = self.final_obs
        if final is not None:
            final = FinalObs(final.index.to(device), map_nested(lambda t: t.to(device), final.obs))
        return replace(self, **moved, final_obs=final)

    def to_dict(self) -> dict[str, Any]:
        """All fields ``[B, T, ...]`` that have a value per step, by name."""
        return {name: getattr(self, name) for name in _PER_STEP}

    def flatten(self) -> dict[str, Any]:
        """The fields of `to_dict` as ``[B * T, ...]``, with ``env_index`` repeated for every step."""
        flat = {name: map_nested(lambda t: t.flatten(0, 1), value) for name, value in self.to_dict().items()}
        return {**flat, "env_index": self.env_index.repeat_interleave(self.reward.shape[1])}
