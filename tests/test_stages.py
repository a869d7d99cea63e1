"""A role killed at each stage of the protocol: its successor goes on, and no row is lost, torn or told wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import stages
import stamped
import torch
from gymnasium import spaces
from stages import Stage
from stamped import Judge, Stamped, StampedPolicy

from shmcollect import AsyncBatchedCollector, Batch

for module in (stamped, stages, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

NUM_ENVS, SEED = 6, 11
WORKER_ENVS = range(3)  # of the worker that is killed
REST_S = 0.1  # how long the others go on while one is stopped
WHILE_OTHERS_FALL_ASLEEP_S = 0.002  # so that what is published next has to wake them up

WORKER_STAGES = [
    Stage("before native.acted", 9),  # it looks for actions
    Stage("after native.acted", 9),  # it has found some
    Stage("before episode_length", 7),  # an env is in its step
    Stage("before native.step", 7),  # stepped, nothing written
    Stage("before keep_episode", 1),  # an episode has ended
    Stage("after native.write", 1),  # its record is kept, the env not yet reset
    Stage("after reset", 6),  # reset, nothing written
    Stage("after native.step", 7),  # half written: its second leaf has yet to be made to fit
    Stage("before coerce", 7),
    Stage("after publish", 7),  # published, nobody told
    Stage("before notify", 9),
    Stage("after notify", 9),  # one told
    Stage("after native.bell_prepare", 3),  # announced as asleep
    Stage("before native.bell_wait", 3),  # about to sleep
    Stage("after native.bell_wait", 3),  # woken up
    Stage("before keep_published"),  # the envs begin anew; nothing of the interruption is written
    Stage("after keep_published"),  # its final observation is
    Stage("before coerce"),  # half of the observation after it
    Stage("after publish"),  # published, nobody told
]
INFERENCE_STAGES = [
    Stage("before native.scan", 9),
    Stage("after native.scan", 9),  # rows claimed
    Stage("before native.gather", 5),
    Stage("after native.gather", 5),
    Stage("after forward", 5),
    Stage("before native.scatter", 5),
    Stage("after native.scatter", 5),  # answered, not published
    Stage("after native.advance", 5),  # published, nobody told
    Stage("after notify", 9),  # one of two workers told
    Stage("after _announce", 7),  # a bank of weights taken
    Stage("after _copied", 3),
    Stage("before apply", 3),
    Stage("after apply", 3),  # weights applied, no row stamped
    Stage("after native.bell_prepare", 3),
    Stage("before native.bell_wait", 3),
    Stage("after native.bell_wait", 3),
]
EVERY_CALL = [Stage(f"{when} native", skip) for skip in range(60, 120) for when in ("before", "after")]


class Orders:
    """Where the next process of the role is to stop, told through files."""

    def __init__(self, directory: Path) -> None:
        self.stopped, self._next = directory / "stopped", directory / "next"

    def give(self, stage: Stage | None) -> None:
        """For the next process that starts."""
        self._next.write_bytes(cloudpickle.dumps(stage))

    def take(self) -> None:
        """In the process that has started."""
        stage = cloudpickle.loads(self._next.read_bytes())
        if stage is not None:
            stages.arm(stage, self.stopped)


def take(orders: Orders | None) -> Orders | None:
    """In every process that starts, whether it is to be stopped or not."""
    stages.sleep_until_told()
    if orders is not None:
        orders.take()
    return orders


class TwoLeaves(Stamped):
    """A stamped env with a second leaf that never fits as it is: between the two, a slot is half written."""

    observation_space = spaces.Dict(
        {"stamps": Stamped.observation_space, "unfit": spaces.Box(0, 2**40, (2,), np.int64)}
    )

    def __init__(self, index: int, orders: Orders | None = None) -> None:
        super().__init__(index)
        self.orders = take(orders)

    def _obs(self) -> Any:
        stamps = super()._obs()
        if self.orders is not None:
            time.sleep(WHILE_OTHERS_FALL_ASLEEP_S)
        return {"stamps": stamps, "unfit": stamps[-2:].tolist()}


class TwoLeafPolicy(StampedPolicy):
    """Acts on the stamps."""

    def __init__(self, orders: Orders | None = None) -> None:
        super().__init__()
        self.orders = take(orders)

    def forward(self, obs: Any) -> Any:
        action, extras = super().forward(obs["stamps"])
        if self.orders is not None:
            time.sleep(WHILE_OTHERS_FALL_ASLEEP_S)
        return action, extras | {"unfit": obs["unfit"].clone()}


class Stamps:
    """A batch as its judge knows one."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.obs, self.next_obs = batch.obs["stamps"], batch.next_obs["stamps"]
        assert torch.equal(self.obs[..., -2:], batch.obs["unfit"]), "leaves of two observations in one row"
        assert torch.equal(self.obs[..., -2:], batch.extras["unfit"]), "the policy saw another second leaf"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def collector_and_judge(orders: Orders, role: str, **options: Any) -> tuple[AsyncBatchedCollector, Judge]:
    factories = [partial(TwoLeaves, env) for env in range(NUM_ENVS)]
    if role == "worker":
        factories[0] = partial(TwoLeaves, 0, orders)
    collector = AsyncBatchedCollector(
        factories,
        policy_factory=partial(TwoLeafPolicy, orders) if role == "inference" else TwoLeafPolicy,
        num_workers=2,
        frames_per_batch=4 * NUM_ENVS,
        rollout_length=4,
        seed=SEED,
        on_worker_failure="restart",
        max_restarts=10_000,
        **options,
    )
    return collector, Judge(SEED, NUM_ENVS)


class Learner:
    """Looks at every batch, and updates the weights after it."""

    def __init__(self, collector: AsyncBatchedCollector, judge: Judge) -> None:
        self.collector, self.judge, self.version = collector, judge, 0

    def poll(self) -> None:
        if (batch := self.collector.try_next_batch()) is None:
            time.sleep(0.002)
            return
        self.judge.look(Stamps(batch))
        self.version += 1
        self.collector.update_policy_weights_(stamped.weights(self.version))

    def poll_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()

    def poll_until_every_env_has_gone_on(self, rows: int, limit_s: float = 60.0) -> None:
        goal = [done + rows for done in self.judge.rows_by_env]
        deadline = time.monotonic() + limit_s
        while any(done < wanted for done, wanted in zip(self.judge.rows_by_env, goal, strict=True)):
            assert time.monotonic() < deadline, "an env does not go on"
            self.poll()


def kill_at(places: Sequence[Stage], role: str, directory: Path, **options: Any) -> Judge:
    """Kills the processes of a role one after the other, each at its stage."""
    orders = Orders(directory)
    orders.give(places[0])
    collector, judge = collector_and_judge(orders, role, **options)
    with collector:
        learner = Learner(collector, judge)
        for stage, after in zip(places, [*places[1:], None], strict=True):
            try:
                pid = stages.wait_until_stopped(orders.stopped, learner.poll)
                learner.poll_for(REST_S)
                orders.give(after)
                os.kill(pid, signal.SIGKILL)
            except BaseException as error:
                error.add_note(f"at the stage: {stage}")
                raise
        learner.poll_until_every_env_has_gone_on(rows=40)
        assert len(collector.restarts) == len(places)
    assert judge.versions.total() == judge.rows > 0
    return judge


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_a_worker_killed_at_any_stage_leaves_nothing_torn_lost_or_untold(sync: bool, tmp_path: Path) -> None:
    judge = kill_at(WORKER_STAGES, "worker", tmp_path, sync=sync)
    assert set(judge.interrupted) == set(WORKER_ENVS), "nobody else notices"
    assert max(judge.interrupted.values()) <= len(WORKER_STAGES), "one row each"


def test_inference_killed_at_any_stage_loses_no_step(tmp_path: Path) -> None:
    judge = kill_at(INFERENCE_STAGES, "inference", tmp_path, sync=True)
    assert not judge.interrupted
    assert max(judge.versions) > len(INFERENCE_STAGES)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("role", ["worker", "inference"])
def test_a_role_killed_before_and_after_each_of_sixty_native_calls_in_a_row_is_replaced(
    role: str, sync: bool, tmp_path: Path
) -> None:
    judge = kill_at(EVERY_CALL, role, tmp_path, sync=sync)
    assert set(judge.interrupted) == (set(WORKER_ENVS) if role == "worker" else set())
