"""Laws that every merging method obeys, in one table of methods."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import aggregation, clients, data, fisher, likelihoods, solvers, tree

SIZES = (7, 3, 9, 5)
WEIGHTS = [0.1, 0.4, 0.2, 0.3]


def apply(params, x):
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"]


def fedfisher(structure, damping=None):
    exact = solvers.conjugate_gradients(tolerance=1e-12, max_iterations=500)
    return aggregation.fedfisher(
        apply, likelihoods.categorical, fisher=structure, damping=damping, solver=exact
    )


def fedlpa():
    exact = solvers.conjugate_gradients(tolerance=1e-12, max_iterations=500)
    return aggregation.fedlpa(apply, likelihoods.categorical, solver=exact)


METHODS = {
    "fedavg": aggregation.fedavg(),
    "fisher_merge": aggregation.fisher_merge(apply, likelihoods.categorical),
    "fedfisher diagonal": fedfisher(fisher.diagonal),
    "fedfisher kfac": fedfisher(fisher.kfac),
    "fedfisher full": fedfisher(fisher.full, damping=0.1),
    "fedlpa": fedlpa(),
    "regmean": aggregation.regmean(apply),
}
FISHER = [name for name in METHODS if "fisher" in name]


def draw_params(seed):
    draw = np.random.default_rng(seed).normal
    shapes = {"first": {"bias": (3,), "kernel": (4, 3)}, "second": {"kernel": (3, 2)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(draw(size=shape)), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


@pytest.fixture(scope="module")
def world():
    """Four clients of different sizes, and what each sends by every method, in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    source = np.random.default_rng(0)
    inputs, targets = source.normal(size=(24, 4)), source.integers(0, 2, 24)
    partition = np.split(source.permutation(24), np.cumsum(SIZES)[:-1])
    federation = clients.federation((inputs, targets), partition)
    models = [draw_params(seed) for seed in range(4)]
    updates = {
        name: clients.summarize(method, models, federation, key=jax.random.key(0))
        for name, method in METHODS.items()
    }
    yield SimpleNamespace(federation=federation, models=models, updates=updates)
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(params=METHODS)
def method(request):
    return SimpleNamespace(name=request.param, aggregator=METHODS[request.param])


@pytest.fixture
def sent(x64, world, method):
    """Stacked updates, and the merge of them."""
    updates = world.updates[method.name]

    def merge(updates, weights=WEIGHTS, **options):
        return aggregation.merge(method.aggregator, world.models[0], updates, weights, **options)[0]

    return SimpleNamespace(updates=updates, merge=merge, start=world.models[0])


def one(updates, client):
    return jax.tree.map(lambda leaf: leaf[client], updates)


def pick(updates, rows):
    return jax.tree.map(lambda leaf: leaf[np.asarray(rows)], updates)


def assert_same(left, right, tolerance=1e-9):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=tolerance), left, right
    )


def plain_mean(models, weights):
    return tree.weighted_sum(tree.stack(models), jnp.asarray(weights))


def test_a_single_client_gets_its_model_back(sent, world):
    for client in range(4):
        assert_same(sent.merge([one(sent.updates, client)], None), world.models[client], 1e-12)


def test_equal_clients_get_their_model_back(sent, world):
    """Whatever their Fishers: only the models are equal."""
    models = tree.stack([world.models[2]] * 4)
    assert_same(sent.merge(sent.updates | {"params": models}), world.models[2], 1e-12)


def test_the_order_of_clients_does_not_matter(sent):
    order = [2, 0, 3, 1]
    merged = sent.merge(pick(sent.updates, order), np.asarray(WEIGHTS)[order])
    assert_same(merged, sent.merge(sent.updates))


def test_only_the_ratios_of_weights_count(sent):
    expected = sent.merge(sent.updates)
    assert_same(sent.merge(sent.updates, 1e5 * np.asarray(WEIGHTS)), expected)
    assert_same(sent.merge(sent.updates, [1, 4, 2, 3]), expected)
    assert_same(sent.merge(sent.updates, None), sent.merge(sent.updates, [3] * 4))


def test_a_client_of_weight_zero_has_no_influence(sent):
    disturbed = jax.tree.map(lambda leaf: leaf.at[1].mul(-100), sent.updates)
    without = sent.merge(pick(sent.updates, [0, 2, 3]), [1, 2, 3])
    assert_same(sent.merge(disturbed, [1, 0, 2, 3]), without)


def test_moving_all_models_moves_the_merged_one_with_them(sent):
    shift = draw_params(9)
    moved = jax.tree.map(lambda stacked, by: stacked + by, sent.updates["params"], shift)
    merged = sent.merge(sent.updates | {"params": moved})
    assert_same(merged, jax.tree.map(jnp.add, sent.merge(sent.updates), shift))


def test_compiled_and_plain_merges_agree(sent, world, method):
    compiled = jax.jit(lambda p, u, w: aggregation.merge(method.aggregator, p, u, w)[0])
    merged = compiled(sent.start, sent.updates, jnp.asarray(WEIGHTS))
    assert_same(merged, sent.merge(sent.updates))


def test_a_list_of_updates_is_the_same_as_a_stack(sent):
    updates = [one(sent.updates, client) for client in range(4)]
    assert_same(sent.merge(updates), sent.merge(sent.updates), 0)


def test_a_second_merge_compiles_nothing(sent, compilations):
    sent.merge(sent.updates)
    others = jax.tree.map(lambda leaf: leaf * 2, sent.updates)
    with compilations() as count:
        sent.merge(others, [0.3, 0.2, 0.4, 0.1])
    assert count() == 0


def test_sums_of_groups_of_clients_add_up(sent, world, method):
    aggregator, weights = method.aggregator, jnp.asarray(WEIGHTS)
    if aggregator.reduce is None:
        assert method.name in ("fedfisher kfac", "fedlpa")  # whose server needs each update
        return
    groups = [
        aggregator.reduce(pick(sent.updates, rows), weights[jnp.asarray(rows)])
        for rows in ([3, 0], [1, 2])
    ]
    sums = jax.tree.map(jnp.add, *groups)
    merged, state, _ = aggregator.finish(sums, sent.start, aggregator.init(sent.start))
    assert state == ()
    assert_same(merged, sent.merge(sent.updates))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_structure_and_dtype_are_those_of_params(sent, world, method, dtype):
    def narrow(leaf):
        return leaf.astype(dtype)

    updates = sent.updates | {"params": jax.tree.map(narrow, sent.updates["params"])}
    start = jax.tree.map(narrow, world.models[0])
    merged, _ = aggregation.merge(method.aggregator, start, updates, WEIGHTS)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(dtype)}
    expected = jax.tree.map(narrow, sent.merge(sent.updates))
    error = jax.tree.map(lambda a, b: jnp.abs(a - b).astype(float).max(), merged, expected)
    assert max(jax.tree.leaves(error)) < (0.2 if dtype == "bfloat16" else 1e-3)
    alone, _ = aggregation.merge(method.aggregator, start, [one(updates, 2)])
    assert_same(alone, jax.tree.map(narrow, world.models[2]), 0)


def test_equal_fishers_give_the_weighted_mean(sent, world, method):
    if method.name == "fedavg":
        expected = plain_mean(world.models, WEIGHTS)
        assert_same(sent.merge(sent.updates), expected)
        return
    what = "grams" if method.name == "regmean" else "fisher"
    equal = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[1], leaf.shape), sent.updates[what])
    merged = sent.merge(sent.updates | {what: equal})
    expected = plain_mean(world.models, WEIGHTS)
    if method.name == "regmean":  # which takes the plain mean of what is not a dense kernel
        expected["first"]["bias"] = plain_mean(world.models, [0.25] * 4)["first"]["bias"]
    assert_same(merged, expected)


@pytest.mark.parametrize("structure", [fisher.diagonal, fisher.kfac, fisher.full])
def test_damping_leads_from_the_solution_to_the_weighted_mean(x64, world, structure):
    updates = world.updates[f"fedfisher {structure.__name__}"]
    mean = plain_mean(world.models, WEIGHTS)
    distances = []
    for damping in (0.01, 1.0, 100.0, 1e8):
        aggregator = fedfisher(structure, damping)
        merged, _ = aggregation.merge(aggregator, world.models[0], updates, WEIGHTS)
        gap = jax.tree.map(jnp.subtract, merged, mean)
        distances.append(float(jnp.sqrt(tree.inner(gap, gap))))
    assert np.all(np.diff(distances) < 0)
    assert distances[-1] < 1e-6 < 1e-2 < distances[0]


def test_a_diverged_client_is_named(sent):
    diverged = jax.tree.map(lambda leaf: leaf, sent.updates)
    diverged["params"]["second"]["kernel"] = (
        sent.updates["params"]["second"]["kernel"].at[1, 0, 0].set(jnp.nan).at[3, 0, 1].set(jnp.inf)
    )
    with pytest.raises(ValueError, match=r"clients \[1, 3\].*'params/second/kernel'.*'drop'"):
        sent.merge(diverged)
    merged = sent.merge(diverged, on_nonfinite="drop")
    assert_same(merged, sent.merge(sent.updates, [0.1, 0, 0.2, 0]))


def test_updates_go_through_a_file(sent, world, method, tmp_path):
    """Each client writes one; the server knows the structure from `jax.eval_shape`."""
    examples = clients.view(world.federation, 0)
    like = jax.eval_shape(
        method.aggregator.summarize, jax.random.key(0), world.models[0], examples, None
    )
    suffixes = (".npz", ".safetensors", ".npz", ".safetensors")
    loaded = []
    for client, suffix in enumerate(suffixes):
        path = tmp_path / f"client{client}{suffix}"
        data.save_arrays(path, one(sent.updates, client))
        loaded.append(data.load_arrays(path, like=like))
    assert_same(sent.merge(loaded), sent.merge(sent.updates), 0)


def test_updates_that_do_not_fit_together_are_named(sent, method):
    updates = [one(sent.updates, client) for client in range(3)]
    other = updates[1]["params"]["first"] | {"kernel": jnp.ones((5, 3))}
    updates[1]["params"] = updates[1]["params"] | {"first": other}
    with pytest.raises(ValueError, match=r"'params/first/kernel' of client 1 has shape \(5, 3\)"):
        sent.merge(updates, None)
    del updates[2]["params"]["second"]
    updates[1] = updates[0]
    with pytest.raises(ValueError, match="Client 2 holds another tree than client 0"):
        sent.merge(updates, None)


def test_an_empty_client_is_legal(x64, world, method):
    """No examples: weight zero, finite update, no influence."""
    partition = np.split(np.arange(24), [9, 9, 17])
    source = (world.federation.inputs, world.federation.targets)
    federation = clients.federation(source, partition)
    aggregator, key = method.aggregator, jax.random.key(0)
    updates = clients.summarize(aggregator, world.models, federation, key=key)
    merged, _ = aggregation.merge(aggregator, world.models[0], updates, federation.weights)
    others = pick(updates, [0, 2, 3])
    expected, _ = aggregation.merge(aggregator, world.models[0], others, [9, 8, 7])
    assert_same(merged, expected)
