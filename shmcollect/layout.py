"""The memory map of a segment: pure arithmetic, every offset is computed here and nowhere else.

::

    0        header    magic · layout_version (written last) · size · owner pid, start time, pid namespace ·
                       run id · creation time · where the description lies, its checksum, the header's
    4096     words     run state · pause count, its acknowledgement · grant count · reset count ·
                       required version                                                    (a cache line each)
             bells     one per worker · inference · learner                                (a cache line each)
             running   one word per worker                                                 (a cache line each)
             activity  worker 0: [K] │ worker 1: ... │                                     (padded per worker)
             counters  one block per role                                                  (padded)
             latencies a histogram of the time from an observation to its action           (padded)
             observed  worker 0: observed[K], observed_ns[K] │ worker 1: ... │             (padded per worker)
             acted[N]  ·  released[N]  ·  granted[N]                                       (padded)
             weights   latest · schema hash · announcements, one per reader · counts, one per bank
                                                                                           (a cache line each)
             description   JSON: everything needed to compute this map again
             rings     field 0: env 0 [capacity, ...] │ env 1 │ ...   (padded per env: one writer per cache line)
                       field 1: ...
             banks     bank 0 │ bank 1 │ ...: a flat image of the policy's weights each    (padded to pages)

Single writers: workers write ``observed``, ``observed_ns``, their ``running`` and activity words and the other fields;
inference writes ``acted``, the latencies, the acknowledgement, action, extras and policy version; the learner writes
``released``, ``granted``, the pause, grant and reset counts, the required version, and of the weights everything but
the announcements, of which each reader writes its own. The run state is set by compare-and-swap by whoever ends the
run first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmcollect.histogram import NUM_BUCKETS

LAYOUT_VERSION = 4
MAGIC = int.from_bytes(b"SHMCOLCT", "little")
CACHE_LINE = 128  # bytes; two x86 lines, because the adjacent one is prefetched, and one line of some ARM cores
ROW_ALIGNMENT = 64  # bytes; a multiple of every item size, so that strided views stay aligned
PAGE = 4096

# They keep their places in every version, so that each can tell whose a segment of another is; new ones follow.
HEADER_WORDS = (
    "magic",
    "layout_version",
    "size_bytes",
    "owner_pid",
    "owner_start_ticks",
    "pid_namespace",
    "run_id",
    "created_ns",
    "description_offset",
    "description_bytes",
    "description_crc",
    "header_crc",
)
HEADER = {name: 8 * i for i, name in enumerate(HEADER_WORDS)}
CONTROL_WORDS = ("run_state", "pause_count", "pause_acknowledged", "grant_count", "reset_count", "required_version")

# The fields every slot has, in the order the native core takes them, with their dtype.
STEP_FIELDS = {
    "sequence": "<i8",
    "episode_start": "|b1",
    "reward": "<f4",
    "terminated": "|b1",
    "truncated": "|b1",
    "interrupted": "|b1",
}


def align(offset: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``offset``."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class Field:
    """One array of a slot.

    Attributes:
        kind: ``"obs"``, ``"final_obs"``, ``"action"``, ``"extras"``, or the name of a field every slot has.
        path: Where the leaf lies in the nested value; ``()`` for a bare one.
        dtype: Type of one element, native byte order.
        shape: Shape of one slot's value.
    """

    kind: str
    path: tuple[Hashable, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot's value."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def format(self) -> str:
        """The element type as one letter of the ``struct`` module (``q`` for every 64-bit integer)."""
        return {"l": "q", "L": "Q"}.get(self.dtype.char, self.dtype.char)


def slot_fields(
    obs: Sequence[Field], action: Sequence[Field], extras: Sequence[Field], *, final_obs: bool
) -> tuple[Field, ...]:
    """All fields of a slot: those every slot has, then the observation, its final twin, action and extras."""
    fixed = [Field(kind, (), np.dtype(dtype), ()) for kind, dtype in {**STEP_FIELDS, "policy_version": "<i8"}.items()]
    fixed.append(Field("episode", (), np.dtype("<f8"), (3,)))  # return, length, seconds, where one ended
    final = [Field("final_obs", leaf.path, leaf.dtype, leaf.shape) for leaf in obs] if final_obs else []
    return (*fixed, *obs, *final, *action, *extras)


@dataclass(frozen=True)
class WeightsMap:
    """Where the policy's weights lie (see `shmcollect.parameter_buffer`).

    Attributes:
        latest: The bank that holds the newest version.
        schema_hash: What the images look like.
        announcements: Per reader, the bank it reads.
        counts: Per bank, which version it holds, and whether that is being written.
        banks: The images.
    """

    latest: int
    schema_hash: int
    announcements: tuple[int, ...]
    counts: tuple[int, ...]
    banks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a segment.

    Args:
        worker_envs: How many envs each worker has; worker 0 has the first ones.
        capacity: Slots per ring.
        rollout_length: T, steps per rollout.
        fields: All fields of a slot.
        counters: The names of the counters of each role, by role.
        labels: Free-form facts for readers from outside (env id, start time, ...).
        image_bytes: Size of one image of the policy's weights.
        image_readers: Who reads them; 0: the segment has no banks.
    """

    worker_envs: tuple[int, ...]
    capacity: int
    rollout_length: int
    fields: tuple[Field, ...]
    counters: dict[str, tuple[str, ...]]
    labels: dict[str, str]
    image_bytes: int = 0
    image_readers: int = 0
    words: dict[str, int] = field(init=False)
    bells: dict[str, int] = field(init=False)
    running: tuple[int, ...] = field(init=False)
    activities: tuple[int, ...] = field(init=False)
    counter_offsets: dict[str, int] = field(init=False)
    latencies: tuple[int, ...] = field(init=False)
    cursors: np.ndarray[Any, np.dtype[np.int64]] = field(init=False)
    description_offset: int = field(init=False)
    field_offsets: tuple[int, ...] = field(init=False)
    weights: WeightsMap | None = field(init=False)
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        cursor = _Allocator(PAGE)
        put = object.__setattr__
        put(self, "words", {name: cursor.take(8) for name in CONTROL_WORDS})
        bells = (*(f"worker {w}" for w in range(self.num_workers)), "inference", "learner")
        put(self, "bells", {name: cursor.take(8) for name in bells})
        put(self, "running", tuple(cursor.take(8) for _ in self.worker_envs))
        put(self, "activities", self._per_worker(cursor))
        put(self, "counter_offsets", {r: cursor.take(8 * len(names)) for r, names in self.counters.items()})
        latencies = cursor.take(8 * NUM_BUCKETS)
        put(self, "latencies", tuple(range(latencies, latencies + 8 * NUM_BUCKETS, 8)))
        put(self, "cursors", self._cursor_offsets(cursor))
        num_words = 2 + self.image_readers + self.num_banks if self.num_banks else 0
        weights_words = [cursor.take(8) for _ in range(num_words)]
        put(self, "description_offset", cursor.take(len(self.describe())))
        offsets = []
        cursor.offset = align(cursor.offset, PAGE)
        for each in self.fields:
            offsets.append(cursor.take(self.env_stride(each) * self.num_envs))
        put(self, "field_offsets", tuple(offsets))
        put(self, "weights", self._weights_map(weights_words, cursor))
        put(self, "size_bytes", align(cursor.offset, PAGE))

    @property
    def num_envs(self) -> int:
        """Envs of all workers together."""
        return sum(self.worker_envs)

    @property
    def num_workers(self) -> int:
        """Env worker processes."""
        return len(self.worker_envs)

    @property
    def num_banks(self) -> int:
        """The latest one, one for each reader, and one to write the next version into; or none at all."""
        return self.image_readers + 2 if self.image_readers else 0

    def first_env(self, worker: int) -> int:
        """Index of the first env of a worker."""
        return sum(self.worker_envs[:worker])

    @property
    def groups(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The worker of every env, int64[num_envs]."""
        return np.repeat(np.arange(self.num_workers, dtype=np.int64), self.worker_envs)

    def env_stride(self, each: Field) -> int:
        """Bytes from one env's ring of a field to the next env's."""
        return align(each.row_bytes * self.capacity, ROW_ALIGNMENT)

    def indices(self, kind: str) -> tuple[int, ...]:
        """The positions of the fields of one kind."""
        return tuple(i for i, each in enumerate(self.fields) if each.kind == kind)

    def index(self, kind: str) -> int:
        """The position of the only field of its kind."""
        (index,) = self.indices(kind)
        return index

    def _per_worker(self, cursor: _Allocator) -> tuple[int, ...]:
        """Offsets of one word per env, those of a worker side by side."""
        blocks = [(cursor.take(8 * count), count) for count in self.worker_envs]
        return tuple(start + 8 * k for start, count in blocks for k in range(count))

    def _cursor_offsets(self, cursor: _Allocator) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Offsets [observed, acted, released, granted, observed_ns] x [num_envs]."""
        observed: list[int] = []
        observed_ns: list[int] = []
        for count in self.worker_envs:
            block = cursor.take(2 * 8 * count)
            observed += range(block, block + 8 * count, 8)
            observed_ns += range(block + 8 * count, block + 2 * 8 * count, 8)
        columns = [cursor.take(8 * self.num_envs) for _ in ("acted", "released", "granted")]
        rows = [observed, *(range(c, c + 8 * self.num_envs, 8) for c in columns), observed_ns]
        return np.array(rows, dtype=np.int64)

    def _weights_map(self, words: list[int], cursor: _Allocator) -> WeightsMap | None:
        if not self.num_banks:
            return None
        latest, schema_hash, *rest = words
        announcements, counts = rest[: self.image_readers], rest[self.image_readers :]
        cursor.offset = align(cursor.offset, PAGE)
        banks = [cursor.take(align(self.image_bytes, PAGE)) for _ in counts]
        return WeightsMap(latest, schema_hash, tuple(announcements), tuple(counts), tuple(banks))

    def describe(self) -> bytes:
        """Everything this map was computed from, as JSON."""
        return json.dumps(
            {
                "worker_envs": self.worker_envs,
                "capacity": self.capacity,
                "rollout_length": self.rollout_length,
                "fields": [
                    [each.kind, [_plain(key) for key in each.path], each.dtype.str, each.shape] for each in self.fields
                ],
                "counters": self.counters,
                "labels": self.labels,
                "image_bytes": self.image_bytes,
                "image_readers": self.image_readers,
            }
        ).encode()

    @classmethod
    def from_description(cls, description: bytes, size_bytes: int | None = None) -> Layout:
        """The same map again.

        Args:
            description: What `describe` returned.
            size_bytes: The size of the segment it was found in. A map of another size is refused, and one that cannot
                fit before it is computed: whoever wrote the description must not make us compute for ever.

        Raises:
            ValueError: The bytes are not such a description.
        """
        try:
            facts = json.loads(description)
            _check_facts(facts, size_bytes)
            fields = tuple(
                Field(kind, tuple(path), np.dtype(dtype), tuple(shape)) for kind, path, dtype, shape in facts["fields"]
            )
            _check_fields(fields)
            layout = cls(
                tuple(facts["worker_envs"]),
                facts["capacity"],
                facts["rollout_length"],
                fields,
                {role: tuple(names) for role, names in facts["counters"].items()},
                facts["labels"],
                facts["image_bytes"],
                facts["image_readers"],
            )
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a layout description: {error!r}") from error
        if size_bytes is not None and layout.size_bytes != size_bytes:
            raise ValueError(f"it has {size_bytes} bytes, its description makes {layout.size_bytes}")
        if layout.describe() != description:
            raise ValueError("its description says more than a map is made of")
        return layout


class _Allocator:
    """Hands out ranges, each on cache lines of its own."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def take(self, size_bytes: int) -> int:
        start = align(self.offset, CACHE_LINE)
        self.offset = start + size_bytes
        return start


# The element types that the native core copies (see _rings.c).
_DTYPES = frozenset(np.dtype(letter).str for letter in "?bBhHiIqQefd")
_MOST_DIMENSIONS = 30  # two more, env and slot, make the 32 of NumPy 1


def _check_facts(facts: Any, size_bytes: int | None) -> None:
    """Refuses facts of a wrong type or range, before anything is computed or allocated from them."""
    for name, least in {"capacity": 1, "rollout_length": 1, "image_bytes": 0, "image_readers": 0}.items():
        _expect(type(facts[name]) is int and facts[name] >= least, name, facts[name], f"an integer >= {least}")
    envs = facts["worker_envs"]
    _expect(_are(int, envs) and min(envs, default=1) >= 1, "worker_envs", envs, "counts >= 1")
    for kind, path, dtype, shape in facts["fields"]:
        named = type(kind) is str and all(isinstance(key, str | int) for key in path)
        _expect(named, "a field", [kind, path], "a kind and a path")
        _expect(dtype in _DTYPES, f"the dtype of {kind}", dtype, f"one of {sorted(_DTYPES)}")
        fits = _are(int, shape) and len(shape) <= _MOST_DIMENSIONS and min(shape, default=0) >= 0
        _expect(fits, f"the shape of {kind}", shape, f"at most {_MOST_DIMENSIONS} lengths >= 0")
    _expect(all(_are(str, names) for names in facts["counters"].values()), "counters", facts["counters"], "names")
    _expect(_are(str, list(facts["labels"].values())), "labels", facts["labels"], "texts")
    # What the counts alone take, without the sizes of rows and images: five cursors per env, two lines per reader.
    least = 5 * 8 * sum(envs) + 2 * CACHE_LINE * facts["image_readers"]
    fits = size_bytes is None or least <= size_bytes
    _expect(fits, "envs and readers", [sum(envs), facts["image_readers"]], f"what fits {size_bytes} bytes")


def _check_fields(fields: tuple[Field, ...]) -> None:
    """Refuses fields other than `slot_fields` makes; a segment for weights alone has none."""
    of = {kind: [each for each in fields if each.kind == kind] for kind in ("obs", "action", "extras", "final_obs")}
    expected = slot_fields(of["obs"], of["action"], of["extras"], final_obs=bool(of["final_obs"]))
    _expect(fields in ((), expected), "the fields of a slot", _brief(fields), str(_brief(expected)))


def _brief(fields: tuple[Field, ...]) -> list[str]:
    return [f"{each.kind} {each.dtype.str}{list(each.shape)}" for each in fields]


def _are(kind: type, values: Any) -> bool:
    return type(values) is list and all(type(value) is kind for value in values)


def _expect(fits: object, what: str, got: object, expected: str) -> None:
    if not fits:
        shown = repr(got)
        raise ValueError(f"{what}: expected {expected}, got {shown if len(shown) < 200 else shown[:200] + '...'}")


def _plain(key: Hashable) -> str | int:
    """A path element as JSON can hold it; readers from outside need only its name."""
    return key if isinstance(key, str | int) else repr(key)
