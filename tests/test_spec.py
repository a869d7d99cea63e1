"""Spaces as trees of leaves, and which values fit them."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict
from itertools import product
from types import MappingProxyType
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shmcollect.errors import SpecError
from shmcollect.spec import Tree, describe, without

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]


class Custom(gym.Space[Any]):
    """A space of nobody's kind."""


class MyBox(spaces.Box):
    pass


class MyDiscrete(spaces.Discrete):
    pass


class MyDict(spaces.Dict):
    pass


class MyTuple(spaces.Tuple):
    pass


def box(*shape: int, dtype: str = "f4") -> spaces.Box:
    return spaces.Box(0, 1, shape, np.dtype(dtype).type)


NESTED = spaces.Dict(a=box(2), b=spaces.Tuple((spaces.Discrete(3), spaces.Dict(c=box(dtype="u1")))))
TUPLE_KEYS = spaces.Dict({("x", 1): box(1), ("y",): spaces.Discrete(2)})
SPACES: dict[str, tuple[gym.Space[Any], list[tuple[tuple[Any, ...], str, tuple[int, ...]]]]] = {
    **{f"box {dtype}": (box(2, 3, dtype=dtype), [((), dtype, (2, 3))]) for dtype in DTYPES},
    "0-d box": (box(), [((), "f4", ())]),
    "zero-size box": (box(0), [((), "f4", (0,))]),
    "box with a zero inside": (box(2, 0, 3, dtype="i4"), [((), "i4", (2, 0, 3))]),
    "unbounded box": (spaces.Box(-np.inf, np.inf, (2,), np.float64), [((), "f8", (2,))]),
    "big-endian box": (spaces.Box(0, 1, (2,), np.dtype(">f4")), [((), "f4", (2,))]),
    "long long box": (box(2, dtype="q"), [((), "i8", (2,))]),
    "discrete": (spaces.Discrete(5), [((), "i8", ())]),
    "discrete with a start": (spaces.Discrete(3, start=-1), [((), "i8", ())]),
    "discrete uint8": (spaces.Discrete(200, start=56, dtype=np.uint8), [((), "u1", ())]),
    "discrete at the end of int64": (spaces.Discrete(2, start=2**63 - 2), [((), "i8", ())]),
    "multi-binary": (spaces.MultiBinary(3), [((), "i1", (3,))]),
    "multi-binary image": (spaces.MultiBinary([2, 3]), [((), "i1", (2, 3))]),
    "0-d multi-binary": (spaces.MultiBinary([]), [((), "i1", ())]),
    "multi-discrete": (spaces.MultiDiscrete([2, 5]), [((), "i8", (2,))]),
    "multi-discrete matrix": (
        spaces.MultiDiscrete([[2, 5], [3, 4]], dtype=np.int32, start=[[-1, 0], [7, -9]]),
        [((), "i4", (2, 2))],
    ),
    "0-d multi-discrete": (spaces.MultiDiscrete(np.array(4)), [((), "i8", ())]),
    "zero-size multi-discrete": (spaces.MultiDiscrete(np.array([], np.int64)), [((), "i8", (0,))]),
    "subclass of box": (MyBox(0, 1, (2,)), [((), "f4", (2,))]),
    "subclass of discrete": (MyDiscrete(4), [((), "i8", ())]),
    "subclasses of dict and tuple": (
        MyDict(a=MyTuple((MyBox(0, 1, (2,)),))),
        [(("a", 0), "f4", (2,))],
    ),
    "nested": (NESTED, [(("a",), "f4", (2,)), (("b", 0), "i8", ()), (("b", 1, "c"), "u1", ())]),
    "odd sizes side by side": (
        spaces.Dict(
            flag=spaces.MultiBinary(3), img=box(5, 5, 1, dtype="u1"), n=spaces.Discrete(7), x=box(1, dtype="f8")
        ),
        [(("flag",), "i1", (3,)), (("img",), "u1", (5, 5, 1)), (("n",), "i8", ()), (("x",), "f8", (1,))],
    ),
    "slash keys": (
        spaces.Dict({"a/b": box(1), "a": spaces.Dict({"b": box(2)}), "": box(3)}),
        [(("",), "f4", (3,)), (("a", "b"), "f4", (2,)), (("a/b",), "f4", (1,))],
    ),
    "tuple keys": (TUPLE_KEYS, [((("x", 1),), "f4", (1,)), ((("y",),), "i8", ())]),
    "integer and None keys": (
        spaces.Dict(OrderedDict([(1, box(1)), (None, box(2))])),
        [((1,), "f4", (1,)), ((None,), "f4", (2,))],
    ),
    "zero-size beside another": (
        spaces.Dict(a=box(0), b=box(2)),
        [(("a",), "f4", (0,)), (("b",), "f4", (2,))],
    ),
    "empty dict and tuple beside a leaf": (
        spaces.Dict(a=spaces.Dict(), b=spaces.Tuple(()), c=box(1)),
        [(("c",), "f4", (1,))],
    ),
}
TABLE = pytest.mark.parametrize("space", [space for space, _ in SPACES.values()], ids=SPACES)


def plain(value: Any) -> Any:
    """A nested value with arrays as (dtype, shape, elements), to compare with ==."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    array = np.asarray(value)
    return array.dtype.newbyteorder("="), array.shape, array.tolist()


def same_array(one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> bool:
    return (
        one.dtype == two.dtype and one.shape == two.shape and np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    )


# ---- leaves and nesting


def test_every_space_has_the_leaves_it_should() -> None:
    for name, (space, expected) in SPACES.items():
        leaves = Tree.from_space(space).leaves
        found = [(leaf.path, leaf.dtype, leaf.shape) for leaf in leaves]
        assert found == [(path, np.dtype(dtype), shape) for path, dtype, shape in expected], name
        assert all(leaf.dtype.char == np.dtype(leaf.dtype.str[1:]).char for leaf in leaves), name
        assert all(leaf.nbytes == np.empty(leaf.shape, leaf.dtype).nbytes for leaf in leaves), name


@TABLE
def test_samples_survive_the_round_trip_through_leaves(space: gym.Space[Any]) -> None:
    tree = Tree.from_space(space)
    space.seed(3)
    for _ in range(5):
        value = space.sample()
        leaves = tree.flatten(value)
        assert isinstance(leaves, tuple)
        arrays = [tree.coerce(i, leaf) for i, leaf in enumerate(leaves)]
        for leaf, array in zip(tree.leaves, arrays, strict=True):
            assert array.dtype == leaf.dtype and array.shape == leaf.shape and array.flags.c_contiguous
        assert plain(tree.unflatten(arrays)) == plain(value)


def test_a_tree_survives_the_trip_to_another_process() -> None:
    for name, (space, expected) in SPACES.items():
        tree = Tree.from_space(space)
        again = cloudpickle.loads(cloudpickle.dumps(tree))
        assert tree.difference(again) is None, name
        assert again.flatten(again.unflatten(range(len(expected)))) == tuple(range(len(expected))), name


def test_values_are_matched_by_key_whatever_their_order() -> None:
    tree = Tree.from_space(NESTED)
    assert tree.flatten({"b": [1, {"c": 2}], "a": 0}) == (0, 1, 2)


@pytest.mark.parametrize("mapping", [dict, OrderedDict, MappingProxyType, UserDict, lambda d: defaultdict(list, d)])
def test_any_mapping_is_accepted(mapping: Any) -> None:
    assert Tree.from_space(spaces.Dict(a=box(1), b=box(1))).flatten(mapping({"b": 2, "a": 1})) == (1, 2)


def test_unflatten_gives_plain_containers_of_whatever_it_gets() -> None:
    nested = Tree.from_space(MyDict(a=MyTuple((box(1), box(1))), b=box(1))).unflatten(["x", None, 3])
    assert nested == {"a": ("x", None), "b": 3}
    assert type(nested) is dict and type(nested["a"]) is tuple


def test_a_bare_value_passes_through_untouched() -> None:
    tree, value = Tree.from_space(box(2)), object()
    assert tree.flatten(value) == (value,)
    assert tree.unflatten([value]) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 0}, r"obs: expected the keys \['a', 'b'\], got \['a'\]"),
        ({"a": 0, "b": (1, {"c": 2}), "z": 1}, r"obs: expected the keys \['a', 'b'\], got \['a', 'b', 'z'\]"),
        ((0, 1), r"obs: expected a mapping with the keys \['a', 'b'\], got tuple \(0, 1\)"),
        (None, r"obs: expected a mapping with the keys \['a', 'b'\], got NoneType None"),
        ({"a": 0, "b": (1,)}, r"obs\['b'\]: expected length 2, got length 1"),
        ({"a": 0, "b": (1, {"c": 2}, 3)}, r"obs\['b'\]: expected length 2, got length 3"),
        ({"a": 0, "b": {0: 1, 1: {"c": 2}}}, r"obs\['b'\]: expected a tuple or list of length 2, got dict \{0: 1"),
        ({"a": 0, "b": np.zeros(2)}, r"obs\['b'\]: expected a tuple or list of length 2, got ndarray \[0. 0.\]"),
        ({"a": 0, "b": "xy"}, r"obs\['b'\]: expected a tuple or list of length 2, got str 'xy'"),
        ({"a": 0, "b": (1, 5)}, r"obs\['b'\]\[1\]: expected a mapping with the keys \['c'\], got int 5"),
        ({"a": 0, "b": (1, {"d": 2})}, r"obs\['b'\]\[1\]: expected the keys \['c'\], got \['d'\]"),
    ],
)
def test_a_value_of_another_structure_is_refused(value: object, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        Tree.from_space(NESTED).flatten(value)


def test_a_missing_key_of_a_defaultdict_is_not_made_up() -> None:
    value: defaultdict[str, int] = defaultdict(int, a=1)
    with pytest.raises(SpecError, match=r"expected the keys \['a', 'b'\], got \['a'\]"):
        Tree.from_space(spaces.Dict(a=box(1), b=box(1))).flatten(value)
    assert list(value) == ["a"]


def test_paths_read_like_python() -> None:
    assert describe(()) == "obs"
    assert describe(("a/b", 0, ("x", 1)), "action") == "action['a/b'][0][('x', 1)]"
    assert Tree.from_space(NESTED, root="action").describe(2) == "action['b'][1]['c']"


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, shmcollect.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- spaces that do not fit

UNFIT = {
    "Graph": spaces.Graph(box(2), None),
    "Sequence": spaces.Sequence(box(2)),
    "Text": spaces.Text(5),
    "OneOf": spaces.OneOf([box(2), box(3)]),
    "Custom": Custom(),
    "Box": spaces.Box(0, 1, (2,), np.longdouble),
}
each_unfit = pytest.mark.parametrize(("kind", "space"), UNFIT.items(), ids=UNFIT)


@each_unfit
def test_an_unfit_space_is_refused_by_name(kind: str, space: gym.Space[Any]) -> None:
    with pytest.raises(SpecError, match=rf"^obs: expected a Box, Discrete.*, got {kind} space ") as error:
        Tree.from_space(space)
    assert "leave it out" not in str(error.value)


@each_unfit
def test_the_error_about_an_unfit_entry_shows_how_to_drop_it(kind: str, space: gym.Space[Any]) -> None:
    with pytest.raises(SpecError, match=rf"^obs\['g'\]: expected .*, got {kind} space .*drop_obs=\('g',\)$"):
        Tree.from_space(spaces.Dict(a=box(1), g=space))


@pytest.mark.parametrize(
    ("space", "drop", "name", "hint"),
    [
        (spaces.Dict(a=box(1), b=spaces.Dict(g=Custom())), (), "obs['b']['g']", (("b", "g"),)),
        (spaces.Dict(a=box(1), b=spaces.Tuple((Custom(),))), (), "obs['b'][0]", ("b",)),
        (spaces.Dict(a=box(1), g=Custom(), h=Custom()), ("g",), "obs['h']", ("g", "h")),
        (spaces.Dict({("t", 1): Custom(), ("u", 2): box(1)}), (), "obs[('t', 1)]", ((("t", 1),),)),
        (spaces.Tuple((box(1), spaces.Dict(a=box(1), g=Custom()))), (), "obs[1]['g']", ((1, "g"),)),
    ],
)
def test_the_hint_of_an_unfit_entry_works(space: gym.Space[Any], drop: Any, name: str, hint: Any) -> None:
    with pytest.raises(SpecError) as error:
        Tree.from_space(space, drop=drop)
    assert str(error.value).startswith(f"{name}: ")
    assert str(error.value).endswith(f"; leave it out with drop_obs={hint!r}")
    assert Tree.from_space(space, drop=hint).leaves


@pytest.mark.parametrize("root", ["action", "obs"])
def test_there_is_no_hint_where_nothing_can_be_dropped(root: str) -> None:
    space = spaces.Tuple((Custom(),)) if root == "obs" else spaces.Dict(a=Custom())
    with pytest.raises(SpecError) as error:
        Tree.from_space(space, root=root)
    assert "leave it out" not in str(error.value)


@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Tuple(()), spaces.Dict(a=spaces.Dict())])
def test_a_space_without_leaves_is_refused(space: gym.Space[Any]) -> None:
    with pytest.raises(SpecError, match="obs: expected at least one leaf, got "):
        Tree.from_space(space)


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(SpecError, match=r"obs: expected at least one leaf, got Dict space .* without \['a'\]"):
        Tree.from_space(spaces.Dict(a=box(1)), drop=("a",))


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(200, start=100, dtype=np.uint8), spaces.MultiDiscrete([3, 2], start=[126, 0], dtype=np.int8)],
)
def test_a_space_whose_values_overflow_its_dtype_is_refused(space: gym.Space[Any]) -> None:
    with pytest.raises(SpecError, match=rf"obs: expected values that fit {space.dtype}, got .* goes up to"):
        Tree.from_space(space)


# ---- dropping entries


@pytest.mark.parametrize("mission", [{}, {"mission": "go"}])
def test_a_dropped_entry_may_be_present_or_absent(mission: dict[str, str]) -> None:
    tree = Tree.from_space(spaces.Dict(image=box(2), mission=spaces.Text(5)), drop=["mission"])
    assert [leaf.path for leaf in tree.leaves] == [("image",)]
    assert tree.flatten({"image": 1, **mission}) == (1,)
    assert tree.unflatten([1]) == {"image": 1}
    with pytest.raises(SpecError, match="expected the keys"):
        tree.flatten({"other": 1, **mission})


def test_inner_entries_are_dropped_by_path() -> None:
    space = spaces.Dict(
        a=spaces.Dict(g=Custom(), h=box(1)), b=spaces.Tuple((box(1), spaces.Dict(g=Custom(), k=box(1))))
    )
    tree = Tree.from_space(space, drop=(("a", "g"), ("b", 1, "g")))
    assert [leaf.path for leaf in tree.leaves] == [("a", "h"), ("b", 0), ("b", 1, "k")]
    value = {"a": {"g": None, "h": 1}, "b": (2, {"k": 3})}
    assert tree.flatten(value) == (1, 2, 3)
    with pytest.raises(SpecError, match=r"obs: expected the keys \['a', 'b'\], got \['a', 'b', 'g'\]"):
        tree.flatten({**value, "g": None})


def test_a_whole_branch_may_be_dropped_with_something_inside_it() -> None:
    tree = Tree.from_space(NESTED, drop=("b", ("b", 1, "c")))
    assert tree.flatten({"a": 1}) == tree.flatten({"a": 1, "b": None}) == (1,)


def test_without_gives_the_space_that_is_left() -> None:
    left = without(NESTED, ("a", ("b", 1, "c")))
    assert left == spaces.Dict(b=spaces.Tuple((spaces.Discrete(3), spaces.Dict())))
    assert list(NESTED.spaces) == ["a", "b"]
    assert without(NESTED, ()) == NESTED
    assert without(box(2), ()) == box(2)
    assert isinstance(without(MyDict(a=box(1), b=box(2)), ("a",)), MyDict)


@pytest.mark.parametrize(
    ("space", "entry", "message"),
    [
        (NESTED, "z", r"drop_obs: expected entries of obs, \['a', 'b'\], got 'z'"),
        (NESTED, ("b", 5), r"drop_obs: expected entries of obs\['b'\], \[0, 1\], got \('b', 5\)"),
        (NESTED, ("a", "x"), r"drop_obs: expected entries of obs\['a'\], \[\], got \('a', 'x'\)"),
        (NESTED, ["a"], r"drop_obs: expected entries of obs, \['a', 'b'\], got \['a'\]"),
        (box(1), "a", r"drop_obs: expected entries of obs, \[\], got 'a'"),
        (NESTED, ("b", 0), r"drop_obs: expected keys or paths of Dict entries.*, got \('b', 0\)"),
        (NESTED, (), r"drop_obs: expected keys or paths of Dict entries.*, got \(\)"),
    ],
)
def test_a_drop_that_names_no_dict_entry_is_refused(space: gym.Space[Any], entry: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}$"):
        Tree.from_space(space, drop=(entry,))


def test_one_string_is_no_sequence_of_keys_to_drop() -> None:
    with pytest.raises(SpecError, match=r"drop_obs: expected a sequence of keys, such as \('ab',\), got 'ab'"):
        Tree.from_space(spaces.Dict(a=box(1), b=box(1), c=box(1)), drop="ab")


# ---- coercion


def leaf_tree(dtype: str, shape: tuple[int, ...]) -> Tree:
    return Tree.from_space(spaces.Box(0, 1, shape, np.dtype(dtype).type))


@pytest.mark.parametrize(
    "value",
    [7, np.int64(7), np.array(7), np.uint8(7), np.array(7, ">i2"), torch.tensor(7), enum.IntEnum("E", "x", start=7).x],
)
def test_a_discrete_observation_comes_in_many_forms(value: object) -> None:
    assert same_array(Tree.from_space(spaces.Discrete(20)).coerce(0, value), np.array(7))


@pytest.mark.parametrize(("value", "number"), [(True, 1), (np.True_, 1), (np.array(False), 0)])
def test_booleans_are_accepted_as_integers(value: object, number: int) -> None:
    assert same_array(Tree.from_space(spaces.Discrete(2)).coerce(0, value), np.array(number))


@pytest.mark.parametrize(
    ("space", "value", "got"),
    [
        (spaces.Discrete(20), 20, "20"),
        (spaces.Discrete(20), -1, "-1"),
        (spaces.Discrete(20), np.int32(20), "20"),
        (spaces.Discrete(20), np.array(20), "20"),
        (spaces.Discrete(20), np.uint64(2**64 - 1), "18446744073709551615"),
        (spaces.Discrete(20), 2**63, "9223372036854775808"),
        (spaces.Discrete(20), 2**70, f"object of shape (): {2**70}"),
        (spaces.Discrete(20), -(2**70), f"object of shape (): {-(2**70)}"),
        (spaces.Discrete(20), 2.0, "float64 of shape (): 2.0"),
        (spaces.Discrete(20), np.array([3]), "int64 of shape (1,): [3]"),
        (spaces.Discrete(3, start=5), 4, "4"),
        (spaces.Discrete(3, start=5), 8, "8"),
        (spaces.MultiBinary(3), np.array([0, 1, 2], np.int8), "2 at index (2,)"),
        (spaces.MultiBinary(3), [0, -1, 2], "-1 at index (1,)"),
        (spaces.MultiDiscrete([[2, 5]], start=[[1, -3]]), np.array([[1, 2]]), "2 at index (0, 1)"),
        (spaces.MultiDiscrete([[2, 5]], start=[[1, -3]]), np.array([[0, 1]], np.uint64), "0 at index (0, 0)"),
        (spaces.MultiDiscrete(np.array(4)), 4, "4"),
    ],
)
def test_a_value_outside_an_integer_space_is_refused(space: gym.Space[Any], value: object, got: str) -> None:
    tree = Tree.from_space(space)
    with pytest.raises(SpecError) as error:
        tree.coerce(0, value)
    assert str(error.value) == f"obs: expected {tree.leaves[0]}, got {got}"


@pytest.mark.parametrize(
    ("space", "bounds"),
    [
        (spaces.Discrete(20), " from 0 to 19"),
        (spaces.MultiDiscrete([2, 5], start=[1, -3]), " from [ 1 -3] to [2 1]"),
        (spaces.MultiBinary(2), " from 0 to 1"),
        (box(2), ""),
    ],
)
def test_a_leaf_says_what_it_holds(space: gym.Space[Any], bounds: str) -> None:
    leaf = Tree.from_space(space).leaves[0]
    if isinstance(space, spaces.MultiDiscrete):
        for bound in (leaf.low, leaf.high):
            assert isinstance(bound, np.ndarray) and (bound.dtype, bound.shape) == (leaf.dtype, leaf.shape)
            assert not np.shares_memory(bound, space.start)
    assert str(leaf) == f"{leaf.dtype} of shape {leaf.shape}{bounds}"


@pytest.mark.parametrize(
    "value",
    [
        None,
        "abc",
        b"abc",
        [[1], [1, 2]],
        object(),
        {},
        {"a": 1},
        np.array([1, 2, 3], object),
        np.array([1, 2, 3], complex),
        np.array([1, 2, 3], "M8[s]"),
        np.array([1, 2, 3], "m8[s]"),
        np.timedelta64(1, "s"),
        np.array([(1,)], [("x", "i4")]),
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.bfloat16),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(value: object) -> None:
    for dtype, shape in product(DTYPES, [(), (3,)]):
        with pytest.raises(SpecError, match=rf"^obs: expected {np.dtype(dtype)} of shape .*, got "):
            leaf_tree(dtype, shape).coerce(0, value)


def test_the_error_of_an_unreadable_value_keeps_its_cause() -> None:
    with pytest.raises(SpecError, match="detach") as error:
        leaf_tree("f4", (1,)).coerce(0, torch.ones(1, requires_grad=True))
    assert isinstance(error.value.__cause__, RuntimeError)


def test_a_long_value_is_shortened_in_the_error() -> None:
    with pytest.raises(SpecError) as error:
        leaf_tree("f4", (2,)).coerce(0, list(range(10_000)))
    message = str(error.value)
    assert message.startswith("obs: expected float32 of shape (2,), got int64 of shape (10000,): [0, 1, 2")
    assert len(message) < 200


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("u1", 0.5), ("u1", [0.5]), ("i8", np.array([1.0])), ("u8", [1.0]), ("?", [1]), ("?", np.array([1.0]))],
)
def test_a_type_of_another_kind_is_refused_even_when_its_value_would_fit(dtype: str, value: object) -> None:
    with pytest.raises(SpecError, match=rf"expected {np.dtype(dtype)} of shape \(1,\), got (float64|int64)"):
        leaf_tree(dtype, (1,)).coerce(0, value)


@pytest.mark.parametrize(
    ("given_shape", "shape"), [((1,), ()), ((), (1,)), ((3,), (1, 3)), ((2, 1), (2,)), ((4,), (3,))]
)
def test_nothing_is_broadcast_or_squeezed(given_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for dtype in ("int64", "float32"):
        with pytest.raises(SpecError) as error:
            leaf_tree(dtype, shape).coerce(0, np.zeros(given_shape, dtype))
        assert f"expected {dtype} of shape {shape}, got {dtype} of shape {given_shape}: " in str(error.value)


@pytest.mark.parametrize(("dtype", "value"), [("u1", 300), ("u1", -1), ("i1", 128), ("i8", 2**63), ("u8", -1)])
def test_integers_never_wrap(dtype: str, value: int) -> None:
    expected = f"obs: expected {np.dtype(dtype)} of shape"
    for wrong in (value, np.asarray(value), np.asarray(value)[()]):
        with pytest.raises(SpecError) as error:
            leaf_tree(dtype, ()).coerce(0, wrong)
        assert str(error.value) == f"{expected} (), got {value}"
    with pytest.raises(SpecError) as error:
        leaf_tree(dtype, (2,)).coerce(0, np.asarray([0, value], np.asarray(value).dtype))
    assert str(error.value) == f"{expected} (2,), got {value} at index (1,)"


@pytest.mark.parametrize("dtype", ["u1", "i8", "u8"])
def test_a_list_of_integers_that_numpy_reads_as_floats_is_read_exactly(dtype: str) -> None:
    numbers = [1, 2**63 + 1]
    assert np.asarray(numbers).dtype == np.float64
    if dtype == "u8":
        assert leaf_tree(dtype, (2,)).coerce(0, numbers).tolist() == numbers
    else:
        with pytest.raises(SpecError, match=r"got 9223372036854775809 at index \(1,\)"):
            leaf_tree(dtype, (2,)).coerce(0, numbers)
    with pytest.raises(SpecError, match=r"got float64 of shape \(2,\): \[-1, 9223372036854775809\]"):
        leaf_tree(dtype, (2,)).coerce(0, [-1, 2**63 + 1])


def test_an_empty_list_fits_a_zero_size_leaf_of_any_type() -> None:
    for dtype in DTYPES:
        assert same_array(leaf_tree(dtype, (0,)).coerce(0, []), np.empty(0, dtype))


def test_out_of_range_and_nan_box_values_pass() -> None:
    value = np.array([np.nan, np.inf, -5.0, 5.0], np.float32)
    assert leaf_tree("f4", (4,)).coerce(0, value) is value
    assert leaf_tree("u1", (1,)).coerce(0, [200]).tolist() == [200]


@pytest.mark.parametrize(("dtype", "value"), [("f4", 1e300), ("f2", 1e6), ("f2", 2**62), ("f2", np.float32(1e30))])
def test_a_float_too_large_becomes_infinite_without_a_warning(dtype: str, value: float) -> None:
    with np.errstate(all="raise"):
        for form in (value, [[value]], np.array([[value]])):
            shape = np.shape(form)
            assert np.isposinf(leaf_tree(dtype, shape).coerce(0, form)).all()


FRAME = np.arange(24, dtype=np.float64).reshape(4, 3, 2)


@pytest.mark.parametrize(
    "value",
    [
        FRAME[::-1],
        FRAME[:, ::-1, ::2],
        FRAME.transpose(2, 0, 1),
        np.broadcast_to(FRAME[0, 0], (4, 3, 2)),
        np.asfortranarray(FRAME),
        FRAME.astype(">f8"),
        FRAME.astype(">f4")[::-1],
        FRAME.astype(np.float32),
        FRAME.astype(np.int16),
        FRAME[::2].view(np.recarray),
        torch.arange(24.0).reshape(4, 3, 2).permute(1, 0, 2),
    ],
)
def test_the_logical_values_arrive_whatever_the_memory_layout(value: Any) -> None:
    for dtype, form in product(["f8", "f4", "f2"], [value, value.tolist()]):
        array = leaf_tree(dtype, tuple(value.shape)).coerce(0, form)
        assert type(array) is np.ndarray and same_array(array, np.array(value.tolist(), dtype))
        assert array.flags.c_contiguous and array.dtype.isnative


def test_a_fitting_array_is_not_copied_even_when_read_only() -> None:
    value = np.ones(3, np.float32)
    value.flags.writeable = False
    assert leaf_tree("f4", (3,)).coerce(0, value) is value


@st.composite
def leaves_and_values(draw: st.DrawFn) -> tuple[gym.Space[Any], Any]:
    """A space of one leaf, and a value that may or may not fit it."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    source = np.dtype(draw(st.sampled_from("=<>")) + draw(st.sampled_from(DTYPES)))
    small = st.integers(0, 5) if source.kind in "iu" and draw(st.booleans()) else None
    value: Any = draw(hnp.arrays(source, shape, elements=small))
    if draw(st.booleans()):
        value = value.T
    if value.ndim and draw(st.booleans()):
        value = value[::-1]
    shape = value.shape if draw(st.integers(0, 9)) else draw(hnp.array_shapes(min_dims=0, max_dims=2))
    form = draw(st.sampled_from(["array", "list", "element", "read-only"]))
    if form == "list":
        value = value.tolist()
    elif form == "element" and value.ndim == 0:
        value = value[()]
    elif form == "read-only":
        value.flags.writeable = False
    kind = draw(st.sampled_from(["box", "box", "binary", "multi-discrete", "discrete"]))
    if kind == "binary" and all(shape):
        return spaces.MultiBinary(shape), value
    if kind == "multi-discrete":
        integer = np.dtype(draw(st.sampled_from(["i1", "u1", "i4", "i8", "u8"])))
        nvec = draw(hnp.arrays(integer, shape, elements=st.integers(1, 6)))
        start = draw(hnp.arrays(integer, shape, elements=st.integers(-3 if integer.kind == "i" else 0, 3)))
        return spaces.MultiDiscrete(nvec, start=start, dtype=integer.type), value
    if kind == "discrete" and shape == ():
        integer = np.dtype(draw(st.sampled_from(["i1", "u1", "i4", "i8", "u8"])))
        return spaces.Discrete(draw(st.integers(1, 6)), start=draw(st.integers(0, 3)), dtype=integer.type), value
    return spaces.Box(0, 1, shape, np.dtype(draw(st.sampled_from(DTYPES))).type), value


def oracle(space: gym.Space[Any], value: Any) -> np.ndarray[Any, Any] | None:
    """The rules, one element at a time in Python numbers; None if the value is to be refused."""
    dtype, shape = space.dtype, space.shape
    assert dtype is not None and shape is not None
    if np.shape(value) != shape:
        return None
    elements = np.array(value, object).reshape(-1).tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        kinds = {value.dtype.kind.replace("u", "i")}
    else:
        kinds = {"b" if type(each) is bool else "i" if type(each) is int else "f" for each in elements}
    if dtype.kind == "b" and kinds - {"b"}:
        return None
    if dtype.kind in "iu":
        if "f" in kinds:
            return None
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        lows, highs = np.full(shape, low, object), np.full(shape, high, object)
        if isinstance(space, spaces.MultiBinary):
            lows, highs = np.full(shape, 0, object), np.full(shape, 1, object)
        elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            count = space.n if isinstance(space, spaces.Discrete) else space.nvec
            lows = np.asarray(space.start).astype(object) + np.zeros(shape, object)
            highs = lows + np.asarray(count).astype(object) - 1
        limits = zip(np.reshape(lows, -1), elements, np.reshape(highs, -1), strict=True)
        if not all(least <= int(each) <= most for least, each, most in limits):
            return None
    with np.errstate(all="ignore"):
        flat = np.array(value).reshape(-1) if dtype.kind == "f" else elements
        return np.array([dtype.type(each) for each in flat], dtype).reshape(shape)


@settings(deadline=None, max_examples=400)
@given(leaves_and_values())
def test_coercion_agrees_with_the_rules_spelled_out(case: tuple[gym.Space[Any], Any]) -> None:
    space, value = case
    rows = [value] if isinstance(value, list) else np.asarray(value)[None]
    tree, expected = Tree.from_space(space), oracle(space, value)
    for convert in (lambda: tree.coerce(0, value), lambda: tree.check_rows(0, rows, 1)[0]):
        if expected is None:
            with pytest.raises(SpecError, match=r"^obs: expected .* of shape \(.*, got "):
                convert()
        else:
            assert same_array(convert(), expected)
    if expected is not None:
        array = tree.coerce(0, value)
        assert array.flags.c_contiguous and array.dtype.isnative


# ---- rows


def test_rows_that_fit_are_passed_on_as_they_are() -> None:
    tree, rows = Tree.from_space(spaces.Discrete(5)), np.arange(5)
    assert tree.check_rows(0, rows, 5) is rows
    assert tree.check_rows(0, rows.astype(np.uint8), 5).dtype == np.int64


@pytest.mark.parametrize(
    ("space", "rows", "expected", "got"),
    [
        (spaces.Discrete(5), np.arange(3), "int64 of shape (4,) from 0 to 4", "int64 of shape (3,): [0 1 2]"),
        (spaces.Discrete(5), np.zeros((4, 1), int), "int64 of shape (4,) from 0 to 4", "int64 of shape (4, 1): [[0]"),
        (spaces.Discrete(5), 3, "int64 of shape (4,) from 0 to 4", "int64 of shape (): 3"),
        (spaces.Discrete(5), np.zeros(4), "int64 of shape (4,) from 0 to 4", "float64 of shape (4,): [0. 0. 0. 0.]"),
        (spaces.Discrete(5), np.array([0, 4, 5, 6]), "int64 of shape (4,) from 0 to 4", "5 at index (2,)"),
        (spaces.Discrete(5, start=1), np.array([1, 2, 3, 0]), "int64 of shape (4,) from 1 to 5", "0 at index (3,)"),
        (
            spaces.MultiDiscrete([2, 5]),
            np.array([[1, 4]] * 3 + [[2, 4]]),
            "int64 of shape (4, 2) from [0 0] to [1 4]",
            "2 at index (3, 0)",
        ),
        (box(2), np.zeros((4, 3)), "float32 of shape (4, 2)", "float64 of shape (4, 3): [[0. 0. 0.]"),
        (box(2), np.array([[0, 0]] * 3 + [[0, np.nan]]), "float32 of shape (4, 2)", "nan at index (3, 1)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(space: gym.Space[Any], rows: Any, expected: str, got: str) -> None:
    tree = Tree.from_space(spaces.Dict(x=space), root="action", refuse_nan=True)
    with pytest.raises(SpecError) as error:
        tree.check_rows(0, rows, 4)
    assert str(error.value).startswith(f"action['x']: expected {expected}, got {got}")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_nan_is_refused_where_asked_for_and_infinities_are_not(dtype: str) -> None:
    strict = Tree.from_space(spaces.Box(-1, 1, (3,), np.dtype(dtype).type), refuse_nan=True)
    for place in range(6):
        rows = np.array([np.inf, -np.inf, 5, 0, -5, 1], dtype)
        assert strict.check_rows(0, rows.reshape(2, 3), 2).tolist() == rows.reshape(2, 3).tolist()
        rows[place] = np.nan
        with pytest.raises(SpecError, match=rf"got nan at index \({place // 3}, {place % 3}\)"):
            strict.check_rows(0, rows.reshape(2, 3), 2)
    with pytest.raises(SpecError, match=r"got nan at index \(1,\)"):
        strict.coerce(0, [0.0, float("nan"), 0.0])
    assert Tree.from_space(box(0), refuse_nan=True).check_rows(0, np.zeros((0, 0)), 0).shape == (0, 0)


# ---- reading


@TABLE
def test_a_reader_gives_values_of_the_space_that_are_copies(space: gym.Space[Any]) -> None:
    tree = Tree.from_space(space)
    fields = [np.stack([rows] * 3) for rows in tree.sample(4, seed=1)]
    value = tree.reader(fields)(2, 3)
    assert plain(value) == plain(tree.unflatten([field[2, 3] for field in fields]))
    before = plain(value)
    for field in fields:
        field[...] = 0
    assert plain(value) == before
    for leaf, each in zip(tree.leaves, tree.flatten(value), strict=True):
        if leaf.is_scalar:
            assert type(each) is leaf.dtype.type
        else:
            assert type(each) is np.ndarray and each.flags.owndata and each.flags.writeable


def test_the_space_contains_what_a_reader_gives() -> None:
    for name, (space, _) in SPACES.items():
        tree = Tree.from_space(space)
        read = tree.reader([rows[None] for rows in tree.sample(20, seed=2)])
        assert all(space.contains(read(0, slot)) for slot in range(20)), name


def test_only_discrete_leaves_are_scalars() -> None:
    read = {name: Tree.from_space(space).leaves[0].is_scalar for name, (space, _) in SPACES.items() if "0-d" in name}
    assert read == {"0-d box": False, "0-d multi-binary": False, "0-d multi-discrete": False}
    assert Tree.from_space(MyDiscrete(3)).leaves[0].is_scalar


# ---- sampling


@TABLE
def test_samples_are_of_the_space_and_repeat_with_their_seed(space: gym.Space[Any]) -> None:
    space.seed(5)
    untouched = plain(space.sample())
    space.seed(5)
    tree = Tree.from_space(space)
    rows = tree.sample(7, seed=11)
    for i, leaf in enumerate(tree.leaves):
        assert same_array(tree.check_rows(i, rows[i], 7), rows[i])
        assert rows[i].shape == (7, *leaf.shape) and rows[i].dtype == leaf.dtype
    assert plain(tuple(rows)) == plain(tuple(tree.sample(7, seed=11)))
    assert plain(space.sample()) == untouched


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_samples_of_a_huge_box_stay_small(dtype: Any) -> None:
    huge = float(np.finfo(dtype).max)
    (rows,) = Tree.from_space(spaces.Box(-huge, huge, (1000,), dtype)).sample(2, seed=0)
    assert np.abs(rows).max() < 10


def test_samples_reach_both_ends_of_an_integer_space() -> None:
    (rows,) = Tree.from_space(spaces.Discrete(3, start=-1)).sample(200, seed=0)
    assert set(rows.tolist()) == {-1, 0, 1}


# ---- comparing


def test_neither_the_order_of_keys_nor_box_bounds_make_a_difference() -> None:
    one = Tree.from_space(spaces.Dict(OrderedDict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(3))))
    two = Tree.from_space(spaces.Dict(OrderedDict(b=spaces.Discrete(3), a=spaces.Box(-9, 9, (2,)))))
    assert [leaf.path for leaf in one.leaves] != [leaf.path for leaf in two.leaves]
    assert one.difference(two) is None
    assert one.flatten({"b": 1, "a": 0}) == (0, 1)


@pytest.mark.parametrize(
    ("one", "two", "sentence"),
    [
        (box(3), box(4), "obs: expected float32 of shape (3,), got float32 of shape (4,)"),
        (box(3), box(3, dtype="f8"), "obs: expected float32 of shape (3,), got float64 of shape (3,)"),
        (
            spaces.Discrete(3),
            spaces.Discrete(4),
            "obs: expected int64 of shape () from 0 to 2, got int64 of shape () from 0 to 3",
        ),
        (
            spaces.MultiDiscrete([3, 4]),
            spaces.MultiDiscrete([3, 4], start=[0, 1]),
            "obs: expected int64 of shape (2,) from [0 0] to [2 3], got int64 of shape (2,) from [0 1] to [2 4]",
        ),
        (
            spaces.Discrete(3),
            box(dtype="i8"),
            "obs: expected int64 of shape () from 0 to 2, got int64 of shape ()",
        ),
        (
            spaces.Dict(a=box(1), b=box(2)),
            spaces.Dict(a=box(1), c=box(2)),
            "obs['b']: expected float32 of shape (2,), got nothing",
        ),
        (
            spaces.Dict(a=box(1)),
            spaces.Dict(a=box(1), c=box(2)),
            "obs['c']: expected nothing, got float32 of shape (2,)",
        ),
        (
            spaces.Dict(a=box(1), b=box(2)),
            spaces.Dict(a=box(2), b=box(1)),
            "obs['a']: expected float32 of shape (1,), got float32 of shape (2,)",
        ),
        (
            spaces.Tuple((box(1),)),
            spaces.Dict({0: box(1)}),
            "obs: expected it nested as ('obs[0]',), got {0: 'obs[0]'}",
        ),
    ],
)
def test_a_difference_is_told_with_both_sides(one: gym.Space[Any], two: gym.Space[Any], sentence: str) -> None:
    assert Tree.from_space(one).difference(Tree.from_space(two)) == sentence
    assert Tree.from_space(two).difference(Tree.from_space(one)) is not None
