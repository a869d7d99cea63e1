"""``python -m shmcollect``."""

import sys

from shmcollect.cli import main

if __name__ == "__main__":
    sys.exit(main())
