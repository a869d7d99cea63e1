"""`python tools/sweep.py [--dry-run] [NAME ...]`: what `shmcollect-sweep` does, from a checkout."""

import sys

from shmcollect.sweep import main

if __name__ == "__main__":
    sys.exit(main())
