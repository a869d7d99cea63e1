"""The flat image of a module's state: which tensors it has, where each lies, and what of a source belongs there.

module -> its parameters and persistent buffers, by name -> schema -> views into a flat block of bytes
module or dict of tensors -> one tensor per entry of the schema, checked

Names are those of ``state_dict()`` without the parts that only say how a module is wrapped: ``module.`` of DataParallel
and DistributedDataParallel, ``_orig_mod.`` of ``torch.compile``. Non-persistent buffers and extra state are no part of
it: the first a module makes for itself, the second is no tensor.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shmcollect.errors import WeightsError
from shmcollect.layout import align

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every item size
_WRAPPERS = ("module", "_orig_mod")
_MOST_NAMED = 8  # problems of one kind in an error text

Name = tuple[str, ...]
Array = np.ndarray[Any, Any]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_HAS = {torch.from_numpy(np.empty(0, kind)).dtype for kind in "?bhilBHILefdFD"}


@dataclass(frozen=True)
class Entry:
    """One tensor of the state.

    Attributes:
        names: What it is called; several for tied tensors, which are one tensor.
        dtype: Type of its elements.
        shape: Its shape.
        offset: Where it begins in the image, in bytes; the elements lie there in C order.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Schema:
    """What an image looks like.

    Attributes:
        entries: Its tensors, in the order in which they lie there.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Schema:
        """The schema of a module's state.

        Raises:
            WeightsError: A tensor cannot be copied into an image, or shares memory with another one without being it.
        """
        tied: dict[tuple[object, ...], list[str]] = {}
        tensors: dict[tuple[object, ...], Tensor] = {}
        for name, tensor in named_state(module):
            problem = _unfit(tensor)
            if problem:
                raise WeightsError(f"the policy's {name!r} {problem}")
            identity = _identity(tensor)
            tied.setdefault(identity, []).append(name)
            tensors[identity] = tensor
        _check_disjoint({tied[identity][0]: tensor for identity, tensor in tensors.items()})
        entries, offset = [], 0
        for identity, tensor in tensors.items():
            entry = Entry(tuple(tied[identity]), tensor.dtype, tuple(tensor.shape), align(offset, ALIGNMENT))
            entries.append(entry)
            offset = entry.offset + entry.size_bytes
        return cls(tuple(entries))

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of an image."""
        return max((entry.offset + entry.size_bytes for entry in self.entries), default=0)

    @cached_property
    def hash(self) -> int:
        """63 bits that differ, in all likelihood, between any two schemas; never 0."""
        text = repr([(entry.names, str(entry.dtype), entry.shape, entry.offset) for entry in self.entries])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    @cached_property
    def names(self) -> frozenset[str]:
        """All names of all entries."""
        return frozenset(name for entry in self.entries for name in entry.names)

    def views(self, image: Tensor) -> list[Tensor]:
        """The tensors that lie in an image, uint8[size_bytes], in order."""
        return [
            image[entry.offset : entry.offset + entry.size_bytes].view(entry.dtype).view(entry.shape)
            for entry in self.entries
        ]

    def match(self, source: nn.Module | Mapping[str, Any], *, same_shapes: bool = True) -> list[Tensor]:
        """The tensors of a source in the order of the entries.

        Args:
            source: A module, a ``state_dict()``, or a dict of tensors with such names, wrapped or not. Of tied tensors
                one is enough.
            same_shapes: Whether their shapes must be those of the schema.

        Raises:
            WeightsError: Something is missing, more than expected, or of another shape or dtype; the text names it.
        """
        state = self._by_name(source)
        wrong = _listed("missing", [entry.names[0] for entry in self.entries if state.keys().isdisjoint(entry.names)])
        wrong += _listed("not in the policy", [name for name in state if name not in self.names])
        tensors = []
        for entry in self.entries:
            present = [state[name] for name in entry.names if name in state]
            for name in entry.names:
                wrong += _misfit(entry, name, state[name], same_shapes) if name in state else []
            tensors += present[:1]
            if not wrong and not all(_equal(present[0], other) for other in present[1:]):
                wrong.append(f"{', '.join(entry.names)} are one tensor in the policy, and here they differ")
        if wrong:
            raise WeightsError("these are not weights of the policy: " + "; ".join(_shortened(wrong)))
        return tensors

    def apply(self, values: Sequence[Tensor], module: nn.Module, put: Callable[[Tensor, Tensor], object]) -> None:
        """Calls ``put(tensor, value)`` for every tensor of a module of this schema; once for tied ones.

        The tensors are looked up anew: a module may have replaced a buffer.
        """
        state = dict(named_state(module))
        for entry, value in zip(self.entries, values, strict=True):
            for tensor in {id(state[name]): state[name] for name in entry.names}.values():
                put(tensor, value)

    def _by_name(self, source: object) -> dict[str, Any]:
        """A source's tensors, by the names they have in the schema if they have any."""
        if isinstance(source, nn.Module):
            return dict(_sendable_state(source))
        if not isinstance(source, Mapping) or not all(isinstance(name, str) for name in source):
            raise WeightsError(f"expected a module, a state_dict or a dict of tensors, got {type(source).__name__}")
        if self.names.issuperset(source):
            return dict(source)
        mine = {tuple(name.split(".")): value for name, value in source.items()}
        aligned = _align(set(mine), {tuple(name.split(".")) for name in self.names})
        return {".".join(aligned[name]): value for name, value in mine.items()}


def as_array(tensor: Tensor) -> Array:
    """The values of a tensor on the CPU, in place if they lie there; as integers where NumPy lacks the type."""
    values = tensor.detach()
    if _is_lazily_negated(values):
        values = values.resolve_conj().resolve_neg()
    if values.dtype not in _NUMPY_HAS:
        values = values.view(_SAME_SIZE[values.itemsize])
    array: Array = values.numpy()
    return array


def copy_all(targets: Sequence[Array], sources: Sequence[Tensor]) -> None:
    """Copies tensor by tensor into arrays (see `as_array`), after all work queued on the devices the sources are on.

    One thread copies nearly as fast as the memory is, and does not wait for others on cores that envs keep busy.
    """
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.synchronize(device)
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, as_array(source if source.is_cpu else source.cpu()))


def copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copies a value, on the CPU, into a tensor in place. By one thread, see `copy_all`."""
    if tensor.is_cpu and not _is_lazily_negated(tensor):
        np.copyto(as_array(tensor), as_array(value))
    else:
        with torch.no_grad():
            tensor.copy_(value)


def _is_lazily_negated(tensor: Tensor) -> bool:
    """Whether its memory does not hold its values, but their conjugates or negatives."""
    return tensor.is_conj() or tensor.is_neg()


def named_state(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a module, wrappers left out; a tied tensor under each of its names."""
    module = unwrapped(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child in module._modules.items():
        if child is not None:
            yield from named_state(child, f"{prefix}{name}.")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers that only change how it runs."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif _is_compiled(module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made it; importing its class would cost seconds where nobody compiles."""
    home = sys.modules.get("torch._dynamo.eval_frame")
    return home is not None and isinstance(module, home.OptimizedModule)


def _sendable_state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            raise WeightsError(
                f"{name or 'the module'} ({type(each).__name__}) has extra state, which cannot be sent; "
                "send a dict of its tensors if the policy can do without"
            )
    return named_state(module)


def _align(mine: set[Name], known: set[Name]) -> dict[Name, Name]:
    """Maps names to known ones by leaving out the parts that only stand for a wrapper.

    A wrapper has one child and nothing else, at any level. Where a real module bears such a name, it is kept. What
    matches nothing keeps some name that is not known.
    """
    if mine <= known:
        return {name: name for name in mine}
    heads = {name[0] for name in mine if name}
    if len(heads) == 1 and heads <= {*_WRAPPERS} and () not in mine:
        inner = _align({name[1:] for name in mine}, known)
        if known.issuperset(inner.values()):
            return {name: inner[name[1:]] for name in mine}
    aligned: dict[Name, Name] = {(): ()} if () in mine else {}
    for head in heads:
        below, theirs = ({name[1:] for name in names if name[:1] == (head,)} for names in (mine, known))
        aligned |= {(head, *name): (head, *target) for name, target in _align(below, theirs).items()}
    return aligned


# ---- checks


def _unfit(tensor: Tensor) -> str:
    """Why a tensor cannot be copied into an image, or nothing."""
    if is_lazy(tensor):
        return "has no shape yet: run the lazy module once"
    if hasattr(tensor, "full_tensor"):
        return "is distributed: send what its full_tensor() returns"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is not a plain dense tensor (layout {tensor.layout}, dtype {tensor.dtype})"
    return "is on the meta device and has no values" if tensor.is_meta else ""


def _misfit(entry: Entry, name: str, value: Any, same_shapes: bool) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name!r}: expected a tensor, got {type(value).__name__}"]
    if problem := _unfit(value):
        return [f"{name!r} {problem}"]
    if value.dtype != entry.dtype or (same_shapes and value.shape != entry.shape):
        return [
            f"{name!r}: expected {entry.dtype} of shape {entry.shape}, got {value.dtype} of shape {tuple(value.shape)}"
        ]
    return []


def _listed(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {', '.join(map(repr, _shortened(names)))}"] if names else []


def _shortened(texts: list[str]) -> list[str]:
    return texts if len(texts) <= _MOST_NAMED else [*texts[:_MOST_NAMED], f"... {len(texts) - _MOST_NAMED} more"]


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """What tensors have in common that are one tensor."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or _identity(one) == _identity(other) or torch.equal(one, other.to(one.device))


def _check_disjoint(tensors: dict[str, Tensor]) -> None:
    """Refuses tensors that share some memory, with another or within: writing one value would change another."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel():
            steps = list(zip(tensor.shape, tensor.stride(), strict=True))
            if any(size > 1 and stride == 0 for size, stride in steps):
                raise WeightsError(f"the policy's {name!r} is expanded: its values share memory; clone it")
            last = sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.itemsize, name))
    open_spans: list[tuple[str, int, int, str]] = []
    for span in sorted(spans):
        open_spans = [each for each in open_spans if each[0] == span[0] and each[2] > span[1]]
        for other in open_spans:
            if _overlap(tensors[other[3]], tensors[span[3]]):
                raise WeightsError(
                    f"the policy's {other[3]!r} and {span[3]!r} share memory without being the same tensor; clone one"
                )
        open_spans.append(span)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether any byte belongs to both, one of which begins at or before the other and ends behind its beginning."""
    first = min(one.data_ptr(), other.data_ptr())

    def bytes_of(tensor: Tensor, marks: Tensor) -> Tensor:
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        return marks.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), tensor.data_ptr() - first)

    ends = [each.data_ptr() - first + each.untyped_storage().nbytes() for each in (one, other)]
    marks = torch.zeros(max(ends), dtype=torch.bool)
    bytes_of(one, marks).fill_(True)
    return bool(bytes_of(other, marks).any())
