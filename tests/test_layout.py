"""The memory map: nothing overlaps, everything is aligned, and a description is enough to compute it again."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmcollect.layout import (
    CACHE_LINE,
    CONTROL_WORDS,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    PAGE,
    ROW_ALIGNMENT,
    STEP_FIELDS,
    Field,
    Layout,
    align,
    slot_fields,
)

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def leaves(kind: str, paths: st.SearchStrategy[tuple[Hashable, ...]], most: int) -> st.SearchStrategy[list[Field]]:
    leaf = st.builds(Field, st.just(kind), paths, st.sampled_from(DTYPES).map(np.dtype), shapes)
    return st.lists(leaf, max_size=most)


paths = st.lists(st.text(max_size=3) | st.integers(), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    fields = slot_fields(
        draw(leaves("obs", paths, 4)),
        draw(leaves("action", paths, 2)),
        draw(leaves("extras", st.text(min_size=1, max_size=4).map(lambda name: (name,)), 2)),
        final_obs=draw(st.booleans()),
    )
    length = draw(st.integers(1, 20))
    return Layout(
        tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))),
        draw(st.integers(length + 1, 4 * length + 1)),
        length,
        fields,
        {"worker 0": ("a", "b"), "learner": tuple(draw(st.lists(st.text(max_size=3), max_size=20)))},
        {"env": draw(st.text(max_size=5))},
    )


def parts(layout: Layout) -> dict[str, tuple[int, int]]:
    """Every part of the map: (offset, bytes)."""
    found: dict[str, tuple[int, int]] = {"header": (0, 8 * len(HEADER))}
    for group in (layout.words, layout.bells):
        found |= {name: (offset, 8) for name, offset in group.items()}
    found |= {f"running {w}": (offset, 8) for w, offset in enumerate(layout.running)}
    found |= {f"{r} counts": (at, 8 * len(layout.counters[r])) for r, at in layout.counter_offsets.items()}
    found |= {f"cursor {index}": (int(at), 8) for index, at in np.ndenumerate(layout.cursors)}
    found["description"] = (layout.description_offset, len(layout.describe()))
    for i, (each, offset) in enumerate(zip(layout.fields, layout.field_offsets, strict=True)):
        for env in range(layout.num_envs):
            found[f"field {i} of env {env}"] = (
                offset + env * layout.env_stride(each),
                layout.capacity * each.row_bytes,
            )
    return found


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_nothing_overlaps_and_everything_fits(layout: Layout) -> None:
    end, last = 0, ""
    for name, (offset, size) in sorted(parts(layout).items(), key=lambda item: item[1]):
        assert offset >= end, f"{name} overlaps {last}"
        end, last = offset + size, name
    assert end <= layout.size_bytes and layout.size_bytes % PAGE == 0


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_words_and_rows_are_aligned(layout: Layout) -> None:
    for name, (offset, _) in parts(layout).items():
        assert offset % (ROW_ALIGNMENT if name.startswith("field") else 8) == 0, name
    for each, offset in zip(layout.fields, layout.field_offsets, strict=True):
        assert offset % each.dtype.itemsize == 0 and layout.env_stride(each) % each.dtype.itemsize == 0
    assert min(layout.field_offsets, default=PAGE) >= PAGE


def writers(layout: Layout) -> dict[str, str]:
    """Who writes each word, by the name of its part."""
    worker_of = [f"worker {w}" for w in layout.groups]
    found = {"run_state": "anyone", "pause_acknowledged": "inference"}
    found |= dict.fromkeys(("pause_count", "grant_count", "reset_count"), "learner")
    found |= {bell: f"sleeper at {bell}" for bell in layout.bells}
    found |= {f"running {w}": f"worker {w}" for w in range(layout.num_workers)}
    found |= {f"{role} counts": role for role in layout.counters}
    for env, worker in enumerate(worker_of):
        for cursor, writer in enumerate((worker, "inference", "learner", "learner", worker)):
            found[f"cursor {(cursor, env)}"] = writer
    return found


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_a_cache_line_of_words_has_one_writer(layout: Layout) -> None:
    where = parts(layout)
    lines: dict[int, set[str]] = {}
    for name, writer in writers(layout).items():
        offset, size = where[name]
        for line in range(offset // CACHE_LINE, (offset + size - 1) // CACHE_LINE + 1 if size else 0):
            lines.setdefault(line, set()).add(writer)
    assert all(len(each) == 1 for each in lines.values()), lines


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_a_description_makes_the_same_map_again(layout: Layout) -> None:
    again = Layout.from_description(layout.describe())
    assert again.describe() == layout.describe()
    assert parts(again) == parts(layout) and again.size_bytes == layout.size_bytes
    assert again.fields == layout.fields
    assert (again.counters, again.labels) == (layout.counters, layout.labels)


def test_a_path_element_that_json_lacks_is_described_by_its_repr() -> None:
    fields = slot_fields([Field("obs", ((1, 2), 1.5, b"k"), np.dtype("f4"), ())], [], [], final_obs=False)
    layout = Layout((1,), 2, 1, fields, {}, {})
    again = Layout.from_description(layout.describe())
    assert again.fields[-1].path == ("(1, 2)", "1.5", "b'k'")
    assert again.field_offsets == layout.field_offsets


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.pop("fields"),
        lambda facts: facts.update(fields=3),
        lambda facts: facts.update(fields=[["obs", [], "no type", []]]),
        lambda facts: facts.update(fields=[["obs", [], "<f4"]]),
        lambda facts: facts.update(fields=[["obs", [], "<f4", ["3"]]]),
        lambda facts: facts.update(worker_envs=None),
        lambda facts: facts.update(worker_envs=["2"]),
        lambda facts: facts.update(capacity="4"),
        lambda facts: facts.update(counters=[]),
    ],
)
def test_what_describes_no_map_is_a_value_error(change: Any) -> None:
    layout = Layout((2,), 4, 2, slot_fields([], [], [], final_obs=True), {}, {})
    facts = json.loads(layout.describe())
    change(facts)
    with pytest.raises(ValueError, match=r"."):
        Layout.from_description(json.dumps(facts).encode())


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe", b"null", b"[]", b"{", b"7"])
def test_what_is_no_json_object_is_a_value_error(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Layout.from_description(junk)


def test_sizes_beyond_64_bits_are_computed_exactly() -> None:
    row = Field("obs", (), np.dtype("f8"), (2**40, 2**30))
    assert row.row_bytes == 2**73
    layout = Layout((1,), 2, 1, slot_fields([row], [], [], final_obs=False), {}, {})
    assert layout.size_bytes > 2**74


def test_a_slot_has_its_own_fields_and_those_of_the_spaces() -> None:
    obs = [Field("obs", ("a",), np.dtype("u1"), (2, 3)), Field("obs", ("b", 0), np.dtype("?"), ())]
    action, extras = [Field("action", (), np.dtype("i8"), ())], [Field("extras", ("v",), np.dtype("f4"), (4,))]
    with_final = slot_fields(obs, action, extras, final_obs=True)
    kinds = [each.kind for each in with_final]
    own = [*STEP_FIELDS, "policy_version", "episode"]
    assert kinds == [*own, "obs", "obs", "final_obs", "final_obs", "action", "extras"]
    assert [each for each in with_final if each.kind != "final_obs"] == list(
        slot_fields(obs, action, extras, final_obs=False)
    )
    finals = [(each.path, each.dtype, each.shape) for each in with_final if each.kind == "final_obs"]
    assert finals == [(each.path, each.dtype, each.shape) for each in obs]


def test_positions_of_fields_are_found_by_kind() -> None:
    obs = [Field("obs", (i,), np.dtype("f4"), ()) for i in range(2)]
    layout = Layout((1,), 2, 1, slot_fields(obs, [], [], final_obs=False), {}, {})
    assert [layout.fields[i] for i in layout.indices("obs")] == obs
    assert layout.indices("action") == ()
    assert layout.fields[layout.index("reward")].kind == "reward"
    for kind in ("obs", "action"):
        with pytest.raises(ValueError, match="unpack"):
            layout.index(kind)


def test_envs_are_dealt_out_to_workers_in_order() -> None:
    layout = Layout((3, 1, 2), 2, 1, slot_fields([], [], [], final_obs=False), {}, {})
    assert (layout.num_envs, layout.num_workers) == (6, 3)
    assert [layout.first_env(w) for w in range(3)] == [0, 3, 4]
    assert layout.groups.tolist() == [0, 0, 0, 1, 2, 2] and layout.groups.dtype == np.int64


@pytest.mark.parametrize("dtype", DTYPES)
def test_element_types_are_one_letter_of_the_struct_module(dtype: str) -> None:
    letter = Field("obs", (), np.dtype(dtype), ()).format
    assert np.dtype(letter) == np.dtype(dtype) and letter in "?bBhHiIqQefd"


def test_the_header_is_a_page_and_its_first_words_never_move() -> None:
    """They are what other versions look at to tell that they are other versions."""
    assert (HEADER["magic"], HEADER["layout_version"], LAYOUT_VERSION) == (0, 8, 4)
    assert MAGIC.to_bytes(8, "little") == b"SHMCOLCT"
    assert max(HEADER.values()) + 8 <= PAGE and set(CONTROL_WORDS) >= {"run_state"}


@given(st.integers(0, 2**70), st.sampled_from([1, 8, 64, 128, 4096]))
def test_align_is_the_next_multiple(offset: int, alignment: int) -> None:
    aligned = align(offset, alignment)
    assert aligned % alignment == 0 and 0 <= aligned - offset < alignment
