"""A layer with groups has one Kronecker block a group: that of a network with a leaf for each."""

from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fisherjax import (
    Examples,
    Model,
    algorithms,
    clients,
    compression,
    files,
    fisher,
    likelihoods,
    merging,
    nn,
    solvers,
)

LAYOUT = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
SHAPES = {"deep": (2, 2, 1, 4), "shift": (4,), "grouped": (2, 2, 2, 6), "head": (6, 3)}
EXACT = solvers.conjugate_gradients(tolerance=1e-13, max_iterations=2000)


def network(convolve, params, x):
    """A depthwise convolution with a bias, one with two groups, a mean, and a dense layer."""
    hidden = jnp.tanh(convolve(x, params["deep"], 4, "SAME") + params["shift"])
    hidden = jnp.tanh(convolve(hidden, params["grouped"], 2, "VALID"))
    return hidden.mean((1, 2)) @ params["head"]


def convolve(x, kernel, groups, padding):
    how = LAYOUT | {"feature_group_count": groups}
    return nn.conv_general_dilated(x, kernel, (1, 1), padding, **how)


def apart(params, x):
    """The same network with a leaf for each group."""

    def group_by_group(x, kernels, shifts, padding):
        each = zip(jnp.split(x, len(kernels), -1), kernels, shifts, strict=True)
        return jnp.concatenate([convolve(x, k, 1, padding) + b for x, k, b in each], -1)

    hidden = jnp.tanh(group_by_group(x, params["deep"], params["shift"], "SAME"))
    hidden = jnp.tanh(group_by_group(hidden, params["grouped"], [0, 0], "VALID"))
    return hidden.mean((1, 2)) @ params["head"]


def split(params):
    counts = {"deep": 4, "shift": 4, "grouped": 2}
    return {n: jnp.split(x, counts[n], -1) if n in counts else x for n, x in params.items()}


apply = partial(network, convolve)
MODEL = Model(apply, likelihoods.categorical)


def drawn(seed):
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=shape)) for name, shape in SHAPES.items()}


@pytest.fixture
def images(x64):
    return jnp.asarray(np.random.default_rng(9).normal(size=(13, 3, 3, 4)))


@pytest.fixture
def world(images):
    """Two clients with their updates."""
    labels = np.arange(13) % 3
    federation = clients.federation((images, labels), [range(5), range(5, 13)])
    models, method = [drawn(1), drawn(2)], algorithms.fedfisher(MODEL, solver=EXACT)
    updates = merging.summarize(method, models, federation, key=jax.random.key(0))
    return SimpleNamespace(method=method, models=models, updates=updates, federation=federation)


@pytest.mark.long
def test_the_blocks_are_those_of_a_leaf_for_each_group(images):
    """And the sums over 13 examples do not depend on the minibatches, which are shared by two."""
    params = drawn(0)
    ours = fisher.kfac(MODEL, params, Examples(images), batch_size=4)
    theirs = fisher.kfac(Model(apart, likelihoods.categorical), split(params), Examples(images))
    for name, groups in (("deep", 4), ("grouped", 2)):
        each = [theirs.factors[f"{name}/{group}"] for group in range(groups)]
        chex.assert_trees_all_close(
            ours.factors[name], jax.tree.map(lambda *x: jnp.stack(x), *each), rtol=1e-10
        )
    chex.assert_trees_all_close(ours.factors["head"], theirs.factors["head"], rtol=1e-10)
    left = fisher.diagonal(MODEL, params, Examples(images), batch_size=4).entries
    right = fisher.diagonal(Model(apart, likelihoods.categorical), split(params), Examples(images))
    chex.assert_trees_all_close(split(left), right.entries, rtol=1e-10)
    assert ours.coverage == 1
    assert repr(ours).startswith("Kronecker(4 leaves, 2 convolution and 1 dense layers")


@pytest.mark.slow
def test_clients_side_by_side_have_their_own_factors(world):
    """`summarize` maps over clients, of unequal size."""
    places = [slice(0, 5), slice(5, 13)]
    x = world.federation.inputs
    for client, (model, place) in enumerate(zip(world.models, places, strict=True)):
        alone = fisher.kfac(MODEL, model, Examples(x[place]))
        one = jax.tree.map(lambda leaf, i=client: leaf[i], world.updates.values["fisher"])
        chex.assert_trees_all_close(one.factors, alone.factors, rtol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("apply", "shapes", "inputs"),
    [
        (
            lambda p, x: (convolve(x, p["k"], 2, "VALID") + p["b"]).reshape(len(x), -1),
            {"k": (2, 2, 1, 6), "b": (6,)},
            (1, 2, 2, 2),
        ),
        (
            lambda p, x: (jnp.einsum("bgi,gio->bgo", x, p["k"]) + p["b"]).reshape(len(x), -1),
            {"k": (3, 4, 2), "b": (3, 2)},
            (1, 3, 4),
        ),
    ],
    ids=["convolution", "product"],
)
def test_one_example_at_one_location_has_the_full_fisher_of_each_group(
    x64, oracle, apply, shapes, inputs
):
    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=shape)) for name, shape in shapes.items()}
    x = jnp.asarray(draw(size=inputs))
    found = fisher.kfac(Model(apply, likelihoods.gaussian), params, Examples(x))
    columns = jnp.eye(apply(params, x).size)[:, None]
    np.testing.assert_allclose(found.dense(), oracle(apply, params, x, columns), atol=1e-12)
    np.testing.assert_allclose(found.trace(), np.trace(found.dense()), rtol=1e-12)
    eye = found.identity().dense()
    np.testing.assert_array_equal(eye, np.eye(len(eye)))


@pytest.mark.long
def test_a_merge_solves_the_damped_system(world):
    merged, _, _ = merging.merge(
        world.method, world.models[0], world.updates, world.federation.weights
    )
    each = [jax.tree.map(lambda x, i=i: x[i], world.updates.values["fisher"]) for i in range(2)]
    weights = np.asarray(world.federation.weights)
    matrices = [w * np.asarray(one.dense()) for w, one in zip(weights, each, strict=True)]
    points = [np.asarray(ravel_pytree(model)[0]) for model in world.models]
    # The default damping is the mean eigenvalue of a layer, over all its groups.
    names = {"shift": "deep"}
    diagonal = np.diagonal(sum(matrices))
    place = ravel_pytree({n: np.full(s, i) for i, (n, s) in enumerate(sorted(SHAPES.items()))})[0]
    blocks = [names.get(n, n) for n in sorted(SHAPES)]
    owner = np.array([blocks.index(blocks[int(i)]) for i in place])
    damping = np.array([diagonal[owner == i].mean() for i in owner])
    mean = weights @ np.stack(points)
    right = sum(m @ x for m, x in zip(matrices, points, strict=True)) + damping * mean
    expected = np.linalg.solve(sum(matrices) + np.diag(damping), right)
    np.testing.assert_allclose(ravel_pytree(merged)[0], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        algorithms.fedfisher_sketched,
        algorithms.fedfisher_sequential,
        algorithms.fedlpa,
        algorithms.regmean,
    ],
)
def test_clients_with_one_model_get_it_back(world, make):
    models, method = [world.models[0]] * 2, make(MODEL)
    updates = merging.summarize(method, models, world.federation, key=jax.random.key(0))
    merged, _, _ = merging.merge(method, drawn(3), updates, world.federation.weights)
    chex.assert_trees_all_close(merged, models[0], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_sketches_of_enough_terms_add_up_to_the_operator(world):
    method = algorithms.fedfisher_sketched(MODEL, terms=10, solver=EXACT)
    updates = merging.summarize(method, world.models, world.federation, key=jax.random.key(0))
    found, expected = (
        merging.merge(m, world.models[0], u, world.federation.weights)[0]
        for m, u in ((method, updates), (world.method, world.updates))
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)


CODECS = {
    "triangles": (compression.triangles(), 1e-10),
    "roots": (compression.roots(), 1e-6),
    "16 bits": (compression.quantized(16), 1e-2),
    "triangles in 8 bits": (
        compression.compose(compression.triangles(), compression.quantized(8)),
        0.3,
    ),
    "water filling": (compression.water_filling(12.0), 0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_encoded_uploads_come_back_from_files(world, tmp_path, name):
    codec, error = CODECS[name]
    method = compression.compressed(world.method, codec)
    updates = compression.encode(world.updates, codec, start=world.models[0])
    back = []
    for client in range(2):
        path = tmp_path / f"{client}.safetensors"
        one = files.of_client(updates, client)
        files.save_update(path, one, algorithm="fedfisher_kfac", client=str(client), examples=5)
        back.append(files.load_update(path)[0])
    stacked, loaded = (
        merging.merge(method, world.models[0], given, world.federation.weights)[0]
        for given in (updates, back)
    )
    chex.assert_trees_all_equal(stacked, loaded)
    plain, _, _ = merging.merge(
        world.method, world.models[0], world.updates, world.federation.weights
    )
    chex.assert_trees_all_close(stacked, plain, atol=error)
