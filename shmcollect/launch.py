"""Starts a run: children up, specs agreed, segment laid out, everyone joined.

workers make their envs and report spaces -> inference probes the policy and reports extras -> the layout is known ->
the segment is created -> everyone attaches
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmcollect.config import CollectorConfig, usable_cores
from shmcollect.counters import counter_names
from shmcollect.env_worker import JoinMessage, WorkerPayload
from shmcollect.envs import check_same_spaces
from shmcollect.inference_server import InferenceJoin, InferencePayload
from shmcollect.layout import Field, Layout, slot_fields
from shmcollect.policy import ExtrasField
from shmcollect.run_state import STOPPING, RunState
from shmcollect.seeding import env_seeds, inference_seed, root_sequence, worker_seed
from shmcollect.segment import Segment
from shmcollect.signals import Held, Termination
from shmcollect.spec import Tree, without
from shmcollect.supervisor import Child, Supervisor, check_descriptors, pickled
from shmcollect.weight_sync import Channel, Publisher, WeightSyncScheme

_GRACE_S = 5.0  # for closing the envs of a worker


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for, checked.

    Attributes:
        config: The numbers.
        factories: One per env; callables or ``EnvSpec``.
        policy: The policy, or None.
        policy_factory: What builds it, or None.
        device: Where the policy runs, or None.
        seed: The user's seed, or None.
        name: The run's name.
        drop_obs: Dict entries to leave out of observations.
        weight_sync: How new weights travel, if the policy has any.
    """

    config: CollectorConfig
    factories: Sequence[Any]
    policy: Any
    policy_factory: Any
    device: str | None
    seed: int | None
    name: str
    drop_obs: tuple[Any, ...]
    weight_sync: type[WeightSyncScheme]


@dataclass
class Run:
    """A run's processes and memory; `close` leaves nothing of either.

    Attributes:
        is_closing: Set before its children are told to end, so that nobody takes that for a failure.
    """

    supervisor: Supervisor = field(default_factory=Supervisor)
    segment: Segment | None = None
    state: RunState | None = None
    publisher: Publisher | None = None
    termination: Termination = field(default_factory=Termination)
    is_closing: bool = False

    def close(self, *, is_exit: bool = False) -> list[str]:
        """Stops and reaps the children, then removes the segment; returns what went wrong on the way.

        Does nothing the second time, or in a fork of the process that started the run. A Ctrl-C meanwhile ends the
        patience with envs that are being closed; it is raised when all is done, unless this is because of another one.

        Args:
            is_exit: Whether the interpreter is ending, so that nobody is there to raise it to.
        """
        if not self.supervisor.is_owner():
            return []
        self.is_closing = True
        is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit)
        with Held(raises=not (is_exit or is_interrupted)) as held:
            texts = self._close(lambda: bool(held.came))
        self.termination.end()
        return texts

    def _close(self, is_urgent: Callable[[], bool]) -> list[str]:
        try:
            if self.state is not None:
                self.state.end(STOPPING)
            if self.publisher is not None:
                self.publisher.close()
            return self.supervisor.stop(_GRACE_S, is_urgent)
        finally:
            if self.segment is not None:
                self.segment.unlink()
                self.segment.close()
                self.segment = self.state = None


@dataclass(frozen=True)
class Started:
    """A run under way.

    Attributes:
        run: Its processes and memory.
        plan: How to start its children, again if need be.
        join_message: What workers are told once the segment exists.
        inference_join: What inference is told then.
        extras: What the policy returns beside the action.
        observation_space: That of env 0, without what was dropped.
        action_space: That of env 0.
        obs: The observation's tree.
        action: The action's tree.
        env_seeds: The seed of each env's first reset.
        publisher: Sends new weights to inference.
    """

    run: Run
    plan: Plan
    join_message: JoinMessage
    inference_join: InferenceJoin
    extras: Sequence[ExtrasField]
    segment: Segment
    state: RunState
    publisher: Publisher
    observation_space: Any
    action_space: Any
    obs: Tree
    action: Tree
    env_seeds: list[int]


def launch(request: RunRequest) -> Started:
    """Starts a run.

    Raises:
        ConfigError: A factory or the policy cannot be sent to another process, or too few descriptors are left.
        ChildError: A child failed, or was not ready within ``startup_timeout``.
        SpecError: The envs' spaces don't fit fixed slots or differ.
        SegmentError: The segment cannot be created.
    """
    run = Run()
    try:
        return _launch(run, request)
    except BaseException as error:
        for text in run.close():
            error.add_note(text)
        raise


def _launch(run: Run, request: RunRequest) -> Started:
    config, supervisor = request.config, run.supervisor
    check_descriptors(1 + len(config.processes))
    plan = Plan(request)
    inference = plan.start_inference(supervisor)
    workers = [plan.start_workers(supervisor, process) for process in range(len(config.processes))]

    reports = supervisor.reports(workers, config.startup_timeout)
    spaces = {env: each for report in reports for env, each in report.items()}
    obs, action = check_same_spaces(spaces, request.drop_obs)
    full_space, action_space = spaces[0]
    observation_space = without(full_space, request.drop_obs)

    supervisor.send(inference, (observation_space, action_space))
    (probed,) = supervisor.reports([inference], config.startup_timeout)
    scheme = probed.weight_sync()
    scheme.init_on_sender(probed.offer)
    layout = _layout(request, obs, action, probed.extras, scheme.image_bytes)
    segment = run.segment = Segment.create(request.name, layout)
    state = run.state = RunState(segment)
    scheme.connect(Channel(segment, inference.connection))
    publisher = run.publisher = Publisher(scheme, state, at_once=not config.sync)

    survivable = config.on_worker_failure == "restart"
    inference_join = InferenceJoin(request.name, segment.run_id, survivable)
    join_message = JoinMessage(
        request.name,
        segment.run_id,
        full_space,
        action_space,
        rows_worth_telling=-(-config.min_batch_size // config.num_workers),
        announce_steps=config.step_timeout is not None,
        survivable=survivable,
    )
    supervisor.send(inference, inference_join)
    for worker in workers:
        supervisor.send(worker, join_message)
    supervisor.reports([inference, *workers], config.startup_timeout)
    for child in supervisor.children:
        child.has_joined = True
    return Started(
        run,
        plan,
        join_message,
        inference_join,
        probed.extras,
        segment,
        state,
        publisher,
        observation_space,
        action_space,
        obs,
        action,
        plan.env_seeds,
    )


class Plan:
    """How the children of a run are started, and their successors.

    Factories and policy are pickled once, here: a successor gets what its predecessor got, whatever the caller has done
    to them since.

    Attributes:
        drop_obs: Dict entries to leave out of observations.
        env_seeds: The seed of each env's first reset.
    """

    def __init__(self, request: RunRequest) -> None:
        self._config = config = request.config
        self._root = root_sequence(request.seed)
        self._device, self._weight_sync, self.drop_obs = request.device, request.weight_sync, request.drop_obs
        self.env_seeds = env_seeds(self._root, config.num_envs)
        what = "the policy" if request.policy is not None else "policy_factory"
        self._policy = pickled(what, (request.policy, request.policy_factory))
        self._factories = []
        for process in range(len(config.processes)):
            envs = self.envs_of(process)
            what = f"create_env_fn (for envs {envs[0]}..{envs[-1]})"
            self._factories.append(pickled(what, list(request.factories[envs.start : envs.stop])))

    def envs_of(self, process: int) -> range:
        """The envs of a worker process."""
        workers, counts = self._config.processes[process], self._config.worker_envs
        return range(sum(counts[: workers.start]), sum(counts[: workers.stop]))

    def start_workers(self, supervisor: Supervisor, process: int, restarts: int = 0) -> Child:
        """Starts a worker process.

        Args:
            supervisor: Whose child it is to be.
            process: Which one.
            restarts: How many there have been before.
        """
        config, workers = self._config, self._config.processes[process]
        seeds = self.env_seeds if restarts == 0 else env_seeds(self._root, config.num_envs, restarts)
        payloads = []
        for w in workers:
            first = sum(config.worker_envs[:w])
            payload = WorkerPayload(
                index=w,
                first_env=first,
                num_envs=config.worker_envs[w],
                env_seeds=seeds[first : first + config.worker_envs[w]],
                global_seed=worker_seed(self._root, w, restarts) if w == workers[0] else None,
                drop_obs=self.drop_obs,
                restarts=restarts,
            )
            payloads.append(payload)
        content = pickled("the payload of a worker", (self._factories[process], payloads))
        return supervisor.start("env worker", content, index=workers[0], envs=self.envs_of(process))

    def start_inference(self, supervisor: Supervisor, restarts: int = 0) -> Child:
        """Starts the inference process, of which there have been so many before."""
        config = self._config
        payload = InferencePayload(
            device=self._device,
            seed=inference_seed(self._root, restarts),
            num_threads=max(1, usable_cores() - config.num_workers),
            min_batch_size=config.min_batch_size,
            max_batch_size=config.max_batch_size,
            server_timeout=config.server_timeout,
            weight_sync=self._weight_sync,
            restarts=restarts,
        )
        return supervisor.start("inference server", pickled("weight_sync", (self._policy, payload)))


def _layout(
    request: RunRequest, obs: Tree, action: Tree, extras: Sequence[ExtrasField], image_bytes: int | None
) -> Layout:
    config = request.config
    fields = slot_fields(
        [Field("obs", leaf.path, leaf.dtype, leaf.shape) for leaf in obs.leaves],
        [Field("action", leaf.path, leaf.dtype, leaf.shape) for leaf in action.leaves],
        [Field("extras", (each.name,), each.dtype, each.shape) for each in extras],
        final_obs=config.final_obs,
    )
    return Layout(
        worker_envs=config.worker_envs,
        capacity=config.capacity,
        rollout_length=config.rollout_length,
        fields=fields,
        counters=counter_names(config.num_workers),
        labels={"env": _env_label(request.factories[0])},
        image_bytes=image_bytes or 0,
        image_readers=0 if image_bytes is None else 1,
    )


def _env_label(factory: Any) -> str:
    """What a reader from outside may call the envs: an id, or the factory's name."""
    return str(getattr(factory, "id", None) or getattr(factory, "__qualname__", type(factory).__name__))
