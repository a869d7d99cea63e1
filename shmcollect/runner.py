"""The loop every role runs in: work while there is some, else wait; count; stop when the run ends.

A role is anything with ``do_work() -> int`` (how much it did; 0 means idle), so tests call it by hand in one process.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from shmcollect.counters import Counters
from shmcollect.doorbell import LONGEST_SLEEP_S, Doorbell
from shmcollect.run_state import RunState

_PUBLISH_NS = 10_000_000  # counters are for people: a hundred times a second is plenty


class Role(Protocol):
    """The body of a process or thread."""

    counters: Counters

    def do_work(self) -> int:
        """Does what there is to do and returns how much that was."""

    def patience_s(self) -> float:
        """How long the role may sleep although something waits for it; infinite if nothing does."""


def run(role: Role, bell: Doorbell, state: RunState) -> None:
    """Runs a role until the run ends or the role raises."""
    counts = role.counters.values
    now_ns = counts["started_ns"] = time.monotonic_ns()
    counts["waiting_ns"] = 0  # a predecessor's, if it was not
    published_ns = 0
    while state.is_running():
        if not role.do_work():
            counts["waiting_ns"] += _wait_for_work(role, bell, state)
        now_ns = time.monotonic_ns()
        if now_ns - published_ns >= _PUBLISH_NS:
            counts["heartbeat_ns"] = published_ns = now_ns
            role.counters.publish()
    role.counters.publish()


def _wait_for_work(role: Role, bell: Doorbell, state: RunState) -> int:
    """Waits until the role has worked or become impatient, or the run has ended; returns the nanoseconds waited."""
    started_ns = looked_ns = time.monotonic_ns()
    patience_s = role.patience_s()

    def look() -> bool:
        nonlocal looked_ns
        looked_ns = time.monotonic_ns()
        if role.do_work() or not state.is_running():
            return True
        return math.isinf(patience_s) and not math.isinf(role.patience_s())  # then this sleep may be too long

    if not bell.yield_until(look):
        role.counters.publish()
        bell.sleep_until(look, min(patience_s, LONGEST_SLEEP_S))
    return looked_ns - started_ns
