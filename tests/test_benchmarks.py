import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import counters, machine, report, throughput  # noqa: E402
from benchmarks.ideal import PlainLoop  # noqa: E402
from benchmarks.measuring import Measurement, Task  # noqa: E402
from benchmarks.policies import make_policy  # noqa: E402
from benchmarks.rows import Rows  # noqa: E402
from benchmarks.vector import VectorLoop  # noqa: E402
from benchmarks.workloads import EPISODE_STEPS, WORKLOADS, make_factories  # noqa: E402


@pytest.fixture
def in_the_root(monkeypatch):
    """Contenders are started with `python -m`, which looks in the current folder."""
    monkeypatch.chdir(ROOT)


def task(tmp_path, contender, **changes):
    plain = Task(
        contender=contender,
        workload="null",
        num_envs=3,
        num_workers=None,
        workers_per_process=None,
        seconds=0.05,
        warmup=0.0,
        rollout_length=8,
        min_batch_size=None,
        max_batch_size=None,
        seed=0,
        counters_path=str(tmp_path / "counters"),
    )
    return replace(plain, **changes)


def measurement(**changes):
    plain = Measurement(
        delivered=[10, 10],
        surplus=0,
        frames=10,
        seconds=1.0,
        cpu_seconds=1.0,
        mean_inference_batch=2.0,
        latency_p50_s=None,
        latency_p99_s=None,
        memory_bytes=1,
        first_batch_s=0.1,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("contender", ["ideal", "sync", "async", "ours"])
def test_a_contender_delivers_what_the_envs_counted(tmp_path, in_the_root, contender):
    result = throughput.run_once(task(tmp_path, contender), repeat=0)

    assert result["failure"] is None
    assert result["status"] == "ok"
    assert result["frames"] >= 3 * 8
    assert result["delivered"] <= result["counted"] <= result["delivered"] + 3 * result["surplus"]
    assert contender == "ours" or result["surplus"] == 0
    assert result["frames_per_s"] == result["frames"] / result["seconds"]
    assert result["seconds"] >= 0.05
    assert result["cpu_seconds"] > 0
    assert result["memory_bytes"] > 10_000_000
    assert 0 < result["mean_inference_batch"] <= 3


def test_a_contender_that_fails_is_a_failed_result_with_its_own_error(tmp_path, in_the_root):
    result = throughput.run_once(task(tmp_path, "sync", workload="no such workload"), repeat=4)

    assert result["status"] == "failed"
    assert "exit status 1" in result["failure"]
    assert "KeyError: 'no such workload'" in result["failure"]
    assert result["repeat"] == 4
    assert "frames_per_s" not in result


def test_a_contender_that_does_not_end_is_killed_and_reported(tmp_path, in_the_root, monkeypatch):
    monkeypatch.setattr(throughput, "STARTING_SECONDS", -599)

    result = throughput.run_once(task(tmp_path, "sync", seconds=200.0), repeat=0)

    assert result["status"] == "failed"
    assert "not finished after 1 s" in result["failure"]


@pytest.mark.parametrize(
    ("surplus", "counted", "accepted"),
    [(0, [10, 10], True), (0, [10, 9], False), (0, [11, 10], False), (5, [15, 10], True), (5, [16, 10], False)],
)
def test_counts_agree_only_between_delivered_and_delivered_plus_surplus(surplus, counted, accepted):
    failure = throughput.check_counts(measurement(surplus=surplus), np.array(counted))

    assert (failure is None) == accepted


def test_a_false_claim_is_a_failed_result(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "run_contender", lambda task: measurement(delivered=[8, 8, 8]))

    result = throughput.run_once(task(tmp_path, "sync"), repeat=0)

    assert result["status"] == "failed"
    assert result["failure"].startswith("env 0 counted 0 steps, expected 8 (delivered) to 8")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_an_env_counts_its_steps_and_not_its_resets(tmp_path, workload):
    path = str(tmp_path / "counters")
    counters.create(path, 2)
    factory = pickle.loads(pickle.dumps(make_factories(workload, 2, path)[1]))
    env = factory()
    env.reset(seed=1)
    for _ in range(12):
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert env.observation_space.contains(obs)
        assert (obs.shape, obs.dtype) == (WORKLOADS[workload].shape, WORKLOADS[workload].dtype)
        if terminated or truncated:
            env.reset()
    env.close()

    steps, step_ns = counters.read(path)

    assert steps.tolist() == [0, 12]
    assert (step_ns[1] >= 12_000_000) == (workload == "lag")
    assert env.action_space.n == WORKLOADS[workload].num_actions


def test_spinning_takes_cpu_time_and_no_more_than_it_should(tmp_path):
    path = str(tmp_path / "counters")
    counters.create(path, 1)
    (factory,) = make_factories("spin1000", 1, path)
    env = factory()
    own = []
    for _ in range(5):
        begin = time.thread_time_ns()
        env.step(np.int64(0))
        own.append(time.thread_time_ns() - begin)

    assert 1_000_000 <= min(own) < 1_500_000


def test_the_workloads_import_no_torch():
    code = "import sys, benchmarks.workloads; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_policies_answer_with_valid_actions_and_their_log_probability():
    for workload in WORKLOADS.values():
        policy = make_policy(workload)
        obs = torch.from_numpy(np.zeros((500, *workload.shape), workload.dtype))
        with torch.inference_mode():
            action, extras = policy(obs)
        frequencies = torch.bincount(action, minlength=workload.num_actions) / 500
        probabilities = torch.zeros(workload.num_actions).scatter(0, action, extras["log_prob"].exp())
        assert action.dtype == torch.int64
        assert torch.allclose(frequencies, probabilities, atol=0.12)
        assert probabilities.sum().item() == pytest.approx(1, abs=1e-4)


def collected(loop, rows, passes):
    """Copies of the rows of several passes, one after the other: field -> [passes * T, K, ...]."""
    fields = ("obs", "action", "reward", "terminated", "truncated", "episode_start", "final_obs", "log_prob")
    blocks = {name: [] for name in fields}
    with torch.inference_mode():
        for _ in range(passes):
            loop.collect()
            for name in fields:
                blocks[name].append(getattr(rows, name)[: rows.length].copy())
    return {name: np.concatenate(block) for name, block in blocks.items()}


def loops(tmp_path, num_envs, length):
    """The ideal's loop and a vector env's, over envs and policies that behave alike."""
    workload = WORKLOADS["cartpole"]
    paths = [str(tmp_path / name) for name in ("plain", "vector")]
    for path in paths:
        counters.create(path, num_envs)
    both = [Rows(length, num_envs, workload.shape, workload.dtype) for _ in paths]
    envs = [factory() for factory in make_factories("cartpole", num_envs, paths[0])]
    vector = gym.vector.SyncVectorEnv(
        make_factories("cartpole", num_envs, paths[1]), copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    plain_loop = PlainLoop(envs, make_policy(workload), both[0], seed=7)
    vector_loop = VectorLoop(vector, make_policy(workload), both[1], seed=7)
    return (plain_loop, both[0]), (vector_loop, both[1])


def test_the_ideal_and_a_vector_env_store_the_very_same_rows(tmp_path):
    results = []
    for loop, rows in loops(tmp_path, num_envs=4, length=16):
        torch.manual_seed(3)
        results.append(collected(loop, rows, passes=6))

    plain, vector = results
    ended = plain["terminated"] | plain["truncated"]
    assert ended.sum() > 5
    for name in plain:
        mask = ended if name == "final_obs" else np.ones_like(ended)
        assert np.array_equal(plain[name][mask], vector[name][mask]), name


def test_the_ideal_stores_true_rows(tmp_path):
    (loop, rows), _ = loops(tmp_path, num_envs=2, length=16)
    plain = collected(loop, rows, passes=6)
    ended = plain["terminated"] | plain["truncated"]

    for env_index in range(2):
        replay = gym.make("CartPole-v1")
        obs, _ = replay.reset(seed=7 + env_index)
        for t, action in enumerate(plain["action"][:, env_index]):
            assert np.array_equal(plain["obs"][t, env_index], obs)
            assert plain["episode_start"][t, env_index] == (t == 0 or ended[t - 1, env_index])
            obs, reward, terminated, truncated, _ = replay.step(action)
            assert plain["reward"][t, env_index] == reward
            assert (plain["terminated"][t, env_index], plain["truncated"][t, env_index]) == (terminated, truncated)
            if terminated or truncated:
                assert np.array_equal(plain["final_obs"][t, env_index], obs)
                obs, _ = replay.reset()


def test_null_episodes_are_cut_after_200_steps(tmp_path):
    path = str(tmp_path / "counters")
    counters.create(path, 1)
    env = make_factories("null", 1, path)[0]()
    env.reset()

    flags = [env.step(np.int64(0))[2:4] for _ in range(EPISODE_STEPS)]

    assert flags == [(False, False)] * (EPISODE_STEPS - 1) + [(False, True)]


def test_usable_cores_follow_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def record(plot=None):
    settings = {
        "workload": "null",
        "num_envs": 4,
        "num_workers": None,
        "workers_per_process": None,
        "min_batch_size": None,
        "max_batch_size": None,
        "repeats": 2,
        "seconds": 1.0,
        "contenders": ["ours", "ideal", "async"],
    }
    rates = {("ours", 0): 80, ("ideal", 0): 100, ("ours", 1): 45, ("ideal", 1): 50, ("async", 1): 9}
    empty = dict.fromkeys(report.METRICS)
    results = [
        {"contender": name, "repeat": repeat, "status": "ok"} | empty | {"frames_per_s": rate}
        for (name, repeat), rate in rates.items()
    ]
    results.append({"contender": "async", "repeat": 0, "status": "failed", "failure": "it broke"})
    return {
        "machine": machine.describe(),
        "settings": settings,
        "summary": report.summarize(settings, results),
        "results": results,
        "plot": plot,
    }


def test_a_ratio_is_taken_within_a_repeat_and_a_failed_run_enters_none():
    summary = record()["summary"]

    assert summary["ours_over"]["ideal"]["median"] == pytest.approx(0.85)
    assert summary["ours_over"]["async"] == {"median": 5.0, "min": 5.0, "max": 5.0}
    assert summary["ours_over"]["step_time"] is None
    assert summary["contenders"]["ideal"]["frames_per_s"] == {"median": 75, "min": 50, "max": 100}
    assert [summary["contenders"][name]["failed"] for name in ("ours", "ideal", "async")] == [0, 0, 1]


def test_a_report_replaces_what_stands_between_the_markers(tmp_path):
    results, readme = tmp_path / "results.json", tmp_path / "README.md"
    results.write_text(json.dumps(record(plot="null.png")))
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")

    for _ in range(2):
        report.main([str(results), "--write", str(readme), "--details"])

    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n| workload |")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert "old" not in text
    assert (
        "| null | 4 | 62 (45 .. 80) | 75 (50 .. 100) | 9 (9 .. 9) | 0.85 (0.80 .. 0.90) | 5.00 (5.00 .. 5.00) |" in text
    )
    assert "](null.png)" in text


def test_a_report_refuses_a_file_without_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n")

    with pytest.raises(ValueError, match="expected the markers"):
        report.write(readme, [record()], with_details=False)


def test_a_plot_is_a_small_png(tmp_path):
    pytest.importorskip("matplotlib")
    results, path = tmp_path / "results.json", tmp_path / "plot.png"
    results.write_text(json.dumps(record()))

    subprocess.run([sys.executable, "-m", "benchmarks.plot", str(results), str(path)], cwd=ROOT, check=True)

    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 200_000


def test_the_command_writes_json_and_exits_1_when_a_run_failed(tmp_path, in_the_root, monkeypatch, capsys):
    def run(task):
        if task.contender == "async":
            raise throughput.ContenderError("it broke")
        counted = np.memmap(task.counters_path, np.int64, "r+")
        counted[:: counters.WORDS_PER_LINE] = 10
        return measurement()

    monkeypatch.setattr(throughput, "run_contender", run)
    command = ["--workload", "null", "--num-envs", "2", "--repeats", "2", "--json", str(tmp_path / "results.json")]

    assert throughput.main([*command, "--against", "ideal"]) == 0
    assert throughput.main([*command, "--against", "ideal,async"]) == 1

    written = json.loads((tmp_path / "results.json").read_text())
    assert [result["contender"] for result in written["results"]] == ["ours", "ideal", "async"] * 2
    assert written["results"][2]["failure"] == "it broke"
    assert "FAILED: it broke" in capsys.readouterr().err
    assert set(asdict(measurement())) - {"delivered"} <= set(written["results"][0])
