"""Look, yield, sleep: how a role waits without burning a core or losing a wake-up.

A doorbell is an eventcount on a futex word: ``key = prepare()``, check every condition, ``wait(key, timeout)``;
``notify()`` from the other side, after publishing. One sleeper per bell, any number of notifiers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from mmap import mmap

from shmcollect import _native

LONGEST_SLEEP_S = 0.1  # every sleeper looks again after this long, so that no death can hang it
# Waking a sleeper costs about this much, a hand-over to one that is awake next to nothing: so one yields for a while
# before sleeping. Where that keeps being in vain (long steps, many more processes than cores), it is given up.
_YIELD_NS = 50_000


class Doorbell:
    """One bell in a segment.

    Attributes:
        yields: Whether its sleeper yields before it sleeps.
    """

    __slots__ = ("_buffer", "_offset", "_yield_ns", "yields")

    def __init__(self, buffer: mmap, offset: int) -> None:
        self._buffer = buffer
        self._offset = offset
        self._yield_ns = _YIELD_NS
        self.yields = True

    def notify(self) -> None:
        """Wakes the sleeper, if there is one: a system call only then. Publish first."""
        _native.bell_notify(self._buffer, self._offset)

    def prepare(self) -> int:
        """Announces the sleeper and returns the key to sleep on; check every condition after this, then `wait`."""
        return _native.bell_prepare(self._buffer, self._offset)

    def cancel(self) -> None:
        """Withdraws the announcement: a condition holds, there is no need to sleep."""
        _native.bell_cancel(self._buffer, self._offset)

    def wait(self, key: int, timeout_s: float) -> bool:
        """Sleeps until notified since `prepare` (True) or for ``timeout_s`` (False)."""
        deadline_ns = time.monotonic_ns() + max(0, int(timeout_s * 1e9))
        return _native.bell_wait(self._buffer, self._offset, key, deadline_ns)

    def wait_until(self, look: Callable[[], bool], timeout_s: float) -> bool:
        """Having looked in vain: yields between looks for a while, then sleeps once; True as soon as ``look()`` is."""
        return self.yield_until(look) or self.sleep_until(look, timeout_s)

    def sleep_until(self, look: Callable[[], bool], timeout_s: float) -> bool:
        """Sleeps once, unless ``look()`` is true by now; returns the last look.

        Sleeps at most `LONGEST_SLEEP_S`: call it in a loop that checks its peers.
        """
        key = self.prepare()
        try:
            found = look()
        except BaseException:
            self.cancel()
            raise
        if found:
            self.cancel()
            return True
        slept_ns = time.monotonic_ns()
        self.wait(key, min(timeout_s, LONGEST_SLEEP_S))
        if time.monotonic_ns() - slept_ns < _YIELD_NS:
            self._yield_ns = _YIELD_NS  # so short a sleep: yielding would have met it
        return look()

    def yield_until(self, look: Callable[[], bool]) -> bool:
        """Looks for a while, letting others run in between; for less long each time it was in vain."""
        if not self.yields:
            return False
        stop_ns = time.monotonic_ns() + self._yield_ns
        while time.monotonic_ns() < stop_ns:
            os.sched_yield()
            if look():
                self._yield_ns = _YIELD_NS
                return True
        self._yield_ns //= 2
        return False
