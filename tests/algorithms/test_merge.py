"""What merging achieves where the answer is known, and what merge refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import aggregation, clients, fisher, likelihoods, solvers, tree

EXACT = solvers.conjugate_gradients(tolerance=1e-12, max_iterations=500)


def linear(params, x):
    return x @ params["kernel"] + params["bias"]


@pytest.fixture
def regressions(x64):
    """Three clients' own least-squares solutions, their data, and the solution on all data."""
    source = np.random.default_rng(0)
    sizes = (9, 12, 7)
    x = [source.normal(size=(n, 3)) + source.normal(size=3) for n in sizes]
    y = [source.normal(size=(n, 2)) for n in sizes]

    def least_squares(x, y):
        solution, *_ = np.linalg.lstsq(np.hstack([x, np.ones((len(x), 1))]), y)
        return {"kernel": jnp.asarray(solution[:-1]), "bias": jnp.asarray(solution[-1])}

    models = [least_squares(*pair) for pair in zip(x, y, strict=True)]
    examples = [clients.examples(*pair) for pair in zip(x, y, strict=True)]
    return models, examples, least_squares(np.vstack(x), np.vstack(y)), sizes


@pytest.mark.parametrize("structure", [fisher.full, fisher.kfac])
def test_one_round_solves_linear_regression(regressions, structure):
    """Where the loss is a quadratic, merging local optima is training on all data."""
    models, examples, expected, sizes = regressions
    method = aggregation.fedfisher(
        linear, likelihoods.gaussian, fisher=structure, damping=0.0, solver=EXACT
    )
    updates = [method.summarize(None, w, e, None) for w, e in zip(models, examples, strict=True)]
    merged, info = aggregation.merge(method, models[0], updates, sizes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), merged, expected
    )
    assert all(jax.tree.leaves(info.converged))
    average, _ = aggregation.merge(aggregation.fedavg(), models[0], updates, sizes)
    assert jnp.abs(average["kernel"] - expected["kernel"]).max() > 1e-2


def test_fisher_merge_is_fedfisher_with_a_diagonal(regressions):
    models, examples, _, sizes = regressions
    merge = aggregation.fisher_merge(linear, likelihoods.gaussian)
    solve = aggregation.fedfisher(
        linear, likelihoods.gaussian, fisher=fisher.diagonal, solver=EXACT
    )
    updates = [merge.summarize(None, w, e, None) for w, e in zip(models, examples, strict=True)]
    merged, solved = (aggregation.merge(m, models[0], updates, sizes)[0] for m in (merge, solve))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), merged, solved
    )
    stacked = tree.stack(updates)
    weights = np.asarray(sizes) / sum(sizes)
    for name in ("kernel", "bias"):
        f = np.einsum("m,m...->m...", weights, stacked["fisher"].entries[name])
        w = stacked["params"][name]
        np.testing.assert_allclose(merged[name], (f * w).sum(0) / f.sum(0), rtol=1e-10, atol=1e-12)
        assert (merged[name] <= w.max(0)).all()
        assert (merged[name] >= w.min(0)).all()


def test_fisher_merge_takes_the_mean_where_there_is_no_information(x64):
    method = aggregation.fisher_merge(linear, likelihoods.gaussian, floor=1e-3)
    fishers = {"w": jnp.array([[1.0, 0.0, 1e-4], [3.0, 0.0, 1e-4]])}
    updates = {
        "params": {"w": jnp.array([[0.0] * 3, [4.0] * 3])},
        "fisher": fisher.Diagonal(fishers),
    }
    merged, _ = aggregation.merge(method, {"w": jnp.zeros(3)}, updates, [1, 3])
    np.testing.assert_allclose(merged["w"], [3.6, 3.0, 3.0])


def test_kfac_is_damped_by_default_and_the_others_are_not(regressions):
    models, examples, _, _ = regressions
    for structure, default in ((fisher.kfac, 1.0), (fisher.diagonal, 0.0), (fisher.full, 0.0)):
        make = [
            aggregation.fedfisher(linear, likelihoods.gaussian, fisher=structure, damping=damping)
            for damping in (None, default)
        ]
        summarize = make[0].summarize
        updates = [summarize(None, w, e, None) for w, e in zip(models, examples, strict=True)]
        left, right = (aggregation.merge(m, models[0], updates)[0] for m in make)
        jax.tree.map(np.testing.assert_array_equal, left, right)


def test_summaries_depend_on_the_clients_own_rows_only(x64):
    """Padding and other clients' examples leave no trace; neither does the order of rows."""
    source = np.random.default_rng(0)
    x, y = source.normal(size=(12, 3)), source.normal(size=(12, 2))
    params = {"kernel": jnp.asarray(source.normal(size=(3, 2))), "bias": jnp.ones(2)}
    method = aggregation.fedfisher(linear, likelihoods.gaussian)
    rows = np.array([7, 2, 11, 4])
    federation = clients.federation((x, y), [np.array([0, 1, 3, 5, 6, 8, 9, 10]), rows])
    view = clients.view(federation, 1)
    own = clients.examples(x[rows[::-1]], y[rows[::-1]])
    left, right = (method.summarize(None, params, e, None)["fisher"] for e in (view, own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), left, right)


MODELS = {"params": {"w": jnp.array([[1.0], [2.0], [3.0]])}}
BAD = {
    "too few weights": (dict(weights=[1, 2]), ValueError, r"shape \(2,\); expected \(3,\)"),
    "negative weight": (dict(weights=[1, -1, 1]), ValueError, "non-negative"),
    "no weight at all": (dict(weights=[0, 0, 0]), ValueError, "Every weight is zero"),
    "NaN weight": (dict(weights=[1, float("nan"), 1]), ValueError, "finite"),
    "no updates": (dict(updates=[]), ValueError, "empty list"),
    "other shape": (dict(params={"w": jnp.ones(2)}), ValueError, r"\(1,\).*params has .*\(2,\)"),
    "other names": (dict(params={"v": jnp.ones(1)}), ValueError, "'w'.*params has .*'v'"),
    "integer params": (dict(params={"w": jnp.ones(1, int)}), TypeError, "'w' of params .*int"),
    "option": (dict(on_nonfinite="ignore"), ValueError, "'ignore'; expected 'raise' or 'drop'"),
}


@pytest.mark.parametrize("fault", BAD)
def test_merge_refuses_bad_input(fault):
    change, error, words = BAD[fault]
    arguments = {"params": {"w": jnp.zeros(1)}, "updates": MODELS, "weights": [1, 2, 3]} | change
    with pytest.raises(error, match=words):
        aggregation.merge(aggregation.fedavg(), **arguments)


def test_dropping_every_client_is_refused():
    updates = {"params": {"w": jnp.array([[jnp.nan], [1.0]])}}
    with pytest.raises(ValueError, match="No client is left"):
        aggregation.merge(
            aggregation.fedavg(), {"w": jnp.zeros(1)}, updates, [1, 0], on_nonfinite="drop"
        )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: aggregation.fedfisher(linear, likelihoods.gaussian, damping=-1.0),
            "damping is -1",
        ),
        (lambda: aggregation.fedfisher(linear, likelihoods.gaussian, damping=jnp.inf), "finite"),
        (lambda: aggregation.fisher_merge(linear, likelihoods.gaussian, floor=-1.0), "floor is -1"),
        (
            lambda: aggregation.regmean(linear, shrink=1.0),
            "shrink is 1.0; expected 0 <= shrink < 1",
        ),
        (lambda: aggregation.regmean(linear, shrink=-0.1), "shrink is -0.1"),
    ],
)
def test_factories_refuse_bad_numbers(make, words):
    with pytest.raises(ValueError, match=words):
        make()
