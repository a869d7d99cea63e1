"""The user's policy in the inference process: built once, called on a batch, and what it returns is checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmcollect.errors import ConfigError, SpecError
from shmcollect.spec import Leaf, Tree
from shmcollect.values import has_nan, inside

Array = np.ndarray[Any, Any]
_PROBE_ROWS = 2  # one row would hide a policy that squeezes


@dataclass(frozen=True)
class ExtrasField:
    """One entry of a policy's extras.

    Attributes:
        name: Its key.
        dtype: Its NumPy dtype.
        shape: Shape of one row.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def check_policy_arguments(policy: object, policy_factory: object) -> None:
    """Checks that exactly one of the two is given, and callable.

    Raises:
        ConfigError: It is not so.
    """
    if (policy is None) == (policy_factory is None):
        both = "both" if policy is not None else "neither"
        raise ConfigError(f"expected exactly one of policy and policy_factory, got {both}")
    name, value = ("policy", policy) if policy is not None else ("policy_factory", policy_factory)
    if not callable(value):
        raise ConfigError(f"{name}={value!r} is not callable")
    if name == "policy_factory":
        _factory_arguments(value)


def _factory_arguments(factory: Callable[..., Any]) -> int:
    """How many arguments a factory takes: the two spaces, or none."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some built-ins have none
        return 0
    for count in (2, 0):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise ConfigError(
        f"policy_factory{signature} can be called neither as policy_factory(observation_space, action_space) "
        "nor as policy_factory()"
    )


def build_policy(policy: Any, policy_factory: Any, observation_space: Any, action_space: Any) -> Any:
    """The policy itself, or what the factory makes of the spaces.

    Raises:
        TypeError: The factory returned something that cannot be called.
    """
    if policy_factory is None:
        return policy
    arguments = (observation_space, action_space)[: _factory_arguments(policy_factory)]
    built = policy_factory(*arguments)
    if not callable(built):
        raise TypeError(f"policy_factory returned {built!r}, which cannot be called")
    return built


def module_of(policy: object) -> torch.nn.Module | None:
    """The module whose weights a policy runs with: itself, or the one it is a method of; None for other callables."""
    owner = getattr(policy, "__self__", policy)
    return owner if isinstance(owner, torch.nn.Module) else None


def policy_device(module: torch.nn.Module | None, device: str | None) -> torch.device:
    """Where a policy runs: as asked, else where its module's parameters are, else on the CPU."""
    if device is not None:
        return torch.device(device)
    for parameter in module.parameters() if module is not None else ():
        return parameter.device
    return torch.device("cpu")


class PolicyCaller:
    """Calls a policy on nested tensors with leading dimension n, and returns checked NumPy rows.

    Args:
        policy: ``policy(obs) -> action`` or ``-> (action, extras)``.
        obs: The observation's tree.
        action: The action's tree.
        device: Where the observations are put; None: where the policy's parameters are.

    Attributes:
        module: The module whose weights the policy runs with, or None.
    """

    def __init__(self, policy: Any, obs: Tree, action: Tree, device: str | None) -> None:
        self.module = module_of(policy)
        self.device = policy_device(self.module, device)
        if self.module is not None:
            self.module.to(self.device)
        self._moves = self.device.type != "cpu"
        self._policy = policy
        self._obs = obs
        self._action = action
        self._returns_extras = False
        self._extras: list[ExtrasField] = []
        self._limits = [(i, limit) for i, leaf in enumerate(action.leaves) if (limit := _limit(leaf)) is not None]

    def tensors(self, rows: Sequence[Array]) -> Any:
        """The observation as the policy takes it: nested tensors that share the rows' memory on the CPU."""
        return self._obs.unflatten([torch.from_numpy(each) for each in rows])

    def probe(self) -> list[ExtrasField]:
        """Learns from two valid rows what the policy returns.

        Raises:
            SpecError: The actions do not fit the action space, or the extras no fixed slot.
        """
        result = self._call(self.tensors(self._obs.sample(_PROBE_ROWS, seed=0)))
        self._returns_extras = self._is_pair(result)
        _, extras = self._split(result)
        self._extras = [_extras_field(name, value) for name, value in extras.items()]
        self.exact(self._values(result), _PROBE_ROWS)
        return self._extras

    def __call__(self, obs: Any, n: int) -> tuple[Any, ...]:
        """Runs the policy.

        Args:
            obs: What `tensors` made of n rows.
            n: Rows.

        Returns:
            Action leaves and extras as the policy gave them, no action out of its range or NaN. Where one is not of
            exactly the type and shape ``[n, *shape]`` of its field, `exact` makes it so.

        Raises:
            SpecError: What the policy returned does not fit.
        """
        values = self._values(self._call(obs))
        for i, keeps_limit in self._limits:
            if not keeps_limit(values[i]):
                return self.exact(values, n)
        return values

    def exact(self, values: Sequence[Any], n: int) -> tuple[Array, ...]:
        """Action leaves and extras, each of exactly its field's type and shape.

        Raises:
            SpecError: One does not fit.
        """
        rows = [self._action.check_rows(i, values[i], n) for i in range(len(self._action.leaves))]
        extras = zip(self._extras, values[len(rows) :], strict=True)
        return (*rows, *(_extras_rows(field, value, n) for field, value in extras))

    def _call(self, obs: Any) -> Any:
        if self._moves:
            obs = self._obs.unflatten([leaf.to(self.device, non_blocking=True) for leaf in self._obs.flatten(obs)])
        return self._policy(obs)

    def _is_pair(self, result: Any) -> bool:
        """Whether this is (action, extras), rather than an action of a Tuple space that ends in a Dict."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], (dict, Mapping))):
            return False
        try:
            self._action.flatten(result[0])
        except SpecError:
            return False
        return True

    def _split(self, result: Any) -> tuple[Any, Mapping[str, Any]]:
        if not self._returns_extras:
            return result, {}
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], (dict, Mapping))):
            raise SpecError(f"the policy returned {type(result).__name__}; its first call returned (action, extras)")
        return result

    def _values(self, result: Any) -> tuple[Any, ...]:
        """The leaves of the action and the extras, in the order of their fields."""
        action, extras = self._split(result)
        if len(extras) != len(self._extras):
            expected = [field.name for field in self._extras]
            raise SpecError(f"extras: expected the keys {expected}, got {list(extras)}")
        leaves = [*self._action.flatten(action)]
        for field in self._extras:
            if field.name not in extras:
                raise SpecError(f"extras: {field.name!r} is missing, got {list(extras)}")
            leaves.append(extras[field.name])
        return tuple([_to_numpy(leaf) for leaf in leaves])


def _limit(leaf: Leaf) -> Callable[[Any], bool] | None:
    """Whether rows of an action keep what their type does not say: a range, no NaN. None if there is nothing to keep.

    Rows of another type don't: `PolicyCaller.exact` may know better.
    """
    dtype, low, high = leaf.dtype, leaf.low, leaf.high
    if low is not None:
        return lambda rows: isinstance(rows, np.ndarray) and rows.dtype == dtype and inside(rows, low, high)
    if dtype.kind == "f":
        return lambda rows: isinstance(rows, np.ndarray) and rows.dtype == dtype and not has_nan(rows)
    return None


def _to_numpy(value: Any) -> Any:
    """A tensor as an array; what is no tensor stays as it is, for whoever checks it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:  # NumPy has none; float32 holds every value of it
        value = value.float()
    return value.numpy(force=True)


def _extras_field(name: object, value: Any) -> ExtrasField:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor | np.ndarray):
        raise SpecError(f"extras[{name!r}]: expected a str key and a tensor, got {type(value).__name__}")
    rows = _to_numpy(value)
    if rows.ndim == 0 or len(rows) != _PROBE_ROWS or rows.dtype.kind not in "biuf":
        raise SpecError(
            f"extras[{name!r}]: expected numbers with leading dimension {_PROBE_ROWS} for {_PROBE_ROWS} observations, "
            f"got shape {rows.shape}, dtype {rows.dtype}"
        )
    return ExtrasField(name, rows.dtype, rows.shape[1:])


def _extras_rows(field: ExtrasField, rows: Any, n: int) -> Array:
    if not isinstance(rows, np.ndarray):
        raise SpecError(f"extras[{field.name!r}]: expected a tensor, got {type(rows).__name__}")
    if rows.shape != (n, *field.shape) or rows.dtype != field.dtype:
        raise SpecError(
            f"extras[{field.name!r}]: expected shape {(n, *field.shape)}, dtype {field.dtype}; "
            f"got {rows.shape}, {rows.dtype}"
        )
    return np.ascontiguousarray(rows)
