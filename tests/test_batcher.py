"""When a batch goes: enough rows, or nobody coming, or the oldest row has waited long enough."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcollect.batcher import Batcher

rows = st.integers(0, 100)
seconds = st.floats(0, 10)
timeouts = st.none() | st.floats(0, 10)


@given(st.integers(1, 100), timeouts, rows, seconds)
def test_no_rows_make_no_batch(smallest: int, timeout_s: float | None, coming: int, waited_s: float) -> None:
    assert not Batcher(smallest, timeout_s).goes(0, coming, waited_s)


@given(st.integers(1, 100), timeouts, rows, rows, seconds)
def test_enough_rows_go_at_once(
    smallest: int, timeout_s: float | None, more: int, coming: int, waited_s: float
) -> None:
    assert Batcher(smallest, timeout_s).goes(smallest + more, coming, waited_s)


@given(st.integers(1, 100), timeouts, st.integers(1, 100), seconds)
def test_any_rows_go_when_nobody_is_coming(smallest: int, timeout_s: float | None, ready: int, waited_s: float) -> None:
    assert Batcher(smallest, timeout_s).goes(ready, 0, waited_s)


@given(st.floats(0, 10), st.integers(1, 5), st.integers(1, 100), seconds)
def test_too_few_rows_go_once_the_oldest_has_waited_for_the_timeout(
    timeout_s: float, ready: int, coming: int, waited_s: float
) -> None:
    assert Batcher(6, timeout_s).goes(ready, coming, waited_s) == (waited_s >= timeout_s)


@given(st.integers(1, 5), st.integers(1, 100), st.floats(0, 1e9))
def test_without_a_timeout_too_few_rows_wait_as_long_as_somebody_is_coming(
    ready: int, coming: int, waited_s: float
) -> None:
    assert not Batcher(6, None).goes(ready, coming, waited_s)
    assert Batcher(6, None).patience_s(waited_s) == math.inf


def test_a_timeout_of_zero_waits_for_nobody() -> None:
    assert Batcher(6, 0.0).goes(1, 5, 0.0)


@pytest.mark.parametrize(("waited_s", "left_s"), [(0.0, 2.0), (0.5, 1.5), (2.0, 0.0), (3.0, -1.0)])
def test_patience_is_what_is_left_of_the_timeout(waited_s: float, left_s: float) -> None:
    assert Batcher(6, 2.0).patience_s(waited_s) == left_s


@given(st.integers(1, 100), timeouts, st.integers(1, 100), rows, seconds, st.floats(0, 10))
def test_a_batch_that_goes_still_goes_later(
    smallest: int, timeout_s: float | None, ready: int, coming: int, waited_s: float, later_s: float
) -> None:
    batcher = Batcher(smallest, timeout_s)
    if batcher.goes(ready, coming, waited_s):
        assert batcher.goes(ready, coming, waited_s + later_s)
        assert batcher.goes(ready + 1, coming, waited_s)
        assert batcher.goes(ready, max(0, coming - 1), waited_s)
