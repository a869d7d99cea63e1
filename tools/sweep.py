"""Lists the segments in shared memory and removes what dead runs have left: ``python tools/sweep.py [--dry-run]``.

Nothing of a live owner, of another user or of another pid namespace is touched.
"""

from __future__ import annotations

import argparse

from shmcollect.sweep import describe, sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="only list")
    dry_run = parser.parse_args().dry_run
    print(describe(sweep(dry_run=dry_run), dry_run=dry_run))


if __name__ == "__main__":
    main()
