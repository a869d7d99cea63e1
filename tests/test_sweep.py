"""The sweeper: what a dead owner left is removed, and nothing else ever is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmcollect import segment
from shmcollect import sweep as sweeper
from shmcollect.header import Owner
from shmcollect.layout import LAYOUT_VERSION, MAGIC, PAGE, Field, Layout, slot_fields
from shmcollect.segment import Segment, new_name
from shmcollect.sweep import Verdict, main, names_present, sweep
from tests.forgery import forge, path_of

ROOT = Path(__file__).parents[1]
NOBODY = 65534
GONE = 2**22 + 1  # beyond every pid
PREAMBLE = """
import os, signal, sys
from tests.test_sweep import *
"""


def layout() -> Layout:
    fields = slot_fields([Field("obs", (), np.dtype("f4"), (3,))], [], [], final_obs=True)
    return Layout((2, 1), 4, 2, fields, {"learner": ("frames",)}, {"env": "Test-v0"})


@pytest.fixture
def name() -> Iterator[str]:
    fresh = new_name()
    yield fresh
    path = path_of(fresh)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def leave_behind(name: str) -> int:
    """A segment whose owner was killed; returns the pid that was the owner's."""
    with child("Segment.create(sys.argv[1], layout()); os.kill(os.getpid(), signal.SIGKILL)", name) as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert path_of(name).exists()
    return process.pid


@contextlib.contextmanager
def created(name: str) -> Iterator[Segment]:
    made = Segment.create(name, layout())
    try:
        yield made
    finally:
        path_of(name).unlink(missing_ok=True)
        made.close()


def swept(name: str, *, dry_run: bool = False) -> Verdict:
    (verdict,) = sweep([name], dry_run=dry_run)
    assert verdict.name == name
    return verdict


def state_of(name: str) -> tuple[Any, ...]:
    """All that a sweep could change of a name."""
    path = path_of(name)
    status = path.lstat()
    content = path.read_bytes() if path.is_file() else os.readlink(path) if path.is_symlink() else ""
    return (status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, content)


# ---- what is removed


def test_what_a_killed_owner_left_is_removed(name: str) -> None:
    pid = leave_behind(name)
    verdict = swept(name)
    assert not path_of(name).exists()
    assert (verdict.text, verdict.is_well) == (f"its owner, pid {pid}, is gone; removed", True)
    assert verdict.finding is not None and verdict.finding.size_bytes == layout().size_bytes
    assert verdict.finding.owner is not None and verdict.finding.owner.pid == pid


def test_an_owner_that_nobody_has_reaped_is_gone(name: str) -> None:
    with child("Segment.create(sys.argv[1], layout()); os.kill(os.getpid(), signal.SIGKILL)", name) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert swept(name).text.endswith("; removed")
    assert not path_of(name).exists()


def test_a_process_that_got_the_pid_of_the_owner_is_not_the_owner(name: str) -> None:
    with created(name) as mine:
        forge(name, owner_start_ticks=mine.owner.start_ticks - 1)
        assert swept(name).text == f"its owner, pid {os.getpid()}, is gone; removed"
        assert not path_of(name).exists()


@pytest.mark.parametrize("pid", [0, -1, GONE, 2**62, -(2**63)])
def test_an_owner_that_can_be_no_process_is_gone(name: str, pid: int) -> None:
    with created(name):
        forge(name, owner_pid=pid)
        assert swept(name).text == f"its owner, pid {pid}, is gone; removed"


def half_made(*words: int) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words).ljust(layout().size_bytes, b"\0")


@pytest.mark.parametrize(
    "content", [b"", half_made(), half_made(MAGIC), half_made(MAGIC, 0, PAGE, os.getpid())], ids=len
)
def test_what_never_got_an_owner_is_removed(name: str, content: bytes) -> None:
    path_of(name).write_bytes(content)
    assert swept(name) == Verdict(name, swept_finding(content), "never got an owner; removed", True)
    assert not path_of(name).exists()


class swept_finding:
    """Equal to a finding of this content without an owner."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, segment.Finding) and (other.size_bytes, other.owner) == (self.size, None)


def test_a_truncated_segment_of_a_dead_owner_is_removed(name: str) -> None:
    leave_behind(name)
    os.truncate(path_of(name), PAGE)
    assert swept(name).text.endswith("is gone; removed")
    assert not path_of(name).exists()


@pytest.mark.parametrize("version", [LAYOUT_VERSION - 1, LAYOUT_VERSION + 1, 2**40])
def test_a_segment_of_another_version_is_judged_by_its_owner(name: str, version: int) -> None:
    with created(name):
        forge(name, layout_version=version)
        assert swept(name).text == f"in use by the live process {os.getpid()}; left alone"
        forge(name, owner_pid=GONE)
        assert swept(name).text == f"its owner, pid {GONE}, is gone; removed"


# ---- what is not


def test_a_dry_run_says_what_it_would_do_and_touches_nothing(name: str) -> None:
    pid = leave_behind(name)
    before = state_of(name)
    verdict = swept(name, dry_run=True)
    assert (verdict.text, verdict.is_well) == (f"its owner, pid {pid}, is gone; would be removed", False)
    assert state_of(name) == before


def test_a_segment_of_this_process_is_in_use(name: str) -> None:
    with created(name):
        before = state_of(name)
        verdict = swept(name)
        assert (verdict.text, verdict.is_well) == (f"in use by the live process {os.getpid()}; left alone", True)
        assert state_of(name) == before


def test_a_segment_of_another_live_process_is_in_use(name: str) -> None:
    code = "made = Segment.create(sys.argv[1], layout()); print('made', flush=True); sys.stdin.read(); made.unlink()"
    with child(code, name) as process:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        assert swept(name).text == f"in use by the live process {process.pid}; left alone"
        os.kill(process.pid, signal.SIGSTOP)  # stopped is not dead
        assert swept(name).text == f"in use by the live process {process.pid}; left alone"
        os.kill(process.pid, signal.SIGCONT)
        assert path_of(name).exists()
        process.communicate(timeout=60)


def test_a_segment_of_another_pid_namespace_is_reported(name: str) -> None:
    with created(name) as mine:
        forge(name, pid_namespace=mine.owner.pid_namespace + 1, owner_pid=GONE)
        before = state_of(name)
        verdict = swept(name)
        expected = f"belongs to pid {GONE} of another pid namespace; left alone"
        assert (verdict.text, verdict.is_well) == (expected, True)
        assert state_of(name) == before


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@root_only
@pytest.mark.parametrize("content", ["dead", b"", half_made(), b"something else"], ids=str)
def test_a_file_of_another_user_is_never_removed(name: str, content: Any) -> None:
    if content == "dead":
        leave_behind(name)
    else:
        path_of(name).write_bytes(content)
    os.chown(path_of(name), NOBODY, NOBODY)
    before = state_of(name)
    verdict = swept(name)
    assert (verdict.text, verdict.is_well) == (f"belongs to user {NOBODY}; left alone", True)
    assert state_of(name) == before


@root_only
def test_another_user_can_neither_judge_nor_remove_ours(name: str) -> None:
    pid = leave_behind(name)
    os.chmod(path_of(name), 0o644)  # readable, so that its dead owner could be found
    before = state_of(name)
    code = """
        os.setuid(NOBODY)
        print(*(verdict.text for verdict in sweep(sys.argv[1:])), sep="\\n")
        with segment.lock():
            try:
                segment.remove(sys.argv[1])
            except segment.SegmentInUseError as error:
                print(error)
    """
    with child(code, name) as process:
        output, _ = process.communicate(timeout=60)
    assert re.fullmatch(rf"belongs to user 0; left alone\n'{name}' cannot be removed: .*\n", output), output
    assert state_of(name) == before
    assert swept(name).text == f"its owner, pid {pid}, is gone; removed"


def damage(name: str) -> None:
    """One flipped bit in the owner's pid, the checksum left as it was."""
    leave_behind(name)
    with path_of(name).open("r+b") as file:
        file.seek(24)
        (byte,) = file.read(1)
        file.seek(24)
        file.write(bytes([byte ^ 64]))


def make_socket(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path_of(name)))


FOREIGN: dict[str, tuple[Callable[[str], object], str]] = {
    "short": (lambda name: path_of(name).write_bytes(b"x"), "only 1 bytes, its header takes 4096"),
    "almost a header": (lambda name: path_of(name).write_bytes(half_made(MAGIC)[: PAGE - 1]), f"only {PAGE - 1} bytes"),
    "something else": (lambda name: path_of(name).write_bytes(b"else" * PAGE), r"its magic is 0x65736c6565736c65, exp"),
    "late": (lambda name: path_of(name).write_bytes(bytes(100) + b"x" * PAGE), "its magic is 0x0, expected 0x544"),
    "damaged": (damage, "the checksum of its header is 0x[0-9a-f]+, it says 0x"),
    "directory": (lambda name: path_of(name).mkdir(), "no regular file"),
    "fifo": (lambda name: os.mkfifo(path_of(name)), "no regular file"),
    "socket": (make_socket, "No such device or address"),
    "link": (lambda name: path_of(name).symlink_to("/etc/passwd"), "Too many levels of symbolic links"),
    "dangling link": (lambda name: path_of(name).symlink_to("nowhere"), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_segment_of_ours_is_reported_and_never_removed(name: str, kind: str) -> None:
    make, reason = FOREIGN[kind]
    make(name)
    before = state_of(name)
    verdict = swept(name)
    assert re.search(reason, verdict.text) and verdict.text.endswith("; left alone"), verdict.text
    assert not verdict.is_well
    assert state_of(name) == before


def test_a_link_to_what_a_dead_owner_left_is_not_followed(name: str) -> None:
    target = new_name()
    pid = leave_behind(target)
    path_of(name).symlink_to(path_of(target))
    assert not swept(name).is_well and path_of(name).is_symlink() and path_of(target).exists()
    assert swept(target).text == f"its owner, pid {pid}, is gone; removed"


def test_a_name_that_is_gone_by_the_time_it_is_looked_at_is_passed_over(name: str) -> None:
    assert list(sweep([name])) == []


@pytest.mark.parametrize("odd", ["", "-x", "../x", "a b", "\x1b[31m", "é", "\udcff", "x" * 245])
def test_what_no_run_can_be_called_is_left_alone(odd: str) -> None:
    assert list(sweep([odd])) == [Verdict(odd, None, "no name that a run can have; left alone", False)]


# ---- races


def test_a_sweep_waits_for_a_starter_and_says_so_when_it_waits_in_vain(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_behind(name)
    monkeypatch.setattr(segment, "_LOCK_TIMEOUT_S", 0.05)
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        verdict = swept(name)
        assert "could not be judged or removed: another process has held the lock" in verdict.text
        assert not verdict.is_well and path_of(name).exists()
    finally:
        os.close(fd)
    assert swept(name).text.endswith("; removed")


def test_a_starter_never_loses_its_segment_to_a_sweep(name: str) -> None:
    """Sweepers run all the while a segment is left, reclaimed, and made: whoever made one still has it."""
    code = "print('here', flush=True)\nwhile os.getppid() == int(sys.argv[2]): list(sweep([sys.argv[1]]))"
    sweepers = [child(code, name, str(os.getpid())) for _ in range(2)]
    try:
        for each in sweepers:
            assert each.stdout is not None and each.stdout.readline() == "here\n"
        stop, rounds, by_sweep = time.monotonic() + 2, 0, 0
        while time.monotonic() < stop:
            path_of(name).touch()  # abandoned by a creator: a sweeper and the next line both want it
            if rounds % 2:
                deadline = time.monotonic() + 30
                while path_of(name).exists():
                    assert time.monotonic() < deadline, "nobody swept"
                by_sweep += 1
            mine = Segment.create(name, layout())
            assert Segment.attach(name).run_id == mine.run_id
            assert os.stat(path_of(name)).st_nlink == 1
            mine.unlink()
            mine.close()
            rounds += 1
        assert rounds > 10 and by_sweep > 5
    finally:
        for each in sweepers:
            each.kill()
            each.communicate()


# ---- the command


def sweep_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/sweep.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_the_command_prints_name_size_owner_age_and_verdict(name: str) -> None:
    pid, size = leave_behind(name), f"{layout().size_bytes:,}"
    forge(name, created_ns=time.time_ns() - 3 * 86_400 * 10**9)
    for arguments, verdict, status in (
        (["--dry-run", name], "would be removed", 1),
        ([name], "removed", 0),
    ):
        result = sweep_command(*arguments)
        head, line = result.stdout.splitlines()
        assert head.split() == ["NAME", "BYTES", "OWNER", "AGE", "VERDICT"]
        expected = f"{name} {size} {pid} 3 d its owner, pid {pid}, is gone; {verdict}"
        assert (line.split(), result.returncode, result.stderr) == (expected.split(), status, "")
    result = sweep_command(name)
    assert (result.stdout, result.returncode) == ("no segments in /dev/shm\n", 0)


def test_the_command_reports_what_is_not_ours_with_status_one(name: str) -> None:
    path_of(name).write_bytes(b"x")
    result = sweep_command(name)
    assert (result.returncode, result.stderr) == (1, "") and "only 1 bytes" in result.stdout


def test_a_wrong_argument_is_status_two() -> None:
    assert sweep_command("--wet-run").returncode == 2


def test_the_command_sweeps_every_name_unless_told_which(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [f"{name}-b", f"{name}-a"]
    for each in (name, *others):
        path_of(each).touch()
    assert set(names_present()) >= {name, *others}
    assert names_present() == sorted(names_present())
    # Others use this machine's shared memory too, and their tests leave things there on purpose.
    present = [each for each in names_present() if each.startswith(name)]
    monkeypatch.setattr(sweeper, "names_present", lambda: present)
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [name, *sorted(others)]
    assert not any(path_of(each).exists() for each in (name, *others))


def test_names_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["\x1b[31m", "\udcff"]) == 1
    output = capsys.readouterr().out
    assert r"'\x1b[31m'" in output and r"'\udcff'" in output and "\x1b" not in output


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (2 * 86_400, "2 d")],
)
def test_ages_are_told_in_the_largest_unit_of_which_there_are_two(seconds: float, text: str) -> None:
    assert sweeper._age(seconds) == text


def test_a_starter_of_the_same_name_judges_as_the_sweeper_does(name: str) -> None:
    """`Segment.create` reclaims what a sweep would remove, and refuses what it would leave alone."""
    leave_behind(name)
    with created(name) as mine:
        assert mine.owner == Owner.this_process()
        forge(name, pid_namespace=mine.owner.pid_namespace + 1)
        with pytest.raises(segment.SegmentInUseError, match=f"another pid namespace; .*remove {path_of(name)}"):
            Segment.create(name, layout())


@root_only
def test_a_starter_does_not_take_the_name_of_another_user(name: str) -> None:
    leave_behind(name)
    os.chown(path_of(name), NOBODY, NOBODY)
    with pytest.raises(segment.SegmentInUseError, match=f"belongs to user {NOBODY}; choose another name"):
        Segment.create(name, layout())
    assert path_of(name).exists()
