"""What a learner computes from a batch: next observations, bootstrap observations, flat rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmcollect.batch import Batch, Episode, FinalObs, map_nested

DTYPES = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


def make_batch(ended: list[list[str]], obs: Any, following: Any, final: Any | None, *, kept: bool = True) -> Batch:
    """A batch of one env per rollout; ``ended`` says of each step how it ends its episode, ``""`` if it does not."""
    size, length = len(ended), len(ended[0])
    index = [[b, t] for b in range(size) for t in range(length) if ended[b][t]]
    steps = torch.arange(length).expand(size, length).clone()
    return Batch(
        obs=obs,
        action=steps * 10,
        extras={"value": steps / 2},
        reward=steps.float(),
        terminated=torch.tensor([["term" in each for each in row] for row in ended]),
        truncated=torch.tensor([["trunc" in each for each in row] for row in ended]),
        interrupted=torch.zeros(size, length, dtype=torch.bool),
        episode_start=torch.zeros(size, length, dtype=torch.bool),
        policy_version=torch.zeros(size, length, dtype=torch.int64),
        sequence=steps,
        env_index=torch.arange(size) + 100,
        final_obs=FinalObs(torch.tensor(index, dtype=torch.int64).reshape(-1, 2), final) if kept else None,
        episodes=[Episode(100, 1.5, 2, 0.25)],
        following_obs=following,
    )


@st.composite
def endings(draw: st.DrawFn) -> list[list[str]]:
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    step = st.sampled_from(["", "terminated", "truncated", "terminated and truncated"])
    return draw(st.lists(st.lists(step, min_size=length, max_size=length), min_size=size, max_size=size))


@given(endings(), st.sampled_from(DTYPES), st.sampled_from([(), (2,), (3, 1, 2), (0, 2)]))
@settings(deadline=None, max_examples=150)
def test_next_obs_is_the_next_row_or_the_final_observation(
    ended: list[list[str]], dtype: str, shape: tuple[int, ...]
) -> None:
    size, length = len(ended), len(ended[0])
    ends = [(b, t) for b in range(size) for t in range(length) if ended[b][t]]

    def fill(*leading: int, offset: int) -> np.ndarray[Any, Any]:
        rows = np.arange(offset, offset + math.prod(leading)).reshape(*leading, *[1] * len(shape))
        return np.broadcast_to(rows, (*leading, *shape)).astype(dtype)

    obs, following, final = fill(size, length, offset=0), fill(size, offset=40), fill(len(ends), offset=70)
    before = obs.tobytes(), following.tobytes(), final.tobytes()
    expected = np.concatenate((obs[:, 1:], following[:, None]), 1)
    for number, end in enumerate(ends):
        expected[end] = final[number]
    batch = make_batch(ended, *map(torch.from_numpy, (obs, following, final)))
    for made, wanted in ((batch.next_obs, expected), (batch.bootstrap_obs, expected[:, -1])):
        assert made.numpy().dtype == wanted.dtype and made.shape == wanted.shape
        assert made.numpy().tobytes() == wanted.tobytes()
    assert before == (obs.tobytes(), following.tobytes(), final.tobytes()), "the batch itself was changed"


def test_nested_observations_keep_their_nesting() -> None:
    def nested(fill: float, *leading: int) -> dict[str, Any]:
        return {
            "a": torch.full((*leading, 2), fill),
            "t": (torch.full(leading, int(fill)), {"b": torch.full(leading, fill)}),
        }

    batch = make_batch([["", "terminated"], ["", ""]], nested(1, 2, 2), nested(2, 2), nested(3, 1))
    for leaf in ("next_obs", "bootstrap_obs"):
        value = getattr(batch, leaf)
        assert list(value) == ["a", "t"] and type(value["t"]) is tuple and list(value["t"][1]) == ["b"]
    assert batch.next_obs["t"][0].tolist() == [[1, 3], [1, 2]]
    assert batch.bootstrap_obs["a"].tolist() == [[3, 3], [2, 2]]


def test_without_final_observations_an_end_cannot_be_looked_beyond() -> None:
    obs, following = torch.zeros(1, 2), torch.ones(1)
    whole = make_batch([["", ""]], obs, following, None, kept=False)
    assert whole.next_obs.tolist() == [[0, 1]] and whole.bootstrap_obs.tolist() == [1]
    ends_inside = make_batch([["terminated", ""]], obs, following, None, kept=False)
    assert ends_inside.bootstrap_obs.tolist() == [1]
    with pytest.raises(ValueError, match="final_obs=False left out"):
        _ = ends_inside.next_obs
    ends_last = make_batch([["", "truncated"]], obs, following, None, kept=False)
    for name in ("next_obs", "bootstrap_obs"):
        with pytest.raises(ValueError, match="an episode ended here"):
            getattr(ends_last, name)


def test_what_is_made_on_demand_is_the_callers_own() -> None:
    batch = make_batch([["", ""]], torch.zeros(1, 2), torch.ones(1), torch.zeros(0))
    batch.next_obs.fill_(9)
    batch.bootstrap_obs.fill_(9)
    assert batch.obs.tolist() == [[0, 0]] and batch.following_obs.tolist() == [1]


def test_a_batch_counts_rollouts_and_frames() -> None:
    batch = make_batch([["", "", ""]] * 4, torch.zeros(4, 3), torch.zeros(4), torch.zeros(0))
    assert (len(batch), batch.num_frames) == (4, 12)


def test_flat_rows_keep_their_env() -> None:
    batch = make_batch([["", ""], ["", ""]], {"o": torch.arange(4).reshape(2, 2, 1)}, {"o": torch.zeros(2, 1)}, None)
    flat = batch.flatten()
    assert flat["obs"]["o"].tolist() == [[0], [1], [2], [3]]
    assert flat["env_index"].tolist() == [100, 100, 101, 101]
    assert flat["sequence"].tolist() == [0, 1, 0, 1]
    assert flat["extras"]["value"].tolist() == [0, 0.5, 0, 0.5]
    assert set(flat) == {*batch.to_dict(), "env_index"}


def test_to_dict_has_every_value_per_step() -> None:
    batch = make_batch([["", ""]], torch.zeros(1, 2), torch.zeros(1), torch.zeros(0))
    assert list(batch.to_dict()) == [
        "obs",
        "action",
        "extras",
        "reward",
        "terminated",
        "truncated",
        "interrupted",
        "episode_start",
        "policy_version",
        "sequence",
    ]
    assert batch.to_dict()["obs"] is batch.obs


def test_a_batch_moves_with_everything_it_has() -> None:
    obs = {"a": torch.zeros(1, 2), "t": (torch.zeros(1, 2),)}
    batch = make_batch(
        [["", "terminated"]],
        obs,
        {"a": torch.zeros(1), "t": (torch.zeros(1),)},
        {"a": torch.ones(1), "t": (torch.ones(1),)},
    )
    there = batch.to("meta")
    found: list[torch.device] = []
    for name in (*batch.to_dict(), "env_index", "following_obs"):
        map_nested(lambda t: found.append(t.device), getattr(there, name))
    assert there.final_obs is not None
    map_nested(lambda t: found.append(t.device), {"index": there.final_obs.index, "obs": there.final_obs.obs})
    assert {device.type for device in found} == {"meta"}
    assert there.episodes == batch.episodes
    assert batch.to("cpu").obs["a"] is obs["a"]


def test_a_batch_without_final_observations_moves_too() -> None:
    batch = make_batch([[""]], torch.zeros(1, 1), torch.zeros(1), None, kept=False)
    assert batch.to("meta").final_obs is None


def test_map_nested_goes_through_several_values_at_once() -> None:
    added = map_nested(lambda a, b: a + b, {"x": 1, "y": (2, {"z": 3})}, {"y": (20, {"z": 30}), "x": 10})
    assert added == {"x": 11, "y": (22, {"z": 33})}
    with pytest.raises(ValueError, match="shorter"):
        map_nested(lambda a, b: a, (1, 2), (1,))
