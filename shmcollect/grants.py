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
        total: Rollouts of the whole run; None without end.
    """

    def __init__(self, rings: Rings, total: int | None) -> None:
        self._rings = rings
        self._length = rings.layout.rollout_length
        self._total = total
        self._granted = rings.cursors(GRANTED)
        self._drawn = self._granted // self._length  # rollouts, per env
        self._grant_count = rings.layout.words["grant_count"]

    @property
    def drawn(self) -> Index:
        """Rollouts each env was allowed so far, int64[num_envs]."""
        return self._drawn

    def draw_to(self, rollouts: Index) -> None:
        """Allows each env so many rollouts in all, as far as the budget goes: one each, then the next each."""
        if self._total is None:
            self._drawn = np.maximum(self._drawn, rollouts)
            return
        drawn = self._drawn.copy()
        while (each := rollouts > drawn).any():
            each &= np.cumsum(each) <= self._total - drawn.sum()
            if not each.any():
                break
            drawn += each
        self._drawn = drawn

    def draw_to_capacity(self) -> None:
        """Allows each env the rollouts its ring has room for."""
        self.draw_to(-(-self._room() // self._length))

    def publish(self) -> bool:
        """Grants what was drawn, as far as the rings have room, to all envs at once; says whether that was news.

        Inference takes no batch from half a grant: what is granted together may be acted on together.
        """
        granted = np.minimum(self._room(), self._drawn * self._length)
        envs = np.flatnonzero(granted > self._granted)
        if len(envs) == 0:
            return False
        buffer, grants = self._rings.buffer, self._grant_count
        odd = _native.load(buffer, grants) | 1  # it may be odd before: an interrupt can end this anywhere
        _native.store(buffer, grants, odd)  # SYNC: grant count
        _native.fence()
        self._rings.native.advance(GRANTED, envs, granted[envs], len(envs), 0)
        _native.store(buffer, grants, odd + 1)
        self._granted[envs] = granted[envs]
        return True

    def _room(self) -> Index:
        """How many steps of each env its ring allows in all."""
        return self._rings.cursors(RELEASED) + self._rings.capacity - 1
