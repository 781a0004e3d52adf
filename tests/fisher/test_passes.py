"""Weights, padding, minibatches and bad input, for every structure of the Fisher alike."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from jax.test_util import check_grads

from fisherjax import Examples, Model, clients, fisher, likelihoods
from fisherjax.fisher import _passes

LIKELIHOOD = likelihoods.categorical


def product(model, params, examples, **options):
    vector = jax.tree.map(jnp.ones_like, params)
    return fisher.vector_product(model, params, examples, vector, **options)


STRUCTURES = [fisher.diagonal, fisher.kfac, fisher.full, product]


def _name(structure):
    return structure.__name__


# What every structure leaves to the pass over its data: one of them stands for all.
of_the_pass = pytest.mark.parametrize(
    "structure",
    [fisher.kfac]
    + [pytest.param(s, marks=pytest.mark.slow) for s in STRUCTURES if s is not fisher.kfac],
    ids=_name,
    indirect=True,
)


def differ(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return any(np.any(np.asarray(a) != np.asarray(b)) for a, b in pairs)


@pytest.fixture(params=STRUCTURES, ids=_name)
def structure(request):
    return request.param


@pytest.fixture
def model(mlp):
    return Model(mlp.apply, LIKELIHOOD)


def pick(stacked, client):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[client], stacked)


def assert_close(left, right, tolerance=1e-12):
    chex.assert_trees_all_close(left, right, rtol=1e-10, atol=tolerance)


@pytest.mark.parametrize("batch_size", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_batch_size_does_not_matter(mlp, model, structure, batch_size):
    _, params, x = mlp
    whole = structure(model, params, Examples(x))
    parts = structure(model, params, Examples(x), batch_size=batch_size)
    assert_close(parts, whole)


@pytest.mark.long
def test_one_minibatch_has_a_gradient_by_inputs_and_parameters(mlp, model, structure):
    _, params, x = mlp

    @jax.jit
    def mean(params, x):
        leaves = jax.tree.leaves(structure(model, params, Examples(x), batch_size=len(x)))
        return sum(jnp.sin(leaf).sum() for leaf in leaves)

    check_grads(mean, (params, x), order=1, modes="rev", rtol=1e-5)


def test_padded_clients_equal_unpadded_ones_under_jit_and_vmap(mlp, model, structure):
    """Padding first, last, in between and in whole minibatches; garbage in padded rows."""
    _, params, x = mlp
    valid = np.zeros((5, 11))
    valid[0, :] = 1
    valid[1, 8:] = 1  # the first two minibatches are all padding
    valid[2, :3] = 1  # the last three are
    valid[3, [1, 5, 10]] = 1
    # Client 4 is empty.
    garbage = np.where(valid[..., None] > 0, x, 1e3 * np.cos(np.arange(44.0)).reshape(11, 4))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf * (1.0 + i) for i in range(5)]), params)

    @jax.jit
    @jax.vmap
    def padded(params, inputs, weights):
        return structure(model, params, Examples(inputs, weights=weights), batch_size=3)

    together = padded(stacked, garbage, valid)
    for client in range(4):
        alone = structure(model, pick(stacked, client), Examples(np.asarray(x)[valid[client] > 0]))
        assert_close(pick(together, client), alone)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(pick(together, 4)))


def test_the_row_that_padding_points_at_never_reaches_a_client(mlp, model, structure):
    """Row 0 fills up everybody's indices; its owner's NaN stay its owner's."""
    _, params, x = mlp
    rows = [np.array([0, 1, 2, 3, 4]), np.array([10, 5, 7]), np.array([], int), np.array([6, 8, 9])]
    data = np.where(np.arange(11)[:, None] == 0, np.nan, x), np.zeros(11, int)
    federation = clients.federation(data, rows)

    def of_one(client):
        own = clients.view(federation, client)
        return structure(model, params, own, batch_size=2)

    together = jax.jit(jax.vmap(of_one))(np.arange(len(rows)))
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(pick(together, 0)))
    for client in (1, 3):
        alone = structure(model, params, Examples(np.asarray(x)[rows[client]]))
        assert_close(pick(together, client), alone)
        assert_close(of_one(client), alone)
    for empty in (pick(together, 2), of_one(2)):
        chex.assert_trees_all_equal(empty, jax.tree.map(np.zeros_like, empty))


def test_an_example_of_weight_two_counts_twice(mlp, model, structure):
    _, params, x = mlp
    repeats = np.array([2, 1, 0, 1, 3, 1, 0, 0, 0, 1, 2])
    repeated = structure(model, params, Examples(np.repeat(x, repeats, axis=0)))
    for weights in (repeats, 1e-9 * repeats):
        weighted = structure(model, params, Examples(x, weights=weights), batch_size=4)
        assert_close(weighted, repeated)


@of_the_pass
def test_indices_choose_rows_of_inputs_and_targets(mlp, model, structure, targets_for):
    _, params, x = mlp
    x, y = np.asarray(x), np.asarray(targets_for("categorical", np.ones((11, 3))))
    rows, weights = np.array([7, 3, 3, 0, 9]), np.array([1.0, 0.5, 2.0, 1.0, 0.0])
    options = {"kind": fisher.empirical, "batch_size": 2}
    by_index = structure(model, params, Examples(x, y, rows, weights), **options)
    gathered = structure(model, params, Examples(x[rows], y[rows], weights=weights), **options)
    assert_close(by_index, gathered)


def test_integer_inputs_keep_all_digits(mlp):
    apply, params, _ = mlp
    levels = np.random.default_rng(0).integers(0, 256, (7, 4)).astype(np.uint8)

    def normalized(params, x):
        return apply(params, x.astype(float) / 255 if x.dtype == jnp.uint8 else x)

    model = Model(normalized, LIKELIHOOD)
    images = fisher.full(model, params, Examples(levels))
    assert_close(images, fisher.full(model, params, Examples(levels / 255)), 1e-14)


def test_float32_params_give_float32_even_where_64_bits_are_enabled(mlp, model, structure):
    _, params, x = mlp
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    examples = Examples(x.astype(jnp.float32), weights=jnp.ones(len(x)))
    result = structure(model, params, examples)
    assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("structure", [fisher.diagonal, fisher.kfac, fisher.full])
def test_bfloat16_networks_are_summed_in_float32(mlp, model, structure):
    _, params, x = mlp
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    result = structure(model, narrow, Examples(x.astype(jnp.bfloat16)))
    assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("float32")}
    wide = structure(model, params, Examples(x))
    for left, right in zip(jax.tree.leaves(result), jax.tree.leaves(wide), strict=True):
        assert np.linalg.norm(np.subtract(left, right)) < 0.05 * np.linalg.norm(right)


def test_a_second_call_compiles_nothing(mlp, model, structure, compilations):
    _, params, x = mlp
    structure(model, params, Examples(x))
    other = jax.tree.map(np.cos, params)
    with compilations() as count:
        structure(Model(*model), other, Examples(x))
    assert count() == 0


def test_sums_of_a_minibatch_are_traced_once(key):
    calls = []

    def batch_sums(x, y, w, key):
        calls.append(x.shape)
        return {"sum": (w[:, None] * x).sum(0), "drawn": jax.random.uniform(key)}

    examples = Examples(jnp.arange(10.0).reshape(5, 2), jnp.zeros(5, int))
    for batch_size in (2, 8):
        mean = jax.jit(partial(_passes.weighted_mean, batch_sums, batch_size=batch_size))
        found = mean(examples, key=key)
        np.testing.assert_allclose(found["sum"], examples.inputs.mean(0), rtol=1e-6)
    assert calls == [(2, 2), (5, 2)]


@pytest.mark.long
@of_the_pass
def test_kinds_configured_in_place_compile_once(mlp, model, structure, key, compilations):
    arguments = model, mlp.params, Examples(mlp.inputs)

    def two_samples():
        return structure(*arguments, kind=partial(fisher.sampled, num_samples=2), key=key)

    first = two_samples()
    with compilations() as count:
        second = two_samples()
    assert count() == 0
    assert_close(first, second)
    # Another number is another program, not the one that is there already.
    three = structure(*arguments, kind=partial(fisher.sampled, num_samples=3), key=key)
    assert differ(first, three)


def test_how_a_network_trains_is_not_compiled_in(mlp, model, structure, compilations):
    _, params, x = mlp
    structure(model, params, Examples(x))
    mask = jax.tree.map(lambda _: True, params)
    other = Model(*model[:2], apply_train=lambda p, x, key, w: (mlp.apply(p, x), None), mask=mask)
    with compilations() as count:
        structure(other, params, Examples(x))
    assert count() == 0


def spread(array):
    """Split rows over devices, of which there is one here; tests/distributed.py has eight."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "examples")
    return jax.device_put(
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("examples"))
    )


@of_the_pass
def test_rows_spread_over_devices_give_the_same_and_compile_once(
    mlp, model, structure, compilations
):
    _, params, x = mlp
    whole = Examples(x, weights=np.arange(11.0))
    rows = whole._replace(inputs=spread(x))
    mean = structure(model, params, rows, batch_size=4)
    assert_close(mean, structure(model, params, whole, batch_size=4))
    with compilations() as count:
        structure(model, params, rows, batch_size=4)
    assert count() == 0


@of_the_pass
def test_labels_for_spread_rows_come_from_the_key(mlp, model, structure):
    examples = Examples(spread(mlp.inputs))
    one, again, other = (
        structure(model, mlp.params, examples, kind=fisher.sampled, key=jax.random.key(number))
        for number in (0, 0, 1)
    )
    assert_close(one, again)
    assert differ(one, other)


def test_rows_of_spread_inputs_cannot_be_chosen(mlp, model, structure):
    examples = Examples(spread(mlp.inputs), indices=jnp.array([0, 3]))
    with pytest.raises(ValueError, match="has its own rows only"):
        structure(model, mlp.params, examples)


@dataclasses.dataclass
class Network:
    """A function without a hash, because it can be compared."""

    def __call__(self, params, x):
        return x @ params["w"]


BAD = {
    "no model": (dict(model=len), TypeError, r"model is a builtin.*fisherjax\.Model\(apply"),
    "apply": (dict(model=Model(3, LIKELIHOOD)), TypeError, "apply is 3; expected a function"),
    "likelihood": (
        dict(model=Model(len, "categorical")),
        TypeError,
        r"likelihood is 'categorical'; .*likelihoods\.categorical",
    ),
    "apply without a hash": (
        dict(model=Model(Network(), LIKELIHOOD)),
        TypeError,
        r"apply has no hash .*'Network'.*function such as apply.*arrays in params",
    ),
    "integer outputs": (
        dict(model=Model(lambda p, x: jnp.argmax(x, -1, keepdims=True), LIKELIHOOD)),
        TypeError,
        r"apply returned int.*; expected floating point.*argmax",
    ),
    "complex outputs": (
        dict(model=Model(lambda p, x: jnp.fft.fft(x), LIKELIHOOD)),
        TypeError,
        r"apply returned complex.*real and imaginary parts",
    ),
    "integer params": (dict(params={"w": np.ones((4, 3), int)}), TypeError, "'w'.*dtype int"),
    "no params": (dict(params={}), ValueError, "no leaves"),
    "other params": (
        dict(params={"w": jnp.ones(2)}),
        ValueError,
        r"failed.*\(1, 4\).*KeyError",
    ),
    "array of inputs": (dict(examples=jnp.ones((11, 4))), TypeError, r"examples is .*Examples\("),
    "no inputs": (dict(inputs=None), TypeError, "inputs is None; expected an array"),
    "no examples": (dict(inputs=jnp.ones((0, 4)), targets=jnp.ones(0, int)), ValueError, "empty"),
    "no rows": (dict(indices=jnp.zeros(0, int)), ValueError, "empty"),
    "list of inputs": (dict(inputs=[[1.0] * 4]), TypeError, "inputs is a list"),
    "number of targets": (dict(targets=jnp.zeros(3, int)), ValueError, "3 targets for 11 inputs"),
    "target out of range": (dict(targets=jnp.full(11, 3)), ValueError, "between 0 and 2"),
    "target dtype": (dict(targets=jnp.ones(11)), TypeError, "integer class labels"),
    "no targets": (dict(targets=None), ValueError, "pass targets"),
    "no key": (dict(kind=fisher.sampled), ValueError, "pass key"),
    "no key to draw signs": (
        dict(kind=fisher.curvature_propagation),
        ValueError,
        "signs: pass key",
    ),
    "old key": (
        dict(key=jnp.zeros(2, jnp.uint32)),
        TypeError,
        r"not a typed.*jax\.random\.key",
    ),
    "seed": (dict(key=0), TypeError, "key is int 0, not a typed key"),
    "no kind": (dict(kind="true"), TypeError, r"kind is 'true'; .*fisher\.true, "),
    "weights shape": (dict(weights=jnp.ones(10)), ValueError, r"shape \(10,\); expected \(11,\)"),
    "negative weight": (dict(weights=-jnp.ones(11)), ValueError, "zero or more"),
    "NaN weight": (dict(weights=jnp.full(11, jnp.nan)), ValueError, "weights run from nan"),
    "infinite weight": (dict(weights=jnp.full(11, jnp.inf)), ValueError, "weights run from inf"),
    "row out of range": (dict(indices=jnp.array([0, 11])), ValueError, "0 to 11.*11 inputs"),
    "negative row": (dict(indices=jnp.array([0, -1])), ValueError, "-1 to 0.*11 inputs"),
    "mask for indices": (dict(indices=jnp.ones(11, bool)), TypeError, "integers.*flatnonzero"),
    "batch size": (dict(batch_size=0), ValueError, "batch_size is 0"),
    "outputs without an axis": (
        dict(model=Model(lambda p, x: x.sum(1) * p["second"]["kernel"].sum(), LIKELIHOOD)),
        ValueError,
        "outputs of shape .*axis of length one",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_with_what_to_do(mlp, model, structure, targets_for, fault):
    change, error, words = BAD[fault]
    examples = Examples(mlp.inputs, targets_for("categorical", np.ones((11, 3))))
    fields = {name: change[name] for name in Examples._fields if name in change}
    rest = {name: value for name, value in change.items() if name not in fields}
    arguments = {"model": model, "params": mlp.params, "examples": examples._replace(**fields)}
    with pytest.raises(error, match=words):
        structure(**arguments | {"kind": fisher.empirical} | rest)


def test_gradients_of_other_devices_are_not_added_up(mlp, model, structure):
    """Inside `jax.shard_map`, JAX adds up gradients of what all devices have in common."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))

    def on_each(**how):
        parts = {"in_specs": (PartitionSpec(), PartitionSpec("rows")), "out_specs": PartitionSpec()}
        return jax.shard_map(exact, mesh=mesh, **parts, **how)(mlp.params, mlp.inputs)

    def exact(params, x):
        return structure(model, params, Examples(x), kind=fisher.true)

    with pytest.raises(ValueError, match=r"axis 'rows'.*add up.*check_vma=False"):
        jax.eval_shape(on_each)
    assert_close(jax.jit(partial(on_each, check_vma=False))(), exact(mlp.params, mlp.inputs))


def test_several_keys_are_refused(mlp, model, structure, key):
    examples = Examples(mlp.inputs)
    with pytest.raises(ValueError, match=r"key has shape \(2,\); expected one key"):
        structure(model, mlp.params, examples, kind=fisher.sampled, key=jax.random.split(key))


# What kind is taken if none is given


@pytest.mark.long
@of_the_pass
def test_the_automatic_kind_is_exact_for_vectors_and_drawn_for_sequences(
    mlp, sequence, model, structure, key
):
    exact = structure(model, mlp.params, Examples(mlp.inputs), kind=fisher.true)
    assert_close(structure(model, mlp.params, Examples(mlp.inputs), key=key), exact, 0)
    of_sequences = partial(
        structure, Model(sequence.apply, LIKELIHOOD), sequence.params, Examples(sequence.inputs)
    )
    drawn = of_sequences(kind=fisher.curvature_propagation, key=key)
    assert_close(of_sequences(kind=fisher.automatic, key=key), drawn, 0)
    assert differ(drawn, of_sequences(kind=fisher.true))


def test_sequences_without_a_key_are_refused_with_both_ways_out(sequence):
    arguments = Model(sequence.apply, LIKELIHOOD), sequence.params, Examples(sequence.inputs)
    words = r"shape \(2, 3\), a sequence.*key=jax\.random\.key.*kind=fisher\.true.* 6 backward"
    for structure in (fisher.diagonal, fisher.kfac, fisher.full):
        with pytest.raises(ValueError, match=words):
            structure(*arguments)


def test_a_kind_that_makes_no_columns_is_refused(sequence):
    def doubled(likelihood, z, targets, key):
        return 2 * fisher.true(likelihood, z)  # twice in a tuple

    with pytest.raises(ValueError, match=r"shape \(1, 2, 3\); expected an array \[K, \*shape\]"):
        fisher.diagonal(
            Model(sequence.apply, LIKELIHOOD),
            sequence.params,
            Examples(sequence.inputs),
            kind=doubled,
        )
