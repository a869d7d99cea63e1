"""AsyncBatchedCollector: its promises to the caller, good and bad."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from plain_loop import CASES, Counter, act_counter
from probe_env import Probe

from shmcollect import (
    AsyncBatchedCollector,
    BusyError,
    ClosedError,
    ConfigError,
    EnvWorkerError,
    ExhaustedError,
    InferenceError,
    SpecError,
)


def make(factory: Any = Counter, policy: Any = act_counter, **kwargs: Any) -> AsyncBatchedCollector:
    options = {"num_envs": 4, "num_workers": 2, "frames_per_batch": 32, "seed": 5} | kwargs
    return AsyncBatchedCollector(factory, policy, **options)


def zeros(obs: Any) -> torch.Tensor:
    return torch.zeros(len(obs), dtype=torch.int64)


def test_env_workers_import_no_torch_use_one_thread_and_make_the_envs_there() -> None:
    before = torch.get_num_threads()
    with make(Probe, zeros) as collector:
        workers = {child.process.pid for child in collector._supervisor.children if child.kind == "env worker"}
        first: dict[int, list[float]] = {}  # of each env, its first observation: a batch may hold one env twice
        while len(first) < 4:
            batch = collector.next_batch()
            for env, obs in zip(batch.env_index.tolist(), batch.obs[:, 0].tolist(), strict=True):
                first.setdefault(env, obs)
            assert set(batch.obs[..., 0].int().flatten().tolist()) <= workers
            assert not batch.obs[..., 1].any(), "torch was imported in a worker"
            assert (batch.obs[..., 2] == 1).all()
        pid, _, _, seed, *draws, _, _ = (
            dict(zip(first, leaf, strict=True)) for leaf in zip(*first.values(), strict=True)
        )
        assert set(pid.values()) == workers
        assert seed == {env: float(seed) for env, seed in enumerate(collector.env_seeds)}
        assert all(len(set(leaf.values())) == 4 for leaf in draws)
    assert torch.get_num_threads() == before


def test_workers_that_share_a_process_step_their_envs_at_the_same_time() -> None:
    def together() -> Any:
        import threading

        barrier = threading.Barrier(4, timeout=30)

        class Together(Probe):
            def step(self, action: Any) -> Any:
                if self.steps == 0:
                    barrier.wait()  # passes only if all four are in a step
                return super().step(action)

        return Together

    class Lazily:
        """Makes the class, with its barrier, once per process."""

        made: Any = None

        def __call__(self) -> Any:
            if Lazily.made is None:
                Lazily.made = together()
            return Lazily.made()

    with make(Lazily(), zeros, num_workers=4, workers_per_process=4) as collector:
        obs = collector.next_batch().obs
        assert len(collector._supervisor.children) == 2
        assert len(set(obs[..., 0].flatten().tolist())) == 1, "one process"
        assert [worker["steps"] > 0 for worker in collector.stats()["workers"]] == [True] * 4


def test_a_failure_in_one_thread_of_a_process_names_its_env_and_closes_all(tmp_path: Path) -> None:
    class Fails(Counter):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def step(self, action: Any) -> Any:
            if self.index == 2 and self.steps > 20:
                raise ArithmeticError("two is odd")
            return super().step(action)

        def close(self) -> None:
            (tmp_path / str(self.index)).touch()

    factories = [partial(Fails, i) for i in range(4)]
    collector = make(factories, num_envs=None, num_workers=4, workers_per_process=2)
    with pytest.raises(EnvWorkerError, match="two is odd") as raised:
        for _ in collector:
            pass
    assert raised.value.details["env_index"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_global_generators_and_actions_are_the_same_from_run_to_run() -> None:
    def noisy(obs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        noise = torch.rand(len(obs), 3)
        return (noise[:, 0] > 0.5).long(), {"noise": noise}

    def run() -> list[tuple[torch.Tensor, ...]]:
        options = {"sync": True, "min_batch_size": 4, "server_timeout": None}
        with make(Probe, noisy, **options) as collector:
            batches = [collector.next_batch() for _ in range(3)]
        return [(batch.obs[..., 4:6], batch.action, batch.extras["noise"]) for batch in batches]

    for first, second in zip(run(), run(), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_inference_waits_for_a_worker_that_has_joined_but_is_late_for_its_first_step() -> None:
    def late() -> Counter:
        import time

        from shmcollect import env_worker

        env_worker._let_inference_first = lambda: time.sleep(0.4)
        return Counter()

    factories = [Counter, Counter, late, late]
    with make(factories, sync=True, min_batch_size=4, server_timeout=None) as collector:
        collector.next_batch()
        assert collector.stats()["mean_inference_batch"] == 4


def test_seeds_do_not_depend_on_the_number_of_workers() -> None:
    seeds = []
    for workers in (1, 3):
        with make(num_workers=workers, num_envs=5, frames_per_batch=10) as collector:
            seeds.append(collector.env_seeds)
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 5


class CountsSteps(Counter):
    """Writes how often it was stepped, and that it was closed, into a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def close(self):
        (self.folder / f"{os.getpid()}-{id(self)}").write_text(str(self.steps))


@pytest.mark.parametrize("sync", [False, True])
def test_a_frame_is_counted_once_and_every_env_is_closed(sync: bool, tmp_path: Path) -> None:
    with make(lambda: CountsSteps(tmp_path), total_frames=203, sync=sync) as collector:
        batches = list(collector)
        with pytest.raises(ExhaustedError):
            collector.next_batch()
    sizes = [len(batch) for batch in batches]
    assert sizes == [4] * 6 + [2], "26 rollouts of 8 steps: the last batch has fewer, of the same length"
    assert all(batch.reward.shape[1] == 8 for batch in batches)
    steps = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(steps) == 4 and sum(steps) == sum(batch.num_frames for batch in batches) == 208


def test_kept_batches_stay_unchanged_while_the_rings_turn() -> None:
    with make() as collector:
        kept = [collector.next_batch() for _ in range(3)]
        before = [batch.obs.clone() for batch in kept]
        for _ in range(20):
            collector.next_batch()
    assert all(torch.equal(batch.obs, obs) for batch, obs in zip(kept, before, strict=True))


def test_views_in_place_are_still_right_after_close() -> None:
    with make(sync=True, zero_copy=True) as collector:
        batch = collector.next_batch()
        before = batch.obs.clone()
    gc.collect()
    assert torch.equal(batch.obs, before)
    batch.obs.add_(1)  # still memory of ours


def test_an_idle_run_costs_next_to_no_cpu() -> None:
    with make() as collector:
        collector.next_batch()
        time.sleep(0.5)  # the rings fill up
        children = [psutil.Process(child.process.pid) for child in collector._supervisor.children]
        before = sum(sum(child.cpu_times()[:2]) for child in children)
        time.sleep(3.0)
        used_s = sum(sum(child.cpu_times()[:2]) for child in children) - before
    assert used_s < 3 * 0.1, f"{used_s} CPU seconds in 3 s"


def test_nothing_is_stepped_before_the_first_batch_is_asked_for() -> None:
    with make() as collector:
        time.sleep(0.3)
        assert sum(worker["steps"] for worker in collector.stats()["workers"]) == 0


def test_a_batch_that_is_late_is_a_timeout_and_nothing_is_lost() -> None:
    class Slow(Counter):
        def step(self, action):
            time.sleep(0.01)
            return super().step(action)

    with make(Slow) as collector:
        assert collector.try_next_batch() is None
        with pytest.raises(TimeoutError, match="32 frames"):
            collector.next_batch(timeout=0.02)
        batches = [collector.next_batch() for _ in range(3)]
    for env in range(4):
        sequence = torch.cat([b.sequence[b.env_index == env].flatten() for b in batches])
        assert sequence.tolist() == list(range(len(sequence)))


def test_iterating_again_continues() -> None:
    with make(sync=True) as collector:
        first = next(iter(collector))
        second = next(iter(collector))
    assert (second.sequence == first.sequence + 8).all()


def test_pause_rests_and_resume_goes_on() -> None:
    with make() as collector:
        collector.next_batch()
        collector.pause()
        collector.pause()
        time.sleep(0.1)
        rows = collector.stats()["inference"]["rows"]
        time.sleep(0.3)
        assert collector.stats()["inference"]["rows"] == rows
        collector.resume()
        for _ in range(5):
            collector.next_batch()


def test_reset_ends_every_episode_with_a_real_row() -> None:
    class Endless(Counter):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, False, False, {}

    with make(Endless, sync=True, frames_per_batch=16) as collector:
        first = collector.next_batch()
        collector.reset()
        second = collector.next_batch()
        third = collector.next_batch()
    assert not first.truncated.any() and not third.truncated.any()
    assert second.truncated[:, 0].all() and not second.truncated[:, 1:].any()
    assert torch.equal(second.next_obs[:, 0, 0], torch.full((4,), 5)), "the final observation is the stepped one"
    assert second.episode_start[:, 1].all()
    assert [episode.length for episode in second.episodes] == [5] * 4


@pytest.mark.parametrize("num_envs", [1, 1024])
def test_any_number_of_envs_works(num_envs: int) -> None:
    with make(num_envs=num_envs, num_workers=1, frames_per_batch=num_envs * 4, sync=True) as collector:
        batch = collector.next_batch()
    assert batch.env_index.tolist() == list(range(num_envs))


def test_two_collectors_run_at_once() -> None:
    with make() as train, make("CartPole-v1", zeros) as evaluate:
        for _ in range(3):
            assert train.next_batch().obs.dtype == torch.int64
            assert evaluate.next_batch().obs.dtype == torch.float32


def test_lists_of_factories_and_late_bound_closures_work() -> None:
    class Numbered(Probe):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.draws = (float(number), 0.0)

    factories = [lambda i=i: Numbered(i) for i in range(3)]
    with make(factories, zeros, num_envs=None, frames_per_batch=6, sync=True) as collector:
        assert collector.next_batch().obs[:, 0, 4].tolist() == [0, 1, 2]


def test_policy_factories_get_the_spaces_or_nothing() -> None:
    def with_spaces(observation_space: Any, action_space: Any) -> Any:
        start = int(action_space.start)
        assert observation_space.shape == (2,)
        return lambda obs: torch.full((len(obs),), start)

    for factory, expected in ((with_spaces, -3), (lambda: zeros, 0)):
        with make(policy=None, policy_factory=factory) as collector:
            assert (collector.next_batch().action == expected).all()


def test_dropped_entries_reach_neither_the_policy_nor_the_batch() -> None:
    class Wordy(Counter):
        observation_space = spaces.Dict({"text": spaces.Text(5), "count": Counter.observation_space})

        def _obs(self):
            return {"text": "hello", "count": super()._obs()}

    def policy(obs: Any) -> Any:
        assert list(obs) == ["count"]
        return act_counter(obs["count"])

    with pytest.raises(SpecError, match=r"drop_obs=\('text',\)"):
        make(Wordy, policy)
    with make(Wordy, policy, drop_obs=("text",)) as collector:
        assert list(collector.next_batch().next_obs) == ["count"]
        assert list(collector.observation_space) == ["count"]


# ---- failures -------------------------------------------------------------------------------------------------------


class Faulty(Counter):
    """Does what it is told at its fifth step, or elsewhere."""

    def __init__(self, where: str, fault: Any) -> None:
        super().__init__()
        self.where, self.fault = where, fault
        if where == "make":
            fault()

    def reset(self, **kwargs):
        if self.where == "reset":
            return self.fault()
        if self.where == "second reset" and self.episodes >= 0:
            return self.fault()
        return super().reset(**kwargs)

    def step(self, action):
        if self.where == "step" and self.steps == 5:
            return self.fault()
        return super().step(action)


def fails(error: BaseException) -> Any:
    def fault() -> None:
        raise error

    return fault


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self):
        raise TypeError("not picklable")


@pytest.mark.parametrize(
    ("where", "fault", "text"),
    [
        ("make", fails(ZeroDivisionError("boom")), r"env 2 raised ZeroDivisionError in make: boom"),
        ("reset", fails(KeyError("gone")), r"env 2 raised KeyError in reset at step 0: 'gone'"),
        ("second reset", fails(SystemExit(3)), r"env 2 raised SystemExit in reset at step 1: 3"),
        ("step", lambda: fails(Unprintable())(), r"env 2 raised Unprintable in step at step 5"),
        ("step", lambda: (np.zeros(2, np.int64), 0.0, False, {}), r"step\(\) returned a tuple of 4; expected \(obs,"),
        (
            "reset",
            lambda: np.zeros(2, np.int64),
            r"reset\(\) returned an array of shape \(2,\).*; expected \(obs, info",
        ),
        ("step", lambda: (np.zeros(3, np.int64), 0.0, False, False, {}), r"env 2 .* at step 5: obs.*\(2,\).*\(3,\)"),
        ("step", lambda: (np.zeros(2), 0.0, False, False, {}), r"env 2 raised SpecError .* at step 5: obs.*float64"),
        ("step", lambda: (np.zeros(2, np.int64), None, False, False, {}), r"reward: expected a number"),
        ("step", lambda: (np.zeros(2, np.int64), 0.0, "yes", False, {}), r"terminated: expected a bool"),
        ("step", lambda: os._exit(7), r"env worker 1 \(pid \d+, envs 2..3\) ended unexpectedly with exit code 7"),
        ("step", lambda: os.kill(os.getpid(), signal.SIGKILL), r"envs 2..3\) was killed by SIGKILL"),
    ],
)
def test_a_failing_env_is_one_clear_error_in_the_caller(where: str, fault: Any, text: str) -> None:
    factories = [Counter, Counter, lambda: Faulty(where, fault), Counter]
    with pytest.raises(EnvWorkerError, match=text) as caught, make(factories, num_envs=None) as collector:
        for _ in range(100):
            collector.next_batch()
    assert caught.value.role == "env worker 1"
    if "raised" in text:
        assert caught.value.details["env_index"] == 2
        assert "Traceback" in caught.value.child_traceback


def test_after_a_failure_the_collector_is_closed() -> None:
    collector = make([Counter, lambda: Faulty("step", fails(ValueError()))], num_envs=None, frames_per_batch=8)
    with pytest.raises(EnvWorkerError):
        for _ in range(100):
            collector.next_batch()
    with pytest.raises(ClosedError):
        collector.next_batch()
    assert not collector._supervisor.children


def bad_at_batch(result: Any) -> Any:
    """A policy that behaves while it is probed and returns something else later."""

    class Bad:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, obs: torch.Tensor) -> Any:
            self.calls += 1
            return zeros(obs) if self.calls < 3 else result(obs)

    return Bad()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda obs: fails(ZeroDivisionError("boom"))(), "raised ZeroDivisionError in policy: boom"),
        (lambda obs: zeros(obs)[:-1], r"action.*expected.*\d.*got"),
        (lambda obs: zeros(obs)[:, None], r"action"),
        (lambda obs: zeros(obs).double(), r"action.*float64"),
        (lambda obs: zeros(obs) + 4, r"action.*-3.*3.*got.*4"),
        (lambda obs: zeros(obs).double() * float("nan"), r"action"),
        (lambda obs: (zeros(obs), {"late": zeros(obs)}), r"action"),
        (lambda obs: None, r"action"),
    ],
)
def test_a_policy_that_goes_wrong_is_an_error_in_the_caller(result: Any, text: str) -> None:
    with pytest.raises(InferenceError, match=text) as caught, make(policy=bad_at_batch(result)) as collector:
        for _ in range(100):
            collector.next_batch()
    assert "Traceback" in caught.value.child_traceback


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (fails(ValueError("no")), "takes 0 positional|raised"),
        (lambda obs: torch.zeros(1, dtype=torch.int64), "action"),
        (lambda obs: (zeros(obs), {"x": 3}), r"extras\['x'\].*expected.*tensor"),
        (lambda obs: (zeros(obs), {"x": torch.zeros(5)}), r"extras\['x'\].*leading dimension"),
    ],
)
def test_a_policy_that_does_not_fit_is_an_error_at_construction(policy: Any, text: str) -> None:
    with pytest.raises(InferenceError, match=text):
        make(policy=policy)


def test_envs_that_differ_are_an_error_naming_the_odd_one() -> None:
    class Wider(Counter):
        observation_space = spaces.Box(0, 9, (3,), np.int64)

    with pytest.raises(SpecError, match=r"env 2: .*\(2,\).*\(3,\)"):
        make([Counter, Counter, Wider], num_envs=None, num_workers=3, frames_per_batch=3)
    with pytest.raises(SpecError, match=r"env 1: "):
        make([Counter, Wider], num_envs=None, num_workers=1, frames_per_batch=2)


def test_what_is_no_env_and_what_is_given_twice_are_errors() -> None:
    shared: list[Any] = []

    def same() -> Any:
        if not shared:
            shared.append(Counter())
        return shared[0]

    for factory, text in ((lambda: None, "None; expected a gymnasium.Env"), (same, "same object as that of env 0")):
        with pytest.raises(EnvWorkerError, match=text):
            make(factory, num_workers=1)


def test_misuse_raises_before_any_process_starts() -> None:
    lock = threading.Lock()
    for arguments, text in (
        ({"factory": "NoSuchEnv-v0"}, "NoSuchEnv"),
        ({"factory": lambda: lock}, "cannot be sent"),
        ({"factory": 7}, "create_env_fn=7"),
        ({"factory": [Counter, 3], "num_envs": None}, r"create_env_fn\[1\]=3"),
        ({"factory": [], "num_envs": None}, "empty"),
        ({"num_envs": None}, "num_envs is missing"),
        ({"policy": None}, "neither"),
        ({"policy_factory": zeros}, "both"),
        ({"policy": 3}, "not callable"),
        ({"policy": None, "policy_factory": lambda a: a}, "neither as policy_factory"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"seed": -1}, "seed=-1"),
        ({"drop_obs": "mission"}, r"\('mission',\)"),
    ):
        with pytest.raises(ConfigError, match=text):
            make(**arguments)


def test_a_dropped_collector_cleans_up_and_says_so() -> None:
    collector = make()
    collector.next_batch()
    with pytest.warns(ResourceWarning, match="never closed"):
        del collector
        gc.collect()


def test_closing_twice_and_using_it_afterwards() -> None:
    collector = make()
    collector.close()
    collector.shutdown()
    for use in (collector.next_batch, collector.stats, collector.pause, collector.try_next_batch):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_an_env_that_cannot_be_closed_is_a_warning() -> None:
    class Stubborn(Counter):
        def close(self):
            raise OSError("stuck")

    collector = make(Stubborn, num_envs=2, num_workers=1)
    with pytest.warns(RuntimeWarning, match=r"env [01]: close\(\) raised OSError: stuck"):
        collector.close()


def test_a_second_thread_is_refused_and_close_ends_the_wait() -> None:
    class Slow(Counter):
        def step(self, action):
            time.sleep(0.05)
            return super().step(action)

    collector = make(Slow, frames_per_batch=4000)
    outcome: list[BaseException] = []

    def collect() -> None:
        try:
            collector.next_batch()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    time.sleep(0.2)
    with pytest.raises(BusyError):
        collector.next_batch()
    collector.close()
    thread.join(10)
    assert isinstance(outcome[0], ClosedError)


def test_a_collector_made_in_a_thread_that_ends_goes_on() -> None:
    made: list[AsyncBatchedCollector] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    with made[0] as collector:
        for _ in range(10):
            collector.next_batch()


def test_two_runs_cannot_have_one_name() -> None:
    name = f"test-{os.getpid()}"
    with make(name=name):
        from shmcollect.errors import SegmentInUseError

        with pytest.raises(SegmentInUseError, match=f"live process {os.getpid()}"):
            make(name=name)
    with make(name=name) as collector:
        assert collector.name == name


def test_an_env_may_start_processes() -> None:
    class Parental(Counter):
        def __init__(self) -> None:
            super().__init__()
            import multiprocessing

            queue = multiprocessing.get_context("fork").SimpleQueue()
            child = multiprocessing.get_context("fork").Process(target=queue.put, args=(1,))
            child.start()
            assert queue.get() == 1
            child.join()
            queue.close()

    with make(Parental, num_envs=2) as collector:
        collector.next_batch()


def test_a_process_an_env_forks_may_end_as_it_likes() -> None:
    class Forks(Counter):
        def step(self, action):
            if self.steps == 2 and os.fork() == 0:
                sys.exit(0)
            return super().step(action)

    with make(Forks, num_envs=1, num_workers=1, frames_per_batch=8) as collector:
        for _ in range(5):
            collector.next_batch(timeout=20)


@pytest.mark.parametrize("how", ["leave", "close", "exit"])
def test_a_fork_of_the_caller_may_end_without_ending_the_run(how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        with make() as collector:
            collector.next_batch()
            pid = os.fork()
            if pid == 0:
                try:
                    if how == "leave":
                        collector.__exit__(None, None, None)
                    elif how == "close":
                        collector.close()
                    with pytest.raises(ClosedError, match="forks"):
                        collector.next_batch()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            for _ in range(5):
                collector.next_batch(timeout=20)


@pytest.mark.parametrize("sync", [False, True])
def test_closing_in_a_signal_handler_ends_the_wait_with_a_closed_error(sync: bool) -> None:
    class Slow(Counter):
        def step(self, action):
            time.sleep(0.02)
            return super().step(action)

    collector = make(Slow, frames_per_batch=4000, sync=sync)
    before = signal.signal(signal.SIGALRM, lambda *_: collector.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(ClosedError):
            collector.next_batch()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not collector._supervisor.children


def test_an_interrupt_while_looking_after_the_children_does_not_close_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as collector:
        with monkeypatch.context() as patched:
            patched.setattr(collector._supervisor, "failed", fails(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                collector.pause()
                collector.next_batch()
        collector.resume()
        collector.next_batch(timeout=20)


def test_unaligned_observations_arrive_right() -> None:
    class Unaligned(Counter):
        def _obs(self):
            return np.frombuffer(b"\0" + super()._obs().tobytes(), np.int64, offset=1)

    with make(Unaligned, num_envs=1, num_workers=1, sync=True, frames_per_batch=8) as collector:
        batch = collector.next_batch()
    assert batch.obs[0, :, 0].tolist() == list(range(8))
    assert batch.next_obs[0, :, 0].tolist() == list(range(1, 9))


def test_a_device_that_is_not_there_is_an_error_before_any_process_starts() -> None:
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(ConfigError, match=device):
            make(storing_device=device)


def test_an_info_that_is_none_is_named_and_a_strange_episode_entry_ignored() -> None:
    class Told(Counter):
        told: Any = None

        def step(self, action):
            return (*super().step(action)[:4], self.told)

    with pytest.raises(EnvWorkerError, match="info NoneType None; expected a dict"), make(Told) as collector:
        collector.next_batch()
    Told.told = {"episode": {"r": 1.0, "l": float("nan"), "t": 0}}
    with make(Told) as collector:
        assert {episode.length for episode in collector.next_batch().episodes} <= {1, 2, 3}


def test_batches_can_be_kept_in_lists_and_sets() -> None:
    with make() as collector:
        first, second = collector.next_batch(), collector.next_batch()
    assert first != second and first in [second, first] and len({first, second}) == 2


def test_episode_statistics_of_a_wrapper_win() -> None:
    class Told(Counter):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"episode": {"r": 42.0, "l": 7, "t": 1.5}}

    with make(Told) as collector:
        episodes = collector.next_batch().episodes
    assert episodes and {tuple(episode)[1:] for episode in episodes} == {(42.0, 7, 1.5)}


def test_without_final_observations_asking_for_them_raises() -> None:
    with make(final_obs=False) as collector:
        batch = collector.next_batch()
        assert batch.final_obs is None
        with pytest.raises(ValueError, match="final_obs=False"):
            _ = batch.next_obs
    with make("CartPole-v1", zeros, final_obs=False, frames_per_batch=4) as collector:
        batch = collector.next_batch()
        assert torch.equal(batch.next_obs[:, -1], batch.bootstrap_obs)


def test_every_case_is_described_by_its_stats() -> None:
    with make(CASES["cartpole"].make, CASES["cartpole"].policy, total_frames=320) as collector:
        list(collector)
        stop = time.monotonic() + 5  # a role publishes its counts when it comes to rest
        while sum(worker["steps"] for worker in collector.stats()["workers"]) < 320 and time.monotonic() < stop:
            time.sleep(0.01)
        stats = collector.stats()
    assert stats["frames"] == 320 and stats["batches"] == 10
    assert sum(worker["steps"] for worker in stats["workers"]) == 320
    assert stats["inference"]["rows"] == 320
    assert 1 <= stats["mean_inference_batch"] <= 4


def test_no_warning_reaches_the_caller_in_a_plain_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make() as collector:
            collector.next_batch()
