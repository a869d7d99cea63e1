"""What a run is made of: every argument validated once, every derived number computed once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal, get_args

from shmcollect.errors import ConfigError

OnFailure = Literal["raise", "restart"]


@dataclass(frozen=True)
class CollectorConfig:
    """The numbers of a run. See `AsyncBatchedCollector` for the meaning of the arguments.

    Attributes:
        rollout_length: T, resolved.
        batch_rollouts: B, rollouts of a full batch.
        rollouts_per_env: k in sync mode; 0 in async mode.
        total_rollouts: Rollouts of the whole run, or None without end.
        worker_envs: How many envs each worker has.
        processes: Which workers share each env worker process.
        capacity: Slots of each ring, resolved.
        max_batch_size: Rows of the largest inference batch, resolved.
    """

    num_envs: int
    frames_per_batch: int
    num_workers: int
    workers_per_process: int
    rollout_length: int
    total_frames: int
    sync: bool
    max_batch_size: int
    min_batch_size: int
    server_timeout: float | None
    capacity: int
    zero_copy: bool
    final_obs: bool
    on_worker_failure: OnFailure
    max_restarts: int
    restart_window_s: float
    step_timeout: float | None
    reset_timeout: float | None
    startup_timeout: float

    @classmethod
    def build(
        cls,
        *,
        num_envs: int,
        frames_per_batch: int,
        num_workers: int | None = None,
        workers_per_process: int = 1,
        rollout_length: int | None = None,
        total_frames: int = -1,
        sync: bool = False,
        max_batch_size: int | None = None,
        min_batch_size: int = 1,
        server_timeout: float | None = 0.01,
        capacity: int | None = None,
        zero_copy: bool = False,
        final_obs: bool = True,
        on_worker_failure: OnFailure = "raise",
        max_restarts: int = 10,
        restart_window_s: float = 600.0,
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        startup_timeout: float = 60.0,
    ) -> CollectorConfig:
        """Resolves defaults and checks everything.

        Raises:
            ConfigError: Some combination cannot work; the text names the argument and what would work.
        """
        num_envs = check_int("num_envs", num_envs, 1)
        frames_per_batch = check_int("frames_per_batch", frames_per_batch, 1)
        length = _rollout_length(num_envs, frames_per_batch, rollout_length)
        if sync and frames_per_batch % (num_envs * length):
            raise ConfigError(
                f"frames_per_batch={frames_per_batch}: with sync=True it must be a multiple of num_envs * "
                f"rollout_length = {num_envs} * {length}; nearest: {_nearest(frames_per_batch, num_envs * length)}"
            )
        if total_frames != -1:
            total_frames = check_int("total_frames", total_frames, 1, hint=", or -1 for no end")
        config = cls(
            num_envs=num_envs,
            frames_per_batch=frames_per_batch,
            num_workers=_num_workers(num_workers, num_envs),
            workers_per_process=check_int("workers_per_process", workers_per_process, 1),
            rollout_length=length,
            total_frames=total_frames,
            sync=bool(sync),
            max_batch_size=check_int("max_batch_size", num_envs if max_batch_size is None else max_batch_size, 1),
            min_batch_size=check_int("min_batch_size", min_batch_size, 1),
            server_timeout=server_timeout,
            capacity=_capacity(capacity, length, math.ceil(frames_per_batch / (num_envs * length)), sync),
            zero_copy=bool(zero_copy),
            final_obs=bool(final_obs),
            on_worker_failure=on_worker_failure,
            max_restarts=check_int("max_restarts", max_restarts, 1),
            restart_window_s=restart_window_s,
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
            startup_timeout=startup_timeout,
        )
        config._check_batching()
        config._check_failures()
        config._check_zero_copy()
        return config

    @property
    def batch_rollouts(self) -> int:
        """B, rollouts of a full batch."""
        return self.frames_per_batch // self.rollout_length

    @property
    def rollouts_per_env(self) -> int:
        """In sync mode k, the rollouts every env contributes to a batch; 0 in async mode."""
        return self.batch_rollouts // self.num_envs if self.sync else 0

    @property
    def total_rollouts(self) -> int | None:
        """Rollouts of the whole run; None without end."""
        return None if self.total_frames == -1 else math.ceil(self.total_frames / self.rollout_length)

    @property
    def worker_envs(self) -> tuple[int, ...]:
        """How many envs each worker has: counts that differ by at most one."""
        share, extra = divmod(self.num_envs, self.num_workers)
        return tuple(share + (worker < extra) for worker in range(self.num_workers))

    @property
    def processes(self) -> tuple[range, ...]:
        """The workers of each env worker process: neighbours."""
        step = self.workers_per_process
        return tuple(range(w, min(w + step, self.num_workers)) for w in range(0, self.num_workers, step))

    def _check_batching(self) -> None:
        if not self.min_batch_size <= self.max_batch_size <= self.num_envs:
            raise ConfigError(
                f"min_batch_size={self.min_batch_size}, max_batch_size={self.max_batch_size}, "
                f"num_envs={self.num_envs}: expected 1 <= min_batch_size <= max_batch_size <= num_envs"
            )
        check_duration("server_timeout", self.server_timeout, none_means="to wait for min_batch_size")

    def _check_failures(self) -> None:
        if self.on_worker_failure not in get_args(OnFailure):
            raise ConfigError(f"on_worker_failure={self.on_worker_failure!r}: expected 'raise' or 'restart'")
        check_duration("restart_window_s", self.restart_window_s)
        check_duration("step_timeout", self.step_timeout, none_means="for no limit")
        check_duration("reset_timeout", self.reset_timeout, none_means="for no limit")
        check_duration("startup_timeout", self.startup_timeout)

    def _check_zero_copy(self) -> None:
        in_one_piece = self.rollouts_per_env == 1 if self.sync else self.batch_rollouts == 1
        if self.zero_copy and (not in_one_piece or self.capacity % self.rollout_length):
            raise ConfigError(
                f"zero_copy=True needs a capacity that is a multiple of rollout_length, and with sync=True one rollout "
                f"per env in a batch (frames_per_batch = num_envs * rollout_length), else one rollout "
                f"(frames_per_batch = rollout_length); got sync={self.sync}, "
                f"frames_per_batch={self.frames_per_batch}, num_envs={self.num_envs}, "
                f"rollout_length={self.rollout_length}, capacity={self.capacity}"
            )


def check_duration(name: str, value: object, *, none_means: str = "") -> None:
    """Checks a number of seconds.

    Raises:
        ConfigError: It is not a number >= 0 (or None, where that means something).
    """
    if value is None and none_means:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        hint = f", or None {none_means}" if none_means else ""
        raise ConfigError(f"{name}={value!r}: expected seconds >= 0{hint}")


def check_int(name: str, value: object, minimum: int, *, hint: str = "") -> int:
    """Returns a number, which may be NumPy's, as Python's.

    Raises:
        ConfigError: It is not an integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ConfigError(f"{name}={value!r}: expected an integer >= {minimum}{hint}")
    return int(value)


def _nearest(value: int, step: int) -> str:
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} or {above}" if below else f"{above}"


def _rollout_length(num_envs: int, frames_per_batch: int, rollout_length: int | None) -> int:
    """The largest divisor of the batch that gives every env a rollout in it, unless it is given."""
    if rollout_length is None:
        longest = max(1, frames_per_batch // num_envs)
        return next(t for t in range(longest, 0, -1) if frames_per_batch % t == 0)
    rollout_length = check_int("rollout_length", rollout_length, 1)
    if frames_per_batch % rollout_length:
        raise ConfigError(
            f"frames_per_batch={frames_per_batch} is not a multiple of rollout_length={rollout_length}; "
            f"nearest: {_nearest(frames_per_batch, rollout_length)}"
        )
    return rollout_length


def _capacity(capacity: int | None, length: int, per_env: int, sync: bool) -> int:
    """Room for an env's rollouts of a batch, and for what it makes meanwhile: one more in sync mode, else as many."""
    if capacity is None:
        return (per_env + 1 if sync else 2 * per_env) * length
    capacity = check_int("capacity", capacity, 1)
    if capacity < length + 1:
        raise ConfigError(
            f"capacity={capacity}: a rollout of {length} steps needs the observation after it, so at least {length + 1}"
        )
    return capacity


def _num_workers(num_workers: int | None, num_envs: int) -> int:
    if num_workers is None:
        return min(num_envs, max(1, usable_cores() - 1))
    num_workers = check_int("num_workers", num_workers, 1)
    if num_workers > num_envs:
        raise ConfigError(f"num_workers={num_workers} exceeds num_envs={num_envs}: some would have no env")
    return num_workers


def usable_cores() -> int:
    """Cores this process may use, by its affinity and its cgroup's CPU quota (cgroup v2 ``cpu.max``)."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cgroup_quota() -> float | None:
    """The smallest CPU quota of the own cgroup and those above it, in cores."""
    root = Path("/sys/fs/cgroup")
    try:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    except (OSError, IndexError):
        return None
    group = root / line.rpartition(":")[2].lstrip("/")
    quotas = []
    for folder in (group, *group.parents):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
