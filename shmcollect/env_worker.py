"""EnvWorker: steps K environments, each whenever it has an action. Imports no torch.

A process holds one worker, or several in threads of their own: for envs that wait rather than compute.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmcollect.activity import Activity
from shmcollect.control import ChildSession
from shmcollect.counters import Counters
from shmcollect.env_stepper import EnvStepper, SlotWriter
from shmcollect.envs import Env, action_tree, close_envs, distinct_spaces, make_envs, observation_tree
from shmcollect.errors import RoleFailure
from shmcollect.ring import Rings
from shmcollect.run_state import RunState
from shmcollect.runner import run
from shmcollect.segment import Segment

_NOTIFY_NS = 100_000
_NOTIFY_ANYWAY_NS = 1_000_000


@dataclass(frozen=True)
class WorkerPayload:
    """What a worker needs to make its envs.

    Attributes:
        index: The worker's number.
        first_env: Index of its first env.
        num_envs: How many it has.
        env_seeds: Seed of each env's first reset.
        global_seed: Seed of the process's global generators; None if another worker of the process sees to them.
        drop_obs: Dict entries to leave out.
        restarts: How many workers have had these envs before.
    """

    index: int
    first_env: int
    num_envs: int
    env_seeds: Sequence[int]
    global_seed: int | None
    drop_obs: tuple[Any, ...]
    restarts: int = 0


@dataclass(frozen=True)
class JoinMessage:
    """What a worker needs to join the run once its segment exists.

    Attributes:
        name: The run's name.
        run_id: The run's id.
        observation_space: That of env 0.
        action_space: That of env 0.
        rows_worth_telling: The worker's share of the rows inference waits for.
        announce_steps: Whether somebody wants to know when an env is in a step.
        survivable: Whether the run goes on when the worker fails.
    """

    name: str
    run_id: int
    observation_space: Any
    action_space: Any
    rows_worth_telling: int = 1
    announce_steps: bool = False
    survivable: bool = False


def main(session: ChildSession, content: tuple[bytes, Sequence[WorkerPayload]]) -> None:
    """The life of a process with some workers.

    Args:
        session: The connection to the caller.
        content: The cloudpickled factories of all its envs, each a callable or an ``EnvSpec`` for `gymnasium.make`;
            and its workers.
    """
    factories, payloads = content
    if payloads[0].global_seed is not None:
        seed_globals(payloads[0].global_seed)
    pid, first_env = os.getpid(), payloads[0].first_env
    envs = make_envs(pickle.loads(factories), first_env)
    try:
        session.report(distinct_spaces(envs, first_env))
        message: JoinMessage = session.receive()
        segment, state = session.attach(message.name, message.run_id, survivable=message.survivable)
        workers = [
            EnvWorker(payload, _envs_of(payload, envs, first_env), segment, message, state) for payload in payloads
        ]
        for payload in payloads:
            state.mark_running(payload.index, True)  # before any step is granted: inference is to wait for them
        gc.freeze()  # what there is now stays: no use in looking at it again and again
        session.report("joined")
        if len(workers) == 1:
            _let_inference_first()
            workers[0].run()
        else:
            _run_in_threads(workers, session)
    except RoleFailure as error:
        if os.getpid() == pid:
            session.fail(error)  # before the envs are closed, which may take a while
        raise
    finally:
        if os.getpid() == pid:  # and not a process that an env forked and that ends here
            for warning in close_envs(envs, first_env):
                session.warn(warning)


def _envs_of(payload: WorkerPayload, envs: Sequence[Env], first_env: int) -> Sequence[Env]:
    start = payload.first_env - first_env
    return envs[start : start + payload.num_envs]


def _let_inference_first() -> None:
    """Makes this thread one that never preempts another by waking up.

    One batch answers many envs, so a worker that interrupts inference to step one of them delays all the others.
    What the envs start is not affected.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def _run_in_threads(workers: Sequence[EnvWorker], session: ChildSession) -> None:
    """Runs every worker in a thread of its own until all have ended; the first failure ends the run."""
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def life(worker: EnvWorker) -> None:
        try:
            _let_inference_first()
            worker.run(yields=False)  # the others want the interpreter
        except BaseException as error:
            ends.put(error)
        else:
            ends.put(None)

    for worker in workers:
        threading.Thread(target=life, args=(worker,), daemon=True).start()
    failures = []
    for _ in workers:
        if (error := ends.get()) is not None:
            failures.append(error)
            session.fail(error)  # so that the others stop: envs are closed when nobody steps them any more
    if failures:
        raise failures[0]


def seed_globals(seed: int) -> None:
    """Seeds the generators that libraries share in a process; torch's only if somebody has imported it."""
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


class EnvWorker:
    """Steps its envs; see `EnvStepper` for one of them.

    Args:
        payload: Which envs these are.
        envs: The environments, in order.
        segment: The run's segment, mapped for writing.
        message: The spaces all envs share.
        state: The state of the run as this process sees it.
    """

    def __init__(
        self, payload: WorkerPayload, envs: Sequence[Env], segment: Segment, message: JoinMessage, state: RunState
    ) -> None:
        self._index = payload.index
        self._first = payload.first_env
        self._seeds = payload.env_seeds
        self._global_seed = payload.global_seed
        self._rows_worth_telling = message.rows_worth_telling
        self._state = state
        self._inference_bell, self._learner_bell = state.bells["inference"], state.bells["learner"]
        self.counters = Counters(segment, f"worker {payload.index}")
        self.counters.values["restarts"] = payload.restarts
        rings = Rings(segment)
        obs = observation_tree(message.observation_space, payload.drop_obs)
        self._writer = SlotWriter(
            rings,
            obs,
            action_tree(message.action_space),
            Activity(segment),
            announce_steps=message.announce_steps,
        )
        self._writer.episodes = self.counters.values["episodes"]
        self._steppers = [EnvStepper(payload.first_env + k, env, self._writer) for k, env in enumerate(envs)]
        self._acted = rings.native.acted
        self._rollout_length = segment.layout.rollout_length
        self._stride = 1
        self._is_first = payload.restarts == 0
        self._interrupted: dict[int, int] = {}  # the next seed of envs whose episode an earlier worker began
        self._reset_count = self._state.reset_count
        self._seeds_torch_late = payload.global_seed is not None and "torch" not in sys.modules

    def run(self, *, yields: bool = True) -> None:
        """Publishes the first observations, then works until the run ends; the caller has marked it as running."""
        bell = self._state.bells[f"worker {self._index}"]
        bell.yields = yields
        try:
            self.take_over()
            run(self, bell, self._state)
        finally:
            self._state.mark_running(self._index, False)

    def take_over(self) -> None:
        """Begins with every env: a new one is reset with its seed, and what it observes is published.

        An env that an earlier worker had is in the middle of an episode that nobody can go on with: it is interrupted
        as soon as its newest observation has its action.
        """
        for stepper, seed in zip(self._steppers, self._seeds, strict=True):
            if self._is_first or stepper.sequence < 0:
                stepper.start(seed)
                self._inference_bell.notify()
            else:
                self._interrupted[stepper.index] = seed
        self._ring()  # an earlier worker may have died between publishing and telling

    def _ring(self) -> None:
        self._inference_bell.notify()
        self._learner_bell.notify()

    def do_work(self) -> int:
        """Steps every env that has an action; returns how many."""
        acted = self._acted(self._first, len(self._steppers))
        if not acted:
            return 0
        self._look_around()
        interrupted = self._interrupt(acted) if self._interrupted else 0
        steppers, first, length = self._steppers, self._first, self._rollout_length
        done, began_ns = 0, time.monotonic_ns()
        while done < len(acted) and self._state.is_running():
            rollout_ended = False
            for env in acted[done : done + self._stride]:
                stepper = steppers[env - first]
                try:
                    if stepper.step() % length == 0:
                        rollout_ended = True
                except RoleFailure:
                    raise
                except BaseException as error:
                    raise RoleFailure(env_index=env, step=stepper.sequence, during="step") from error
                done += 1
            self._inference_bell.notify()
            if rollout_ended:
                self._learner_bell.notify()
        self._stride = self._rows_between_notices((time.monotonic_ns() - began_ns) / max(1, done))
        counts = self.counters.values
        counts["steps"] += done
        counts["episodes"] = self._writer.episodes
        return done + interrupted

    def _interrupt(self, acted: list[int]) -> int:
        """Ends the episodes an earlier worker left, of envs that have an action; returns how many."""
        envs = [env for env in acted if env in self._interrupted]
        for env in envs:
            self._steppers[env - self._first].interrupt(self._interrupted.pop(env))
            acted.remove(env)
        if envs:
            self._ring()
        return len(envs)

    def patience_s(self) -> float:
        """Nothing waits for a worker that has no action."""
        return float("inf")

    def _look_around(self) -> None:
        """What changes rarely: a request to end all episodes, an env that has imported torch meanwhile."""
        requested = self._state.reset_count
        if requested != self._reset_count:
            self._reset_count = requested
            for stepper in self._steppers:
                stepper.truncate = True
        if self._seeds_torch_late and "torch" in sys.modules:
            sys.modules["torch"].manual_seed(self._global_seed)
            self._seeds_torch_late = False

    def _rows_between_notices(self, step_ns: float) -> int:
        """Waking somebody for every single row would cost more than the row, but rows must not wait for a long sweep.

        So the others are told when the worker's share of the rows inference waits for is there, not more often than
        every 100 us of stepping, but at least every millisecond.
        """
        fewest, most = int(_NOTIFY_NS / (step_ns + 1)), int(_NOTIFY_ANYWAY_NS / (step_ns + 1))
        return max(1, fewest, min(self._rows_worth_telling, most))
