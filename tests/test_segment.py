"""The named block of shared memory: who may have a name, who gets it back, and what attaching to anything else says."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmcollect import _native, segment
from shmcollect.errors import (
    ConfigError,
    LayoutVersionError,
    NotASegmentError,
    SegmentError,
    SegmentInUseError,
    SegmentNotReadyError,
    SegmentSpaceError,
)
from shmcollect.header import Owner
from shmcollect.layout import HEADER, HEADER_WORDS, LAYOUT_VERSION, MAGIC, PAGE, Field, Layout, slot_fields
from shmcollect.ring import Rings
from shmcollect.segment import Segment, check_name, new_name, unlink
from tests.forgery import forge

# What every child process of these tests starts with.
PREAMBLE = """
import os, signal, sys
import numpy as np
from shmcollect.errors import *
from shmcollect.layout import Field, Layout, slot_fields
from shmcollect.segment import Segment

def layout():
    fields = slot_fields([Field("obs", (), np.dtype("f4"), (3,))], [], [], final_obs=True)
    return Layout((2, 1), 4, 2, fields, {"learner": ("frames",)}, {"env": "Test-v0"})
"""


def layout(*, rows: int = 3, capacity: int = 4) -> Layout:
    fields = slot_fields([Field("obs", (), np.dtype("f4"), (rows,))], [], [], final_obs=True)
    return Layout((2, 1), capacity, 2, fields, {"learner": ("frames",)}, {"env": "Test-v0"})


def path_of(name: str) -> Path:
    return Path(f"/dev/shm/shmcollect.{name}")


@pytest.fixture
def name() -> Iterator[str]:
    """A name that is free before and after the test."""
    fresh = new_name()
    yield fresh
    path_of(fresh).unlink(missing_ok=True)


@contextlib.contextmanager
def created(name: str, like: Layout | None = None) -> Iterator[Segment]:
    made = Segment.create(name, like or layout())
    try:
        yield made
    finally:
        made.unlink()
        made.close()


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    script = PREAMBLE + textwrap.dedent(code)
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[str]:
    """Lets a child end; returns what it printed."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.split()


def leave_behind(name: str) -> None:
    """A segment whose owner was killed."""
    with child("Segment.create(sys.argv[1], layout()); os.kill(os.getpid(), signal.SIGKILL)", name) as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert path_of(name).stat().st_size == layout().size_bytes


# ---- create and attach


def test_attaching_finds_the_same_layout_run_and_memory(name: str) -> None:
    with created(name) as mine:
        theirs = Segment.attach(name, run_id=mine.run_id, writable=True)
        assert theirs.layout.describe() == mine.layout.describe()
        assert (theirs.run_id, theirs.owner, theirs.name) == (mine.run_id, mine.owner, name)
        word = mine.layout.words["reset_count"]
        _native.store(theirs.buffer, word, 7)
        assert _native.load(mine.buffer, word) == 7
        theirs.close()
    with pytest.raises(FileNotFoundError, match=re.escape(name)):
        Segment.attach(name)


def test_a_new_segment_is_all_zeros_behind_its_header(name: str) -> None:
    with created(name) as mine:
        start = mine.layout.description_offset
        assert not any(mine.buffer[PAGE:start])
        assert not any(mine.buffer[start + len(mine.layout.describe()) :])


def test_readers_from_outside_cannot_write(name: str) -> None:
    with created(name):
        reader = Segment.attach(name)
        with pytest.raises(TypeError, match="readonly"):
            reader.buffer[PAGE : PAGE + 1] = b"x"
        with pytest.raises(BufferError):
            _native.store(reader.buffer, reader.layout.words["run_state"], 1)
        reader.close()


def test_another_run_of_the_same_name_is_not_joined(name: str) -> None:
    with created(name) as mine, pytest.raises(SegmentInUseError, match=rf"expected run id {mine.run_id + 1}, got"):
        Segment.attach(name, run_id=mine.run_id + 1)


def test_only_the_user_may_open_a_segment(name: str) -> None:
    before = os.umask(0)
    try:
        with created(name):
            assert stat.S_IMODE(path_of(name).stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_segment_of_another_user_is_in_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with created(name), monkeypatch.context() as patch:
        patch.setattr(segment.os, "open", refuse)
        with pytest.raises(SegmentInUseError, match=f"belongs to user {os.getuid()}"):
            Segment.attach(name)


def test_views_stay_valid_after_close(name: str) -> None:
    with created(name) as mine:
        rings = Rings(mine)
        view = rings.view(rings.fields["obs"][0])
        tensor = torch.from_numpy(view)
        view[2, 3] = 5
    mine.close()
    del rings
    view[1, 1] = 6
    assert tensor[2, 3].tolist() == [5] * 3 and tensor[1, 1].tolist() == [6] * 3


def test_closing_twice_is_closing_once(name: str) -> None:
    with created(name) as mine:
        mine.close()
        mine.close()


# ---- names


@pytest.mark.parametrize("good", ["a", "7", "run-1.2_B", "x" * 30, "x" * 31, "x" * 200, "x" * 244])
def test_letters_digits_and_a_few_signs_make_a_name(good: str) -> None:
    assert check_name(good) == good
    with created(good):
        Segment.attach(good).close()
    assert not path_of(good).exists()


@pytest.mark.parametrize(
    "bad", ["", "a/b", "/a", "..", ".a", "-a", "_a", "a b", "a\n", "é", "a\0", "x" * 245, "x" * 256, None, 3, b"a"]
)
def test_anything_else_is_refused_before_anything_is_made(bad: Any) -> None:
    for use in (check_name, lambda n: Segment.create(n, layout()), Segment.attach):
        with pytest.raises(ConfigError, match=r"expected 1 to 244 letters") as caught:
            use(bad)
        assert isinstance(caught.value, ValueError) and repr(bad) in str(caught.value)


def test_new_names_are_names_and_differ() -> None:
    names = {check_name(new_name()) for _ in range(1000)}
    assert len(names) == 1000


# ---- who owns a name


def test_a_name_of_this_process_is_in_use(name: str) -> None:
    with created(name) as mine:
        with pytest.raises(SegmentInUseError, match=f"live process {os.getpid()}"):
            Segment.create(name, layout())
        assert Segment.attach(name).run_id == mine.run_id
    with created(name):
        pass


def test_a_name_of_another_live_process_is_in_use(name: str) -> None:
    code = "made = Segment.create(sys.argv[1], layout()); print('made', flush=True); sys.stdin.read(); made.unlink()"
    with child(code, name) as process:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        with pytest.raises(SegmentInUseError, match=f"live process {process.pid}"):
            Segment.create(name, layout())
        assert Segment.attach(name).owner.pid == process.pid
        assert said(process) == []
    with created(name):
        pass


def test_the_name_of_a_killed_owner_is_reclaimed(name: str) -> None:
    leave_behind(name)
    abandoned = Segment.attach(name)
    assert not abandoned.owner.is_alive() and abandoned.owner.is_here()
    with created(name) as mine:
        assert mine.run_id != abandoned.run_id and mine.owner == Owner.this_process()
        assert not any(mine.buffer[PAGE : mine.layout.description_offset])
    abandoned.close()


def test_an_owner_that_nobody_has_reaped_is_dead(name: str) -> None:
    with child("Segment.create(sys.argv[1], layout()); os.kill(os.getpid(), signal.SIGKILL)", name) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with created(name):
            pass


def test_a_process_that_got_the_pid_of_a_dead_owner_does_not_own_its_name(name: str) -> None:
    mine = Segment.create(name, layout())
    forge(name, owner_start_ticks=mine.owner.start_ticks - 1)
    with created(name):
        pass
    mine.close()


def test_an_owner_in_another_pid_namespace_cannot_be_judged(name: str) -> None:
    mine = Segment.create(name, layout())
    # The pid is none of this namespace, which means nothing.
    forge(name, pid_namespace=mine.owner.pid_namespace + 1, owner_pid=2**22 + 1)
    with pytest.raises(SegmentInUseError, match=rf"pid {2**22 + 1} of another pid namespace.*choose another name"):
        Segment.create(name, layout())
    assert Segment.attach(name).run_id == mine.run_id
    mine.unlink()
    mine.close()


def test_owners_are_told_apart_by_their_start() -> None:
    here = Owner.this_process()
    assert here.pid == os.getpid() and here.start_ticks > 0 and here.is_alive() and here.is_here()
    assert not Owner(here.pid, here.start_ticks + 1, here.pid_namespace).is_alive()
    assert not Owner(2**22 + 1, here.start_ticks, here.pid_namespace).is_alive()
    assert not Owner(here.pid, here.start_ticks, here.pid_namespace + 1).is_here()


def test_a_process_may_be_called_anything() -> None:
    with child(
        "open('/proc/self/comm', 'w').write(') R 1 (x y'); print('named', flush=True); sys.stdin.read()"
    ) as each:
        assert each.stdout is not None and each.stdout.readline() == "named\n"
        plain = Path(f"/proc/{each.pid}/stat").read_text()
        assert Owner(each.pid, int(plain.rpartition(") ")[2].split()[19]), 0).is_alive()
        assert said(each) == []


def test_of_many_creators_exactly_one_gets_each_name() -> None:
    names = [f"{new_name()}-{i}" for i in range(24)]
    for taken in names[::2]:  # left over by creators that died at once: to be reclaimed, by one of them
        path_of(taken).touch()
    code = """
        print("here", flush=True)
        sys.stdin.readline()
        won = []
        for name in sys.argv[1:]:
            try:
                won.append(Segment.create(name, layout()))
            except SegmentInUseError:
                pass
        print(*(each.name for each in won), flush=True)
        sys.stdin.readline()
        for each in won:
            each.unlink()
    """
    creators = [child(code, *names) for _ in range(4)]
    for each in creators:
        assert each.stdout is not None and each.stdout.readline() == "here\n"
    winners: list[str] = []
    for step in ("go", "stop"):
        for each in creators:
            assert each.stdin is not None
            each.stdin.write(f"{step}\n")
            each.stdin.flush()
        if step == "go":
            for each in creators:
                assert each.stdout is not None
                winners += each.stdout.readline().split()
    for each in creators:
        assert said(each) == []
    assert Counter(winners) == Counter(names)
    assert not any(path_of(each).exists() for each in names)


def test_a_starter_does_not_wait_forever_for_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_LOCK_TIMEOUT_S", 0.05)
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(SegmentError, match="held the lock"):
            Segment.create(name, layout())
    finally:
        os.close(fd)
    with created(name):
        pass


# ---- unlink


def test_a_name_that_somebody_else_has_by_now_is_not_removed(name: str) -> None:
    mine = Segment.create(name, layout())
    path_of(name).unlink()
    with created(name) as theirs:
        mine.unlink()
        assert not unlink(name, mine.run_id)
        assert Segment.attach(name).run_id == theirs.run_id
    mine.unlink()  # nobody's now: nothing to do, and no error
    mine.close()


def test_unlinking_says_whether_it_removed_the_name(name: str) -> None:
    mine = Segment.create(name, layout())
    assert unlink(name, mine.run_id) and not unlink(name, mine.run_id)
    mine.close()


def test_the_memory_lives_on_for_those_who_are_attached(name: str) -> None:
    with created(name) as mine:
        reader = Segment.attach(name)
        mine.unlink()
        _native.store(mine.buffer, mine.layout.words["reset_count"], 9)
        assert _native.load(reader.buffer, reader.layout.words["reset_count"]) == 9
        reader.close()


# ---- creators that died half-way, and what is no segment


def half_made(words: int) -> bytes:
    """A segment whose creator died after so many words of the header."""
    values = {
        "magic": MAGIC,
        "size_bytes": layout().size_bytes,
        "owner_pid": os.getpid(),  # this very process: alive, but it does not hold the lock
        "owner_start_ticks": Owner.this_process().start_ticks,
        "pid_namespace": Owner.this_process().pid_namespace,
        "run_id": 5,
    }
    content = bytearray(layout().size_bytes)
    for word, value in list(values.items())[:words]:
        content[HEADER[word] : HEADER[word] + 8] = value.to_bytes(8, "little")
    return bytes(content)


@pytest.mark.parametrize("words", range(7))
def test_a_segment_is_not_ready_before_its_version_is_there_and_then_reclaimed(name: str, words: int) -> None:
    path_of(name).write_bytes(half_made(words))
    with pytest.raises(SegmentNotReadyError, match="is being created"):
        Segment.attach(name)
    with created(name):
        pass


def test_an_empty_object_is_not_ready_and_reclaimed(name: str) -> None:
    path_of(name).touch()
    with pytest.raises(SegmentNotReadyError, match="is being created"):
        Segment.attach(name)
    with created(name):
        pass


@pytest.mark.parametrize("start", [0, 8, 100])
def test_what_is_not_ours_is_told_apart_and_never_removed(name: str, start: int) -> None:
    foreign = bytes(start) + b"something else entirely" + bytes(PAGE * 3)
    path_of(name).write_bytes(foreign)
    with pytest.raises(NotASegmentError, match="not a segment") if start == 0 else pytest.raises(SegmentError):
        Segment.attach(name)
    with pytest.raises(NotASegmentError, match="not a segment"):
        Segment.create(name, layout())
    assert not unlink(name, 5)
    assert path_of(name).read_bytes() == foreign


@pytest.mark.parametrize("size", [1, 8, 79, PAGE - 1])
def test_what_is_too_short_for_a_header_is_not_ours(name: str, size: int) -> None:
    path_of(name).write_bytes(bytes(size))
    for use in (lambda: Segment.attach(name), lambda: Segment.create(name, layout())):
        with pytest.raises(NotASegmentError, match=f"only {size} bytes"):
            use()
    assert path_of(name).stat().st_size == size


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def dangle(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        make_socket,
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.symlink_to("x"),
    ],
    ids=["directory", "fifo", "socket", "link", "dangling link"],
)
@pytest.mark.parametrize("writable", [False, True])
def test_what_is_no_file_is_not_ours_and_never_removed(
    make: Callable[[Path], None], writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "SHM_DIRECTORY", str(tmp_path))  # a fifo in the real one might hold others up
    path = tmp_path / "shmcollect.x"
    make(path)
    kind = path.lstat().st_mode
    for use in (lambda: Segment.attach("x", writable=writable), lambda: Segment.create("x", layout())):
        with pytest.raises(NotASegmentError, match="not a segment"):
            use()
    assert not unlink("x", 5)
    assert path.lstat().st_mode == kind


def test_another_version_says_both(name: str) -> None:
    with created(name) as mine:
        _native.store(mine.buffer, HEADER["layout_version"], LAYOUT_VERSION + 1)
        expected = f"layout version {LAYOUT_VERSION + 1}; this shmcollect reads version {LAYOUT_VERSION}"
        with pytest.raises(LayoutVersionError, match=expected):
            Segment.attach(name)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("description_offset", 0),
        ("description_offset", -8),
        ("description_offset", 2**62),
        ("description_bytes", 0),
        ("description_bytes", -1),
        ("description_bytes", 2**62),
        ("description_bytes", 40),
        ("description_crc", 1),
    ],
)
def test_a_damaged_header_is_told(name: str, word: str, value: int) -> None:
    with created(name) as mine:
        _native.store(mine.buffer, HEADER[word], value)
        with pytest.raises(NotASegmentError, match="damaged"):
            Segment.attach(name)


@pytest.mark.parametrize(
    "junk",
    [b"\xff", b"{}", b"[]", b"0", b"[" * 100_000, b'{"worker_envs": [99999999999999]'],
    ids=["no text", "nothing", "a list", "a number", "too deep", "too many envs"],
)
def test_a_damaged_description_is_told(name: str, junk: bytes) -> None:
    with created(name, layout(rows=10_000)) as mine:
        start = mine.layout.description_offset
        mine.buffer[start : start + len(junk)] = junk
        _native.store(mine.buffer, HEADER["description_bytes"], len(junk))
        with pytest.raises(NotASegmentError, match="damaged"):
            Segment.attach(name)


def test_a_truncated_segment_is_told(name: str) -> None:
    with created(name) as mine:
        os.truncate(path_of(name), mine.layout.size_bytes - PAGE)
        with pytest.raises(NotASegmentError, match=f"{mine.layout.size_bytes - PAGE} bytes"):
            Segment.attach(name)
        os.truncate(path_of(name), PAGE)
        with pytest.raises(NotASegmentError, match="damaged"):
            Segment.attach(name)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_whatever_bytes_are_damaged_attaching_works_or_tells(name: str, data: st.DataObject) -> None:
    with created(name) as mine:
        content = bytearray(mine.buffer[:])
    start = mine.layout.description_offset
    header, description = range(8 * len(HEADER_WORDS)), range(start, start + len(mine.layout.describe()))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.sampled_from([*header, *description]))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content)))) :]
    path_of(name).write_bytes(content)
    try:
        found = Segment.attach(name, writable=data.draw(st.booleans()))
    except SegmentError:
        pass
    else:
        assert found.layout.describe() == mine.layout.describe(), "a damaged description was believed"
        Rings(found)
        found.close()
    path_of(name).unlink()


def test_attaching_while_segments_come_and_go_finds_a_whole_one_or_says_not_yet(name: str) -> None:
    code = """
        import select
        found = set()
        print("here", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            try:
                attached = Segment.attach(sys.argv[1])
            except (FileNotFoundError, SegmentNotReadyError):
                continue
            assert attached.layout.describe() == layout().describe()
            found.add(attached.run_id)
            attached.close()
        print(len(found))
    """
    with child(code, name) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "here\n"
        stop = time.monotonic() + 1.5
        while time.monotonic() < stop:
            with created(name):
                pass
        (found,) = said(reader)
    assert int(found) > 0


# ---- space


def test_a_file_system_too_small_is_told_with_numbers_and_what_to_do(name: str) -> None:
    stats = os.statvfs("/dev/shm")
    free = stats.f_bavail * stats.f_frsize
    too_large = layout(rows=max(free, 2**40), capacity=8)
    with pytest.raises(SegmentSpaceError, match=r"--shm-size") as caught:
        Segment.create(name, too_large)
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC
    assert f"{too_large.size_bytes:,} bytes" in str(caught.value)
    assert re.search(r"has [\d,]+ free", str(caught.value))
    assert not path_of(name).exists()


def test_space_that_goes_while_it_is_reserved_is_told_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    with pytest.raises(SegmentSpaceError, match=r"--shm-size"):
        Segment.create(name, layout())
    assert not path_of(name).exists()


def test_a_file_system_without_a_limit_is_not_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs mounted with size=0 says so by counting no blocks at all."""
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(segment.os, "statvfs", lambda _: unlimited)
    with created(name):
        pass


def test_every_page_is_there_from_the_start(name: str) -> None:
    with created(name, layout(rows=50_000)) as mine:
        assert path_of(name).stat().st_blocks * 512 >= mine.layout.size_bytes


@pytest.mark.parametrize("stage", ["_reserve", "_write_header"])
def test_an_interrupted_creation_leaves_no_name(name: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(segment, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            Segment.create(name, layout())
    assert not path_of(name).exists()


def test_fifty_rounds_leave_neither_names_nor_descriptors(name: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with created(name):
            reader = Segment.attach(name)
            reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not path_of(name).exists()
