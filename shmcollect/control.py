"""What the caller and a child say to each other: start-up reports, warnings and the record of a failure.

Nothing of this is on the path of a step; once a run has started, the connection is silent until something fails.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from shmcollect.errors import RoleFailure
from shmcollect.run_state import ABORTED, RunState
from shmcollect.segment import Segment

_LONGEST_TEXT = 32_768  # characters of a traceback: a failing child must never block on a full connection


@dataclass(frozen=True)
class ErrorRecord:
    """A child's failure, as plain data.

    Attributes:
        details: Where it arose, e.g. ``{"env_index": 3, "step": 17, "during": "step"}``, and the error's ``type``.
        message: The error's own text.
        traceback: The child's traceback.
        time_ns: CLOCK_MONOTONIC when it was recorded; of several, the first is the cause.
    """

    details: dict[str, object]
    message: str
    traceback: str
    time_ns: int

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        """Describes an exception, the cause of a `RoleFailure` rather than itself."""
        cause = error.__cause__ if isinstance(error, RoleFailure) and error.__cause__ else error
        details = dict(error.details) if isinstance(error, RoleFailure) else {}
        text = "".join(traceback.format_exception(cause))
        return cls({**details, "type": type(cause).__name__}, _text(cause), _shorten(text), time.monotonic_ns())


def _text(error: BaseException) -> str:
    """The text of an exception, even of one whose ``__str__`` raises."""
    try:
        return _shorten(str(error))
    except Exception as failure:
        return f"(its text cannot be made: {failure!r})"


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


@dataclass(frozen=True)
class Message:
    """One message from a child: ``"report"``, ``"warning"``, ``"failed"`` or ``"done"`` with what belongs to it."""

    kind: str
    content: Any


class CallerGoneError(Exception):
    """The caller has closed the connection: it gave the run up before it began."""


class ChildSession:
    """A child's end of the connection.

    Attributes:
        connection: The connection itself.
        state: The run state once the child has attached, else None.
        is_survivable: Whether the run goes on when this child fails.
        has_failed: Whether the record of a failure has been sent.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.state: RunState | None = None
        self.is_survivable = False
        self.has_failed = False

    def report(self, content: object) -> None:
        """Answers the caller."""
        send(self.connection, Message("report", content))

    def warn(self, text: str) -> None:
        """Something went wrong that does not end the run; the caller shows it as a warning."""
        send(self.connection, Message("warning", _shorten(text)))

    def done(self) -> None:
        """All there was to do is done: what keeps this process from ending now is none of ours."""
        send(self.connection, Message("done", None))

    def receive(self) -> Any:
        """Waits for what the caller says next.

        Raises:
            CallerGoneError: Nothing more will come.
        """
        try:
            return receive(self.connection)
        except (EOFError, ConnectionResetError) as error:
            raise CallerGoneError from error

    def attach(self, name: str, run_id: int, *, survivable: bool) -> tuple[Segment, RunState]:
        """Joins the run's segment.

        Args:
            name: The run's name.
            run_id: The run's id.
            survivable: From now on a failure ends this process alone, because the caller will start another one;
                otherwise it aborts the run.
        """
        segment = Segment.attach(name, run_id=run_id, writable=True)
        self.state, self.is_survivable = RunState(segment), survivable
        return segment, self.state

    def fail(self, error: BaseException) -> None:
        """Sends the record of the first failure, then ends this process's roles or the run.

        Whoever sees the run state finds the record.
        """
        if self.has_failed:
            return
        self.has_failed = True
        send(self.connection, Message("failed", ErrorRecord.of(error)))
        if self.state is None:
            return
        if self.is_survivable:
            self.state.leave()
        else:
            self.state.end(ABORTED)


def send(connection: Connection, content: object) -> None:
    """Sends anything cloudpickle can carry: spaces may hold lambdas."""
    connection.send_bytes(cloudpickle.dumps(content))


def receive(connection: Connection) -> Any:
    """Receives what `send` sent.

    Raises:
        EOFError: The other side has closed.
    """
    return cloudpickle.loads(connection.recv_bytes())
