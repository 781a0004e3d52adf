"""The exchange that computes the running statistics of a merged network again."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj

KEY = jax.random.key(0)
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(24, 6)).astype(np.float32)
TARGETS = RANDOM.integers(0, 3, 24)
# Every minibatch has both clients' sizes, so that the split into minibatches is the same.
SPLIT = [list(range(8)), list(range(8, 24))]


class Net(nn.Module):
    momentum: float = 0.9

    @nn.compact
    def __call__(self, x, train=False):
        for number, width in enumerate((5, 4)):
            x = nn.Dense(width, name=f"dense{number}")(x)
            x = nn.relu(nn.BatchNorm(not train, momentum=self.momentum, name=f"norm{number}")(x))
        return nn.Dense(3)(x)


def made(momentum=0.9):
    net = Net(momentum)
    params = fj.networks.init(net, KEY, INPUTS)
    return fj.networks.model(net, params, fj.likelihoods.categorical), params


MODEL, PARAMS = made()
FEDERATION = fj.clients.federation((INPUTS, TARGETS), SPLIT)


def again(model=MODEL, params=PARAMS, federation=FEDERATION, **options):
    options.setdefault("batch_size", 8)
    method = fj.algorithms.running_statistics(model, **options)
    return fj.merging.exchange(method, params, federation, key=KEY)[0]


def test_the_first_layers_moments_are_those_of_all_examples():
    dense = PARAMS["params"]["dense0"]
    hidden = INPUTS @ dense["kernel"] + dense["bias"]
    found = again()["moments"]["norm0"]
    np.testing.assert_allclose(found["mean"], hidden.mean(0), atol=1e-6)
    np.testing.assert_allclose(found["second_moment"], (hidden**2).mean(0), rtol=1e-5)


def test_deeper_moments_are_those_of_a_network_that_normalises_by_its_minibatch():
    means = []
    for rows in np.arange(24).reshape(3, 8):
        x = INPUTS[rows]
        for number in range(2):
            dense = PARAMS["params"][f"dense{number}"]
            x = x @ dense["kernel"] + dense["bias"]
            inputs = x
            x = jnp.maximum((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5), 0)
        means.append(inputs.mean(0))
    np.testing.assert_allclose(again()["moments"]["norm1"]["mean"], np.mean(means, 0), atol=1e-5)


def test_they_depend_neither_on_the_momentum_nor_on_what_was_received():
    # A share of 0.01 loses two digits when a minibatch is told from it.
    slow, _ = made(momentum=0.99)
    moved = PARAMS | {"moments": jax.tree.map(lambda x: x + 3, PARAMS["moments"])}
    shifts = {
        name: x | {"shift": PARAMS["moments"][name]["shift"]}
        for name, x in moved["moments"].items()
    }
    moved = moved | {"moments": shifts}
    expected = again()
    chex.assert_trees_all_close(again(model=slow), expected, atol=1e-4)
    chex.assert_trees_all_close(again(params=moved), expected, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.9, 0.99])
def test_means_far_from_zero_keep_their_digits(momentum):
    model, params = made(momentum)
    far = fj.clients.federation((INPUTS + 1000, TARGETS), SPLIT)
    dense = jax.tree.map(np.float64, PARAMS["params"]["dense0"])
    hidden = (INPUTS + 1000) @ dense["kernel"] + dense["bias"]
    found = again(model=model, params=params, federation=far)["moments"]["norm0"]
    np.testing.assert_allclose(found["mean"], hidden.mean(0), atol=1e-2 * hidden.std(0).min())
    within = np.mean([hidden[rows].var(0) for rows in np.arange(24).reshape(3, 8)], 0)
    np.testing.assert_allclose(found["within"], within, rtol=1e-3)


class NormFirst(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.BatchNorm(not train, name="norm")(x).mean((1, 2)))


@pytest.mark.parametrize("channel", [0, 2])
def test_one_channel_of_images_that_is_far_from_zero_is_seen(channel):
    far = 1000 * np.eye(3, dtype=np.float32)[channel]
    images = RANDOM.normal(size=(8, 5, 6, 3)).astype(np.float32) + far
    shift = fj.networks.init(NormFirst(), KEY, images)["moments"]["norm"]["shift"]
    np.testing.assert_allclose(shift, far, atol=1)


def test_a_client_with_an_input_that_is_no_number_is_named():
    inputs = INPUTS.copy()
    inputs[9] = np.nan
    with pytest.raises(ValueError, match=r"updates of clients \[1\] are not finite"):
        again(federation=fj.clients.federation((inputs, TARGETS), SPLIT))


def test_clients_are_weighed_by_their_examples_as_if_one_had_all():
    one = fj.clients.federation((INPUTS, TARGETS), [list(range(24))])
    chex.assert_trees_all_close(again(), again(federation=one), atol=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_running_mean_of_moments_gives_the_same_as_one_of_variances(share):
    def train(params, x, key, weights):
        now = {"mean": x.mean(0), "second_moment": (x**2).mean(0)}
        new = jax.tree.map(lambda old, x: (1 - share) * old + share * x, params["norm"], now)
        return x @ params["w"], params | {"norm": new}

    norm = {"mean": jnp.ones(6), "second_moment": jnp.ones(6)}
    mask = {"w": True, "norm": {"mean": False, "second_moment": False}}
    model = fj.Model(lambda p, x: x @ p["w"], fj.likelihoods.categorical, train, mask)
    found = again(model=model, params={"w": jnp.ones((6, 3)), "norm": norm})["norm"]
    np.testing.assert_allclose(found["mean"], INPUTS.mean(0), atol=1e-5)
    np.testing.assert_allclose(found["second_moment"], (INPUTS**2).mean(0), rtol=1e-4)


def test_only_statistics_that_move_are_computed_again():
    def train(params, x, key, weights):
        now = {"mean": x.mean(0), "second_moment": (x**2).mean(0)}
        new = jax.tree.map(lambda old, x: 0.9 * old + 0.1 * x, params["norm"], now)
        return x @ params["w"], params | {"norm": new}

    norm = {"mean": jnp.ones(6), "second_moment": 2 * jnp.ones(6)}
    params = {"w": jnp.ones((6, 3)), "norm": norm, "fixed": norm, "trained": norm}
    no = {"mean": False, "second_moment": False}
    mask = {"w": True, "norm": no, "fixed": no, "trained": {"mean": True, "second_moment": True}}
    model = fj.Model(lambda p, x: x @ p["w"], fj.likelihoods.categorical, train, mask)
    found = again(model=model, params=params)
    chex.assert_trees_all_equal((found["fixed"], found["trained"]), (norm, norm))
    np.testing.assert_allclose(found["norm"]["mean"], INPUTS.mean(0), atol=1e-5)


def test_they_are_sent_as_they_are_by_a_method_that_is_compressed():
    method = fj.algorithms.running_statistics(MODEL, batch_size=8)
    packed = fj.compression.compressed(method, fj.compression.quantized(8))
    found = fj.merging.exchange(packed, PARAMS, FEDERATION, key=KEY)[0]
    chex.assert_trees_all_equal(found, again())


def test_all_other_leaves_stay_bit_for_bit():
    found = again()
    chex.assert_trees_all_equal(found["params"], PARAMS["params"])
    for name, moments in found["moments"].items():
        chex.assert_trees_all_equal(moments["shift"], PARAMS["moments"][name]["shift"])


def test_a_client_without_examples_leaves_what_it_received():
    empty = fj.clients.federation((INPUTS, TARGETS), [list(range(24)), []])
    method = fj.algorithms.running_statistics(MODEL, batch_size=8)
    *_, message = fj.merging.messages(method, PARAMS, empty, key=KEY)
    chex.assert_trees_all_close(
        {name: x[1] for name, x in message.sent.statistics.items()},
        {name: x for name, x in fj.tree.by_name(PARAMS).items() if name in message.sent.statistics},
    )
    chex.assert_trees_all_close(message.params, again(), atol=1e-6)


def test_a_merged_network_is_right_in_tests_again():
    # Two networks whose units are in another order: their mean has small activations.
    order = np.array([3, 1, 4, 0, 2])
    other = jax.tree.map(jnp.asarray, PARAMS)
    first, second = (dict(other["params"][f"dense{n}"]) for n in range(2))
    first = {"kernel": first["kernel"][:, order], "bias": first["bias"][order]}
    second |= {"kernel": second["kernel"][order]}
    other = other | {"params": other["params"] | {"dense0": first, "dense1": second}}
    both = [again(params=x) for x in (PARAMS, other)]
    mean = jax.tree.map(lambda *x: jnp.mean(jnp.stack(x), 0), *both)
    by_minibatch, _ = MODEL.apply_train(mean, INPUTS, KEY, jnp.ones(24))
    before = MODEL.apply(mean, INPUTS)
    after = MODEL.apply(again(params=mean, batch_size=24), INPUTS)
    apart = [float(jnp.abs(x - by_minibatch).max()) for x in (before, after)]
    assert apart[1] < 0.1 * apart[0]


def test_it_is_compiled_once(compilations):
    moved = jax.tree.map(lambda x: x + 1, again())
    with compilations() as count:
        again(params=moved)
    assert count() == 0


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (fj.Model(lambda p, x: x @ p["w"], fj.likelihoods.categorical), "no running moments"),
        (MODEL._replace(apply_train=None), "no apply_train"),
    ],
)
def test_a_network_without_moments_is_refused(model, reason):
    params = PARAMS if "apply_train" in reason else {"w": jnp.ones((6, 3))}
    with pytest.raises(ValueError, match=reason):
        again(model=model, params=params)
