"""The ideal: one process per core, each stepping its own envs with its own policy, nobody talking to anybody.

What it reaches is what the machine can do on a workload: the same envs, policy, batches and stored rows, and no
communication at all. So it is written as tightly as plain Python allows.
"""

import itertools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import SupportsFloat

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.machine import usable_cores
from benchmarks.measuring import Measurement, Task, Window, measure
from benchmarks.policies import make_policy
from benchmarks.process_tree import ProcessTree
from benchmarks.rows import Rows
from benchmarks.workloads import WORKLOADS, Env, make_factories


class PlainLoop:
    """Steps its envs one after the other, in this process."""

    def __init__(self, envs: list[Env], policy: torch.nn.Module, rows: Rows, seed: int) -> None:
        self._steps = [env.step for env in envs]
        self._resets = [env.reset for env in envs]
        self._policy = policy
        self._rows = rows
        self._batches = [torch.from_numpy(obs) for obs in rows.obs[:-1]]
        # np.concatenate wants one axis fewer than a block of rows has.
        self._blocks = [obs.reshape(-1, *obs.shape[2:]) for obs in rows.obs[1:]]
        self._counts = np.full(len(envs), rows.length, np.int64)
        for index, reset in enumerate(self._resets):
            rows.obs[-1, index] = reset(seed=seed + index)[0]
        rows.episode_start[-1] = True

    def collect(self) -> NDArray[np.int64]:
        """Fills the rows once."""
        rows, policy = self._rows, self._policy
        stepped = range(len(self._steps))
        observations = list(rows.obs[0])
        rewards: list[SupportsFloat] = [0.0] * len(observations)
        rows.begin()
        for t in range(rows.length):
            answer, extras = policy(self._batches[t])
            action = answer.numpy()
            rows.action[t] = action
            rows.log_prob[t] = extras["log_prob"].numpy()
            for i, step, choice in zip(stepped, self._steps, action, strict=True):
                obs, reward, terminated, truncated, _ = step(choice)
                rewards[i] = reward
                if terminated or truncated:
                    rows.terminated[t, i] = terminated
                    rows.truncated[t, i] = truncated
                    rows.final_obs[t, i] = obs
                    rows.episode_start[t + 1, i] = True
                    obs, _ = self._resets[i]()
                observations[i] = obs
            rows.reward[t] = rewards
            # One call for all rows costs half of one assignment for each.
            np.concatenate(observations, out=self._blocks[t])
        return self._counts


def _run_share(task: Task, share: range, ready: Barrier, answer: Connection) -> None:
    """One process of the ideal: steps the envs of `share`, sends its window, and ends when told to."""
    torch.set_num_threads(1)
    workload = WORKLOADS[task.workload]
    factories = make_factories(task.workload, task.num_envs, task.counters_path)

    def start() -> Callable[[], float]:
        ready.wait()
        return time.process_time

    try:
        envs = [factories[index]() for index in share]
        rows = Rows(task.rollout_length, len(envs), workload.shape, workload.dtype)
        loop = PlainLoop(envs, make_policy(workload), rows, task.seed + share.start)
        torch.manual_seed(task.seed + share.start)
        with torch.inference_mode():
            window = measure(loop.collect, task, start)
    except BaseException:
        ready.abort()
        raise
    answer.send(window)
    answer.recv()
    for env in envs:
        env.close()


def _deal(num_envs: int, num_processes: int) -> list[range]:
    """Envs dealt out evenly, in order."""
    bounds = [num_envs * k // num_processes for k in range(num_processes + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def run(task: Task) -> Measurement:
    """Starts the processes, waits for their windows, and adds them up."""
    begun = time.monotonic()
    shares = _deal(task.num_envs, min(usable_cores(), task.num_envs))
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(len(shares))
    pipes: list[Connection] = []
    processes = []
    for share in shares:
        here, there = context.Pipe()
        process = context.Process(target=_run_share, args=(task, share, ready, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    windows = [_receive(pipe) for pipe in pipes]
    memory_bytes = ProcessTree().memory_bytes()
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    rate = sum(window.frames / window.seconds for window in windows)
    seconds = float(np.mean([window.seconds for window in windows]))
    return Measurement(
        delivered=np.concatenate([window.delivered for window in windows]).tolist(),
        surplus=0,
        frames=round(rate * seconds),
        seconds=seconds,
        cpu_seconds=sum(window.cpu_seconds for window in windows),
        mean_inference_batch=task.num_envs / len(shares),
        latency_p50_s=None,
        latency_p99_s=None,
        memory_bytes=memory_bytes,
        first_batch_s=max(window.first_batch_at for window in windows) - begun,
    )


def _receive(pipe: Connection) -> Window:
    try:
        window: Window = pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the ideal ended before its window did; its own error is above") from None
    return window
