"""The collector's promises about weights: never torn, never silently stale, and each row says which it was run with."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import CASES, Counter, act_counter
from torch import Tensor, nn

from shmcollect import (
    AsyncBatchedCollector,
    Batch,
    ClosedError,
    ConfigError,
    InferenceError,
    WeightsError,
)
from shmcollect.ring import GRANTED
from shmcollect.weights_image import as_array, named_state

MB = 1_000_000


class Uniform(nn.Module):
    """40 tensors, all equal to one number, of which every row gets the smallest and the largest value."""

    def __init__(self, size_bytes: int = 4000) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([torch.zeros(max(1, size_bytes // 160)) for _ in range(40)])

    def fill(self, value: int) -> Uniform:
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(value)
        return self

    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ranges = [torch.aminmax(tensor) for tensor in self.tensors]
        low, high = min(float(each.min) for each in ranges), max(float(each.max) for each in ranges)
        return act_counter(obs), {"low": torch.full((len(obs),), low), "high": torch.full((len(obs),), high)}

    act = forward


def make(policy: Any, factory: Any = Counter, **kwargs: Any) -> AsyncBatchedCollector:
    options = {"num_envs": 4, "num_workers": 1, "frames_per_batch": 32, "seed": 5} | kwargs
    return AsyncBatchedCollector(factory, policy, **options)


def assert_untorn(batch: Batch) -> None:
    assert torch.equal(batch.extras["low"], batch.policy_version.float())
    assert torch.equal(batch.extras["high"], batch.policy_version.float())


class Follower:
    """Checks that the versions of each env never go back."""

    def __init__(self) -> None:
        self.newest = torch.zeros(100, dtype=torch.int64)

    def follow(self, batch: Batch) -> None:
        for env, versions in zip(batch.env_index.tolist(), batch.policy_version, strict=True):
            line = torch.cat([self.newest[env : env + 1], versions])
            assert (line.diff() >= 0).all(), f"env {env} went back: {line.tolist()}"
            self.newest[env] = versions[-1]


# ---- torn, stale, out of order: never


@pytest.mark.parametrize(
    ("size_bytes", "sync", "seconds"),
    [
        (MB // 10, False, 2),
        (10 * MB, False, 2),
        (10 * MB, True, 2),
        *(
            pytest.param(size, sync, 10, marks=pytest.mark.campaign)
            for size in (MB // 10, 10 * MB, 100 * MB)
            for sync in (False, True)
        ),
    ],
)
def test_every_row_is_by_one_whole_version_while_another_thread_publishes(size_bytes, sync, seconds) -> None:
    follower, stop = Follower(), threading.Event()
    with make(Uniform(size_bytes), sync=sync) as collector:

        def publish() -> None:
            source = Uniform(size_bytes)
            while not stop.is_set():
                collector.update_policy_weights_(source.fill(collector.policy_version + 1))

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                batch = collector.next_batch()
                assert_untorn(batch)
                follower.follow(batch)
                assert not sync or len(batch.policy_version.unique()) == 1
        finally:
            stop.set()
            publisher.join()
        assert collector.policy_version > 3 and follower.newest.max() > 3


@pytest.mark.parametrize(
    ("sync", "weight_sync"), [(False, "shared_memory"), (False, "multiprocess"), (True, "shared_memory")]
)
def test_an_update_before_the_first_batch_counts_for_all_of_it(sync: bool, weight_sync: str) -> None:
    policy = Uniform()
    with make(policy, sync=sync, weight_sync=weight_sync) as collector:
        assert collector.policy_version == 0
        policy.fill(1)
        assert collector.update_policy_weights_() == 1
        policy.fill(2)
        assert collector.update_policy_weights_() == collector.policy_version == 2
        batch = collector.next_batch()
    assert_untorn(batch)
    assert (batch.policy_version == 2).all()


@pytest.mark.parametrize("weight_sync", ["shared_memory", "multiprocess"])
def test_no_row_is_run_with_older_weights_than_its_grant_requires(weight_sync: str) -> None:
    policy, follower, granted = Uniform(), Follower(), torch.zeros(4, dtype=torch.int64)
    with make(policy, weight_sync=weight_sync) as collector:
        for version in range(1, 60):
            batch = collector.next_batch()
            assert_untorn(batch)
            follower.follow(batch)
            later = batch.sequence >= granted[batch.env_index, None]
            assert not (later & (batch.policy_version < version - 1)).any()
            granted = torch.from_numpy(collector._learner._reader.rings.cursors(GRANTED))
            collector.update_policy_weights_(policy.fill(version))
        lag = collector.stats()["policy_lag"]
    assert 0 <= lag["mean"] <= lag["max"] <= 8


class Slow(Counter):
    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


@pytest.mark.parametrize(
    ("weight_sync", "zero_copy"), [("shared_memory", False), ("shared_memory", True), ("multiprocess", False)]
)
def test_with_sync_an_update_counts_from_the_next_batch_on_not_for_the_one_under_way(weight_sync, zero_copy) -> None:
    policy = Uniform()
    with make(policy, Slow, sync=True, weight_sync=weight_sync, zero_copy=zero_copy) as collector:
        for i in range(3):
            with pytest.raises(TimeoutError):
                collector.next_batch(timeout=0.02)
            for version in (2 * i + 1, 2 * i + 2):
                assert collector.update_policy_weights_(policy.fill(version)) == version
            batch = collector.next_batch()
            assert_untorn(batch)
            assert (batch.policy_version == 2 * i).all()
        stats = collector.stats()
        assert stats["policy_version"] == 6 and stats["policy_lag"] == {"mean": 2.0, "max": 2}
        assert (collector.next_batch().policy_version == 6).all()


def test_the_lag_of_weights_that_are_published_between_batches_is_zero_with_sync() -> None:
    policy = Uniform()
    with make(policy, sync=True) as collector:
        for version in range(1, 5):
            collector.update_policy_weights_(policy.fill(version))
            assert (collector.next_batch().policy_version == version).all()
        assert collector.stats()["policy_lag"] == {"mean": 0.0, "max": 0}


# ---- whose weights, and in what form


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.out = nn.Linear(8, 32, bias=False)
        self.out.weight = self.table.weight

    def forward(self, obs: Tensor) -> Tensor:
        return self.out(self.table((obs.abs() * 10).long() % 32).mean(1))[:, :2]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.out(self.lstm(obs[:, None])[0][:, 0])


class BrainFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()

    def forward(self, obs: Tensor) -> Tensor:
        return self.layers(obs.bfloat16()).float()


class Scaled(nn.Module):
    """A persistent buffer, one that is not, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4).t())
        self.register_buffer("scale", torch.rand(()))
        self.register_buffer("shift", torch.ones(2), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        return obs @ self.weight * self.scale + self.shift


def frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    network[0].requires_grad_(False)
    return network


def normalized() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    for _ in range(3):
        network(torch.randn(16, 4))
    return network.eval()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": normalized,
    "tied embedding": TiedEmbedding,
    "lstm": Recurrent,
    "brain float": BrainFloat,
    "frozen layers": frozen,
    "own buffers": Scaled,
    "a module called module": lambda: nn.Sequential(nn.ModuleDict({"module": frozen()})["module"]),
    "data parallel inside": lambda: nn.DataParallel(frozen()),
}


def compiled(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():  # what it imports uses what torch itself has deprecated
        warnings.simplefilter("ignore")
        return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "data parallel": nn.DataParallel,
    "compiled": compiled,
    "both": lambda module: nn.DataParallel(compiled(nn.DataParallel(module))),
}


class Zoo(nn.Module):
    """All these networks; their rows carry each one's outputs, a digest of its state, and how many names are tied."""

    def __init__(self, seed: int, *names: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.networks = nn.ModuleDict({name: NETWORKS[name]() for name in names or NETWORKS})

    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        extras = {}
        for name, network in self.networks.items():
            extras[f"{name}: outputs"] = network(obs)
            extras[f"{name}: digest"] = digest(network).expand(len(obs), -1)
            pointers = [tensor.data_ptr() for _, tensor in named_state(network)]
            extras[f"{name}: tied"] = torch.full((len(obs),), len(pointers) - len(set(pointers)))
        return sum(extras[f"{name}: outputs"] for name in self.networks).argmax(1), extras


def digest(module: nn.Module) -> Tensor:
    total = hashlib.blake2b(digest_size=32)
    for name, tensor in named_state(module):
        total.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + as_array(tensor.contiguous()).tobytes())
    return torch.frombuffer(bytearray(total.digest()), dtype=torch.uint8)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_acted_with(batch: Batch, zoo: Zoo) -> None:
    """Checks state and outputs bit for bit, on the very batches inference had: all envs at each step."""
    for t in range(batch.reward.shape[1]):
        with torch.inference_mode():
            action, extras = zoo(batch.obs[:, t])
        assert torch.equal(batch.action[:, t], action)
        for name, values in extras.items():
            assert torch.equal(batch.extras[name][:, t], values), f"{name} at step {t}"


def together(policy: Any, **kwargs: Any) -> AsyncBatchedCollector:
    """A collector that runs its policy on all envs at once, at every step."""
    options = {"sync": True, "min_batch_size": 4, "server_timeout": None} | kwargs
    return make(policy, CASES["cartpole"].make, **options)


def test_inference_has_the_learners_state_and_outputs_bit_for_bit(one_thread) -> None:
    first = Zoo(0)
    with together(first) as collector:
        batch = collector.next_batch()
        assert_acted_with(batch, first)
        assert (batch.extras["tied embedding: tied"] == 1).all()
        for seed, wrapped in enumerate(WRAPPERS.values(), 1):
            zoo = Zoo(seed)
            for source in (wrapped(zoo), wrapped(zoo).state_dict()):
                collector.update_policy_weights_(source)
                batch = collector.next_batch()
                assert (batch.policy_version == collector.policy_version).all()
                assert_acted_with(batch, zoo)


def test_a_wrapped_policy_takes_weights_wrapped_or_not(one_thread) -> None:
    """Compiled without a code generator: what matters is that it goes on with the tensors it was compiled for."""
    names = ("batch norm", "own buffers")
    policy = Zoo(0, *names)
    for name in names:
        policy.networks[name] = WRAPPERS["both"](policy.networks[name])
    with together(WRAPPERS["data parallel"](policy), startup_timeout=120) as collector:
        assert_acted_with(collector.next_batch(), Zoo(0, *names))
        for seed, wrapped in enumerate(WRAPPERS.values(), 1):
            zoo = Zoo(seed, *names)
            collector.update_policy_weights_(wrapped(zoo))
            assert_acted_with(collector.next_batch(), zoo)


def test_none_stands_for_the_module_given_at_construction_also_if_the_policy_is_a_method_of_it() -> None:
    module = Uniform()
    for policy in (module.act, nn.DataParallel(module)):
        with make(policy, sync=True) as collector:
            for version in (1, 2):
                module.fill(version)
                assert collector.update_policy_weights_() == version
                batch = collector.next_batch()
                assert_untorn(batch)
                assert (batch.policy_version == version).all()
        module.fill(0)


def test_a_policy_from_a_factory_takes_weights_but_none_means_nothing_there() -> None:
    with AsyncBatchedCollector(
        Counter, policy_factory=Uniform, num_envs=2, num_workers=1, frames_per_batch=8, sync=True
    ) as collector:
        with pytest.raises(WeightsError, match="pass the weights to publish"):
            collector.update_policy_weights_()
        assert collector.update_policy_weights_(Uniform().fill(1)) == 1
        assert_untorn(collector.next_batch())


# ---- what cannot be published


def test_weights_that_do_not_fit_are_named_and_the_old_ones_stay() -> None:
    policy = Uniform()
    with make(policy, sync=True) as collector:
        collector.update_policy_weights_(policy.fill(1))
        good = policy.fill(2).state_dict()
        lacking = {name: tensor for name, tensor in good.items() if name != "tensors.7"}
        for bad, text in (
            (lacking, "missing: 'tensors.7'"),
            (good | {"tensors.40": torch.zeros(1)}, "not in the policy: 'tensors.40'"),
            (good | {"tensors.3": torch.zeros(3)}, r"'tensors.3': expected torch.float32 of shape \(25,\), got"),
            (good | {"tensors.3": good["tensors.3"].double()}, r"got torch.float64 of shape \(25,\)"),
            (nn.Linear(1, 1), "missing: 'tensors.0', .* not in the policy: 'weight', 'bias'"),
            ("weights.pt", "expected a module, a state_dict or a dict of tensors, got str"),
        ):
            with pytest.raises(WeightsError, match=text):
                collector.update_policy_weights_(bad)
            assert collector.policy_version == 1
            batch = collector.next_batch()
            assert_untorn(batch)
            assert (batch.policy_version == 1).all()
        assert collector.update_policy_weights_(good) == 2
        assert (collector.next_batch().policy_version == 2).all()


def test_a_policy_without_weights_cannot_be_updated() -> None:
    with make(act_counter) as collector:
        with pytest.raises(WeightsError, match=r"no nn\.Module"):
            collector.update_policy_weights_()
        with pytest.raises(WeightsError, match="takes no new weights"):
            collector.update_policy_weights_(Uniform())
        assert (collector.next_batch().policy_version == 0).all() and collector.policy_version == 0
    with make(Uniform(), weight_sync="none") as collector, pytest.raises(WeightsError, match="weight_sync is 'none'"):
        collector.update_policy_weights_()
    with pytest.raises(ConfigError, match="weight_sync='pigeon': expected one of 'shared_memory'"):
        make(Uniform(), weight_sync="pigeon")


def test_a_policy_whose_tensors_share_memory_is_refused_at_construction() -> None:
    def overlapping() -> nn.Module:
        policy = Uniform()
        policy.register_buffer("part", policy.tensors[0].detach()[1:])
        return policy

    with pytest.raises(InferenceError, match="share memory without being the same tensor"):
        make(None, policy_factory=overlapping)


def test_a_closed_collector_publishes_nothing() -> None:
    policy = Uniform()
    collector = make(policy)
    collector.update_policy_weights_(policy.fill(1))
    collector.close()
    with pytest.raises(ClosedError):
        collector.update_policy_weights_()
    assert collector.policy_version == 1


# ---- inference that is busy, asleep or dead


class Sluggish(Uniform):
    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        time.sleep(0.5)
        return super().forward(obs)


def inference_pid(collector: AsyncBatchedCollector) -> int:
    return next(c.process.pid for c in collector._supervisor.children if c.kind == "inference server")


@pytest.mark.parametrize("weight_sync", ["shared_memory", "multiprocess"])
def test_an_update_never_waits_for_a_busy_or_stopped_inference(weight_sync: str) -> None:
    policy = Sluggish(MB)
    with make(policy, sync=True, frames_per_batch=4, weight_sync=weight_sync) as collector:
        assert collector.try_next_batch() is None
        time.sleep(0.1)  # inference is in the policy
        started = time.monotonic()
        for version in range(1, 6):
            collector.update_policy_weights_(policy.fill(version))
        os.kill(inference_pid(collector), signal.SIGSTOP)
        for version in range(6, 11):
            collector.update_policy_weights_(policy.fill(version))
        assert time.monotonic() - started < 0.4
        os.kill(inference_pid(collector), signal.SIGCONT)
        assert (collector.next_batch().policy_version == 0).all()
        batch = collector.next_batch()
        assert_untorn(batch)
        assert (batch.policy_version == 10).all()


@pytest.mark.parametrize("weight_sync", ["shared_memory", "multiprocess"])
def test_a_dead_inference_process_is_reported(weight_sync: str) -> None:
    policy = Uniform(MB)
    collector = make(policy, weight_sync=weight_sync)
    collector.next_batch()
    os.kill(inference_pid(collector), signal.SIGKILL)
    with pytest.raises(InferenceError, match="was killed by SIGKILL"):
        for _ in range(1000):
            collector.update_policy_weights_()
            time.sleep(0.001)
    with pytest.raises(ClosedError):
        collector.update_policy_weights_()


def test_weights_that_arrive_during_a_pause_count_after_it() -> None:
    policy = Uniform()
    with make(policy, sync=True) as collector:
        collector.next_batch()
        collector.pause()
        collector.update_policy_weights_(policy.fill(1))
        collector.resume()
        batch = collector.next_batch()
    assert_untorn(batch)
    assert (batch.policy_version == 1).all()


def test_the_benchmark_prints_a_row_per_size_without_torn_reads() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.weights",
        "--sizes",
        "0.01",
        "0.1",
        "--repeats",
        "3",
        "--seconds",
        "0.2",
    ]
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=100)
    rows = [line.split() for line in result.stdout.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["0.01", "0.1"] and all(int(row[-2]) > 0 and row[-1] == "0" for row in rows)
