"""Checks the models of the protocol with spin: ``python tests/protocol/check_models.py [--quick]``.

The right protocol must pass, every deliberately broken one must be caught. Needs ``spin`` and a C compiler.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
MEMORY_MB = 10_000


@dataclass(frozen=True)
class Check:
    """One search.

    Attributes:
        name: What it looks at.
        options: Definitions for the model, e.g. ``"CRASHES=2"``.
        model: Its file, without the ending.
        is_right: Whether the model is of the right protocol.
        is_quick: Whether it takes seconds.
        is_sampled: Whether the state space is too large to be searched as a whole (bitstate search).
    """

    name: str
    options: tuple[str, ...] = ()
    model: str = "rings"
    is_right: bool = True
    is_quick: bool = True
    is_sampled: bool = False


CHECKS = (
    Check("one env"),
    Check("one env, rollouts of two steps", ("LENGTH=2", "CAPACITY=3", "ROLLOUTS=2")),
    Check("one env, one crash", ("CRASHES=1",)),
    Check("one env, two crashes", ("CRASHES=2", "ROLLOUTS=2"), is_quick=False),
    Check("two envs", ("ENVS=2", "ROLLOUTS=1"), is_quick=False),
    Check("two envs, one crash", ("ENVS=2", "ROLLOUTS=2", "CRASHES=1"), is_quick=False, is_sampled=True),
    Check("no re-check before sleeping", ("NO_RECHECK",), is_right=False),
    Check("key read after the check", ("KEY_AFTER_CHECK",), is_right=False),
    Check("flag cleared by the notifier", ("NOTIFIER_CLEARS",), is_right=False),
    Check("published before it is written", ("PUBLISH_FIRST",), is_right=False),
    Check("one step granted too many", ("GRANT_ONE_MORE",), is_right=False),
    Check("a successor that rings no bells", ("RINGS_NO_BELL", "CRASHES=1"), is_right=False),
    Check("a successor that rewrites a published slot", ("REWRITES", "CRASHES=1"), is_right=False),
    Check("weights, two crashes", ("CRASHES=2",), "weights"),
    Check("weights by their counts alone, one crash", ("NO_ANNOUNCEMENT",), "weights"),
    Check("weights: count even before they are written", ("EVEN_FIRST", "NO_ANNOUNCEMENT"), "weights", is_right=False),
    Check("weights: odd counts ignored", ("ODD_IGNORED", "NO_ANNOUNCEMENT"), "weights", is_right=False),
    Check("weights: no second look at the count", ("NO_REVALIDATION", "NO_ANNOUNCEMENT"), "weights", is_right=False),
    Check("weights: the version of the latest bank", ("VERSION_OF_LATEST",), "weights", is_right=False),
)


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        error: The first error, or an empty string.
        states: States it stored.
        is_complete: Whether it ended by itself, neither at a depth nor at a memory limit.
        seconds: How long it took.
    """

    error: str
    states: int
    is_complete: bool
    seconds: float


def search(check: Check) -> Outcome:
    """Runs a check.

    Raises:
        CalledProcessError: The model does not compile.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> str:
            return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

        run("spin", "-a", *(f"-D{each}" for each in check.options), str(FOLDER / f"{check.model}.pml"))
        how = ["-DBITSTATE"] if check.is_sampled else ["-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}"]
        run("gcc", "-O2", "-w", "-DSAFETY", *how, "-o", "pan", "pan.c")
        text = run("./pan", "-m200000", *(["-w31"] if check.is_sampled else []))
    found = re.search(r"^pan:1: (.*) \(at depth", text, re.MULTILINE)
    states = re.search(r"^\s*(\d+) states, stored", text, re.MULTILINE)
    errors = re.search(r"errors: (\d+)", text)
    if states is None or errors is None or (found is None) != (errors[1] == "0"):
        raise RuntimeError(f"{check.name}: cannot read what spin says:\n{text}")
    is_complete = not re.search(r"reached -DMEMLIM|max search depth too small|Search not completed", text)
    return Outcome(found[1] if found else "", int(states[1]), is_complete, time.monotonic() - started_s)


def judge(check: Check, outcome: Outcome) -> str:
    """What is wrong with the outcome; an empty string if it is as it should be."""
    if not check.is_right:
        return "" if outcome.error else "not caught"
    if outcome.error:
        return outcome.error
    return "" if outcome.is_complete else "the search was not completed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what takes longer than seconds")
    quick = parser.parse_args().quick
    if shutil.which("spin") is None:
        print("spin is not installed (e.g. apt install spin)", file=sys.stderr)
        return 2
    failed = False
    for check in CHECKS:
        if quick and not check.is_quick:
            continue
        outcome = search(check)
        wrong = judge(check, outcome)
        failed |= bool(wrong)
        verdict = f"FAILED: {wrong}" if wrong else "holds" if check.is_right else f"caught: {outcome.error}"
        how = "sampled" if check.is_sampled else "states"
        print(f"{check.name:45} {outcome.states:12,} {how:8} {outcome.seconds:6.1f} s  {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
