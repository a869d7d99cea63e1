"""Starts the child processes, watches them, carries their errors home, stops them and leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import cloudpickle
import psutil

from shmcollect.control import ErrorRecord, Message, receive, send
from shmcollect.errors import ChildError, ConfigError, EnvWorkerError, InferenceError
from shmcollect.patience import Patience

Kind = Literal["env worker", "inference server"]
_ENTRIES: dict[Kind, str] = {
    "env worker": "shmcollect.env_worker:main",
    "inference server": "shmcollect.inference_server:main",
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CHILD_DESCRIPTORS = 2  # the pidfd and our end of the connection
_OTHER_DESCRIPTORS = 12  # what starting one child takes for a moment, the segment, and looks into /proc
_LAST_WORDS_S = 1.0  # how long to wait for the error record of a child that has just died


@dataclass
class Child:
    """One child process and the caller's end of its connection.

    Attributes:
        kind: Its role.
        index: The worker's number; 0 for inference.
        envs: Indices of its envs; empty for inference.
        reports: What it has reported and nobody has asked for yet.
        warnings: What it has warned of.
        failure: The record of its failure.
        has_hung_up: Whether it has closed its end of the connection.
        has_joined: Whether it has attached to the run's segment.
        is_done: Whether all that is left for it is to end.
    """

    kind: Kind
    index: int
    envs: range
    process: subprocess.Popen[bytes]
    pidfd: int
    connection: Connection
    reports: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failure: ErrorRecord | None = None
    has_hung_up: bool = False
    has_joined: bool = False
    is_done: bool = False

    @property
    def role(self) -> str:
        """``"env worker 0"`` or ``"inference server"``."""
        return f"{self.kind} {self.index}" if self.kind == "env worker" else self.kind

    def read(self) -> None:
        """Takes in everything that has arrived."""
        try:
            while not self.has_hung_up and self.connection.poll():
                self._take(receive(self.connection))
        except (EOFError, ConnectionResetError):
            self.has_hung_up = True

    def _take(self, message: Message) -> None:
        if message.kind == "report":
            self.reports.append(message.content)
        elif message.kind == "warning":
            self.warnings.append(f"{self.role}: {message.content}")
        elif message.kind == "done":
            self.is_done = True
        else:
            self.failure = message.content

    def has_ended(self) -> bool:
        """Whether the process has ended, reaped or not."""
        return self.process.poll() is not None

    def is_stopped(self) -> bool:
        """Whether it rests by SIGSTOP or the like: then it is slow through no fault of its own."""
        try:
            return bool(psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False


def check_descriptors(num_children: int) -> None:
    """Refuses to start more children than this process may have descriptors for.

    Raises:
        ConfigError: The soft limit on descriptors (RLIMIT_NOFILE) is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_children * _CHILD_DESCRIPTORS + _OTHER_DESCRIPTORS
    taken = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and taken + needed > limit:
        raise ConfigError(
            f"{num_children} processes need {needed} file descriptors, and {taken} of the {limit} this process may "
            "have are open; use fewer workers (num_workers, workers_per_process) or raise the limit (ulimit -n)"
        )


class Supervisor:
    """The children of one run."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._poll = select.poll()
        self._owner_pid = os.getpid()

    def start(self, kind: Kind, payload: bytes, *, index: int = 0, envs: range = range(0)) -> Child:
        """Starts a child.

        Args:
            kind: Its role.
            payload: What its ``main`` gets, cloudpickled.
            index: The worker's number.
            envs: Indices of its envs.
        """
        title = f"shm-worker-{index}" if kind == "env worker" else "shm-inference"
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as passed:
            ours, theirs = socket.socketpair()
            connection = failed.enter_context(Connection(ours.detach()))
            control_fd = _pass(theirs.detach(), passed)
            payload_fd = _pass(os.memfd_create("shmcollect-payload"), passed)
            with open(payload_fd, "wb", closefd=False) as file:
                file.write(payload)
            os.lseek(payload_fd, 0, os.SEEK_SET)
            fds = (control_fd, payload_fd, _pass(os.pidfd_open(self._owner_pid), passed))
            with _interrupts_blocked():
                process = subprocess.Popen(
                    _command(title, _ENTRIES[kind], *fds),
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    env=_environment(kind),
                )
            failed.callback(process.wait)
            failed.callback(process.kill)
            child = Child(kind, index, envs, process, os.pidfd_open(process.pid), connection)
            failed.pop_all()
        self.children.append(child)
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(child.connection.fileno(), select.POLLIN)
        return child

    def send(self, child: Child, content: object) -> None:
        """Tells a child something; if it has died, its error is raised."""
        try:
            send(child.connection, content)
        except (BrokenPipeError, ConnectionResetError):
            raise error_of(child) from None

    def reports(self, children: list[Child], timeout_s: float) -> list[Any]:
        """The next report of each of these children, in order.

        Raises:
            ChildError: A child failed or died, or did not report in time.
        """
        patience = Patience(timeout_s)
        while late := [child for child in children if not child.reports]:
            if patience.look():
                raise not_ready(late[0], timeout_s)
            self._poll.poll(min(timeout_s, 0.1) * 1000)
            self.check()
        return [child.reports.pop(0) for child in children]

    def check(self) -> None:
        """Looks whether all children are well; cheap, one system call.

        Raises:
            ChildError: One failed or died; of several, the one that failed first.
        """
        if failed := self.failed():
            raise error_of(failed[0])

    def failed(self) -> list[Child]:
        """The children that have failed or died, the first one first; cheap while all are well, one system call."""
        if not self._poll.poll(0):
            return []
        for child in self.children:
            child.read()
        failed = [child for child in self.children if child.failure is not None or child.has_ended()]
        return sorted(failed, key=lambda child: child.failure.time_ns if child.failure else sys.maxsize)

    def discard(self, child: Child) -> list[str]:
        """Kills a child unless it has ended, reaps it and forgets it; returns the warnings it left."""
        self._poll.unregister(child.pidfd)
        self._poll.unregister(child.connection.fileno())
        self.children.remove(child)
        return _reap(child)

    def is_owner(self) -> bool:
        """Whether this is the process that started the children, and not a fork of it."""
        return os.getpid() == self._owner_pid

    def stop(self, grace_s: float, is_urgent: Callable[[], bool] = lambda: False) -> list[str]:
        """Waits for the children to end, kills those that don't, and reaps all; returns the warnings they left.

        Args:
            grace_s: Seconds to wait.
            is_urgent: Asked on the way whether to wait no longer.
        """
        for child in self.children:
            if not child.has_joined and not child.envs:
                child.process.kill()  # still importing torch, perhaps for seconds; it has nothing to close
            _hang_up(child.connection)
        deadline = time.monotonic() + grace_s
        texts: list[str] = []
        try:
            for child in self.children:
                _wait(child, deadline, is_urgent)
        finally:
            for child in self.children:
                texts += _reap(child)
            self.children.clear()
        return texts


def _pass(fd: int, passed: contextlib.ExitStack) -> int:
    """A descriptor to be closed with the stack, none of the standard streams' (which may be closed in this process)."""
    passed.callback(os.close, fd)
    if fd > 2:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    passed.callback(os.close, copy)
    return copy


def _hang_up(connection: Connection) -> None:
    """Says no more; a child that has not joined the run yet learns from it that there is none."""
    end = socket.socket(fileno=connection.fileno())
    try:
        end.shutdown(socket.SHUT_WR)
    finally:
        end.detach()


def _wait(child: Child, deadline: float, is_urgent: Callable[[], bool]) -> None:
    """Waits for a child to end, reading what it says, so that it never blocks on a full connection."""
    while not child.has_ended() and time.monotonic() < deadline and not is_urgent():
        ready = select.poll()
        ready.register(child.pidfd, select.POLLIN)
        if not child.has_hung_up:
            ready.register(child.connection.fileno(), select.POLLIN)
        ready.poll(max(0.0, min(deadline - time.monotonic(), 0.05)) * 1000)
        child.read()


def _reap(child: Child) -> list[str]:
    """Kills a child that still lives, collects it and closes what belongs to it; returns what it had to say."""
    child.read()
    if not child.has_ended():
        child.process.kill()
        hint = "close() of its envs may not have run" if child.envs else ""
        if child.is_done:
            hint = "a thread or an exit handler went on after all was done"
        child.warnings.append(f"{child.role} did not end in time and was killed{hint and '; ' + hint}")
    child.process.wait()
    child.read()
    child.connection.close()
    os.close(child.pidfd)
    return child.warnings


def _command(title: str, entry: str, *fds: int) -> list[str]:
    """Runs ``_child.main`` with the caller's import path, which may have grown since the caller started."""
    arguments = ", ".join(repr(each) for each in (title, entry, *fds))
    path = [each for each in sys.path if isinstance(each, str)]  # as the import system does
    code = f"import sys; sys.path[:] = {path!r}; from shmcollect._child import main; main({arguments})"
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code]


def _environment(kind: Kind) -> dict[str, str]:
    """One thread per env worker, unless the user said otherwise."""
    if kind != "env worker":
        return dict(os.environ)
    return {**dict.fromkeys(_THREAD_VARIABLES, "1"), **os.environ}


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A child inherits the mask and unblocks SIGINT once it can handle it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "closed its connection without a word"
    if code < 0:
        names = {each.value: each.name for each in signal.Signals}  # which lack most real-time signals
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"ended unexpectedly with exit code {code}"


def error_of(child: Child, where: str = "") -> ChildError:
    """The error of a child that has failed or died, after its last words.

    Args:
        child: The child.
        where: How far its envs had come.
    """
    deadline = time.monotonic() + _LAST_WORDS_S
    while child.failure is None and not child.has_ended() and time.monotonic() < deadline:
        child.read()
        time.sleep(0.01)
    child.read()
    record = child.failure
    if record is None:
        return _error(child, _end_of(child.process) + where, {}, "")
    return _error(child, _what_failed(record) + where, record.details, record.traceback)


def not_ready(child: Child, timeout_s: float) -> ChildError:
    """The error of a child that takes too long to start."""
    return _error(child, f"was not ready within startup_timeout={timeout_s:g} s", {}, "")


def unfit(child: Child, error: Exception) -> ChildError:
    """The error of a successor that differs from its predecessor."""
    return _error(child, f"cannot take over: {error}", {"type": type(error).__name__}, "")


def overdue(child: Child, env: int, during: str, step: int, timeout_s: float) -> ChildError:
    """The error of a worker one of whose envs takes too long."""
    details = {"env_index": env, "step": step, "during": during}
    return _error(
        child,
        f"failed: env {env} has been in {during} at step {step} for {during}_timeout={timeout_s:g} s",
        details,
        "",
    )


def _what_failed(record: ErrorRecord) -> str:
    details = record.details
    where = f"env {details['env_index']}" if "env_index" in details else "it"
    at = f" at step {details['step']}" if "step" in details else ""
    during = f" in {details['during']}" if "during" in details else ""
    return f"failed: {where} raised {details['type']}{during}{at}: {record.message}"


def _error(child: Child, what: str, details: dict[str, object], traceback: str) -> ChildError:
    owner = f"{child.role} (pid {child.process.pid}"
    if child.envs:
        owner += f", envs {child.envs[0]}..{child.envs[-1]}"
    text = f"{owner}) {what}"
    if traceback:
        text += f"\n\nTraceback in the {child.role}:\n{traceback}"
    kind = EnvWorkerError if child.kind == "env worker" else InferenceError
    return kind(text, role=child.role, pid=child.process.pid, details=details, child_traceback=traceback)


def pickled(what: str, content: object) -> bytes:
    """Cloudpickles a payload.

    Raises:
        ConfigError: It cannot be sent to another process.
    """
    try:
        return bytes(cloudpickle.dumps(content))
    except Exception as error:
        raise ConfigError(f"{what} cannot be sent to another process: {type(error).__name__}: {error}") from error
