"""A long run at full rate with weight updates: ``python -m tests.soak --minutes 30``.

Once a second (60 times, if it is short) it looks at every process of the run from inside the learner. Nothing may grow:
memory, descriptors, ``/dev/shm``; and a frame of the last sixth must cost what one of the first does in processor time,
within 5 %. One that became cheaper fails too: then the machine changed, and the figure says nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from shmcollect import AsyncBatchedCollector

WARM_UP_S = 10.0  # first episodes, first batches, lazy imports
WINDOW = 1 / 6  # of the run: five minutes of thirty
COST_TOLERANCE = 0.05
MEMORY_TOLERANCE_BYTES = 4 << 20  # what allocators may still settle; a leak of one byte per frame is far above
PERIOD_S = 1.0
PROCESS_MEASURES = (("bytes of memory", "memory_bytes", MEMORY_TOLERANCE_BYTES), ("descriptors", "descriptors", 0))


@dataclass(frozen=True)
class Process:
    """One process at one time."""

    role: str
    memory_bytes: int  # its proportional set: shared pages count once among all
    descriptors: int
    cpu_s: float


@dataclass(frozen=True)
class Sample:
    """The whole run at one time."""

    time_s: float
    frames: int
    processes: tuple[Process, ...]
    shm_names: int
    shm_bytes: int

    @property
    def cpu_s(self) -> float:
        """Processor time of all processes together, since each began."""
        return sum(each.cpu_s for each in self.processes)


class Policy(torch.nn.Module):
    """Two logits, sampled; its weights are what is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        logits = self.net(obs)
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


def look(collector: AsyncBatchedCollector, frames: int) -> Sample:
    """Looks at this process and its children, and at all that lies in shared memory under the run's name."""
    children = {child.process.pid: child.role for child in collector._supervisor.children}
    processes = []
    for pid, role in {os.getpid(): "learner", **children}.items():
        process = psutil.Process(pid)
        times = process.cpu_times()
        memory_bytes = process.memory_full_info().pss
        processes.append(Process(role, memory_bytes, process.num_fds(), times.user + times.system))
    entries = [path.stat() for path in Path("/dev/shm").iterdir() if collector.name in path.name]
    shm_bytes = sum(each.st_blocks * 512 for each in entries)
    return Sample(time.monotonic(), frames, tuple(processes), len(entries), shm_bytes)


def windows(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples of the first and the last sixth of the time."""
    start, end = samples[0].time_s, samples[-1].time_s
    length = (end - start) * WINDOW
    return [s for s in samples if s.time_s <= start + length], [s for s in samples if s.time_s >= end - length]


def cost_s(window: Sequence[Sample]) -> float:
    """Processor time per frame."""
    first, last = window[0], window[-1]
    return (last.cpu_s - first.cpu_s) / (last.frames - first.frames)


def complaints(samples: Sequence[Sample]) -> list[str]:
    """What grew between the first and the last window, or what a frame costs that changed."""
    first, last = windows(samples)
    found = []
    for role in sorted({each.role for sample in samples for each in sample.processes}):
        for what, measure, tolerance in PROCESS_MEASURES:
            before, after = _typical(first, role, measure), _typical(last, role, measure)
            if after > before + tolerance:
                found.append(f"{role}: {what} grew from {before:,.0f} to {after:,.0f}")
    for what, measure in (("names", "shm_names"), ("bytes", "shm_bytes")):
        before, after = (max(getattr(sample, measure) for sample in window) for window in (first, last))
        if after > before:
            found.append(f"/dev/shm: {what} grew from {before:,} to {after:,}")
    before, after = cost_s(first), cost_s(last)
    if abs(after / before - 1) > COST_TOLERANCE:
        found.append(f"a frame cost {before * 1e6:.2f} us of processor time at first, {after * 1e6:.2f} us at last")
    return found


def _typical(window: Sequence[Sample], role: str, measure: str) -> float:
    return statistics.median(
        getattr(each, measure) for sample in window for each in sample.processes if each.role == role
    )


def soak(seconds: float, num_envs: int = 32, warm_up_s: float = WARM_UP_S) -> list[Sample]:
    """Collects and updates the weights with every batch for so long; returns what was seen after the warm-up."""
    policy = Policy()
    samples: list[Sample] = []
    with AsyncBatchedCollector(
        "CartPole-v1",
        policy,
        num_envs=num_envs,
        num_workers=2,
        min_batch_size=num_envs // 2,
        rollout_length=32,
        frames_per_batch=32 * num_envs,
        seed=0,
    ) as collector:
        start = time.monotonic()
        due, frames = start + warm_up_s, 0
        while (now := time.monotonic()) < start + warm_up_s + seconds:
            frames += collector.next_batch().num_frames
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            collector.update_policy_weights_(policy)
            if now >= due:
                samples.append(look(collector, frames))
                due += min(PERIOD_S, seconds / 60)
    return samples


def report(samples: Sequence[Sample]) -> str:
    """A line per role and one for the whole."""
    first, last = windows(samples)
    lines = []
    for each in samples[-1].processes:
        memory = [_typical(window, each.role, "memory_bytes") / 2**20 for window in (first, last)]
        descriptors = [_typical(window, each.role, "descriptors") for window in (first, last)]
        lines.append(
            f"{each.role:18} memory {memory[0]:7.1f} -> {memory[1]:7.1f} MiB   "
            f"descriptors {descriptors[0]:.0f} -> {descriptors[1]:.0f}"
        )
    seconds, frames = samples[-1].time_s - samples[0].time_s, samples[-1].frames - samples[0].frames
    costs = cost_s(first) * 1e6, cost_s(last) * 1e6
    lines.append(f"/dev/shm           {first[0].shm_bytes:,} -> {last[-1].shm_bytes:,} bytes")
    lines.append(
        f"{frames:,} frames in {seconds:.0f} s, {frames / seconds:,.0f} per s; processor time per frame "
        f"{costs[0]:.2f} -> {costs[1]:.2f} us ({costs[1] / costs[0] - 1:+.1%})"
    )
    return "\n".join(lines)


def main() -> int:
    """Runs the soak and says what grew; the exit status is 1 if anything did."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--num-envs", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {arguments.minutes}")
    samples = soak(60 * arguments.minutes, arguments.num_envs)
    print(report(samples))
    found = complaints(samples)
    for text in found:
        print(f"soak: {text}", file=sys.stderr)
    left = [path.name for path in Path("/dev/shm").iterdir() if f"-{os.getpid()}-" in path.name]
    if left or psutil.Process().children():
        print(f"soak: left behind {left} {psutil.Process().children()}", file=sys.stderr)
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
