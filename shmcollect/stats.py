"""The counters of a run as one dict of plain numbers."""

from __future__ import annotations

import time
from typing import Any

from shmcollect import _native
from shmcollect.counters import Counters
from shmcollect.histogram import quantile_s
from shmcollect.segment import Segment


def read_stats(segment: Segment) -> dict[str, Any]:
    """What every role of a run has counted, over all its processes if it was restarted.

    Returns:
        ``frames``, ``batches``, ``episodes`` (delivered to the learner), ``inference_batches``,
        ``mean_inference_batch`` (rows), ``policy_version``, ``policy_lag`` (``mean`` and ``max`` over the frames
        delivered: the learner's version at that time minus the version that acted), ``workers`` (one dict each),
        ``inference`` and ``learner``, each with ``busy_s`` and ``waiting_s`` beside its own counts,
        ``action_latency_s`` (``p50`` and ``p99`` of the time from an observation to its action, to an eighth; None
        before the first), and ``segment_bytes``.
    """
    roles = {role: _role(Counters(segment, role).read()) for role in segment.layout.counters}
    latencies = [_native.load(segment.buffer, at) for at in segment.layout.latencies]
    inference, learner = roles["inference"], roles["learner"]
    return {
        "frames": learner["frames"],
        "batches": learner["batches"],
        "episodes": learner["episodes"],
        "inference_batches": inference["batches"],
        "mean_inference_batch": inference["rows"] / inference["batches"] if inference["batches"] else 0.0,
        "policy_version": learner["policy_version"],
        "policy_lag": {
            "mean": learner["lag_sum"] / learner["frames"] if learner["frames"] else 0.0,
            "max": learner["lag_max"],
        },
        "workers": [roles[f"worker {w}"] for w in range(segment.layout.num_workers)],
        "inference": inference,
        "learner": learner,
        "action_latency_s": {"p50": quantile_s(latencies, 0.5), "p99": quantile_s(latencies, 0.99)},
        "segment_bytes": segment.layout.size_bytes,
    }


def _role(counts: dict[str, int]) -> dict[str, Any]:
    """A role's counts with its times in seconds: waiting, and busy for the rest of its life."""
    rest = {name: count for name, count in counts.items() if not name.endswith("_ns")}
    alive_ns = max(0, counts["heartbeat_ns"] - counts["started_ns"]) if counts["started_ns"] else 0
    return {
        **rest,
        "busy_s": max(0, alive_ns - counts["waiting_ns"]) / 1e9,
        "waiting_s": counts["waiting_ns"] / 1e9,
        "heartbeat_age_s": (time.monotonic_ns() - counts["heartbeat_ns"]) / 1e9 if counts["heartbeat_ns"] else None,
    }
