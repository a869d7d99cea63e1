"""A campaign of random faults: ``python -m tests.faults --seconds 600 --seed S``.

Processes are killed and stopped, envs and the policy raise, steps are slow or never end, the learner dawdles and the
weights change, all at random moments. Every row that is delivered is judged (see `stamped`), and at the end nothing may
be left. Which faults are drawn follows from the seed; when they strike depends on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent))
import stamped
from stamped import Judge, Stamped, StampedPolicy

from shmcollect import AsyncBatchedCollector

cloudpickle.register_pickle_by_value(stamped)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_ENVS, NUM_WORKERS = 9, 3
STEP_TIMEOUT_S = 1.0
MEAN_PAUSE_S = 0.5  # between two faults from outside
STUCK_S = 60.0  # no batch for so long is a hang
# Per step of an env: seldom, because thousands are taken every second.
STEP_FAULTS = {"an env raises": 2e-6, "a step never ends": 1e-6, "a step is slow": 2e-5}
POLICY_RAISES = 2e-6  # per batch


class Ledger:
    """Counts what children do to themselves: they die before they could say so. One file per kind, a byte per fault."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add(self, kind: str) -> None:
        with open(Path(self.folder, kind), "ab", buffering=0) as file:
            file.write(b".")

    def counts(self) -> Counter[str]:
        return Counter({path.name: path.stat().st_size for path in Path(self.folder).iterdir()})


class Unreliable:
    """A fault for `Stamped`: does one of `STEP_FAULTS` now and then."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.draw: Callable[[], float] | None = None

    def __call__(self, env: Stamped) -> None:
        if self.draw is None:
            self.draw = random.Random(env.life).random
        value = self.draw()
        for kind, share in STEP_FAULTS.items():
            value -= share
            if value < 0:
                self.ledger.add(kind)
                return self.strike(kind)
        return None

    def strike(self, kind: str) -> None:
        if kind == "an env raises":
            raise ArithmeticError("injected")
        time.sleep(1e6 if kind == "a step never ends" else 0.2)


class UnreliablePolicy(StampedPolicy):
    """Raises now and then."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def forward(self, obs: torch.Tensor) -> Any:
        if random.random() < POLICY_RAISES:
            self.ledger.add("the policy raises")
            raise ArithmeticError("injected")
        return super().forward(obs)


@dataclass
class Report:
    """What a campaign did and found.

    Attributes:
        faults: Injected, by kind.
        rows: Judged right.
        interrupted: Rows that were marked so.
        restarts: Successors started.
        detections_s: From a kill to the start of dealing with it.
        leftovers: What was left, in words; empty if all is well.
    """

    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    interrupted: int = 0
    restarts: int = 0
    detections_s: list[float] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{count:7,}  {kind}" for kind, count in self.faults.most_common()]
        total = sum(self.faults.values())
        lines += [
            f"{total:7,}  faults in {self.seconds:.0f} s ({total / self.seconds * 600:.0f} per 10 minutes)",
            f"{self.restarts:7,}  processes replaced",
            f"{self.rows:7,}  rows judged, all right; {self.interrupted} of them interrupted",
        ]
        if self.detections_s:
            p50, worst = statistics.median(self.detections_s), max(self.detections_s)
            lines.append(f"kills detected within p50 {p50 * 1e3:.1f} ms, max {worst * 1e3:.1f} ms")
        lines.append("left behind: " + ("; ".join(self.leftovers) or "nothing (processes, /dev/shm, descriptors)"))
        return "\n".join(lines)


class Campaign:
    """Injects faults into a run from outside."""

    def __init__(self, collector: AsyncBatchedCollector, judge: Judge, report: Report, seed: int) -> None:
        self._collector, self._judge, self._report = collector, judge, report
        self._random = random.Random(seed)
        self._killed_s: dict[int, float] = {}
        self._stopped: dict[int, float] = {}  # by pid, until when

    def run(self, seconds: float) -> None:
        """Collects, judges and injects for so long; then everything that was killed has been replaced."""
        started_s = time.monotonic()
        due_s = started_s
        while (now_s := time.monotonic()) < started_s + seconds:
            self._continue_stopped(now_s)
            if now_s >= due_s:
                due_s = now_s + self._random.expovariate(1 / MEAN_PAUSE_S)
                self._inject(now_s)
            self._collect()
        self._continue_stopped(float("inf"))
        rows = self._judge.rows
        while self._judge.rows < rows + 1000:
            self._collect()
        self._report.seconds = time.monotonic() - started_s
        self._report.rows, self._report.interrupted = self._judge.rows, sum(self._judge.interrupted.values())
        restarts = self._collector.restarts
        self._report.restarts = len(restarts)
        for restart in restarts:
            if (killed_s := self._killed_s.get(restart.error.pid)) is not None:
                self._report.detections_s.append(restart.time_s - killed_s)

    def _collect(self) -> None:
        deadline = time.monotonic() + STUCK_S
        while True:
            try:
                batch = self._collector.next_batch(timeout=0.2)
            except TimeoutError:
                self._continue_stopped(time.monotonic())
                assert time.monotonic() < deadline, f"no batch for {STUCK_S} s"
            else:
                return self._judge.look(batch)

    def _inject(self, now_s: float) -> None:
        kinds = {
            "kill -9 of a worker": (self._kill_worker, 4),
            "kill -9 of inference": (self._kill_inference, 1),
            "SIGSTOP, SIGCONT": (self._stop, 4),
            "the learner dawdles": (self._dawdle, 3),
            "new weights": (self._update, 5),
        }
        (kind,) = self._random.choices(list(kinds), [weight for _, weight in kinds.values()])
        if kinds[kind][0](now_s):
            self._report.faults[kind] += 1

    def _pids(self, kind: str) -> list[int]:
        children = self._collector._supervisor.children
        pids = [child.process.pid for child in children if child.kind == kind and not child.has_ended()]
        return [pid for pid in pids if pid not in self._killed_s]

    def _kill_worker(self, _: float) -> bool:
        return self._kill(self._pids("env worker"))

    def _kill_inference(self, _: float) -> bool:
        return self._kill(self._pids("inference server"))

    def _kill(self, pids: list[int]) -> bool:
        if not pids:
            return False
        pid = self._random.choice(pids)
        self._killed_s[pid] = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return True

    def _stop(self, now_s: float) -> bool:
        pids = [pid for pid in self._pids("env worker") + self._pids("inference server") if pid not in self._stopped]
        if not pids:
            return False
        pid = self._random.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        self._stopped[pid] = now_s + self._random.uniform(0.01, 2 * STEP_TIMEOUT_S)
        return True

    def _continue_stopped(self, now_s: float) -> None:
        alive = {child.process.pid for child in self._collector._supervisor.children}
        for pid in [pid for pid, until_s in self._stopped.items() if until_s <= now_s]:
            del self._stopped[pid]
            if pid in alive:
                os.kill(pid, signal.SIGCONT)

    def _dawdle(self, _: float) -> bool:
        time.sleep(self._random.uniform(0.01, 0.5))
        return True

    def _update(self, _: float) -> bool:
        self._collector.update_policy_weights_(stamped.weights(self._collector.policy_version + 1))
        return True


def campaign(seconds: float, seed: int) -> Report:
    """Runs a campaign.

    Raises:
        AssertionError: A row was wrong, or no batch came.
    """
    report = Report()
    descriptors = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(folder)
        collector = AsyncBatchedCollector(
            [partial(Stamped, env, Unreliable(ledger)) for env in range(NUM_ENVS)],
            UnreliablePolicy(ledger),
            num_workers=NUM_WORKERS,
            frames_per_batch=16 * NUM_ENVS,
            rollout_length=4,
            seed=seed,
            on_worker_failure="restart",
            max_restarts=sys.maxsize,
            step_timeout=STEP_TIMEOUT_S,
        )
        with collector:
            Campaign(collector, Judge(seed, NUM_ENVS), report, seed).run(seconds)
        report.faults += ledger.counts()
    report.leftovers += [f"process {child.pid}" for child in psutil.Process().children(recursive=True)]
    report.leftovers += [str(path) for path in Path("/dev/shm").glob(f"shmcollect.{collector.name}*")]
    if (now := len(os.listdir("/proc/self/fd"))) != descriptors:
        report.leftovers.append(f"{now - descriptors} descriptors")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = campaign(arguments.seconds, arguments.seed)
    print(report)
    return 1 if report.leftovers else 0


if __name__ == "__main__":
    sys.exit(main())
