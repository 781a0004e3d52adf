"""Running statistics: whatever the method, a merge has those of the mixture of the clients' data.

What they should be is computed by NumPy in float64 from the clients' own moments.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, merging, rounds, training, tree
from fisherjax.algorithms.base import as_sent
from tests.masked import (
    BESIDES,
    EVERY,
    LONG,
    ONCE,
    REFUSE,
    ROWS,
    SILENT,
    method,
    priced,
)
from tests.normed import HOW, MODEL, MOMENTS, SGD, SIZES, federation, start

pytestmark = pytest.mark.usefixtures("wide")


@functools.cache
def trained(optimizer):
    how = {"key": jax.random.key(0), "optimizer": optimizer, **HOW}
    return training.train(MODEL, start(), federation(), **how)


def mixture(statistics, weights):
    """The moments of a mixture, by NumPy."""
    shares = np.asarray(weights, float) / np.sum(weights)
    own = {name: np.asarray(x, float) for name, x in tree.by_name(statistics).items()}
    return {name: np.tensordot(shares, x, 1) for name, x in own.items() if x.size}


def assert_mixture(params, expected):
    found = tree.by_name(params)
    for name in MOMENTS:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=1e-12, atol=1e-13, err_msg=name
        )
    assert (found[MOMENTS[1]] > np.square(found[MOMENTS[0]])).all()


# DENSE has a loss of its own, and noise would be of what is no gradient.
WITHOUT = REFUSE | LONG | SILENT | {"private", "server of private"}
WITHOUT |= {name for name, row in ROWS.items() if row.gives == "votes"}


def summarized(name):
    own = method(name, MODEL)
    found = trained(own.optimizer(SGD))
    return own, found, merging.summarize(own, found, federation(), key=jax.random.key(1))


HERE = [name for name in EVERY if name not in WITHOUT]


@pytest.mark.parametrize("name", priced(HERE, fast={"fedavg", "fednova", "server sgd"}))
def test_merged_moments_are_those_of_the_mixture(name):
    own, found, sent = summarized(name)
    assert tuple(sent.statistics) == MOMENTS
    weights = federation().weights
    whole, _, _ = merging.merge(own, start(), sent, weights, key=jax.random.key(2))
    assert_mixture(whole, mixture(found.statistics, weights))
    assert np.ptp(np.asarray(found.statistics["moments"]["mean"])) > 0.1


@pytest.mark.parametrize("name", sorted(REFUSE | LONG | {"private"}))
def test_methods_that_cannot_merge_moments_name_them(name):
    words = "BatchNorm" if name in LONG else "'moments/mean', 'moments/second_moment'"
    with pytest.raises(ValueError, match=words):
        summarized(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedfisher_diag", "regmean"])
def test_streams_and_secure_sums_average_moments(name):
    own, found, sent = summarized(name)
    weights = federation().weights
    expected = mixture(found.statistics, weights)
    one = [(jax.tree.map(lambda x, i=i: x[i : i + 1], sent), weights[i : i + 1]) for i in range(3)]
    assert_mixture(merging.merge_stream(own, start(), one)[0], expected)
    how = {"bound": 1000.0, "threshold": 2, "bits": 64, "entropy": np.random.default_rng(0).bytes}
    secure, _, _ = fj.secure_aggregation.secure_merge(own, start(), sent, weights, **how)
    found = tree.by_name(secure)
    for name in MOMENTS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_moments_are_those_of_all_data_together():
    """Of the raw inputs, by minibatches that are all a client has, without momentum."""

    def normalised(params, x):
        return (x - params["mean"]) @ params["w"]

    def train(params, x, key, weights):
        shares = weights / weights.sum()
        new = {"w": None, "mean": shares @ x, "second": shares @ x**2}
        return normalised(params | {"mean": new["mean"]}, x), new

    mask = {"w": True, "mean": False, "second": False}
    model = fj.Model(normalised, fj.likelihoods.categorical, train, mask)
    data = federation().inputs.reshape(sum(SIZES), -1), federation().targets
    clients = fj.clients.federation(data, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))
    begin = {"w": np.zeros((16, 2)), "mean": np.zeros(16), "second": np.ones(16)}
    how = {"key": jax.random.key(0), "optimizer": SGD, "epochs": 1, "batch_size": max(SIZES)}
    method = algorithms.fisher_merge(model)
    own = training.train(model, begin, clients, **how)
    sent = merging.summarize(method, own, clients, key=jax.random.key(1))
    whole, _, _ = merging.merge(method, begin, sent, clients.weights)
    every = np.asarray(data[0], float)
    np.testing.assert_allclose(whole["mean"], every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(whole["second"] - whole["mean"] ** 2, every.var(0), rtol=1e-9)


def played(name, cohort=3, model=MODEL):
    own = method(name, model) if isinstance(name, str) else name
    experiment = rounds.federated(model, own, cohort=cohort, optimizer=SGD, **HOW)
    begin = experiment.init(start(), federation())
    key = jax.random.key(3)
    *_, (state, last) = rounds.run(experiment, begin, federation(), key=key, rounds=2)
    return experiment, state, last


@pytest.mark.parametrize(
    "name", priced([n for n in HERE if n not in {*ONCE, "weighted_fedavg"}], seldom=BESIDES)
)
def test_after_two_rounds_moments_are_those_of_the_mixture(name):
    _, state, last = played(name)
    assert_mixture(state.params, mixture(last.trained.statistics, SIZES))
    assert np.all(state.params["moments"]["mean"] != last.start["moments"]["mean"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [algorithms.analytic_head, algorithms.natural_gradient])
def test_exchanges_leave_statistics_as_they_are(make):
    """Nobody trains in one, and the running statistics are those of the model that is given."""
    found, _, _ = merging.exchange(make(MODEL), start(), federation(), key=jax.random.key(4))
    for leaf, expected in start()["moments"].items():
        assert np.asarray(found["moments"][leaf]).tobytes() == expected.tobytes()
    assert np.any(found["head"]["kernel"] != start()["head"]["kernel"])


@pytest.mark.long
def test_a_cohort_is_a_mixture_of_its_own():
    _, state, last = played("fednova", cohort=2)
    assert last.cohort.shape == (2,)
    assert_mixture(state.params, mixture(last.trained.statistics, np.array(SIZES)[last.cohort]))


KEPT = frozenset({*MOMENTS, "norm/scale", "norm/shift"})
LOCAL = {
    "fedbn": lambda: algorithms.fedbn(where=KEPT),
    "keep_local": lambda: algorithms.keep_local(
        algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal), KEPT
    ),
    "weighted_fedbn": lambda: algorithms.make("weighted_fedbn", MODEL, where=KEPT),
    "single_set": algorithms.single_set,
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOCAL)
def test_clients_that_keep_their_statistics_send_none(name):
    experiment, state, last = played(LOCAL[name](), cohort=2)
    own = experiment.models(state, 3)["moments"]
    for leaf in ("mean", "second_moment"):
        np.testing.assert_array_equal(
            own[leaf][last.cohort], last.trained.statistics["moments"][leaf]
        )
        # The global model's stay what they were.
        np.testing.assert_array_equal(state.params["moments"][leaf], start()["moments"][leaf])
    assert np.ptp(np.asarray(own["mean"]), axis=0).min() > 0
    shared = sum(x.nbytes for n, x in tree.by_name(start()).items() if n not in KEPT)
    down = 0 if name in SILENT else shared
    assert experiment.traffic(start(), federation()).down == down


@pytest.mark.long
def test_weighted_fedavg_mixes_statistics_by_its_shares():
    experiment, state, last = played("weighted_fedavg")
    shares = np.asarray(last.info)
    for leaf, own in experiment.models(state, 3)["moments"].items():
        expected = shares @ np.asarray(last.trained.statistics["moments"][leaf])
        np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-13)
    assert_mixture(state.params, mixture(last.trained.statistics, SIZES))


def test_moments_that_are_not_finite_leave_a_client_out_by_name():
    own, found, sent = summarized("fedavg")
    mean = sent.statistics[MOMENTS[0]]
    spoilt = {**sent.statistics, MOMENTS[0]: mean.at[1, 2].set(jnp.nan)}
    sent = algorithms.Update(sent.values, sent.kind, spoilt, sent.frozen)
    with pytest.raises(
        ValueError, match=r"clients \[1\] are not finite .*'statistics/moments/mean'"
    ):
        merging.merge(own, start(), sent, SIZES)
    with pytest.warns(UserWarning, match="client 1 for leaf"):
        whole, _, _ = merging.merge(own, start(), sent, SIZES, on_nonfinite="drop")
    counted = (SIZES[0], 0, SIZES[2])
    assert_mixture(whole, mixture(found.statistics, counted))
    kernel = np.tensordot(np.divide(counted, sum(counted)), found.params["head"]["kernel"], 1)
    np.testing.assert_allclose(whole["head"]["kernel"], kernel, rtol=1e-12, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedfisher_diag", "compressed"])
def test_models_trained_elsewhere_have_statistics_too(name):
    own, found, sent = summarized(name)
    several = [jax.tree.map(lambda x, i=i: x[i], found.models) for i in range(3)]
    given = [training.Trained(found.models, start())]
    # What is sent as a difference needs the start.
    given += [several] if own.decode is as_sent else []
    for elsewhere in given:
        again = merging.summarize(own, elsewhere, federation(), key=jax.random.key(1))
        assert (tuple(again.statistics), again.frozen) == (MOMENTS, ())
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), again, sent
        )
