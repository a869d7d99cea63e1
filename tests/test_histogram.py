"""The histogram's edges, and what a quantile makes of counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcollect.histogram import NUM_BUCKETS, lower_edge_ns, quantile_s


def test_buckets_follow_each_other_and_are_at_most_an_eighth_wide() -> None:
    edges = [lower_edge_ns(bucket) for bucket in range(NUM_BUCKETS + 1)]
    assert edges[0] == 2**10 and edges[-1] == 2**36
    assert all(low < high <= low * 9 / 8 for low, high in itertools.pairwise(edges))


def test_nothing_counted_has_no_quantile() -> None:
    assert quantile_s([0] * NUM_BUCKETS, 0.5) is None


@given(st.lists(st.integers(0, NUM_BUCKETS - 1), min_size=1), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_a_quantile_is_the_end_of_the_bucket_that_holds_it(buckets: list[int], share: float) -> None:
    counts = [buckets.count(bucket) for bucket in range(NUM_BUCKETS)]
    got = quantile_s(counts, share)
    assert got is not None
    below = [bucket for bucket in sorted(buckets) if lower_edge_ns(bucket + 1) / 1e9 <= got]
    assert len(below) >= share * len(buckets), "too small"
    last = below[-1] if below else min(buckets)
    assert got == pytest.approx(lower_edge_ns(last + 1) / 1e9)
