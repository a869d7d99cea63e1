"""Finds what dead runs have left in shared memory, and removes it.

A run whose owner is killed or crashes leaves its segment; the next run of the same name removes it. This is for names
that nobody uses again.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from shmcollect.layout import HEADER, MAGIC
from shmcollect.segment import PREFIX, SHM_DIRECTORY, Owner, locked

_HEADER_BYTES = 8 * len(HEADER)


@dataclass(frozen=True)
class Found:
    """One entry of the shared memory under this package's prefix.

    Attributes:
        name: The run's name.
        size_bytes: Its size.
        age_s: Seconds since it was last changed.
        verdict: What it is, in words.
        is_dead: Whether it is a segment whose owner is gone, so that it may be removed.
    """

    name: str
    size_bytes: int
    age_s: float
    verdict: str
    is_dead: bool


def sweep(*, dry_run: bool = False) -> list[Found]:
    """Looks at every segment of this package and removes those whose owner is gone.

    Nothing of a live owner, of another user or of another pid namespace is touched.

    Args:
        dry_run: Only look.

    Returns:
        Everything that was found, by name.

    Raises:
        SegmentError: Another process holds the lock on the shared memory for too long.
    """
    with locked():  # no starter is half-way through creating one
        found = [judge(path) for path in sorted(Path(SHM_DIRECTORY).glob(f"{PREFIX}*"))]
        if not dry_run:
            for each in found:
                if each.is_dead:
                    os.unlink(f"{SHM_DIRECTORY}/{PREFIX}{each.name}")
    return found


def judge(path: Path) -> Found:
    """What an entry is. It is read, never mapped: whoever made it may cut it short at any time."""
    status = path.lstat()
    verdict, is_dead = _verdict(path, status)
    return Found(path.name.removeprefix(PREFIX), status.st_size, time.time() - status.st_mtime, verdict, is_dead)


def _verdict(path: Path, status: os.stat_result) -> tuple[str, bool]:
    if not stat.S_ISREG(status.st_mode):
        return "no segment: not a regular file", False
    if status.st_uid != os.geteuid():
        return f"of user {status.st_uid}", False
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        header = os.pread(fd, _HEADER_BYTES, 0)
    finally:
        os.close(fd)
    if not header or (len(header) == _HEADER_BYTES and not any(header)):
        return "its creator died before it was ready", True
    words = {name: int.from_bytes(header[at : at + 8], "little", signed=True) for name, at in HEADER.items()}
    if len(header) < _HEADER_BYTES or words["magic"] != MAGIC:
        return "no segment: another header", False
    owner = Owner(words["owner_pid"], words["owner_start_ticks"], words["pid_namespace"])
    if not owner.is_here():
        return f"of pid {owner.pid} in another pid namespace", False
    if owner.is_alive():
        return f"in use by pid {owner.pid}", False
    return f"its owner, pid {owner.pid}, is gone", True


def describe(found: list[Found], *, dry_run: bool) -> str:
    """What was found as text, a line each."""
    done = "would be removed" if dry_run else "removed"
    lines = [
        f"{each.name:40} {each.size_bytes / 1e6:10.1f} MB {each.age_s / 3600:8.1f} h  {each.verdict}"
        + (f": {done}" if each.is_dead else "")
        for each in found
    ]
    return "\n".join(lines) or f"no segments in {SHM_DIRECTORY}"
