"""What each role counts, published for whoever looks: one block of words per role, written by that role alone."""

from __future__ import annotations

from shmcollect import _native
from shmcollect.segment import Segment

COMMON = ("heartbeat_ns", "waiting_ns", "started_ns")
WORKER = (*COMMON, "restarts", "steps", "episodes")
INFERENCE = (*COMMON, "restarts", "batches", "rows")
LEARNER = (*COMMON, "frames", "rollouts", "batches", "episodes", "policy_version", "lag_sum", "lag_max")


def counter_names(num_workers: int) -> dict[str, tuple[str, ...]]:
    """The counters of every role of a run, for its layout."""
    workers = {f"worker {w}": WORKER for w in range(num_workers)}
    return {**workers, "inference": INFERENCE, "learner": LEARNER}


class Counters:
    """The counters of one role.

    The role adds to `values`, plain integers of its own, as often as it likes; `publish` makes them visible.
    """

    def __init__(self, segment: Segment, role: str) -> None:
        self._buffer = segment.buffer
        names = segment.layout.counters[role]
        start = segment.layout.counter_offsets[role]
        self._offsets = {name: start + 8 * i for i, name in enumerate(names)}
        self.values = self.read()

    def publish(self) -> None:
        """Stores the values where others can see them."""
        for name, value in self.values.items():
            _native.store(self._buffer, self._offsets[name], value)

    def read(self) -> dict[str, int]:
        """What was last published."""
        return {name: _native.load(self._buffer, at) for name, at in self._offsets.items()}
