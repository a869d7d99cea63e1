"""Who gets which seed: the same env the same, whatever the number of workers, and nobody somebody else's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import SeedSequence

from shmcollect.seeding import env_seeds, inference_seed, root_sequence, worker_seed


def test_env_i_gets_the_ith_child_of_the_seed_sequence() -> None:
    children = SeedSequence(17).spawn(50)
    expected = [int(child.generate_state(1)[0]) for child in children]
    assert env_seeds(root_sequence(17), 50) == expected


def test_an_envs_seed_does_not_depend_on_how_many_there_are() -> None:
    root = root_sequence(3)
    assert env_seeds(root, 5) == env_seeds(root, 1024)[:5]
    assert env_seeds(root, 5) == env_seeds(root_sequence(3), 5), "asking must not use anything up"


def test_everybody_has_another_seed() -> None:
    root = root_sequence(0)
    seeds = [*env_seeds(root, 1024), *(worker_seed(root, w) for w in range(64)), inference_seed(root)]
    assert len(set(seeds)) == len(seeds)
    assert not set(seeds) & set(env_seeds(root_sequence(1), 64))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**64, 2**200])
def test_a_seed_decides_everything(seed: int) -> None:
    def all_seeds() -> list[int]:
        root = root_sequence(seed)
        return [*env_seeds(root, 3), worker_seed(root, 0), worker_seed(root, 1), inference_seed(root)]

    assert all_seeds() == all_seeds()
    assert all(type(each) is int and 0 <= each < 2**32 for each in all_seeds())


def test_without_a_seed_every_run_differs() -> None:
    roots = [root_sequence(None) for _ in range(2)]
    assert env_seeds(roots[0], 3) != env_seeds(roots[1], 3)
    assert env_seeds(roots[0], 3) == env_seeds(roots[0], 3)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        root_sequence(-1)


def test_seeds_fit_the_generators_they_are_for() -> None:
    for seed in env_seeds(root_sequence(5), 10):
        np.random.RandomState(seed)  # the one that takes 32 bits
