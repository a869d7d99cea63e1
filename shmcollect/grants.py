"""How many steps each env may take: bounded by its ring, and by the frames the run is to have.

``granted <= released + capacity - 1``, always: an acted step has room for its successor, and nothing unreleased is
ever overwritten. With a budget, whole rollouts are drawn per env, so the run ends with exactly that many.
"""

from __future__ import annotations

import numpy as np

from shmcollect import _native
from shmcollect.ring import GRANTED, RELEASED, Rings

Index = np.ndarray[tuple[int], np.dtype[np.int64]]


class Grants:
    """Grants steps; used by the learner alone.

    Args:
        rings: The rings.
        budget: Rollouts that may still be drawn; None without end.
    """

    def __init__(self, rings: Rings, budget: int | None) -> None:
        self._rings = rings
        self._length = rings.layout.rollout_length
        self._budget = budget
        self._granted = rings.cursors(GRANTED)
        self._drawn = self._granted // self._length  # rollouts, per env
        self._grant_count = rings.layout.words["grant_count"]
        self._zero = np.zeros(1, np.int64)

    @property
    def drawn(self) -> Index:
        """Rollouts each env was allowed so far, int64[num_envs]."""
        return self._drawn

    def draw(self, rollouts: Index) -> None:
        """Allows each env so many more rollouts, as far as the budget goes: one each, then the next each."""
        wanted = rollouts.copy()
        while wanted.any():
            each = (wanted > 0).astype(np.int64)
            if self._budget is not None:
                each[np.cumsum(each) > self._budget] = 0
                if not each.any():
                    return
                self._budget -= int(each.sum())
            self._drawn += each
            wanted -= each

    def draw_to_capacity(self) -> None:
        """Allows each env the rollouts its ring has room for."""
        room = self._rings.cursors(RELEASED) + self._rings.capacity - 1
        self.draw(np.maximum(0, -(-room // self._length) - self._drawn))

    def publish(self) -> bool:
        """Grants what was drawn, as far as the rings have room, to all envs at once; says whether that was news.

        Inference takes no batch from half a grant: what is granted together may be acted on together.
        """
        room = self._rings.cursors(RELEASED) + self._rings.capacity - 1
        granted = np.minimum(room, self._drawn * self._length)
        envs = np.flatnonzero(granted > self._granted)
        if len(envs) == 0:
            return False
        self._granted[envs] = granted[envs]
        buffer = self._rings.buffer
        _native.store(buffer, self._grant_count, _native.load(buffer, self._grant_count) + 1)  # SYNC: grant count
        _native.fence()
        self._rings.native.advance(GRANTED, envs, granted[envs], len(envs), 0)
        _native.store(buffer, self._grant_count, _native.load(buffer, self._grant_count) + 1)
        return True
