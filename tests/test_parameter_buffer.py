"""The parameter buffer: never torn, never waiting, and wedged by no death. And the images that lie in it."""

from __future__ import annotations

import copy
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shmcollect import WeightsError, _native
from shmcollect.layout import Layout
from shmcollect.parameter_buffer import ParameterReader, ParameterWriter
from shmcollect.segment import Segment, new_name
from shmcollect.weights_image import ALIGNMENT, Schema, as_array, copy_all, copy_into, named_state

with warnings.catch_warnings():  # what it imports uses what torch itself has deprecated
    warnings.simplefilter("ignore")
    torch.compile(nn.Identity())

MB = 1_000_000


@pytest.fixture
def new_segment() -> Iterator[Callable[..., Segment]]:
    made: list[Segment] = []

    def make(image_bytes: int, readers: int = 1) -> Segment:
        layout = Layout((), 1, 1, (), {}, {}, image_bytes=image_bytes, image_readers=readers)
        made.append(Segment.create(new_name(), layout))
        return made[-1]

    yield make
    for segment in made:
        segment.unlink()
        segment.close()


def write(writer: ParameterWriter, value: int) -> int:
    writer.images[writer.begin()].fill(value % 251)
    version = writer.end()
    writer.commit()
    return version


def image(segment: Segment) -> np.ndarray[Any, Any]:
    return np.empty(segment.layout.image_bytes, np.uint8)


def begun(writer: ParameterWriter, readers: int) -> tuple[int, list[int]]:
    """Which bank the writer would take, and which it must not."""
    words, buffer = writer._banks.words, writer._banks.buffer
    announced = [_native.load(buffer, at) - 1 for at in words.announcements[:readers]]
    return writer.begin(), [_native.load(buffer, words.latest), *announced]


# ---- the protocol


def test_a_reader_gets_the_latest_version_once_and_nothing_before_the_first(new_segment) -> None:
    segment = new_segment(1000)
    writer, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    assert not reader.try_read(out) and reader.version == 0
    for value in (1, 2, 3):
        write(writer, value)
    assert reader.try_read(out) and reader.version == 3 and (out == 3).all()
    assert not reader.try_read(out)


def test_what_is_not_committed_is_not_found_and_gives_way_to_the_next(new_segment) -> None:
    segment = new_segment(1000)
    writer, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    write(writer, 1)
    for value in (2, 3):
        writer.images[writer.begin()].fill(value)
        assert writer.end() == value
        assert reader.try_read(out) is (value == 2) and reader.version == 1 and (out == 1).all()
    assert writer.committed == 1
    writer.commit()
    writer.commit()
    assert writer.committed == 3
    assert reader.try_read(out) and reader.version == 3 and (out == 3).all()


def test_a_version_that_fails_on_the_way_is_never_found_and_its_number_is_used_again(new_segment) -> None:
    segment = new_segment(1000)
    writer, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    write(writer, 1)
    for _ in range(10):
        writer.images[writer.begin()][:500].fill(99)
    writer.commit()
    assert reader.try_read(out) and reader.version == 1 and (out == 1).all()
    assert write(writer, 2) == 2
    assert reader.try_read(out) and (out == 2).all()


def test_a_version_written_over_one_that_was_not_committed_leaves_nothing_to_commit_until_it_ends(new_segment) -> None:
    segment = new_segment(1000)
    writer, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    write(writer, 1)
    reader._announce(1 + (_native.load(segment.buffer, reader._banks.words.latest) + 1) % 3)
    writer.images[writer.begin()].fill(2)
    writer.end()
    writer.begin()  # the only free bank is that of version 2
    writer.commit()
    assert writer.committed == 1
    assert reader.try_read(out) and reader.version == 1 and (out == 1).all()


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_the_writer_always_finds_a_bank_that_is_neither_latest_nor_announced(new_segment, readers: int) -> None:
    segment = new_segment(10, readers)
    writer = ParameterWriter(segment)
    each = [ParameterReader(segment, i) for i in range(readers)]
    banks = readers + 2
    draw = random.Random(readers)
    for _ in range(300):
        for reader in each:
            reader._announce(draw.randrange(banks + 1))
        bank, taken = begun(writer, readers)
        assert bank not in taken
        writer.end()
        if draw.random() < 0.7:
            writer.commit()


def test_a_reader_never_takes_what_was_written_under_it(new_segment, monkeypatch) -> None:
    """The count alone: the writer is made blind to the announcement, and laps the reader in the middle of its copy."""
    segment = new_segment(1000)
    writer, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    write(writer, 1)
    copied = ParameterReader._copied
    looks = 0

    def interrupted(self: ParameterReader, bank: int, count: int, out: Any) -> bool:
        nonlocal looks
        looks += 1
        if looks < 4:
            _native.store(segment.buffer, self._announcement, 0)
            while write(writer, 1) and _native.load(segment.buffer, self._banks.words.latest) != bank:
                pass
        return copied(self, bank, count, out)

    monkeypatch.setattr(ParameterReader, "_copied", interrupted)
    assert reader.try_read(out)
    assert looks == 4 and reader.version == writer.version


def test_a_reader_that_finds_every_bank_being_written_says_so_and_holds_none(new_segment) -> None:
    segment = new_segment(1000)
    writer, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    write(writer, 1)
    words = reader._banks.words
    for bank in range(3):
        _native.store(segment.buffer, words.counts[bank], 2 * 7 + 1)
    assert not reader.try_read(out) and reader.version == 0
    assert _native.load(segment.buffer, words.announcements[0]) == 0


def test_a_writer_that_follows_goes_on_with_the_numbers_and_spares_the_latest(new_segment) -> None:
    segment = new_segment(1000)
    first, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    for value in (1, 2, 3):
        write(first, value)
    first.images[first.begin()][:10].fill(99)
    second = ParameterWriter(segment)
    assert second.version == 3 and second.committed == 3
    assert reader.try_read(out) and (out == 3).all()
    assert write(second, 4) == 4
    assert reader.try_read(out) and reader.version == 4 and (out == 4).all()


def test_counts_and_announcements_lie_on_cache_lines_of_their_own(new_segment) -> None:
    words = new_segment(1000, 3).layout.weights
    offsets = [words.latest, words.schema_hash, *words.announcements, *words.counts, *words.banks]
    assert len(words.announcements) == 3 and len(words.counts) == len(words.banks) == 5
    assert all(b - a >= 128 for a, b in zip(sorted(offsets), sorted(offsets)[1:], strict=False))
    assert all(bank % 4096 == 0 for bank in words.banks)


def test_an_image_may_be_empty(new_segment) -> None:
    segment = new_segment(0)
    writer, reader, out = ParameterWriter(segment), ParameterReader(segment), image(segment)
    write(writer, 1)
    assert reader.try_read(out) and reader.version == 1


# ---- between processes


HEAD = """
import os, random, signal, sys, time
import numpy as np
from shmcollect import _native, parameter_buffer
from shmcollect.parameter_buffer import ParameterReader, ParameterWriter
from shmcollect.segment import Segment
segment = Segment.attach(sys.argv[1], writable=True)
"""

WRITER = """
writer = ParameterWriter(segment)
print("ready", flush=True)
while True:
    version = writer.version + 1
    writer.images[writer.begin()].view(np.int64).fill(version)
    writer.end()
    writer.commit()
"""

UNPROTECTED_WRITER = """
writer = ParameterWriter(segment)
image = writer.images[0].view(np.int64)
print("ready", flush=True)
version = 0
while True:
    version += 1
    image.fill(version)
"""

# Dies at one point of a publish: the instrumented call number argv[2].
DYING_WRITER = """
calls, last = 0, int(sys.argv[2])
def counted(function):
    def call(*arguments):
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
class Native:
    load, store, fence = (staticmethod(counted(getattr(_native, name))) for name in ("load", "store", "fence"))
writer = ParameterWriter(segment)
parameter_buffer._native = Native
while True:
    version = writer.version + 1
    image = writer.images[writer.begin()].view(np.int64)
    image[: len(image) // 2].fill(version)
    if (calls := calls + 1) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    image[len(image) // 2 :].fill(version)
    writer.end()
    writer.commit()
"""

READER = """
reader, out = ParameterReader(segment, int(sys.argv[2])), np.empty(segment.layout.image_bytes, np.uint8)
print("ready", flush=True)
while True:
    reader.try_read(out)
"""

STUCK_READER = """
reader, out = ParameterReader(segment), np.empty(segment.layout.image_bytes, np.uint8)
reader._copied = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
reader.try_read(out)
"""


def start(code: str, segment: Segment, *arguments: object, wait: bool = True) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HEAD + code, segment.name, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    assert process.stdout is not None
    if wait:
        assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> int:
    process.kill()
    assert process.stdout is not None
    process.stdout.close()
    return process.wait()


def is_whole(out: np.ndarray[Any, Any], version: int) -> bool:
    values = out.view(np.int64)
    return bool(values.min() == values.max() == version)


@pytest.mark.parametrize("image_bytes", [MB // 10, 10 * MB, pytest.param(100 * MB, marks=pytest.mark.campaign)])
def test_no_read_is_torn_while_a_process_publishes_at_full_speed(new_segment, image_bytes: int) -> None:
    segment = new_segment(image_bytes)
    reader, out = ParameterReader(segment), image(segment)
    writer = start(WRITER, segment)
    try:
        reads, version, deadline = 0, 0, time.monotonic() + 2
        while time.monotonic() < deadline:
            if reader.try_read(out):
                reads += 1
                assert is_whole(out, reader.version)
                assert reader.version > version
                version = reader.version
    finally:
        end(writer)
    assert reads > 3


def test_without_the_protection_reads_are_torn(new_segment) -> None:
    """The control: one image, written and copied at will, fails what the test above asserts."""
    segment = new_segment(10 * MB)
    reader, out = ParameterReader(segment), image(segment)
    writer = start(UNPROTECTED_WRITER, segment)
    try:
        torn, deadline = 0, time.monotonic() + 20
        while not torn and time.monotonic() < deadline:
            np.copyto(out, reader._banks.images[0])
            torn += not is_whole(out, int(out.view(np.int64)[0]))
    finally:
        end(writer)
    assert torn


@pytest.mark.parametrize("point", range(1, 20))
def test_a_writer_killed_at_any_point_of_a_publish_leaves_the_last_version(new_segment, point: int) -> None:
    """A publish has nine such points; the last of them is the store that commits it."""
    segment = new_segment(MB // 10)
    reader, out = ParameterReader(segment), image(segment)
    process = start(DYING_WRITER, segment, point, wait=False)
    assert process.wait(timeout=30) == -signal.SIGKILL
    end(process)
    reader.try_read(out)
    assert reader.version == (point - 1) // 9
    assert reader.version == 0 or is_whole(out, reader.version)
    successor = ParameterWriter(segment)
    for _ in range(5):
        successor.images[successor.begin()].view(np.int64).fill(successor.version + 1)
        successor.end()
        successor.commit()
        assert reader.try_read(out) and is_whole(out, reader.version) and reader.version == successor.version


def test_a_writer_killed_at_random_leaves_a_whole_version(new_segment) -> None:
    segment = new_segment(4 * MB)
    reader, out, draw = ParameterReader(segment), image(segment), random.Random(0)
    for _ in range(4):
        writer = start(WRITER, segment)
        time.sleep(draw.uniform(0.02, 0.06))
        end(writer)
        before = reader.version
        assert reader.try_read(out) and is_whole(out, reader.version) and reader.version > before


def test_a_reader_killed_in_the_middle_of_a_read_stops_nobody(new_segment) -> None:
    segment = new_segment(1000, readers=1)
    writer = ParameterWriter(segment)
    write(writer, 1)
    process = start(STUCK_READER, segment, wait=False)
    assert process.wait(timeout=30) == -signal.SIGKILL
    end(process)
    held = _native.load(segment.buffer, segment.layout.weights.announcements[0]) - 1
    assert held == _native.load(segment.buffer, segment.layout.weights.latest)
    for value in range(2, 12):
        write(writer, value)
        assert (writer.images[held] == 1).all(), "the bank it had announced was spared"
    successor, out = ParameterReader(segment), image(segment)
    for value in range(12, 20):
        write(writer, value)
        assert successor.try_read(out) and (out == value).all() and successor.version == value
    assert not (writer.images[held] == 1).all(), "the bank is used again"


def test_readers_killed_at_random_hold_nothing_up(new_segment) -> None:
    segment = new_segment(4 * MB, readers=2)
    writer, survivor, out = ParameterWriter(segment), ParameterReader(segment, 1), image(segment)
    draw = random.Random(1)
    for _ in range(4):
        process = start(READER, segment, 0)
        deadline = time.monotonic() + draw.uniform(0.02, 0.06)
        while time.monotonic() < deadline:
            write(writer, writer.version + 1)
        end(process)
        write(writer, writer.version + 1)
        assert survivor.try_read(out) and (out == writer.version % 251).all()


# ---- images


class Everything(nn.Module):
    """Every dtype and shape that can go wrong."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.halves = nn.Parameter(torch.randn(3, 5).half())
        self.brain = nn.Parameter(torch.randn(7).bfloat16())
        self.doubles = nn.Parameter(torch.randn(2, 2).double())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.other_empty = nn.Parameter(torch.randn(0, 4))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("steps", torch.randint(2**60, (1,))[0])
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("octets", torch.randint(256, (3,), dtype=torch.uint8))
        self.register_buffer("complexes", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("eighths", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("strided", torch.randn(10)[::2])
        self.register_buffer("own", torch.randn(4), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("no_parameter", None)


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.twice = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.twice["b"] = self.twice["a"]


class RealNames(nn.Module):
    """Real submodules that are called like wrappers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(2, 3))
        self.inner = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": nn.Linear(3, 2)})})


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return as_array(tensor.contiguous().cpu()).tobytes()


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = dict(named_state(one)), dict(named_state(other))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape, name
        assert tensor_bytes(tensor) == tensor_bytes(theirs[name]), name


def carry(source: Any, target: nn.Module) -> None:
    """What a publish does, in one process."""
    schema = Schema.of(target)
    block = torch.zeros(schema.size_bytes, dtype=torch.uint8)
    copy_all([as_array(view) for view in schema.views(block)], schema.match(source))
    schema.apply(schema.views(block), target, copy_into)


@pytest.mark.parametrize("kind", [Everything, Tied, RealNames])
@pytest.mark.parametrize("as_source", [lambda m: m, lambda m: m.state_dict(), lambda m: dict(named_state(m))])
def test_every_dtype_and_shape_arrives_bit_for_bit_in_the_tensors_that_were_there(kind: Any, as_source: Any) -> None:
    source, target = kind(1), kind(2)
    before = {name: (tensor, tensor.data_ptr(), tensor.stride()) for name, tensor in named_state(target)}
    carry(as_source(source), target)
    assert_same_state(source, target)
    for name, tensor in named_state(target):
        assert before[name] == (tensor, tensor.data_ptr(), tensor.stride())


def test_non_persistent_buffers_are_no_part_of_the_state() -> None:
    source, target = Everything(1), Everything(2)
    own = target.own.clone()
    carry(source, target)
    assert torch.equal(target.own, own)


def test_entries_are_aligned_and_do_not_overlap() -> None:
    schema = Schema.of(Everything())
    end = 0
    for entry in schema.entries:
        assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
        end = entry.offset + entry.size_bytes
    assert schema.size_bytes == end


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    source, target = Tied(1), Tied(2)
    schema = Schema.of(target)
    assert [entry.names for entry in schema.entries] == [
        ("embedding.weight", "head.weight"),
        ("twice.a.weight", "twice.b.weight"),
        ("twice.a.bias", "twice.b.bias"),
    ]
    for weights in (source, source.state_dict(), {k: v.clone() for k, v in source.state_dict().items()}):
        carry(weights, target)
        assert target.head.weight is target.embedding.weight
        assert_same_state(source, target)
    carry(dict(source.named_parameters()), Tied(3))  # which has every tensor under one name only


def test_tied_tensors_that_differ_in_the_source_are_refused() -> None:
    weights = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    weights["head.weight"] += 1
    with pytest.raises(WeightsError, match=r"embedding.weight, head.weight are one tensor in the policy"):
        Schema.of(Tied()).match(weights)


def test_the_hash_tells_schemas_apart() -> None:
    def linear(inputs: int = 3, outputs: int = 2, **kwargs: Any) -> int:
        return Schema.of(nn.Linear(inputs, outputs, **kwargs)).hash

    others = [linear(2, 3), linear(bias=False), linear(dtype=torch.float64), Schema.of(nn.Conv1d(3, 2, 1)).hash]
    assert linear() == linear() and len({linear(), *others}) == 5
    assert Schema.of(nn.ReLU()).hash > 0


# ---- wrappers and names


def wrappings(kind: Any) -> dict[str, Callable[[int], nn.Module]]:
    compiled = torch.compile
    return {
        "plain": lambda seed: kind(seed),
        "DataParallel": lambda seed: nn.DataParallel(kind(seed)),
        "compiled": lambda seed: compiled(kind(seed)),
        "compiled DataParallel": lambda seed: compiled(nn.DataParallel(kind(seed))),
        "DataParallel of compiled": lambda seed: nn.DataParallel(compiled(kind(seed))),
        "compiled twice over": lambda seed: nn.DataParallel(nn.DataParallel(compiled(nn.DataParallel(kind(seed))))),
    }


@pytest.mark.parametrize("kind", [RealNames, Tied])
@pytest.mark.parametrize("wrapping", wrappings(Tied))
@pytest.mark.parametrize("as_source", [lambda m: m, lambda m: m.state_dict()])
def test_wrappers_are_left_out_and_real_modules_of_such_names_are_kept(kind, wrapping: str, as_source) -> None:
    source = wrappings(kind)[wrapping](1)
    for target in wrappings(kind).values():
        carry(as_source(source), target(2))
    plain = kind(2)
    carry(as_source(source), plain)
    assert_same_state(source, plain)
    assert Schema.of(source) == Schema.of(plain)


def test_wrappers_inside_of_a_module_are_left_out_too() -> None:
    plain = nn.ModuleDict({"body": RealNames(1), "head": nn.Linear(2, 2)})
    target = copy.deepcopy(plain)
    wrapped = nn.ModuleDict({"body": nn.DataParallel(torch.compile(RealNames(1))), "head": plain["head"]})
    wrapped["body"].module.module = nn.DataParallel(plain["body"].module)
    for source in (wrapped, wrapped.state_dict()):
        carry(source, target)
        assert_same_state(plain, target)


@pytest.mark.parametrize(
    ("known", "given"),
    [
        ({"w", "module.w"}, {"module.w", "module.module.w"}),
        ({"module.w"}, {"module.module.w"}),
        ({"module.w"}, {"_orig_mod.module.w"}),
        ({"module.w"}, {"module._orig_mod.w"}),
        ({"module._orig_mod.w"}, {"module.module._orig_mod.module.w"}),
        ({"a.w", "a.module.w"}, {"a.module.w", "a.module.module.w"}),
    ],
)
def test_names_of_a_dict_find_theirs_whatever_wraps_them(known: set[str], given: set[str]) -> None:
    def tree(names: set[str]) -> nn.Module:
        root = nn.Module()
        for name in sorted(names):
            node = root
            *path, leaf = name.split(".")
            for part in path:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node._modules[part]
            node.register_parameter(leaf, nn.Parameter(torch.tensor(float(len(name)))))
        return root

    schema = Schema.of(tree(known))
    shortest = min(map(len, known)) - min(map(len, given))
    matched = schema.match({name: torch.tensor(float(len(name))) for name in given})
    for entry, tensor in zip(schema.entries, matched, strict=True):
        assert tensor == len(entry.names[0]) - shortest


# ---- what is refused


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)


class ExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"step": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def linear_dict(**changes: Any) -> dict[str, Any]:
    weights: dict[str, Any] = dict(nn.Linear(3, 2).state_dict())
    return {name: value for name, value in (weights | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (linear_dict(bias=None), r"missing: 'bias'"),
        (linear_dict(weight=None, bias=None), r"missing: 'weight', 'bias'"),
        (linear_dict(scale=torch.ones(1)), r"not in the policy: 'scale'"),
        (
            linear_dict(weight=torch.ones(2, 4)),
            r"'weight': expected torch.float32 of shape \(2, 3\), got torch.f",
        ),
        (linear_dict(weight=torch.ones(2, 3).double()), r"'weight': .* got torch.float64 of shape \(2, 3\)"),
        (linear_dict(bias=np.ones(2, np.float32)), r"'bias': expected a tensor, got ndarray"),
        (linear_dict(bias=torch.ones(2, device="meta")), r"'bias' is on the meta device"),
        (linear_dict(bias=torch.ones(2).to_sparse()), r"'bias' is not a plain dense tensor"),
        ({1: torch.ones(1)}, r"expected a module, a state_dict or a dict of tensors, got dict"),
        ([torch.ones(1)], r"expected a module, a state_dict or a dict of tensors, got list"),
        (nn.Linear(3, 3), r"'weight': expected .*; 'bias': expected"),
        (nn.Sequential(nn.Linear(3, 2)), r"missing: 'weight', 'bias'; not in the policy: '0.weight', '0.bias'"),
        (nn.LazyLinear(2), r"'weight' has no shape yet: run the lazy module once"),
        (ExtraState(3, 2), r"the module \(ExtraState\) has extra state"),
        ({f"x{i}": torch.ones(1) for i in range(50)}, r"'x7', '... 42 more'"),
    ],
)
def test_what_does_not_fit_is_named(source: Any, text: str) -> None:
    with pytest.raises(WeightsError, match=text):
        Schema.of(nn.Linear(3, 2)).match(source)


def overlapping(make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> nn.Module:
    module = nn.Module()
    for name, tensor in zip(("a", "b"), make(torch.zeros(12)), strict=True):
        module.register_buffer(name, tensor)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda t: (t[:6], t[5:]),
        lambda t: (t, t[3:5]),
        lambda t: (t.view(3, 4), t),
        lambda t: (t.view(3, 4), t.view(3, 4).t()),
        lambda t: (t[::2], t[4:5]),
        lambda t: (t[:4], t.view(torch.int32)[3:]),
    ],
)
def test_tensors_that_share_some_memory_are_refused(make: Any) -> None:
    with pytest.raises(WeightsError, match=r"'a' and 'b' share memory|'b' and 'a' share memory"):
        Schema.of(overlapping(make))


@pytest.mark.parametrize("make", [lambda t: (t[:6], t[6:]), lambda t: (t[::2], t[1::2]), lambda t: (t, t)])
def test_tensors_of_one_storage_that_share_no_memory_or_all_are_fine(make: Any) -> None:
    Schema.of(overlapping(make))


def test_an_expanded_buffer_and_a_lazy_module_are_refused_as_policies() -> None:
    with pytest.raises(WeightsError, match="'a' is expanded"):
        Schema.of(overlapping(lambda t: (torch.zeros(1).expand(3), t)))
    with pytest.raises(WeightsError, match=r"'layer.weight' has no shape yet"):
        Schema.of(Lazy())


def test_names_are_found_through_a_module_that_has_replaced_its_buffers() -> None:
    source, target = Everything(1), Everything(2)
    schema = Schema.of(target)
    target.steps = target.steps + 1
    schema.apply(schema.match(source), target, copy_into)
    assert_same_state(source, target)
