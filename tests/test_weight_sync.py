"""Weight sync schemes: whatever carries them, whole versions arrive in place, and misuse raises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shmcollect import ClosedError, ConfigError, WeightsError
from shmcollect.layout import Layout
from shmcollect.segment import Segment, new_name
from shmcollect.weight_sync import (
    Channel,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
    register_scheme,
    scheme_class,
)

CARRIERS = (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme)


class Ends:
    """A sender and its receiver."""

    def __init__(self, kind: type[WeightSyncScheme], module: nn.Module, *, connect: bool = True) -> None:
        self.module = module
        self.sender, self.receiver = kind(), kind()
        self.sender.init_on_sender(self.receiver.init_on_receiver(module))
        layout = Layout((), 1, 1, (), {}, {}, image_bytes=self.sender.image_bytes or 0, image_readers=1)
        self.segment = Segment.create(new_name(), layout)
        self.connections = Pipe()
        self.channels = [Channel(self.segment, connection) for connection in self.connections]
        if connect:
            self.sender.connect(self.channels[0])
            self.receiver.connect(self.channels[1])

    def receive(self, version: int) -> int:
        """What the receiver has once it has this version, or after a while."""
        deadline = time.monotonic() + 10
        while self.receiver.receive() < version and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.receiver.receive()

    def close(self) -> None:
        self.sender.shutdown()
        self.receiver.shutdown()
        for connection in self.connections:
            connection.close()
        self.segment.unlink()
        self.segment.close()


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(*arguments: Any, **options: Any) -> Ends:
        made.append(Ends(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def filled(value: float, **kwargs: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(value)
    return module


def values(module: nn.Module) -> set[float]:
    return {float(value) for tensor in module.state_dict().values() for value in tensor.flatten()}


@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize(
    "as_source", [lambda m: m, lambda m: m.state_dict(), lambda m: nn.DataParallel(m).state_dict()]
)
def test_versions_arrive_in_the_tensors_that_were_there(ends, kind, as_source) -> None:
    pair = ends(kind, filled(0))
    tensors = list(pair.module.state_dict(keep_vars=True).values())
    assert pair.receiver.receive() == 0 and values(pair.module) == {0}
    for version in range(1, 6):
        assert pair.sender.send(as_source(filled(version))) == version
        assert pair.receive(version) == version and values(pair.module) == {version}
    assert all(a is b for a, b in zip(tensors, pair.module.state_dict(keep_vars=True).values(), strict=True))


@pytest.mark.parametrize("kind", CARRIERS)
def test_the_weights_are_those_at_the_time_of_the_call(ends, kind) -> None:
    pair, source = ends(kind, filled(0)), filled(1)
    pair.sender.send(source)
    with torch.no_grad():
        source[0].weight.fill_(9)
    assert pair.receive(1) == 1 and values(pair.module) == {1}


@pytest.mark.parametrize("kind", CARRIERS)
def test_what_is_staged_arrives_once_it_is_committed_and_only_the_last_of_it(ends, kind) -> None:
    pair = ends(kind, filled(0))
    assert pair.sender.commit() == 0
    assert [pair.sender.stage(filled(version)) for version in (1, 2, 3)] == [1, 2, 3]
    time.sleep(0.05)
    assert pair.receiver.receive() == 0 and values(pair.module) == {0}
    assert pair.sender.commit() == pair.sender.commit() == 3
    assert pair.receive(3) == 3 and values(pair.module) == {3}


@pytest.mark.parametrize("kind", CARRIERS)
def test_weights_that_do_not_fit_are_an_error_at_the_sender_and_the_old_ones_stay(ends, kind) -> None:
    pair = ends(kind, filled(0))
    pair.sender.send(filled(1))
    assert pair.receive(1) == 1
    good = filled(2).state_dict()
    lacking = {name: tensor for name, tensor in good.items() if name != "0.bias"}
    for bad in (lacking, good | {"new": torch.ones(1)}, good | {"0.bias": torch.ones(2).double()}):
        with pytest.raises(WeightsError, match=r"'0.bias'|'new'"):
            pair.sender.send(bad)
        assert pair.receive(1) == 1 and values(pair.module) == {1}
    assert pair.sender.send(good) == 2 and pair.receive(2) == 2 and values(pair.module) == {2}


def test_shapes_are_fixed_in_shared_memory(ends) -> None:
    pair = ends(SharedMemWeightSyncScheme, filled(0))
    with pytest.raises(WeightsError, match=r"'0.bias': expected torch.float32 of shape \(2,\), got .* shape \(5,\)"):
        pair.sender.send(filled(1).state_dict() | {"0.bias": torch.ones(5)})


def test_shapes_may_change_over_a_connection_and_the_rest_stays_in_place(ends) -> None:
    table = nn.Embedding(4, 2)
    pair = ends(MultiProcessWeightSyncScheme, nn.ModuleDict({"table": table, "head": nn.Linear(2, 1)}))
    weight, head, pointer = table.weight, pair.module["head"].weight, pair.module["head"].weight.data_ptr()
    grown = nn.ModuleDict({"table": nn.Embedding(7, 2), "head": nn.Linear(2, 1)})
    with torch.inference_mode():
        pair.sender.send(grown)
        assert pair.receive(1) == 1
        assert torch.equal(table(torch.tensor([6])), grown["table"](torch.tensor([6])))
    assert table.weight is weight and weight.shape == (7, 2) and weight.requires_grad and not weight.is_inference()
    assert pair.module["head"].weight is head and head.data_ptr() == pointer and torch.equal(head, grown["head"].weight)


def test_a_receiver_that_does_not_read_never_makes_the_sender_wait(ends) -> None:
    pair = ends(MultiProcessWeightSyncScheme, nn.Linear(1000, 1000))
    started = time.monotonic()
    for _ in range(20):
        pair.sender.send(pair.module)
    assert time.monotonic() - started < 5
    assert pair.receive(20) == 20
    for _ in range(3):
        pair.sender.send(pair.module)
    pair.sender.shutdown()  # although a message may be half-way


def test_a_sender_that_has_ended_leaves_the_receiver_with_what_it_has(ends) -> None:
    pair = ends(MultiProcessWeightSyncScheme, filled(0))
    pair.sender.send(filled(1))
    assert pair.receive(1) == 1
    pair.sender.shutdown()
    assert pair.receiver.receive() == pair.receiver.receive() == 1 and values(pair.module) == {1}


def test_a_receiver_that_is_gone_is_an_error_at_the_sender(ends) -> None:
    pair = ends(MultiProcessWeightSyncScheme, filled(0))
    pair.connections[1].close()
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            pair.sender.send(filled(1))
            time.sleep(0.001)


def test_a_policy_without_new_weights_says_so(ends) -> None:
    pair = ends(NoWeightSyncScheme, None)
    assert pair.sender.image_bytes is None and pair.receiver.receive() == 0
    with pytest.raises(WeightsError, match="takes no new weights"):
        pair.sender.send(filled(1))
    assert pair.sender.commit() == 0


# ---- between processes

RECEIVER = """
import pickle, socket, sys, torch
from multiprocessing.connection import Connection
from torch import nn
from shmcollect.segment import Segment
from shmcollect.weight_sync import Channel, scheme_class
connection = Connection(int(sys.argv[1]))
torch.manual_seed(1)
module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
scheme = scheme_class(sys.argv[2])()
connection.send(scheme.init_on_receiver(module))
segment = Segment.attach(connection.recv(), writable=True)
scheme.connect(Channel(segment, connection))
last = 0
while last < 30:
    version = scheme.receive()
    assert version >= last
    last = version
    seen = [tensor for tensor in module.state_dict().values()] if version else []
    assert all(bool((tensor == version).all()) for tensor in seen), "torn"
connection.send(last)
"""


@pytest.mark.parametrize("kind", CARRIERS)
def test_versions_between_processes_are_whole_and_never_go_back(kind) -> None:
    ours, theirs = Pipe()
    command = [sys.executable, "-c", RECEIVER, str(theirs.fileno()), kind.name]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parent.parent)
    theirs.close()
    sender, segment = kind(), None
    try:
        sender.init_on_sender(ours.recv())
        layout = Layout((), 1, 1, (), {}, {}, image_bytes=sender.image_bytes or 0, image_readers=1)
        segment = Segment.create(new_name(), layout)
        sender.connect(Channel(segment, ours))
        ours.send(segment.name)
        module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
        for version in range(1, 31):
            with torch.no_grad():
                for tensor in module.state_dict().values():
                    tensor.fill_(version)
            assert sender.send(module) == version
        assert ours.poll(60) and ours.recv() == 30
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        sender.shutdown()
        ours.close()
        if segment is not None:
            segment.unlink()
            segment.close()


# ---- misuse


@pytest.mark.parametrize("kind", [*CARRIERS, NoWeightSyncScheme])
def test_calls_out_of_turn_raise(ends, kind) -> None:
    def refused(call: Callable[[], Any], text: str) -> None:
        with pytest.raises(WeightsError, match=text):
            call()

    new = kind()
    for call in (lambda: new.connect(Channel()), lambda: new.send({}), new.commit, new.receive):
        refused(call, f"on a scheme '{kind.name}' that is new")
    pair = ends(kind, filled(0), connect=False)
    refused(lambda: pair.sender.send({}), r"send\(\) on a scheme .* that is a sender")
    refused(pair.receiver.receive, r"receive\(\) on a scheme .* that is a receiver")
    refused(lambda: pair.sender.init_on_sender(None), r"init_on_sender\(\) on a scheme .* that is a sender")
    refused(lambda: pair.sender.init_on_receiver(filled(0)), r"init_on_receiver\(\) on a scheme .* that is a sender")
    pair.sender.connect(pair.channels[0])
    pair.receiver.connect(pair.channels[1])
    refused(lambda: pair.sender.connect(pair.channels[0]), r"connect\(\) on a scheme .* that is a connected sender")
    refused(pair.sender.receive, r"receive\(\) on a scheme .* that is a connected sender")
    refused(lambda: pair.receiver.send({}), r"send\(\) on a scheme .* that is a connected receiver")


@pytest.mark.parametrize("kind", [*CARRIERS, NoWeightSyncScheme])
def test_nothing_works_after_shutdown_but_shutdown(ends, kind) -> None:
    pair = ends(kind, filled(0))
    for each, call in ((pair.sender, lambda: pair.sender.send({})), (pair.receiver, pair.receiver.receive)):
        each.shutdown()
        each.shutdown()
        with pytest.raises(ClosedError, match="has been shut down"):
            call()
        with pytest.raises(ClosedError, match="has been shut down"):
            each.connect(Channel())


@pytest.mark.parametrize("kind", CARRIERS)
def test_a_scheme_that_lacks_its_channel_says_what_it_needs(ends, kind) -> None:
    pair = ends(kind, filled(0), connect=False)
    reader, writer = os.pipe()
    one_way = Connection(writer, readable=False)
    try:
        for channel in (Channel(), Channel(connection=one_way)):
            with pytest.raises(WeightsError, match=r"needs a (segment with images of \d+ bytes|two-way connection)"):
                pair.sender.connect(channel)
    finally:
        one_way.close()
        os.close(reader)
    with pytest.raises(WeightsError, match="needs a module"):
        kind().init_on_receiver(None)


def test_two_sides_with_different_weights_do_not_connect(ends) -> None:
    pair = ends(SharedMemWeightSyncScheme, nn.Linear(4, 4), connect=False)
    with pytest.raises(WeightsError, match="no sender has connected"):
        pair.receiver.connect(pair.channels[1])
    other = SharedMemWeightSyncScheme()
    renamed = nn.ModuleDict({"x": nn.Linear(4, 4)})
    other.init_on_sender(SharedMemWeightSyncScheme().init_on_receiver(renamed))
    other.connect(pair.channels[0])
    with pytest.raises(WeightsError, match="but its sender has schema"):
        pair.receiver.connect(pair.channels[1])
    other.shutdown()


# ---- the registry


def test_schemes_are_found_by_name_and_more_can_be_registered(monkeypatch) -> None:
    monkeypatch.setattr("shmcollect.weight_sync._SCHEMES", dict(_schemes()))
    assert [scheme_class(name) for name in ("shared_memory", "multiprocess", "none")] == [*CARRIERS, NoWeightSyncScheme]

    @register_scheme
    class Mine(NoWeightSyncScheme):
        name = "mine"

    assert scheme_class("mine") is Mine
    register_scheme(Mine)
    with pytest.raises(ConfigError, match="'mine' exists"):
        register_scheme(type("Other", (NoWeightSyncScheme,), {"name": "mine"}))
    with pytest.raises(
        ConfigError, match="weight_sync='theirs': expected one of 'shared_memory', 'multiprocess', 'non"
    ):
        scheme_class("theirs")


def _schemes() -> dict[str, type[WeightSyncScheme]]:
    from shmcollect import weight_sync

    return weight_sync._SCHEMES
