"""Lists the segments in shared memory and removes those whose owner is gone.

A run removes its own segment, also when it fails. What is left is left by a process that was killed outright; starting
a run of the same name reclaims it, and this sweeps up the rest. Each name is judged and removed under the lock that
creating takes, so no starter can lose what it has just made.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shmcollect.errors import ConfigError
from shmcollect.segment import PREFIX, SHM_DIRECTORY, Finding, check_name, inspect, lock, remove

_EPILOG = """
Only segments whose owner is gone are removed: never one that a live process owns, nor another user's, nor one from
another pid namespace (a container's), whose owner cannot be judged from here.

exit status: 0  nothing is left that should not be there
             1  with --dry-run, something would be removed; or something under our names is no segment of ours, or
                could not be judged or removed
             2  wrong arguments
"""


@dataclass(frozen=True)
class Verdict:
    """What was found under one name, and what became of it.

    Attributes:
        name: The run's name.
        finding: What was found; None if it could not be judged.
        text: What it is, and what was done.
        is_well: It is where it should be, or is there no more.
    """

    name: str
    finding: Finding | None
    text: str
    is_well: bool


def names_present() -> list[str]:
    """The names of ours that are taken, whatever by."""
    return sorted(entry.removeprefix(PREFIX) for entry in os.listdir(SHM_DIRECTORY) if entry.startswith(PREFIX))


def sweep(names: Sequence[str], *, dry_run: bool = False) -> Iterator[Verdict]:
    """Judges each of these names and removes the abandoned ones; those that nobody has any more are passed over."""
    for name in names:
        try:
            check_name(name)
            with lock():
                found = inspect(name)
                if found.is_abandoned and not dry_run:
                    remove(name)
        except FileNotFoundError:
            continue
        except ConfigError:
            yield Verdict(name, None, "no name that a run can have; left alone", False)
        except OSError as error:  # among them every SegmentError
            yield Verdict(name, None, f"could not be judged or removed: {error}", False)
        else:
            done = "left alone" if not found.is_abandoned else "would be removed" if dry_run else "removed"
            is_well = not found.is_foreign and not (found.is_abandoned and dry_run)
            yield Verdict(name, found, f"{found.reason}; {done}", is_well)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``shmcollect-sweep``; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="shmcollect-sweep",
        description=f"List the shmcollect segments in {SHM_DIRECTORY} and remove those whose owner is gone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to look at (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    options = parser.parse_args(arguments)
    names = options.names or names_present()
    verdicts = list(sweep(names, dry_run=options.dry_run))
    rows = [("NAME", "BYTES", "OWNER", "AGE", "VERDICT"), *(_row(verdict) for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    if verdicts:
        for name, size, owner, age, text in rows:
            cells = (name.ljust(widths[0]), size.rjust(widths[1]), owner.rjust(widths[2]), age.rjust(widths[3]), text)
            print("  ".join(cells))
    else:
        print(f"no segments in {SHM_DIRECTORY}")
    return 0 if all(verdict.is_well for verdict in verdicts) else 1


def _row(verdict: Verdict) -> tuple[str, str, str, str, str]:
    found = verdict.finding
    name = verdict.name if verdict.name.isascii() and verdict.name.isprintable() else ascii(verdict.name)
    if found is None:
        return (name, "-", "-", "-", verdict.text)
    owner = "-" if found.owner is None else str(found.owner.pid)
    return (name, f"{found.size_bytes:,}", owner, _age(time.time() - found.created_s), verdict.text)


def _age(seconds: float) -> str:
    """In the largest unit of which it has at least two."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
