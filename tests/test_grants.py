"""Grants: never more than the ring has room for, never more than the budget, and in whole rollouts per env."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import small_segment

from shmcollect import _native
from shmcollect.grants import Grants
from shmcollect.layout import Field
from shmcollect.ring import GRANTED, RELEASED, Rings

few = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def rings_of(num_envs: int, capacity: int = 4, length: int = 2) -> Iterator[Rings]:
    obs = Field("obs", (), np.dtype("u1"), ())
    with small_segment(obs, worker_envs=(num_envs,), capacity=capacity, length=length) as segment:
        yield Rings(segment)


def set_cursor(rings: Rings, which: int, values: list[int]) -> None:
    for offset, value in zip(rings.layout.cursors[which].tolist(), values, strict=True):
        _native.store(rings.buffer, offset, value)


def grant_count(rings: Rings) -> int:
    return _native.load(rings.buffer, rings.layout.words["grant_count"])


@few
@given(
    num_envs=st.integers(1, 4),
    length=st.integers(1, 5),
    spare=st.integers(1, 12),
    total=st.none() | st.integers(0, 20),
    data=st.data(),
)
def test_grants_stay_within_ring_and_budget_and_get_there(
    num_envs: int, length: int, spare: int, total: int | None, data: st.DataObject
) -> None:
    with rings_of(num_envs, length + spare, length) as rings:
        grants = Grants(rings, total)
        released = np.zeros(num_envs, np.int64)
        for _ in range(data.draw(st.integers(1, 20))):
            before = rings.cursors(GRANTED)
            grants.draw_to_capacity()
            news = grants.publish()
            granted = rings.cursors(GRANTED)
            room = released + rings.capacity - 1
            assert (granted <= room).all() and (granted >= before).all()
            assert news == bool((granted > before).any())
            assert (granted == np.minimum(room, grants.drawn * length)).all()
            if total is None:
                assert (granted == room).all()
            else:
                assert grants.drawn.sum() <= total
            # Somebody takes a rollout of an env that has one.
            free = np.flatnonzero(granted - released >= length)
            if len(free):
                env = data.draw(st.sampled_from(free.tolist()))
                released[env] += length
                set_cursor(rings, RELEASED, released.tolist())
        if total is not None:
            finished = np.ones(num_envs, np.int64)
            while finished.any():
                grants.draw_to_capacity()
                grants.publish()
                finished = (rings.cursors(GRANTED) - released) // length
                released += finished * length
                set_cursor(rings, RELEASED, released.tolist())
            assert rings.cursors(GRANTED).sum() == released.sum() == total * length


@pytest.mark.parametrize(
    ("total", "asked", "drawn"),
    [
        (None, [2, 2, 2], [2, 2, 2]),
        (None, [3, 0, 1], [3, 0, 1]),
        (6, [2, 2, 2], [2, 2, 2]),
        (5, [2, 2, 2], [2, 2, 1]),
        (2, [2, 2, 2], [1, 1, 0]),
        (1, [0, 2, 2], [0, 1, 0]),
        (0, [2, 2, 2], [0, 0, 0]),
        (4, [9, 0, 0], [4, 0, 0]),
        (4, [9, 1, 0], [3, 1, 0]),
    ],
)
def test_a_budget_is_dealt_out_one_each_then_the_next_each(
    total: int | None, asked: list[int], drawn: list[int]
) -> None:
    with rings_of(3) as rings:
        grants = Grants(rings, total)
        for _ in range(2):  # what is allowed already is not allowed once more
            grants.draw_to(np.array(asked))
            assert grants.drawn.tolist() == drawn


def test_less_than_is_drawn_changes_nothing() -> None:
    with rings_of(2) as rings:
        grants = Grants(rings, None)
        grants.draw_to(np.array([3, 1]))
        grants.draw_to(np.array([1, 2]))
        assert grants.drawn.tolist() == [3, 2]


def test_nothing_is_granted_by_drawing_alone() -> None:
    with rings_of(2) as rings:
        grants = Grants(rings, None)
        grants.draw_to(np.array([1, 1]))
        assert rings.cursors(GRANTED).tolist() == [0, 0] and grant_count(rings) == 0
        assert grants.publish()
        assert rings.cursors(GRANTED).tolist() == [2, 2] and grant_count(rings) == 2
        assert not grants.publish()
        assert grant_count(rings) == 2


def test_inference_sees_a_grant_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """While only some envs have been granted their steps, the scan finds nothing to do."""
    with rings_of(3) as rings:
        for env in range(3):
            assert rings.native.observe(env, 0, (np.array(7, np.uint8),)) == -1
        envs, sequences = np.empty(3, np.int64), np.empty(3, np.int64)
        seen: list[tuple[int, int]] = []

        class Slow:
            """Grants env by env, and looks in between like inference."""

            def advance(self, which: int, granted_envs: Any, steps: Any, count: int, step: int) -> None:
                for i in range(count):
                    seen.append(rings.native.scan(0, 3, envs, sequences)[:2])
                    rings.native.advance(which, granted_envs[i : i + 1], steps[i : i + 1], 1, step)
                seen.append(rings.native.scan(0, 3, envs, sequences)[:2])

        grants = Grants(rings, None)
        grants.draw_to(np.ones(3, np.int64))
        native = rings.native
        fake = type("", (), {name: getattr(rings, name) for name in ("buffer", "layout", "capacity", "cursors")})()
        fake.native = Slow()
        monkeypatch.setattr(grants, "_rings", fake)
        assert grants.publish()
        assert seen == [(0, 1)] * 4, "nothing is ready, and somebody is coming"
        assert native.scan(0, 3, envs, sequences)[:2] == (3, 0)


def test_a_successor_goes_on_where_the_cursors_are() -> None:
    with rings_of(2) as rings:
        set_cursor(rings, GRANTED, [4, 6])
        set_cursor(rings, RELEASED, [2, 4])
        grants = Grants(rings, None)
        assert grants.drawn.tolist() == [2, 3]
        assert grants.publish() is False
        grants.draw_to_capacity()
        assert grants.publish()
        assert rings.cursors(GRANTED).tolist() == [5, 7]


def test_a_grant_that_was_cut_short_is_finished_by_the_next() -> None:
    with rings_of(2) as rings:
        _native.store(rings.buffer, rings.layout.words["grant_count"], 1)  # an interrupt came here
        grants = Grants(rings, None)
        grants.draw_to_capacity()
        assert grants.publish()
        assert grant_count(rings) == 2
