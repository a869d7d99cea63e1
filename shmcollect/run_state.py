"""The one word that says whether a run goes on, and the words by which the learner steers it.

``running -> stopping`` (close) or ``running -> aborted`` (a role failed), by compare-and-swap: the first reason wins.
Whoever changes it rings every bell afterwards, so nobody sleeps through it.
"""

from __future__ import annotations

from shmcollect import _native
from shmcollect.doorbell import Doorbell
from shmcollect.segment import Segment

RUNNING, STOPPING, ABORTED = range(3)


class RunState:
    """The run state of a segment, and all its bells."""

    def __init__(self, segment: Segment) -> None:
        self._buffer = segment.buffer
        self._words = segment.layout.words
        self._word = segment.layout.words["run_state"]
        self._running = segment.layout.running
        self._has_left = False
        self.bells = {name: Doorbell(segment.buffer, at) for name, at in segment.layout.bells.items()}

    @property
    def value(self) -> int:
        """``RUNNING``, ``STOPPING`` or ``ABORTED``."""
        return _native.load(self._buffer, self._word)

    def is_running(self) -> bool:
        """Whether the roles that share this object should go on."""
        return not self._has_left and _native.load(self._buffer, self._word) == RUNNING

    def leave(self) -> None:
        """Ends the roles that share this object, while the run goes on without them."""
        self._has_left = True
        self.ring_all()

    def end(self, value: int) -> bool:
        """Ends the run as stopping or aborted and rings every bell; False if it had ended before.

        A failing role sends its error record first: whoever sees ``ABORTED`` finds it.
        """
        first = _native.compare_exchange(self._buffer, self._word, RUNNING, value)
        self.ring_all()
        return first

    def ring_all(self) -> None:
        """Rings every bell of the run."""
        for bell in self.bells.values():
            bell.notify()

    def mark_running(self, worker: int, running: bool) -> None:
        """Says whether a worker steps its envs; written by that worker. A hint for batching, nothing more."""
        _native.store(self._buffer, self._running[worker], int(running))

    @property
    def pause_count(self) -> int:
        """How often the learner paused or resumed; odd while it wants inference to rest. Written by the learner."""
        return _native.load(self._buffer, self._words["pause_count"])

    @pause_count.setter
    def pause_count(self, value: int) -> None:
        _native.store(self._buffer, self._words["pause_count"], value)

    @property
    def reset_count(self) -> int:
        """How often the learner asked for every episode to end. Written by the learner."""
        return _native.load(self._buffer, self._words["reset_count"])

    @reset_count.setter
    def reset_count(self, value: int) -> None:
        _native.store(self._buffer, self._words["reset_count"], value)

    @property
    def required_version(self) -> int:
        """The oldest weights that rows may be run with. Written by the learner, before it grants the steps."""
        return _native.load(self._buffer, self._words["required_version"])  # SYNC: required version

    @required_version.setter
    def required_version(self, value: int) -> None:
        _native.store(self._buffer, self._words["required_version"], value)  # SYNC: required version

    @property
    def pause_acknowledged(self) -> int:
        """The pause count inference has last seen between two batches. Written by inference."""
        return _native.load(self._buffer, self._words["pause_acknowledged"])

    @pause_acknowledged.setter
    def pause_acknowledged(self, value: int) -> None:
        _native.store(self._buffer, self._words["pause_acknowledged"], value)
