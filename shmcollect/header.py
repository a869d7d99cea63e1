"""What the first page of a segment says: whose it is, which run's, and where its description lies.

It is read with ``pread``, never through a mapping: whoever may write a file may also cut it short, and touching a
mapped page that is gone ends the process by SIGBUS, where ``pread`` just returns less.
"""

from __future__ import annotations

import os
import secrets
import time
import zlib
from dataclasses import dataclass
from mmap import mmap

from shmcollect import _native
from shmcollect.errors import LayoutVersionError, NotASegmentError, SegmentNotReadyError
from shmcollect.layout import HEADER, HEADER_WORDS, LAYOUT_VERSION, MAGIC, PAGE, Layout


@dataclass(frozen=True)
class Owner:
    """Who created a segment: enough to tell a live process from one that has its pid today."""

    pid: int
    start_ticks: int
    pid_namespace: int

    @classmethod
    def this_process(cls) -> Owner:
        """The calling process."""
        pid = os.getpid()
        return cls(pid, _start_ticks(pid) or 0, os.stat("/proc/self/ns/pid").st_ino)

    def is_here(self) -> bool:
        """Whether the owner's pid can be judged from here."""
        return self.pid_namespace == os.stat("/proc/self/ns/pid").st_ino

    def is_alive(self) -> bool:
        """Whether that very process still runs (a zombie does not)."""
        return self.start_ticks == _start_ticks(self.pid)


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (see proc(5)); None for a process that is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name, field 2, may hold spaces and parentheses.
            state, *rest = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(rest[18])


@dataclass(frozen=True)
class Header:
    """The header of a segment that is ready.

    Attributes:
        words: Every word by its name (see `shmcollect.layout`), as signed 64-bit numbers.
    """

    words: dict[str, int]

    @classmethod
    def new(cls, layout: Layout) -> Header:
        """The header of a segment that this process is creating."""
        owner, description = Owner.this_process(), layout.describe()
        words = {
            "magic": MAGIC,
            "layout_version": LAYOUT_VERSION,
            "size_bytes": layout.size_bytes,
            "owner_pid": owner.pid,
            "owner_start_ticks": owner.start_ticks,
            "pid_namespace": owner.pid_namespace,
            "run_id": secrets.randbits(62),
            "created_ns": time.time_ns(),
            "description_offset": layout.description_offset,
            "description_bytes": len(description),
            "description_crc": zlib.crc32(description),
        }
        return cls(words | {"header_crc": checksum(words)})

    @classmethod
    def read(cls, fd: int, name: str) -> Header:
        """Reads the header of an open file; whether it is intact and of this version is for `check`.

        Raises:
            SegmentNotReadyError: Its creator has not finished.
            NotASegmentError: Something else.
        """
        version = _word(os.pread(fd, 8, HEADER["layout_version"]))  # SYNC: layout version
        _native.fence()  # the rest is read after the version
        page = os.pread(fd, PAGE, 0)
        if not page:
            raise SegmentNotReadyError(f"{name!r} is being created (or its creator died doing so)")
        if len(page) < PAGE:
            raise NotASegmentError(
                f"{name!r} is not a segment of shmcollect: only {len(page)} bytes, its header takes {PAGE}"
            )
        words = {word: _word(page[at : at + 8]) for word, at in HEADER.items()}
        if version == 0 and (words["magic"] == MAGIC or not any(page)):
            raise SegmentNotReadyError(f"{name!r} is being created (or its creator died doing so)")
        if words["magic"] != MAGIC:
            raise NotASegmentError(
                f"{name!r} is not a segment of shmcollect: its magic is {words['magic']:#x}, expected {MAGIC:#x}"
            )
        return cls(words | {"layout_version": version})

    def check(self, name: str) -> None:
        """Refuses what another version wrote, and what is not as it was written.

        Raises:
            LayoutVersionError: Another version of this package made it.
            NotASegmentError: It is damaged.
        """
        version, said = self.words["layout_version"], self.words["header_crc"]
        if version != LAYOUT_VERSION:
            raise LayoutVersionError(
                f"{name!r} has layout version {version}; this shmcollect reads version {LAYOUT_VERSION}"
            )
        if not self.is_intact():
            raise NotASegmentError(
                f"{name!r} is damaged: the checksum of its header is {checksum(self.words):#x}, it says {said:#x}"
            )

    def is_intact(self) -> bool:
        """Whether it is as it was written, whatever its version."""
        return checksum(self.words) == self.words["header_crc"]

    def write(self, buffer: mmap) -> None:
        """Stores every word, the version last."""
        for word, value in self.words.items():
            if word != "layout_version":
                _native.store(buffer, HEADER[word], value)
        _native.store(buffer, HEADER["layout_version"], self.words["layout_version"])  # SYNC: layout version

    @property
    def owner(self) -> Owner:
        """Who created the segment."""
        return Owner(self.words["owner_pid"], self.words["owner_start_ticks"], self.words["pid_namespace"])


def checksum(words: dict[str, int]) -> int:
    """The checksum of all words but itself and the version, which is written after it and means "ready"."""
    covered = (words[word] for word in HEADER_WORDS if word not in ("layout_version", "header_crc"))
    return zlib.crc32(b"".join(value.to_bytes(8, "little", signed=True) for value in covered))


def _word(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)
