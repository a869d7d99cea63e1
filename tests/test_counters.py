"""Counters: published as a whole, read by anybody, written by one role."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from in_process import small_segment

from shmcollect.counters import COMMON, INFERENCE, LEARNER, WORKER, Counters, counter_names
from shmcollect.segment import Segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    with small_segment() as made:
        yield made


def test_every_role_has_its_counters() -> None:
    assert counter_names(2) == {"worker 0": WORKER, "worker 1": WORKER, "inference": INFERENCE, "learner": LEARNER}
    for names in (WORKER, INFERENCE, LEARNER):
        assert set(COMMON) < set(names) and len(set(names)) == len(names)


def test_what_a_role_counts_is_seen_once_it_is_published(segment: Segment) -> None:
    mine, reader = Counters(segment, "worker 1"), Counters(segment, "worker 1")
    mine.values["steps"] += 7
    assert reader.read()["steps"] == 0
    mine.publish()
    assert reader.read() == {**dict.fromkeys(WORKER, 0), "steps": 7}


def test_roles_do_not_touch_each_others(segment: Segment) -> None:
    for number, role in enumerate(segment.layout.counters):
        counters = Counters(segment, role)
        counters.values = {name: 100 * number + i for i, name in enumerate(counters.values)}
        counters.publish()
    for number, role in enumerate(segment.layout.counters):
        assert list(Counters(segment, role).read().values()) == [
            100 * number + i for i in range(len(segment.layout.counters[role]))
        ]


def test_a_successor_counts_on(segment: Segment) -> None:
    mine = Counters(segment, "learner")
    mine.values["frames"] = 2**40
    mine.publish()
    successor = Counters(segment, "learner")
    successor.values["frames"] += 1
    successor.publish()
    assert mine.read()["frames"] == 2**40 + 1


def test_counters_are_read_without_the_right_to_write(segment: Segment) -> None:
    Counters(segment, "learner").publish()
    reader = Segment.attach(segment.name)
    assert Counters(reader, "learner").read() == dict.fromkeys(LEARNER, 0)
    with pytest.raises(BufferError):
        Counters(reader, "learner").publish()
    reader.close()
