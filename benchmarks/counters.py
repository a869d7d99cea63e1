"""Step counters kept by the envs themselves, in a file that every process of a run maps.

One cache line per env, so that envs in different processes don't slow each other down:

    word 0   steps taken (resets are not steps)
    word 1   nanoseconds spent in them, where the env measures it

An env adds to its own line directly in the mapped file and at the end of each step, so the file is exact at any
time, however a process ends. A line has one writer: the env it belongs to.
"""

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS_PER_LINE = 8
STEPS, STEP_NS = 0, 1


def create(path: str, num_envs: int) -> None:
    """Makes the file at `path`, all counts zero."""
    Path(path).write_bytes(bytes(8 * WORDS_PER_LINE * num_envs))


def attach(path: str, index: int) -> memoryview:
    """The line of env `index` as a writable view of int64 words."""
    with open(path, "r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    return words[WORDS_PER_LINE * index : WORDS_PER_LINE * (index + 1)]


def read(path: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Steps and nanoseconds of every env: two arrays [num_envs]."""
    lines = np.fromfile(path, np.int64).reshape(-1, WORDS_PER_LINE)
    return lines[:, STEPS], lines[:, STEP_NS]
