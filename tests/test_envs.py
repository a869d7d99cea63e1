"""Environments: what names one, who makes it, and how much two of them must have in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from shmcollect.envs import (
    action_tree,
    check_same_spaces,
    close_envs,
    distinct_spaces,
    make_envs,
    observation_tree,
    resolve_factories,
)
from shmcollect.errors import ConfigError, RoleFailure, SpecError

MADE: list[Small] = []


class Small(gym.Env):
    observation_space: Any = spaces.Box(-1, 1, (3,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, observation_space: Any = None, action_space: Any = None, close_raises: Any = None) -> None:
        self.observation_space = observation_space or type(self).observation_space
        self.action_space = action_space or type(self).action_space
        self.closed = 0
        self._close_raises = close_raises
        MADE.append(self)

    def close(self) -> None:
        self.closed += 1
        if self._close_raises is not None:
            raise self._close_raises


@pytest.fixture(autouse=True)
def none_made() -> None:
    MADE.clear()


# ---- what the user may give


def test_an_id_is_resolved_here_and_travels_as_its_spec() -> None:
    factories = resolve_factories("CartPole-v1", 3)
    assert len(factories) == 3 and all(isinstance(each, EnvSpec) for each in factories)
    assert factories[0].id == "CartPole-v1"


def test_an_id_may_name_the_module_that_registers_it() -> None:
    (factory,) = resolve_factories("gymnasium.envs.classic_control:CartPole-v1", 1)
    assert isinstance(factory, EnvSpec) and factory.id == "CartPole-v1"


def test_what_was_registered_in_the_caller_can_be_made_from_its_spec() -> None:
    gym.register("OnlyHere-v0", entry_point=Small, max_episode_steps=7)
    try:
        factories = resolve_factories("OnlyHere-v0", 2)
    finally:
        del gym.registry["OnlyHere-v0"]
    envs = make_envs(factories, 0)
    assert [type(env.unwrapped) for env in envs] == [Small, Small]
    assert isinstance(envs[0], gym.wrappers.TimeLimit), "wrappers that the spec asks for are there"


def test_one_callable_makes_all_envs_and_a_list_one_each() -> None:
    assert resolve_factories(Small, 3) == [Small] * 3
    makers = [partial(Small), Small, lambda: Small(), gym.spec("CartPole-v1")]
    assert resolve_factories(makers, None) == makers
    assert resolve_factories(tuple(makers), 4) == makers
    assert not MADE, "nothing is made in the caller"


@pytest.mark.parametrize(
    ("given", "num_envs", "text"),
    [
        ("NoSuchEnv-v0", 1, r"create_env_fn='NoSuchEnv-v0': .*NoSuchEnv"),
        ("no_such_module:CartPole-v1", 1, r"create_env_fn='no_such_module:CartPole-v1': .*no_such_module"),
        ("not an id!", 1, r"create_env_fn='not an id!'"),
        ("CartPole-v1", None, r"num_envs is missing"),
        (Small, None, r"num_envs is missing"),
        (Small, 0, r"num_envs=0: expected an integer >= 1"),
        (Small, -1, r"num_envs=-1: expected an integer >= 1"),
        (Small, "4", r"num_envs='4': expected an integer"),
        (Small, 2.0, r"num_envs=2\.0: expected an integer"),
        (Small, True, r"num_envs=True: expected an integer"),
        ([], None, r"create_env_fn is an empty list"),
        ([Small, 3], None, r"create_env_fn\[1\]=3: expected a callable without arguments or an EnvSpec"),
        (["CartPole-v1"], None, r"create_env_fn\[0\]='CartPole-v1'"),
        ([Small] * 3, 4, r"num_envs=4, but create_env_fn lists 3 factories"),
        (3, 2, r"create_env_fn=3: expected an env id, an EnvSpec, a callable or a list of callables"),
        (None, 2, r"create_env_fn=None"),
        ({Small}, None, r"create_env_fn=\{"),
        ((each for each in [Small]), None, r"create_env_fn=<generator"),
    ],
)
def test_what_names_no_envs_is_refused(given: Any, num_envs: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_factories(given, num_envs)


def test_an_env_in_place_of_a_factory_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an env id"):
        resolve_factories(Small(), 2)
    with pytest.raises(ConfigError, match=r"create_env_fn\[0\]=.*expected a callable without arguments"):
        resolve_factories([Small()], None)


def test_numpy_counts_envs_too() -> None:
    assert len(resolve_factories(Small, np.int64(3))) == 3


# ---- making and closing


def broken() -> gym.Env:
    raise ZeroDivisionError("in the factory")


SHARED = Small()


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        (broken, ZeroDivisionError, "in the factory"),
        (lambda: None, TypeError, r"the factory returned None; expected a gymnasium.Env"),
        (lambda: Small, TypeError, r"returned <class .*Small'>; expected a gymnasium.Env"),
        (lambda: "CartPole-v1", TypeError, r"returned 'CartPole-v1'"),
        (lambda: gym.make_vec("CartPole-v1", 2), TypeError, r"expected a gymnasium.Env"),
        (lambda x: Small(), TypeError, r"missing 1 required positional argument"),
        (lambda: SHARED, ValueError, r"the same object as that of env 5; each needs its own"),
    ],
)
def test_a_factory_that_makes_no_env_of_its_own_fails_with_its_index(factory: Any, error: type, text: str) -> None:
    first = Small()
    SHARED.closed = 0
    with pytest.raises(RoleFailure) as caught:
        make_envs([lambda: first, lambda: SHARED, factory, Small], 4)
    assert caught.value.details == {"env_index": 6, "during": "make"}
    with pytest.raises(error, match=text):
        raise caught.value.__cause__
    assert (first.closed, SHARED.closed) == (1, 1), "what had been made is closed"


def test_envs_are_made_in_order() -> None:
    makers = [partial(Small, close_raises=i) for i in range(3)]
    assert [env._close_raises for env in make_envs(makers, 0)] == [0, 1, 2]


def test_all_envs_are_closed_whatever_one_of_them_raises() -> None:
    envs = [Small(), Small(close_raises=ValueError("stuck")), Small(close_raises=SystemExit(3)), Small()]
    texts = close_envs(envs, 10)
    assert [env.closed for env in envs] == [1] * 4
    assert texts == ["env 11: close() raised ValueError: stuck", "env 12: close() raised SystemExit: 3"]


# ---- spaces


def test_only_spaces_that_differ_from_the_first_are_reported() -> None:
    wide = spaces.Box(-5, 5, (3,), np.float32)
    envs = [Small(), Small(), Small(observation_space=wide), Small(action_space=spaces.Discrete(3))]
    found = distinct_spaces(envs, 7)
    assert list(found) == [7, 9, 10]
    assert found[9] == (wide, Small.action_space) and found[10][1].n == 3


def check(*pairs: tuple[Any, Any], drop: tuple[Any, ...] = ()) -> Any:
    return check_same_spaces(dict(enumerate(pairs)), drop)


BOX, ACTION = Small.observation_space, Small.action_space


def test_envs_may_differ_in_the_bounds_of_a_box_and_in_the_order_of_keys() -> None:
    one = spaces.Dict([("a", BOX), ("b", ACTION)])
    other = spaces.Dict([("b", ACTION), ("a", spaces.Box(-9, 9, (3,), np.float32))])
    obs, action = check((one, ACTION), (other, ACTION))
    assert [leaf.path for leaf in obs.leaves] == [leaf.path for leaf in observation_tree(one).leaves]
    assert [leaf.path for leaf in action.leaves] == [()]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            (spaces.Box(-1, 1, (4,), np.float32), ACTION),
            r"env 1: its observation space differs from that of env 0: obs",
        ),
        ((spaces.Box(-1, 1, (3,), np.float64), ACTION), r"env 1: its observation space .*float32.*float64"),
        ((spaces.Dict(a=BOX), ACTION), r"env 1: its observation space"),
        ((BOX, spaces.Discrete(3)), r"env 1: its action space differs from that of env 0: action"),
        ((BOX, spaces.Discrete(2, start=1)), r"env 1: its action space"),
        ((spaces.Text(3), ACTION), r"env 1: obs"),
        ((BOX, spaces.Sequence(BOX)), r"env 1: action"),
    ],
)
def test_an_env_that_differs_is_named_with_the_leaf(other: tuple[Any, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        check((BOX, ACTION), other)


def test_the_first_env_that_fits_no_slot_is_named_with_what_to_drop() -> None:
    space = spaces.Dict(mission=spaces.Text(9), image=BOX)
    with pytest.raises(SpecError, match=r"env 0: obs\['mission'\].*drop_obs=\('mission',\)"):
        check((space, ACTION))
    obs, _ = check((space, ACTION), drop=("mission",))
    assert [leaf.path for leaf in obs.leaves] == [("image",)]


def test_what_is_dropped_may_differ() -> None:
    one, other = (spaces.Dict(mission=spaces.Text(n), image=BOX) for n in (3, 4))
    check((one, ACTION), (other, ACTION), drop=("mission",))


def test_nan_is_an_observation_but_no_action() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    nan = np.full(2, np.nan, np.float32)
    assert np.isnan(observation_tree(space).coerce(0, nan)).all()
    with pytest.raises(SpecError, match=r"action: .*nan"):
        action_tree(space).coerce(0, nan)
