"""Sweeping the shared memory: what is dead goes, what is anybody else's stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import small_segment

from shmcollect import _native
from shmcollect.layout import HEADER, MAGIC, PAGE
from shmcollect.segment import PREFIX, Segment, locked, new_name
from shmcollect.sweep import Found, describe, sweep

ROOT = Path(__file__).parents[1]

ORPHAN = """
import os, sys
sys.path[:0] = ["tests"]
from in_process import small_segment
with small_segment() as segment:
    print(segment.name, flush=True)
    os._exit(0)
"""


@pytest.fixture
def entry() -> Iterator[Path]:
    """A path under this package's prefix, removed at the end."""
    path = Path(f"/dev/shm/{PREFIX}{new_name()}")
    yield path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


def orphan() -> str:
    """The name of a segment whose owner has died."""
    return subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def find(found: list[Found], name: str) -> Found:
    (each,) = (each for each in found if each.name == name)
    return each


def exists(name: str) -> bool:
    return Path(f"/dev/shm/{PREFIX}{name}").exists()


def header(**words: int) -> bytes:
    page = bytearray(PAGE)
    for name, value in {"magic": MAGIC, "layout_version": 1, **words}.items():
        page[HEADER[name] : HEADER[name] + 8] = value.to_bytes(8, "little")
    return bytes(page)


def test_what_a_dead_owner_left_is_removed() -> None:
    name = orphan()
    assert exists(name)
    each = find(sweep(), name)
    assert each.is_dead and "is gone" in each.verdict
    assert not exists(name)


def test_a_dry_run_removes_nothing() -> None:
    name = orphan()
    found = sweep(dry_run=True)
    assert find(found, name).is_dead and exists(name)
    assert "is gone: would be removed" in describe(found, dry_run=True)
    sweep()


def test_what_a_live_owner_holds_stays() -> None:
    with small_segment() as segment:
        each = find(sweep(), segment.name)
        assert not each.is_dead and each.verdict == f"in use by pid {os.getpid()}"
        assert each.size_bytes == segment.layout.size_bytes
        assert exists(segment.name)


def test_a_pid_that_another_process_has_today_is_not_its_owner() -> None:
    with small_segment() as segment:
        ticks = segment.owner.start_ticks
        _native.store(segment.buffer, HEADER["owner_start_ticks"], ticks + 1)
        assert find(sweep(dry_run=True), segment.name).is_dead


def test_what_lives_in_another_pid_namespace_stays() -> None:
    with small_segment() as segment:
        _native.store(segment.buffer, HEADER["pid_namespace"], 1)
        assert "another pid namespace" in find(sweep(), segment.name).verdict
        assert exists(segment.name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_stays(entry: Path) -> None:
    entry.write_bytes(header(owner_pid=2**22 - 1))
    os.chown(entry, 65534, 65534)
    assert find(sweep(), entry.name.removeprefix(PREFIX)).verdict == "of user 65534"
    assert entry.exists()


@pytest.mark.parametrize("content", [b"x", b"\0" * 8 + b"x" * 4096, b"x" * 4096, MAGIC.to_bytes(8, "little")])
def test_what_is_no_segment_stays(entry: Path, content: bytes) -> None:
    entry.write_bytes(content)
    assert "no segment" in find(sweep(), entry.name.removeprefix(PREFIX)).verdict
    assert entry.read_bytes() == content


def test_links_and_directories_stay_and_are_not_followed(entry: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(header())
    entry.symlink_to(target)
    assert "not a regular file" in find(sweep(), entry.name.removeprefix(PREFIX)).verdict
    assert entry.is_symlink() and target.exists()
    entry.unlink()
    entry.mkdir()
    assert "not a regular file" in find(sweep(), entry.name.removeprefix(PREFIX)).verdict


@pytest.mark.parametrize("content", [b"", b"\0" * PAGE])
def test_what_its_creator_never_finished_is_removed(entry: Path, content: bytes) -> None:
    entry.write_bytes(content)
    assert find(sweep(), entry.name.removeprefix(PREFIX)).is_dead
    assert not entry.exists()


def test_a_sweep_waits_for_a_starter_that_is_half_way_through(entry: Path) -> None:
    started, found = threading.Event(), []

    def sweeps() -> None:
        started.set()
        found.extend(sweep())

    with locked():
        entry.touch()
        thread = threading.Thread(target=sweeps)
        thread.start()
        started.wait()
        thread.join(0.2)
        assert thread.is_alive() and entry.exists()
        entry.unlink()
    thread.join()
    assert all(each.name != entry.name.removeprefix(PREFIX) for each in found)


def test_the_tool_lists_and_removes() -> None:
    name = orphan()
    listed = subprocess.run(
        [sys.executable, "tools/sweep.py", "--dry-run"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert name in listed.stdout and exists(name)
    subprocess.run([sys.executable, "tools/sweep.py"], capture_output=True, check=True, cwd=ROOT)
    assert not exists(name)


def test_the_next_run_of_a_dead_ones_name_needs_no_sweep() -> None:
    name = orphan()
    with small_segment() as other:
        segment = Segment.create(name, other.layout)
        segment.unlink()
        segment.close()
    assert not exists(name)
