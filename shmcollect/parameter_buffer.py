"""The parameter buffer: the newest weights in shared memory, one writer, some readers, nobody ever waits.

``readers + 2`` banks, each with an image of the weights and a count: ``2v + 1`` while version v is being written into
it, ``2v`` once that is done. ``latest`` names the bank with the newest version.

writer: takes a bank that is neither the latest nor announced by a reader -> count odd -> image -> count even -> latest
reader: announces the latest bank -> count -> copies the image -> count again

Announcements make it rare that a reader finds a bank being written. What makes it right are the counts: a copy is
taken only if the count was even and the same before and after it, and its version is that of the count. So a writer may
die anywhere: it leaves a bank with an odd count, which is not the latest one. A dead reader's announcement costs the
spare bank that was there for it, until the next reader takes its place.
"""

from __future__ import annotations

import numpy as np

from shmcollect import _native
from shmcollect.segment import Segment

Image = np.ndarray[tuple[int], np.dtype[np.uint8]]

_ATTEMPTS = 8  # a reader that finds no bank at rest in so many says so rather than go on looking


class _Banks:
    """The banks of a segment, and their words."""

    def __init__(self, segment: Segment) -> None:
        weights = segment.layout.weights
        assert weights is not None, "this segment was laid out without banks"
        self.buffer = segment.buffer
        self.words = weights
        memory = np.frombuffer(segment.buffer, np.uint8)
        self.images: list[Image] = [memory[at : at + segment.layout.image_bytes] for at in weights.banks]

    def count(self, bank: int) -> int:
        return _native.load(self.buffer, self.words.counts[bank])


class ParameterWriter:
    """Writes versions. One per segment; one that follows a dead one goes on with its numbers.

    Attributes:
        images: Per bank, its image: uint8[image_bytes] in shared memory.
        version: The newest version written.
        committed: The newest version readers can find.
    """

    def __init__(self, segment: Segment) -> None:
        self._banks = _Banks(segment)
        self.images = self._banks.images
        counts = [self._banks.count(bank) for bank in range(len(self.images))]
        self.version = max(count // 2 for count in counts if count % 2 == 0)
        self.committed = self._banks.count(_native.load(segment.buffer, self._banks.words.latest)) // 2
        self._writing: int | None = None
        self._written: int | None = None  # the bank of a version that is not committed

    def begin(self) -> int:
        """Takes a bank to write the next version into, and returns its number.

        A version that was begun and never ended, or ended and never committed, is given up for the next one.
        """
        buffer, words = self._banks.buffer, self._banks.words
        _native.fence()  # SYNC: announcement: what was committed is seen before these are read, or they are seen here
        taken = {_native.load(buffer, at) - 1 for at in words.announcements}
        taken.add(_native.load(buffer, words.latest))
        free = [bank for bank in range(len(self.images)) if bank not in taken]
        bank = next((bank for bank in free if bank != self._written), free[0])
        if bank == self._written:
            self._written = None
        _native.store(buffer, words.counts[bank], 2 * (self.version + 1) + 1)  # SYNC: bank count
        _native.fence()  # a release store would let the image's stores pass it
        self._writing = bank
        return bank

    def end(self) -> int:
        """Declares the image that was begun complete, and returns its version. Readers find it after `commit`."""
        assert self._writing is not None, "end() without begin()"
        _native.fence()  # large copies use stores that a release does not order
        _native.store(self._banks.buffer, self._banks.words.counts[self._writing], 2 * (self.version + 1))
        self.version += 1
        self._written, self._writing = self._writing, None
        return self.version

    def commit(self) -> None:
        """Makes the version that was written last the latest; does nothing if it is."""
        if self._written is not None:
            _native.store(self._banks.buffer, self._banks.words.latest, self._written)  # SYNC: latest bank
            self.committed = self.version
            self._written = None


class ParameterReader:
    """Reads the latest version.

    Args:
        segment: The segment.
        index: Which of its readers this is; it takes the place of a dead one with the same index.

    Attributes:
        version: The version read last; 0: none yet.
    """

    def __init__(self, segment: Segment, index: int = 0) -> None:
        self._banks = _Banks(segment)
        self._announcement = self._banks.words.announcements[index]
        self.version = 0
        self._announce(0)

    def try_read(self, out: Image) -> bool:
        """Copies the latest image, unless it was read before.

        Args:
            out: Where to; holds nothing of use unless the answer is True.

        Returns:
            Whether there was news. False also if every bank it looked at was being overwritten: ask again.
        """
        buffer, banks = self._banks.buffer, self._banks
        if banks.count(_native.load(buffer, banks.words.latest)) == 2 * self.version:
            return False
        for _ in range(_ATTEMPTS):
            bank = _native.load(buffer, banks.words.latest)  # SYNC: latest bank
            self._announce(bank + 1)
            if _native.load(buffer, banks.words.latest) != bank:
                continue  # it may have been taken before the announcement was seen
            count = banks.count(bank)  # SYNC: bank count
            if count % 2 == 0 and self._copied(bank, count, out):
                self._announce(0)
                self.version = count // 2
                return True
        self._announce(0)
        return False

    def _copied(self, bank: int, count: int, out: Image) -> bool:
        np.copyto(out, self._banks.images[bank])
        _native.fence()  # the copy's loads before the next one
        return self._banks.count(bank) == count

    def _announce(self, value: int) -> None:
        """0: it reads no bank; else one more than the bank's number."""
        _native.store(self._banks.buffer, self._announcement, value)  # SYNC: announcement
        _native.fence()
