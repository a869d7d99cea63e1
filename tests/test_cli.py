"""``python -m shmcollect``: results, errors in one line, exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shmcollect.cli import POLICIES, main
from shmcollect.policies import KINDS

ENV_MODULE = """
import time
from pathlib import Path

import gymnasium as gym
from gymnasium import spaces

made = 0


class Counter(gym.Env):
    '''Episodes of ten steps; rewards of 1 unless told otherwise.'''

    action_space = spaces.Discrete(3)

    def __init__(self, reward=1.0, failing=None, slow_s=0.0):
        global made
        self.index, made = made, made + 1
        self.reward, self.failing = reward, failing
        self.observation_space = spaces.Dict({"count": spaces.Discrete(11), "note": spaces.Text(9)})
        Path(f"made-{self.index}").touch()
        time.sleep(slow_s)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return {"count": 0, "note": "a"}, {}

    def step(self, action):
        self.count += 1
        if self.count == 5:
            Path(f"stepped-{self.index}").touch()
            if self.index == self.failing:
                raise ValueError("the third\\nwheel\\n\\nfell off")
        return {"count": self.count, "note": "a"}, self.reward, self.count == 10, False, {}


class PlusOne(gym.RewardWrapper):
    def reward(self, reward):
        return reward + 1


def twice(env):
    return gym.wrappers.TransformReward(env, lambda reward: 2 * reward)


gym.register("Counter-v0", entry_point="counting:Counter")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "counting.py").write_text(ENV_MODULE)
    return tmp_path


class Command:
    """One command in a session of its own, so that whatever it leaves can be found."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "shmcollect"),
        stderr: int = subprocess.PIPE,
    ) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 60
        while not list(self.folder.glob(pattern)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"no {pattern} after 60 s"
            time.sleep(0.01)

    def end(self, timeout_s: float = 90) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once nothing of it is left."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout_s)
            assert not self.session(), "processes are left"
        finally:
            for pid in self.session():
                os.kill(pid, signal.SIGKILL)
        assert not self.memory(), "shared memory is left"
        return self.process.returncode, stdout, stderr

    def memory(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"shmcollect.*-{self.pid}-*"))

    def session(self) -> list[int]:
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self.pid:
                    found.append(pid)
            except ProcessLookupError:
                continue
        return found


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    return Command(folder, "run", *arguments).end()


def collect(folder: Path, *arguments: str) -> dict[str, Any]:
    """The results of a run that must succeed without a word."""
    code, stdout, stderr = run(folder, *arguments, "--json", "-")
    assert (code, stderr) == (0, "")
    results: dict[str, Any] = json.loads(stdout)
    return results


COUNTER = ("counting:Counter-v0", "--drop-obs", "note", "--num-envs", "3", "--num-workers", "1")
ENDLESS = (*COUNTER, "--frames", "1_000_000_000")

# ---- results


def test_a_run_reports_a_table_and_writes_the_same_as_json(tmp_path: Path) -> None:
    arguments = ("CartPole-v1", "--frames", "5_000", "--num-envs", "4", "--json", "out.json")
    code, stdout, stderr = run(tmp_path, *arguments)
    assert (code, stderr) == (0, "")
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["frames"] == 5120  # 5_000 in rollouts of 128
    assert results["frames_per_s"] == pytest.approx(results["frames"] / results["seconds"])
    assert 1 <= results["mean_inference_batch"] <= 4
    assert results["episodes"] > 50
    assert results["mean_return"] == results["mean_length"] > 8  # CartPole gives 1 per step
    assert list(results["roles"]) == ["env workers", "inference server", "learner"]
    for shares in results["roles"].values():
        assert shares["worked"] + shares["waited"] == pytest.approx(1)
    table = dict(re.split(r"\s{2,}", line.strip()) for line in stdout.splitlines()[1:] if line.strip())
    assert stdout.splitlines()[0].strip() == "CartPole-v1, 4 envs"
    assert table["frames"] == "5,120"
    assert table["seconds"] == f"{results['seconds']:.2f}"
    assert table["frames/s"] == f"{results['frames_per_s']:,.0f}"
    assert table["episodes"] == str(results["episodes"])
    assert table["mean return"] == f"{results['mean_return']:.2f}"
    assert table["learner"] == "worked {worked:.0%}, waited {waited:.0%}".format(**results["roles"]["learner"])
    assert len(table) == 10


def test_env_kwargs_reach_the_env_and_dropped_entries_do_not_reach_the_policy(folder: Path) -> None:
    results = collect(folder, *COUNTER, "--frames", "300", "--env-kwargs", '{"reward": 2.5}')
    assert (results["mean_return"], results["mean_length"]) == (25, 10)


def test_wrappers_are_applied_in_order_with_env_kwargs(folder: Path) -> None:
    wraps = ("--wrap", "counting:PlusOne", "--wrap", "counting:twice")
    results = collect(folder, *COUNTER, "--frames", "300", *wraps, "--env-kwargs", '{"reward": 3}')
    assert results["mean_return"] == (3 + 1) * 2 * 10


def test_sync_with_a_seed_and_a_random_policy(folder: Path) -> None:
    options = ("--sync", "--seed", "5", "--policy", "random", "--rollout-length", "20", "--frames", "1_200")
    results = collect(folder, *COUNTER, *options)
    assert (results["frames"], results["episodes"]) == (1200, 120)


def test_results_without_an_episode_have_no_mean(folder: Path) -> None:
    results = collect(folder, *COUNTER, "--frames", "6", "--rollout-length", "2")
    assert (results["frames"], results["episodes"], results["mean_return"]) == (6, 0, None)


def test_a_console_script_finds_modules_in_the_current_folder_too(folder: Path, tmp_path_factory: Any) -> None:
    script = tmp_path_factory.mktemp("bin") / "shmcollect"
    script.write_text("import sys; from shmcollect.cli import main; sys.exit(main())")
    code, _, stderr = Command(folder, "run", *COUNTER, "--frames", "30", program=(str(script),)).end()
    assert (code, stderr) == (0, "")


def test_a_terminal_shows_progress(folder: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        command = Command(folder, "run", *COUNTER, "--frames", "6_000", stderr=theirs)
    finally:
        os.close(theirs)
    shown = b"".join(_read(ours)).decode()
    os.close(ours)
    code, stdout, _ = command.end()
    assert code == 0
    assert "of 6,000 frames" in shown and "frames/s" in shown and "left" in shown
    assert "6,0" in stdout and "\x1b" not in stdout


def _read(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # what a terminal without a writer gives
            return
        if not chunk:
            return
        yield chunk


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Nope-v0"], "ENV_ID Nope-v0: Environment `Nope` doesn't exist"),
        (["CartPole-v77"], "ENV_ID CartPole-v77: Environment version `v77` for environment `CartPole` doesn't exist"),
        (["no_module_of_this_name:X-v0"], "importing no_module_of_this_name raised ModuleNotFoundError"),
        (["CartPole-v1", "--env-kwargs", "{bad"], "argument --env-kwargs: expected a JSON object, got '{bad'"),
        (["CartPole-v1", "--env-kwargs", "[1]"], "argument --env-kwargs: expected a JSON object, got '[1]'"),
        (["CartPole-v1", "--num-envs", "0"], "argument --num-envs: expected an integer >= 1, got '0'"),
        (["CartPole-v1", "--frames", "many"], "argument --frames: expected an integer >= 1, got 'many'"),
        (["CartPole-v1", "--seed", "-1"], "argument --seed: expected an integer >= 0, got '-1'"),
        (["CartPole-v1", "--policy", "rnn"], "argument --policy: invalid choice: 'rnn'"),
        (["CartPole-v1", "--wrap", "gymnasium"], "--wrap gymnasium: expected module:function"),
        (["CartPole-v1", "--wrap", "os:nope"], "--wrap os:nope: module 'os' has no attribute 'nope'"),
        (["CartPole-v1", "--wrap", "os:sep"], "--wrap os:sep: expected something to call with an env, got '/'"),
        (["CartPole-v1", "--json", "/no/such/folder/x"], "--json /no/such/folder/x: expected a file in a folder"),
        (["CartPole-v1", "--frames-per-batch", "7", "--rollout-length", "2"], "frames_per_batch=7 is not a multiple"),
        (["CartPole-v1", "--num-envs", "2", "--num-workers", "3"], "num_workers=3 exceeds num_envs=2"),
        ([], "the following arguments are required: ENV_ID"),
    ],
)
def test_arguments_that_cannot_work_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["run", *arguments])
    except SystemExit as exit:  # how argparse ends
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("shmcollect: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_an_unknown_env_is_one_line_and_exit_code_2_of_the_process(tmp_path: Path) -> None:
    code, stdout, stderr = run(tmp_path, "Nope-v0")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)


def test_an_env_that_raises_is_one_line_that_names_it(folder: Path) -> None:
    code, stdout, stderr = run(folder, *ENDLESS, "--env-kwargs", '{"failing": 2}')
    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert re.search(r"env worker 0 .*env 2 raised ValueError in step at step 4: the third wheel", stderr)


def test_the_traceback_of_an_env_is_shown_when_asked_for(folder: Path) -> None:
    code, _, stderr = run(folder, *ENDLESS, "--env-kwargs", '{"failing": 2}', "--traceback")
    assert code == 1
    assert 'raise ValueError("the third' in stderr and "fell off" in stderr
    assert stderr.splitlines()[-1].startswith("shmcollect: env worker 0")


def test_an_env_that_cannot_be_made_is_one_line_and_exit_code_1(folder: Path) -> None:
    code, stdout, stderr = run(folder, *COUNTER, "--env-kwargs", '{"colour": "red"}')
    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert re.search(r"env 0 raised TypeError in make.*colour", stderr)


def test_a_policy_that_does_not_fit_is_one_line_and_exit_code_1(folder: Path) -> None:
    code, stdout, stderr = run(folder, *COUNTER, "--policy", "cnn")
    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert "policy 'cnn': expected an image" in stderr


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_one_line_and_nothing_left(folder: Path, number: signal.Signals) -> None:
    command = Command(folder, "run", *ENDLESS)
    command.wait_for("stepped-2")
    assert len(command.memory()) == 1 and len(command.session()) == 3
    sent_s = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(command.pid, number)  # a terminal sends Ctrl-C to every process of the run
    else:
        os.kill(command.pid, number)
    code, stdout, stderr = command.end(timeout_s=20)
    assert code == 128 + number
    assert (stdout, stderr) == ("", f"shmcollect: interrupted by {number.name}\n")
    assert time.monotonic() - sent_s < 10


def test_an_impatient_ctrl_c_while_starting_leaves_nothing(folder: Path) -> None:
    command = Command(folder, "run", *ENDLESS, "--env-kwargs", '{"slow_s": 60}')
    command.wait_for("made-0")
    for _ in range(4):
        os.killpg(command.pid, signal.SIGINT)
        time.sleep(0.05)
    code, stdout, stderr = command.end(timeout_s=30)
    assert (code, stdout) == (130, "")
    *warnings, last = stderr.splitlines()
    assert all(line.startswith("shmcollect: warning: env worker 0") for line in warnings)
    assert last == "shmcollect: interrupted by SIGINT"


# ---- help


def test_the_policies_to_choose_from_are_all_there_are() -> None:
    assert POLICIES == KINDS


def test_help_is_quick_because_it_imports_neither_torch_nor_gymnasium() -> None:
    code = (
        "import sys; from shmcollect.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit as exit: print(exit.code, {'torch', 'numpy', 'gymnasium', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 set()"
    assert all(option in result.stdout for option in ("--num-envs", "--wrap", "--json", "rounded up", "examples:"))
