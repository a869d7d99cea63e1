"""Fixtures every test shares: nothing may be left behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def _shared_memory() -> set[str]:
    """Entries of this package, except those of other live processes on a shared machine."""
    return {entry.name for entry in Path("/dev/shm").glob("shmcollect.*") if not _belongs_to_another(entry)}


def _belongs_to_another(entry: Path) -> bool:
    try:
        if not entry.is_file():
            return True
        with entry.open("rb") as file:
            owner = int.from_bytes(file.read(32)[24:], "little")
    except (FileNotFoundError, PermissionError):
        return True
    return owner != os.getpid() and (owner == 0 or psutil.pid_exists(owner))


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = os.readlink(entry)
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return found


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """The shared memory, the descriptors and the process list are the same before and after every test."""
    memory, descriptors, children = _shared_memory(), _descriptors(), _children()
    yield
    if _shared_memory() - memory or set(_descriptors()) - set(descriptors) or _children() - children:
        gc.collect()
    deadline = time.monotonic() + 5
    while _children() - children and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children() - children, "child processes are left"
    assert not _shared_memory() - memory, "entries in /dev/shm are left"
    left = {number: target for number, target in _descriptors().items() if number not in descriptors}
    assert not left, f"descriptors are left open: {left}"
