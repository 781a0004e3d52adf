"""The point that damping pulls to: merges of exact posteriors, computed by normal equations."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, merging, solvers
from fisherjax._layers.layer import Layer
from fisherjax.algorithms import Update
from fisherjax.fisher import Dense, Diagonal, Kronecker
from fisherjax.fisher.operators import Template

MODEL = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
EXACT = solvers.conjugate_gradients(tolerance=1e-14, max_iterations=500)
SIZES, DAMPING = np.array([6, 9, 25]), 0.7
ROWS = ["fedfisher_diag", "fedfisher_full", "fedfisher_kfac", "fedfisher_sketched"]
ROWS += ["fedfisher_sequential", "regmean"]
SOME_LONG = [
    pytest.param(name, marks=pytest.mark.long) if not name.endswith(("kfac", "regmean")) else name
    for name in ROWS
]
LONG = "fedfisher_diag", "fedfisher_full", "fedfisher_sketched"
ADDED = ["regmean", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


def method_of(name, centre, **options):
    known = algorithms.options(name)
    options = {"solver": EXACT, "damping": DAMPING} | options if "solver" in known else options
    return algorithms.make(name, MODEL, centre=centre, **options)


def operator(name, gram):
    """The Fisher of a linear regression with inputs of this second moment, and two outputs."""
    template = Template.of({"w": np.zeros((4, 2))})
    if name.endswith("diag"):
        return {"fisher": Diagonal({"w": np.repeat(np.diag(gram)[:, None], 2, 1)})}
    if name.endswith("full"):
        return {"fisher": Dense(np.kron(gram, np.eye(2)), template)}
    if name == "regmean":
        return {"grams": {"w": gram}}
    factors = {"w": {"input": gram, "output": np.eye(2)}}
    return {"fisher": Kronecker(factors, {}, (Layer("w", None, (4, 2)),), template)}


def prior_of(name, mean):
    """The precision of the prior, per example, that the method's damping stands for."""
    if name == "regmean":  # shrinkage by 0.9 keeps a tenth of the diagonal
        return 0.1 * np.diag(np.diag(mean))
    return DAMPING * np.trace(mean) / len(mean) * np.eye(len(mean))


@pytest.fixture(params=SOME_LONG)
def world(request, x64):
    """Clients of 6, 9 and 25 examples; what they send follows from what they fitted."""
    name, source = request.param, np.random.default_rng(0)
    start = source.normal(size=(4, 2))
    grams, targets = [], []
    for size in SIZES:
        x = source.normal(size=(size, 4)) * [1.0, 2.0, 0.5, 1.5]
        x = np.linalg.qr(x)[0] * np.arange(1, 5) if name.endswith("diag") else x
        grams.append(x.T @ x / size)
        targets.append(x.T @ source.normal(size=(size, 2)) / size)
    mean = np.tensordot(SIZES / SIZES.sum(), grams, 1)
    # Only a share of RegMean's Gram matrix is the clients'; the rest is the prior.
    share = 0.9 if name == "regmean" else 1.0
    data = [(share * gram, share * target) for gram, target in zip(grams, targets, strict=True)]
    prior = prior_of(name, mean)

    def mode(pairs, sizes, strength):
        """The normal equations of regressions with this many times the prior."""
        left = sum(n * a for n, (a, _) in zip(sizes, pairs, strict=True))
        right = sum(n * b for n, (_, b) in zip(sizes, pairs, strict=True))
        precision = strength * SIZES.sum() * prior
        return np.linalg.solve(left + precision, right + precision @ start)

    def updates(strength):
        models = [mode([pair], [n], strength) for pair, n in zip(data, SIZES, strict=True)]
        operators = [operator(name, gram) for gram in grams]
        stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *operators)
        values = {"params": {"w": jnp.asarray(np.stack(models))}} | stacked
        return Update(values, method_of(name, "mean").kind)

    return types.SimpleNamespace(
        name=name,
        start={"w": jnp.asarray(start)},
        updates=updates,
        expected=mode(data, SIZES, 1),
    )


def merged(world, centre, updates, weights=SIZES, **options):
    method = method_of(world.name, centre, **options)
    return merging.merge(method, world.start, updates, weights)[0]["w"]


@pytest.mark.parametrize(("centre", "strength"), [("sum", 1), ("start", 0)])
def test_it_is_the_mode_of_all_data_with_the_prior_once(world, centre, strength):
    """Of clients that all have the prior, and of clients that have none."""
    found = merged(world, centre, world.updates(strength))
    np.testing.assert_allclose(found, world.expected, rtol=1e-9, atol=1e-11)
    others = {"mean", "start", "sum"} - {centre}
    for other in sorted(others):
        assert np.abs(merged(world, other, world.updates(strength)) - world.expected).max() > 1e-3


def test_one_client_comes_back_and_one_without_weight_does_not_count(world):
    updates = world.updates(1)
    own = np.asarray(updates.values["params"]["w"])
    np.testing.assert_allclose(merged(world, "sum", updates, [0, 3, 0]), own[1], rtol=1e-9)
    without = jax.tree.map(lambda x: x[np.array([0, 2])], updates)
    expected = merged(world, "sum", without, SIZES[[0, 2]])
    np.testing.assert_allclose(
        merged(world, "sum", updates, SIZES * [1, 0, 1]), expected, rtol=1e-9
    )


def test_without_damping_the_centre_does_not_matter(world):
    if world.name == "regmean":
        return
    found = [merged(world, c, world.updates(1), damping=0.0) for c in ("mean", "start", "sum")]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-8)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-8)


@pytest.mark.parametrize("centre", ["start", "sum"])
def test_the_scale_of_the_fishers_does_not_matter(world, centre):
    updates = world.updates(1)
    what = {name: x for name, x in updates.values.items() if name != "params"}
    # Both factors of a Kronecker product are scaled.
    scaled = jax.tree.map(lambda x: 1e-12 * x, what)
    tiny = Update(updates.values | scaled, updates.kind)
    expected = merged(world, centre, updates)
    np.testing.assert_allclose(merged(world, centre, tiny), expected, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:Blocks")
@pytest.mark.parametrize("centre", ["start", "sum"])
def test_without_curvature_the_centre_is_kept(world, centre):
    updates = world.updates(1)
    nothing = jax.tree.map(jnp.zeros_like, updates.values) | {"params": updates.values["params"]}
    start = np.asarray(world.start["w"])
    models = np.asarray(updates.values["params"]["w"])
    expected = start + (centre == "sum") * (models - start).sum(0)
    found = merged(world, centre, Update(nothing, updates.kind))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("world", ADDED, indirect=True)
@pytest.mark.parametrize("centre", ["start", "sum"])
def test_sums_of_groups_of_clients_add_up(world, centre):
    """In a stream and, with equal weights and without noise, under differential privacy."""
    method, updates = method_of(world.name, centre), world.updates(1)
    chunks = [(jax.tree.map(lambda x, i=i: x[i:][:1], updates), SIZES[i:][:1]) for i in range(3)]
    streamed = merging.merge_stream(method, world.start, chunks)[0]["w"]
    np.testing.assert_allclose(streamed, merged(world, centre, updates), rtol=1e-9)
    if world.name == "fedfisher_sketched":
        return
    private = fj.privacy.private(method, clip=1e6, noise_multiplier=0.0, damping=0.0)
    changes = {"params": {"w": updates.values["params"]["w"] - world.start["w"]}}
    sent = Update(updates.values | changes, private.kind)
    key = fj.privacy.system_key()
    found = merging.merge(private, world.start, sent, key=key)[0]["w"]
    expected = merged(world, centre, updates, None)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Blocks")
@pytest.mark.parametrize("name", ADDED)
def test_changes_of_a_thousand_clients_keep_their_digits(name):
    """In float32 the sum of their models is as long as a thousand of them."""
    draws, number = np.random.default_rng(0), 1_000
    start = draws.normal(size=(4, 2)).astype("f4")
    models = (start + 0.002 * draws.normal(size=(number, 4, 2))).astype("f4")
    shapes = operator(name, np.eye(4))
    nothing = jax.tree.map(lambda x: jnp.zeros((number, *jnp.shape(x)), "f4"), shapes)
    method = method_of(name, "sum")
    updates = Update({"params": {"w": jnp.asarray(models)}} | nothing, method.kind)
    found = merging.merge(method, {"w": jnp.asarray(start)}, updates)[0]["w"]
    expected = (models.astype(float) - start).sum(0)
    np.testing.assert_allclose(found - start, expected, atol=4e-4)


@pytest.mark.parametrize("name", ROWS)
def test_other_centres_are_refused_by_name(name):
    with pytest.raises(ValueError, match="centre is 'prior'; expected 'mean' or 'start' or 'sum'"):
        algorithms.make(name, MODEL, centre="prior")
    assert not method_of(name, "mean").link.reads_start
    assert method_of(name, "start").link.reads_start


@pytest.mark.parametrize("world", ["fedfisher_kfac", "regmean"], indirect=True)
def test_files_are_merged_with_the_start_and_refused_without(world, tmp_path):
    updates, paths = world.updates(1), []
    for client in range(3):
        paths.append(tmp_path / f"{client}.safetensors")
        one = jax.tree.map(lambda x, client=client: x[client], updates)
        how = {"algorithm": world.name, "examples": int(SIZES[client])}
        fj.files.save_update(paths[-1], one, client=str(client), **how)
    options = {} if world.name == "regmean" else {"damping": DAMPING}
    given = tmp_path / "merged.safetensors", paths
    with pytest.raises(ValueError, match=r"reads the model that clients started from.*--start"):
        fj.files.merge_files(*given, centre="sum", **options)
    with pytest.raises(ValueError, match=r"is not given for \['w'\]"):
        fj.files.merge_files(*given, centre="sum", start={"v": np.ones(1)}, **options)
    fj.files.merge_files(*given, centre="sum", start=world.start, **options)
    found = fj.files.load_arrays(given[0])
    chex.assert_trees_all_close(found["w"], world.expected, rtol=1e-3)


@pytest.mark.parametrize("name", [ROWS[0], ROWS[2], SOME_LONG[4]])
def test_models_that_hardly_differ_are_merged_as_well_as_others(x64, name):
    """As fine-tuned ones: the tolerance is relative to their differences, not to their weights."""
    source, found = np.random.default_rng(0), []
    grams = np.stack([(x := source.normal(size=(9, 4)) * np.arange(1, 5)).T @ x for _ in SIZES])
    sent = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *(operator(name, a) for a in grams))
    start, changes = source.normal(size=(4, 2)), source.normal(size=(3, 4, 2))
    method = algorithms.make(name, MODEL, damping=0.01)  # by the default solver
    for size in (1.0, 1e-5):
        values = {"params": {"w": jnp.asarray(start + size * changes)}} | sent
        merged, _, info = merging.merge(method, {"w": start}, Update(values, method.kind), SIZES)
        found.append((np.asarray(merged["w"]) - start) / size)
        assert all(status == solvers.Status.CONVERGED for status in jax.tree.leaves(info.status))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
