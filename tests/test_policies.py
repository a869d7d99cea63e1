"""The default policies: valid actions for every space, honest log-probabilities, gradients."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

from shmcollect.errors import ConfigError
from shmcollect.policies import MLP, NatureCNN, RandomPolicy, StochasticPolicy, make_policy
from shmcollect.spec import Tree

F4 = np.float32
OBS = spaces.Box(-1.0, 1.0, (3,), F4)
NESTED = spaces.Dict(
    {
        "move": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.Box(-2.0, 2.0, (2,), F4))),
        "flags": spaces.MultiBinary((2, 2)),
        "deeper": spaces.Dict(
            {"a/b": spaces.Dict({"pick": spaces.MultiDiscrete([[2, 5], [3, 1]], start=[[0, 7], [-4, 2]])})}
        ),
    }
)

SPACES = {
    "discrete": spaces.Discrete(4),
    "discrete, negative start": spaces.Discrete(3, start=-7),
    "discrete of one": spaces.Discrete(1, start=9),
    "discrete int8": spaces.Discrete(120, start=8, dtype=np.int8),
    "multi-discrete": spaces.MultiDiscrete([2, 5, 3]),
    "multi-discrete, equal": spaces.MultiDiscrete([4, 4], dtype=np.int32),
    "multi-discrete, rank 3, starts": spaces.MultiDiscrete(
        np.full((2, 1, 2), 3), start=np.array([[[1, -2]], [[0, 50]]])
    ),
    "multi-discrete uint8": spaces.MultiDiscrete([3, 200], dtype=np.uint8),
    "multi-binary": spaces.MultiBinary(5),
    "multi-binary, rank 2": spaces.MultiBinary((2, 3)),
    "box": spaces.Box(-1.0, 1.0, (6,), F4),
    "box, 0-d": spaces.Box(-2.0, 2.0, (), F4),
    "box, no elements": spaces.Box(-1.0, 1.0, (0, 3), F4),
    "box, no bounds": spaces.Box(-np.inf, np.inf, (2, 2), F4),
    "box, mixed bounds": spaces.Box(
        np.array([-np.inf, 3, -np.inf, 0.1, 5], F4), np.array([np.inf, np.inf, -3, 0.3, 5], F4), dtype=F4
    ),
    "box, whole range of float32": spaces.Box(np.finfo(F4).min, np.finfo(F4).max, (2,), F4),
    "box float64": spaces.Box(0.1, 0.7, (3,), np.float64),
    "box, whole range of float64": spaces.Box(np.finfo(np.float64).min, np.finfo(np.float64).max, (2,), np.float64),
    "box float16": spaces.Box(-0.3, 1.1, (3,), np.float16),
    "box of bools": spaces.Box(0, 1, (3,), np.bool_),
    "box of bytes": spaces.Box(0, 255, (2,), np.uint8),
    "box of ints": spaces.Box(np.array([-3, 10]), np.array([3, 12]), dtype=np.int32),
    "nested": NESTED,
    "tuple ending in a dict": spaces.Tuple((spaces.Discrete(2), spaces.Dict({"x": spaces.Discrete(2)}))),
}
OBSERVATION_SPACES = SPACES | {
    "box of any int": spaces.Box(-(2**62), 2**62, (2,), np.int64),
    "box uint16": spaces.Box(0, 65535, (2,), np.uint16),
    "box uint64": spaces.Box(0, 2**63, (2,), np.uint64),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads only slow such small networks down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def observe(space: Any, n: int = 5) -> Any:
    tree = Tree.from_space(space)
    return tree.unflatten([torch.from_numpy(leaf) for leaf in tree.sample(n, seed=1)])


def rows_of(space: Any, action: Any, n: int) -> list[Any]:
    """The actions of a batch as an env gets them: every row a value of the space."""
    tree = Tree.from_space(space, root="action")
    leaves = [leaf.numpy() for leaf in tree.flatten(action)]
    for spec, leaf in zip(tree.leaves, leaves, strict=True):
        assert leaf.dtype == spec.dtype and leaf.shape == (n, *spec.shape)
    pairs = list(zip(tree.leaves, leaves, strict=True))
    return [tree.unflatten([leaf[i] if spec.is_scalar else leaf[i, ...] for spec, leaf in pairs]) for i in range(n)]


def assert_valid(space: Any, policy: Any, obs: Any, n: int) -> None:
    with torch.inference_mode():
        result = policy(obs)
    action = result
    if isinstance(policy, StochasticPolicy):
        action, extras = result
        assert list(extras) == ["log_prob"]
        assert extras["log_prob"].shape == (n,) and extras["log_prob"].dtype == torch.float32
        assert extras["log_prob"].isfinite().all()
    for row in rows_of(space, action, n):
        assert space.contains(row), row


def distribution_inputs(policy: StochasticPolicy, obs: Any) -> Tensor:
    return policy.out(policy.body(obs))


# ---- valid actions


@pytest.mark.parametrize("kind", ["mlp", "random"])
@pytest.mark.parametrize("name", SPACES)
def test_every_row_is_an_action_of_the_space(name: str, kind: str) -> None:
    torch.manual_seed(0)
    space = SPACES[name]
    for n in (1, 64):
        assert_valid(space, make_policy(kind, OBS, space), observe(OBS, n), n)


@pytest.mark.parametrize("kind", ["mlp", "random"])
@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_every_space_can_be_observed(name: str, kind: str) -> None:
    space = OBSERVATION_SPACES[name]
    assert_valid(spaces.Discrete(3), make_policy(kind, space, spaces.Discrete(3)), observe(space), 5)


LEAVES = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-5, 5)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 6), min_size=1, max_size=4)),
    st.sampled_from([value for value in SPACES.values() if isinstance(value, spaces.Box)]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(observed=TREES, acted=TREES, kind=st.sampled_from(["mlp", "random"]), n=st.integers(1, 7))
def test_any_nesting_of_spaces_works(observed: Any, acted: Any, kind: str, n: int) -> None:
    assert_valid(acted, make_policy(kind, observed, acted), observe(observed, n), n)


# ---- log-probabilities


@pytest.mark.parametrize("name", ["discrete", "discrete, negative start", "discrete int8"])
def test_a_discrete_log_prob_is_that_of_a_categorical(name: str) -> None:
    space = SPACES[name]
    policy, obs = make_policy("mlp", OBS, space), observe(OBS, 50)
    action, extras = policy(obs)
    expected = Categorical(logits=distribution_inputs(policy, obs)).log_prob(action.long() - int(space.start))
    torch.testing.assert_close(extras["log_prob"], expected)


@pytest.mark.parametrize(
    "name", ["multi-discrete", "multi-discrete, equal", "multi-discrete, rank 3, starts", "multi-discrete uint8"]
)
def test_a_multi_discrete_log_prob_is_the_sum_over_its_elements(name: str) -> None:
    space = SPACES[name]
    policy, obs = make_policy("mlp", OBS, space), observe(OBS, 50)
    action, extras = policy(obs)
    indices = (action.long() - torch.from_numpy(space.start.astype(np.int64))).flatten(1).unbind(1)
    logits = distribution_inputs(policy, obs).split(space.nvec.ravel().tolist(), dim=1)
    expected = sum(Categorical(logits=one).log_prob(index) for one, index in zip(logits, indices, strict=True))
    torch.testing.assert_close(extras["log_prob"], expected)


def test_a_box_of_integers_is_a_categorical_per_element() -> None:
    policy, obs = make_policy("mlp", OBS, SPACES["box of ints"]), observe(OBS, 50)
    action, extras = policy(obs)
    first, second = distribution_inputs(policy, obs).split([7, 3], dim=1)
    expected = Categorical(logits=first).log_prob(action[:, 0].long() + 3)
    expected += Categorical(logits=second).log_prob(action[:, 1].long() - 10)
    torch.testing.assert_close(extras["log_prob"], expected)


@pytest.mark.parametrize("name", ["multi-binary", "multi-binary, rank 2", "box of bools"])
def test_a_multi_binary_log_prob_is_that_of_bernoullis(name: str) -> None:
    policy, obs = make_policy("mlp", OBS, SPACES[name]), observe(OBS, 50)
    action, extras = policy(obs)
    expected = Bernoulli(logits=distribution_inputs(policy, obs)).log_prob(action.flatten(1).float()).sum(1)
    torch.testing.assert_close(extras["log_prob"], expected)


def test_an_unbounded_box_is_a_normal() -> None:
    policy, obs = make_policy("mlp", OBS, SPACES["box, no bounds"]), observe(OBS, 50)
    action, extras = policy(obs)
    expected = (
        Normal(distribution_inputs(policy, obs), policy.heads[0].log_std.exp()).log_prob(action.flatten(1)).sum(1)
    )
    torch.testing.assert_close(extras["log_prob"], expected)


def test_a_bounded_box_is_a_normal_whose_tails_sit_on_the_bounds() -> None:
    low, high = 1.0, 5.0
    policy, obs = make_policy("mlp", OBS, spaces.Box(low, high, (1,), F4)), observe(OBS, 1)
    normal = Normal(3 + 2 * distribution_inputs(policy, obs).double(), 2 * policy.heads[0].log_std.double().exp())
    obs = obs.expand(2001, 3)
    grid = torch.linspace(low, high, 2001)[:, None]

    log_prob = policy.log_prob(obs, grid).double()

    inner = normal.log_prob(grid.double())[1:-1, 0]
    torch.testing.assert_close(log_prob[1:-1], inner, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_prob[0].exp(), normal.cdf(torch.tensor(low))[0, 0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(log_prob[-1].exp(), 1 - normal.cdf(torch.tensor(high))[0, 0], rtol=1e-4, atol=1e-6)
    mass = log_prob[0].exp() + log_prob[-1].exp() + inner.exp().sum() * (high - low) / 2000
    assert mass.item() == pytest.approx(1, abs=2e-3)


def test_one_bound_keeps_the_other_side_open() -> None:
    policy = make_policy("mlp", OBS, spaces.Box(np.array([3.0], F4), np.array([np.inf], F4), dtype=F4))
    with torch.inference_mode():
        action, extras = policy(observe(OBS, 4000))
    assert action.min() == 3 and (action == 3).float().mean() < 0.9 and action.max() > 3.5
    assert extras["log_prob"].isfinite().all()


def test_an_element_with_one_value_is_certain() -> None:
    policy = make_policy("mlp", OBS, spaces.Box(2.0, 2.0, (3,), F4))
    action, extras = policy(observe(OBS, 9))
    assert (action == 2).all() and (extras["log_prob"] == 0).all()


@pytest.mark.parametrize("name", SPACES)
def test_the_log_prob_of_a_recorded_action_is_the_one_recorded_with_it(name: str) -> None:
    policy, obs = make_policy("mlp", OBS, SPACES[name]), observe(OBS, 20)
    action, extras = policy(obs)
    torch.testing.assert_close(policy.log_prob(obs, action), extras["log_prob"])


def test_the_log_prob_of_nested_actions_is_the_sum_of_its_leaves() -> None:
    policy, obs = make_policy("mlp", OBS, NESTED), observe(OBS, 30)
    action, extras = policy(obs)
    outputs = distribution_inputs(policy, obs).split([head.size for head in policy.heads], dim=1)
    leaves = Tree.from_space(NESTED, root="action").flatten(action)
    parts = [head.log_prob(*each) for head, *each in zip(policy.heads, outputs, leaves, strict=True)]
    assert len(parts) == 4
    torch.testing.assert_close(extras["log_prob"], torch.stack(parts).sum(0))


# ---- sampling


@pytest.mark.parametrize("name", ["discrete", "multi-discrete", "multi-discrete, rank 3, starts"])
def test_samples_come_as_often_as_their_probability_says(name: str) -> None:
    torch.manual_seed(3)
    space, n = SPACES[name], 20_000
    policy, obs = make_policy("mlp", OBS, space), observe(OBS, 1).expand(n, 3)
    with torch.inference_mode():
        policy.out.weight.mul_(8)  # far from uniform
        action, _ = policy(obs)
    counts = np.ravel(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n).tolist()
    starts = torch.from_numpy(np.ravel(space.start).astype(np.int64))
    logits = distribution_inputs(policy, obs[:1])[0].split(counts)
    for one, indices in zip(logits, (action.reshape(n, -1) - starts).unbind(1), strict=True):
        expected = one.softmax(0)
        seen = torch.bincount(indices, minlength=len(one)) / n
        assert (seen - expected).abs().max() < 4 * 0.5 / math.sqrt(n)


def test_bits_come_as_often_as_their_probability_says() -> None:
    torch.manual_seed(3)
    policy, n = make_policy("mlp", OBS, spaces.MultiBinary(4)), 20_000
    obs = observe(OBS, 1).expand(n, 3)
    with torch.inference_mode():
        policy.out.weight.mul_(8)
        action, _ = policy(obs)
    expected = distribution_inputs(policy, obs[:1])[0].sigmoid()
    assert (action.float().mean(0) - expected).abs().max() < 4 * 0.5 / math.sqrt(n)


def test_random_actions_are_uniform() -> None:
    torch.manual_seed(0)
    space = spaces.Dict(
        {"n": spaces.Discrete(4, start=-2), "bits": spaces.MultiBinary(2), "box": spaces.Box(-3.0, 5.0, (2,), F4)}
    )
    n = 20_000
    action = make_policy("random", OBS, space)(observe(OBS, n))
    seen = torch.bincount(action["n"] + 2, minlength=4) / n
    assert (seen - 0.25).abs().max() < 0.015
    assert (action["bits"].float().mean(0) - 0.5).abs().max() < 0.015
    quarters = ((action["box"] + 3) / 2).floor().long().flatten()
    assert (torch.bincount(quarters, minlength=4) / (2 * n) - 0.25).abs().max() < 0.015


def test_random_actions_stay_beyond_the_only_bound() -> None:
    torch.manual_seed(0)
    action = make_policy("random", OBS, SPACES["box, mixed bounds"])(observe(OBS, 5000))
    assert action[:, 0].mean().abs() < 0.1 and action[:, 0].std() == pytest.approx(1, abs=0.1)
    assert (action[:, 1] - 3).mean() == pytest.approx(1, abs=0.1)
    assert (action[:, 2] + 3).mean() == pytest.approx(-1, abs=0.1)
    assert (action[:, 4] == 5).all()


@pytest.mark.parametrize("kind", ["mlp", "random"])
@pytest.mark.parametrize("name", ["discrete", "multi-binary", "box", "nested"])
def test_the_same_seed_gives_the_same_actions(name: str, kind: str) -> None:
    space = SPACES[name]

    def draw(seed: int) -> list[np.ndarray[Any, Any]]:
        torch.manual_seed(seed)
        policy = make_policy(kind, OBS, space)
        result = [policy(observe(OBS, 30)) for _ in range(2)]
        actions = [each[0] for each in result] if kind == "mlp" else result
        return [leaf.numpy() for action in actions for leaf in Tree.from_space(space, root="action").flatten(action)]

    first, again, other = draw(1), draw(1), draw(2)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))


# ---- training


@pytest.mark.parametrize("name", ["discrete", "multi-discrete", "multi-binary", "box, mixed bounds", "nested"])
def test_gradients_reach_every_parameter_and_no_action(name: str) -> None:
    torch.manual_seed(0)
    policy = make_policy("mlp", NESTED, SPACES[name])
    action, extras = policy(observe(NESTED, 40))
    extras["log_prob"].sum().backward()
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name
    assert not any(leaf.requires_grad for leaf in Tree.from_space(SPACES[name], root="action").flatten(action))


@pytest.mark.parametrize(
    ("space", "good"),
    [
        (spaces.Discrete(4, start=5), lambda action: action == 7),
        (spaces.MultiDiscrete([2, 3]), lambda action: (action == torch.tensor([1, 2])).all(1)),
        (spaces.MultiBinary(2), lambda action: (action == torch.tensor([1, 0])).all(1)),
        (spaces.Box(0.0, 10.0, (1,), F4), lambda action: (action[:, 0] - 8).abs() < 1),
    ],
    ids=["discrete", "multi-discrete", "multi-binary", "box"],
)
def test_a_policy_learns_what_is_rewarded(space: Any, good: Any) -> None:
    torch.manual_seed(0)
    policy, obs = make_policy("mlp", OBS, space), observe(OBS, 64)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    assert good(policy(obs)[0]).float().mean() < 0.45
    for _ in range(60):
        action, extras = policy(obs)
        reward = good(action).float()
        loss = -(extras["log_prob"] * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert good(policy(obs)[0]).float().mean() > 0.6


def test_a_policy_can_be_copied_pickled_and_loaded() -> None:
    policy, obs = make_policy("mlp", NESTED, NESTED), observe(NESTED)
    fresh = make_policy("mlp", NESTED, NESTED)
    fresh.load_state_dict(policy.state_dict())
    for twin in (copy.deepcopy(policy), cloudpickle.loads(cloudpickle.dumps(policy)), fresh):
        torch.manual_seed(4)
        _, expected = policy(obs)
        torch.manual_seed(4)
        assert torch.equal(twin(obs)[1]["log_prob"], expected["log_prob"])


def test_a_copy_shares_nothing_with_its_original() -> None:
    policy = make_policy("mlp", OBS, SPACES["box"])
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(5)
    obs, action = observe(OBS), torch.zeros(5, 6)
    assert not torch.allclose(twin.log_prob(obs, action), policy.log_prob(obs, action))


# ---- what the networks see


def encode(space: Any, *leaves: Tensor) -> list[Tensor]:
    body = make_policy("mlp", space, spaces.Discrete(2)).body
    assert isinstance(body, MLP)
    return [encoder(leaf) for encoder, leaf in zip(body.encoders, leaves, strict=True)]


def test_a_discrete_observation_becomes_a_one_hot_from_its_start() -> None:
    (hot,) = encode(spaces.Discrete(3, start=5), torch.tensor([7, 5]))
    assert hot.tolist() == [[0, 0, 1], [1, 0, 0]]


def test_a_multi_discrete_observation_becomes_one_hots_side_by_side() -> None:
    space = spaces.MultiDiscrete([[2], [3]], start=[[0], [-1]])
    (hot,) = encode(space, torch.tensor([[[1], [-1]], [[0], [1]]]))
    assert hot.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]


def test_bytes_are_scaled_and_other_numbers_are_cast() -> None:
    space = spaces.Tuple(
        (
            spaces.Box(0, 255, (1, 2), np.uint8),
            spaces.Box(-9, 9, (), np.int16),
            spaces.MultiBinary(2),
            SPACES["box of bools"],
        )
    )
    encoded = encode(
        space,
        torch.tensor([[[0, 255]]], dtype=torch.uint8),
        torch.tensor([-9], dtype=torch.int16),
        torch.tensor([[1, 0]], dtype=torch.int8),
        torch.tensor([[True, False, True]]),
    )
    assert [each.tolist() for each in encoded] == [[[0, 1]], [[-9]], [[1, 0]], [[1, 0, 1]]]
    assert {each.dtype for each in encoded} == {torch.float32}


def test_entries_are_found_by_key_not_by_order() -> None:
    space = spaces.Dict({"a": OBS, "b": OBS})
    policy, obs = make_policy("mlp", space, spaces.Discrete(2)), observe(space)
    swapped = {"b": obs["b"], "a": obs["a"]}
    assert torch.equal(policy.body(obs), policy.body(swapped))
    assert not torch.equal(policy.body(obs), policy.body({"a": obs["b"], "b": obs["a"]}))


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize("shape", [(84, 84, 3), (3, 84, 84), (4, 84, 84), (210, 160, 3), (36, 36, 1), (1, 36, 40)])
def test_images_are_taken_with_channels_first_or_last(shape: tuple[int, ...]) -> None:
    assert_valid(NESTED, make_policy("cnn", image(*shape), NESTED), observe(image(*shape), 2), 2)


def test_the_smaller_outer_axis_is_the_channels() -> None:
    last, first = NatureCNN(image(40, 50, 3)), NatureCNN(image(3, 40, 50))
    first.load_state_dict(last.state_dict())
    pixels = observe(image(40, 50, 3))
    torch.testing.assert_close(last(pixels), first(pixels.permute(0, 3, 1, 2)))


def test_the_cnn_has_the_sizes_of_the_paper() -> None:
    policy = make_policy("cnn", image(4, 84, 84), spaces.Discrete(6))
    shapes = [tuple(p.shape) for p in policy.parameters() if p.dim() > 1]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (6, 512)]


def test_the_cnn_sees_pixels_between_0_and_1() -> None:
    seen = []
    cnn = NatureCNN(image(36, 36, 3))
    cnn.convolutions.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    cnn(torch.full((2, 36, 36, 3), 255, dtype=torch.uint8))
    assert seen[0].shape == (2, 3, 36, 36) and (seen[0] == 1).all()


@pytest.mark.parametrize("shape", [(35, 84, 3), (3, 84, 35), (7, 7, 3), (84, 84, 0)])
def test_an_image_too_small_for_the_cnn_is_refused_by_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"at least 36 x 36 pixels; got shape \(" + ", ".join(map(str, shape))):
        make_policy("cnn", image(*shape), spaces.Discrete(2))


@pytest.mark.parametrize("space", [spaces.Discrete(3), image(84, 84), NESTED, spaces.MultiBinary((50, 50, 3))])
def test_what_is_no_image_is_refused_by_the_cnn(space: Any) -> None:
    with pytest.raises(ConfigError, match="expected an image, a Box of 3 axes"):
        make_policy("cnn", space, spaces.Discrete(2))


# ---- kinds


@pytest.mark.parametrize(
    ("space", "body"),
    [
        (image(84, 84, 3), NatureCNN),
        (image(4, 84, 84), NatureCNN),
        (image(7, 7, 3), MLP),
        (image(84, 84), MLP),
        (spaces.Box(0.0, 1.0, (84, 84, 3), F4), MLP),
        (spaces.Dict({"image": image(84, 84, 3)}), MLP),
        (OBS, MLP),
    ],
)
def test_auto_takes_the_cnn_for_images_of_bytes_only(space: Any, body: type[nn.Module]) -> None:
    assert type(make_policy("auto", space, spaces.Discrete(2)).body) is body


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy 'rnn': expected one of auto, mlp, cnn, random"):
        make_policy("rnn", OBS, spaces.Discrete(2))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(10**12), r"action: expected at most 65536 categories, got 1000000000000"),
        (
            spaces.Dict({"n": spaces.MultiDiscrete([60_000, 60_000])}),
            r"action\['n'\]: expected at most 65536 categories",
        ),
        (spaces.Box(0, 1000, (2,), np.int64), r"action: expected a Box of at most 256 integers per element"),
        (spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64), r"action: expected a Box of at most 256 integers"),
    ],
)
def test_actions_with_too_many_values_are_left_to_the_random_policy(space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message + ".*the policy 'random' takes it"):
        make_policy("mlp", OBS, space)
    policy = make_policy("random", OBS, space)
    assert isinstance(policy, RandomPolicy)
    assert_valid(space, policy, observe(OBS, 50), 50)


def test_an_observation_with_too_many_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="obs: expected at most 65536 categories, got 100000000"):
        make_policy("mlp", spaces.Discrete(10**8), spaces.Discrete(2))
