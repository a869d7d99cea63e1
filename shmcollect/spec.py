"""A Gymnasium space as a tree of leaves, each of which fits a fixed slot.

A nested value (dicts by key, tuples by index) and the flat tuple of its leaves are two forms of one thing; a ``Tree``
goes from either to the other. It matches by path, never by position, and builds all its ways at construction, because
env workers take them once per step. Which raw values a leaf takes is said in ``values``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from shmcollect.values import Array, Bound, brief, converter, describe_type, inside, refuse

Space: TypeAlias = spaces.Space[Any]
Path: TypeAlias = tuple[Hashable, ...]
# A space's nesting, with the index of each leaf in its place.
Nest: TypeAlias = "int | dict[Hashable, Nest] | tuple[Nest, ...]"
Walker: TypeAlias = Callable[[Any, list[Any]], None]

LEAF_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


@dataclass(frozen=True, eq=False)
class Leaf:
    """One array of fixed size inside a space.

    Attributes:
        path: Dict keys and Tuple indices that lead to it; ``()`` for a bare space.
        dtype: Type of one element, native byte order.
        shape: Shape of one value; may be ``()`` or hold zeros.
        low: Smallest value of a Discrete or MultiBinary, an array of ``shape`` for MultiDiscrete, None for Box.
        high: Largest value, likewise.
        is_scalar: Whether the space's own values are NumPy scalars (Discrete), not arrays.
    """

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    low: Bound = None
    high: Bound = None
    is_scalar: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return describe_type(self.dtype, self.shape, self.low, self.high)


def describe(path: Path, root: str = "obs") -> str:
    """A path as one would write it in Python: ``obs['a'][0]``."""
    return root + "".join(f"[{step!r}]" for step in path)


def without(space: Space, drop: Sequence[Hashable], root: str = "obs") -> Space:
    """The space without the Dict entries that ``drop`` names (see ``Tree.from_space``); the argument stays as it is."""
    return _prune(space, (), _dropped_paths(space, drop, root))


class Tree:
    """A space as an ordered tuple of leaves, and the ways between nested values and leaves.

    Built by ``from_space``.

    Attributes:
        leaves: In the order of the space.
        flatten: ``flatten(value)`` is the tuple of a nested value's raw leaves, in the order of ``leaves``. A value
            nested otherwise than the space is a ``SpecError``. Dropped entries may be there or not.
        unflatten: ``unflatten(values)`` nests one item per leaf like the space, in plain dicts and tuples.
    """

    leaves: tuple[Leaf, ...]
    flatten: Callable[[object], tuple[Any, ...]]
    unflatten: Callable[[Sequence[Any]], Any]

    def __init__(
        self, nest: Nest, found: Mapping[Path, Space], dropped: frozenset[Path], root: str, refuse_nan: bool
    ) -> None:
        self.leaves = tuple(_leaf(space, path, root) for path, space in found.items())
        self.flatten = _flattener(nest, dropped, root)
        self.unflatten = _nester(nest)
        self._root = root
        self._spaces = tuple(found.values())
        self._converters = tuple(
            converter(self.describe(i), leaf.dtype, leaf.low, leaf.high, refuse_nan=refuse_nan)
            for i, leaf in enumerate(self.leaves)
        )

    @classmethod
    def from_space(
        cls, space: Space, *, root: str = "obs", drop: Sequence[Hashable] = (), refuse_nan: bool = False
    ) -> Tree:
        """The tree of a space.

        Args:
            space: Box, Discrete, MultiBinary, MultiDiscrete (or subclasses), or Dict and Tuple of these.
            root: What error messages call the whole value.
            drop: Dict entries to leave out: a key of the outermost Dict, or as a tuple the path of an inner entry.
            refuse_nan: Whether NaN in a float leaf is an error.

        Raises:
            SpecError: A leaf that fits no fixed slot, a ``drop`` that names no Dict entry, or no leaf at all.
        """
        dropped = _dropped_paths(space, drop, root)
        found: dict[Path, Space] = {}

        def grow(part: Space, path: Path, entry: Path) -> Nest:
            if isinstance(part, spaces.Dict):
                return {key: grow(inner, (*path, key), (*path, key)) for key, inner in part.spaces.items()}
            if isinstance(part, spaces.Tuple):
                return tuple(grow(inner, (*path, i), entry) for i, inner in enumerate(part.spaces))
            if not _fits_a_slot(part):
                expected = "a Box, Discrete, MultiBinary or MultiDiscrete of at most 64 bits per element"
                refuse(describe(path, root), expected, f"{_name(part)}{_drop_hint(entry, root, drop)}")
            found[path] = part
            return len(found) - 1

        nest = grow(without(space, drop, root), (), ())
        if not found:
            refuse(root, "at least one leaf", f"{_name(space)}{f' without {list(drop)}' if drop else ''}")
        return cls(nest, found, dropped, root, refuse_nan)

    def describe(self, i: int) -> str:
        """Leaf ``i`` as one would write it in Python."""
        return describe(self.leaves[i].path, self._root)

    def coerce(self, i: int, value: object) -> Array:
        """A raw value of leaf ``i`` as a C-contiguous array of exactly its dtype and shape, maybe ``value`` itself.

        Raises:
            SpecError: The value does not fit.
        """
        return self._converters[i](value, self.leaves[i].shape)

    def check_rows(self, i: int, rows: object, n: int) -> Array:
        """``n`` values of leaf ``i`` as one array [n, *shape], by the rules of ``coerce``.

        Raises:
            SpecError: The rows do not fit.
        """
        return self._converters[i](rows, (n, *self.leaves[i].shape))

    def reader(self, fields: Sequence[Array]) -> Callable[[int, int], Any]:
        """Build ``read(env, slot)`` over one array [num_envs, capacity, *shape] per leaf.

        It gives a value of the space that shares no memory with the fields: a NumPy scalar for a Discrete leaf, an
        array for any other.
        """
        reads = [_leaf_reader(leaf, field) for leaf, field in zip(self.leaves, fields, strict=True)]
        if self.leaves[0].path == ():
            return reads[0]
        nest = self.unflatten
        return lambda env, slot: nest([read(env, slot) for read in reads])

    def sample(self, n: int, seed: int) -> list[Array]:
        """``n`` random values of the space: one array [n, *shape] per leaf.

        Floats are standard normal, clipped to the bounds. ``space.sample()`` draws from all of a bounded interval,
        which overflows where a space declares the whole range of its type, there or in a policy.
        """
        random = np.random.default_rng(seed)
        return [_draw(random, leaf, space, n) for leaf, space in zip(self.leaves, self._spaces, strict=True)]

    def difference(self, other: Tree) -> str | None:
        """The first leaf in which ``other`` differs, as a sentence; None if none does.

        Neither the order of keys nor the bounds of a Box count.
        """
        ours, theirs = ({leaf.path: leaf for leaf in tree.leaves} for tree in (self, other))
        for path in ours | theirs:
            here, there = ours.get(path), theirs.get(path)
            if here is None or there is None or not _same(here, there):
                return f"{describe(path, self._root)}: expected {here or 'nothing'}, got {there or 'nothing'}"
        here, there = (tree.unflatten([describe(leaf.path) for leaf in tree.leaves]) for tree in (self, other))
        return None if here == there else f"{self._root}: expected it nested as {here}, got {there}"


# ---- space -> leaves


def _fits_a_slot(space: Space) -> bool:
    return isinstance(space, LEAF_SPACES) and space.dtype.kind in "biuf" and space.dtype.itemsize <= 8


def _leaf(space: Space, path: Path, root: str) -> Leaf:
    assert space.dtype is not None and space.shape is not None
    dtype = np.dtype(space.dtype.str[1:])  # without its byte order: the native one
    low, high = _bounds(space)
    if low is not None:
        limits = np.iinfo(dtype)
        if not inside(np.asarray(high), int(limits.min), int(limits.max)):
            refuse(describe(path, root), f"values that fit {dtype}", f"{_name(space)}, which goes up to {brief(high)}")
        if isinstance(space, spaces.MultiDiscrete):
            low, high = np.array(low, dtype), np.array(high, dtype)
    return Leaf(path, dtype, tuple(space.shape), low, high, isinstance(space, spaces.Discrete))


def _bounds(space: Space) -> tuple[Bound, Bound]:
    """Lowest and highest value in Python integers, which do not overflow."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, np.asarray(space.start.astype(object) + space.nvec.astype(object) - 1)
    return None, None


def _entries(space: Space) -> dict[Hashable, Space]:
    if isinstance(space, spaces.Dict):
        return {key: inner for key, inner in space.spaces.items()}
    return dict(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else {}


def _dropped_paths(space: Space, drop: Sequence[Hashable], root: str) -> frozenset[Path]:
    if isinstance(drop, str):
        refuse(f"drop_{root}", f"a sequence of keys, such as ({drop!r},)", repr(drop))
    return frozenset(_dropped_path(space, entry, root) for entry in drop)


def _dropped_path(space: Space, entry: Hashable, root: str) -> Path:
    path = entry if isinstance(entry, tuple) else (entry,)
    container: Space | None = None
    part = space
    for depth, step in enumerate(path):
        container, entries = part, _entries(part)
        if step not in list(entries):
            refuse(f"drop_{root}", f"entries of {describe(path[:depth], root)}, {list(entries)}", repr(entry))
        part = entries[step]
    if not isinstance(container, spaces.Dict):
        refuse(f"drop_{root}", "keys or paths of Dict entries (the items of a Tuple can't be left out)", repr(entry))
    return path


def _prune(space: Space, path: Path, dropped: frozenset[Path]) -> Space:
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return space
    kept = {step: each for step, each in _entries(space).items() if (*path, step) not in dropped}
    inner: Any = {step: _prune(each, (*path, step), dropped) for step, each in kept.items()}
    pruned = copy.copy(space)
    pruned.spaces = inner if isinstance(space, spaces.Dict) else tuple(inner.values())
    return pruned


def _drop_hint(entry: Path, root: str, drop: Sequence[Hashable]) -> str:
    """How to leave out the Dict entry around an unfit leaf, where the user can."""
    if root != "obs" or not entry:
        return ""
    is_key = len(entry) == 1 and not isinstance(entry[0], tuple)
    return f"; leave it out with drop_obs={(*drop, entry[0] if is_key else entry)!r}"


def _name(space: Space) -> str:
    return f"{type(space).__name__} space {brief(space)}"


def _same(here: Leaf, there: Leaf) -> bool:
    bounds = zip((here.low, here.high), (there.low, there.high), strict=True)
    same_bounds = all(np.array_equal(np.asarray(one), np.asarray(two)) for one, two in bounds)
    return here.dtype == there.dtype and here.shape == there.shape and same_bounds


def _draw(random: np.random.Generator, leaf: Leaf, space: Space, n: int) -> Array:
    bounded: Any = space if isinstance(space, spaces.Box) else leaf
    size = (n, *leaf.shape)
    if leaf.dtype.kind == "f":
        return np.asarray(random.standard_normal(size).clip(bounded.low, bounded.high), leaf.dtype)
    return np.asarray(random.integers(bounded.low, bounded.high, size, leaf.dtype, endpoint=True))


# ---- nested value <-> leaves


def _flattener(nest: Nest, dropped: frozenset[Path], root: str) -> Callable[[object], tuple[Any, ...]]:
    if isinstance(nest, int):
        return lambda value: (value,)
    walk = _walker(nest, (), dropped, root)

    def flatten(value: object) -> tuple[Any, ...]:
        leaves: list[Any] = []
        walk(value, leaves)
        return tuple(leaves)

    return flatten


def _walker(nest: Nest, path: Path, dropped: frozenset[Path], root: str) -> Walker:
    """Build ``walk(value, leaves)``, which appends the leaves of a nested value to a list."""
    if isinstance(nest, int):
        return lambda value, leaves: leaves.append(value)
    if isinstance(nest, tuple):
        items = [_walker(each, (*path, i), dropped, root) for i, each in enumerate(nest)]
        return _tuple_walker(items, describe(path, root))
    entries = {key: _walker(each, (*path, key), dropped, root) for key, each in nest.items()}
    ignored = [each[-1] for each in dropped if each[:-1] == path]
    return _dict_walker(entries, ignored, describe(path, root))


def _tuple_walker(items: list[Walker], name: str) -> Walker:
    def walk(value: Any, leaves: list[Any]) -> None:
        if not isinstance(value, (tuple, list)):
            refuse(name, f"a tuple or list of length {len(items)}", _kind(value))
        if len(value) != len(items):
            refuse(name, f"length {len(items)}", f"length {len(value)}")
        for walk_item, item in zip(items, value, strict=True):
            walk_item(item, leaves)

    return walk


def _dict_walker(entries: dict[Hashable, Walker], ignored: Sequence[Hashable], name: str) -> Walker:
    needed = frozenset(entries)
    allowed = needed.union(ignored)
    walks = tuple(entries.items())

    def walk(value: Any, leaves: list[Any]) -> None:
        if not isinstance(value, (dict, Mapping)):
            refuse(name, f"a mapping with the keys {list(entries)}", _kind(value))
        if not needed <= value.keys() <= allowed:
            refuse(name, f"the keys {list(entries)}", f"{list(value)}")
        for key, walk_entry in walks:
            walk_entry(value[key], leaves)

    return walk


def _kind(value: object) -> str:
    return f"{type(value).__name__} {brief(value)}"


def _nester(nest: Nest) -> Callable[[Sequence[Any]], Any]:
    if isinstance(nest, int):
        return itemgetter(nest)
    if isinstance(nest, tuple):
        items = [_nester(each) for each in nest]
        return lambda values: tuple([item(values) for item in items])
    entries = [(key, _nester(each)) for key, each in nest.items()]
    return lambda values: {key: entry(values) for key, entry in entries}


def _leaf_reader(leaf: Leaf, field: Array) -> Callable[[int, int], Any]:
    if leaf.is_scalar:
        return lambda env, slot: field[env, slot]
    return lambda env, slot: field[env, slot, ...].copy()
