"""RolloutReader: finished rollouts, found in turn, copied or viewed where they lie, and given back once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import small_segment

from shmcollect import _native
from shmcollect.envs import action_tree, observation_tree
from shmcollect.errors import ConfigError
from shmcollect.layout import Field
from shmcollect.ring import OBSERVED, RELEASED, Rings
from shmcollect.rollouts import RolloutReader

OBSERVATION = spaces.Dict({"b": spaces.Box(-9e9, 9e9, (2,), np.float64), "a": spaces.Discrete(10**9)})
ACTION = spaces.Tuple((spaces.Box(-9e9, 9e9, (), np.float32), spaces.MultiDiscrete([10**9, 10**9])))


def stamp(env: Any, sequence: Any, field: int) -> Any:
    """A number that tells field, env and sequence."""
    return (field * 100 + env) * 10_000 + sequence


@contextmanager
def reader_of(num_envs: int = 3, capacity: int = 6, length: int = 2, *, first: int = 0) -> Iterator[RolloutReader]:
    """A reader over full rings: the slots hold ``first`` .. ``first + capacity - 1``, complete but for the last."""
    obs, action = observation_tree(OBSERVATION), action_tree(ACTION)
    fields = [
        *(Field("obs", leaf.path, leaf.dtype, leaf.shape) for leaf in obs.leaves),
        *(Field("action", leaf.path, leaf.dtype, leaf.shape) for leaf in action.leaves),
        Field("extras", ("value",), np.dtype("f4"), (3,)),
        Field("extras", ("logits",), np.dtype("f8"), ()),
    ]
    with small_segment(*fields, worker_envs=(num_envs,), capacity=capacity, length=length) as segment:
        rings = Rings(segment)
        envs, sequences = np.arange(num_envs)[:, None], first + np.arange(capacity)
        for i, each in enumerate(rings.layout.fields):
            if each.dtype != bool:
                view = rings.view(i)
                values = stamp(envs, sequences, i) if each.kind != "sequence" else sequences + 0 * envs
                view[:, sequences % capacity] = values.reshape(*values.shape, *[1] * len(each.shape))
        set_cursor(rings, OBSERVED, [first + capacity] * num_envs)
        set_cursor(rings, RELEASED, [first] * num_envs)
        yield RolloutReader(rings, obs, action)


def set_cursor(rings: Rings, which: int, values: list[int]) -> None:
    for offset, value in zip(rings.layout.cursors[which].tolist(), values, strict=True):
        _native.store(rings.buffer, offset, value)


def array(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def end_episode(rings: Rings, env: int, sequence: int, kind: str = "terminated", *, interrupted: bool = False) -> None:
    slot = sequence % rings.capacity
    rings.view(rings.fields[kind][0])[env, slot] = True
    rings.view(rings.fields["interrupted"][0])[env, slot] = interrupted


# ---- which are finished


@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**12), st.data())
def test_a_rollout_is_finished_once_the_observation_after_it_is_there(
    num_envs: int, length: int, turns: int, data: st.DataObject
) -> None:
    released = [turns * length] * num_envs
    observed = [data.draw(st.integers(0, 2 * length + 1)) + turns * length for _ in range(num_envs)]
    start = data.draw(st.integers(0, num_envs - 1))
    with reader_of(num_envs, 2 * length + 1, length) as reader:
        set_cursor(reader.rings, RELEASED, released)
        set_cursor(reader.rings, OBSERVED, observed)
        envs, starts = reader.finished(start)
        round_ = [(start + i) % num_envs for i in range(num_envs)]
        assert envs.tolist() == [env for env in round_ if observed[env] > released[env] + length]
        assert starts.tolist() == [released[env] for env in envs]


def test_releasing_makes_the_next_one_the_oldest() -> None:
    with reader_of(2, 6, 2) as reader:
        for expected in (0, 2):
            envs, starts = (each.copy() for each in reader.finished())
            assert (envs.tolist(), starts.tolist()) == ([0, 1], [expected] * 2)
            reader.release(envs, starts)
        assert len(reader.finished()[0]) == 0, "slot 4 is complete, but not the observation after slot 5"
        assert reader.rings.cursors(RELEASED).tolist() == [4, 4]


def test_what_has_been_released_is_not_taken_back() -> None:
    with reader_of(1, 6, 2) as reader:
        reader.release(array(0), array(2))
        with pytest.raises(ValueError, match="would go back from 4 to 2"):
            reader.release(array(0), array(0))


# ---- copies


@pytest.mark.parametrize("first", [0, 1, 4, 5, 2**32 - 2])
def test_a_copied_batch_has_every_field_of_every_row(first: int) -> None:
    with reader_of(3, 6, 2, first=first) as reader:
        draft = reader.draft(3)
        draft.add(array(2, 0), array(first, first))
        assert (draft.filled, draft.missing) == (2, 1)
        draft.add(array(2), array(first + 2))
        batch = draft.finish()
        fields = reader.rings.fields
    envs, starts = array(2, 0, 2), array(first, first, first + 2)
    sequences = starts[:, None] + np.arange(2)
    assert batch.env_index.tolist() == envs.tolist()
    assert batch.sequence.tolist() == sequences.tolist()

    def expect(tensor: torch.Tensor, field: int, at: Any = sequences, env: Any = envs[:, None]) -> None:
        values = stamp(env, at, field)
        assert tensor.ndim >= values.ndim
        wanted = np.broadcast_to(values.reshape(*values.shape, *[1] * (tensor.ndim - values.ndim)), tensor.shape)
        assert np.array_equal(tensor.numpy(), wanted.astype(tensor.numpy().dtype))

    obs = dict(zip(("a", "b"), fields["obs"], strict=True))
    for key in ("a", "b"):
        expect(batch.obs[key], obs[key])
        expect(batch.following_obs[key], obs[key], starts + 2, envs)
    for part, field in zip(batch.action, fields["action"], strict=True):
        expect(part, field)
    for name, field in zip(("value", "logits"), fields["extras"], strict=True):
        expect(batch.extras[name], field)
    expect(batch.reward, fields["reward"][0])
    expect(batch.policy_version, fields["policy_version"][0])
    shapes = {"a": (3, 2), "b": (3, 2, 2)}
    assert {key: tuple(value.shape) for key, value in batch.obs.items()} == shapes
    assert tuple(batch.extras["value"].shape) == (3, 2, 3)
    dtypes = batch.obs["a"].dtype, batch.obs["b"].dtype, batch.action[0].dtype, batch.reward.dtype
    assert dtypes == (torch.int64, torch.float64, torch.float32, torch.float32)


def test_copying_releases_and_copies_stay_as_they_are() -> None:
    with reader_of(2, 6, 2) as reader:
        draft = reader.draft(2)
        draft.add(array(0, 1), array(0, 0))
        assert reader.rings.cursors(RELEASED).tolist() == [2, 2]
        batch = draft.finish()
        before = batch.obs["b"].clone(), batch.following_obs["a"].clone(), batch.env_index.clone()
        for i, each in enumerate(reader.rings.layout.fields):
            reader.rings.view(i)[:] = np.zeros((), each.dtype)
        draft.settle()
        assert reader.rings.cursors(RELEASED).tolist() == [2, 2]
    for now, then in zip((batch.obs["b"], batch.following_obs["a"], batch.env_index), before, strict=True):
        assert torch.equal(now, then)


def test_a_batch_outlives_the_arrays_that_named_its_rollouts() -> None:
    with reader_of(2, 6, 2) as reader:
        envs, starts = array(1), array(0)
        draft = reader.draft(1)
        draft.add(envs, starts)
        envs[0] = starts[0] = 0
        assert draft.finish().env_index.tolist() == [1]


# ---- ends of episodes


def test_ends_of_episodes_are_listed_with_what_was_kept_of_them() -> None:
    with reader_of(3, 6, 2) as reader:
        rings = reader.rings
        records = rings.view(rings.fields["episode"][0])
        records[2, 1], records[0, 0], records[2, 2] = (0.1, 7, 0.5), (-2.5, 2**40, 0.25), (3.0, 1, 9.0)
        end_episode(rings, 2, 1)
        end_episode(rings, 0, 0, "truncated")
        end_episode(rings, 2, 2)
        end_episode(rings, 2, 2, "truncated")
        end_episode(rings, 1, 0)  # not in this batch
        draft = reader.draft(3)
        draft.add(array(2, 0), array(0, 0))
        draft.add(array(2), array(2))
        batch = draft.finish()
        final_fields = rings.fields["final_obs"]
    assert batch.final_obs is not None
    assert batch.final_obs.index.tolist() == [[0, 1], [1, 0], [2, 0]]
    envs, at = array(2, 0, 2), array(1, 0, 2)
    for key, field in zip(("a", "b"), final_fields, strict=True):
        expected = stamp(envs, at, field)
        assert (batch.final_obs.obs[key].numpy().reshape(3, -1) == expected[:, None]).all()
    assert batch.episodes == [(2, 0.1, 7, 0.5), (0, -2.5, 2**40, 0.25), (2, 3.0, 1, 9.0)]
    assert [type(value) for value in batch.episodes[0]] == [int, float, int, float]
    assert batch.terminated.tolist() == [[False, True], [False, False], [True, False]]
    assert batch.truncated.tolist() == [[False, False], [True, False], [True, False]]
    assert batch.next_obs["a"][0, 1] == stamp(2, 1, final_fields[0])


def test_an_interrupted_episode_has_a_final_observation_but_no_record() -> None:
    with reader_of(2, 6, 2) as reader:
        end_episode(reader.rings, 0, 1, "truncated", interrupted=True)
        end_episode(reader.rings, 1, 0)
        draft = reader.draft(2)
        draft.add(array(0, 1), array(0, 0))
        batch = draft.finish()
    assert batch.interrupted.tolist() == [[False, True], [False, False]]
    assert batch.final_obs is not None and batch.final_obs.index.tolist() == [[0, 1], [1, 0]]
    assert [each.env_index for each in batch.episodes] == [1]


def test_a_batch_without_ends_has_empty_lists_of_the_right_types() -> None:
    with reader_of(1, 6, 2) as reader:
        draft = reader.draft(1)
        draft.add(array(0), array(0))
        batch = draft.finish()
    assert batch.episodes == [] and batch.final_obs is not None
    assert batch.final_obs.index.shape == (0, 2) and batch.final_obs.index.dtype == torch.int64
    assert {key: tuple(value.shape) for key, value in batch.final_obs.obs.items()} == {"a": (0,), "b": (0, 2)}
    assert batch.final_obs.obs["b"].dtype == torch.float64


# ---- views


@pytest.mark.parametrize("start", [0, 2, 4])
def test_views_lie_in_the_rings(start: int) -> None:
    with reader_of(3, 6, 2, first=start) as reader:
        rings = reader.rings
        end_episode(rings, 1, start + 1)
        batch = reader.view(range(2), start)
        assert batch.env_index.tolist() == [0, 1]
        assert batch.sequence.tolist() == [[start, start + 1]] * 2
        assert batch.final_obs is not None and batch.final_obs.index.tolist() == [[1, 1]]
        assert batch.following_obs["a"].tolist() == [stamp(env, start + 2, rings.fields["obs"][0]) for env in (0, 1)]
        rings.view(rings.fields["reward"][0])[1, start % 6] = 77
        assert batch.reward[1, 0] == 77
        assert rings.cursors(RELEASED).tolist() == [start] * 3


def test_a_view_may_be_of_any_neighbours() -> None:
    with reader_of(4, 6, 2) as reader:
        end_episode(reader.rings, 3, 2)
        batch = reader.view(range(2, 4), 2)
        reward = reader.rings.fields["reward"][0]
    assert batch.env_index.tolist() == [2, 3]
    assert batch.reward.tolist() == [[stamp(env, at, reward) for at in (2, 3)] for env in (2, 3)]
    assert [each.env_index for each in batch.episodes] == [3]


def test_views_need_rollouts_in_one_piece() -> None:
    with reader_of(1, 5, 2) as reader, pytest.raises(ConfigError, match=r"capacity=5 is not a multiple of 2"):
        reader.view(range(1), 0)


def test_single_rows_are_copied() -> None:
    with reader_of(3, 6, 2) as reader:
        field = reader.rings.fields["obs"][1]
        rows = reader.rows(field, array(2, 0), array(5, 3))
        assert rows.tolist() == [[stamp(2, 5, field)] * 2, [stamp(0, 3, field)] * 2]
        rows[:] = 0
        assert reader.rows(field, array(2), array(5)).tolist() == [[stamp(2, 5, field)] * 2]


def test_rows_beyond_the_rings_are_refused() -> None:
    with reader_of(2, 6, 2) as reader:
        draft = reader.draft(1)
        for envs in (array(2), array(-1)):
            with pytest.raises(IndexError, match="env="):
                draft.add(envs, array(0))
        assert draft.filled == 0


def test_a_draft_that_is_full_takes_no_more() -> None:
    with reader_of(2, 6, 2) as reader:
        draft = reader.draft(1)
        with pytest.raises(ValueError, match=r"expected .* bytes"):
            draft.add(array(0, 1), array(0, 0))
        assert draft.filled == 0 and reader.rings.cursors(RELEASED).tolist() == [0, 0]
