"""AsyncBatchedCollector: the one object a researcher holds.

env workers -> rings -> inference -> rings -> learner (this process)
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from gymnasium.envs.registration import EnvSpec

from shmcollect.batch import Batch
from shmcollect.config import CollectorConfig, OnFailure, check_duration, check_int
from shmcollect.counters import Counters
from shmcollect.doorbell import LONGEST_SLEEP_S
from shmcollect.envs import EnvFactory, resolve_factories
from shmcollect.errors import BusyError, ChildError, ClosedError, ConfigError, ExhaustedError, WeightsError
from shmcollect.launch import Run, RunRequest, Started, launch
from shmcollect.learner import Learner, make_learner
from shmcollect.policy import check_policy_arguments, module_of
from shmcollect.ring import Rings
from shmcollect.rollouts import RolloutReader
from shmcollect.run_state import STOPPING
from shmcollect.segment import check_name, new_name
from shmcollect.stats import read_stats
from shmcollect.watch import Restart, Watch
from shmcollect.weight_sync import Weights, scheme_class


class AsyncBatchedCollector:
    """Collects batches of rollouts from many Gymnasium environments, stepped in worker processes.

    Iterate over it, or call `next_batch`. Close it, or use it as a context manager; a failure closes it by itself.

    Args:
        create_env_fn: An env id, an ``EnvSpec``, one factory (each with ``num_envs``), or a list of factories without
            arguments. Envs are made in the workers only.
        policy: ``policy(obs) -> action`` or ``-> (action, extras)`` on a batch of n observations: ``obs`` is a tensor,
            or tensors nested like the observation space, with leading dimension n, valid during the call; the action
            is nested like the action space; ``extras`` is a dict of tensors, stored per step. It runs under
            ``torch.inference_mode``, on a copy in the inference process.
        policy_factory: Instead of a policy: what builds it there, called as
            ``policy_factory(observation_space, action_space)`` or, if it takes no arguments, without.
        num_envs: Environments; may be left out with a list of factories.
        num_workers: Env workers; default: one less than the usable cores, at least 1.
        workers_per_process: 1: every env worker is a process. More: so many of them share one, each in a thread, which
            pays for envs that wait (for a simulator on the network, say) rather than compute.
        frames_per_batch: Frames of a batch, B * T. A frame is one transition of one env.
        rollout_length: T, steps of a rollout; default: the largest divisor of ``frames_per_batch`` that gives every
            env a rollout in a batch. 1 gives plain transitions.
        total_frames: Frames of the whole run, rounded up to whole rollouts; -1 for no end.
        sync: False: a batch is whichever rollouts finish first, and envs run on while you learn. True: a batch is k
            rollouts of every env (row ``j * num_envs + i`` is rollout j of env i), and envs are stepped only while one
            is asked for.
        max_batch_size: Most rows of an inference batch; default ``num_envs``.
        min_batch_size: Rows worth waiting for.
        server_timeout: Seconds the oldest row waits for them; None: as long as other envs are being stepped.
        device: Where the policy runs; default: where its parameters are, else the CPU.
        storing_device: Where batches arrive; default ``device``, else the CPU.
        seed: Env i gets the i-th child of ``numpy.random.SeedSequence(seed)`` for its first reset; torch and the
            workers' global generators get others. None draws one.
        name: The run's name, under which a monitor finds it; default: a new one.
        capacity: Slots of each env's ring, at least T + 1.
        zero_copy: Batches are views of the rings, valid until the next one is asked for. Needs a capacity that is a
            multiple of T, and with ``sync`` one rollout of every env in a batch, else batches of one rollout.
        final_obs: Keep the true last observation of every episode; it doubles the memory of observations.
        drop_obs: Dict entries to leave out of observations, by key or as a tuple by path.
        weight_sync: How `update_policy_weights_` sends weights: ``"shared_memory"``; ``"multiprocess"``, slower, for
            modules whose tensors change their shapes; ``"none"``; or a name registered with
            `shmcollect.weight_sync.register_scheme`.
        on_worker_failure: What follows when a child fails, dies or takes too long. ``"raise"``: everything is closed
            and the error raised. ``"restart"``: a new process takes its place. The episodes of a worker's envs end with
            a row marked ``interrupted`` each, and new envs go on with seeds of their own; inference goes on with the
            newest weights, and no step is lost. It is found out, and acted upon, in the methods of the collector.
        max_restarts: Processes that may be replaced within ``restart_window_s`` seconds; the next failure is raised.
        restart_window_s: See there.
        step_timeout: Seconds an env may take for a step; None: as long as it takes. A worker whose env takes longer has
            failed. It costs every step a little.
        reset_timeout: The same for a reset.
        startup_timeout: Seconds the children may take to get ready, for each stage of the start.

    Raises:
        ConfigError: Arguments that cannot work.
        SpecError: A space or the policy's extras fit no fixed slot, or the envs differ.
        ChildError: An env or the policy could not be made.
        SegmentError: The shared memory could not be created.
    """

    def __init__(
        self,
        create_env_fn: str | EnvSpec | EnvFactory | Sequence[EnvFactory | EnvSpec],
        policy: Callable[..., Any] | None = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_envs: int | None = None,
        num_workers: int | None = None,
        workers_per_process: int = 1,
        frames_per_batch: int,
        rollout_length: int | None = None,
        total_frames: int = -1,
        sync: bool = False,
        max_batch_size: int | None = None,
        min_batch_size: int = 1,
        server_timeout: float | None = 0.01,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        seed: int | None = None,
        name: str | None = None,
        capacity: int | None = None,
        zero_copy: bool = False,
        final_obs: bool = True,
        drop_obs: Sequence[Any] = (),
        weight_sync: str = "shared_memory",
        on_worker_failure: OnFailure = "raise",
        max_restarts: int = 10,
        restart_window_s: float = 600.0,
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        startup_timeout: float = 60.0,
    ) -> None:
        check_policy_arguments(policy, policy_factory)
        factories = resolve_factories(create_env_fn, num_envs)
        self.config = CollectorConfig.build(
            num_envs=len(factories),
            num_workers=num_workers,
            workers_per_process=workers_per_process,
            frames_per_batch=frames_per_batch,
            rollout_length=rollout_length,
            total_frames=total_frames,
            sync=sync,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            server_timeout=server_timeout,
            capacity=capacity,
            zero_copy=zero_copy,
            final_obs=final_obs,
            on_worker_failure=on_worker_failure,
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
            startup_timeout=startup_timeout,
        )
        self._storing_device = _check_device(storing_device or device or "cpu")
        self.name = new_name() if name is None else check_name(name)
        request = RunRequest(
            config=self.config,
            factories=factories,
            policy=policy,
            policy_factory=policy_factory,
            device=None if device is None else str(device),
            seed=_check_seed(seed),
            name=self.name,
            drop_obs=_check_drop(drop_obs),
            weight_sync=scheme_class(weight_sync),
        )
        self._module = module_of(policy)
        self._busy, self._watching = threading.RLock(), threading.RLock()
        self._in_use = self._closes_later = False
        started = launch(request)
        self._finalizer = weakref.finalize(self, _close_dropped, started.run, self.name)
        self._join(started)

    def _join(self, started: Started) -> None:
        """Takes the learner's place in the run."""
        self._run, self._segment, self._state = started.run, started.segment, started.state
        self._supervisor = started.run.supervisor
        self._watch = Watch(started, self.config)
        self.observation_space, self.action_space = started.observation_space, started.action_space
        self.env_seeds = started.env_seeds
        self._bell, self._inference_bell = self._state.bells["learner"], self._state.bells["inference"]
        self._counters = Counters(self._segment, "learner")
        self._counters.values["started_ns"] = time.monotonic_ns()
        reader = RolloutReader(Rings(self._segment), started.obs, started.action)
        self._publisher = started.publisher
        self._learner: Learner = make_learner(reader, self.config, self._publisher.commit)
        self._ready: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Batches until all of ``total_frames`` has been delivered; iterating again goes on."""
        while True:
            try:
                batch = self.next_batch()
            except ExhaustedError:
                return
            yield batch

    def next_batch(self, timeout: float | None = None) -> Batch:
        """The next batch.

        Args:
            timeout: Seconds to wait for it; None: as long as it takes. What has been gathered is kept for later.

        Raises:
            TimeoutError: It was not full in time.
            ExhaustedError: All of ``total_frames`` has been delivered.
            ChildError: A child failed; the collector is closed.
            ClosedError: The collector is closed.
            BusyError: Another thread is collecting.
        """
        check_duration("timeout", timeout, none_means="to wait as long as it takes")
        batch = self._collect(timeout)
        if batch is None:
            raise TimeoutError(f"no batch of {self.config.frames_per_batch} frames within {timeout:g} s")
        return batch

    def try_next_batch(self) -> Batch | None:
        """The next batch if it is there, else None; raises like `next_batch`."""
        return self._collect(0.0)

    def update_policy_weights_(self, policy_or_weights: Callable[..., Any] | Weights | None = None) -> int:
        """Publishes weights; inference takes them between two of its batches.

        Without ``sync``, rows are run with them from its next batch on. With ``sync``, the next batch that is asked
        for is by them, as a whole; one that is under way is not.

        They are copied before this returns, after all work queued on the devices they are on; it never waits for
        inference. It may be called while another thread collects.

        Args:
            policy_or_weights: A module, a method of one, its ``state_dict()``, or a dict of all its parameters and
                persistent buffers, with or without the prefixes of DataParallel and ``torch.compile``. None: the policy
                given at construction, with the weights it has now.

        Returns:
            Their version. What it acted on carries it as ``policy_version``; 0 is what the policy began with.

        Raises:
            WeightsError: These are not weights of the policy, or it has none; the version before stays.
            ChildError: A child failed; the collector is closed.
            ClosedError: The collector is closed.
        """
        self._check_alive()
        weights = self._module if policy_or_weights is None else policy_or_weights
        if weights is None:
            raise WeightsError("the policy given at construction is no nn.Module: pass the weights to publish")
        version = self._counters.values["policy_version"] = self._publisher.publish(weights)
        return version

    @property
    def restarts(self) -> list[Restart]:
        """The processes that were replaced so far, each with the error of its predecessor."""
        return list(self._watch.restarts)

    @property
    def policy_version(self) -> int:
        """Weight sets published so far."""
        return self._publisher.version

    def stats(self) -> dict[str, Any]:
        """What the run has done so far; see `shmcollect.stats.read_stats`.

        Raises:
            ClosedError: The collector is closed.
        """
        self._check_open()
        self._counters.publish()
        return {"name": self.name, **read_stats(self._segment)}

    def pause(self) -> None:
        """Stops serving actions, so that envs come to rest; returns once no inference is under way.

        Raises:
            ChildError: A child failed; the collector is closed.
            ClosedError: The collector is closed.
        """
        with self._alone():
            count = self._state.pause_count
            if count % 2 == 0:
                self._state.pause_count = count = count + 1
                self._inference_bell.notify()
            while not self._bell.wait_until(lambda: self._state.pause_acknowledged >= count, LONGEST_SLEEP_S):
                self._check_alive()

    def resume(self) -> None:
        """Serves actions again.

        Raises:
            ClosedError: The collector is closed.
        """
        with self._alone():
            if self._state.pause_count % 2:
                self._state.pause_count += 1
                self._inference_bell.notify()

    def reset(self) -> None:
        """Ends the current episode of every env with its next step, whose row is marked truncated.

        Raises:
            ClosedError: The collector is closed.
        """
        with self._alone():
            self._state.reset_count += 1

    def close(self) -> None:
        """Stops everything; nothing is left behind. Safe to call twice, and from another thread.

        Warns:
            RuntimeWarning: An env could not be closed, or a child did not end within five seconds and was killed.
        """
        for text in self._shut_down():
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _shut_down(self) -> list[str]:
        if not self._supervisor.is_owner() or self._finalizer.detach() is None:
            return []  # in a fork of the owner, everything belongs to the owner
        self._run.is_closing = True
        self._state.end(STOPPING)  # wakes a thread that is collecting: it raises ClosedError
        with self._busy:
            if self._in_use:  # called from within, perhaps by a signal handler: that call cleans up as it ends
                self._closes_later = True
                return []
            return self._tear_down()

    def _tear_down(self) -> list[str]:
        self._closes_later = False
        with self._watching:
            self._watch.close()
            del self._learner, self._ready  # what looks at the segment's memory
            return self._run.close()

    shutdown = close

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _collect(self, timeout_s: float | None) -> Batch | None:
        with self._alone():
            started_ns = time.monotonic_ns()
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            self._check_alive()
            while not self._look():
                self._check_alive()
                remaining_s = LONGEST_SLEEP_S if deadline is None else deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                if (nap_s := self._learner.nap_s()) > 0:
                    time.sleep(min(nap_s, remaining_s))
                else:
                    self._bell.wait_until(self._learner.can_go_on, remaining_s)
            self._count(started_ns)
            batch = None if self._ready is None else self._ready.to(self._storing_device)
            self._ready = None
            return batch

    def _look(self) -> bool:
        """Whether a batch is ready, or there is no use in waiting."""
        if self._ready is None and self._state.is_running():
            self._ready = self._learner.poll()
            if self._learner.granted_news:
                self._inference_bell.notify()
        return self._ready is not None

    def _count(self, started_ns: int) -> None:
        counts = self._counters.values
        counts["heartbeat_ns"] = now_ns = time.monotonic_ns()
        counts["waiting_ns"] += now_ns - started_ns
        if self._ready is not None:
            counts["batches"] += 1
            counts["rollouts"] += len(self._ready)
            counts["frames"] += self._ready.num_frames
            counts["episodes"] += len(self._ready.episodes)
            lag = self._publisher.version - self._ready.policy_version
            counts["lag_sum"] += int(lag.sum())
            counts["lag_max"] = max(counts["lag_max"], int(lag.max()))
        self._counters.publish()

    def _check_alive(self) -> None:
        """Raises what has gone wrong, after closing everything. Any thread may ask."""
        try:
            with self._watching:
                self._check_open()
                self._watch.look()
        except ChildError as error:
            if self._run.is_closing:  # by another thread, meanwhile: children end because of that
                self._check_open()
            for text in self._shut_down():
                error.add_note(text)
            raise

    def _check_open(self) -> None:
        if not self._supervisor.is_owner():
            raise ClosedError(f"the collector {self.name!r} belongs to the process that made it, not to its forks")
        if self._run.is_closing:
            raise ClosedError(f"the collector {self.name!r} is closed")

    def _alone(self) -> _Alone:
        return _Alone(self)


class _Alone:
    """Keeps a second thread out while one collects; a clear error rather than mixed rows."""

    def __init__(self, collector: AsyncBatchedCollector) -> None:
        self._collector = collector

    def __enter__(self) -> None:
        collector = self._collector
        collector._check_open()
        free = collector._busy.acquire(blocking=False)
        if not free or collector._in_use:
            if free:
                collector._busy.release()
            raise BusyError(f"another thread, or a signal handler, is using the collector {collector.name!r}")
        collector._in_use = True

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        collector = self._collector
        collector._in_use = False
        texts = collector._tear_down() if collector._closes_later else []
        collector._busy.release()
        for text in texts:
            if error is None:
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            else:
                error.add_note(text)


def _close_dropped(run: Run, name: str) -> None:
    """What happens to a collector nobody closed: garbage collected, or alive when the interpreter ends."""
    run.close(is_exit=True)
    warnings.warn(f"the collector {name!r} was never closed", ResourceWarning, stacklevel=2)


def _check_device(device: torch.device | str) -> torch.device:
    """The device, once a tensor could be put there."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {str(device)!r}: {error}") from error


def _check_seed(seed: int | None) -> int | None:
    return None if seed is None else check_int("seed", seed, 0, hint=", or None")


def _check_drop(drop_obs: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(drop_obs, str):
        raise ConfigError(f"drop_obs={drop_obs!r}: expected a sequence of keys, such as ({drop_obs!r},)")
    return tuple(drop_obs)
