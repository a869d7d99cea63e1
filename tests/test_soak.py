"""The soak's verdict: it hears of whatever grows, and of nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.soak import MEMORY_TOLERANCE_BYTES, Process, Sample, complaints, report, soak

HOUR = 3600
ROLES = ("learner", "inference server", "env worker 0")


def steady(second: int) -> Sample:
    processes = tuple(Process(role, 50 << 20, 9, 0.5 * second) for role in ROLES)
    return Sample(float(second), 50_000 * second, processes, 1, 1 << 20)


def with_process(sample: Sample, **changes: Any) -> Sample:
    first, *rest = sample.processes
    return replace(sample, processes=(replace(first, **changes), *rest))


def test_a_steady_run_is_not_complained_of() -> None:
    samples = [steady(second) for second in range(HOUR)]
    assert complaints(samples) == []
    assert "+0.0%" in report(samples)


def test_a_moment_of_more_is_no_growth() -> None:
    samples = [steady(second) for second in range(HOUR)]
    samples[-3] = with_process(samples[-3], memory_bytes=1 << 30, descriptors=12)
    assert complaints(samples) == []


@pytest.mark.parametrize(
    ("grow", "text"),
    [
        (lambda s: with_process(s, memory_bytes=round((50 << 20) + 2e3 * s.time_s)), "learner: bytes of memory grew"),
        (lambda s: with_process(s, descriptors=9 + int(s.time_s) // 1800), "learner: descriptors grew from 9 to 10"),
        (lambda s: with_process(s, cpu_s=0.5 * s.time_s + 5e-5 * s.time_s**2), "a frame cost 30.60"),
        (lambda s: replace(s, shm_names=1 + int(s.time_s) // 3000), "/dev/shm: names grew from 1 to 2"),
        (lambda s: replace(s, shm_bytes=s.shm_bytes + 4096 * (s.time_s > HOUR - 2)), "/dev/shm: bytes grew"),
    ],
)
def test_whatever_grows_is_named(grow: Any, text: str) -> None:
    (complaint,) = complaints([grow(steady(second)) for second in range(HOUR)])
    assert complaint.startswith(text)


def test_what_an_allocator_settles_is_tolerated() -> None:
    samples = [steady(second) for second in range(HOUR)]
    grown = [with_process(s, memory_bytes=(50 << 20) + (MEMORY_TOLERANCE_BYTES - 1) * (s.time_s > 9)) for s in samples]
    assert complaints(grown) == []


def test_a_short_soak_sees_every_process_and_all_shared_memory() -> None:
    samples = soak(6, num_envs=8, warm_up_s=1)
    assert len(samples) >= 3
    for sample in samples:
        assert [each.role for each in sample.processes] == [
            "learner",
            "inference server",
            "env worker 0",
            "env worker 1",
        ]
        assert all(each.memory_bytes > 1 << 20 and each.descriptors > 3 and each.cpu_s > 0 for each in sample.processes)
        assert sample.shm_names == 1 and sample.shm_bytes > 4096
    assert samples[-1].frames > samples[0].frames and samples[-1].cpu_s > samples[0].cpu_s
    report(samples)
