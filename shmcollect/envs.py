"""Environments: resolved in the caller, made, checked and closed in a worker. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from shmcollect.config import check_int
from shmcollect.errors import ConfigError, RoleFailure, SpecError
from shmcollect.spec import Tree

Env = gym.Env[Any, Any]
EnvFactory = Callable[[], Env]


def find_spec(env_id: str, what: str) -> EnvSpec:
    """The spec of an env id, or of ``module:id`` after importing the module that registers it.

    Args:
        env_id: The id.
        what: What an error calls it.

    Raises:
        ConfigError: There is none, or its module can't be imported.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module, what)
    try:
        return gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        raise ConfigError(f"{what}: {error}") from error


def import_module(module: str, what: str) -> Any:
    """Imports a module the user named.

    Raises:
        ConfigError: That raised.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"{what}: importing {module} raised {type(error).__name__}: {error}") from error


def resolve_factories(create_env_fn: object, num_envs: int | None) -> list[EnvFactory | EnvSpec]:
    """One factory per env from what the user gave.

    An id is looked up here, because the caller's registrations don't exist in a worker; what travels is its spec.

    Raises:
        ConfigError: Neither an id, a spec, a callable, nor a list of callables; or ``num_envs`` does not fit it.
    """
    if isinstance(create_env_fn, str):
        create_env_fn = find_spec(create_env_fn, f"create_env_fn={create_env_fn!r}")
    if isinstance(create_env_fn, EnvSpec) or callable(create_env_fn):
        if num_envs is None:
            raise ConfigError("num_envs is missing: it says how many envs to make from one id, spec or factory")
        return [create_env_fn] * check_int("num_envs", num_envs, 1)
    if not isinstance(create_env_fn, Sequence):
        raise ConfigError(
            f"create_env_fn={create_env_fn!r}: expected an env id, an EnvSpec, a callable or a list of callables"
        )
    for i, factory in enumerate(create_env_fn):
        if not (callable(factory) or isinstance(factory, EnvSpec)):
            raise ConfigError(f"create_env_fn[{i}]={factory!r}: expected a callable without arguments or an EnvSpec")
    if not create_env_fn:
        raise ConfigError("create_env_fn is an empty list")
    if num_envs is not None and num_envs != len(create_env_fn):
        raise ConfigError(f"num_envs={num_envs}, but create_env_fn lists {len(create_env_fn)} factories")
    return list(create_env_fn)


def make_envs(factories: Sequence[EnvFactory | EnvSpec], first_env: int) -> list[Env]:
    """Makes the envs of a worker; if one fails, closes those already made.

    Raises:
        RoleFailure: A factory raised, or returned no env or the same one twice.
    """
    envs: list[Env] = []
    for env_index, factory in enumerate(factories, first_env):
        try:
            env = gym.make(factory) if isinstance(factory, EnvSpec) else factory()
            _check_env(env, envs, first_env)
        except BaseException as error:
            close_envs(envs, first_env)
            raise RoleFailure(env_index=env_index, during="make") from error
        envs.append(env)
    return envs


def _check_env(env: object, earlier: list[Env], first_env: int) -> None:
    if not isinstance(env, gym.Env):
        raise TypeError(f"the factory returned {env!r}; expected a gymnasium.Env")
    for env_index, other in enumerate(earlier, first_env):
        if other is env:
            raise ValueError(f"the factory returned the same object as that of env {env_index}; each needs its own")


def distinct_spaces(envs: Sequence[Env], first_env: int) -> dict[int, tuple[Any, Any]]:
    """The (observation, action) spaces of the first env, and of every other that differs, by env index."""
    pairs = [(env.observation_space, env.action_space) for env in envs]
    return {i: each for i, each in enumerate(pairs, first_env) if i == first_env or each != pairs[0]}


def check_same_spaces(
    pairs: dict[int, tuple[Any, Any]], drop_obs: tuple[Any, ...], reference: tuple[Tree, Tree] | None = None
) -> tuple[Tree, Tree]:
    """Compares the spaces of all envs leaf by leaf; bounds of Box spaces may differ.

    Args:
        pairs: (observation, action) spaces by env index.
        drop_obs: Dict entries to leave out.
        reference: The observation's and the action's tree of env 0, if they are known already.

    Returns:
        The observation's and the action's tree, those of env 0.

    Raises:
        SpecError: A space does not fit fixed slots, or one env's leaves differ from those of env 0.
    """

    def trees(env_index: int) -> tuple[Tree, Tree]:
        observation, action = pairs[env_index]
        try:
            return observation_tree(observation, drop_obs), action_tree(action)
        except SpecError as error:
            raise SpecError(f"env {env_index}: {error}") from None

    first = trees(0) if reference is None else reference
    for env_index in sorted(pairs):
        for mine, theirs, name in zip(first, trees(env_index), ("observation", "action"), strict=True):
            difference = mine.difference(theirs)
            if difference is not None:
                raise SpecError(f"env {env_index}: its {name} space differs from that of env 0: {difference}")
    return first


def observation_tree(space: Any, drop_obs: tuple[Any, ...] = ()) -> Tree:
    """The tree of an observation space."""
    return Tree.from_space(space, root="obs", drop=drop_obs)


def action_tree(space: Any) -> Tree:
    """The tree of an action space; NaN is no action."""
    return Tree.from_space(space, root="action", refuse_nan=True)


def close_envs(envs: Sequence[Env], first_env: int) -> list[str]:
    """Closes every env, also after one whose close raises; returns what went wrong."""
    warnings = []
    for env_index, env in enumerate(envs, first_env):
        try:
            env.close()
        except BaseException as error:
            warnings.append(f"env {env_index}: close() raised {type(error).__name__}: {error}")
    return warnings
