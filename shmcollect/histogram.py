"""A histogram of durations: eight buckets per octave, from a microsecond to a minute, so errors are at most 1/8.

The native core counts into it (``_rows.c``); this says what a bucket means.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_FIRST_OCTAVE, _LAST_OCTAVE = 10, 35  # 2^10 ns is a microsecond, 2^36 ns a minute
NUM_BUCKETS = 8 * (_LAST_OCTAVE - _FIRST_OCTAVE + 1)


def lower_edge_ns(bucket: int) -> int:
    """The shortest duration in a bucket; the first holds everything shorter too, the last everything longer."""
    octave, eighth = divmod(bucket, 8)
    return (8 + eighth) << (octave + _FIRST_OCTAVE - 3)


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """The duration in seconds, rounded up to a bucket's end, that this share does not exceed; None without counts."""
    total = sum(counts)
    if total == 0:
        return None
    below = itertools.accumulate(counts)
    bucket = next(i for i, so_far in enumerate(below) if so_far >= max(1, share * total))
    return lower_edge_ns(bucket + 1) / 1e9
