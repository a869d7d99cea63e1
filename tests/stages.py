"""Stops a role between two steps of the protocol, so that it can be killed there: in the child, for tests only.

A stage is ``before`` or ``after`` a call: of a Python function (``after forward``), of one of the native core
(``after native.scatter``), or of whichever of these is next (``before native``).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import shmcollect.doorbell
import shmcollect.runner

_WHEN = {"c_call": "before", "c_return": "after", "call": "before", "return": "after"}


@dataclass(frozen=True)
class Stage:
    """Where to stop.

    Attributes:
        place: Such as ``after native.scatter``.
        skip: So many of these pass first.
    """

    place: str
    skip: int = 0

    def __str__(self) -> str:
        return f"{self.place}, time {self.skip + 1}"


def sleep_until_told() -> None:
    """From now on nobody in this process looks again by itself: whoever is not woken up sleeps for ever."""
    for module in (shmcollect.doorbell, shmcollect.runner):
        module.LONGEST_SLEEP_S = 1e6


def arm(stage: Stage, stopped: Path) -> None:
    """From now on this thread stops its process at the stage; the file ``stopped`` then has its pid."""
    left = stage.skip

    def hook(frame: FrameType, event: str, function: Any) -> None:
        nonlocal left
        if event not in _WHEN or stage.place not in _places(frame, event, function):
            return
        if left:
            left -= 1
            return
        sys.setprofile(None)
        stopped.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    sys.setprofile(hook)


def _places(frame: FrameType, event: str, function: Any) -> tuple[str, ...]:
    """What an event is called in a `Stage`."""
    when = _WHEN[event]
    if not event.startswith("c_"):
        return (f"{when} {frame.f_code.co_name}",)
    if "shmcollect._native" in (function.__module__, type(function.__self__).__module__):
        return f"{when} native.{function.__name__}", f"{when} native"
    return ()


def wait_until_stopped(stopped: Path, meanwhile: Callable[[], object], limit_s: float = 60.0) -> int:
    """Waits for a process that `arm` stops; returns its pid, with the file gone."""
    deadline = time.monotonic() + limit_s
    while not (stopped.exists() and (text := stopped.read_text()) and _is_stopped(int(text))):
        assert time.monotonic() < deadline, "no process came to this stage"
        meanwhile()
    stopped.unlink()
    return int(text)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
