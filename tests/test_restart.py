"""What follows when a child fails: an error that says all, or a successor that nobody else notices."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import stamped
import torch
from gymnasium import spaces
from stamped import Judge, Stamped, StampedPolicy, at_step, life_seeds

from shmcollect import AsyncBatchedCollector, EnvWorkerError, InferenceError
from shmcollect.patience import Patience
from shmcollect.supervisor import Child

cloudpickle.register_pickle_by_value(stamped)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FIRST_LIFE = partial(life_seeds, 11)


def collect(collector: AsyncBatchedCollector, judge: Judge, until: Callable[[], Any], limit_s: float = 60) -> None:
    """Collects and judges until something is true, then another two batches of every env's size."""
    deadline = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < deadline, "it did not come to pass"
        judge.look(collector.next_batch(timeout=limit_s))
    for _ in range(10):
        judge.look(collector.next_batch(timeout=limit_s))


def child_of(collector: AsyncBatchedCollector, role: str) -> Child:
    return next(child for child in collector._supervisor.children if child.role == role)


def kill(collector: AsyncBatchedCollector, role: str) -> int:
    pid = child_of(collector, role).process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def raises(text: str) -> Callable[[], None]:
    def does() -> None:
        raise ArithmeticError(text)

    return does


# ---- restart


@pytest.mark.parametrize("options", [{}, {"sync": True}, {"num_workers": 6, "workers_per_process": 3}])
def test_a_killed_workers_envs_are_interrupted_and_live_again_and_the_others_do_not_notice(options: Any) -> None:
    collector, judge = stamped.make(**options)
    with collector:
        collect(collector, judge, lambda: judge.rows > 200)
        pid = kill(collector, "env worker 0")
        collect(collector, judge, lambda: len(judge.interrupted) == 3)
        assert not psutil.pid_exists(pid)
        assert judge.interrupted == {0: 1, 1: 1, 2: 1}, "one row each, and nobody else's"
        assert [restart.error.pid for restart in collector.restarts] == [pid]
        restarts = [worker["restarts"] for worker in collector.stats()["workers"]]
        assert restarts == ([1, 1, 1, 0, 0, 0] if len(restarts) == 6 else [1, 0])


@pytest.mark.parametrize("weight_sync", ["shared_memory", "multiprocess", "none"])
@pytest.mark.parametrize("sync", [False, True])
def test_a_killed_inference_process_loses_no_step_and_its_successor_has_the_latest_weights(
    weight_sync: str, sync: bool
) -> None:
    collector, judge = stamped.make(weight_sync=weight_sync, sync=sync)
    with collector:
        updates = 0 if weight_sync == "none" else 3
        for version in range(1, updates + 1):
            collector.update_policy_weights_(stamped.weights(version))
        collect(collector, judge, lambda: judge.versions[updates])
        before = judge.rows
        kill(collector, "inference server")
        collect(collector, judge, lambda: collector.restarts and judge.rows > before + 400)
        assert not judge.interrupted
        assert collector.stats()["inference"]["restarts"] == 1
        if updates:
            collector.update_policy_weights_(stamped.weights(4))
            collect(collector, judge, lambda: judge.versions[4])


def test_weights_published_while_inference_is_away_are_what_its_successor_begins_with() -> None:
    collector, judge = stamped.make(weight_sync="multiprocess")
    with collector:
        collect(collector, judge, lambda: judge.rows > 100)
        kill(collector, "inference server")
        for version in range(1, 5):
            collector.update_policy_weights_(stamped.weights(version))
        collect(collector, judge, lambda: judge.versions[4])
        assert set(judge.versions) <= {0, 4}, "no row by what was overtaken"


def test_an_exception_in_an_env_restarts_its_worker_and_closes_the_envs_of_the_old_one(tmp_path: Path) -> None:
    class Closing(Stamped):
        def close(self) -> None:
            (tmp_path / f"{self.index}-{self.life}").touch()

    def factory(env: int) -> Any:
        fault = at_step(30, raises("boom"), life=FIRST_LIFE(1, 0)) if env == 1 else None
        return partial(Closing, env, fault)

    collector = AsyncBatchedCollector(
        [factory(env) for env in range(4)],
        StampedPolicy(),
        num_workers=2,
        frames_per_batch=16,
        seed=11,
        on_worker_failure="restart",
    )
    judge = Judge(11, 4)
    with collector:
        collect(collector, judge, lambda: len(judge.interrupted) == 2)
        (restart,) = collector.restarts
        assert "env 1 raised ArithmeticError in step" in str(restart.error)
        assert "Traceback" in restart.error.child_traceback
        closed = {path.name for path in tmp_path.iterdir()}
        assert closed == {f"{env}-{FIRST_LIFE(env, 0)}" for env in (0, 1)}
    assert len(list(tmp_path.iterdir())) == 6


def test_an_exception_in_the_policy_restarts_inference() -> None:
    class Flawed(StampedPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, obs: torch.Tensor) -> Any:
            self.calls += 1
            if self.calls == 50:
                raise ArithmeticError("one bad batch")
            return super().forward(obs)

    factories = [partial(Stamped, env) for env in range(4)]
    options: dict[str, Any] = {"num_workers": 1, "frames_per_batch": 16, "seed": 11}
    judge = Judge(11, 4)
    with AsyncBatchedCollector(factories, Flawed(), on_worker_failure="restart", **options) as collector:
        collect(collector, judge, lambda: collector.restarts)
        assert "one bad batch" in str(collector.restarts[0].error)
        assert not judge.interrupted


def test_a_worker_that_dies_again_and_again_while_it_starts_is_given_up_after_max_restarts() -> None:
    broken = Path(f"/tmp/shmcollect-test-{os.getpid()}")

    class Fragile(Stamped):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            if broken.exists():
                raise ArithmeticError("cannot be made any more")

    factories = [partial(Fragile, env) for env in range(2)]
    options: dict[str, Any] = {"num_workers": 1, "frames_per_batch": 8, "seed": 11, "max_restarts": 2}
    collector = AsyncBatchedCollector(factories, StampedPolicy(), on_worker_failure="restart", **options)
    try:
        collector.next_batch()
        broken.touch()
        kill(collector, "env worker 0")
        with pytest.raises(EnvWorkerError, match="cannot be made any more") as caught:
            while True:
                collector.next_batch(timeout=60)
        assert "max_restarts=2" in "".join(caught.value.__notes__)
        assert len(collector.restarts) == 2
    finally:
        broken.unlink()
        collector.close()


def test_only_restarts_within_the_window_count() -> None:
    collector, judge = stamped.make(max_restarts=1, restart_window_s=0.0)
    with collector:
        for count in range(1, 4):
            collect(collector, judge, lambda: judge.rows > 100)
            kill(collector, "env worker 1")
            collect(collector, judge, lambda count=count: judge.interrupted[3] == count)
        assert len(collector.restarts) == 3


def test_a_successor_with_other_spaces_does_not_take_over(tmp_path: Path) -> None:
    class Changing(Stamped):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            if (tmp_path / "changed").exists():
                self.observation_space = spaces.Box(0, 1, (3,), np.int64)

    factories = [partial(Changing, env) for env in range(2)]
    options: dict[str, Any] = {"num_workers": 1, "frames_per_batch": 8, "seed": 11, "max_restarts": 1}
    with (
        pytest.raises(EnvWorkerError, match=r"cannot take over: env 0: its observation space differs"),
        AsyncBatchedCollector(factories, StampedPolicy(), on_worker_failure="restart", **options) as collector,
    ):
        collector.next_batch()
        (tmp_path / "changed").touch()
        kill(collector, "env worker 0")
        while True:
            collector.next_batch(timeout=60)


def test_every_restart_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    collector, _ = stamped.make()
    with caplog.at_level(logging.WARNING, "shmcollect"), collector:
        collector.next_batch()
        pid = kill(collector, "env worker 1")
        collect(collector, judge_nothing(), lambda: collector.restarts)
    assert f"env worker 1 (pid {pid}, envs 3..5) was killed by SIGKILL" in caplog.text
    assert "it is replaced" in caplog.text


def judge_nothing() -> Any:
    return type("Lenient", (), {"look": lambda self, batch: None})()


def test_closing_while_a_successor_starts_leaves_nothing() -> None:
    collector, judge = stamped.make()
    with collector:
        judge.look(collector.next_batch())
        kill(collector, "env worker 0")
        kill(collector, "inference server")
        deadline = time.monotonic() + 30
        while not collector.restarts and time.monotonic() < deadline:
            collector.try_next_batch()
        assert collector.restarts
    assert not collector._supervisor.children


# ---- time-outs


@pytest.mark.parametrize("during", ["step", "reset"])
@pytest.mark.parametrize("mode", ["raise", "restart"])
def test_an_env_that_takes_longer_than_its_timeout_is_a_failure_of_its_worker(during: str, mode: str) -> None:
    class Slow(Stamped):
        def reset(self, **kwargs: Any) -> Any:
            if during == "reset" and self.steps >= 20 and self.life == FIRST_LIFE(2, 0):
                time.sleep(1000)
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            if during == "step" and self.steps == 20 and self.life == FIRST_LIFE(2, 0):
                time.sleep(1000)
            return super().step(action)

    factories: list[Any] = [partial(Stamped, env) for env in range(4)]
    factories[2] = partial(Slow, 2)
    options: dict[str, Any] = {"num_workers": 2, "frames_per_batch": 16, "seed": 11, f"{during}_timeout": 0.5}
    judge = Judge(11, 4)
    collector = AsyncBatchedCollector(factories, StampedPolicy(), on_worker_failure=mode, **options)
    expected = rf"env 2 has been in {during} at step \d+ for {during}_timeout=0.5 s"
    if mode == "raise":
        with pytest.raises(EnvWorkerError, match=expected) as caught, collector:
            collect(collector, judge, lambda: False)
        assert caught.value.details["env_index"] == 2
        return
    with collector:
        collect(collector, judge, lambda: judge.interrupted[2])
        assert judge.interrupted == {2: 1, 3: 1}
        assert expected[:20] in str(collector.restarts[0].error)


def test_a_stopped_worker_is_not_an_overdue_one() -> None:
    collector, judge = stamped.make(step_timeout=0.3, reset_timeout=0.3)
    with collector:
        collect(collector, judge, lambda: judge.rows > 200)
        worker = child_of(collector, "env worker 0").process.pid
        os.kill(worker, signal.SIGSTOP)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            if (batch := collector.try_next_batch()) is not None:
                judge.look(batch)
        os.kill(worker, signal.SIGCONT)
        before = judge.rows
        collect(collector, judge, lambda: judge.rows > before + 400)
        assert not collector.restarts and not judge.interrupted


def test_time_in_which_the_caller_itself_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    patience = Patience(2.5)
    now_s += 3600
    assert not patience.look() and patience.waited_s == 1.0, "of an hour without a look, a second"
    now_s += 0.75
    assert not patience.look() and patience.waited_s == 1.75
    now_s += 0.75
    assert patience.look()
    assert not Patience(None).look()


# ---- raise


def test_the_error_of_a_killed_worker_says_how_far_its_envs_had_come() -> None:
    fault = at_step(25, lambda: os.kill(os.getpid(), signal.SIGKILL))
    collector, judge = stamped.make(fault=lambda env: fault if env == 4 else None, on_worker_failure="raise")
    with pytest.raises(EnvWorkerError) as caught, collector:
        collect(collector, judge, lambda: False)
    assert "env worker 1" in str(caught.value) and "envs 3..5) was killed by SIGKILL" in str(caught.value)
    assert "env 4 at step 24" in str(caught.value)
    assert " to be stepped: " in str(caught.value) and "4" in str(caught.value).rpartition("stepped:")[2]


def test_the_error_of_a_killed_inference_process_says_what_waited_for_it() -> None:
    collector, judge = stamped.make(on_worker_failure="raise")
    with pytest.raises(InferenceError, match=r"was killed by SIGKILL; \d observations waited for an action"), collector:
        judge.look(collector.next_batch())
        kill(collector, "inference server")
        collect(collector, judge, lambda: False)
