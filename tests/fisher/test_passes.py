"""Weights, padding, minibatches and bad input, for every structure of the Fisher alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import fisher, likelihoods

LIKELIHOOD = likelihoods.categorical


def product(apply, likelihood, params, inputs, targets=None, **options):
    vector = jax.tree.map(jnp.ones_like, params)
    return fisher.vector_product(apply, likelihood, params, inputs, vector, targets, **options)


STRUCTURES = [fisher.diagonal, fisher.kfac, fisher.full, product]


@pytest.fixture(params=STRUCTURES, ids=lambda structure: structure.__name__)
def structure(request):
    return request.param


def assert_close(left, right, tolerance=1e-12):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=tolerance), left, right
    )


def test_batch_size_does_not_matter(mlp, structure):
    apply, params, x = mlp
    whole = structure(apply, LIKELIHOOD, params, x)
    for batch_size in (1, 4):
        parts = structure(apply, LIKELIHOOD, params, x, batch_size=batch_size)
        assert_close(parts, whole)


def test_padded_clients_equal_unpadded_ones_under_jit_and_vmap(mlp, structure):
    """Padding first, last, in between and in whole minibatches; garbage in padded rows."""
    apply, params, x = mlp
    valid = np.zeros((5, 11))
    valid[0, :] = 1
    valid[1, 7:] = 1  # the first two minibatches are all padding
    valid[2, :2] = 1  # the last three are
    valid[3, [1, 4, 5, 10]] = 1
    # Client 4 is empty.
    garbage = jnp.where(valid[..., None] > 0, x, 1e3 * jnp.cos(jnp.arange(44.0)).reshape(11, 4))
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf * (1 + i) for i in range(5)]), params)

    @jax.jit
    @jax.vmap
    def padded(params, inputs, weights):
        return structure(apply, LIKELIHOOD, params, inputs, weights=weights, batch_size=3)

    together = padded(clients, garbage, jnp.asarray(valid))
    for client in range(4):
        own = jax.tree.map(lambda leaf, client=client: leaf[client], clients)
        alone = structure(apply, LIKELIHOOD, own, x[valid[client] > 0])
        assert_close(jax.tree.map(lambda leaf, client=client: leaf[client], together), alone)
    assert all((leaf[4] == 0).all() for leaf in jax.tree.leaves(together))


def test_an_example_of_weight_two_counts_twice(mlp, structure):
    apply, params, x = mlp
    repeats = np.array([2, 1, 0, 1, 3, 1, 1, 0, 0, 1, 2])
    repeated = structure(apply, LIKELIHOOD, params, jnp.repeat(x, repeats, axis=0))
    weighted = structure(apply, LIKELIHOOD, params, x, weights=jnp.asarray(repeats), batch_size=4)
    rescaled = structure(apply, LIKELIHOOD, params, x, weights=1e-9 * repeats, batch_size=4)
    assert_close(weighted, repeated)
    assert_close(rescaled, repeated)


def test_indices_choose_rows_of_inputs_and_targets(mlp, structure, targets_for):
    apply, params, x = mlp
    y = targets_for("categorical", apply(params, x))
    rows, weights = jnp.array([7, 3, 3, 0, 9]), jnp.array([1.0, 0.5, 2.0, 1.0, 0.0])
    options = {"kind": fisher.empirical, "weights": weights, "batch_size": 2}
    by_index = structure(apply, LIKELIHOOD, params, x, y, indices=rows, **options)
    gathered = structure(apply, LIKELIHOOD, params, x[rows], y[rows], **options)
    assert_close(by_index, gathered)


def test_integer_inputs_keep_all_digits(mlp):
    apply, params, _ = mlp
    levels = np.random.default_rng(0).integers(0, 256, (7, 4)).astype(np.uint8)

    def normalized(params, x):
        return apply(params, x.astype(float) / 255 if x.dtype == jnp.uint8 else x)

    images = fisher.full(normalized, LIKELIHOOD, params, levels)
    assert_close(images, fisher.full(normalized, LIKELIHOOD, params, levels / 255), 1e-14)


def test_float32_params_give_float32_even_where_64_bits_are_enabled(mlp, structure):
    apply, params, x = mlp
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    weights = jnp.ones(len(x))
    result = structure(apply, LIKELIHOOD, params, x.astype(jnp.float32), weights=weights)
    assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("structure", [fisher.diagonal, fisher.kfac, fisher.full])
def test_bfloat16_networks_are_summed_in_float32(mlp, structure):
    apply, params, x = mlp
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    result = structure(apply, LIKELIHOOD, narrow, x.astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("float32")}
    wide = structure(apply, LIKELIHOOD, params, x)
    for left, right in zip(jax.tree.leaves(result), jax.tree.leaves(wide), strict=True):
        assert jnp.linalg.norm(left - right) < 0.05 * jnp.linalg.norm(right)


def test_a_second_call_compiles_nothing(mlp, structure, compilations):
    apply, params, x = mlp
    structure(apply, LIKELIHOOD, params, x)
    other = jax.tree.map(jnp.cos, params)
    with compilations() as count:
        structure(apply, LIKELIHOOD, other, x)
    assert count() == 0


def spread(array):
    """Split rows over devices, of which there is one here; tests/distributed.py has eight."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "examples")
    return jax.device_put(
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("examples"))
    )


def test_rows_spread_over_devices_give_the_same_and_compile_once(mlp, structure, compilations):
    apply, params, x = mlp
    weights, rows = jnp.arange(11.0), spread(x)
    mean = structure(apply, LIKELIHOOD, params, rows, weights=weights, batch_size=4)
    assert_close(mean, structure(apply, LIKELIHOOD, params, x, weights=weights))
    with compilations() as count:
        structure(apply, LIKELIHOOD, params, rows, weights=weights, batch_size=4)
    assert count() == 0


def test_labels_for_spread_rows_come_from_the_key(mlp, structure):
    apply, params, x = mlp
    one, again, other = (
        structure(
            apply, LIKELIHOOD, params, spread(x), kind=fisher.sampled, key=jax.random.key(number)
        )
        for number in (0, 0, 1)
    )
    assert_close(one, again)
    assert any(jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


def test_rows_of_spread_inputs_cannot_be_chosen(mlp, structure):
    with pytest.raises(ValueError, match="its own rows only"):
        structure(mlp.apply, LIKELIHOOD, mlp.params, spread(mlp.inputs), indices=jnp.array([0, 3]))


BAD = {
    "integer params": (dict(params={"w": jnp.ones((4, 3), int)}), TypeError, "'w'.*dtype int"),
    "no params": (dict(params={}), ValueError, "no leaves"),
    "no examples": (dict(inputs=jnp.ones((0, 4)), targets=jnp.ones(0, int)), ValueError, "empty"),
    "list of inputs": (dict(inputs=[[1.0] * 4]), TypeError, "inputs is a list"),
    "number of targets": (dict(targets=jnp.zeros(3, int)), ValueError, "3 targets for 11 inputs"),
    "target out of range": (dict(targets=jnp.full(11, 3)), ValueError, "between 0 and 2"),
    "target dtype": (dict(targets=jnp.ones(11)), TypeError, "integer class labels"),
    "no targets": (dict(targets=None), ValueError, "pass targets"),
    "no key": (dict(kind=fisher.sampled), ValueError, "pass key"),
    "weights shape": (dict(weights=jnp.ones(10)), ValueError, r"shape \(10,\); expected \(11,\)"),
    "negative weight": (dict(weights=-jnp.ones(11)), ValueError, "zero or more"),
    "NaN weight": (dict(weights=jnp.full(11, jnp.nan)), ValueError, "weights run from nan"),
    "row out of range": (dict(indices=jnp.array([0, 11])), ValueError, "0 to 11.*11 inputs"),
    "mask for indices": (dict(indices=jnp.ones(11, bool)), TypeError, "integers.*flatnonzero"),
    "batch size": (dict(batch_size=0), ValueError, "batch_size is 0"),
    "outputs without an axis": (
        dict(apply=lambda params, x: x.sum(1) * params["second"]["kernel"].sum()),
        ValueError,
        "outputs of shape .*own",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_with_what_to_do(mlp, structure, targets_for, fault):
    change, error, words = BAD[fault]
    arguments = {"apply": mlp.apply, "likelihood": LIKELIHOOD, "params": mlp.params}
    arguments |= {"inputs": mlp.inputs, "targets": targets_for("categorical", jnp.ones((11, 3)))}
    arguments |= {"kind": fisher.empirical} | change
    with pytest.raises(error, match=words):
        structure(**arguments)
