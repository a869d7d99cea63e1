"""A role for tests of the processes: does whatever the payload, a function, says."""

from __future__ import annotations

from collections.abc import Callable

from shmcollect.control import ChildSession


def main(session: ChildSession, payload: Callable[[ChildSession], None]) -> None:
    payload(session)
