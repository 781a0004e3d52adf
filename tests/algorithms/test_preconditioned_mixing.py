"""Preconditioned mixing against dense solves, and against what a step of all data does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, fisher, merging, rounds, solvers
from fisherjax.fisher.operators import ravel

EXACT = solvers.conjugate_gradients(tolerance=1e-13, max_iterations=500)
DAMPING, KEY = 0.7, jax.random.key(0)


def method_of(world, **options):
    return algorithms.preconditioned_mixing(world.model, **{"solver": EXACT} | options)


def send(method, models, world):
    return merging.summarize(method, models, world.federation, key=KEY)


def merged(method, start, updates, weights):
    return merging.merge(method, start, updates, weights)[0]


def assert_close(left, right, tolerance=1e-9):
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance)


def least_squares(x, y):
    solution, *_ = np.linalg.lstsq(np.hstack([x, np.ones((len(x), 1))]), y)
    return {"w": solution[:-1], "b": solution[-1]}


@pytest.fixture
def models(regression, draw):
    return [draw(seed) for seed in (5, 6, 7, 8)]


@pytest.fixture
def sent(regression, models):
    """Updates of models that are no optimum of anybody."""
    return send(method_of(regression, damping=DAMPING), models, regression)


def with_fishers(updates, function):
    changed = function(updates.values["fisher"])
    return algorithms.Update(updates.values | {"fisher": changed}, updates.kind)


def test_identity_preconditioners_are_federated_averaging(regression, models, sent):
    equal = with_fishers(sent, lambda fishers: jax.vmap(type(fishers).identity)(fishers))
    method, weights = method_of(regression, damping=0.0), regression.federation.weights
    mean = fj.tree.weighted_sum(sent.values["params"], weights)
    assert_close(merged(method, models[0], equal, weights), mean)
    apart = merged(method, models[0], sent, weights)
    assert np.abs(apart["w"] - mean["w"]).max() > 1e-2


@pytest.mark.parametrize("scale", [1e-20, 1e12])
def test_only_ratios_of_curvatures_count(regression, models, sent, scale):
    method = method_of(regression, damping=DAMPING)
    weights = regression.federation.weights
    scaled = with_fishers(sent, lambda fishers: jax.tree.map(lambda x: scale * x, fishers))
    left, right = (merged(method, models[0], updates, weights) for updates in (scaled, sent))
    assert_close(left, right, 1e-10)


def test_mixing_is_a_dense_solve(regression, models, sent):
    """The network is one layer, whose block is all params."""
    weights = np.asarray(regression.federation.weights)
    fishers = [jax.tree.map(lambda x, i=i: x[i], sent.values["fisher"]) for i in range(4)]
    dense = [np.asarray(own.dense()) for own in fishers]
    level = DAMPING * sum(p * np.trace(f) / len(f) for p, f in zip(weights, dense, strict=True))
    preconditioners = [f + level * np.eye(len(f)) for f in dense]
    own = [jax.tree.map(lambda x, i=i: x[i], sent.values["params"]) for i in range(4)]
    left = sum(p * f for p, f in zip(weights, preconditioners, strict=True))
    pairs = zip(weights, preconditioners, own, strict=True)
    right = sum(p * f @ np.asarray(ravel(w)) for p, f, w in pairs)
    found = merged(method_of(regression, damping=DAMPING), models[0], sent, weights)
    np.testing.assert_allclose(ravel(found), np.linalg.solve(left, right), rtol=1e-9)


def test_a_client_takes_the_steps_of_the_equation(regression, models):
    """Written out for the only layer, with inputs a = (x, 1): F = A (x) I, gradient A V - B."""
    updates = send(method_of(regression, steps=3, step_damping=DAMPING), models, regression)
    for client in (0, 1, 3):
        x, y = regression.own(client)
        a = np.hstack([x, np.ones((len(x), 1))])
        second, cross = a.T @ a / len(a), a.T @ y / len(a)
        level, ratio = np.trace(second) / len(second), np.sqrt(np.trace(second) / len(second))
        root = np.sqrt(DAMPING * level)
        shifted = second + ratio * root * np.eye(len(second))
        v = np.vstack([models[client]["w"], models[client]["b"]])
        for _ in range(3):
            v = v - np.linalg.solve(shifted, second @ v - cross) / (1 + root / ratio)
        found = jax.tree.map(lambda x, i=client: x[i], updates.values["params"])
        assert_close(found, {"w": v[:-1], "b": v[-1]})


def test_a_round_of_one_step_is_the_newton_step_of_all_data(regression, draw):
    """From any start to the optimum of all, though a client has fewer examples than unknowns."""
    start, federation = draw(1), regression.federation
    optimum = least_squares(federation.inputs, federation.targets)
    method = method_of(regression, step_damping=1e-18, damping=0.0)
    how = {"cohort": 4, "optimizer": optax.sgd(0.0), "epochs": 1, "batch_size": 4}
    experiment = rounds.federated(regression.model, method, **how)
    state = experiment.init(start, federation)
    [(after, done)] = rounds.run(experiment, state, federation, key=KEY, rounds=1)
    chex.assert_trees_all_equal(done.trained.params, fj.tree.stack([start] * 4))
    assert_close(after.params, optimum, 1e-6)
    # Averaging the same models is not, and neither is FedFisher, whose clients did not move.
    updates = send(method, [start] * 4, regression)
    mean = fj.tree.weighted_sum(updates.values["params"], federation.weights)
    assert np.abs(mean["w"] - optimum["w"]).max() > 1e-2
    fedfisher = algorithms.fedfisher(regression.model, damping=0.0, solver=EXACT)
    still = send(fedfisher, [start] * 4, regression)
    assert_close(merged(fedfisher, start, still, federation.weights), start)


def test_at_their_own_optima_clients_send_what_fedfishers_send(regression):
    optima = [least_squares(*regression.own(k if k != 2 else 0)) for k in range(4)]
    fedfisher = algorithms.fedfisher(regression.model)
    left, right = (send(m, optima, regression) for m in (method_of(regression), fedfisher))
    assert_close(left.values, right.values)
    assert left.kind != right.kind


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_no_step_raises_a_clients_loss(scale):
    """A model that is certain and wrong has no Fisher information to bound its steps."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(40, 4)), random.integers(0, 3, 40)
    federation = fj.clients.federation((x, y), [range(20), range(20, 40)])
    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
    start = scale * random.normal(size=(4, 3))
    own = fj.clients.select(federation, [0])
    losses = [fj.metrics.performance(model, start, own).loss.item()]
    for number in range(3):
        method = algorithms.preconditioned_mixing(model, step_damping=1e-6)
        sent = merging.summarize(method, [start], own, key=jax.random.fold_in(KEY, number))
        start = sent.values["params"][0]
        losses.append(fj.metrics.performance(model, start, own).loss.item())
    assert np.all(np.diff(losses) <= 1e-12)
    # Without any curvature the client stays.
    assert losses[-1] < 0.9 * losses[0] if scale < 1e4 else np.isfinite(start).all()


def test_what_clients_send_has_another_kind_for_other_steps(regression):
    kinds = {method_of(regression, **how).kind for how in ({}, {"steps": 2}, {"step_damping": 0.1})}
    assert len(kinds) == 3
    same = method_of(regression, damping=0.1), method_of(regression)
    assert same[0].kind == same[1].kind
    ones = [method_of(regression, step_damping=one).kind for one in (1, 1.0, np.float32(1))]
    assert len(set(ones)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fisher": fisher.diagonal}, r"fisher is diagonal; expected fisher\.kfac"),
        ({"steps": 0}, "steps"),
        ({"step_damping": 0.0}, "step_damping"),
        ({"damping": -1.0}, "damping"),
    ],
)
def test_what_has_no_steps_is_refused(options, message):
    model = fj.Model(jnp.matmul, fj.likelihoods.gaussian)
    with pytest.raises(ValueError, match=message):
        algorithms.preconditioned_mixing(model, **options)
