"""RegMean against its closed form."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, merging, nn, training


def network(params, x):
    """A convolution with a bias and two dense layers, of which one has a bias."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = nn.conv_general_dilated(
        x, params["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=numbers
    )
    x = jax.nn.relu(x + params["conv"]["bias"]).reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    return x @ params["dense2"]["kernel"]


@jax.jit
def inputs_of_layers(params, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        x, params["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=numbers
    )
    first = jax.nn.relu(x + params["conv"]["bias"]).reshape(x.shape[0], -1)
    second = jax.nn.relu(first @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    return {"dense1/kernel": first, "dense2/kernel": second}


def draw(seed):
    source = np.random.default_rng(seed)
    shapes = {
        "conv": {"kernel": (2, 2, 1, 2), "bias": (2,)},
        "dense1": {"kernel": (8, 4), "bias": (4,)},
        "dense2": {"kernel": (4, 3)},
    }
    return jax.tree.map(
        lambda shape: source.normal(size=shape),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.fixture
def world(x64):
    source = np.random.default_rng(5)
    # Two are equal: another number of examples is another program.
    images = [source.normal(size=(n, 3, 3, 1)) for n in (6, 11, 6)]
    return images, [draw(seed) for seed in range(3)], np.array([0.5, 0.2, 0.3])


def regmean(apply, **options):
    # What the outputs mean is not used.
    return algorithms.regmean(fj.Model(apply, fj.likelihoods.gaussian), **options)


def send(method, models, inputs):
    """Let each client send what it has to, of its inputs alone."""
    pairs = zip(models, inputs, strict=True)
    values = [
        method.summarize(None, training.Trained(params), fj.Examples(x), ())[0]
        for params, x in pairs
    ]
    return [algorithms.Update(v, method.kind) for v in values]


def merged_by(method, world):
    images, models, weights = world
    updates = send(method, models, images)
    return merging.merge(method, models[0], updates, weights)[0], updates


@pytest.mark.long
@pytest.mark.parametrize("shrink", [0.0, 0.9])
def test_dense_kernels_are_the_weighted_least_squares_solution(world, shrink):
    images, models, weights = world
    merged, updates = merged_by(regmean(network, shrink=shrink), world)
    for layer in ("dense1", "dense2"):
        left, right = 0, 0
        for params, x, p, update in zip(models, images, weights, updates, strict=True):
            u = np.asarray(inputs_of_layers(params, x)[f"{layer}/kernel"])
            gram = u.T @ u / len(u)
            np.testing.assert_allclose(
                update.values["grams"][f"{layer}/kernel"], gram, rtol=1e-10, atol=1e-12
            )
            gram = np.where(np.eye(len(gram), dtype=bool), gram, shrink * gram)
            left, right = left + p * gram, right + p * gram @ params[layer]["kernel"]
        expected = np.linalg.solve(left, right)
        np.testing.assert_allclose(merged[layer]["kernel"], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_how_a_kernel_is_stored_does_not_matter(world):
    images, models, weights = world

    def upright(params, x):
        hidden = jnp.tanh(x.reshape(len(x), -1) @ params["w"] + params["b"])
        return hidden @ params["v"]

    def turned(params, x):
        def one(row):
            return params["v"] @ jnp.tanh(params["w"] @ row.ravel() + params["b"])

        return jax.vmap(one)(x)

    source = np.random.default_rng(0)
    shapes = {"w": (9, 9), "b": (9,), "v": (9, 2)}
    models = [{n: source.normal(size=s) for n, s in shapes.items()} for _ in images]
    transposed = [jax.tree.map(lambda leaf: leaf.T, params) for params in models]
    one, _ = merged_by(regmean(upright), (images, models, weights))
    other, _ = merged_by(regmean(turned), (images, transposed, weights))
    chex.assert_trees_all_close(one, jax.tree.map(np.transpose, other), rtol=1e-9)
    assert np.abs(one["w"] - np.mean([params["w"] for params in models], 0)).max() > 0.01


def test_everything_else_is_the_plain_mean_over_clients(world):
    _, models, _ = world
    merged, _ = merged_by(regmean(network), world)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *models)
    for layer, leaf in (("conv", "kernel"), ("conv", "bias"), ("dense1", "bias")):
        np.testing.assert_allclose(merged[layer][leaf], mean[layer][leaf], rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("shrink", [0.0, 0.9])
def test_inputs_that_never_fire_keep_the_weighted_mean(x64, shrink):
    """Their Gram matrix is zero there, however badly the rest of it is scaled."""
    source = np.random.default_rng(0)
    x = source.normal(size=(3, 20, 6)) * np.array([1.0, 0.0, 1e-4, 1e3, 0.0, 1.0])
    kernels, weights = source.normal(size=(3, 6, 2)), np.array([0.5, 0.2, 0.3])
    method = regmean(lambda params, x: x @ params["w"], shrink=shrink)
    updates = send(method, [{"w": w} for w in kernels], x)
    merged, _, _ = merging.merge(method, {"w": np.zeros((6, 2))}, updates, weights)
    mean = np.einsum("m,mio->io", weights, kernels)
    np.testing.assert_allclose(
        np.asarray(merged["w"])[[1, 4]], mean[[1, 4]], rtol=1e-10, atol=1e-12
    )
    fires = [0, 2, 3, 5]
    alone = send(method, [{"w": w[fires]} for w in kernels], x[:, :, fires])
    expected, _, _ = merging.merge(method, {"w": np.zeros((4, 2))}, alone, weights)
    np.testing.assert_allclose(np.asarray(merged["w"])[fires], expected["w"], rtol=1e-9, atol=1e-9)


def test_outputs_on_the_clients_own_inputs_are_matched(x64):
    """Clients that see orthogonal inputs keep their own outputs, up to the shrinking."""
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))
    kernels = np.random.default_rng(1).normal(size=(2, 6, 3))
    own = basis[:3], basis[3:]

    def apply(params, x):
        return x @ params["w"]

    method = regmean(apply, shrink=1 - 1e-9)
    updates = send(method, [{"w": w} for w in kernels], own)
    merged, _, _ = merging.merge(method, {"w": np.zeros((6, 3))}, updates)
    for w, x in zip(kernels, own, strict=True):
        np.testing.assert_allclose(x @ merged["w"], x @ w, rtol=1e-6, atol=1e-6)


def test_networks_without_dense_layers_are_refused():
    method = regmean(lambda params, x: x * params["scale"])
    with pytest.raises(ValueError, match="has none; use fedavg or fedfisher"):
        send(method, [{"scale": jnp.ones(3)}], [np.ones((2, 3))])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"shrink": 1.0}, "shrink is 1.0; expected 0 <= shrink < 1"),
        ({"shrink": -0.1}, "shrink is -0.1"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(option, words):
    with pytest.raises(ValueError, match=words):
        regmean(network, **option)


def two_layers(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


@pytest.fixture
def exchanged(x64):
    """Clients of two layers, with data; RegMean++ written out layer by layer."""
    source = np.random.default_rng(3)
    x = source.normal(size=(19, 4))
    federation = fj.clients.federation((x, np.zeros((19, 2))), np.split(np.arange(19), [6, 12]))
    models = {"first": source.normal(size=(3, 4, 3)), "second": source.normal(size=(3, 3, 2))}
    start = {"first": source.normal(size=(4, 3)), "second": source.normal(size=(3, 2))}
    parts, weights = np.split(x, [6, 12]), np.array([6, 6, 7]) / 19

    def merged(inputs, kernels):
        left, right = 0, 0
        for p, u, w in zip(weights, inputs, kernels, strict=True):
            gram = u.T @ u / len(u)
            gram = np.where(np.eye(len(gram), dtype=bool), gram, 0.9 * gram)
            left, right = left + p * gram, right + p * gram @ w
        return np.linalg.solve(left, right)

    first = merged(parts, models["first"])
    second = merged([np.tanh(x @ first) for x in parts], models["second"])
    own = [np.tanh(x @ w) for x, w in zip(parts, models["first"], strict=True)]
    plain = {"first": first, "second": merged(own, models["second"])}
    trained = training.Trained(models, start)
    return federation, trained, {"first": first, "second": second}, plain


@pytest.mark.long
def test_as_many_messages_as_layers_are_regmean_plus_plus(exchanged):
    federation, trained, expected, plain = exchanged
    model = fj.Model(two_layers, fj.likelihoods.gaussian)
    method = algorithms.make("regmean_plus_plus", model)
    how = {"key": jax.random.key(0), "trained": trained}
    one = merging.exchange(method, trained.start, federation, **how)[0]
    chex.assert_trees_all_close(one["first"], expected["first"], rtol=1e-9)
    assert np.abs(one["second"] - expected["second"]).max() > 1e-3
    two = merging.exchange([method, method], trained.start, federation, **how)[0]
    chex.assert_trees_all_close(two, expected, rtol=1e-9)
    # RegMean's inputs are those of the clients' own networks, which differ after the first layer.
    sent = merging.summarize(regmean(two_layers), trained, federation, key=jax.random.key(0))
    found = merging.merge(regmean(two_layers), trained.start, sent, federation.weights)[0]
    chex.assert_trees_all_close(found, plain, rtol=1e-9)
    assert np.abs(plain["second"] - expected["second"]).max() > 1e-3


def test_of_one_layer_regmean_plus_plus_is_regmean(x64):
    source = np.random.default_rng(1)
    kernels, x = source.normal(size=(3, 4, 2)), source.normal(size=(3, 5, 4))
    found = []
    for received in (False, True):
        method = regmean(lambda params, x: x @ params["w"], received=received)
        start = {"w": jnp.ones((4, 2))}
        values = [
            method.summarize(None, training.Trained({"w": w}, start), fj.Examples(u), ())[0]
            for w, u in zip(kernels, x, strict=True)
        ]
        updates = [algorithms.Update(v, method.kind) for v in values]
        found.append(merging.merge(method, start, updates)[0])
    chex.assert_trees_all_equal(*found)


def test_the_received_network_has_to_be_known():
    method = regmean(lambda params, x: x @ params["w"], received=True)
    with pytest.raises(ValueError, match=r"RegMean\+\+ takes the inputs .* which is unknown"):
        method.summarize(
            None, training.Trained({"w": jnp.ones((2, 1))}), fj.Examples(np.eye(2)), ()
        )
