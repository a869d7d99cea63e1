"""Patience: a time-out that adds up the time its owner saw pass.

A machine that was suspended, or a caller stopped by Ctrl-Z, must not find everybody overdue when it wakes: of the time
between two looks at most a second counts.
"""

from __future__ import annotations

import time

_LONGEST_LOOK_S = 1.0


class Patience:
    """Grows from look to look.

    Args:
        limit_s: How much is too much; None: there is no limit.

    Attributes:
        waited_s: How much has been seen to pass.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = float("inf") if limit_s is None else limit_s
        self._looked_s = time.monotonic()
        self.waited_s = 0.0

    def look(self) -> bool:
        """Adds what has passed since the last look; says whether patience has run out."""
        now_s = time.monotonic()
        self.waited_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        return self.waited_s >= self._limit_s
