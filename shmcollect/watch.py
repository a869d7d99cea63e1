"""Watch: what becomes of a run whose processes fail.

a child failed, died or is overdue -> raise its error, or
give it up -> it has a second to close its envs -> killed and reaped -> a successor starts -> it joins and takes over

Nothing here waits: a look advances whatever can be advanced. The caller looks whenever it asks for something.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from shmcollect.activity import IDLE, NAMES, RESETTING, STEPPING, Activity
from shmcollect.config import CollectorConfig
from shmcollect.envs import check_same_spaces
from shmcollect.errors import ChildError, SpecError, WeightsError
from shmcollect.launch import Started
from shmcollect.patience import Patience
from shmcollect.ring import ACTED, OBSERVED, Rings
from shmcollect.signals import Held
from shmcollect.supervisor import Child, error_of, not_ready, overdue, unfit
from shmcollect.weight_sync import Channel

_LOG = logging.getLogger("shmcollect")
_LOG.addHandler(logging.NullHandler())  # the engine prints nothing by itself
_LAST_CHANCE_S = 1.0  # for a child that has failed to close its envs
_LOOK_AT_ENVS_S = 0.02
_MOST_ENVS_NAMED = 8


@dataclass(frozen=True)
class Restart:
    """One successor that was started.

    Attributes:
        time_s: When, as `time.monotonic` has it.
        error: What had happened to its predecessor.
    """

    time_s: float
    error: ChildError


class Watch:
    """Watches over a run that has started.

    Attributes:
        restarts: The successors started so far, the latest last.
    """

    def __init__(self, started: Started, config: CollectorConfig) -> None:
        self._started = started
        self._config = config
        self._supervisor = started.run.supervisor
        self._rings = Rings(started.segment)
        self._clocks = EnvClocks(started, config)
        self._leaving: dict[int, tuple[Child, Patience]] = {}  # by pid
        self._joining: dict[int, Iterator[None]] = {}
        self._generations: dict[str, int] = {}
        self._recent: deque[float] = deque()
        self._is_looking = False
        self.restarts: list[Restart] = []

    def look(self) -> None:
        """Deals with what has happened since the last look.

        Raises:
            ChildError: A child has failed that is not to be replaced, or not once more.
        """
        if self._is_looking:  # in a signal handler that asks for something
            return
        self._is_looking = True
        try:
            failed, late = self._supervisor.failed(), self._clocks.look()
            if failed or late or self._leaving or self._joining:
                with Held():  # an interrupt in the middle would leave a place empty
                    self._deal_with(failed, late)
        finally:
            self._is_looking = False

    def _deal_with(self, failed: list[Child], late: tuple[int, int, float] | None) -> None:
        for child in failed:
            if child.process.pid not in self._leaving:
                self._give_up(child, error_of(child, self._where(child)))
        if late:
            self._check_overdue(*late)
        for pid, (child, patience) in list(self._leaving.items()):
            if child.has_ended() or patience.look():
                del self._leaving[pid]
                self._replace(child)
        for pid in list(self._joining):
            self._advance(pid)

    def close(self) -> None:
        """Lets go of the segment."""
        del self._rings, self._clocks

    def _give_up(self, child: Child, error: ChildError) -> None:
        """Lets go of a child that is of no more use, or raises what happened to it."""
        now_s = time.monotonic()
        while self._recent and now_s - self._recent[0] > self._config.restart_window_s:
            self._recent.popleft()
        if self._config.on_worker_failure == "raise":
            raise error
        if len(self._recent) >= self._config.max_restarts:
            error.add_note(
                f"{len(self._recent)} processes were replaced within {self._config.restart_window_s:g} s: "
                f"max_restarts={self._config.max_restarts}"
            )
            raise error
        self._recent.append(now_s)
        self.restarts.append(Restart(now_s, error))
        _LOG.warning("%s; it is replaced", str(error).partition("\n")[0])
        self._joining.pop(child.process.pid, None)
        self._leaving[child.process.pid] = child, Patience(_LAST_CHANCE_S if child.failure else 0.0)

    def _replace(self, child: Child) -> None:
        """Buries a child and starts its successor. Nobody else writes where it wrote until it is gone."""
        for text in self._supervisor.discard(child):
            _LOG.warning(text)
        generation = self._generations[child.role] = self._generations.get(child.role, 0) + 1
        if child.kind == "inference server":
            successor = self._started.plan.start_inference(self._supervisor, generation)
            joining = self._inference_joins(successor)
        else:
            self._clocks.bury(child.envs)
            process = [workers.start for workers in self._config.processes].index(child.index)
            for worker in self._config.processes[process]:
                self._started.state.mark_running(worker, False)
            successor = self._started.plan.start_workers(self._supervisor, process, generation)
            joining = self._worker_joins(successor)
        self._joining[successor.process.pid] = joining

    def _advance(self, pid: int) -> None:
        """Lets a successor do its next step of joining."""
        joining = self._joining[pid]
        (child,) = (each for each in self._supervisor.children if each.process.pid == pid)
        try:
            next(joining)
        except StopIteration:
            child.has_joined = True
            self._joining.pop(pid, None)
        except ChildError as error:
            self._give_up(child, error)
        except (SpecError, WeightsError) as error:
            self._give_up(child, unfit(child, error))

    def _worker_joins(self, child: Child) -> Iterator[None]:
        """The start of a worker process in a run that is under way.

        Raises:
            SpecError: Its envs have other spaces than before.
        """
        started, patience = self._started, Patience(self._config.startup_timeout)
        yield from self._reported(child, patience)
        spaces = child.reports.pop(0)
        check_same_spaces(spaces, started.plan.drop_obs, (started.obs, started.action))
        self._supervisor.send(child, started.join_message)
        yield from self._reported(child, patience)
        child.reports.pop(0)

    def _inference_joins(self, child: Child) -> Iterator[None]:
        """The start of an inference process in a run that is under way.

        Raises:
            SpecError: Its policy returns other extras than before.
            WeightsError: It has other weights than before.
        """
        started, patience = self._started, Patience(self._config.startup_timeout)
        self._supervisor.send(child, (started.observation_space, started.action_space))
        yield from self._reported(child, patience)
        probed = child.reports.pop(0)
        if probed.extras != started.extras:
            raise SpecError(f"the policy's extras were {started.extras}; built again, it returns {probed.extras}")
        started.publisher.reconnect(probed.offer, Channel(started.segment, child.connection))
        self._supervisor.send(child, started.inference_join)
        yield from self._reported(child, patience)
        child.reports.pop(0)

    def _reported(self, child: Child, patience: Patience) -> Iterator[None]:
        """Ends once the child has reported."""
        while not child.reports:
            if patience.look() and not child.is_stopped():
                raise not_ready(child, self._config.startup_timeout)
            yield

    def _check_overdue(self, env: int, activity: int, limit_s: float) -> None:
        (child,) = (each for each in self._supervisor.children if env in each.envs)
        if child.process.pid in self._leaving or not child.has_joined:
            return
        if child.is_stopped():
            self._clocks.forget(child.envs)
            return
        step = self._rings.native.cursor(OBSERVED, env)
        self._give_up(child, overdue(child, env, NAMES[activity], step - (activity == STEPPING), limit_s))

    def _where(self, child: Child) -> str:
        """How far the envs of a worker had come: for an error of somebody who cannot say so any more."""
        observed, acted = self._rings.cursors(OBSERVED), self._rings.cursors(ACTED)
        if not child.envs:
            return f"; {int((observed > acted).sum())} observations waited for an action"
        if child.failure is not None or not child.has_joined:
            return ""
        shown = list(child.envs)[:_MOST_ENVS_NAMED]
        steps = ", ".join(f"env {env} at step {observed[env] - 1}" for env in shown if observed[env])
        due = [str(env) for env in child.envs if 0 < observed[env] == acted[env]][:_MOST_ENVS_NAMED]
        text = f"; last observed: {steps or 'nothing'}{', ...' if len(child.envs) > len(shown) else ''}"
        return f"{text}; to be stepped: {', '.join(due) or 'none'}"


class EnvClocks:
    """How long every env has been in the same step or reset, as far as there is a limit to that."""

    def __init__(self, started: Started, config: CollectorConfig) -> None:
        self._limits = {STEPPING: config.step_timeout, RESETTING: config.reset_timeout}
        self._is_needed = any(limit is not None for limit in self._limits.values())
        self._activity = Activity(started.segment)
        self._rings = Rings(started.segment)
        self._now: list[tuple[int, int]] = [(IDLE, 0)] * config.num_envs
        self._clocks: dict[int, Patience] = {}
        self._looked_s = 0.0

    def look(self) -> tuple[int, int, float] | None:
        """An env that is over its limit, with what it is doing and the limit in seconds; None if there is none."""
        if not self._is_needed or time.monotonic() - self._looked_s < _LOOK_AT_ENVS_S:
            return None
        self._looked_s = time.monotonic()
        now = [(self._activity[env], observed) for env, observed in enumerate(self._rings.cursors(OBSERVED).tolist())]
        for env, (before, after) in enumerate(zip(self._now, now, strict=True)):
            if before != after:
                self._clocks.pop(env, None)
                if (limit_s := self._limits.get(after[0])) is not None:
                    self._clocks[env] = Patience(limit_s)
        self._now = now
        for env, clock in self._clocks.items():
            if clock.look():
                activity = now[env][0]
                return env, activity, self._limits[activity] or 0.0
        return None

    def forget(self, envs: range) -> None:
        """Begins anew with these envs."""
        for env in envs:
            self._clocks.pop(env, None)
            self._now[env] = (IDLE, -1)

    def bury(self, envs: range) -> None:
        """Says for a dead worker that its envs do nothing any more."""
        for env in envs:
            self._activity[env] = IDLE
        self.forget(envs)
