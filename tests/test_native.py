"""The native core's words, bells and parent watch: right results, and a bad call raises and writes nothing.

This file and test_native_rings.py run under the address and undefined-behaviour sanitizers too (native/sanitize), so
their memory is arrays, whose ends the sanitizers know, rather than segments.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcollect import _native

INT64 = st.integers(-(2**63), 2**63 - 1)
NOT_CONTIGUOUS = NOT_WRITABLE = (ValueError, BufferError)  # NumPy raises the one, bytes and memoryview the other

# ---- words and bells -------------------------------------------------------------------------------------------------

WORD_CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "load": (_native.load, ()),
    "store": (_native.store, (1,)),
    "fetch_add": (_native.fetch_add, (1,)),
    "compare_exchange": (_native.compare_exchange, (0x0706050403020100, 1)),
    "bell_prepare": (_native.bell_prepare, ()),
    "bell_cancel": (_native.bell_cancel, ()),
    "bell_notify": (_native.bell_notify, ()),
    "bell_wait": (_native.bell_wait, (0, 0)),
}
word_calls = pytest.mark.parametrize("name", WORD_CALLS)
writing_calls = pytest.mark.parametrize("name", [name for name in WORD_CALLS if name != "load"])


def in_ms(milliseconds: float) -> int:
    return time.monotonic_ns() + int(milliseconds * 1e6)


@given(INT64, st.integers(0, 3))
def test_a_word_holds_what_was_stored_and_its_neighbours_keep_theirs(value: int, index: int) -> None:
    words = np.arange(4)
    assert _native.store(words, 8 * index, value) is None
    assert _native.load(words, 8 * index) == value
    expected = np.arange(4)
    expected[index] = value
    assert (words == expected).all()


@given(INT64, INT64)
def test_fetch_add_returns_the_value_before_and_wraps(value: int, delta: int) -> None:
    words = np.array([7, value, 7])
    assert _native.fetch_add(words, 8, delta) == value
    assert words.tolist() == [7, (value + delta + 2**63) % 2**64 - 2**63, 7]


@given(INT64, INT64, INT64)
def test_compare_exchange_stores_only_over_what_was_expected(value: int, expected: int, desired: int) -> None:
    words = np.array([value])
    assert _native.compare_exchange(words, 0, expected, desired) is (value == expected)
    assert words[0] == (desired if value == expected else value)
    assert _native.compare_exchange(words, 0, int(words[0]), desired) is True
    assert words[0] == desired


def test_a_fence_returns_nothing_and_takes_nothing() -> None:
    assert _native.fence() is None
    with pytest.raises(TypeError):
        _native.fence(1)  # type: ignore[call-arg]


def test_a_word_can_be_loaded_from_memory_that_cannot_be_written() -> None:
    assert _native.load((258).to_bytes(8, "little") + bytes(8), 0) == 258


@writing_calls
def test_read_only_memory_is_refused(name: str) -> None:
    call, rest = WORD_CALLS[name]
    memory = bytes(range(8)) + bytes(8)
    with pytest.raises(NOT_WRITABLE):
        call(memory, 0, *rest)
    assert memory == bytes(range(8)) + bytes(8)


@word_calls
@pytest.mark.parametrize(
    ("offset", "error"),
    [
        (-8, IndexError),
        (-1, IndexError),
        (16, IndexError),
        (9, IndexError),
        (2**62, IndexError),
        (-(2**63), IndexError),
        (2**63 - 1, IndexError),
        (2**63, OverflowError),
        (-(2**63) - 1, OverflowError),
        (4, ValueError),
        (1, ValueError),
        (8.0, TypeError),
        ("8", TypeError),
        (None, TypeError),
    ],
)
def test_a_word_that_is_not_there_is_refused(name: str, offset: Any, error: type[Exception]) -> None:
    call, rest = WORD_CALLS[name]
    words = np.frombuffer(bytearray(range(16)), np.int64)
    with pytest.raises(error):
        call(words, offset, *rest)
    assert words.tobytes() == bytes(range(16))


@word_calls
def test_a_buffer_too_short_for_a_word_is_refused(name: str) -> None:
    call, rest = WORD_CALLS[name]
    for size in (0, 7):
        with pytest.raises(IndexError, match=f"buffer of {size} bytes"):
            call(bytearray(size), 0, *rest)


@word_calls
def test_alignment_is_that_of_the_address_not_of_the_offset(name: str) -> None:
    call, rest = WORD_CALLS[name]
    shifted = np.zeros(5, np.int64).view(np.uint8)[4:]
    with pytest.raises(ValueError, match="not aligned"):
        call(shifted, 8, *rest)
    assert call(shifted, 12, *rest) in (0, None, False)


@word_calls
@pytest.mark.parametrize("buffer", [None, 3, "text", [0, 0], object()])
def test_something_without_a_buffer_is_refused(name: str, buffer: Any) -> None:
    call, rest = WORD_CALLS[name]
    with pytest.raises(TypeError):
        call(buffer, 0, *rest)


@word_calls
def test_a_buffer_with_gaps_is_refused(name: str) -> None:
    call, rest = WORD_CALLS[name]
    words = np.zeros(8, np.int64)
    with pytest.raises(NOT_CONTIGUOUS):
        call(words[::2], 0, *rest)
    assert not words.any()


@word_calls
def test_a_wrong_number_of_arguments_is_refused(name: str) -> None:
    call, rest = WORD_CALLS[name]
    words = np.zeros(2, np.int64)
    for arguments in ((), (words,), (words, 0, *rest, 0), (words, 0, *rest)[:-1]):
        with pytest.raises(TypeError, match=rf"{name}\(\) takes {2 + len(rest)} arguments"):
            call(*arguments)
    with pytest.raises(TypeError):
        call(words, 0, *rest, extra=1)
    assert not words.any()


@pytest.mark.parametrize(("value", "error"), [(2**63, OverflowError), (1.5, TypeError), ("1", TypeError)])
def test_a_value_that_is_no_64_bit_integer_is_refused(value: Any, error: type[Exception]) -> None:
    words = np.zeros(1, np.int64)
    for call, arguments in (
        (_native.store, (value,)),
        (_native.fetch_add, (value,)),
        (_native.compare_exchange, (value, 1)),
        (_native.compare_exchange, (0, value)),
        (_native.bell_wait, (value, 0)),
        (_native.bell_wait, (0, value)),
    ):
        with pytest.raises(error):
            call(words, 0, *arguments)
    assert not words.any()


def test_a_buffer_cannot_vanish_while_its_words_are_used_and_can_afterwards() -> None:
    memory = bytearray(16)
    for call, rest in WORD_CALLS.values():
        call(memory, 0, *rest)
    memory.clear()  # a view that was never given back would refuse


class Bell:
    """A doorbell between two words that nobody may touch."""

    def __init__(self) -> None:
        self.memory = np.full(6, 0xA5A5A5A5, np.uint32)
        self.memory[2:4] = 0

    @property
    def key(self) -> int:
        return int(self.memory[2])

    @property
    def announced(self) -> bool:
        assert self.memory[3] in (0, 1)
        assert (self.memory[[0, 1, 4, 5]] == 0xA5A5A5A5).all(), "a bell wrote over its neighbours"
        return bool(self.memory[3])

    def prepare(self) -> int:
        return _native.bell_prepare(self.memory, 8)

    def cancel(self) -> None:
        _native.bell_cancel(self.memory, 8)

    def notify(self) -> bool:
        return _native.bell_notify(self.memory, 8)

    def wait(self, key: int, deadline_ns: int) -> bool:
        return _native.bell_wait(self.memory, 8, key, deadline_ns)


def test_a_notifier_bumps_the_key_and_learns_whether_somebody_is_announced() -> None:
    bell = Bell()
    assert bell.notify() is False
    assert bell.prepare() == bell.key == 1
    assert bell.announced
    assert bell.notify() is True
    assert bell.key == 2
    assert bell.announced, "only the sleeper withdraws its announcement"
    bell.cancel()
    assert not bell.announced
    assert bell.notify() is False


def test_a_bell_rung_since_prepare_does_not_sleep() -> None:
    bell = Bell()
    key = bell.prepare()
    bell.notify()
    assert bell.wait(key, in_ms(3_600_000)) is True
    assert not bell.announced


def test_a_key_wraps_at_32_bits() -> None:
    bell = Bell()
    bell.memory[2] = 2**32 - 1
    key = bell.prepare()
    assert key == 2**32 - 1
    assert bell.wait(key, in_ms(1)) is False
    bell.notify()
    assert bell.key == 0
    assert bell.wait(key, in_ms(3_600_000)) is True


@pytest.mark.parametrize("ms", [0, 1, 30])
def test_an_unrung_bell_sleeps_until_its_deadline_and_not_a_moment_less(ms: int) -> None:
    bell = Bell()
    key, deadline_ns = bell.prepare(), in_ms(ms)
    assert bell.wait(key, deadline_ns) is False
    assert time.monotonic_ns() >= deadline_ns
    assert not bell.announced


def test_a_deadline_that_has_passed_does_not_sleep() -> None:
    bell = Bell()
    for deadline_ns in (0, 1, in_ms(-1000)):
        assert bell.wait(bell.prepare(), deadline_ns) is False
        assert not bell.announced


def test_a_sleeper_is_woken_by_another_thread() -> None:
    bell = Bell()
    answers: list[bool] = []

    def ring_when_announced() -> None:
        while not bell.announced:
            time.sleep(0.001)
        time.sleep(0.02)  # so that it sleeps, most likely
        answers.append(bell.notify())

    ringer = threading.Thread(target=ring_when_announced)
    ringer.start()
    assert bell.wait(bell.prepare(), in_ms(3_600_000)) is True  # which also shows that other threads run meanwhile
    ringer.join()
    assert answers == [True]


@pytest.mark.parametrize(
    ("key", "deadline_ns"), [(-1, 0), (2**32, 0), (2**63 - 1, 0), (0, -1), (0, -(2**63)), (-(2**63), 0)]
)
def test_a_key_or_deadline_out_of_range_is_refused(key: int, deadline_ns: int) -> None:
    bell = Bell()
    bell.prepare()
    with pytest.raises(ValueError, match="bell_wait"):
        bell.wait(key, deadline_ns)
    assert bell.key == 0
    assert bell.announced


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], object], float], None]]:
    """Calls a function from a signal handler every few seconds until the test ends."""

    def start(function: Callable[[], object], every_s: float) -> None:
        signal.signal(signal.SIGALRM, lambda *_: function())
        signal.setitimer(signal.ITIMER_REAL, every_s, every_s)

    before = signal.getsignal(signal.SIGALRM)
    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signal_handlers_run_while_a_bell_sleeps_and_do_not_move_its_deadline(alarm: Callable[..., None]) -> None:
    bell = Bell()
    handled_ns: list[int] = []
    key, deadline_ns = bell.prepare(), in_ms(300)
    alarm(lambda: handled_ns.append(time.monotonic_ns()), 0.02)  # a deadline that began anew would never come
    assert bell.wait(key, deadline_ns) is False
    assert time.monotonic_ns() >= deadline_ns
    assert handled_ns[0] < deadline_ns
    assert len(handled_ns) >= 2, "the sleep did not go on after the first signal"
    assert not bell.announced


def test_a_signal_handler_may_ring_the_bell_it_interrupted(alarm: Callable[..., None]) -> None:
    bell = Bell()
    alarm(bell.notify, 0.02)
    assert bell.wait(bell.prepare(), in_ms(3_600_000)) is True
    assert not bell.announced


def test_a_signal_handler_that_raises_ends_the_sleep_and_withdraws_the_announcement(
    alarm: Callable[..., None],
) -> None:
    bell = Bell()
    key = bell.prepare()

    def fail() -> None:
        raise ArithmeticError("out of the handler")

    alarm(fail, 0.02)
    with pytest.raises(ArithmeticError, match="out of the handler"):
        bell.wait(key, in_ms(3_600_000))
    assert not bell.announced


# ---- the parent watch ------------------------------------------------------------------------------------------------

WATCHING_CHILD = """
import ctypes, sys
from shmcollect import _native
_native.watch_parent(int(sys.argv[1]))
print("watching", flush=True)
{busy}
"""
PARENT = """
import os, subprocess, sys
pidfd = os.pidfd_open(os.getpid())
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(pidfd)], pass_fds=[pidfd], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"watching\\n"
print(child.pid, flush=True)
child.wait()
"""


def ends_within(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


@pytest.mark.parametrize(
    "busy",
    [
        "ctypes.PyDLL(None).pause()",  # asleep in C, the interpreter's lock held
        "sum(range(10**12))",  # at work in C, the interpreter's lock held
        "import time; time.sleep(1000)",
    ],
)
def test_a_child_ends_with_its_parent_whatever_it_is_doing(busy: str) -> None:
    command = [sys.executable, "-c", PARENT, WATCHING_CHILD.format(busy=busy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not ends_within(child, 0.3), "the child ended although its parent lives"
            parent.kill()
            assert ends_within(child, 2), "the child outlives its parent"
        finally:
            if not ends_within(child, 0):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def test_the_child_of_a_parent_that_has_ended_already_ends_at_once() -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(parent.pid)
    parent.communicate()
    command = [sys.executable, "-c", WATCHING_CHILD.format(busy="ctypes.PyDLL(None).pause()"), str(pidfd)]
    child = subprocess.run(command, pass_fds=[pidfd], stdout=subprocess.DEVNULL, timeout=30)
    os.close(pidfd)
    assert child.returncode == -signal.SIGKILL


def test_a_child_may_end_before_its_parent() -> None:
    pidfd = os.pidfd_open(os.getpid())
    command = [sys.executable, "-c", WATCHING_CHILD.format(busy="sys.exit(7)"), str(pidfd)]
    child = subprocess.run(command, pass_fds=[pidfd], stdout=subprocess.DEVNULL, timeout=30)
    os.close(pidfd)
    assert child.returncode == 7


@pytest.mark.parametrize(
    ("pidfd", "error"),
    [
        ("-1", ValueError),
        ("12345", ValueError),
        ("2**31", ValueError),
        ("2**63", OverflowError),
        ("1.0", TypeError),
        ("os.open('/dev/null', os.O_RDONLY)", ValueError),
        ("pipe_with_data()", ValueError),
    ],
)
def test_a_parent_watch_on_anything_but_a_pidfd_is_refused(pidfd: str, error: type[Exception]) -> None:
    script = f"""
import os, time
from shmcollect import _native
def pipe_with_data():
    read, write = os.pipe()
    os.write(write, b"data")
    return read
try:
    _native.watch_parent({pidfd})
except {error.__name__}:
    time.sleep(0.1)
    print("alive")
"""
    child = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=30)
    assert (child.returncode, child.stdout) == (0, b"alive\n")
