"""Our collector, used as its users use it: construct, then iterate."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import Measurement, Task, measure
from benchmarks.policies import make_policy
from benchmarks.process_tree import ProcessTree
from benchmarks.workloads import WORKLOADS, make_factories
from shmcollect import AsyncBatchedCollector


def run(task: Task) -> Measurement:
    """Collects batches of one rollout per env and drops them, as fast as they come."""
    rollout_length = task.rollout_length
    # The default; given, because the bound on the steps in flight depends on it.
    capacity = 2 * rollout_length
    options: dict[str, Any] = {
        "num_workers": task.num_workers,
        "workers_per_process": task.workers_per_process,
        "max_batch_size": task.max_batch_size,
        "min_batch_size": task.min_batch_size,
    }
    begun = time.monotonic()
    with AsyncBatchedCollector(
        make_factories(task.workload, task.num_envs, task.counters_path),
        make_policy(WORKLOADS[task.workload]),
        frames_per_batch=rollout_length * task.num_envs,
        capacity=capacity,
        seed=task.seed,
        **{name: value for name, value in options.items() if value is not None},
    ) as collector:
        batches = iter(collector)

        def collect() -> NDArray[np.int64]:
            env_index = next(batches).env_index.numpy()
            return np.bincount(env_index, minlength=task.num_envs) * rollout_length

        window = measure(collect, task, lambda: ProcessTree().cpu_seconds)
        stats = collector.stats()
        memory_bytes = ProcessTree().memory_bytes()
    return Measurement(
        delivered=window.delivered.tolist(),
        # Steps granted ahead, and the rollouts of one env that the batch under construction may hold.
        surplus=capacity - 1 + 2 * rollout_length,
        frames=window.frames,
        seconds=window.seconds,
        cpu_seconds=window.cpu_seconds,
        mean_inference_batch=stats["mean_inference_batch"],
        latency_p50_s=stats["action_latency_s"]["p50"],
        latency_p99_s=stats["action_latency_s"]["p99"],
        memory_bytes=memory_bytes,
        first_batch_s=window.first_batch_at - begun,
    )
