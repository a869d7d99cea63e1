"""Which raw values fit a fixed slot, and how they become arrays: never by wrapping, truncating or broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np

from shmcollect.errors import SpecError

Array: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = tuple[int, ...]
Bound: TypeAlias = int | Array | None

# By kind of the slot's dtype, the kinds of value it takes. A float is no integer, even when integral.
ACCEPTED = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}
# Not by isinstance, for which timedelta64 is an integer.
INTEGERS = frozenset({bool, int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])})
UNREADABLE = (TypeError, ValueError, RuntimeError, OverflowError)  # from np.asarray: ragged lists, CUDA tensors, ...


def converter(
    name: str, dtype: np.dtype[Any], low: Bound, high: Bound, *, refuse_nan: bool
) -> Callable[[object, Shape], Array]:
    """Build ``convert(value, shape)``: ``value`` as a C-contiguous array of ``dtype`` and ``shape``, maybe itself.

    Args:
        name: What error messages call the value.
        dtype: Type of the array, native byte order.
        low: Smallest value of a bounded integer, for all elements or one for each; None if unbounded.
        high: Largest value, likewise.
        refuse_nan: Whether NaN is an error.
    """
    accepted = ACCEPTED[dtype.kind]
    is_integer, is_bounded = dtype.kind in "iu", low is not None
    least: Any = np.iinfo(dtype).min if is_integer and low is None else low
    most: Any = np.iinfo(dtype).max if is_integer and high is None else high

    def refuse_for(shape: Shape, got: str, cause: Exception | None = None) -> NoReturn:
        refuse(name, describe_type(dtype, shape, low, high), got, cause)

    def convert(value: Any, shape: Shape) -> Array:
        if is_integer and not shape and type(value) in INTEGERS and least <= value <= most:
            return np.array(value, dtype)
        try:
            array = value if type(value) is np.ndarray else _as_array(value, dtype)
        except UNREADABLE as error:
            refuse_for(shape, f"{brief(value)}: {error}", error)
        if array.shape != shape or array.dtype.kind not in accepted:
            refuse_for(shape, f"{array.dtype} of shape {array.shape}: {brief(value)}")
        is_exact = array.dtype == dtype
        if is_integer and (is_bounded or not is_exact) and not inside(array, least, most):
            refuse_for(shape, _first(array, (array < least) | (array > most)))
        if not is_exact:
            with np.errstate(all="ignore"):  # a float too large for a smaller type becomes inf, as in any cast
                array = array.astype(dtype, order="C")
        if refuse_nan and dtype.kind == "f" and has_nan(array):
            refuse_for(shape, _first(array, np.isnan(array)))
        if array.flags.c_contiguous and array.flags.aligned and array.dtype.byteorder in "=|":
            return array
        return np.array(array, dtype, order="C")  # what is not aligned or spells its byte order fits no slot as it is

    return convert


def inside(array: Array, low: Any, high: Any) -> bool:
    """Whether all of an integer array lies within bounds, which may be of another integer type."""
    if isinstance(low, int):  # argmin costs a quarter of min, which goes through the machinery of reductions
        return not array.size or low <= array.item(array.argmin()) <= array.item(array.argmax()) <= high
    return bool(((low <= array) & (array <= high)).all())


def has_nan(array: Array) -> bool:
    """Whether a float array holds NaN, which argmax takes for the largest."""
    return array.size > 0 and math.isnan(array.item(array.argmax()))


def _as_array(value: object, dtype: np.dtype[Any]) -> Array:
    array = np.asarray(value)
    if array.dtype == np.float64 and dtype.kind != "f" and isinstance(value, (list, tuple)):
        # Not every list that NumPy reads as floats holds some: [] does not, nor does [1, 2**63].
        exact = np.array(value, object)
        if all(type(each) in INTEGERS and 0 <= each < 2**64 for each in exact.flat):
            return exact.astype(np.uint64 if exact.size else dtype)
    return array


# ---- the words of error messages


def refuse(name: str, expected: str, got: str, cause: Exception | None = None) -> NoReturn:
    """Raise the error about something that does not fit."""
    raise SpecError(f"{name}: expected {expected}, got {got}") from cause


def describe_type(dtype: np.dtype[Any], shape: Shape, low: Bound = None, high: Bound = None) -> str:
    """What a slot holds: ``int64 of shape (2,) from 0 to 9``."""
    bounds = "" if low is None else f" from {brief(low)} to {brief(high)}"
    return f"{dtype} of shape {shape}{bounds}"


def brief(value: object, limit: int = 80) -> str:
    """A value's ``repr`` on one short line; an array's elements alone."""
    text = " ".join((str(value) if isinstance(value, np.ndarray) else repr(value)).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _first(array: Array, wrong: Array) -> str:
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{array[index]} at index {index}" if index else str(array[index])
