"""The learner's side of the rings: ask for steps, take finished rollouts, make batches of them.

``poll()`` never waits: it grants, copies and releases whatever it can, and returns a batch once one is full. Whoever
calls it sleeps on the learner's bell in between.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shmcollect.batch import Batch
from shmcollect.config import CollectorConfig
from shmcollect.errors import ExhaustedError
from shmcollect.grants import Grants
from shmcollect.ring import RELEASED
from shmcollect.rollouts import Draft, Index, RolloutReader


class Learner(Protocol):
    """How batches are made; one per run."""

    def poll(self) -> Batch | None:
        """Does what can be done without waiting; a batch once one is full.

        Raises:
            ExhaustedError: All of ``total_frames`` has been delivered.
        """

    @property
    def granted_news(self) -> bool:
        """Whether the last poll granted steps, so that inference must be told."""


class _Remaining:
    """Rollouts still to be delivered."""

    def __init__(self, config: CollectorConfig) -> None:
        self._batch = config.batch_rollouts
        self._left = config.total_rollouts

    def next_batch(self) -> int:
        """Rollouts of the next batch: a full one, or what is left."""
        if self._left == 0:
            raise ExhaustedError("all of total_frames has been delivered")
        return self._batch if self._left is None else min(self._batch, self._left)

    def delivered(self, rollouts: int) -> None:
        if self._left is not None:
            self._left -= rollouts


class AsyncLearner:
    """Batches of whichever rollouts finish first, taken from the envs in turn.

    At most ``2 * ceil(B / num_envs)`` rollouts of one env are in a batch, as long as another env can still deliver.
    """

    def __init__(self, reader: RolloutReader, config: CollectorConfig) -> None:
        self._reader = reader
        self._remaining = _Remaining(config)
        self._grants = Grants(reader.rings, config.total_rollouts)
        self._num_envs = config.num_envs
        self._most_of_one_env = 2 * -(-config.batch_rollouts // config.num_envs)
        self._taken = np.zeros(config.num_envs, np.int64)
        self._next_env = 0
        self._draft: Draft | None = None
        self.granted_news = False

    def poll(self) -> Batch | None:
        """See `Learner.poll`."""
        if self._draft is None:
            self._draft = self._reader.draft(self._remaining.next_batch())
            self._taken[:] = 0
        self.granted_news = self._grant()
        while self._draft.missing and self._take(self._draft):
            self.granted_news |= self._grant()
        if self._draft.missing:
            return None
        batch = self._draft.finish()
        self._remaining.delivered(len(batch))
        self._draft = None
        return batch

    def _grant(self) -> bool:
        self._grants.draw_to_capacity()
        return self._grants.publish()

    def _take(self, draft: Draft) -> int:
        """Copies and releases at most one rollout of each env; returns how many."""
        envs, starts = self._reader.finished(self._next_env)
        allowed = self._taken[envs] < self._most_of_one_env
        if not allowed.all() and (allowed.any() or self._others_can_deliver()):
            envs, starts = envs[allowed], starts[allowed]
        envs, starts = envs[: draft.missing], starts[: draft.missing]
        if len(envs):
            draft.add(envs, starts)
            self._reader.release(envs, starts)
            self._taken[envs] += 1
            self._next_env = (int(envs[-1]) + 1) % self._num_envs
        return len(envs)

    def _others_can_deliver(self) -> bool:
        """Whether an env that is not at its limit has been granted rollouts that are still out."""
        outstanding = self._grants.drawn * self._reader.length > self._reader.rings.cursors(RELEASED)
        return bool((outstanding & (self._taken < self._most_of_one_env)).any())


class SyncLearner:
    """Batches of k rollouts of every env: rollout j of env i is row ``j * num_envs + i``.

    Steps are granted only by asking for a batch, so envs rest between two batches.
    """

    def __init__(self, reader: RolloutReader, config: CollectorConfig) -> None:
        self._reader = reader
        self._remaining = _Remaining(config)
        self._grants = Grants(reader.rings, None)
        self._num_envs = config.num_envs
        self._zero_copy = config.zero_copy
        self._missing = 0
        self._draft: Draft | None = None
        self._lent: tuple[Index, Index] | None = None
        self.granted_news = False

    def poll(self) -> Batch | None:
        """See `Learner.poll`."""
        if not self._missing:
            self._begin(self._remaining.next_batch())
        self.granted_news = self._grants.publish()
        while self._missing:
            wanted = min(self._num_envs, self._missing)
            envs, starts = self._reader.finished()
            envs, starts = envs[:wanted], starts[:wanted]  # in order from env 0, so whole once the last is wanted - 1
            if len(envs) < wanted or envs[-1] != wanted - 1:
                return None
            self._missing -= wanted
            if self._draft is None:
                return self._lend(envs.copy(), starts.copy())
            self._draft.add(envs, starts)
            self._reader.release(envs, starts)
            self.granted_news |= self._grants.publish()
        assert self._draft is not None
        return self._deliver(self._draft.finish())

    def _begin(self, rollouts: int) -> None:
        """Takes back what was lent and draws the rollouts of the next batch: one of each env, then the next of each."""
        if self._lent is not None:
            self._reader.release(*self._lent)
            self._lent = None
        share, extra = divmod(rollouts, self._num_envs)
        self._grants.draw(np.array([share + (env < extra) for env in range(self._num_envs)], np.int64))
        self._missing = rollouts
        self._draft = None if self._zero_copy else self._reader.draft(rollouts)

    def _lend(self, envs: Index, starts: Index) -> Batch:
        """The rollouts in place, unreleased until the next batch is asked for."""
        self._lent = (envs, starts)
        return self._deliver(self._reader.view(len(envs), int(starts[0])))

    def _deliver(self, batch: Batch) -> Batch:
        self._remaining.delivered(len(batch))
        return batch
