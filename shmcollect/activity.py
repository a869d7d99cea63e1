"""What each env is doing, one word per env, written by its worker: a time-out must know a slow env from a slow peer.

A reset is always announced. A step is announced only in a run with a ``step_timeout``: it would cost every step.
"""

from __future__ import annotations

from shmcollect import _native
from shmcollect.segment import Segment

IDLE, STEPPING, RESETTING = range(3)
NAMES = {STEPPING: "step", RESETTING: "reset"}


class Activity:
    """The words of a segment."""

    __slots__ = ("_buffer", "_offsets")

    def __init__(self, segment: Segment) -> None:
        self._buffer = segment.buffer
        self._offsets = segment.layout.activities

    def __getitem__(self, env: int) -> int:
        """``IDLE``, ``STEPPING`` or ``RESETTING``."""
        return _native.load(self._buffer, self._offsets[env])

    def __setitem__(self, env: int, activity: int) -> None:
        """Says what an env does from now on; for its worker, or for who has buried it."""
        _native.store(self._buffer, self._offsets[env], activity)
