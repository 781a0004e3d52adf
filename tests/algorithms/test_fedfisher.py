"""FedFisher and Fisher merging where the answer is known."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, fisher, merging, solvers, training

EXACT = solvers.conjugate_gradients(tolerance=1e-12, max_iterations=500)


def linear(params, x):
    return x @ params["kernel"] + params["bias"]


MODEL = fj.Model(linear, fj.likelihoods.gaussian)


@pytest.fixture
def regressions(x64):
    """Three clients' own least-squares solutions, their data, and the solution on all data."""
    source = np.random.default_rng(0)
    sizes = (9, 12, 7)
    x = [source.normal(size=(n, 3)) + source.normal(size=3) for n in sizes]
    y = [source.normal(size=(n, 2)) for n in sizes]

    def least_squares(x, y):
        solution, *_ = np.linalg.lstsq(np.hstack([x, np.ones((len(x), 1))]), y)
        return {"kernel": solution[:-1], "bias": solution[-1]}

    models = [least_squares(*pair) for pair in zip(x, y, strict=True)]
    data = np.vstack(x), np.vstack(y)
    federation = clients.federation(data, np.split(np.arange(28), np.cumsum(sizes)[:-1]))
    return models, federation, least_squares(*data)


def send(method, models, federation):
    return merging.summarize(method, models, federation, key=jax.random.key(0))


def assert_close(left, right, tolerance=1e-9):
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("structure", [fisher.full, fisher.kfac])
def test_one_round_solves_linear_regression(regressions, structure):
    """Where the loss is a quadratic, merging local optima is training on all data."""
    models, federation, expected = regressions
    method = algorithms.fedfisher(MODEL, fisher=structure, damping=0.0, solver=EXACT)
    updates = send(method, models, federation)
    merged, _, info = merging.merge(method, models[0], updates, federation.weights)
    assert_close(merged, expected)
    assert all(jax.tree.leaves(info.converged))
    fedavg = algorithms.fedavg()
    average, *_ = merging.merge(
        fedavg, models[0], send(fedavg, models, federation), federation.weights
    )
    assert np.abs(average["kernel"] - expected["kernel"]).max() > 1e-2


@pytest.mark.long
def test_fisher_merge_is_fedfisher_with_a_diagonal(regressions):
    models, federation, _ = regressions
    merge = algorithms.fisher_merge(MODEL)
    solve = algorithms.fedfisher(MODEL, fisher=fisher.diagonal, solver=EXACT)
    assert merge.kind == solve.kind
    updates, weights = send(merge, models, federation), np.asarray(federation.weights)
    merged, solved = (merging.merge(m, models[0], updates, weights)[0] for m in (merge, solve))
    assert_close(merged, solved)
    merged = jax.device_get(merged)
    for name in ("kernel", "bias"):
        entries = np.asarray(updates.values["fisher"].entries[name])
        f = weights.reshape(-1, *(1,) * (entries.ndim - 1)) * entries
        w = np.stack([model[name] for model in models])
        np.testing.assert_allclose(merged[name], (f * w).sum(0) / f.sum(0), rtol=1e-10, atol=1e-12)
        assert (merged[name] <= w.max(0)).all()
        assert (merged[name] >= w.min(0)).all()


@pytest.mark.long
def test_updates_of_the_automatic_kind_are_of_the_true_fisher(regressions):
    """Files from before it was the default are merged still, and not together with others."""
    models, federation, _ = regressions
    exact = algorithms.fedfisher(MODEL, kind=fisher.true)
    automatic = algorithms.fedfisher(MODEL)
    assert automatic is algorithms.fedfisher(MODEL, kind=fisher.automatic)
    updates = send(exact, models, federation)
    merged, expected = (merging.merge(m, models[0], updates)[0] for m in (automatic, exact))
    assert_close(merged, expected)
    other = algorithms.fedfisher(MODEL, kind=fisher.sampled)
    with pytest.raises(ValueError, match="updates holds 'params, true kfac"):
        merging.merge(other, models[0], updates)


def test_fisher_merge_takes_the_mean_where_there_is_no_information(x64):
    method = algorithms.fisher_merge(MODEL, floor=1e-3)
    fishers = {"w": jnp.array([[1.0, 0.0, 1e-4], [3.0, 0.0, 1e-4]])}
    values = {
        "params": {"w": jnp.array([[0.0] * 3, [4.0] * 3])},
        "fisher": fisher.Diagonal(fishers),
    }
    updates = algorithms.Update(values, method.kind)
    merged, *_ = merging.merge(method, {"w": jnp.zeros(3)}, updates, [1, 3])
    np.testing.assert_allclose(merged["w"], [3.6, 3.0, 3.0])


@pytest.mark.long
def test_kfac_is_damped_by_default_and_the_others_are_not(regressions):
    models, federation, _ = regressions
    for structure, default in ((fisher.kfac, 1.0), (fisher.diagonal, 0.0), (fisher.full, 0.0)):
        assert structure.__annotations__["return"].default_damping == default
        make = [
            algorithms.fedfisher(MODEL, fisher=structure, damping=damping)
            for damping in (None, default)
        ]
        updates = send(make[0], models, federation)
        left, right = (merging.merge(m, models[0], updates)[0] for m in make)
        chex.assert_trees_all_equal(left, right)


@pytest.mark.long
def test_summaries_depend_on_the_clients_own_rows_only(x64):
    """Padding and other clients' examples leave no trace; neither does the order of rows."""
    source = np.random.default_rng(0)
    x, y = source.normal(size=(12, 3)), source.normal(size=(12, 2))
    params = {"kernel": source.normal(size=(3, 2)), "bias": np.ones(2)}
    method, trained = algorithms.fedfisher(MODEL), training.Trained(params)
    rows = np.array([7, 2, 11, 4])
    federation = clients.federation((x, y), [np.array([0, 1, 3, 5, 6, 8, 9, 10]), rows])
    view = clients.view(federation, 1)
    own = fj.Examples(x[rows[::-1]], y[rows[::-1]])
    left, right = (method.summarize(None, trained, e, ())[0]["fisher"] for e in (view, own))
    chex.assert_trees_all_close(left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", [fisher.kfac, fisher.diagonal, fisher.full])
def test_of_equal_traces_the_size_of_a_curvature_is_no_vote(structure, x64):
    """Neither of one client whose logits are certain, nor of one without examples."""
    source = np.random.default_rng(0)
    data = source.normal(size=(20, 4)), source.integers(0, 3, 20)
    rows = np.split(source.permutation(20), [6, 6, 11])
    federation = clients.federation(data, rows)
    model = fj.Model(linear, fj.likelihoods.categorical)
    models = [{"kernel": source.normal(size=(4, 3)), "bias": np.zeros(3)} for _ in range(4)]
    models[3]["kernel"] *= 1000
    plain, equal = (
        algorithms.fedfisher(model, fisher=structure, equal_traces=asked) for asked in (False, True)
    )
    given, sent = (send(method, models, federation) for method in (plain, equal))
    own = jax.vmap(lambda x: x.trace())(given.values["fisher"])
    assert own[3] < 1e-3 * own[0]
    assert own[1] == 0
    # The same directions, of a mean eigenvalue of one.
    factors = jnp.where(own > 0, 15 / own, 0)
    scaled = jax.vmap(lambda x, by: x.times(by))(given.values["fisher"], factors)
    assert_close(sent.values["fisher"], scaled)
    merged = merging.merge(equal, models[0], sent, federation.weights)[0]
    given = algorithms.Update(given.values | {"fisher": scaled}, given.kind)
    assert_close(merged, merging.merge(plain, models[0], given, federation.weights)[0], 1e-7)
    with pytest.raises(ValueError, match="of one trace"):
        merging.merge(plain, models[0], sent)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (algorithms.fedfisher, {"damping": -1.0}, "damping is -1"),
        (algorithms.fedfisher, {"damping": jnp.inf}, "finite"),
        (algorithms.fedfisher, {"batch_size": 0}, "batch_size is 0"),
        (algorithms.fisher_merge, {"floor": -1.0}, "floor is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(make, options, words):
    with pytest.raises(ValueError, match=words):
        make(MODEL, **options)


@pytest.mark.parametrize("option", ["fisher", "kind", "solver"])
def test_options_that_are_no_functions_are_refused(option):
    with pytest.raises(TypeError, match=f"{option} is 'kfac'; expected a function"):
        algorithms.fedfisher(MODEL, **{option: "kfac"})


def test_equal_traces_are_asked_for_or_not():
    with pytest.raises(TypeError, match="equal_traces is an int; expected True or False"):
        algorithms.fedfisher(MODEL, equal_traces=1)
