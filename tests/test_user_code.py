"""Envs and learners that do what user code does on its worse days: every row stays right, and the end comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
import pytest
import stamped
import torch
from gymnasium import spaces
from stamped import Stamped

from shmcollect import AsyncBatchedCollector, EnvWorkerError

cloudpickle.register_pickle_by_value(stamped)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def collect(env_class: Any, batches: int = 20, **options: Any) -> None:
    """Collects from six such envs and judges what comes; nothing may fail."""
    collector, judge = stamped.make(env_class=env_class, on_worker_failure="raise", **options)
    with collector:
        for _ in range(batches):
            judge.look(collector.next_batch(timeout=30))
    assert judge.rows == batches * 24


# ---- envs


def test_an_env_may_print_and_log_as_much_as_it_likes(capfd: pytest.CaptureFixture[str]) -> None:
    class Talkative(Stamped):
        def step(self, action: Any) -> Any:
            import logging

            print("said", "x" * 1000)
            logging.getLogger("env").error("logged")
            return super().step(action)

    collect(Talkative)
    out, err = capfd.readouterr()
    assert out.count("said") >= 480 and err.count("logged") >= 480, "it reaches the caller's own streams"


def test_an_env_without_usable_streams_works() -> None:
    class Silenced(Stamped):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            sys.stdout = sys.stderr = None  # as under pythonw and some launchers
            os.closerange(1, 3)

    collect(Silenced)


def test_an_env_may_reuse_and_change_everything_it_has_handed_out() -> None:
    class Recycling(Stamped):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.buffer, self.info = np.zeros(stamped.WIDTH, np.int64), {}

        def _obs(self) -> Any:
            self.buffer[:] = super()._obs()
            return self.buffer

        def step(self, action: Any) -> Any:
            self.buffer[:] = -1  # what it returned last
            self.info.clear()
            obs, *outcome, _ = super().step(action)
            self.info["steps"] = self.steps
            return obs, *outcome, self.info

    collect(Recycling)


def test_an_env_may_start_threads_that_never_end_and_its_run_closes_all_the_same() -> None:
    class Threaded(Stamped):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            threading.Thread(target=threading.Event().wait, daemon=False).start()

    collector, judge = stamped.make(env_class=Threaded)
    for _ in range(5):
        judge.look(collector.next_batch(timeout=30))
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="worker . did not end in time.*a thread or an exit handler went on"):
        collector.close()
    assert time.monotonic() - began < 8


def test_an_env_may_fork_processes_that_outlive_it() -> None:
    class Parent(Stamped):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.child = subprocess.Popen(["sleep", "600"])

        def close(self) -> None:
            self.child.kill()
            self.child.wait()

    collect(Parent)
    assert not [each for each in psutil.Process().children(recursive=True) if "sleep" in each.name()]


def test_an_env_that_changes_signal_handlers_is_closed_and_killed_like_any_other() -> None:
    class Deaf(Stamped):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)

    collect(Deaf)


def test_warnings_turned_into_errors_by_an_env_are_errors_of_its_own_only() -> None:
    class Strict(Stamped):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            warnings.simplefilter("error")

    class Warning_(Strict):
        def step(self, action: Any) -> Any:
            if self.steps == 3:
                warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
            return super().step(action)

    collect(Strict)
    with pytest.raises(EnvWorkerError, match="raised DeprecationWarning in step at step 3: deprecated"):
        collect(Warning_)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(0), GeneratorExit(), ExceptionGroup("two", [OSError()])]
)
def test_whatever_an_env_raises_is_a_failure_of_its_worker(error: BaseException) -> None:
    class Raising(Stamped):
        def step(self, action: Any) -> Any:
            if self.steps == 3:
                raise error
            return super().step(action)

    with pytest.raises(EnvWorkerError, match=f"raised {type(error).__name__} in step at step 3"):
        collect(Raising)


def test_nan_is_passed_on_as_it_is() -> None:
    class Nan(gym.Env):
        observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.array([np.nan, 1.0]), {}

        def step(self, action: Any) -> Any:
            return np.array([np.inf, np.nan]), float("nan"), False, False, {}

    def policy(obs: torch.Tensor) -> torch.Tensor:
        return obs[:, 0].isnan().long()

    with AsyncBatchedCollector(Nan, policy, num_envs=2, frames_per_batch=16, sync=True) as collector:
        batch = collector.next_batch()
    assert batch.reward.isnan().all() and batch.obs[:, 1:, 1].isnan().all() and batch.obs[:, 1:, 0].isinf().all()
    assert (batch.action[:, 0] == 1).all() and (batch.action[:, 1:] == 0).all()


# ---- learners


def own_bytes(process: psutil.Process) -> int:
    """Anonymous memory: unlike pages of files, nobody else's end makes it this process's own."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


@pytest.mark.parametrize("sync", [False, True])
def test_a_learner_that_stalls_finds_everybody_at_rest_and_goes_on(sync: bool) -> None:
    collector, judge = stamped.make(sync=sync)
    with collector:
        judge.look(collector.next_batch(timeout=30))
        time.sleep(1.0)  # until all rings are full
        children = [psutil.Process(child.process.pid) for child in collector._supervisor.children]
        before = collector.stats(), [own_bytes(each) for each in children]
        time.sleep(2.0)
        after = collector.stats(), [own_bytes(each) for each in children]
        assert [w["steps"] for w in before[0]["workers"]] == [w["steps"] for w in after[0]["workers"]]
        assert all(now <= then + (1 << 18) for then, now in zip(before[1], after[1], strict=True))
        for _ in range(20):
            judge.look(collector.next_batch(timeout=30))


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("test_scripts.py").read_text().split('SCRIPT = """')[1].split('"""')[0]
    return subprocess.run(
        [sys.executable, "-c", script.partition("collector =")[0] + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_cell_of_a_notebook_collects_and_may_be_run_again() -> None:
    result = run_script("""
        import asyncio, io, sys

        out, sys.stdout = sys.stdout, io.StringIO()  # a notebook's streams have no descriptor
        cell = '''
        class InACell(Lonely):
            pass
        with AsyncBatchedCollector(InACell, lambda obs: (obs[:, 0] > 0).long(), num_envs=4, frames_per_batch=64) as c:
            print(c.next_batch().num_frames)
        '''
        import textwrap
        async def kernel():
            for _ in range(2):
                exec(compile(textwrap.dedent(cell), "<cell>", "exec"), globals())
        asyncio.run(kernel())
        out.write(sys.stdout.getvalue())
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "64\n64\n", "")


def test_an_interpreter_that_exits_while_a_thread_collects_leaves_nothing() -> None:
    result = run_script("""
        import threading, time
        def collect():
            collector = AsyncBatchedCollector(Lonely, lambda obs: obs[:, 0].long(), num_envs=4, frames_per_batch=64)
            print(collector.name, flush=True)
            while True:
                collector.next_batch()
        threading.Thread(target=collect, daemon=True).start()
        time.sleep(3)
    """)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("Traceback") <= 1 and "Error:" not in result.stderr.replace("ClosedError:", "")
    name = result.stdout.strip()
    assert name and not Path(f"/dev/shm/shmcollect.{name}").exists()
    assert not [each for each in psutil.process_iter(["cmdline"]) if name in " ".join(each.info["cmdline"] or ())]
