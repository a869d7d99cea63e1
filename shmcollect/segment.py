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

from shmcollect import _native
from shmcollect.errors import (
    ConfigError,
    LayoutVersionError,
    NotASegmentError,
    SegmentError,
    SegmentInUseError,
    SegmentNotReadyError,
    SegmentSpaceError,
)
from shmcollect.layout import HEADER, LAYOUT_VERSION, MAGIC, PAGE, Layout

SHM_DIRECTORY = "/dev/shm"
PREFIX = "shmcollect."
_LOCK_TIMEOUT_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
    """

    def __init__(self, name: str, buffer: mmap.mmap, layout: Layout) -> None:
        self.name = name
        self.buffer = buffer
        self.layout = layout
        self.run_id = _native.load(buffer, HEADER["run_id"])
        self.owner = _owner(buffer)

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
        with locked():
            _reclaim(name)
            _check_space(layout.size_bytes)
            shared = posix_ipc.SharedMemory(f"/{PREFIX}{name}", posix_ipc.O_CREX, mode=0o600, size=0)
            try:
                _reserve(shared.fd, layout.size_bytes)
                buffer = mmap.mmap(shared.fd, layout.size_bytes)
                _write_header(buffer, layout)
            except BaseException:
                posix_ipc.unlink_shared_memory(f"/{PREFIX}{name}")
                raise
            finally:
                shared.close_fd()
        return cls(name, buffer, layout)

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
        buffer = _map(name, writable=writable)
        layout = _read_layout(name, buffer)
        segment = cls(name, buffer, layout)
        if run_id is not None and segment.run_id != run_id:
            raise SegmentInUseError(f"{name!r} is now another run: expected run id {run_id}, got {segment.run_id}")
        return segment

    def close(self) -> None:
        """Unmaps the memory, or leaves that to the last array that still looks at it."""
        with contextlib.suppress(BufferError):  # exported: the mapping ends with its last view
            self.buffer.close()

    def unlink(self) -> None:
        """Removes the name if it still belongs to this run; for the owner only."""
        unlink(self.name, self.run_id)


def unlink(name: str, run_id: int) -> bool:
    """Removes a name if it belongs to this run; says whether it did."""
    with locked():
        try:
            buffer = _map(name, writable=False)
        except (FileNotFoundError, SegmentError):
            return False
        with buffer:
            ours = _native.load(buffer, HEADER["run_id"]) == run_id
        if ours:
            posix_ipc.unlink_shared_memory(f"/{PREFIX}{name}")
        return ours


def _owner(buffer: mmap.mmap) -> Owner:
    words = (_native.load(buffer, HEADER[w]) for w in ("owner_pid", "owner_start_ticks", "pid_namespace"))
    return Owner(*words)


def _write_header(buffer: mmap.mmap, layout: Layout) -> None:
    owner = Owner.this_process()
    description = layout.describe()
    values = {
        "magic": MAGIC,
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
    for word, value in values.items():
        _native.store(buffer, HEADER[word], value)
    buffer[layout.description_offset : layout.description_offset + len(description)] = description
    _native.store(buffer, HEADER["layout_version"], LAYOUT_VERSION)  # SYNC: layout version


def _read_layout(name: str, buffer: mmap.mmap) -> Layout:
    version = _native.load(buffer, HEADER["layout_version"])  # SYNC: layout version
    magic = _native.load(buffer, HEADER["magic"])
    if version == 0 and magic in (0, MAGIC):
        raise SegmentNotReadyError(f"{name!r} is being created (or its creator died doing so)")
    if magic != MAGIC:
        raise NotASegmentError(f"{name!r} is not a segment of shmcollect: magic {magic:#x}, expected {MAGIC:#x}")
    if version != LAYOUT_VERSION:
        raise LayoutVersionError(
            f"{name!r} has layout version {version}; this shmcollect reads version {LAYOUT_VERSION}"
        )
    start = _native.load(buffer, HEADER["description_offset"])
    size = _native.load(buffer, HEADER["description_bytes"])
    if not (PAGE <= start <= len(buffer) and 0 < size <= len(buffer) - start):
        raise NotASegmentError(f"{name!r} is damaged: its description would lie at {start}, {size} bytes long")
    description = buffer[start : start + size]
    if zlib.crc32(description) != _native.load(buffer, HEADER["description_crc"]):
        raise NotASegmentError(f"{name!r} is damaged: its description does not match its checksum")
    try:
        layout = Layout.from_description(description)
    except ValueError as error:
        raise NotASegmentError(f"{name!r} is damaged: {error}") from error
    if layout.size_bytes != len(buffer):
        raise NotASegmentError(f"{name!r} is damaged: {len(buffer)} bytes, its description makes {layout.size_bytes}")
    return layout


def _map(name: str, *, writable: bool) -> mmap.mmap:
    """Maps whatever has this name, if it is at least a header long."""
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
        mode, size = os.fstat(fd).st_mode, os.fstat(fd).st_size
        if not stat.S_ISREG(mode):
            raise NotASegmentError(f"{name!r} is not a segment of shmcollect: no regular file")
        if size == 0:
            raise SegmentNotReadyError(f"{name!r} is being created (or its creator died doing so)")
        if size < PAGE:
            raise NotASegmentError(f"{name!r} is not a segment of shmcollect: only {size} bytes")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)


def _reclaim(name: str) -> None:
    """Removes the name of a dead run. Called under the lock, where nobody is half-way through creating."""
    try:
        buffer = _map(name, writable=False)
    except FileNotFoundError:
        return
    except SegmentNotReadyError:
        posix_ipc.unlink_shared_memory(f"/{PREFIX}{name}")
        return
    with buffer:
        magic, version = (_native.load(buffer, HEADER[word]) for word in ("magic", "layout_version"))
        owner, untouched = _owner(buffer), not any(buffer[:PAGE])
    if magic != MAGIC and not untouched:
        raise NotASegmentError(f"{SHM_DIRECTORY}/{PREFIX}{name} exists and is not a segment of shmcollect")
    ready = version != 0  # otherwise its creator, who held the lock as we do now, died on the way
    if ready and not owner.is_here():
        raise SegmentInUseError(
            f"{name!r} belongs to pid {owner.pid} of another pid namespace (a container?); "
            f"choose another name, or remove {SHM_DIRECTORY}/{PREFIX}{name} if that run is over"
        )
    if ready and owner.is_alive():
        raise SegmentInUseError(f"{name!r} is in use by the live process {owner.pid}; choose another name")
    posix_ipc.unlink_shared_memory(f"/{PREFIX}{name}")


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
def locked() -> Iterator[None]:
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
