"""FedLPA against its equations, written out with dense matrices."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fisherjax as fj
from fisherjax import algorithms, fisher, likelihoods, merging, nn, solvers, training, tree
from fisherjax._layers.layer import Layer

WEIGHTS = np.array([0.5, 0.2, 0.3])
DAMPING = 0.02
NUMBERS = ("NHWC", "HWIO", "NHWC")
EXACT = solvers.conjugate_gradients(tolerance=1e-13, max_iterations=500)
SOLVERS = {
    "cg": EXACT,
    "ea": algorithms.expectation_approximation(),
    "gd": algorithms.residual_descent(steps=50),
}


def network(params, x, disturbances=(0, 0, 0), convolution=lax.conv_general_dilated):
    """A convolution and a dense layer with biases, and a dense layer without, on 3 x 3 images."""
    x = convolution(x, params["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=NUMBERS)
    x = jnp.tanh(x + params["conv"]["bias"] + disturbances[0]).reshape(x.shape[0], -1)
    x = x @ params["dense1"]["kernel"] + params["dense1"]["bias"] + disturbances[1]
    return jnp.tanh(x) @ params["dense2"]["kernel"] + disturbances[2]


def apply(params, x):
    return network(params, x, convolution=nn.conv_general_dilated)


def fedlpa(apply=apply, **options):
    options = {"damping": DAMPING, "solver": EXACT} | options
    return algorithms.fedlpa(fj.Model(apply, likelihoods.categorical), **options)


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


@pytest.fixture(scope="module")
def world():
    """Three clients' models and data, and what they send."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    source = np.random.default_rng(5)
    # Two are equal: another number of examples is another program.
    images = [source.normal(size=(n, 3, 3, 1)) for n in (6, 11, 6)]
    labels = [source.integers(0, 3, len(x)) for x in images]
    models = [draw(seed) for seed in range(3)]
    sent = {authors: _send(models, images, labels, authors) for authors in (True, False)}
    yield SimpleNamespace(images=images, labels=labels, models=models, sent=sent)
    jax.config.update("jax_enable_x64", before)


def _send(models, images, labels, authors_split):
    return send(fedlpa(authors_split=authors_split), models, images, labels)


def send(method, models, images, labels):
    """Let each client send, and stack what they do."""
    examples = map(fj.Examples, images, labels)
    pairs = zip(map(training.Trained, models), examples, strict=True)
    values = [method.summarize(None, trained, e, ())[0] for trained, e in pairs]
    return algorithms.Update(tree.stack(values), method.kind)


@pytest.fixture
def updates(x64, world):
    return world.sent[True]


def changed(updates, **values):
    return algorithms.Update(updates.values | values, updates.kind)


def with_factors(updates, change):
    """Change the Kronecker factors of each layer."""
    sent = updates.values["fisher"]
    factors = {name: pair | change(pair) for name, pair in sent.factors.items()}
    return changed(updates, fisher=dataclasses.replace(sent, factors=factors))


def merged_by(method, updates, weights=WEIGHTS):
    # Those of another split are taken too: the equation is the same.
    updates = algorithms.Update(updates.values, method.kind)
    start = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), updates.values["params"])
    merged, _, info = merging.merge(method, start, updates, weights)
    return merged, info


def assert_close(left, right, tolerance=1e-10):
    left, right = jax.device_get((left, right))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right
    )


def mean(stacked):
    return jax.tree.map(lambda x: np.tensordot(WEIGHTS, np.asarray(x), 1), stacked)


def matrices(params):
    """Each layer as its matrix, the bias as the last row."""
    stacked = {
        f"{name}/kernel": np.reshape(layer["kernel"], (-1, layer["kernel"].shape[-1]))
        for name, layer in params.items()
    }
    for name in ("conv", "dense1"):
        bias = np.asarray(params[name]["bias"])[None]
        stacked[f"{name}/kernel"] = np.concatenate([stacked[f"{name}/kernel"], bias])
    return stacked


def client(stacked, index):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), stacked)


def damped_factors(updates, name):
    factor = jax.device_get(updates.values["fisher"].factors[name])
    root = np.sqrt(DAMPING)
    inputs, outputs = factor["input"], factor["output"]
    return inputs + root * np.eye(inputs.shape[-1]), outputs + root * np.eye(outputs.shape[-1])


def models_of(updates, name):
    return np.stack([matrices(client(updates.values["params"], i))[name] for i in range(3)])


def right_side(updates, name):
    a, g = damped_factors(updates, name)
    return np.einsum("m,mij,mjk,mkl->il", WEIGHTS, a, models_of(updates, name), g)


LAYERS = ("conv/kernel", "dense1/kernel", "dense2/kernel")


# The clients' half


@pytest.mark.long
def test_factors_are_those_of_the_paper(x64, world):
    """Conv: A is averaged over locations and divided by them again, G is summed over them."""
    x, y, w = (column[1] for column in (world.images, world.labels, world.models))
    n = len(x)

    @jax.jit
    def tangents(x):
        zeros = (jnp.zeros((n, 2, 2, 2)), jnp.zeros((n, 4)), jnp.zeros((n, 3)))
        likelihood = likelihoods.categorical.negative_log_likelihood
        return jax.grad(lambda at: likelihood(network(w, x, at), y).sum())(zeros)

    corners = [x[:, i : i + 2, j : j + 2, 0].reshape(n, 4) for i in range(2) for j in range(2)]
    patches = np.stack([*corners, np.ones((n, 4))], -1)
    kernel = np.asarray(w["conv"]["kernel"]).reshape(4, 2)
    hidden = np.tanh(patches[..., :4] @ kernel + w["conv"]["bias"]).reshape(n, 8)
    first = np.hstack([hidden, np.ones((n, 1))])
    second = np.tanh(hidden @ w["dense1"]["kernel"] + w["dense1"]["bias"])
    conv, *dense = map(np.asarray, tangents(x))
    conv = conv.reshape(n, 4, 2)
    expected = {
        "conv/kernel": (
            np.einsum("nta,ntb->ab", patches, patches) / (n * 4**2),
            4 / n * np.einsum("nto,ntp->op", conv, conv),
        ),
        "dense1/kernel": (first.T @ first / n, dense[0].T @ dense[0] / n),
        "dense2/kernel": (second.T @ second / n, dense[1].T @ dense[1] / n),
    }
    for name, pair in expected.items():
        factor = client(world.sent[True].values["fisher"].factors[name], 1)
        assert_close((factor["input"], factor["output"]), pair)


def test_the_two_splits_are_one_fisher_information(x64, world):
    sent = [updates.values["fisher"] for updates in world.sent.values()]
    dense = jax.jit(fisher.Kronecker.dense)
    authors, kfc = (jax.jit(jax.vmap(fisher.Kronecker.dense))(each) for each in sent)
    assert_close(authors, kfc)
    model = fj.Model(apply, likelihoods.categorical)
    examples = fj.Examples(world.images[0], world.labels[0])
    alone = fisher.kfac(model, world.models[0], examples, kind=fisher.empirical)
    assert_close(np.asarray(kfc)[0], dense(alone))


# The server's half


@pytest.mark.long
def test_conjugate_gradients_solve_the_dense_system(updates):
    merged, info = merged_by(fedlpa(), updates)
    assert all(jax.tree.leaves(info.converged))
    for name, value in matrices(merged).items():
        a, g = damped_factors(updates, name)
        system = sum(p * np.kron(x, y) for p, x, y in zip(WEIGHTS, a, g, strict=True))
        expected = np.linalg.solve(system, right_side(updates, name).ravel())
        np.testing.assert_allclose(value.ravel(), expected, rtol=1e-8, atol=1e-8)


def test_the_expectation_approximation_inverts_the_mean_factors(updates):
    merged, _ = merged_by(fedlpa(solver=SOLVERS["ea"]), updates)
    for name, value in matrices(merged).items():
        a, g = (np.einsum("m,mij->ij", WEIGHTS, x) for x in damped_factors(updates, name))
        expected = np.linalg.inv(a) @ right_side(updates, name) @ np.linalg.inv(g)
        assert_close(value, expected)


@pytest.mark.parametrize("side", ["input", "output"])
def test_the_expectation_approximation_is_exact_where_one_factor_is_equal(updates, side):
    updates = with_factors(
        updates, lambda pair: {side: np.broadcast_to(np.asarray(pair[side])[1], pair[side].shape)}
    )
    exact, approximate = (merged_by(fedlpa(solver=SOLVERS[s]), updates)[0] for s in ("cg", "ea"))
    assert_close(approximate, exact)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("balanced", [False, True])
def test_equal_factors_give_the_weighted_mean(updates, name, balanced):
    equal = jax.tree.map(
        lambda leaf: np.broadcast_to(np.asarray(leaf)[1], leaf.shape), updates.values["fisher"]
    )
    method = fedlpa(solver=SOLVERS[name], balanced=balanced)
    merged, _ = merged_by(method, changed(updates, fisher=equal))
    assert_close(merged, mean(updates.values["params"]))


@pytest.mark.parametrize("name", SOLVERS)
def test_a_single_client_gets_its_model_back(updates, name):
    for i in range(3):
        alone = client(updates, slice(i, i + 1))
        merged, _ = merged_by(fedlpa(solver=SOLVERS[name]), alone, weights=None)
        assert_close(merged, client(updates.values["params"], i))


# Its solver is asked for more digits than rounding leaves.
@pytest.mark.filterwarnings("ignore:Blocks")
def test_damping_in_balance_does_not_see_the_split(x64, world):
    """Without balance it does: a factor that is tiny has more of it."""
    authors, kfc = world.sent.values()
    balanced, plain = fedlpa(balanced=True), fedlpa()
    assert_close(merged_by(balanced, authors)[0], merged_by(balanced, kfc)[0])
    gap = np.subtract(*(merged_by(plain, sent)[0]["conv"]["kernel"] for sent in (authors, kfc)))
    assert np.abs(gap).max() > 1e-3


def silenced(factors):
    return np.asarray(factors) * np.array([1, 0, 1])[:, None, None]


@pytest.mark.filterwarnings("ignore:Blocks")
@pytest.mark.parametrize("perfect", [False, True])
def test_balance_is_the_ratio_of_mean_eigenvalues(updates, perfect):
    """It is one for a client whose gradients vanish, because it fits its data perfectly."""
    if perfect:
        updates = with_factors(updates, lambda pair: {"output": silenced(pair["output"])})
    merged, _ = merged_by(fedlpa(balanced=True), updates)
    for name, value in matrices(merged).items():
        pairs = updates.values["fisher"].factors[name]
        system, right = 0, 0
        for i, (p, v) in enumerate(zip(WEIGHTS, models_of(updates, name), strict=True)):
            a, g = (np.asarray(pairs[side])[i] for side in ("input", "output"))
            means = [np.linalg.eigvalsh(factor).mean() for factor in (a, g)]
            pi = np.sqrt(means[0] / means[1]) if g.any() else 1
            a = a + pi * np.sqrt(DAMPING) * np.eye(len(a))
            g = g + np.sqrt(DAMPING) / pi * np.eye(len(g))
            system, right = system + p * np.kron(a, g), right + p * a @ v @ g
        assert_close(value.ravel(), np.linalg.solve(system, right.ravel()), 1e-8)


def objective(updates, params):
    """||sum_i p_i A_i V G_i - Z||^2 / N of each layer."""
    values = {}
    for name, v in matrices(params).items():
        product = np.einsum("m,mij,jk,mkl->il", WEIGHTS, *_around(updates, name, v))
        values[name] = np.square(product - right_side(updates, name)).mean()
    return values


def _around(updates, name, v):
    a, g = damped_factors(updates, name)
    return a, v, g


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_descent_decreases_its_objective_monotonically(updates, scale):
    """However large the operator is: the step is capped."""
    large = jax.tree.map(lambda leaf: scale * np.asarray(leaf), updates.values["fisher"])
    updates = changed(updates, fisher=large)
    start = objective(updates, merged_by(fedlpa(solver=SOLVERS["ea"]), updates)[0])
    before, values = start, []
    for steps in (1, 2, 3, 10, 50, 200):
        solver = algorithms.residual_descent(steps=steps)
        after = objective(updates, merged_by(fedlpa(solver=solver), updates)[0])
        assert all(after[name] < before[name] for name in LAYERS)
        values, before = [*values, after], after
    assert all(values[-1][name] < 0.9 * start[name] for name in LAYERS)


def test_a_descent_step_is_two_eta_over_the_number_of_entries(updates):
    """Where that is below the cap."""
    rate = 1e-3
    solver = algorithms.residual_descent(steps=1, learning_rate=rate)
    start, _ = merged_by(fedlpa(solver=SOLVERS["ea"]), updates)
    after, _ = merged_by(fedlpa(solver=solver), updates)
    for name, v in matrices(start).items():
        a, g = damped_factors(updates, name)
        residual = np.einsum("m,mij,jk,mkl->il", WEIGHTS, a, v, g) - right_side(updates, name)
        slope = np.einsum("m,mij,jk,mkl->il", WEIGHTS, a, residual, g)
        assert_close(matrices(after)[name], v - 2 * rate / v.size * slope)


def test_the_cap_is_one_over_the_largest_eigenvalue_squared(updates):
    solver = algorithms.residual_descent(steps=1, learning_rate=1e12, power_iterations=2000)
    start, _ = merged_by(fedlpa(solver=SOLVERS["ea"]), updates)
    after, _ = merged_by(fedlpa(solver=solver), updates)
    for name, v in matrices(start).items():
        a, g = damped_factors(updates, name)
        system = sum(p * np.kron(x, y) for p, x, y in zip(WEIGHTS, a, g, strict=True))
        slope = system @ (system @ v.ravel() - right_side(updates, name).ravel())
        step = slope / np.linalg.eigvalsh(system).max() ** 2
        assert_close(matrices(after)[name].ravel(), v.ravel() - step, 1e-6)


def test_descent_reaches_the_exact_solution_in_the_end(updates):
    exact, _ = merged_by(fedlpa(damping=1.0), updates)
    solver = algorithms.residual_descent(steps=20_000)
    descended, info = merged_by(fedlpa(damping=1.0, solver=solver), updates)
    assert_close(descended, exact, 1e-6)
    assert all(jax.tree.leaves(info.converged))
    _, info = merged_by(fedlpa(damping=1.0, solver=SOLVERS["ea"]), updates)
    assert not all(jax.tree.leaves(info.converged))


@pytest.mark.long
def test_the_expectation_approximation_is_a_good_preconditioner(x64):
    """Ten clients: at most 13 iterations, and several times more without it."""
    source = np.random.default_rng(0)

    def factor(size, scale):
        # Eigenvalues that fall off, in directions that the clients share more or less.
        common = source.normal(size=(size, size)) * np.exp(-np.arange(size) / 8)
        own = common * np.exp(source.normal(size=(10, 1, size)) / 2)
        return jnp.asarray(scale * own @ own.swapaxes(1, 2) / size)

    layer = Layer("w", None, (30, 12))
    params = {"w": jnp.asarray(source.normal(size=(10, 30, 12)))}
    template = fisher.operators.Template.of(client(params, 0))
    factors = {"w": {"input": factor(30, 1.0), "output": factor(12, 0.1)}}
    values = {"params": params, "fisher": fisher.Kronecker(factors, {}, (layer,), template)}
    sent = algorithms.Update(values, "")
    counts = []
    for precondition in (True, False):

        def solve(problem, precondition=precondition):
            cg = solvers.conjugate_gradients(tolerance=1e-8, max_iterations=1000)
            return cg(problem if precondition else problem._replace(precondition=None))

        _, info = merged_by(fedlpa(damping=1e-3, solver=solve), sent, np.ones(10))
        assert info.converged["w"]
        counts.append(int(info.iterations["w"]))
    assert counts[0] <= 13 < 5 * counts[0] < counts[1], counts


# Edges


@pytest.mark.long
def test_leaves_without_a_layer_are_refused_or_merged_by_mean_or_diagonal(x64, world):
    def scaled(params, x):
        return (x.reshape(-1, 9) * jnp.sin(params["scale"])) @ params["w"]

    source = np.random.default_rng(0)
    models = {"scale": source.normal(size=(3, 9)), "w": source.normal(size=(3, 9, 3))}

    def method(fallback, name="cg"):
        return fedlpa(scaled, solver=SOLVERS[name], fallback=fallback)

    def sent_by(fallback):
        first = ([column[:4] for column in columns] for columns in (world.images, world.labels))
        return send(method(fallback), [client(models, i) for i in range(3)], *first)

    with pytest.raises(ValueError, match=r"(?s)'scale'.*fallback=fisher\.zero"):
        sent_by(None)
    sent = sent_by(fisher.zero)
    for name in SOLVERS:
        merged, _ = merged_by(method(fisher.zero, name), sent)
        assert_close(merged["scale"], WEIGHTS @ np.asarray(models["scale"]))
    sent = sent_by(fisher.diagonal)
    merged, _ = merged_by(method(fisher.diagonal), sent)
    f = WEIGHTS[:, None] * (np.asarray(sent.values["fisher"].entries["scale"]) + DAMPING)
    assert_close(merged["scale"], (f * models["scale"]).sum(0) / f.sum(0), 1e-9)


def without_first_pixel(params, x):
    return x.reshape(-1, 9)[:, :4].at[:, 0].set(0) @ params["w"]


@pytest.mark.parametrize(("name", "keeps_mean"), [("cg", True), ("ea", False), ("gd", False)])
def test_without_damping_what_never_fires_does_no_harm(x64, world, name, keeps_mean):
    """The systems are singular there; conjugate gradients keep the weighted mean."""
    method = fedlpa(without_first_pixel, damping=0.0, solver=SOLVERS[name])
    source = np.random.default_rng(0)
    models = [{"w": source.normal(size=(4, 3))} for _ in range(3)]
    sent = send(method, models, world.images, world.labels)
    merged, _ = merged_by(method, sent)
    assert np.isfinite(merged["w"]).all()
    if keeps_mean:
        found, expected = np.asarray(merged["w"]), mean(sent.values["params"])["w"]
        assert_close(found[0], expected[0])
        assert np.abs(found[1:] - expected[1:]).max() > 1e-2


@pytest.mark.parametrize("damping", [-1e-3, np.nan, np.inf])
def test_damping_is_finite_and_not_negative(damping):
    with pytest.raises(ValueError, match=r"damping is .*; expected a finite number, zero or more"):
        fedlpa(damping=damping)


@pytest.mark.parametrize("option", ["steps", "learning_rate", "power_iterations"])
def test_descent_refuses_numbers_that_are_not_positive(option):
    expected = "a positive number" if option == "learning_rate" else "an integer of at least 1"
    with pytest.raises(ValueError, match=f"{option} is 0; expected {expected}"):
        algorithms.residual_descent(**{option: 0})
