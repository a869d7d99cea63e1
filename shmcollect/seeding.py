"""Who gets which seed: one `numpy.random.SeedSequence`, its children for the envs, two other branches for the rest."""

from __future__ import annotations

import numpy as np
from numpy.random import SeedSequence

# Branches far above any env index, so that no process shares a stream with an env.
_WORKER_BRANCH = 2**32 - 1
_INFERENCE_BRANCH = 2**32 - 2


def root_sequence(seed: int | None) -> SeedSequence:
    """The sequence everything comes from; fresh entropy without a seed.

    Raises:
        ValueError: A negative seed.
    """
    return SeedSequence(seed)


def env_seeds(root: SeedSequence, num_envs: int, restarts: int = 0) -> list[int]:
    """The seed of each env's first reset: its own child of the root, whatever the number of workers.

    Args:
        root: The run's sequence.
        num_envs: How many envs there are.
        restarts: How often the worker of an env has been replaced: every successor's envs get new seeds.
    """
    return [_number(root, restarts, env) for env in range(num_envs)]


def worker_seed(root: SeedSequence, worker: int, restarts: int = 0) -> int:
    """The seed of a worker's global generators (``random``, ``numpy.random``, ``torch``)."""
    return _number(root, restarts, _WORKER_BRANCH, worker)


def inference_seed(root: SeedSequence, restarts: int = 0) -> int:
    """The seed of torch in the inference process."""
    return _number(root, restarts, _INFERENCE_BRANCH)


def _number(root: SeedSequence, restarts: int, *branch: int) -> int:
    """One number of a branch, or of that branch's child of this number."""
    sequence = SeedSequence(root.entropy, spawn_key=(*branch, restarts) if restarts else branch)
    return int(sequence.generate_state(1, np.uint32)[0])
