"""What publishing weights costs: `python -m benchmarks.weights`, with `--pairs 10` also what it costs a collection.

publish   the whole of `send` at the learner: check the module's tensors, copy them into a bank, make it the latest
apply     the whole of `receive` at inference: copy the image, make sure it is whole, copy it into the live tensors
plain     one copy of as many bytes between two arrays, in the same run, in turn with the publishes
torn      reads by another process, during publishes at full speed, that were of more than one version
"""

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks import machine
from benchmarks.process_tree import ProcessTree
from shmcollect import AsyncBatchedCollector
from shmcollect.layout import Layout
from shmcollect.parameter_buffer import ParameterReader
from shmcollect.policies import make_policy
from shmcollect.segment import Segment, new_name
from shmcollect.weight_sync import Channel, SharedMemWeightSyncScheme

NUM_TENSORS = 20
UPDATE_EVERY_S = 0.05


@contextmanager
def ends(module: nn.Module) -> Iterator[tuple[SharedMemWeightSyncScheme, SharedMemWeightSyncScheme, Segment]]:
    """A sender, and a receiver of a copy of the module; there is room for one more reader."""
    sender, receiver = SharedMemWeightSyncScheme(), SharedMemWeightSyncScheme()
    sender.init_on_sender(receiver.init_on_receiver(copy.deepcopy(module)))
    layout = Layout((), 1, 1, (), {}, {}, image_bytes=sender.image_bytes or 0, image_readers=2)
    segment = Segment.create(new_name(), layout)
    try:
        for each in (sender, receiver):
            each.connect(Channel(segment))
        yield sender, receiver, segment
    finally:
        sender.shutdown()
        receiver.shutdown()
        segment.unlink()
        segment.close()


def module_of(size_bytes: int) -> nn.Module:
    """Twenty float32 tensors, all equal to 0, that fill an image without gaps."""
    elements = max(16, size_bytes // 4 // NUM_TENSORS // 16 * 16)
    return nn.ParameterList([torch.zeros(elements) for _ in range(NUM_TENSORS)])


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.fill_(value)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def costs(size_bytes: int, repeats: int) -> dict[str, float]:
    """Medians in seconds."""
    module = module_of(size_bytes)
    with ends(module) as (sender, receiver, segment):
        image_bytes = segment.layout.image_bytes
        source, target = np.ones(image_bytes, np.uint8), np.zeros(image_bytes, np.uint8)
        calls = {
            "plain": lambda: np.copyto(target, source),
            "state_dict": module.state_dict,
            "publish": lambda: sender.send(module),
            "apply": receiver.receive,
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats + 3):  # the first ones find every page of every bank for the first time
            for name, call in calls.items():
                times[name].append(timed(call))
    return {name: statistics.median(each[3:]) for name, each in times.items()}


def look_for_torn_reads(name: str) -> None:
    """The other process: reads until it is told to stop, then says how often it read, and how often in vain."""
    segment = Segment.attach(name, writable=True)
    reader = ParameterReader(segment, 1)
    out = np.empty(segment.layout.image_bytes, np.uint8)
    values, reads, torn = out.view(np.float32), 0, 0
    print("ready", flush=True)
    while reads == 0 or values[0] >= 0:
        if reader.try_read(out):
            reads += 1
            torn += bool((values != values[0]).any())
    print(reads, torn)


def torn_reads(size_bytes: int, seconds: float) -> tuple[int, int]:
    """How many reads there were, and how many of them were torn."""
    module = module_of(size_bytes)
    with ends(module) as (sender, _, segment):
        command = [sys.executable, "-m", "benchmarks.weights", "--read", segment.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            deadline, value = time.monotonic() + seconds, 0
            while time.monotonic() < deadline:
                value = value % 1000 + 1
                fill(module, value)
                sender.send(module)
            fill(module, -1)
            sender.send(module)
            reads, torn = map(int, process.stdout.readline().split())
    return reads, torn


def cpu_per_frame(seconds: float, update: bool) -> float:
    """CPU-seconds of all processes per frame of a collection with a small policy."""
    env = gym.make("CartPole-v1")
    policy = make_policy("mlp", env.observation_space, env.action_space)
    with AsyncBatchedCollector("CartPole-v1", policy, num_envs=64, frames_per_batch=2048) as collector:
        for _ in range(5):
            collector.next_batch()
        tree, frames = ProcessTree(), 0
        before, started = tree.cpu_seconds(), time.monotonic()
        updated = started
        while time.monotonic() - started < seconds:
            frames += collector.next_batch().num_frames
            if update and time.monotonic() - updated >= UPDATE_EVERY_S:
                updated = time.monotonic()
                collector.update_policy_weights_(policy)
        return (tree.cpu_seconds() - before) / frames


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description="What publishing weights costs.")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 1.0, 10.0, 100.0], help="in MB")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=2.0, help="of reading per size, and of each collection")
    parser.add_argument("--pairs", type=int, default=0, help="collections with and without updates to compare")
    parser.add_argument("--read", metavar="SEGMENT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        look_for_torn_reads(arguments.read)
        return
    print(machine.summary(machine.describe()))
    print(f"{NUM_TENSORS} tensors, medians of {arguments.repeats}\n")
    print(f"{'MB':>6} {'plain us':>10} {'publish us':>11} {'apply us':>10} {'publish / plain':>16}", end="")
    print(f" {'publish / (plain + state_dict)':>31} {'reads':>7} {'torn':>5}")
    for size in arguments.sizes:
        cost = costs(int(size * 1e6), arguments.repeats)
        reads, torn = torn_reads(int(size * 1e6), arguments.seconds)
        plain, publish = cost["plain"], cost["publish"]
        print(f"{size:>6g} {plain * 1e6:>10.1f} {publish * 1e6:>11.1f} {cost['apply'] * 1e6:>10.1f}", end="")
        print(f" {publish / plain:>16.2f} {publish / (plain + cost['state_dict']):>31.2f} {reads:>7} {torn:>5}")
    if arguments.pairs:
        pairs = [
            (cpu_per_frame(arguments.seconds, False), cpu_per_frame(arguments.seconds, True))
            for _ in range(arguments.pairs)
        ]
        ratios = [updated / plain for plain, updated in pairs]
        print(
            f"\nCPU-seconds per frame with an update every {UPDATE_EVERY_S * 1000:.0f} ms / without: median "
            f"{statistics.median(ratios):.3f}, {min(ratios):.3f} .. {max(ratios):.3f} over {len(ratios)} pairs"
        )


if __name__ == "__main__":
    main()
