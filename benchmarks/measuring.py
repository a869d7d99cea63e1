"""What a contender is asked to do, what it answers, and the clock around its steady state."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Task:
    """One run of one contender."""

    contender: str
    workload: str
    num_envs: int
    num_workers: int | None
    workers_per_process: int | None
    seconds: float
    warmup: float
    rollout_length: int
    min_batch_size: int | None
    max_batch_size: int | None
    seed: int
    counters_path: str


@dataclass(frozen=True)
class Window:
    """The measured part of a run, and the counts of the whole run."""

    delivered: NDArray[np.int64]
    frames: int
    seconds: float
    cpu_seconds: float
    first_batch_at: float


@dataclass(frozen=True)
class Measurement:
    """The answer of a contender.

    Attributes:
        delivered: per env, the frames handed out in the whole run, warm-up included.
        surplus: how many steps more than delivered an env can have taken, for a contender that keeps steps in flight.
        frames: frames handed out in the window.
        seconds: length of the window.
        cpu_seconds: CPU time of the whole process tree in the window.
        mean_inference_batch: observations per run of the policy.
        latency_p50_s: median time from an observation to its action, None where the contender doesn't know.
        latency_p99_s: its 99th percentile.
        memory_bytes: proportional set size of the process tree after the window, everything still running.
        first_batch_s: from the contender's construction, torch imported, to its first full batch.
    """

    delivered: list[int]
    surplus: int
    frames: int
    seconds: float
    cpu_seconds: float
    mean_inference_batch: float
    latency_p50_s: float | None
    latency_p99_s: float | None
    memory_bytes: int
    first_batch_s: float


def measure(collect: Callable[[], NDArray[np.int64]], task: Task, start: Callable[[], Callable[[], float]]) -> Window:
    """Calls `collect` until the warm-up is over, then for at least `task.seconds`.

    Args:
        collect: collects one batch and returns how many frames of each env are in it.
        task: the durations.
        start: called between warm-up and window; returns the clock of the CPU time to count.
    """
    delivered = collect()
    first_batch_at = time.monotonic()
    while time.monotonic() < first_batch_at + task.warmup:
        delivered = delivered + collect()
    cpu_seconds = start()
    in_window = np.zeros_like(delivered)
    begin, cpu_begin = time.monotonic(), cpu_seconds()
    while True:
        in_window += collect()
        seconds = time.monotonic() - begin
        if seconds >= task.seconds:
            break
    cpu = cpu_seconds() - cpu_begin
    return Window(delivered + in_window, int(in_window.sum()), seconds, cpu, first_batch_at)
