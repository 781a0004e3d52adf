"""FedFisher layer by layer against its formulas, written out in NumPy."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, fisher, merging, solvers

EXACT = solvers.conjugate_gradients(tolerance=1e-13, max_iterations=1000)
WEIGHTS = np.array([0.5, 0.2, 0.3])
# Named against the forward order, in which they are merged.
NAMES = "c", "b", "a"


def apply(params, x):
    hidden = jnp.tanh(x @ params["c"]["kernel"] + params["c"]["bias"])
    return jnp.tanh(hidden @ params["b"]) @ params["a"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
make = functools.partial(algorithms.fedfisher_sequential, MODEL, solver=EXACT, damping=0.05)


def branching(params, x):
    """A skip that passes by unchanged, one with a layer of its own, and one of the inputs."""
    stem = jnp.tanh(x @ params["e"])
    block = stem + jnp.tanh(stem @ params["d"]) @ params["c"]
    return jnp.tanh(block @ params["b"]) + x @ params["aa"] + block @ params["a"]


BRANCHING = fj.Model(branching, fj.likelihoods.categorical)
ORDER = "e", "d", "c", "b", "aa", "a"
BEFORE = (), (0,), (1,), (0, 2), (), (0, 2)
DAMPED = algorithms.fedfisher_sequential(BRANCHING, solver=EXACT, damping=0.05)


@functools.partial(jax.jit, static_argnums=0)
def blocks_of(kind, operator, params):
    return jax.vmap(kind.blocks)(operator, params)


def on_host(function, *trees):
    """Apply NumPy to the leaves: each eager operation of JAX on a new shape is another program."""
    return jax.tree.map(lambda *x: jnp.asarray(function(*map(np.asarray, x))), *trees)


def near(start, source):
    """Draw three clients' models."""
    return [on_host(lambda x: x + source.normal(size=x.shape) / 3, start) for _ in range(3)]


@pytest.fixture(scope="module")
def wide():
    """Compute in float64 in what the module's tests share, and in them."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def residual(wide):
    """Clients of a network that branches, whose layers differ in scale."""
    source = np.random.default_rng(2)
    shapes = {"e": (5, 4), "d": (4, 3), "c": (3, 4), "b": (4, 4), "aa": (5, 4), "a": (4, 4)}
    start = {name: source.normal(size=shape) for name, shape in shapes.items()}
    start["c"] = start["c"] * 3
    data = source.normal(size=(40, 5)), source.integers(0, 4, 40).astype(np.int32)
    federation = fj.clients.federation(data, np.split(np.arange(40), [9, 25]))
    models = near(start, source)
    return start, merging.summarize(DAMPED, models, federation, key=jax.random.key(0))


@pytest.fixture(scope="module")
def world(wide):
    source = np.random.default_rng(1)
    start = {
        "a": source.normal(size=(3, 4)),
        "b": source.normal(size=(4, 3)),
        "c": {"kernel": source.normal(size=(5, 4)), "bias": np.zeros(4)},
    }
    data = source.normal(size=(40, 5)), source.integers(0, 4, 40).astype(np.int32)
    federation = fj.clients.federation(data, np.split(np.arange(40), [9, 25]))
    updates = merging.summarize(make(), near(start, source), federation, key=jax.random.key(0))
    return start, updates


def changed(updates, change):
    factors = updates.values["fisher"].factors
    new = {name: change(name, dict(factor)) for name, factor in factors.items()}
    operator = updates.values["fisher"]
    operator = dataclasses.replace(operator, factors=new)
    return algorithms.Update(updates.values | {"fisher": operator}, updates.kind)


def written_out(updates, damping, passes, before, isotropy=0.3, pull=None):
    """The docstring's equations, one dense system a layer; whose inputs come from whom."""
    operator = updates.values["fisher"]
    models = blocks_of(type(operator), operator, updates.values["params"])
    models = [np.asarray(models[layer.kernel]) for layer in operator.layers]
    factors = [operator.factors[layer.kernel] for layer in operator.layers]
    inputs = [np.asarray(factor["input"]) for factor in factors]
    outputs = [np.asarray(factor["output"]) for factor in factors]
    clients, last = range(3), len(models) - 1
    sigma = np.zeros((last + 1, 3))

    def mean(matrix):
        return np.trace(matrix) / len(matrix)

    def size(x, a, g):
        return np.trace(x.T @ a @ x @ g)

    def share(places, errors, sizes):
        if not places:
            return np.zeros(3)
        return np.minimum(sum(errors[p] for p in places) / sum(sizes[p] for p in places), 1)

    vbar = np.tensordot(WEIGHTS, models[last], 1)
    shares = [
        size(vbar - v, a, np.eye(v.shape[-1])) / size(v, a, np.eye(v.shape[-1]))
        for v, a in zip(models[last], inputs[last], strict=True)
    ]
    iota = isotropy * max(0, 1 / max(WEIGHTS @ np.minimum(shares, 1), 0.1) - 2)
    inputs = [
        [x + (iota * mean(x) * np.eye(len(x)) if places else 0) for x in own]
        for own, places in zip(inputs, before, strict=True)
    ]
    for _ in range(passes):
        merged, errors, sizes = [], [], []
        for number, own in enumerate(models):
            rho = share(before[number], errors, sizes)
            a = [x + r * np.diag(np.diag(x)) for x, r in zip(inputs[number], rho, strict=True)]
            g = [np.eye(own.shape[-1])] * 3
            if number:
                g = [
                    (x + s * mean(x) * np.eye(len(x))) / np.sqrt(mean(x))
                    for x, s in zip(outputs[number], sigma[number], strict=True)
                ]
            terms = [WEIGHTS[i] * np.kron(a[i], g[i]) for i in clients]
            shift = damping * mean(sum(terms)) * np.eye(own[0].size)
            centre = np.tensordot(WEIGHTS, own, 1) if pull is None else pull[number]
            right = sum(term @ own[i].ravel() for i, term in enumerate(terms))
            right = right + shift @ centre.ravel()
            found = np.linalg.solve(sum(terms) + shift, right).reshape(own.shape[1:])
            unit = np.eye(own.shape[-1])
            errors.append(np.array([size(found - own[i], a[i], unit) for i in clients]))
            sizes.append(np.array([size(own[i], a[i], unit) for i in clients]))
            merged.append(found)
        sigma, errors, sizes = np.zeros((last + 1, 3)), {}, {}
        for number in range(last, 0, -1):
            after = [other for other in errors if number in before[other]]
            sigma[number] = share(after, errors, sizes)
            errors[number], sizes[number] = np.zeros(3), np.zeros(3)
            for i in clients:
                own, g = models[number][i], outputs[number][i]
                g = g + sigma[number, i] * mean(g) * np.eye(len(g))
                unit = np.eye(len(own))
                errors[number][i] = size(merged[number] - own, unit, g)
                sizes[number][i] = size(own, unit, g)
    return merged


def pull_of(centre, start, updates):
    """The centre's matrices in the forward order, from the models alone; None for the mean."""

    def matrices(params):
        params = jax.tree.map(np.asarray, params)
        biases = params["c"]["bias"][..., None, :]
        return [np.concatenate([params["c"]["kernel"], biases], -2), params["b"], params["a"]]

    if centre == "mean":
        return None
    pairs = zip(matrices(start), matrices(updates.values["params"]), strict=True)
    return [one + (centre == "sum") * (stacked - one).sum(0) for one, stacked in pairs]


@pytest.mark.long
@pytest.mark.parametrize(
    ("passes", "centre"),
    [(1, "sum"), (2, "mean"), pytest.param(3, "start", marks=pytest.mark.slow)],
)
def test_merges_are_those_of_the_formula(world, passes, centre):
    start, updates = world
    merged = merging.merge(make(passes=passes, centre=centre), start, updates, WEIGHTS)[0]
    pull = pull_of(centre, start, updates)
    first, second, third = written_out(updates, 0.05, passes, [(), (0,), (1,)], pull=pull)
    np.testing.assert_allclose(merged["c"]["kernel"], first[:-1], rtol=1e-8)
    np.testing.assert_allclose(merged["c"]["bias"], first[-1], rtol=1e-8)
    np.testing.assert_allclose(merged["b"], second, rtol=1e-8)
    np.testing.assert_allclose(merged["a"], third, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [2, 3])
def test_where_a_network_branches_errors_are_those_of_the_layers_that_feed_each(residual, passes):
    start, updates = residual
    operator = updates.values["fisher"]
    assert tuple(layer.kernel for layer in operator.layers) == ORDER
    assert operator.feeders == tuple(tuple(ORDER[i] for i in own) for own in BEFORE)
    method = algorithms.fedfisher_sequential(BRANCHING, solver=EXACT, damping=0.05, passes=passes)
    merged = merging.merge(method, start, updates, WEIGHTS)[0]
    for name, own in zip(ORDER, written_out(updates, 0.05, passes, BEFORE), strict=True):
        np.testing.assert_allclose(merged[name], own, rtol=1e-8)


@pytest.mark.slow
def test_uploads_that_do_not_say_who_feeds_whom_are_merged_as_a_chain(residual):
    start, updates = residual
    operator = dataclasses.replace(updates.values["fisher"], feeders=None)
    silent = algorithms.Update(updates.values | {"fisher": operator}, updates.kind)
    merged = merging.merge(DAMPED, start, silent, WEIGHTS)[0]
    chain = written_out(updates, 0.05, 2, [(), (0,), (1,), (2,), (3,), (4,)])
    for name, own in zip(ORDER, chain, strict=True):
        np.testing.assert_allclose(merged[name], own, rtol=1e-8)


@pytest.mark.slow
def test_where_a_network_branches_the_laws_hold(residual):
    start, updates = residual
    merged = merging.merge(DAMPED, start, updates, WEIGHTS)[0]
    turned = on_host(lambda x: x[::-1], updates)
    other = merging.merge(DAMPED, start, turned, 7 * WEIGHTS[::-1])[0]
    chex.assert_trees_all_close(merged, other, rtol=1e-7)
    alone = merging.merge(DAMPED, start, updates, [0.0, 1.0, 0.0])[0]
    second = on_host(lambda x: x[1], updates.values["params"])
    chex.assert_trees_all_close(alone, second, rtol=1e-7)
    same = on_host(lambda x: np.broadcast_to(x[1], x.shape), updates)
    chex.assert_trees_all_close(merging.merge(DAMPED, start, same, WEIGHTS)[0], second, rtol=1e-7)


@pytest.mark.long
def test_however_much_clients_agree_their_factors_still_count(world):
    start, updates = world
    own = updates.values["params"]
    alike = on_host(lambda x: x.mean(0) + (x - x.mean(0)) / 100, own)
    alike = algorithms.Update(updates.values | {"params": alike}, updates.kind)
    merged = merging.merge(make(), start, alike, WEIGHTS)[0]
    _, second, third = written_out(alike, 0.05, 2, [(), (0,), (1,)])
    np.testing.assert_allclose(merged["b"], second, rtol=1e-8)
    np.testing.assert_allclose(merged["a"], third, rtol=1e-8)


@pytest.mark.long
def test_clients_that_do_not_agree_count_by_their_factors_alone(world):
    start, updates = world
    signs = np.array([1.0, -1.0, -1.0])[:, None, None]
    apart = updates.values["params"] | {"a": signs * np.asarray(updates.values["params"]["a"])}
    apart = algorithms.Update(updates.values | {"params": apart}, updates.kind)
    found, expected = (
        merging.merge(method, start, apart, WEIGHTS)[0] for method in (make(), make(isotropy=0.0))
    )
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.long
def test_with_identities_it_is_regmean_of_every_layer(world):
    """Least squares of the clients' outputs on the clients' inputs, biases included."""
    start, updates = world
    method = make(damping=0.0, outputs=False, passes=0, isotropy=0.0)
    merged = merging.merge(method, start, updates, WEIGHTS)[0]
    operator = updates.values["fisher"]
    models = blocks_of(type(operator), operator, updates.values["params"])
    blocks = jax.jit(type(operator).blocks)(operator, merged)
    for name, factor in operator.factors.items():
        grams = WEIGHTS[:, None, None] * np.asarray(factor["input"])
        expected = np.linalg.solve(grams.sum(0), (grams @ models[name]).sum(0))
        np.testing.assert_allclose(blocks[name], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.long
def test_without_errors_equal_curvatures_give_the_weighted_mean(world):
    start, updates = world

    def equal(_, factor):
        return on_host(lambda x: np.broadcast_to(x[1], x.shape), factor)

    merged = merging.merge(make(passes=0), start, changed(updates, equal), WEIGHTS)[0]
    mean = on_host(lambda x: np.tensordot(WEIGHTS, x, 1), updates.values["params"])
    chex.assert_trees_all_close(merged, mean, rtol=1e-9)


@pytest.fixture
def x32():
    """Compute in float32, whatever the module's other tests do."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@functools.cache
def narrow():
    """Give clients in float32: method, start, what they send, and what it merges to."""
    source = np.random.default_rng(0)
    params = {"a": source.normal(size=(4, 3)), "b": source.normal(size=(3, 2))}
    params = jax.tree.map(np.float32, params)
    model = fj.Model(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], fj.likelihoods.categorical)
    data = source.normal(size=(30, 4)).astype(np.float32), source.integers(0, 2, 30, np.int32)
    federation = fj.clients.federation(data, np.split(np.arange(30), [9, 20]))
    models = [jax.tree.map(lambda x: x + np.float32(source.normal() / 2), params) for _ in range(3)]
    method = algorithms.fedfisher_sequential(model)
    updates = merging.summarize(method, models, federation, key=jax.random.key(0))
    return method, params, updates, merging.merge(method, params, updates)[0]


@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e30])
def test_the_scale_of_a_layer_does_not_matter(scale):
    """In float32, inputs' factors by one power and outputs' by another."""
    method, params, updates, one = narrow()

    def scaled(name, factor):
        return factor | {"output": factor["output"] * np.float32(scale)} if name == "b" else factor

    other = merging.merge(method, params, changed(updates, scaled))[0]
    chex.assert_trees_all_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_where_nobody_has_curvature_inputs_alone_count(world):
    start, updates = world
    nothing = changed(updates, lambda _, f: f | {"output": np.zeros_like(f["output"])})
    method = make()
    found = merging.merge(method, start, nothing, WEIGHTS)[0]
    expected = merging.merge(make(outputs=False), start, updates, WEIGHTS)[0]
    chex.assert_trees_all_close(found, expected, rtol=1e-9)


def test_a_client_without_curvature_has_no_vote_but_in_the_first_layer(world):
    start, updates = world
    sure = np.array([1.0, 0.0, 1.0])[:, None, None]
    silent = changed(updates, lambda _, f: f | {"output": f["output"] * sure})
    # Not what all outputs have in common, which softmax does not see.
    other = updates.values["params"]
    other = other | {"a": other["a"] + np.array([[[0.0]], [[1]], [[0]]]) * [1, -1, 0, 0]}
    other = algorithms.Update(silent.values | {"params": other}, silent.kind)
    # Whether clients agree is asked of it too.
    method = make(isotropy=0.0)
    found, moved = (merging.merge(method, start, sent)[0] for sent in (silent, other))
    # Damping pulls towards the mean of all, by a third of what was added at most.
    assert 0 < jnp.abs(found["a"] - moved["a"]).max() < 0.05
    chex.assert_trees_all_close(found["c"], moved["c"])


def test_who_has_no_weight_is_not_asked_for_the_scale(world):
    """Where all others have no curvature, its own would silence them."""
    start, updates = world
    alone = np.array([0.0, 1.0, 0.0])[:, None, None]
    curved = changed(updates, lambda _, f: f | {"output": f["output"] * alone})
    flat = changed(updates, lambda _, f: f | {"output": np.zeros_like(f["output"])})
    found, expected = (
        merging.merge(make(), start, sent, [0.5, 0.0, 0.5])[0] for sent in (curved, flat)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [2, 0])
def test_every_form_of_layer_is_merged(passes):
    """Tables, scales, attention and tied leaves: equal clients come back."""
    network = fj.networks.Transformer(num_classes=7, context=5)
    tokens = np.random.default_rng(0).integers(0, 7, (6, 5)).astype(np.int32)
    params = fj.networks.init(network, jax.random.key(0), tokens[:1])
    model = fj.Model(fj.networks.apply_fn(network), fj.likelihoods.categorical)
    federation = fj.clients.federation((tokens, tokens), np.split(np.arange(6), 2))
    method = algorithms.fedfisher_sequential(model, passes=passes)
    updates = merging.summarize(method, [params] * 2, federation, key=jax.random.key(0))
    merged, _, info = merging.merge(method, params, updates)
    chex.assert_trees_all_close(merged, params, rtol=1e-5, atol=1e-6)
    assert set(info.status) == set(updates.values["fisher"].block_means())


def test_uploads_are_those_of_fedfisher(world):
    assert make().kind == algorithms.fedfisher(MODEL).kind
    assert make(fallback=fisher.zero).kind != make().kind


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"passes": -1}, "passes is -1"),
        ({"isotropy": -1.0}, "isotropy is -1.0"),
        ({"damping": -1.0}, "damping is -1.0"),
        ({"solver": 3}, "solver is 3"),
        ({"kind": "true"}, "kind is 'true'"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        algorithms.fedfisher_sequential(MODEL, **options)
