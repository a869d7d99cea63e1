"""The protocol between real processes: a worker, inference and a learner, each a process of its own (litmus_roles.py).

Forbidden, and counted apart by every role that reads rows:

- torn: the elements of a row disagree with each other;
- lost: a row was overwritten by a later one before it was read;
- repeated: an earlier row was read where a new one should have been;
- reordered: the rows of one reading were exchanged;
- lost wake-ups: a sleep of a second ran out although what it waited for had been published;
- stuck: a run that does not end.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from litmus_roles import LONGEST_RUN_S, Findings, Run, layout, stamp

from shmcollect import _native
from shmcollect.layout import Layout
from shmcollect.ring import ACTED, GRANTED, OBSERVED, RELEASED, Rings
from shmcollect.segment import Segment, new_name

ROLES = ("worker", "inference", "learner")
ROLES_FILE = Path(__file__).with_name("litmus_roles.py")


def set_cursors(segment: Segment, start: int) -> None:
    """Begins every env's cursors at ``start``, as after so many steps."""
    for which in (OBSERVED, ACTED, RELEASED, GRANTED):
        for offset in segment.layout.cursors[which]:
            _native.store(segment.buffer, int(offset), start)


def play(run: Run) -> dict[str, Findings]:
    """Runs the three roles to the end; returns what each found."""
    segment = Segment.create(run.name, layout(run.num_envs, run.capacity, run.length))
    processes = {}
    try:
        set_cursors(segment, run.start)
        for role in ROLES:
            command = [sys.executable, str(ROLES_FILE), role, json.dumps(dataclasses.asdict(run))]
            processes[role] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        outputs = {role: process.communicate(timeout=LONGEST_RUN_S + 30)[0] for role, process in processes.items()}
        return {role: Findings(**json.loads(output)) for role, output in outputs.items()}
    finally:
        for process in processes.values():
            with process:
                process.kill()
        segment.unlink()
        segment.close()


def assert_nothing_forbidden(run: Run) -> None:
    findings = play(run)
    assert {role: found.forbidden() for role, found in findings.items()} == {role: {} for role in ROLES}
    for role, found in findings.items():
        assert found.rows >= run.num_envs * run.steps, f"{role} read too few rows"
        assert found.sleeps > 0, f"{role} never slept: no wake-up was put to the test"


NEAR = {"0": 0, "2^31": 2**31, "2^32": 2**32}

# capacity, T, envs, which role dawdles, near which number the cursors are half-way, share of the steps
CASES = {
    "lock-step": (2, 1, 1, "", "0", 0.01),
    "smallest": (2, 1, 48, "", "2^32", 0.2),
    "smallest, slow reader": (2, 1, 48, "learner", "0", 0.1),
    "smallest, slow producer": (2, 1, 48, "worker", "2^31", 0.1),
    "T + 1": (6, 5, 32, "", "2^31", 0.2),
    "T + 1, slow reader": (6, 5, 32, "learner", "2^32", 0.13),
    "T + 1, slow producer": (6, 5, 32, "worker", "0", 0.13),
    "roomy, slow reader": (32, 5, 16, "learner", "2^32", 0.13),
}


def case(name: str, total: int) -> Run:
    capacity, length, num_envs, slow, near, share = CASES[name]
    steps = int(total * share) // num_envs // length * length
    start = max(0, NEAR[near] - steps // 2)
    return Run(new_name(), num_envs, capacity, length, steps, start, slow=slow)


@pytest.mark.parametrize("name", CASES)
def test_no_row_is_torn_lost_repeated_or_reordered_and_no_wakeup_lost(name: str) -> None:
    assert_nothing_forbidden(case(name, total=1_000_000))


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_the_same_over_more_steps(name: str) -> None:
    for _ in range(5):
        assert_nothing_forbidden(case(name, total=2_000_000))


def test_the_cases_make_a_million_steps() -> None:
    assert sum(run.num_envs * run.steps for run in (case(name, 1_000_000) for name in CASES)) > 0.99e6


def test_one_step_granted_too_many_is_noticed() -> None:
    run = Run(new_name(), num_envs=4, capacity=6, length=5, steps=1000, beyond=1, slow="learner")
    found = play(run)["learner"]
    assert found.lost > 0


@pytest.mark.parametrize("silent", ROLES)
def test_a_role_that_rings_nobody_is_noticed(silent: str) -> None:
    findings = play(Run(new_name(), num_envs=1, capacity=2, length=1, steps=3, silent=silent))
    assert sum(found.lost_wakeups for found in findings.values()) > 0


WRITER = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from litmus_roles import stamp
from shmcollect.ring import Rings
from shmcollect.segment import Segment
rings = Rings(Segment.attach(sys.argv[2], writable=True))
row, sequence = np.empty(int(sys.argv[3]), np.int64), 0
while True:
    row.fill(stamp(0, sequence))
    rings.native.observe(0, sequence, (row,))
    sequence += 1
"""


def read_newest_but(rings: Rings, back: int) -> tuple[int, np.ndarray, bool]:
    """A row as a reader from outside copies it: its sequence, its elements, and whether the slot's sequence vouches."""
    layout: Layout = rings.layout
    sequence = rings.native.cursor(OBSERVED, 0) - 1 - back
    slot = sequence % rings.capacity
    word = layout.field_offsets[layout.index("sequence")] + 8 * slot
    before = _native.load(rings.buffer, word)  # SYNC: slot sequence
    row = rings.view(layout.index("obs"))[0, slot].copy()
    _native.fence()
    return sequence, row, before == sequence == _native.load(rings.buffer, word)


def test_a_reader_from_outside_sees_no_torn_row_and_would_without_its_check() -> None:
    width = 4096
    segment = Segment.create(new_name(), layout(1, 4, 1, width))
    command = [sys.executable, "-c", WRITER, str(ROLES_FILE.parent), segment.name, str(width)]
    writer = subprocess.Popen(command)
    rings = Rings(Segment.attach(segment.name))
    good = bad = torn = 0
    deadline = time.monotonic() + LONGEST_RUN_S
    try:
        while (good < 1000 or torn < 10) and time.monotonic() < deadline:
            if rings.native.cursor(OBSERVED, 0) < rings.capacity:
                continue
            sequence, row, vouched = read_newest_but(rings, back=good % rings.capacity)
            right = bool((row == stamp(0, sequence)).all())
            good += vouched and right
            bad += vouched and not right
            torn += bool((row != row[0]).any())
    finally:
        with writer:
            writer.kill()
        segment.unlink()
        segment.close()
    assert bad == 0, "the slot's sequence vouched for a row that is not whole"
    assert good >= 1000
    assert torn >= 10, "rows were never torn: the check was not put to the test"


GRANTER = """
import sys
import numpy as np
from shmcollect import _native
from shmcollect.ring import ACTED, GRANTED, Rings
from shmcollect.segment import Segment
rings = Rings(Segment.attach(sys.argv[1], writable=True))
envs, at, granted = np.arange(rings.num_envs), rings.layout.words["grant_count"], 0
while True:
    granted += 1
    count = _native.load(rings.buffer, at)
    if sys.argv[2] == "counted":
        _native.store(rings.buffer, at, count + 1)  # SYNC: grant count
        _native.fence()
    rings.native.advance(GRANTED, envs, np.full(len(envs), granted), len(envs), 0)
    if sys.argv[2] == "counted":
        _native.store(rings.buffer, at, count + 2)
    while (rings.cursors(ACTED) < granted).any():
        pass
"""


@pytest.mark.parametrize("how", ["counted", "not counted"])
def test_a_scan_sees_a_grant_whole_or_not_at_all_if_it_is_counted(how: str) -> None:
    num_envs = 1024
    segment = Segment.create(new_name(), layout(num_envs, 2, 1))
    rings = Rings(segment)
    for offset in segment.layout.cursors[OBSERVED]:
        _native.store(segment.buffer, int(offset), 2**40)  # every env waits for its grant and for nothing else
    envs, sequences = np.empty(num_envs, np.int64), np.empty(num_envs, np.int64)
    whole = parts = 0
    enough = 3000 if how == "counted" else float("inf")
    deadline = time.monotonic() + LONGEST_RUN_S
    with subprocess.Popen([sys.executable, "-c", GRANTER, segment.name, how]) as granter:
        try:
            while not parts and whole < enough and time.monotonic() < deadline:
                ready = rings.native.scan(0, num_envs, envs, sequences)[0]
                whole += ready == num_envs
                parts += 0 < ready < num_envs
                rings.native.advance(ACTED, envs, sequences, ready, 1)
        finally:
            granter.kill()
            segment.unlink()
            segment.close()
    if how == "counted":
        assert parts == 0
        assert whole == enough, "the run is stuck"
    else:
        assert parts == 1, "a grant was never seen in part: the count was not put to the test"
