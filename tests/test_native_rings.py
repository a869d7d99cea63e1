"""The native core's Rings: right results, and a bad call raises and writes nothing.

Every method is compared with a model in plain NumPy, and the whole memory is looked at afterwards.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmcollect import _native
from shmcollect.histogram import NUM_BUCKETS, lower_edge_ns
from shmcollect.layout import STEP_FIELDS, Field, Layout, slot_fields

ACTED, GRANTED, OBSERVED, RELEASED = _native.ACTED, _native.GRANTED, _native.OBSERVED, _native.RELEASED
OBSERVED_NS = 4
CURSORS = (OBSERVED, ACTED, RELEASED, GRANTED, OBSERVED_NS)
LARGEST_CURSOR = 2**63 - 1 - 64  # room for a capacity and a step
NOT_CONTIGUOUS = NOT_WRITABLE = (ValueError, BufferError)  # NumPy raises the one, bytes and memoryview the other

# ---- the memory they work on -----------------------------------------------------------------------------------------


class Memory:
    """The shared memory of a small run as one array, its rings, and a model of them in plain NumPy."""

    def __init__(self, worker_envs: tuple[int, ...] = (2, 1), capacity: int = 4) -> None:
        obs = [
            Field("obs", ("position",), np.dtype(np.float32), (3,)),
            Field("obs", ("image",), np.dtype(np.uint8), (2, 2)),
            Field("obs", ("nothing",), np.dtype(np.float64), (2, 0)),
        ]
        action = [Field("action", (), np.dtype(np.int64), ())]
        extras = [
            Field("extras", ("half",), np.dtype(np.float16), ()),
            Field("extras", ("flag",), np.dtype(bool), (5,)),
        ]
        self.layout = layout = Layout(
            worker_envs, capacity, 1, slot_fields(obs, action, extras, final_obs=True), {}, {}
        )
        self.bytes = np.zeros(layout.size_bytes, np.uint8)
        self.num_envs, self.capacity = layout.num_envs, capacity
        self.rings = _native.Rings(**self.arguments())
        self.leaves = layout.indices("obs")

    def arguments(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "buffer": self.bytes,
            "num_envs": layout.num_envs,
            "capacity": layout.capacity,
            "cursors": layout.cursors,
            "groups": layout.groups,
            "running": np.array(layout.running, np.int64),
            "grant_count": layout.words["grant_count"],
            "latencies": np.array(layout.latencies, np.int64),
            "fields": tuple(
                (at, layout.env_stride(each), each.row_bytes, each.format, each.shape)
                for at, each in zip(layout.field_offsets, layout.fields, strict=True)
            ),
            "step_fields": tuple(layout.index(kind) for kind in STEP_FIELDS),
            "leaves": layout.indices("obs"),
        }

    @property
    def words(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.bytes.view(np.int64)

    def set(self, which: int, values: Any) -> None:
        self.words[self.layout.cursors[which] // 8] = values

    def get(self, which: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.words[self.layout.cursors[which] // 8]

    def view(self, field: int) -> np.ndarray[Any, Any]:
        """A field in place, [num_envs, capacity, *shape]."""
        each, at = self.layout.fields[field], self.layout.field_offsets[field]
        inner = np.empty((self.capacity, *each.shape), each.dtype).strides
        shape = (self.num_envs, self.capacity, *each.shape)
        return np.ndarray(shape, each.dtype, self.bytes, at, (self.layout.env_stride(each), *inner))

    def slots(self) -> np.ndarray[Any, Any]:
        """All bytes of all slots."""
        return self.bytes[min(self.layout.field_offsets) :]

    def scribble(self, seed: int) -> None:
        """Random bytes in every slot."""
        self.slots()[:] = np.random.default_rng(seed).integers(0, 256, self.slots().size, np.uint8)

    def index(self, kind: str) -> int:
        return self.layout.indices(kind)[0]

    def obs(self, seed: int = 0) -> tuple[np.ndarray[Any, Any], ...]:
        rng = np.random.default_rng(seed)
        return (
            rng.random(3, np.float32),
            rng.integers(0, 256, (2, 2), np.uint8),
            np.empty((2, 0)),
        )


@pytest.fixture
def memory() -> Memory:
    memory = Memory()
    memory.scribble(1)
    memory.words[memory.layout.cursors[OBSERVED][2] // 8] = 1  # so that env 2 may step
    return memory


@pytest.fixture
def unchanged(memory: Memory) -> Iterator[None]:
    """The whole shared memory is the same after the test."""
    before = memory.bytes.copy()
    yield
    assert (memory.bytes == before).all(), "a bad call wrote something"


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def with_field(memory: Memory, index: int, **changes: Any) -> tuple[Any, ...]:
    """All fields, one of them changed."""
    names = ("offset", "env_stride", "row_bytes", "format", "shape")
    fields = list(memory.arguments()["fields"])
    fields[index] = tuple({**dict(zip(names, fields[index], strict=True)), **changes}.values())
    return tuple(fields)


def step_indices(**others: str) -> tuple[int, ...]:
    """The step fields, with other fields in the place of some."""
    return tuple(Memory().index(others.get(kind, kind)) for kind in STEP_FIELDS)


# ---- construction ----------------------------------------------------------------------------------------------------


def test_rings_take_their_arguments_by_position_too() -> None:
    memory = Memory()
    rings = _native.Rings(*memory.arguments().values())
    assert rings.cursor(OBSERVED, 0) == 0


def test_rings_keep_their_memory_and_give_it_back() -> None:
    memory = Memory()
    buffer = bytearray(memory.layout.size_bytes + 8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % 8
    rings = _native.Rings(**{**memory.arguments(), "buffer": memoryview(buffer)[start:]})
    with pytest.raises(BufferError):
        buffer.clear()
    del rings
    buffer.clear()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("buffer", None, TypeError),
        ("latencies", None, TypeError),
        ("latencies", np.zeros(0, np.int64), ValueError),
        ("latencies", ints(-8), ValueError),
        ("latencies", ints(12), ValueError),
        ("latencies", ints(2**62), ValueError),
        ("latencies", np.zeros(2, np.int32), ValueError),
        ("buffer", bytearray(8), ValueError),
        ("buffer", np.zeros((64, 4096), np.uint8)[:, :2048], NOT_CONTIGUOUS),
        ("num_envs", 0, ValueError),
        ("num_envs", -1, ValueError),
        ("num_envs", 2, ValueError),
        ("num_envs", 4, ValueError),
        ("num_envs", 2**31, ValueError),
        ("num_envs", 2**63, OverflowError),
        ("num_envs", 3.0, TypeError),
        ("capacity", 1, ValueError),
        ("capacity", 0, ValueError),
        ("capacity", -4, ValueError),
        ("capacity", 2**31 - 1, ValueError),
        ("capacity", 2**31, ValueError),
        ("capacity", 2**64, OverflowError),
        ("capacity", None, TypeError),
        ("cursors", np.zeros((5, 2), np.int64), ValueError),
        ("cursors", np.zeros((5, 4), np.int64), ValueError),
        ("cursors", np.zeros((5, 3), np.int32), ValueError),
        ("cursors", np.zeros((5, 3), np.uint64), ValueError),
        ("cursors", np.zeros((5, 3), np.float64), ValueError),
        ("cursors", np.zeros((5, 3), ">i8"), ValueError),
        ("cursors", np.zeros((5, 6), np.int64)[:, ::2], NOT_CONTIGUOUS),
        ("cursors", np.full((5, 3), -8), ValueError),
        ("cursors", np.full((5, 3), 4), ValueError),
        ("cursors", np.full((5, 3), 2**62), ValueError),
        ("cursors", bytes(120), ValueError),
        ("cursors", [0] * 15, TypeError),
        ("groups", ints(0, 0), ValueError),
        ("groups", ints(0, 0, 1, 1), ValueError),
        ("groups", ints(0, 0, 2), ValueError),
        ("groups", ints(0, 0, -1), ValueError),
        ("groups", np.zeros(3, np.int32), ValueError),
        ("running", ints(), ValueError),
        ("running", ints(8), ValueError),  # env 2 is of group 1
        ("running", ints(8, -8), ValueError),
        ("running", ints(8, 2**40), ValueError),
        ("running", ints(8, 12), ValueError),
        ("grant_count", -8, ValueError),
        ("grant_count", 4, ValueError),
        ("grant_count", 2**40, ValueError),
        ("grant_count", 2**63, OverflowError),
        ("fields", [], TypeError),
        ("fields", (), IndexError),  # the step fields are missing
        ("fields", (1,), TypeError),
        ("fields", ((0, 64, 8, "q"),), TypeError),
        ("fields", ((0, 64, 8, "q", [], 1),), TypeError),
        ("fields", ((0, 64, 8, "q", []),), TypeError),
        ("fields", ((0.0, 64, 8, "q", ()),), TypeError),
        ("fields", ((0, 64, 8, b"q", ()),), TypeError),
        ("fields", ((0, 64, 8, "qq", ()),), TypeError),
        ("fields", ((2**63, 64, 8, "q", ()),), OverflowError),
        ("step_fields", (0, 1, 2, 3, 4), ValueError),
        ("step_fields", (0, 1, 2, 3, 4, 5, 6), ValueError),
        ("step_fields", [0, 1, 2, 3, 4, 5], TypeError),
        ("step_fields", (0, 1, 2, 3, 4, -1), IndexError),
        ("step_fields", (0, 1, 2, 3, 4, 999), IndexError),
        ("step_fields", (0, 1, 2, 3, 4, "5"), TypeError),
        ("step_fields", step_indices(sequence="terminated"), ValueError),
        ("step_fields", step_indices(sequence="episode"), ValueError),
        ("step_fields", step_indices(reward="terminated"), ValueError),
        ("step_fields", step_indices(truncated="reward"), ValueError),
        ("leaves", [9], TypeError),
        ("leaves", (-1,), IndexError),
        ("leaves", (999,), IndexError),
        ("leaves", (None,), TypeError),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_rings_of_a_wrong_map_are_refused(memory: Memory, name: str, value: Any, error: Any) -> None:
    with pytest.raises(error):
        _native.Rings(**{**memory.arguments(), name: value})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"offset": -64}, ValueError),
        ({"offset": 2**40}, ValueError),
        ({"offset": 2**63 - 1}, ValueError),
        ({"env_stride": 47}, ValueError),  # capacity 4 times 12 bytes
        ({"env_stride": -64}, ValueError),
        ({"env_stride": 2**40}, ValueError),
        ({"env_stride": 2**62}, ValueError),
        ({"row_bytes": 11}, ValueError),
        ({"row_bytes": -12}, ValueError),
        ({"row_bytes": 2**62}, ValueError),
        ({"format": "g"}, ValueError),
        ({"format": "d"}, ValueError),
        ({"format": "l"}, ValueError),
        ({"format": "\0"}, ValueError),
        ({"format": "é"}, ValueError),
        ({"shape": (4,)}, ValueError),
        ({"shape": ()}, ValueError),
        ({"shape": (-3,)}, ValueError),
        ({"shape": (3, -1)}, ValueError),
        ({"shape": (2**62, 2**62)}, ValueError),
        ({"shape": (2**63,)}, OverflowError),
        ({"shape": (3.0,)}, TypeError),
        ({"shape": (1,) * 32 + (3,)}, ValueError),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_a_field_that_does_not_fit_is_refused(memory: Memory, changes: dict[str, Any], error: Any) -> None:
    fields = with_field(memory, memory.leaves[0], **changes)
    with pytest.raises(error):
        _native.Rings(**{**memory.arguments(), "fields": fields})


def test_the_last_field_may_end_exactly_where_the_memory_does() -> None:
    memory = Memory()
    end = memory.layout.size_bytes
    last = len(memory.layout.fields) - 1
    stride = memory.layout.env_stride(memory.layout.fields[last])
    exactly = with_field(memory, last, offset=end - 3 * stride)
    beyond = with_field(memory, last, offset=end - 3 * stride + 1)
    _native.Rings(**{**memory.arguments(), "fields": exactly})
    with pytest.raises(ValueError, match="does not fit"):
        _native.Rings(**{**memory.arguments(), "fields": beyond})


@pytest.mark.usefixtures("unchanged")
def test_a_step_field_must_be_an_aligned_scalar(memory: Memory) -> None:
    sequence = memory.index("sequence")
    offset = memory.layout.field_offsets[sequence]
    for changes in ({"offset": offset + 4}, {"env_stride": 4 * 8 + 4}, {"shape": (1,)}, {"format": "d"}):
        with pytest.raises(ValueError, match=r"step_fields\[0\]"):
            _native.Rings(**{**memory.arguments(), "fields": with_field(memory, sequence, **changes)})


def test_rings_need_all_arguments_and_know_no_others(memory: Memory) -> None:
    arguments = memory.arguments()
    with pytest.raises(TypeError):
        _native.Rings(**arguments, other=1)
    for name in arguments:
        with pytest.raises(TypeError):
            _native.Rings(**{key: value for key, value in arguments.items() if key != name})


# ---- what every method refuses ---------------------------------------------------------------------------------------


def good_calls(memory: Memory) -> dict[str, tuple[Any, ...]]:
    """Arguments with which each method works, once."""
    envs, sequences = ints(0, 2), ints(0, 0)
    return {
        "cursor": (OBSERVED, 0),
        "read_cursors": (OBSERVED, np.empty(3, np.int64)),
        "scan": (0, 2, np.empty(2, np.int64), np.empty(2, np.int64)),
        "acted": (0, 3),
        "finished": (1, 0, np.empty(3, np.int64), np.empty(3, np.int64)),
        "gather": (memory.index("action"), envs, sequences, 2, 1, np.empty(2, np.int64)),
        "scatter": ((memory.index("action"),), envs, sequences, 2, (ints(5, 6),)),
        "advance": (ACTED, envs, sequences, 2, 1),
        "write": (memory.index("action"), 0, 0, ints(5).reshape(())),
        "observe": (0, 0, memory.obs()),
        "step": (2, 0, 1.0, True, False, False, memory.obs()),
    }


WRITING = ("scatter", "advance", "write", "observe", "step")
methods = pytest.mark.parametrize("name", good_calls(Memory()))


@methods
def test_a_method_works_when_called_right(memory: Memory, name: str) -> None:
    getattr(memory.rings, name)(*good_calls(memory)[name])


@methods
@pytest.mark.usefixtures("unchanged")
def test_a_method_refuses_a_wrong_number_of_arguments(memory: Memory, name: str) -> None:
    arguments = good_calls(memory)[name]
    for wrong in ((), arguments[:-1], (*arguments, 0)):
        with pytest.raises(TypeError, match=rf"{name}\(\) takes {len(arguments)} arguments \({len(wrong)} given\)"):
            getattr(memory.rings, name)(*wrong)
    with pytest.raises(TypeError):
        getattr(memory.rings, name)(*arguments, extra=0)


@methods
@pytest.mark.usefixtures("unchanged")
def test_a_method_refuses_numbers_that_are_no_integers_of_64_bits(memory: Memory, name: str) -> None:
    arguments = good_calls(memory)[name]
    for i, argument in enumerate(arguments):
        if type(argument) is not int:
            continue
        for wrong, error in ((2**63, OverflowError), (-(2**70), OverflowError), (1.0, TypeError), (None, TypeError)):
            with pytest.raises(error):
                getattr(memory.rings, name)(*arguments[:i], wrong, *arguments[i + 1 :])


MISFITS: list[tuple[str, int, Any, Any]] = [
    # method, which argument, a wrong value, the error
    *(("cursor", 0, which, IndexError) for which in (-1, 5, 2**62)),
    *(("cursor", 1, env, IndexError) for env in (-1, 3, 2**62)),
    *(("read_cursors", 0, which, IndexError) for which in (-1, 5, 2**62)),
    *(("scan", 0, start, IndexError) for start in (-1, 3, 2**62)),
    ("scan", 1, -1, IndexError),
    *(("scan", 1, limit, ValueError) for limit in (3, 2**62)),  # the arrays hold two
    *(("acted", 0, first, IndexError) for first in (-1, 1, 2**62)),
    *(("acted", 1, count, IndexError) for count in (-1, 4, 2**63 - 1)),
    *(("finished", 0, length, IndexError) for length in (0, -1, 4, 2**62)),  # a capacity of 4 holds 3 and a successor
    *(("finished", 1, start, IndexError) for start in (-1, 3, 2**62)),
    *((method, 0, field, IndexError) for method in ("gather", "write") for field in (-1, 99, 2**62)),
    *(("scatter", 0, (field,), IndexError) for field in (-1, 99, 2**62)),
    *(("scatter", 0, fields, TypeError) for fields in (None, 7, [7], (), (7, 7), ("7",))),
    *(("scatter", 4, values, TypeError) for values in (None, ints(5, 6), [ints(5, 6)], (), (ints(5, 6), ints(5, 6)))),
    *((method, 3, count, ValueError) for method in ("gather", "scatter", "advance") for count in (-1, 3, 2**62)),
    *(("gather", 4, length, ValueError) for length in (0, -1, 5, 2**62)),
    *(("advance", 0, which, ValueError) for which in (-1, 4, 2**62)),
    *(("advance", 4, step, ValueError) for step in (-1, 5, 2**62)),
    *(("write", 1, env, IndexError) for env in (-1, 3, 2**62)),
    *(("write", 2, sequence, ValueError) for sequence in (-1, -(2**63), 2**63 - 1)),
    *((method, 0, env, IndexError) for method in ("step", "observe") for env in (-1, 3, 2**62)),
    *((method, 1, sequence, ValueError) for method in ("step", "observe") for sequence in (-1, 2**63 - 1)),
    # index arrays
    *(
        (method, position, array, error)
        for method, envs in (("gather", 1), ("scatter", 1), ("advance", 1))
        for position, array, error in [
            (envs, ints(0, 3), IndexError),
            (envs, ints(-1, 0), IndexError),
            (envs, ints(0, 2**62), IndexError),
            (envs + 1, ints(0, -1), ValueError),
            (envs + 1, ints(2**63 - 1, 0), ValueError),
            *(
                (at, wrong, error)
                for at in (envs, envs + 1)
                for wrong, error in [
                    (ints(0), ValueError),
                    (np.zeros(2, np.int32), ValueError),
                    (np.zeros(4, np.int32), ValueError),
                    (np.zeros(2, np.uint64), ValueError),
                    (np.zeros(2, np.float64), ValueError),
                    (np.zeros(2, ">i8"), ValueError),
                    (np.zeros(17, np.uint8)[1:].view(np.int64), ValueError),  # not aligned
                    (np.zeros(4, np.int64)[::2], NOT_CONTIGUOUS),
                    (bytes(16), ValueError),
                    ([0, 0], TypeError),
                    (None, TypeError),
                ]
            ),
        ]
    ),
    # arrays that are written
    *(
        (method, at, wrong, error)
        for method, positions, size in (("scan", (2, 3), 2), ("finished", (2, 3), 3), ("read_cursors", (1,), 3))
        for at in positions
        for wrong, error in [
            (np.empty(size - 1, np.int64), ValueError),
            (np.empty(size, np.int32), ValueError),
            (np.empty(size, np.uint64), ValueError),
            (np.empty(2 * size, np.int64)[::2], NOT_CONTIGUOUS),
            (np.broadcast_to(ints(0), size), (ValueError, BufferError)),
            (bytes(8 * size), (ValueError, BufferError)),
            (None, TypeError),
        ]
    ),
    ("read_cursors", 1, np.empty(4, np.int64), ValueError),
    # rows
    *(
        (method, at, wrong, error)
        for method, at in (("gather", 5),)
        for wrong, error in [
            (np.zeros(1, np.int64), ValueError),
            (np.zeros(3, np.int64), ValueError),
            (np.zeros(2, np.int32), ValueError),
            (np.zeros(2, np.float64), ValueError),
            (np.zeros(2, np.uint64), ValueError),
            (np.zeros(2, ">i8"), ValueError),
            (bytearray(16), ValueError),
            (np.zeros(4, np.int64)[::2], NOT_CONTIGUOUS),
            (np.zeros((2, 2), np.int64)[:, :1], NOT_CONTIGUOUS),
            ([0, 0], TypeError),
            (None, TypeError),
        ]
    ),
    ("gather", 5, bytes(16), NOT_WRITABLE),
    # values
    *(("step", 2, reward, TypeError) for reward in ("1", None, ints(1, 2))),
    *(
        (method, at, leaves, TypeError)
        for method, at in (("observe", 2), ("step", 6))
        for leaves in (None, [], (), (1,), (1, 2, 3, 4))
    ),
]


@pytest.mark.parametrize(("name", "position", "wrong", "error"), MISFITS)
@pytest.mark.usefixtures("unchanged")
def test_a_method_refuses_what_does_not_fit(memory: Memory, name: str, position: int, wrong: Any, error: Any) -> None:
    arguments = good_calls(memory)[name]
    untouched = [each.copy() if isinstance(each, np.ndarray) else each for each in arguments]
    with pytest.raises(error):
        getattr(memory.rings, name)(*arguments[:position], wrong, *arguments[position + 1 :])
    for each, before in zip(arguments, untouched, strict=True):
        assert not isinstance(each, np.ndarray) or each.tobytes() == before.tobytes(), "the caller's array was written"


class Refuses:
    def __bool__(self) -> bool:
        raise ArithmeticError("neither true nor false")

    def __index__(self) -> int:
        raise ArithmeticError("no number")

    def __float__(self) -> float:
        raise ArithmeticError("no number")


@methods
@pytest.mark.usefixtures("unchanged")
def test_an_argument_that_raises_is_heard_and_nothing_is_written(memory: Memory, name: str) -> None:
    arguments = good_calls(memory)[name]
    for i, argument in enumerate(arguments):
        if isinstance(argument, int | float):
            with pytest.raises(ArithmeticError):
                getattr(memory.rings, name)(*arguments[:i], Refuses(), *arguments[i + 1 :])


@methods
def test_rings_on_read_only_memory_can_be_read_only(memory: Memory, name: str) -> None:
    memory.bytes.flags.writeable = False
    rings = _native.Rings(**memory.arguments())
    before = memory.bytes.copy()
    if name in WRITING:
        with pytest.raises(TypeError, match="read-only"):
            getattr(rings, name)(*good_calls(memory)[name])
    else:
        getattr(rings, name)(*good_calls(memory)[name])
    assert (memory.bytes == before).all()


# ---- cursors ---------------------------------------------------------------------------------------------------------

BASES = st.sampled_from([0, 2**31 - 2, 2**32 - 2, 2**53, LARGEST_CURSOR - 8])


@st.composite
def cursor_values(draw: st.DrawFn) -> dict[int, list[int]]:
    """Cursors of three envs, each env's close together, near the edges of number types."""
    bases = [draw(BASES) for _ in range(3)]
    return {which: [base + draw(st.integers(0, 6)) for base in bases] for which in CURSORS}


def with_cursors(values: dict[int, list[int]]) -> Memory:
    memory = Memory()
    for which in CURSORS:
        memory.set(which, values[which])
    return memory


@given(cursor_values())
def test_cursors_are_read_one_by_one_and_all_at_once(values: dict[int, list[int]]) -> None:
    memory = with_cursors(values)
    out = np.empty(3, np.int64)
    for which in CURSORS:
        assert [memory.rings.cursor(which, env) for env in range(3)] == values[which]
        assert memory.rings.read_cursors(which, out) is None
        assert out.tolist() == values[which]


def expected_scan(values: dict[int, list[int]], running: list[bool], start: int, limit: int) -> Any:
    rows, coming, since = [], 0, []
    for env in [*range(start, 3), *range(start)]:
        observed, acted, granted = (values[which][env] for which in (OBSERVED, ACTED, GRANTED))
        if acted >= granted:
            continue
        if observed > acted:
            if len(rows) == limit:
                break
            rows.append((env, acted))
            since.append(values[OBSERVED_NS][env])
        elif running[env]:
            coming += 1
    return rows, coming, min(since, default=0)


@given(cursor_values(), st.tuples(st.booleans(), st.booleans()), st.integers(0, 2), st.integers(0, 5))
@settings(max_examples=300)
def test_a_scan_finds_what_a_plain_loop_finds(
    values: dict[int, list[int]], running: tuple[bool, bool], start: int, limit: int
) -> None:
    memory = with_cursors(values)
    memory.words[np.array(memory.layout.running) // 8] = running
    envs, sequences = np.full(5, -7), np.full(5, -7)
    ready, coming, oldest_ns = memory.rings.scan(start, limit, envs, sequences)
    per_env = [running[group] for group in memory.layout.groups]
    rows, expected_coming, expected_ns = expected_scan(values, per_env, start, limit)
    assert list(zip(envs[:ready], sequences[:ready], strict=True)) == rows
    assert (coming, oldest_ns) == (expected_coming, expected_ns)
    assert (envs[ready:] == -7).all() and (sequences[ready:] == -7).all()


def test_a_scan_that_sees_half_a_grant_finds_nothing_yet() -> None:
    memory = Memory()
    memory.set(OBSERVED, 1)
    memory.set(GRANTED, 1)
    envs, sequences = np.empty(3, np.int64), np.empty(3, np.int64)
    assert memory.rings.scan(0, 3, envs, sequences)[:2] == (3, 0)
    memory.words[memory.layout.words["grant_count"] // 8] = 7
    assert memory.rings.scan(0, 3, envs, sequences) == (0, 1, 0)
    memory.words[memory.layout.words["grant_count"] // 8] = 8
    assert memory.rings.scan(0, 3, envs, sequences)[:2] == (3, 0)


@given(cursor_values(), st.integers(0, 3), st.integers(0, 3))
def test_acted_finds_the_envs_whose_newest_observation_has_its_action(
    values: dict[int, list[int]], first: int, count: int
) -> None:
    count = min(count, 3 - first)
    memory = with_cursors(values)
    expected = [e for e in range(first, first + count) if values[ACTED][e] == values[OBSERVED][e] != 0]
    assert memory.rings.acted(first, count) == expected


@given(cursor_values(), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=300)
def test_finished_finds_what_a_plain_loop_finds(values: dict[int, list[int]], length: int, start: int) -> None:
    memory = with_cursors(values)
    envs, sequences = np.full(3, -7), np.full(3, -7)
    n = memory.rings.finished(length, start, envs, sequences)
    order = [*range(start, 3), *range(start)]
    expected = [(e, values[RELEASED][e]) for e in order if values[OBSERVED][e] >= values[RELEASED][e] + length + 1]
    assert list(zip(envs[:n], sequences[:n], strict=True)) == expected
    assert (envs[n:] == -7).all() and (sequences[n:] == -7).all()


def test_cursors_at_the_very_end_of_64_bits_are_compared_without_overflow() -> None:
    memory = Memory()
    last = 2**63 - 1
    memory.set(OBSERVED, last)
    memory.set(RELEASED, [last, last - 1, last - 2])
    memory.set(ACTED, last)
    memory.set(GRANTED, last)
    envs, sequences = np.empty(3, np.int64), np.empty(3, np.int64)
    assert memory.rings.finished(1, 0, envs, sequences) == 1
    assert (envs[0], sequences[0]) == (2, last - 2)
    assert memory.rings.scan(0, 3, envs, sequences) == (0, 0, 0)
    assert memory.rings.acted(0, 3) == [0, 1, 2]


@given(
    st.sampled_from([OBSERVED, ACTED, RELEASED, GRANTED]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=6),
    BASES,
    st.integers(0, 4),
)
def test_advance_sets_cursors_and_returns_each_touched_group_once(
    which: int, rows: list[tuple[int, int]], base: int, step: int
) -> None:
    memory = Memory()
    memory.set(which, base)
    rows = sorted(rows, key=lambda row: row[1])
    envs, sequences = ints(*(env for env, _ in rows)), ints(*(base + at for _, at in rows))
    before = memory.bytes.copy()
    groups = memory.rings.advance(which, envs, sequences, len(rows), step)
    assert groups == sorted({int(memory.layout.groups[env]) for env in envs})
    expected = [max((base + at + step for env, at in rows if env == each), default=base) for each in range(3)]
    assert memory.get(which).tolist() == expected
    memory.set(which, base)
    counted = memory.words[np.array(memory.layout.latencies) // 8]
    assert counted.sum() == (len(rows) if which == ACTED else 0)
    memory.words[np.array(memory.layout.latencies) // 8] = 0
    assert (memory.bytes == before).all(), "something else was written"


@given(st.integers(0, 2**40), st.integers(0, 2))
def test_acting_counts_how_long_the_row_has_waited(latency_ns: int, env: int) -> None:
    memory = Memory()
    before_ns = time.monotonic_ns()
    memory.set(OBSERVED_NS, before_ns - latency_ns)
    memory.rings.advance(ACTED, ints(env), ints(0), 1, 1)
    most_ns = time.monotonic_ns() - before_ns + latency_ns
    (bucket,) = np.flatnonzero(memory.words[np.array(memory.layout.latencies) // 8])
    assert bucket == 0 or lower_edge_ns(int(bucket)) <= most_ns
    assert bucket == NUM_BUCKETS - 1 or latency_ns < lower_edge_ns(int(bucket) + 1)


@pytest.mark.parametrize(
    ("envs", "sequences"),
    [
        (ints(0, 1), ints(6, 3)),  # behind the cursor
        (ints(0, 1, 0), ints(6, 6, 5)),  # behind an earlier row of the same call
        (ints(2, 2), ints(2**40, 4)),
    ],
)
def test_a_cursor_cannot_go_back(memory: Memory, envs: Any, sequences: Any) -> None:
    memory.set(ACTED, 5)
    before = memory.bytes.copy()
    with pytest.raises(ValueError, match="would go back"):
        memory.rings.advance(ACTED, envs, sequences, len(envs), 1)
    assert (memory.bytes == before).all()
    memory.rings.advance(ACTED, ints(0), ints(4), 1, 1)  # standing still is not going back
    assert memory.rings.cursor(ACTED, 0) == 5


# ---- rows ------------------------------------------------------------------------------------------------------------

FIELDS = range(len(Memory().layout.fields))
SEQUENCES = st.builds(int.__add__, BASES, st.integers(0, 7))
ROWS = st.lists(st.tuples(st.integers(0, 2), SEQUENCES), max_size=6)


def random_values(field: Field, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Any bytes that make values of a field, [count, *shape]; read-only."""
    raw = np.random.default_rng(seed).integers(0, 256, count * field.row_bytes, np.uint8)
    values = (raw & 1 if field.dtype == bool else raw).view(field.dtype).reshape(count, *field.shape)
    values.flags.writeable = False
    return values


@given(st.sampled_from(FIELDS), ROWS, st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=200)
def test_gather_copies_what_numpy_would(field: int, rows: list[tuple[int, int]], length: int, seed: int) -> None:
    memory = Memory()
    memory.scribble(seed)
    before = memory.bytes.copy()
    envs, sequences = ints(*(env for env, _ in rows)), ints(*(sequence for _, sequence in rows))
    slots = (sequences[:, None] + np.arange(length)) % memory.capacity
    expected = memory.view(field)[envs[:, None], slots]
    out = np.empty_like(expected)
    assert memory.rings.gather(field, envs, sequences, len(rows), length, out) is None
    assert out.tobytes() == expected.tobytes()
    assert (memory.bytes == before).all()


@given(st.sampled_from(FIELDS), ROWS, st.integers(0, 2**32))
@settings(max_examples=200)
def test_scatter_copies_what_numpy_would(field: int, rows: list[tuple[int, int]], seed: int) -> None:
    memory, model = Memory(), Memory()
    memory.scribble(seed)
    model.bytes[:] = memory.bytes
    each = memory.layout.fields[field]
    values = random_values(each, len(rows), seed)
    envs, sequences = ints(*(env for env, _ in rows)), ints(*(sequence for _, sequence in rows))
    other = random_values(memory.layout.fields[0], len(rows), seed + 1)
    assert memory.rings.scatter((field, 0), envs, sequences, len(rows), (values, other)) == -1
    for number, column in ((field, values), (0, other)):
        for env, sequence, value in zip(envs, sequences, column, strict=True):
            model.view(number)[env, sequence % model.capacity] = value
    assert (memory.bytes == model.bytes).all()


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(1, np.int64),
        np.zeros(3, np.int64),
        np.zeros((2, 1), np.int64),
        np.zeros((), np.int64),
        np.zeros(2, np.int32),
        np.zeros(2, np.float64),
        np.zeros(2, np.uint64),
        np.zeros(2, ">i8"),
        np.zeros(2, "M8[s]"),
        bytearray(16),
        np.zeros(4, np.int64)[::2],
        [0, 0],
        None,
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.usefixtures("unchanged")
def test_scatter_names_the_first_array_that_does_not_fit_and_writes_nothing(
    memory: Memory, wrong: Any, position: int
) -> None:
    action, version = memory.index("action"), memory.index("policy_version")
    values: list[Any] = [ints(5, 6)] * 3
    values[position:] = [wrong] * (3 - position)
    arguments = (action, version, action), ints(0, 2), ints(0, 0), 2
    assert memory.rings.scatter(*arguments, tuple(values)) == position


def test_scatter_writes_no_fields_at_all(memory: Memory) -> None:
    assert memory.rings.scatter((), ints(0), ints(0), 1, ()) == -1


def test_only_the_first_count_rows_of_index_arrays_are_looked_at(memory: Memory) -> None:
    action = memory.index("action")
    envs, sequences = ints(1, 99), ints(2, -5)
    memory.rings.scatter((action,), envs, sequences, 1, (ints(77),))
    assert memory.view(action)[1, 2] == 77
    out = ints(0)
    memory.rings.gather(action, envs, sequences, 1, 1, out)
    assert out[0] == 77
    memory.rings.advance(GRANTED, envs, sequences, 1, 0)
    assert memory.get(GRANTED).tolist() == [0, 2, 0]


def test_gathering_into_the_index_array_itself_reads_nothing_but_its_rows(memory: Memory) -> None:
    action = memory.index("action")
    memory.view(action)[:] = 2**40  # as an env, far outside
    envs = ints(0, 1, 2, 0)
    memory.rings.gather(action, envs, ints(0, 0), 2, 2, envs)
    assert envs.tolist() == [2**40] * 4


def test_scattering_over_the_index_array_itself_writes_nothing_but_its_rows(memory: Memory) -> None:
    action = memory.index("action")
    envs = memory.view(action)[0]  # the ring of env 0, four numbers
    envs[:] = 0, 0, 0, 2
    memory.rings.scatter((action,), envs, ints(3, 2, 1, 0), 4, (np.full(4, 2**40),))
    assert envs.tolist() == [0, 2**40, 2**40, 2**40]
    assert memory.view(action)[2, 0] == 2**40


def test_rows_may_be_gathered_into_the_ring_they_come_from(memory: Memory) -> None:
    action = memory.index("action")
    ring = memory.view(action)[0]
    ring[:] = 1, 2, 3, 4
    memory.rings.gather(action, ints(0), ints(0), 1, 3, ring[1:])
    assert ring.tolist() == [1, 1, 2, 3]


# ---- one step --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(FIELDS), st.integers(0, 2), SEQUENCES, st.integers(0, 2**32))
@settings(max_examples=200)
def test_write_copies_what_numpy_would(field: int, env: int, sequence: int, seed: int) -> None:
    memory, model = Memory(), Memory()
    memory.scribble(seed)
    model.bytes[:] = memory.bytes
    each = memory.layout.fields[field]
    value = random_values(each, 1, seed)[0, ...]
    assert memory.rings.write(field, env, sequence, value) is True
    model.view(field)[env, sequence % model.capacity] = value
    assert (memory.bytes == model.bytes).all()


IMAGE_MISFITS: list[Any] = [
    np.zeros((2, 2), np.int8),
    np.zeros((2, 2), bool),
    np.zeros((2, 2), np.float32),
    np.zeros((2, 2), ">u2"),
    np.zeros((4,), np.uint8),
    np.zeros((2, 2, 1), np.uint8),
    np.zeros((1, 2, 2), np.uint8),
    np.zeros((2, 1), np.uint8),
    np.zeros((2, 3), np.uint8),
    np.zeros((), np.uint8),
    np.zeros((2, 4), np.uint8)[:, ::2],
    np.zeros((2, 2), np.uint8, order="F").T[::-1],
    np.zeros((2, 2), "datetime64[s]"),
    np.zeros((2, 2), object),
    np.zeros((2, 2), [("a", np.uint8)]),
    memoryview(bytes(4)),
    bytes(4),
    [[0, 0], [0, 0]],
    0,
    None,
]


@pytest.mark.parametrize("value", IMAGE_MISFITS, ids=repr)
@pytest.mark.usefixtures("unchanged")
def test_a_value_that_does_not_fit_exactly_is_answered_no(memory: Memory, value: Any) -> None:
    assert memory.rings.write(memory.leaves[1], 1, 2, value) is False


def test_every_buffer_of_exactly_the_type_and_shape_fits(memory: Memory) -> None:
    image, action, half = memory.leaves[1], memory.index("action"), memory.index("extras")
    assert memory.rings.write(image, 0, 0, memoryview(b"abcd").cast("B", (2, 2)))
    assert memory.view(image)[0, 0].tobytes() == b"abcd"
    assert memory.rings.write(image, 0, 1, np.full((2, 2), 7, np.uint8, order="F").T)
    assert (memory.view(image)[0, 1] == 7).all()
    for number in (np.int64(5), np.longlong(5), np.array(5)):  # l and q are one type by two names
        memory.view(action)[:] = 0
        assert memory.rings.write(action, 0, 0, number)
        assert memory.view(action)[0, 0] == 5
    assert not memory.rings.write(action, 0, 0, np.uint64(5))
    assert memory.rings.write(half, 0, 0, np.float16(0.5))
    assert memory.view(half)[0, 0] == 0.5


@pytest.mark.skipif(sys.version_info < (3, 12), reason="only since Python 3.12 can a class have a buffer")
@pytest.mark.usefixtures("unchanged")
def test_a_buffer_that_raises_is_heard(memory: Memory) -> None:
    class Raises:
        def __buffer__(self, flags: int) -> memoryview:
            raise ArithmeticError("no buffer today")

    with pytest.raises(ArithmeticError):
        memory.rings.write(memory.leaves[1], 0, 0, Raises())


@given(
    st.integers(0, 2),
    SEQUENCES,
    st.floats(width=32) | st.sampled_from([1e300, -1e300, 5e-324]) | st.integers(-(10**30), 10**30),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_a_step_writes_what_it_brought_and_the_next_observation_and_nothing_else(
    env: int, sequence: int, reward: float, flags: tuple[bool, bool, bool]
) -> None:
    memory, model, following = Memory(), Memory(), Memory()
    memory.scribble(0)
    memory.set(OBSERVED, sequence + 1)
    model.bytes[:] = following.bytes[:] = memory.bytes
    assert memory.rings.step(env, sequence, reward, *flags, memory.obs(1)) == -1
    following.rings.observe(env, sequence + 1, memory.obs(1))
    following.view(model.index("episode_start"))[env, (sequence + 1) % model.capacity] = flags[0] or flags[1]
    observed_ns = memory.layout.cursors[OBSERVED_NS][env] // 8
    following.words[observed_ns] = memory.words[observed_ns]
    changed = following.bytes != model.bytes
    model.bytes[changed] = following.bytes[changed]
    with np.errstate(over="ignore", under="ignore"):
        values = (np.float32(reward), *flags)
    for kind, value in zip(("reward", "terminated", "truncated", "interrupted"), values, strict=True):
        model.view(model.index(kind))[env, sequence % model.capacity] = value
    if math.isnan(reward):
        rewards = memory.view(memory.index("reward"))
        assert np.isnan(rewards[env, sequence % memory.capacity])
        rewards[:] = model.view(model.index("reward"))
    assert (memory.bytes == model.bytes).all()


def test_flags_are_any_truth_value(memory: Memory) -> None:
    memory.set(OBSERVED, 1)
    memory.rings.step(1, 0, np.float64(2.5), np.True_, [], "yes", memory.obs())
    values = [memory.view(memory.index(k))[1, 0] for k in ("reward", "terminated", "truncated", "interrupted")]
    assert values == [2.5, True, False, True]
    raw = memory.view(memory.index("terminated")).view(np.uint8)[1, 0]
    assert raw == 1, "a bool is 0 or 1, nothing else"


@pytest.mark.parametrize("position", [3, 4, 5])
@pytest.mark.usefixtures("unchanged")
def test_a_step_writes_no_flag_when_one_of_them_raises(memory: Memory, position: int) -> None:
    for others in (True, False):
        arguments: list[Any] = [2, 0, 1.0, others, others, others, memory.obs()]
        arguments[position] = Refuses()
        with pytest.raises(ArithmeticError):
            memory.rings.step(*arguments)


@given(st.integers(0, 2), SEQUENCES, st.integers(0, 2**32))
def test_observe_writes_every_leaf_and_then_publishes(env: int, sequence: int, seed: int) -> None:
    memory, model = Memory(), Memory()
    memory.scribble(seed)
    memory.set(OBSERVED, sequence)
    model.bytes[:] = memory.bytes
    obs = memory.obs(seed)
    before_ns = time.monotonic_ns()
    assert memory.rings.observe(env, sequence, obs) == -1
    observed_ns = memory.rings.cursor(OBSERVED_NS, env)
    assert before_ns <= observed_ns <= time.monotonic_ns()
    slot = sequence % model.capacity
    for field, value in zip(model.leaves, obs, strict=True):
        model.view(field)[env, slot] = value
    model.view(model.index("sequence"))[env, slot] = sequence
    model.view(model.index("episode_start"))[env, slot] = True
    model.words[model.layout.cursors[OBSERVED][env] // 8] = sequence + 1
    model.words[model.layout.cursors[OBSERVED_NS][env] // 8] = observed_ns
    assert (memory.bytes == model.bytes).all()


@pytest.mark.parametrize("unfit", [0, 1, 2])
def test_an_observation_that_does_not_fit_is_named_and_not_published(memory: Memory, unfit: int) -> None:
    wrong = [*memory.obs()]
    wrong[unfit] = wrong[unfit].astype(np.complex64)
    wrong[unfit + 1 :] = [None] * (2 - unfit)  # the first misfit is the one that is named
    model = Memory()
    model.bytes[:] = memory.bytes
    assert memory.rings.observe(1, 0, tuple(wrong)) == unfit
    assert memory.rings.cursor(OBSERVED, 1) == 0
    assert memory.view(memory.index("sequence"))[1, 0] == -1, "the slot says that it is being written"
    for field in (memory.index("sequence"), *memory.leaves[:unfit]):
        model.view(field)[1, 0] = memory.view(field)[1, 0]
    assert (memory.bytes == model.bytes).all(), "more was written than this slot's leaves"
    assert memory.rings.observe(1, 0, memory.obs()) == -1, "the right value may follow"
    assert memory.rings.cursor(OBSERVED, 1) == 1


@pytest.mark.parametrize("sequence", [0, 1, 3, 4, 2**40])
def test_an_observation_out_of_turn_is_refused(memory: Memory, sequence: int) -> None:
    memory.set(OBSERVED, 2)
    before = memory.bytes.copy()
    with pytest.raises(ValueError, match=re.escape(f"observation {sequence} published out of turn (observed=2)")):
        memory.rings.observe(0, sequence, memory.obs())
    assert (memory.bytes == before).all()


def test_a_step_may_have_no_leaves_at_all() -> None:
    memory = Memory()
    rings = _native.Rings(**{**memory.arguments(), "leaves": ()})
    assert rings.observe(0, 0, ()) == -1
    assert rings.cursor(OBSERVED, 0) == 1


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 3, LARGEST_CURSOR - 12])
@pytest.mark.parametrize(("capacity", "length"), [(2, 1), (3, 2), (6, 5), (10, 5)])
def test_a_whole_life_of_slots_round_the_ring(start: int, capacity: int, length: int) -> None:
    memory = Memory((1,), capacity)
    rings, action, position = memory.rings, memory.index("action"), memory.leaves[0]
    for which in (OBSERVED, ACTED, RELEASED, GRANTED):
        memory.set(which, start)
    memory.words[memory.layout.running[0] // 8] = 1
    env, out, at = ints(0), ints(0), ints(0)
    read: list[int] = []
    rings.observe(0, start, memory.obs(0))
    for step in range(12):
        sequence = start + step
        if rings.cursor(GRANTED, 0) == sequence:
            assert rings.scan(0, 1, out, at)[0] == 0, "held: not granted"
            granted = rings.cursor(RELEASED, 0) + capacity - 1
            rings.advance(GRANTED, env, ints(granted), 1, 0)
        assert rings.scan(0, 1, out, at)[0] == 1
        assert at[0] == sequence
        rings.scatter((action,), env, at, 1, (ints(sequence),))
        assert rings.advance(ACTED, env, at, 1, 1) == [0]
        assert rings.acted(0, 1) == [0]
        assert rings.scan(0, 1, out, at)[0] == 0
        assert rings.step(0, sequence, step, False, False, False, memory.obs(step + 1)) == -1
        if rings.finished(length, 0, out, at):
            first = int(at[0])
            assert first == start + len(read)
            positions = np.empty((length, 3), np.float32)
            rings.gather(position, env, at, 1, length, positions)
            assert [row.tobytes() for row in positions] == [
                memory.obs(first - start + k)[0].tobytes() for k in range(length)
            ]
            actions = np.empty(length, np.int64)
            rings.gather(action, env, at, 1, length, actions)
            read += actions.tolist()
            rings.advance(RELEASED, env, at, 1, length)
    assert read == list(range(start, start + 12 - 12 % length))
