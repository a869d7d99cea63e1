"""One named block of POSIX shared memory: create / attach / close / unlink.

Order of a segment's life: the name exists -> its size is reserved -> the header names its owner -> the description is
written -> ``layout_version`` is stored with release, which means "ready". All of this, reclaiming and unlinking happen
under one ``flock``, so a name without a ready header belongs to nobody who still lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import posix_ipc

from shmcollect.errors import (
    ConfigError,
    NotASegmentError,
    SegmentError,
    SegmentInUseError,
    SegmentNotReadyError,
    SegmentSpaceError,
)
from shmcollect.header import Header, Owner
from shmcollect.layout import PAGE, Layout

SHM_DIRECTORY = "/dev/shm"
PREFIX = "shmcollect."
_LOCK_TIMEOUT_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str) -> str:
    """Returns the name if it can name a run.

    Raises:
        ConfigError: It is empty, has characters other than letters, digits, dot, dash and underscore, or is too long.
    """
    longest = 255 - len(PREFIX)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > longest:
        raise ConfigError(
            f"name={name!r}: expected 1 to {longest} letters, digits, '.', '-' or '_', starting with a letter or digit"
        )
    return name


def new_name() -> str:
    """A name nobody else has."""
    return f"run-{os.getpid()}-{secrets.token_hex(4)}"


class Segment:
    """A mapped segment with its layout.

    Attributes:
        name: The run's name.
        buffer: The mapping. NumPy views of it keep the memory alive after `close`.
        layout: Where everything lies.
        run_id: Random number of this run; children compare it, so that none joins a namesake.
        owner: Who created it.
    """

    def __init__(self, name: str, buffer: mmap.mmap, layout: Layout, header: Header) -> None:
        self.name = name
        self.buffer = buffer
        self.layout = layout
        self.run_id = header.words["run_id"]
        self.owner = header.owner

    @classmethod
    def create(cls, name: str, layout: Layout) -> Segment:
        """Creates the segment of a run; reclaims the name of a dead one.

        Raises:
            ConfigError: The name is malformed.
            SegmentInUseError: The name belongs to a live run, or to one that cannot be judged from here.
            NotASegmentError: Something else has this name.
            SegmentSpaceError: The file system cannot hold ``layout.size_bytes``.
        """
        check_name(name)
        with lock():
            _reclaim(name)
            _check_space(layout.size_bytes)
            shared = posix_ipc.SharedMemory(f"/{PREFIX}{name}", posix_ipc.O_CREX, mode=0o600, size=0)
            try:
                _reserve(shared.fd, layout.size_bytes)
                buffer = mmap.mmap(shared.fd, layout.size_bytes)
                header = _write_header(buffer, layout)
            except BaseException:
                remove(name)
                raise
            finally:
                shared.close_fd()
        return cls(name, buffer, layout, header)

    @classmethod
    def attach(cls, name: str, *, run_id: int | None = None, writable: bool = False) -> Segment:
        """Joins a segment that somebody else created.

        Args:
            name: The run's name.
            run_id: The run that is expected; None accepts any.
            writable: Map it for writing; the roles do, readers from outside do not.

        Raises:
            FileNotFoundError: There is no such run.
            SegmentNotReadyError: Its creator has not finished.
            NotASegmentError: Something else, or damaged.
            LayoutVersionError: Another version of this package made it.
            SegmentInUseError: It belongs to another run than ``run_id``, or to another user.
        """
        check_name(name)
        with _open(name, writable=writable) as fd:
            header = Header.read(fd, name)
            header.check(name)
            found = header.words["run_id"]
            if run_id is not None and found != run_id:
                raise SegmentInUseError(f"{name!r} is now another run: expected run id {run_id}, got {found}")
            layout = _read_layout(fd, name, header)
            buffer = _map(fd, name, layout.size_bytes, writable=writable)
        return cls(name, buffer, layout, header)

    def close(self) -> None:
        """Unmaps the memory, or leaves that to the last array that still looks at it."""
        with contextlib.suppress(BufferError):  # exported: the mapping ends with its last view
            self.buffer.close()

    def unlink(self) -> None:
        """Removes the name if it still belongs to this run; for the owner only."""
        unlink(self.name, self.run_id)


@dataclass(frozen=True)
class Finding:
    """What has a name of ours, and whether it may be removed.

    Attributes:
        size_bytes: Its size.
        created_s: When it was created (or last changed, unless it says so itself), in seconds since the epoch.
        owner: Who created it; None where that cannot be told.
        is_abandoned: It is ours, and nobody who still lives can own it.
        reason: What it is and whose, in a few words.
        is_foreign: It is not readable as a segment of ours.
    """

    size_bytes: int
    created_s: float
    owner: Owner | None
    is_abandoned: bool
    reason: str
    is_foreign: bool = False


def inspect(name: str) -> Finding:
    """Judges what has this name. Call it under `lock`, where nobody is half-way through creating it.

    Raises:
        FileNotFoundError: Nothing has it.
    """
    status = os.lstat(f"{SHM_DIRECTORY}/{PREFIX}{name}")
    size, changed_s = status.st_size, status.st_mtime
    if status.st_uid != os.geteuid():
        return Finding(size, changed_s, None, False, f"belongs to user {status.st_uid}")
    try:
        with _open(name) as fd:
            header = Header.read(fd, name)
            if not header.is_intact():
                header.check(name)
    except SegmentNotReadyError:  # its creator, who held the lock as we do now, died on the way
        return Finding(size, changed_s, None, True, "never got an owner")
    except SegmentError as error:
        return Finding(size, changed_s, None, False, str(error), is_foreign=True)
    owner, created_s = header.owner, header.words["created_ns"] / 1e9
    if not owner.is_here():
        return Finding(size, created_s, owner, False, f"belongs to pid {owner.pid} of another pid namespace")
    if owner.is_alive():
        return Finding(size, created_s, owner, False, f"in use by the live process {owner.pid}")
    return Finding(size, created_s, owner, True, f"its owner, pid {owner.pid}, is gone")


def remove(name: str) -> None:
    """Removes a name, whoever has it; it may be gone already. Call it under `lock`.

    Raises:
        SegmentInUseError: It is not ours to remove.
    """
    try:
        posix_ipc.unlink_shared_memory(f"/{PREFIX}{name}")
    except posix_ipc.ExistentialError:
        return
    except posix_ipc.PermissionsError as error:
        raise SegmentInUseError(f"{name!r} cannot be removed: {error}") from error


def unlink(name: str, run_id: int) -> bool:
    """Removes a name if it belongs to this run; says whether it did."""
    with lock():
        try:
            with _open(name) as fd:
                ours = Header.read(fd, name).words["run_id"] == run_id
        except (FileNotFoundError, SegmentError):
            return False
        if ours:
            remove(name)
        return ours


def _write_header(buffer: mmap.mmap, layout: Layout) -> Header:
    description, start = layout.describe(), layout.description_offset
    buffer[start : start + len(description)] = description
    header = Header.new(layout)
    header.write(buffer)
    return header


def _read_layout(fd: int, name: str, header: Header) -> Layout:
    """Reads the description, which must make just this file."""
    status, words = os.fstat(fd), header.words
    size, said = status.st_size, words["size_bytes"]
    if size != said:
        raise NotASegmentError(f"{name!r} is damaged: it has {size} bytes, its header says {said}")
    # A page that is not there yet would be made when it is first touched, or be a SIGBUS where there is no more room.
    if status.st_blocks * 512 < size:
        raise NotASegmentError(f"{name!r} is damaged: of its {size} bytes only {status.st_blocks * 512} are allocated")
    start, length = words["description_offset"], words["description_bytes"]
    if not (PAGE <= start <= size and 0 < length <= size - start):
        raise NotASegmentError(
            f"{name!r} is damaged: its description would lie at {start}, {length} bytes long; it has {size} bytes"
        )
    description = os.pread(fd, length, start)
    checksum, said = zlib.crc32(description), words["description_crc"]
    if checksum != said:
        raise NotASegmentError(
            f"{name!r} is damaged: the checksum of its description is {checksum:#x}, its header says {said:#x}"
        )
    try:
        layout = Layout.from_description(description, size)
    except ValueError as error:
        raise NotASegmentError(f"{name!r} is damaged: {error}") from error
    if layout.description_offset != start:
        raise NotASegmentError(
            f"{name!r} is damaged: its description lies at {start}, by what it says at {layout.description_offset}"
        )
    return layout


def _map(fd: int, name: str, size_bytes: int, *, writable: bool) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except ValueError as error:  # it has become shorter
        raise NotASegmentError(f"{name!r} is damaged: it had {size_bytes} bytes, and then less") from error


@contextlib.contextmanager
def _open(name: str, *, writable: bool = False) -> Iterator[int]:
    """Opens what has this name, if it is a file."""
    path = f"{SHM_DIRECTORY}/{PREFIX}{name}"
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a fifo would block
    try:
        fd = os.open(path, flags | (os.O_RDWR if writable else os.O_RDONLY))
    except PermissionError as error:
        raise SegmentInUseError(f"{name!r} belongs to user {os.stat(path).st_uid}") from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise NotASegmentError(f"{name!r} is not a segment of shmcollect: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotASegmentError(f"{name!r} is not a segment of shmcollect: no regular file")
        yield fd
    finally:
        os.close(fd)


def _reclaim(name: str) -> None:
    """Removes the name of a dead run. Called under the lock, where nobody is half-way through creating."""
    try:
        found = inspect(name)
    except FileNotFoundError:
        return
    path = f"{SHM_DIRECTORY}/{PREFIX}{name}"
    if found.is_foreign:
        raise NotASegmentError(f"{path} exists and cannot be reclaimed: {found.reason}")
    if found.is_abandoned:
        remove(name)
        return
    elsewhere = "" if found.owner and found.owner.is_here() else f", or remove {path} if that run is over"
    raise SegmentInUseError(f"{name!r}: {found.reason}; choose another name{elsewhere}")


def _check_space(size_bytes: int) -> None:
    stats = os.statvfs(SHM_DIRECTORY)
    is_limited = stats.f_blocks > 0  # a tmpfs of unlimited size counts none
    if is_limited and size_bytes > stats.f_bavail * stats.f_frsize:
        raise _space_error(size_bytes)


def _reserve(fd: int, size_bytes: int) -> None:
    """Allocates every page now: a file system that is full says so here, not by SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise
        raise _space_error(size_bytes) from error


def _space_error(needed: int) -> SegmentSpaceError:
    stats = os.statvfs(SHM_DIRECTORY)
    free = stats.f_bavail * stats.f_frsize
    return SegmentSpaceError(
        errno.ENOSPC,
        f"the run needs {needed:,} bytes of shared memory, {SHM_DIRECTORY} has {free:,} free; use a smaller capacity, "
        "fewer envs or final_obs=False, or enlarge it (in Docker: --shm-size)",
    )


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Excludes every other starter, reclaimer and sweeper that sees the same shared memory.

    The lock is on the directory itself: it needs no file of its own and holds across containers that share it.
    """
    fd = os.open(SHM_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SegmentError(
                        f"another process has held the lock on {SHM_DIRECTORY} for {_LOCK_TIMEOUT_S:.0f} s"
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)
