"""FedDyn against its algorithm, written out with NumPy, and what it is for."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, rounds, training

ALPHA, RATE, EPOCHS = 0.3, 0.05, 3
SGD = optax.sgd(RATE)  # one, as programs are known by it
FEDDYN, FEDAVG = algorithms.feddyn(ALPHA), algorithms.fedavg()
WHOLE = 12  # of one batch an epoch


@pytest.fixture
def start(x64, draw):
    return draw(1)


def experiment_of(method, world, cohort=4, epochs=EPOCHS, batch_size=WHOLE, optimizer=SGD):
    how = {"optimizer": optimizer, "epochs": epochs, "batch_size": batch_size}
    return rounds.federated(world.model, method, cohort=cohort, **how)


def play(method, start, world, number, **how):
    experiment = experiment_of(method, world, **how)
    state = experiment.init(start, world.federation.num_clients)
    return list(
        rounds.run(experiment, state, world.federation, key=jax.random.key(0), rounds=number)
    )


def slope(w, x, y):
    """Differentiate the mean over examples of |x w + b - y|^2 / 2, by hand."""
    residual = x @ w["w"] + w["b"] - y
    return {"w": x.T @ residual / len(x), "b": residual.mean(0)}


def combine(*terms):
    """Add up (factor, params) pairs."""
    return {name: sum(f * x[name] for f, x in terms) for name in ("w", "b")}


def assert_close(left, right, tolerance=1e-11):
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cohort", [4, 2])
def test_rounds_are_algorithm_1_with_gradient_descent(start, regression, cohort):
    """In the paper's letters; clients without examples send nothing."""
    sizes, m = np.array(regression.sizes), 4
    theta = jax.tree.map(np.asarray, start)
    h = combine((0, theta))
    own, met = [h] * m, set()
    for state, done in play(FEDDYN, start, regression, 4, cohort=cohort):
        drawn, ends = done.cohort.tolist(), []
        for k in drawn:
            if not sizes[k]:
                continue
            theta_k = theta
            for _ in range(EPOCHS):
                gradient = slope(theta_k, *regression.own(k))
                pull = combine((ALPHA, theta_k), (-ALPHA, theta))
                step = combine((1, gradient), (-1, own[k]), (1, pull))
                theta_k = combine((1, theta_k), (-RATE, step))
            own[k] = combine((1, own[k]), (-ALPHA, theta_k), (ALPHA, theta))
            ends.append(theta_k)
        for end in ends:
            h = combine((1, h), (-ALPHA / m, end), (ALPHA / m, theta))
        mean = combine(*((1 / len(ends), end) for end in ends))
        theta = combine((1, mean), (-1 / ALPHA, h))
        assert_close(state.params, theta)
        assert_close(state.algorithm.gradient, h)
        assert_close(state.local, jax.tree.map(lambda *x: np.stack(x), *own))
        met.add(tuple(drawn))
    assert len(met) == 1 if cohort == 4 else len(met) > 1


@pytest.mark.long
def test_many_local_steps_still_lead_to_the_optimum_of_all(regression):
    """Clients differ in curvature and in size, which lead federated averaging astray."""
    curvature, centre = np.array([1.0, 9.0]), np.array([1.0, -1.0])
    root = np.sqrt(curvature)
    rows = np.array([0, 1, 1, 1])  # the second client has three examples
    data = root[rows][:, None], (root * centre)[rows][:, None]
    federation = clients.federation(data, [[0], [1, 2, 3]])
    # Each client's loss counts the same: no weights by examples.
    optimum = (curvature * centre).sum() / curvature.sum()
    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
    world = regression._replace(model=model, federation=federation)
    how = {"cohort": 2, "epochs": 20, "batch_size": 3}
    (tilted, _), (mean, _) = (
        play(method, jnp.zeros((1, 1)), world, 100, **how)[-1]
        for method in (algorithms.feddyn(1.0), FEDAVG)
    )
    np.testing.assert_allclose(tilted.params.item(), optimum, rtol=1e-6)
    assert abs(mean.params.item() - optimum) > 0.1
    gradients = curvature * (tilted.params.item() - centre)
    np.testing.assert_allclose(tilted.local.ravel(), gradients, rtol=1e-5)
    np.testing.assert_allclose(tilted.algorithm.gradient, 0.0, atol=1e-5)


def test_a_single_merge_goes_twice_as_far_as_the_mean_of_those_that_have_examples(start, draw):
    models = [draw(seed) for seed in (5, 6, 7)]
    sent = algorithms.Update({"params": fj.tree.stack(models)}, FEDDYN.kind)
    found, state, _ = merging.merge(FEDDYN, start, sent, [3, 1, 9])
    mean = combine(*((1 / 3, x) for x in models))
    assert_close(found, combine((2, mean), (-1, start)))
    assert_close(state.gradient, combine((-ALPHA, mean), (ALPHA, start)))
    # One of weight zero is among the M = 3, and nothing else.
    found, *_ = merging.merge(FEDDYN, start, sent, [3, 0, 9])
    mean = combine((0.5, models[0]), (0.5, models[2]))
    assert_close(found, combine((1, mean), (2 / 3, mean), (-2 / 3, start)))


def test_a_single_client_goes_twice_as_far_too(start, draw):
    found, *_ = merging.merge(FEDDYN, start, [algorithms.Update({"params": draw(5)}, "params")])
    assert_close(found, combine((2, draw(5)), (-1, start)))


def test_optimisers_are_told_the_tilted_loss(x64, draw):
    """The loss and its gradient, here and elsewhere, are those of the written-out objective."""
    start, w, g, gradient, elsewhere = (draw(seed) for seed in range(5))
    seen = {}

    def keep(updates, state, params, **given):
        seen.update(given)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(optax.identity().init, keep)
    optimizer = FEDDYN.optimizer(spy)

    def loss(params):
        return fj.tree.inner(params, gradient)

    told = fj._optimizers.loss_arguments(loss, loss(w), gradient)
    step, _ = optimizer.update(gradient, optimizer.init(w), w, start=start, extras=g, **told)

    def objective(at):
        moved = combine((1, at), (-1, start))
        return sum(
            (gradient[n] * at[n] - g[n] * at[n] + ALPHA / 2 * moved[n] ** 2).sum() for n in at
        )

    def derivative(at):
        return combine((1, gradient), (-1, g), (ALPHA, at), (-ALPHA, start))

    assert_close(step, derivative(w))
    assert_close(seen["grad"], derivative(w))
    assert_close(seen["grad_fn"](elsewhere), derivative(elsewhere))
    assert_close(seen["value"], objective(w))
    assert_close(seen["value_fn"](elsewhere), objective(elsewhere))


def test_training_without_gradients_of_the_past_is_fedprox(start, regression):
    how = {"epochs": EPOCHS, "batch_size": WHOLE}
    one, other = (
        regression.train(start, method.optimizer(SGD), **how)
        for method in (FEDDYN, algorithms.fedprox(ALPHA))
    )
    assert_close(one.params, other.params)
    assert_close(one.loss, other.loss)


def test_who_diverges_keeps_its_gradient_and_is_not_counted(start, regression):
    """One client's targets are no numbers."""
    targets = np.array(regression.federation.targets)
    targets[7:10] = np.nan
    federation = regression.federation._replace(targets=jnp.asarray(targets))
    world = regression._replace(federation=federation)
    [(state, done)] = play(FEDDYN, start, world, 1)
    assert done.diverged.tolist() == [False, True, False, False]
    models = [jax.tree.map(lambda x, i=i: x[i], done.trained.params) for i in (0, 3)]
    mean = combine(*((0.5, x) for x in models))
    assert_close(state.params, combine((1.5, mean), (-0.5, start)))  # 2 of M = 4
    for name, leaf in state.local.items():
        assert not np.any(leaf[1:3]), name
        assert np.abs(leaf[np.array([0, 3])]).min() > 0, name


@pytest.mark.long
def test_a_run_goes_on_from_any_state_bit_for_bit(start, regression):
    experiment, federation = experiment_of(FEDDYN, regression, cohort=2), regression.federation
    played = play(FEDDYN, start, regression, 3, cohort=2)
    [(again, _)] = rounds.run(experiment, played[1][0], federation, key=jax.random.key(0), rounds=1)
    chex.assert_trees_all_equal(again, played[2][0])


@pytest.mark.long
def test_statistics_and_frozen_leaves_are_not_tilted(start, regression):
    """What nobody trains is averaged, or stays bit for bit; the rest goes on without it."""
    plain = regression.model.apply

    def apply(params, x):
        return plain(params["trained"], x) + params["frozen"]

    def apply_train(params, x, key, weights):
        return apply(params, x), params | {"mean": params["mean"] + 1.0, "frozen": None}

    mask = {"trained": {"w": True, "b": True}, "mean": False, "frozen": False}
    model = fj.Model(apply, fj.likelihoods.gaussian, apply_train, mask)
    begun = {"trained": start, "mean": jnp.zeros(()), "frozen": jnp.zeros(2)}
    played = play(FEDDYN, begun, regression._replace(model=model), 3)
    alone = play(FEDDYN, start, regression, 3)
    for (state, _), (other, _) in zip(played, alone, strict=True):
        assert_close(state.params["trained"], other.params)
        np.testing.assert_array_equal(state.params["frozen"], np.zeros(2))
        # One step an epoch, of all who have examples.
        np.testing.assert_allclose(state.params["mean"], EPOCHS * float(state.number))
        assert len(jax.tree.leaves(state.local)) == 2


@pytest.mark.long
def test_bfloat16_keeps_its_dtype_and_comes_near(regression, draw):
    start = draw(1)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, "bfloat16"), start)
    played, wide = (play(FEDDYN, x, regression, 3, cohort=2) for x in (narrow, start))
    first, last = played[0][0], played[-1][0]
    chex.assert_trees_all_equal_shapes_and_dtypes(first, last)
    assert {x.dtype.name for x in jax.tree.leaves((last.params, last.local))} == {"bfloat16"}
    for name, leaf in wide[-1][0].params.items():
        found = np.asarray(last.params[name], float)
        np.testing.assert_allclose(found, leaf, rtol=0.1, atol=0.1)


def test_the_start_has_to_be_known(start, regression):
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 4), start)
    trained = training.Trained(stacked)
    with pytest.raises(ValueError, match=r"FedDyn needs .*optimizer=algorithm\.optimizer\(base\)"):
        merging.summarize(FEDDYN, trained, regression.federation, key=jax.random.key(0))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_the_pull_is_finite_and_positive(alpha):
    with pytest.raises(ValueError, match=r"alpha is "):
        algorithms.feddyn(alpha)
