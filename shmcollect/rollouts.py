"""RolloutReader: finished rollouts, copied into a batch or viewed where they lie, and given back.

``observed >= released + T + 1`` -> read T slots (and the observation after them) -> ``released += T``
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmcollect.batch import Batch, Episode, FinalObs
from shmcollect.errors import ConfigError
from shmcollect.ring import RELEASED, Rings
from shmcollect.spec import Tree

Array = np.ndarray[Any, Any]
Index = np.ndarray[Any, np.dtype[np.int64]]

_SCALARS = ("sequence", "episode_start", "reward", "terminated", "truncated", "interrupted", "policy_version")

_TERMINATED, _TRUNCATED, _INTERRUPTED = map(_SCALARS.index, ("terminated", "truncated", "interrupted"))


class RolloutReader:
    """Reads finished rollouts of T steps. One reader per run, in the learner.

    Args:
        rings: The rings.
        obs: Tree of the observation.
        action: Tree of the action.
    """

    def __init__(self, rings: Rings, obs: Tree, action: Tree) -> None:
        self.rings = rings
        self.length = rings.layout.rollout_length
        self._native = rings.native
        self._obs, self._action = obs, action
        fields = rings.fields
        self._extras_names = [str(rings.layout.fields[i].path[0]) for i in fields["extras"]]
        self._copied = (*(fields[kind][0] for kind in _SCALARS), *fields["obs"], *fields["action"], *fields["extras"])
        self._envs = np.empty(rings.num_envs, np.int64)
        self._starts = np.empty(rings.num_envs, np.int64)

    def finished(self, first_env: int = 0) -> tuple[Index, Index]:
        """Finished rollouts that have not been released, the oldest of each env, from ``first_env`` round.

        Returns:
            Their envs and the sequences of their first steps, int64[n]; valid until the next call.
        """
        n = self._native.finished(self.length, first_env, self._envs, self._starts)
        return self._envs[:n], self._starts[:n]

    def release(self, envs: Index, starts: Index) -> None:
        """Gives the slots of these rollouts back. They must be the oldest of their envs, or the last given back."""
        self._native.advance(RELEASED, envs, starts, len(envs), self.length)

    def rows(self, field: int, envs: Index, sequences: Index) -> Array:
        """One slot's value for each (env, sequence): ``[n, *shape]``, a copy."""
        each = self.rings.layout.fields[field]
        out = np.empty((len(envs), *each.shape), each.dtype)
        self._native.gather(field, envs, sequences, len(envs), 1, out)
        return out

    def view(self, neighbours: range, start: int) -> Batch:
        """The rollouts of neighbouring envs that begin at ``start``, in place; valid until they are released.

        Raises:
            ConfigError: They do not lie in one piece, because the capacity is no multiple of T.
        """
        if self.rings.capacity % self.length:
            raise ConfigError(f"capacity={self.rings.capacity} is not a multiple of {self.length}: no views in place")
        slot = start % self.rings.capacity
        envs = np.array(neighbours, np.int64)
        starts = np.full(len(envs), start, np.int64)
        rows, steps = slice(neighbours.start, neighbours.stop), slice(slot, slot + self.length)
        columns = [self.rings.view(field)[rows, steps] for field in self._copied]
        following = [self.rows(field, envs, starts + self.length) for field in self.rings.fields["obs"]]
        ends = self._ends(columns, envs, starts, first_rollout=0)
        return self._batch(columns, following, envs, [] if ends is None else [ends])

    def draft(self, rollouts: int) -> Draft:
        """An empty batch of so many rollouts, to be filled by copying."""
        return Draft(self, rollouts)

    def _ends(self, columns: list[Array], envs: Index, starts: Index, first_rollout: int) -> _Ends | None:
        """What is kept of the episodes that ended in these rollouts."""
        ends = np.flatnonzero(columns[_TERMINATED] | columns[_TRUNCATED])
        if len(ends) == 0:
            return None
        rollout, step = np.divmod(ends, self.length)
        ended, at, fields = envs[rollout], starts[rollout] + step, self.rings.fields
        final = [self.rows(field, ended, at) for field in fields["final_obs"]]
        records = zip(ended.tolist(), self.rows(fields["episode"][0], ended, at).tolist(), strict=True)
        whole = ~columns[_INTERRUPTED][rollout, step]
        episodes = [
            Episode(env, total, int(length), seconds)
            for env, (total, length, seconds) in itertools.compress(records, whole)
        ]
        index = np.empty((len(ends), 2), np.int64)
        index[:, 0], index[:, 1] = rollout + first_rollout, step
        return _Ends(index, final, episodes)

    def _batch(self, columns: list[Array], following: list[Array], envs: Index, ends: list[_Ends]) -> Batch:
        tensors = [torch.from_numpy(column) for column in columns]
        scalars = dict(zip(_SCALARS, tensors, strict=False))
        rest = iter(tensors[len(_SCALARS) :])
        return Batch(
            obs=self._obs.unflatten([next(rest) for _ in self._obs.leaves]),
            action=self._action.unflatten([next(rest) for _ in self._action.leaves]),
            extras=dict(zip(self._extras_names, rest, strict=True)),
            env_index=torch.from_numpy(envs),
            final_obs=self._final_obs(ends) if self.rings.fields["final_obs"] else None,
            episodes=[episode for each in ends for episode in each.episodes],
            following_obs=self._obs.unflatten([torch.from_numpy(each) for each in following]),
            **scalars,
        )

    def _final_obs(self, ends: list[_Ends]) -> FinalObs:
        leaves = self._obs.leaves
        index = np.concatenate([np.empty((0, 2), np.int64), *(each.index for each in ends)])
        obs = [
            np.concatenate([np.empty((0, *leaf.shape), leaf.dtype), *(each.final[i] for each in ends)])
            for i, leaf in enumerate(leaves)
        ]
        return FinalObs(torch.from_numpy(index), self._obs.unflatten([torch.from_numpy(each) for each in obs]))


@dataclass(frozen=True)
class _Ends:
    """The ends of episodes in some rollouts of a batch."""

    index: Index  # [m, 2]: rollout, step
    final: list[Array]  # per leaf [m, ...]
    episodes: list[Episode]


@dataclass(frozen=True)
class _Part:
    """Rollouts copied together."""

    filled: int  # rollouts of the batch up to here
    envs: Index
    starts: Index
    ends: _Ends | None


class Draft:
    """A batch under construction: every rollout is copied in, and its slots are given back at once.

    An interrupt may end `add` anywhere: rollouts are in the batch once their part is in the list, and only then are
    they released, again if need be.
    """

    def __init__(self, reader: RolloutReader, rollouts: int) -> None:
        layout, fields = reader.rings.layout, reader.rings.fields
        self._reader = reader
        self._native = reader.rings.native
        self._columns = [
            np.empty((rollouts, reader.length, *layout.fields[i].shape), layout.fields[i].dtype) for i in reader._copied
        ]
        self._following = [np.empty((rollouts, *layout.fields[i].shape), layout.fields[i].dtype) for i in fields["obs"]]
        self._parts: list[_Part] = []
        self.size = rollouts

    @property
    def filled(self) -> int:
        """Rollouts added."""
        return self._parts[-1].filled if self._parts else 0

    @property
    def missing(self) -> int:
        """Rollouts still to be added."""
        return self.size - self.filled

    def add(self, envs: Index, starts: Index) -> None:
        """Copies the finished rollouts of these envs that begin at these sequences, and releases them."""
        reader, n, length, filled = self._reader, len(envs), self._reader.length, self.filled
        rows = slice(filled, filled + n)
        for field, column in zip(reader._copied, self._columns, strict=True):
            self._native.gather(field, envs, starts, n, length, column[rows])
        for field, column in zip(reader.rings.fields["obs"], self._following, strict=True):
            self._native.gather(field, envs, starts + length, n, 1, column[rows])
        ends = reader._ends([column[rows] for column in self._columns], envs, starts, filled)
        self._parts.append(_Part(filled + n, envs.copy(), starts.copy(), ends))
        self.settle()

    def settle(self) -> None:
        """Releases what was added last, unless that is done; call it before looking for finished rollouts."""
        if self._parts:
            self._reader.release(self._parts[-1].envs, self._parts[-1].starts)

    def finish(self) -> Batch:
        """The full batch."""
        envs = np.concatenate([part.envs for part in self._parts])
        ends = [part.ends for part in self._parts if part.ends is not None]
        return self._reader._batch(self._columns, self._following, envs, ends)
