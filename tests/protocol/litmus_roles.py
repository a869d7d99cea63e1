"""The three roles of the protocol, stripped to what the protocol is, each run as a process by test_litmus.py.

Every row is stamped with its env and sequence throughout: each element of the observation, the final observation, the
action and the extras. Whoever reads a row checks every stamp; what was found is printed as JSON at the end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmcollect.doorbell import Doorbell
from shmcollect.layout import Field, Layout, slot_fields
from shmcollect.ring import ACTED, GRANTED, OBSERVED, RELEASED, Rings
from shmcollect.segment import Segment

Array = np.ndarray[Any, np.dtype[np.int64]]

LONGEST_RUN_S = 60.0
FORBIDDEN = ("torn", "lost", "repeated", "reordered", "lost_wakeups", "stuck")
_PATIENCE_S = 1.0  # how long a wait lasts before it counts as a lost wake-up, if what it waited for is there
_EPISODE_LENGTH = 3


@dataclass(frozen=True)
class Run:
    """What one run does.

    Attributes:
        start: Where every cursor begins.
        steps: Steps of each env.
        beyond: How many steps more than allowed the learner grants; 0 is right.
        silent: A role that rings nobody; "" is right.
        slow: A role that dawdles.
    """

    name: str
    num_envs: int
    capacity: int
    length: int
    steps: int
    start: int = 0
    beyond: int = 0
    silent: str = ""
    slow: str = ""

    @property
    def end(self) -> int:
        """The sequence after the last step."""
        return self.start + self.steps


@dataclass
class Findings:
    """The forbidden outcomes that a role has seen, and what it did meanwhile."""

    torn: int = 0  # the elements of a row disagree
    lost: int = 0  # a later row is where this one should be
    repeated: int = 0  # an earlier row is where this one should be
    reordered: int = 0  # another row that was to be read at the same time is where this one should be
    lost_wakeups: int = 0  # a wait ran out although what it waited for had been published
    stuck: int = 0  # the run did not end
    rows: int = 0
    sleeps: int = 0

    def forbidden(self) -> dict[str, int]:
        """The forbidden outcomes that happened."""
        return {name: count for name in FORBIDDEN if (count := getattr(self, name))}

    def check(self, rows: Array, expected: Array) -> None:
        """Classifies rows, int64[n, width], of which each element of row i should be ``expected[i]``."""
        self.rows += len(rows)
        if (rows == expected[:, None]).all():
            return
        torn = (rows != rows[:, :1]).any(1)
        got, wanted = rows[~torn, 0], expected[~torn]
        wrong = got != wanted
        elsewhere = wrong & np.isin(got, expected)
        self.torn += int(torn.sum())
        self.reordered += int(elsewhere.sum())
        self.lost += int((wrong & ~elsewhere & (got > wanted)).sum())
        self.repeated += int((wrong & ~elsewhere & (got < wanted)).sum())


def layout(num_envs: int, capacity: int, length: int, width: int = 16) -> Layout:
    """Slots whose every array can be stamped."""
    int64 = np.dtype(np.int64)
    fields = slot_fields(
        [Field("obs", (), int64, (width,))],
        [Field("action", (), int64, (2,))],
        [Field("extras", ("stamp",), int64, (4,))],
        final_obs=True,
    )
    return Layout((num_envs,), capacity, length, fields, {}, {})


def stamp(env: Any, sequence: Any) -> Any:
    """One number for a row; it grows with the sequence."""
    return sequence * 4096 + env


class Role:
    """What the roles have in common."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.findings = Findings()
        self.rings = Rings(Segment.attach(run.name, writable=True))
        self.native = self.rings.native
        self.bells = {name: Doorbell(self.rings.buffer, offset) for name, offset in self.rings.layout.bells.items()}
        self.name = type(self).__name__.lower()
        self.envs = np.empty(run.num_envs, np.int64)
        self.sequences = np.empty(run.num_envs, np.int64)
        self._deadline = time.monotonic() + LONGEST_RUN_S
        self._turns = 0

    def gather(self, kind: str, n: int, length: int, after: int = 0) -> Array:
        """The rows of the first n (env, sequence), as [n * length, width]."""
        (index,) = self.rings.fields[kind]
        width = self.rings.layout.fields[index].shape[0]
        out = np.empty((n * length, width), np.int64)
        self.native.gather(index, self.envs, self.sequences + after, n, length, out)
        return out

    def notify(self, bell: str) -> None:
        """Rings a bell."""
        if self.run.silent != self.name:
            self.bells[bell].notify()

    def wait(self, bell: str, look: Callable[[], int]) -> int:
        """Waits until ``look()`` finds something, asleep at once; returns what it found, 0 if the run is stuck."""
        mine = self.bells[bell]
        while not (found := look()):
            key = mine.prepare()
            if found := look():
                mine.cancel()
                break
            self.findings.sleeps += 1
            if not mine.wait(key, _PATIENCE_S) and look():
                self.findings.lost_wakeups += 1
            if time.monotonic() > self._deadline:
                self.findings.stuck = 1
                return 0
        self._dawdle()
        return found

    def _dawdle(self) -> None:
        self._turns += 1
        if self.run.slow == self.name and self._turns % 8 == 0:
            time.sleep(0.0005)
        elif self.run.silent == self.name:
            time.sleep(0.02)  # so that the others are asleep when it does not ring


class Worker(Role):
    """Publishes an observation for every action."""

    def work(self) -> None:
        run, row = self.run, np.empty(self.rings.layout.fields[self.rings.fields["obs"][0]].shape, np.int64)
        (final,) = self.rings.fields["final_obs"]
        actions = self.rings.view(self.rings.fields["action"][0])
        for env in range(run.num_envs):
            row.fill(stamp(env, run.start))
            self.native.observe(env, run.start, (row,))
        self.notify("inference")
        left = run.num_envs * run.steps
        while left and self.wait("worker 0", self._look):
            wanted = []
            for env in self._acted:
                sequence = self.native.cursor(OBSERVED, env) - 1
                wanted.append((env, sequence))
                ended = sequence % _EPISODE_LENGTH == 0
                if ended:
                    row.fill(stamp(env, sequence))
                    self.native.write(final, env, sequence, row)
                row.fill(stamp(env, sequence + 1))
                seen = actions[env, sequence % run.capacity].copy()
                self.native.step(env, sequence, sequence % 1000, ended, False, False, (row,))
                self.findings.check(seen[None], np.array([stamp(env, sequence)]))
            left -= len(wanted)
            self.notify("inference")
            self.notify("learner")

    def _look(self) -> int:
        end = self.run.end
        acted = self.native.acted(0, self.run.num_envs)
        self._acted = [env for env in acted if self.native.cursor(OBSERVED, env) <= end]
        return len(self._acted)


class Inference(Role):
    """Acts on every observation whose step is granted."""

    def work(self) -> None:
        run, version = self.run, self.rings.layout.index("policy_version")
        (action,), (extras,) = self.rings.fields["action"], self.rings.fields["extras"]
        left, self._start = run.num_envs * run.steps, 0
        while left and (n := self.wait("inference", self._look)):
            stamps = stamp(self.envs[:n], self.sequences[:n])
            self.findings.check(self.gather("obs", n, 1), stamps)
            values = np.repeat(stamps, 2).reshape(n, 2), np.repeat(stamps, 4).reshape(n, 4), stamps
            unfit = self.native.scatter((action, extras, version), self.envs, self.sequences, n, values)
            self.findings.check(np.array([[unfit]]), np.array([-1]))
            self.native.advance(ACTED, self.envs, self.sequences, n, 1)
            self._start = (int(self.envs[n - 1]) + 1) % run.num_envs
            left -= n
            self.notify("worker 0")

    def _look(self) -> int:
        limit = max(1, self.run.num_envs * 3 // 4)  # so that batches are of many different sets of envs
        return self.native.scan(self._start, limit, self.envs, self.sequences)[0]


class Learner(Role):
    """Grants steps, reads finished rollouts and releases them."""

    def work(self) -> None:
        run, length = self.run, self.run.length
        all_envs = np.arange(run.num_envs)
        following = np.full(run.num_envs, run.start)  # the sequence each env's next rollout should begin with
        self._grant(all_envs, following)
        while (following < run.end).any() and (n := self.wait("learner", self._look)):
            envs, starts = self.envs[:n], self.sequences[:n]
            self.findings.check(starts[:, None], following[envs])
            self._check_rollouts(n)
            following[envs] += length
            self.native.advance(RELEASED, envs, starts, n, length)
            self._grant(envs, following[envs])

    def _look(self) -> int:
        return self.native.finished(self.run.length, 0, self.envs, self.sequences)

    def _check_rollouts(self, n: int) -> None:
        length, index = self.run.length, self.rings.layout.index
        sequences = (self.sequences[:n, None] + np.arange(length)).ravel()
        stamps = stamp(np.repeat(self.envs[:n], length), sequences)
        self.findings.check(self.gather("obs", n, length), stamps)
        self.findings.check(self.gather("obs", n, 1, after=length), stamps[length - 1 :: length] + stamp(0, 1))
        self.findings.check(self.gather("action", n, length), stamps)
        self.findings.check(self.gather("extras", n, length), stamps)
        ended = sequences % _EPISODE_LENGTH == 0
        self.findings.check(self.gather("final_obs", n, length)[ended], stamps[ended])
        for kind, expected in (
            ("sequence", sequences),
            ("policy_version", stamps),
            ("reward", sequences % 1000),
            ("terminated", ended),
        ):
            out = np.empty(n * length, self.rings.layout.fields[index(kind)].dtype)
            self.native.gather(index(kind), self.envs, self.sequences, n, length, out)
            self.findings.check(out.astype(np.int64)[:, None], expected.astype(np.int64))

    def _grant(self, envs: Array, released: Array) -> None:
        granted = np.minimum(self.run.end, released + self.run.capacity - 1 + self.run.beyond)
        self.native.advance(GRANTED, envs, granted, len(envs), 0)
        self.notify("inference")


def main(role: str, run: str) -> None:
    worker = {"worker": Worker, "inference": Inference, "learner": Learner}[role](Run(**json.loads(run)))
    worker.work()
    print(json.dumps(dataclasses.asdict(worker.findings)))


if __name__ == "__main__":
    main(*sys.argv[1:])
