"""Whatever is passed through the native core's door: it works or raises, and touches nothing outside its memory.

Also run under the sanitizers (native/sanitize), which see a read outside where these tests see only writes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_rings import OBSERVED, Memory, good_calls

from shmcollect import _native

REFUSALS = (TypeError, ValueError, IndexError, OverflowError, BufferError)
GUARD = 4096
CANARY = 0xA5
DTYPES = ("?", "u1", "i1", "u2", "i4", "i8", "u8", ">i8", "f2", "f4", "f8", "c16", "M8[s]", "S3", "V5")
WORD_CALLS = {  # how many numbers each takes behind its buffer
    "load": 1,
    "store": 2,
    "fetch_add": 2,
    "compare_exchange": 3,
    "bell_prepare": 1,
    "bell_cancel": 1,
    "bell_notify": 1,
}
METHODS = tuple(good_calls(Memory()))

edges = [0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 9, 2**63 - 1, 2**63, 2**64]
numbers = st.sampled_from([*edges, *(-each for each in edges)]) | st.integers(-10, 40) | st.integers()
junk = st.none() | st.text(max_size=3) | st.floats() | st.just(object()) | st.booleans() | st.binary(max_size=40)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """A buffer of any type, shape, order, with gaps or backwards, read-only or not."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    array = np.zeros(shape, draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()) and array.dtype.kind in "iu":
        array[...] = draw(st.integers(0, 5))
    step = draw(st.sampled_from([1, 1, 1, 2, -1]))
    if array.ndim and step != 1:
        array = array[::step]
    if draw(st.integers(0, 5)) == 0:
        array = array.T
    array.flags.writeable = draw(st.booleans())
    return draw(
        st.sampled_from([lambda a: a, lambda a: a, lambda a: a, _memoryview, lambda a: bytearray(a.tobytes())])
    )(array)


def _memoryview(array: Any) -> Any:
    try:
        return memoryview(array)
    except ValueError:  # dates have no buffer
        return array


anything = numbers | arrays() | junk
nested = anything | st.lists(anything, max_size=4) | st.lists(anything, max_size=4).map(tuple)


class Guarded:
    """The memory of a small run between two guards."""

    def __init__(self) -> None:
        self.memory = Memory()
        size = self.memory.layout.size_bytes
        self.whole = np.full(size + 2 * GUARD, CANARY, np.uint8)
        shift = -self.whole.ctypes.data % 64
        self.start = GUARD - 64 + shift
        self.inside = self.whole[self.start : self.start + size]
        self.inside[:] = 0
        self.memory.bytes = self.inside
        self.memory.set(OBSERVED, (0, 0, 1))  # so that env 2 may step
        self.arguments = self.memory.arguments()
        self.rings = _native.Rings(**self.arguments)

    def check(self) -> None:
        end = self.start + self.inside.size
        assert (self.whole[: self.start] == CANARY).all() and (self.whole[end:] == CANARY).all()


def attempt(call: Any, *arguments: Any) -> None:
    """Calls; what it raises is a refusal, or the test fails."""
    with contextlib.suppress(*REFUSALS):
        call(*arguments)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_word_call_with_anything_works_or_is_refused(data: st.DataObject) -> None:
    guarded = Guarded()
    name = data.draw(st.sampled_from(sorted(WORD_CALLS)))
    buffer = data.draw(st.just(guarded.inside) | nested)
    count = data.draw(st.sampled_from([WORD_CALLS[name]] * 5 + [0, 1, 4]))
    attempt(getattr(_native, name), buffer, *data.draw(st.lists(anything, min_size=count, max_size=count)))
    guarded.check()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rings_of_any_map_are_made_or_refused(data: st.DataObject) -> None:
    guarded = Guarded()
    changed = data.draw(st.lists(st.sampled_from(sorted(guarded.arguments)), max_size=3, unique=True))
    arguments = guarded.arguments | {name: data.draw(nested) for name in changed}
    if data.draw(st.booleans()):
        fields = [list(each) for each in guarded.arguments["fields"]]
        field = data.draw(st.sampled_from(fields))
        field[data.draw(st.integers(0, 4))] = data.draw(nested | st.lists(numbers, max_size=3).map(tuple))
        arguments["fields"] = tuple(map(tuple, fields))
    for name in ("cursors", "running", "latencies"):
        if data.draw(st.integers(0, 3)) == 0:
            offsets = arguments[name] = np.array(guarded.arguments[name])
            offsets.flat[data.draw(st.integers(0, offsets.size - 1))] = data.draw(
                st.integers(-(2**63), 2**63 - 1) | st.integers(-64, 9000)
            )
    try:
        rings = _native.Rings(**arguments)
    except REFUSALS:
        return
    # A map that is accepted is one that all methods can be used with.
    for name in METHODS:
        attempt(getattr(rings, name), *data.draw(calls(guarded.memory, name)))
    guarded.check()


def calls(memory: Memory, name: str) -> st.SearchStrategy[tuple[Any, ...]]:
    """Arguments a method works with, up to two of them replaced: by others of the kind, or by anything."""

    def replaced(argument: Any) -> st.SearchStrategy[Any]:
        if type(argument) is int:
            return st.integers(0, 4) | st.integers(0, 4) | anything
        if isinstance(argument, tuple):
            return st.lists(st.sampled_from([*argument, 0, 99]) | anything, max_size=4).map(tuple) | nested
        indices = st.lists(st.integers(-1, 3) | st.integers(-(2**63), 2**63 - 1), max_size=4)
        return indices.map(lambda values: np.array(values, np.int64)) | nested

    @st.composite
    def changed(draw: st.DrawFn) -> tuple[Any, ...]:
        arguments = list(good_calls(memory)[name])
        for position in draw(st.lists(st.integers(0, len(arguments) - 1), max_size=2, unique=True)):
            arguments[position] = draw(replaced(arguments[position]))
        return tuple(arguments)

    return changed()


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_method_with_anything_works_or_is_refused(data: st.DataObject) -> None:
    guarded = Guarded()
    name = data.draw(st.sampled_from(METHODS))
    attempt(getattr(guarded.rings, name), *data.draw(calls(guarded.memory, name)))
    guarded.check()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_bell_waited_on_with_anything_returns_or_is_refused(data: st.DataObject) -> None:
    guarded = Guarded()
    buffer = data.draw(st.just(guarded.inside) | nested)
    key = data.draw(anything)
    deadline_ns = data.draw(st.sampled_from([0, 1, 1000]) | junk | numbers.filter(lambda n: n < 2**31))
    attempt(_native.bell_wait, buffer, data.draw(anything), key, deadline_ns)
    guarded.check()
