"""Scripts as users write them: at top level without a guard, from stdin, interrupted, killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import gymnasium as gym, torch
from shmcollect import AsyncBatchedCollector

class Lonely(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}

collector = AsyncBatchedCollector(Lonely, lambda obs: (obs[:, 0] > 0).long(), num_envs=4, frames_per_batch=64)
print("frames", collector.next_batch().num_frames, collector.name, flush=True)
"""


def run(script: str, *arguments: str, stdin: bool = False, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments, "-"] if stdin else [sys.executable, *arguments, "-c", script]
    return subprocess.run(
        command, input=script if stdin else None, capture_output=True, text=True, timeout=60, cwd=cwd, check=False
    )


def nothing_of(name: str) -> bool:
    return not Path(f"/dev/shm/shmcollect.{name}").exists()


def test_the_readmes_example_runs_as_written(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert "frames" in result.stdout
    assert not result.stderr


@pytest.mark.parametrize("stdin", [False, True])
def test_classes_and_lambdas_of_a_script_without_a_guard_work(stdin: bool) -> None:
    result = run(SCRIPT + "collector.close()", stdin=stdin)
    assert result.stdout.startswith("frames 64"), result.stderr
    assert (result.returncode, result.stderr) == (0, "")


def test_a_script_that_forgets_to_close_ends_with_its_own_exit_code() -> None:
    result = run(SCRIPT + "import sys; sys.exit(3)")
    assert (result.returncode, result.stderr) == (3, "")
    assert nothing_of(result.stdout.split()[-1])


def test_a_script_that_raises_shows_its_own_error_alone() -> None:
    result = run(SCRIPT + "raise KeyError('mine')")
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1 and "KeyError: 'mine'" in result.stderr
    assert nothing_of(result.stdout.split()[-1])


def start(script: str) -> tuple[subprocess.Popen[str], str, list[psutil.Process]]:
    """Starts a script and waits for its first batch; returns it with its run's name and its children."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    name = process.stdout.readline().split()[-1]
    return process, name, psutil.Process(process.pid).children(recursive=True)


def test_ctrl_c_is_one_keyboard_interrupt_and_leaves_nothing() -> None:
    process, name, children = start(SCRIPT + "\nfor batch in collector: pass")
    assert children
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert process.returncode == -signal.SIGINT
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert nothing_of(name)


BUSY = SCRIPT.replace("return self.observation_space.sample(), 1.0", "self.hang(); return None, 1.0").replace(
    "    def step", "    def hang(self):\n        import ctypes; ctypes.PyDLL(None).sleep(1000)\n    def step"
)


@pytest.mark.parametrize("kind", ["asleep", "busy", "holding the GIL"])
def test_children_end_within_two_seconds_of_their_killed_parent(kind: str) -> None:
    script = SCRIPT + ("\nimport time; time.sleep(100)" if kind == "asleep" else "\nfor batch in collector: pass")
    if kind == "holding the GIL":
        script = BUSY.replace("print(", "print('name', collector.name, flush=True)\nprint(")
    process, name, children = start(script)
    assert len(children) >= 2
    if kind == "holding the GIL":
        time.sleep(0.5)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=2)
    assert not alive, f"{alive} outlived their parent"
    reclaim = f"from shmcollect.segment import _reclaim, lock\nwith lock(): _reclaim({name!r})"
    assert run(reclaim).returncode == 0
    assert nothing_of(name)


SLOW_TO_CLOSE = SCRIPT.replace(
    "    def step", "    def close(self):\n        import time; time.sleep(3)\n    def step"
).replace("num_envs=4", "num_envs=2, num_workers=2")


def test_a_second_ctrl_c_while_closing_ends_at_once_with_one_keyboard_interrupt() -> None:
    process, name, children = start(SLOW_TO_CLOSE + "\nwith collector:\n    for batch in collector: pass")
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    interrupted_s = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - interrupted_s < 2
    assert errors.count("Traceback") == 1 and "KeyboardInterrupt" in errors.rstrip().splitlines()[-1], errors
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert nothing_of(name)


def test_a_ctrl_c_while_closing_is_raised_once_everything_is_gone() -> None:
    ending = """
try:
    collector.close()
except KeyboardInterrupt:
    import psutil
    print(len(psutil.Process().children()))
"""
    process, name, children = start(SLOW_TO_CLOSE + ending)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (output.strip(), process.returncode) == ("0", 0), errors
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert nothing_of(name)


def test_sigterm_is_a_clean_exit_that_closes_every_env(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "    def step",
        f"    def close(self):\n        import os; open('{tmp_path}/' + str(id(self)), 'w').close()\n    def step",
    )
    process, name, children = start(script + "\nfor batch in collector: pass")
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (143, "")
    assert len(list(tmp_path.iterdir())) == 4
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert nothing_of(name)


def test_a_programs_own_handler_of_sigterm_stays_and_after_close_the_default_is_back() -> None:
    script = """
import signal
def mine(*_): print("mine", flush=True)
signal.signal(signal.SIGTERM, mine)
"""
    check = """
import os
os.kill(os.getpid(), signal.SIGTERM)
collector.close()
assert signal.getsignal(signal.SIGTERM) is mine
signal.signal(signal.SIGTERM, signal.SIG_DFL)
AsyncBatchedCollector(Lonely, lambda obs: (obs[:, 0] > 0).long(), num_envs=1, frames_per_batch=1).close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    result = run(script + SCRIPT + check)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("mine") == 1


def test_a_run_survives_the_end_of_its_terminal_under_nohup() -> None:
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SCRIPT
    process, _, _ = start(script + "\nfor n, batch in zip(range(50), collector): pass\ncollector.close()")
    os.killpg(process.pid, signal.SIGHUP)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


DESCRIPTORS = """
import os, resource
import numpy as np, psutil, torch
from shmcollect import AsyncBatchedCollector, ConfigError
from shmcollect.supervisor import check_descriptors

def zeros(obs):
    return torch.zeros(len(obs), dtype=torch.int64)

def taken():
    return len(os.listdir("/proc/self/fd"))

def run(num_envs):
    with AsyncBatchedCollector(
        "CartPole-v1", zeros, num_envs=num_envs, num_workers=2, rollout_length=4, frames_per_batch=4 * num_envs
    ) as collector:
        collector.next_batch()
        return taken(), [len(os.listdir(f"/proc/{child.pid}/fd")) for child in psutil.Process().children()]

before = taken()
few = run(2)
assert run(64) == few, "descriptors grow with envs"
assert few[0] - before <= 2 * 3 + 2, few
assert max(few[1]) <= 10, few
assert taken() == before

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for enough in range(before, before + 200):
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
    try:
        check_descriptors(3)
    except ConfigError:
        continue
    break
run(2)
resource.setrlimit(resource.RLIMIT_NOFILE, (enough - 1, hard))
try:
    run(2)
except ConfigError as error:
    print(error)
assert taken() == before and not psutil.Process().children()
"""


def test_descriptors_are_a_handful_per_child_and_too_few_are_told_before_anything_starts() -> None:
    result = run(DESCRIPTORS)
    assert result.returncode == 0, result.stderr
    assert re.search(r"3 processes need 18 file descriptors, and \d+ of the \d+ .*\(ulimit -n\)", result.stdout)
