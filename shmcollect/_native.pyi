"""The native core: see _native.c. Words are aligned 64-bit integers inside a writable buffer."""

from typing import Any, final

import numpy as np
from typing_extensions import Buffer as _Buffer

Buffer = _Buffer | np.ndarray[Any, Any]

OBSERVED: int
ACTED: int
RELEASED: int
GRANTED: int

def load(buffer: Buffer, offset: int, /) -> int:
    """Load with acquire."""

def store(buffer: Buffer, offset: int, value: int, /) -> None:
    """Store with release."""

def fetch_add(buffer: Buffer, offset: int, delta: int, /) -> int:
    """Add, sequentially consistent; returns the value before."""

def compare_exchange(buffer: Buffer, offset: int, expected: int, desired: int, /) -> bool:
    """Store ``desired`` if the word is ``expected``, sequentially consistent; says whether it did."""

def fence() -> None:
    """A sequentially consistent fence."""

def bell_prepare(buffer: Buffer, offset: int, /) -> int:
    """Announce the sleeper, then read the key."""

def bell_cancel(buffer: Buffer, offset: int, /) -> None:
    """Withdraw the announcement."""

def bell_wait(buffer: Buffer, offset: int, key: int, deadline_ns: int, /) -> bool:
    """Sleep while the key is unchanged, until CLOCK_MONOTONIC reaches ``deadline_ns``; False if it did."""

def bell_notify(buffer: Buffer, offset: int, /) -> bool:
    """Bump the key and wake the announced sleeper; says whether there was one."""

def watch_parent(pidfd: int, /) -> None:
    """Kill this process as soon as the process of ``pidfd`` has ended. The descriptor must stay open."""

@final
class Rings:
    """Row loops over the rings of all envs; every offset is checked once, here."""

    def __new__(
        cls,
        buffer: Buffer,
        num_envs: int,
        capacity: int,
        cursors: Buffer,
        groups: Buffer,
        running: Buffer,
        grant_count: int,
        latencies: Buffer,
        fields: tuple[tuple[int, int, int, str, tuple[int, ...]], ...],
        step_fields: tuple[int, ...],
        leaves: tuple[int, ...],
    ) -> Rings: ...
    def cursor(self, which: int, env: int, /) -> int:
        """One cursor of one env."""

    def read_cursors(self, which: int, out: Buffer, /) -> None:
        """One cursor of all envs into int64[num_envs]."""

    def scan(self, start: int, limit: int, envs: Buffer, sequences: Buffer, /) -> tuple[int, int, int]:
        """Rows inference may act on, from env ``start`` round: (ready, coming, oldest_ns)."""

    def acted(self, first: int, count: int, /) -> list[int]:
        """The envs of this range whose newest observation has its action."""

    def finished(self, length: int, start: int, envs: Buffer, sequences: Buffer, /) -> int:
        """Complete, unreleased rollouts of ``length`` steps, at most one per env, from env ``start`` round."""

    def gather(self, field: int, envs: Buffer, sequences: Buffer, count: int, length: int, out: Buffer, /) -> None:
        """Copy ``length`` slots from every row on into ``out``."""

    def scatter(
        self,
        fields: tuple[int, ...],
        envs: Buffer,
        sequences: Buffer,
        count: int,
        values: tuple[object, ...],
        /,
    ) -> int:
        """Copy rows of several fields into their slots; -1, or the index of the first array that does not fit."""

    def advance(self, which: int, envs: Buffer, sequences: Buffer, count: int, step: int, /) -> list[int]:
        """Set a cursor to ``sequence + step`` for every row; returns the workers of these envs."""

    def write(self, field: int, env: int, sequence: int, value: Any, /) -> bool:
        """Copy a value into a slot; False if it is not exactly of the field's type and shape."""

    def observe(self, env: int, sequence: int, leaves: tuple[object, ...], /) -> int:
        """Write and publish an episode's first observation; -1, or the index of the first leaf that does not fit."""

    def step(
        self,
        env: int,
        sequence: int,
        reward: float,
        terminated: object,
        truncated: object,
        interrupted: object,
        leaves: tuple[object, ...],
        /,
    ) -> int:
        """Write what the step brought into its own slot and the observation after it into the next; publish that.

        -1, or the index of the first leaf that does not fit exactly: then nothing is published.
        """
