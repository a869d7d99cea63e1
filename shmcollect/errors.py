"""Every exception of the package.

::

    ShmcollectError
    ├── ConfigError (ValueError)        an argument that cannot work; raised at construction
    ├── SpecError (ValueError)          a space, observation, action or reward that does not fit its slot
    ├── WeightsError (ValueError)       weights that do not fit the policy, or cannot be sent
    ├── SegmentError (OSError)
    │   ├── SegmentNotReadyError        the name exists but its creator has not finished writing the header
    │   ├── NotASegmentError            the name exists but holds something else, or a damaged header
    │   ├── LayoutVersionError          written by another version of shmcollect
    │   ├── SegmentInUseError           the name belongs to a live run, or to one that cannot be judged
    │   └── SegmentSpaceError           the shared memory file system is too small
    ├── ChildError (RuntimeError)       a child process failed; carries role, pid, env index and traceback
    │   ├── EnvWorkerError
    │   └── InferenceError
    ├── RoleFailure                     inside a child only: where its cause arose
    ├── ClosedError (RuntimeError)      use after close
    ├── ExhaustedError (RuntimeError)   all of total_frames has been delivered
    └── BusyError (RuntimeError)        two threads collected from one collector at once
"""

from __future__ import annotations


class ShmcollectError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(ShmcollectError, ValueError):
    """An argument that cannot work, found at construction."""


class SpecError(ShmcollectError, ValueError):
    """A space, or a value that should belong to it, does not fit a fixed slot."""


class WeightsError(ShmcollectError, ValueError):
    """Weights that do not fit the policy's, a module that cannot be sent, or a sync scheme used out of turn."""


class SegmentError(ShmcollectError, OSError):
    """A shared-memory segment could not be created or attached."""


class SegmentNotReadyError(SegmentError):
    """The segment exists but its creator has not published the layout version yet."""


class NotASegmentError(SegmentError):
    """The name holds something that is not a (whole) segment of this package."""


class LayoutVersionError(SegmentError):
    """The segment was laid out by another version of this package."""


class SegmentInUseError(SegmentError):
    """The name is held by a live owner, or by one in another pid namespace."""


class SegmentSpaceError(SegmentError):
    """The shared-memory file system cannot hold the segment."""


class ChildError(ShmcollectError, RuntimeError):
    """A child process failed.

    Attributes:
        role: ``"env worker 0"`` or ``"inference server"``.
        pid: Process id of the child.
        details: What is known, e.g. ``{"env_index": 3, "step": 17, "type": "ZeroDivisionError"}``.
        child_traceback: The child's own traceback, or an empty string.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str,
        pid: int,
        details: dict[str, object] | None = None,
        child_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.role = role
        self.pid = pid
        self.details = details or {}
        self.child_traceback = child_traceback


class EnvWorkerError(ChildError):
    """An env worker died, or one of its envs raised."""


class InferenceError(ChildError):
    """The inference server died, or the policy raised or returned what does not fit."""


class ClosedError(ShmcollectError, RuntimeError):
    """The collector, reader or segment has been closed."""


class ExhaustedError(ShmcollectError, RuntimeError):
    """All frames of ``total_frames`` have been delivered."""


class BusyError(ShmcollectError, RuntimeError):
    """Another thread is already collecting from this collector."""


class RoleFailure(ShmcollectError):
    """Says where in a role its ``__cause__`` arose; becomes the `ChildError` of the caller.

    Attributes:
        details: E.g. ``{"env_index": 3, "step": 17, "during": "step"}``.
    """

    def __init__(self, **details: object) -> None:
        super().__init__(", ".join(f"{key}={value}" for key, value in details.items()))
        self.details = details
