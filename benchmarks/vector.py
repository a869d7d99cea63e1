"""Gymnasium's own vector envs, driving the same policy on the same envs and storing the same rows."""

import time
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from benchmarks.measuring import Measurement, Task, measure
from benchmarks.policies import make_policy
from benchmarks.process_tree import ProcessTree
from benchmarks.rows import Rows
from benchmarks.workloads import WORKLOADS, make_factories


class VectorLoop:
    """Asks the policy, steps the vector env, stores."""

    def __init__(self, env: VectorEnv[Any, Any, Any], policy: torch.nn.Module, rows: Rows, seed: int) -> None:
        self._env = env
        self._policy = policy
        self._rows = rows
        self._counts = np.full(env.num_envs, rows.length, np.int64)
        rows.obs[-1], _ = env.reset(seed=seed)
        rows.episode_start[-1] = True
        self._batches = [torch.from_numpy(obs) for obs in rows.obs[:-1]]

    def collect(self) -> NDArray[np.int64]:
        """Fills the rows once."""
        rows = self._rows
        rows.begin()
        for t in range(rows.length):
            answer, extras = self._policy(self._batches[t])
            action = answer.numpy()
            obs, reward, terminated, truncated, infos = self._env.step(action)
            rows.action[t] = action
            rows.log_prob[t] = extras["log_prob"].numpy()
            rows.reward[t] = reward
            rows.terminated[t] = terminated
            rows.truncated[t] = truncated
            rows.obs[t + 1] = obs
            if "final_obs" in infos:
                rows.episode_start[t + 1] = infos["_final_obs"]
                for i in np.flatnonzero(infos["_final_obs"]):
                    rows.final_obs[t, i] = infos["final_obs"][i]
        return self._counts


def run(task: Task) -> Measurement:
    """Runs `sync` or `async`. Observations are stored at once, so the vector env need not copy them first."""
    begun = time.monotonic()
    workload = WORKLOADS[task.workload]
    factories = make_factories(task.workload, task.num_envs, task.counters_path)
    env: VectorEnv[Any, Any, Any]
    if task.contender == "sync":
        env = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        env = AsyncVectorEnv(factories, shared_memory=True, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    rows = Rows(task.rollout_length, task.num_envs, workload.shape, workload.dtype)
    loop = VectorLoop(env, make_policy(workload), rows, task.seed)
    torch.manual_seed(task.seed)
    tree = ProcessTree()
    with torch.inference_mode():
        window = measure(loop.collect, task, lambda: tree.cpu_seconds)
    memory_bytes = tree.memory_bytes()
    env.close()
    return Measurement(
        delivered=window.delivered.tolist(),
        surplus=0,
        frames=window.frames,
        seconds=window.seconds,
        cpu_seconds=window.cpu_seconds,
        mean_inference_batch=task.num_envs,
        latency_p50_s=None,
        latency_p99_s=None,
        memory_bytes=memory_bytes,
        first_batch_s=window.first_batch_at - begun,
    )
