"""The learner's side of the rings: ask for steps, take finished rollouts, make batches of them.

``poll()`` never waits: it grants, copies and releases whatever it can, and returns a batch once one is full. Whoever
calls it sleeps on the learner's bell in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from shmcollect.batch import Batch
from shmcollect.config import CollectorConfig
from shmcollect.errors import ExhaustedError
from shmcollect.grants import Grants
from shmcollect.ring import RELEASED
from shmcollect.rollouts import Draft, Index, RolloutReader

_LONGEST_NAP_S = 0.01


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

    def can_go_on(self) -> bool:
        """Whether another poll would do something: a much cheaper look."""

    def nap_s(self) -> float:
        """How long the learner may well look away, because nobody waits for it."""


def make_learner(
    reader: RolloutReader, config: CollectorConfig, before_batch: Callable[[], object] = lambda: None
) -> Learner:
    """The learner that makes batches the way the config says; ``before_batch`` is for `SyncLearner`."""
    if config.sync:
        return SyncLearner(reader, config, before_batch)
    return LendingLearner(reader, config) if config.zero_copy else AsyncLearner(reader, config)


def _next_batch(reader: RolloutReader, config: CollectorConfig) -> int:
    """Rollouts of the next batch: a full one, or what is left. What has been released has been delivered.

    Raises:
        ExhaustedError: Nothing is left.
    """
    if config.total_rollouts is None:
        return config.batch_rollouts
    left = config.total_rollouts - int(reader.rings.cursors(RELEASED).sum()) // reader.length
    if left == 0:
        raise ExhaustedError("all of total_frames has been delivered")
    return min(config.batch_rollouts, left)


class AsyncLearner:
    """Batches of whichever rollouts finish first, taken from the envs in turn.

    At most ``2 * ceil(B / num_envs)`` rollouts of one env are in a batch, as long as another env can still deliver.
    Rollouts finish one by one, all the time; being woken for each would cost the envs more than it brings. So between
    two looks the learner naps for a small part of what a batch takes, as far as the rings have room meanwhile.
    """

    def __init__(self, reader: RolloutReader, config: CollectorConfig) -> None:
        self._reader = reader
        self._config = config
        self._grants = Grants(reader.rings, config.total_rollouts)
        self._most_of_one_env = 2 * -(-config.batch_rollouts // config.num_envs)
        self._taken = np.zeros(config.num_envs, np.int64)
        self._next_env = 0
        self._draft: Draft | None = None
        self._has_room = True  # for steps that have not been granted
        self._began_s = self._batch_s = 0.0
        self._spare = min(1.0, (config.capacity - 1 - reader.length) / reader.length)  # rollouts a ring can go ahead
        self.granted_news = False

    def poll(self) -> Batch | None:
        """See `Learner.poll`."""
        if self._draft is None:
            self._began_s = time.monotonic()
            self._taken[:] = 0
            self._draft = self._reader.draft(_next_batch(self._reader, self._config))
        self._draft.settle()
        self.granted_news = self._grant()
        while self._draft.missing and self._take(self._draft):
            self.granted_news |= self._grant()
        if self._draft.missing:
            return None
        batch = self._draft.finish()
        self._draft = None
        self._batch_s = time.monotonic() - self._began_s
        return batch

    def can_go_on(self) -> bool:
        """See `Learner.can_go_on`."""
        return len(self._acceptable()[0]) > 0

    def nap_s(self) -> float:
        """See `Learner.nap_s`."""
        if self._draft is None:
            return 0.0
        missing = self._draft.missing / self._draft.size
        return min(_LONGEST_NAP_S, self._batch_s * max(1 / 8, 3 / 4 * min(missing, self._spare)))

    def _grant(self) -> bool:
        if not self._has_room:
            return False
        self._grants.draw_to_capacity()
        granted = self._grants.publish()
        self._has_room = False
        return granted

    def _take(self, draft: Draft) -> int:
        """Copies and releases at most one rollout of each env; returns how many."""
        envs, starts = (each[: draft.missing] for each in self._acceptable())
        if len(envs):
            self._has_room = True
            draft.add(envs, starts)
            self._taken[envs] += 1
            self._next_env = (int(envs[-1]) + 1) % self._config.num_envs
        return len(envs)

    def _acceptable(self) -> tuple[Index, Index]:
        """Finished rollouts, without those of envs at their limit as long as others can deliver."""
        envs, starts = self._reader.finished(self._next_env)
        if len(envs) == 0:
            return envs, starts
        allowed = self._taken[envs] < self._most_of_one_env
        if allowed.all() or not (allowed.any() or self._others_can_deliver()):
            return envs, starts
        return envs[allowed], starts[allowed]

    def _others_can_deliver(self) -> bool:
        """Whether an env that is not at its limit has been granted rollouts that are still out."""
        outstanding = self._grants.drawn * self._reader.length > self._reader.rings.cursors(RELEASED)
        return bool((outstanding & (self._taken < self._most_of_one_env)).any())


class LendingLearner:
    """Single rollouts of whichever env finishes one, in place, taken from the envs in turn.

    A rollout is valid until the next one is asked for; meanwhile its env goes on as far as its ring has room.
    """

    def __init__(self, reader: RolloutReader, config: CollectorConfig) -> None:
        self._reader = reader
        self._config = config
        self._grants = Grants(reader.rings, config.total_rollouts)
        self._next_env = 0
        self._lent: tuple[Index, Index] | None = None
        self.granted_news = False

    def poll(self) -> Batch | None:
        """See `Learner.poll`."""
        if self._lent is not None:
            self._reader.release(*self._lent)
            self._lent = None
        _next_batch(self._reader, self._config)
        self._grants.draw_to_capacity()
        self.granted_news = self._grants.publish()
        envs, starts = self._reader.finished(self._next_env)
        if len(envs) == 0:
            return None
        env, lent = int(envs[0]), (envs[:1].copy(), starts[:1].copy())
        batch = self._reader.view(range(env, env + 1), int(starts[0]))
        self._next_env = (env + 1) % self._config.num_envs
        self._lent = lent
        return batch

    def can_go_on(self) -> bool:
        """See `Learner.can_go_on`."""
        return len(self._reader.finished(self._next_env)[0]) > 0

    def nap_s(self) -> float:
        """None: a rollout is wanted as soon as it is there."""
        return 0.0


class SyncLearner:
    """Batches of k rollouts of every env: rollout j of env i is row ``j * num_envs + i``.

    Steps are granted only by asking for a batch, so envs rest between two batches.

    Args:
        reader: Reads the rollouts.
        config: The numbers.
        before_batch: Called between two batches, before the steps of the next one are granted.
    """

    def __init__(
        self, reader: RolloutReader, config: CollectorConfig, before_batch: Callable[[], object] = lambda: None
    ) -> None:
        self._reader = reader
        self._before_batch = before_batch
        self._config = config
        self._grants = Grants(reader.rings, None)
        self._asked = 0  # rollouts of the batch under way; 0 between two batches
        self._draft: Draft | None = None
        self._lent: tuple[Index, Index] | None = None
        self.granted_news = False

    def poll(self) -> Batch | None:
        """See `Learner.poll`."""
        if not self._asked:
            self._begin()
        self.granted_news = self._grants.publish()
        batch = self._lend() if self._draft is None else self._fill(self._draft)
        if batch is not None:
            self._asked = 0
        return batch

    def can_go_on(self) -> bool:
        """See `Learner.can_go_on`."""
        return len(self._round(self._asked if self._draft is None else self._draft.missing)[0]) > 0

    def nap_s(self) -> float:
        """None: once a round is complete, every env waits for the learner."""
        return 0.0

    def _begin(self) -> None:
        """Takes back what was lent and draws the rollouts of the next batch: one of each env, then the next of each."""
        if self._lent is not None:
            self._reader.release(*self._lent)
            self._lent = None
        rollouts, num_envs = _next_batch(self._reader, self._config), self._config.num_envs
        share, extra = divmod(rollouts, num_envs)
        delivered = self._reader.rings.cursors(RELEASED) // self._reader.length
        self._grants.draw_to(delivered + share + (np.arange(num_envs) < extra))
        self._draft = None if self._config.zero_copy else self._reader.draft(rollouts)
        self._before_batch()
        self._asked = rollouts

    def _fill(self, draft: Draft) -> Batch | None:
        """Copies every round that is finished; the batch once that was the last."""
        draft.settle()
        while draft.missing:
            envs, starts = self._round(draft.missing)
            if len(envs) == 0:
                return None
            draft.add(envs, starts)
            self.granted_news |= self._grants.publish()
        return draft.finish()

    def _lend(self) -> Batch | None:
        """The rollouts in place, unreleased until the next batch is asked for."""
        envs, starts = self._round(self._asked)
        if len(envs) == 0:
            return None
        self._lent = envs.copy(), starts.copy()
        return self._reader.view(range(len(envs)), int(starts[0]))

    def _round(self, missing: int) -> tuple[Index, Index]:
        """One finished rollout of each env, or of the first ones if no more are missing; empty until all are there."""
        wanted = min(self._config.num_envs, missing)
        envs, starts = self._reader.finished()
        envs, starts = envs[:wanted], starts[:wanted]
        whole = 0 < wanted == len(envs) and envs[-1] == wanted - 1  # they come in order, from env 0
        return (envs, starts) if whole else (envs[:0], starts[:0])
