"""Which leaves are statistics, however `apply_train` is written, and which cannot be averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, leaves, merging, rounds, training, tree
from tests.normed import HOW, MASK, MODEL, MOMENTS, SGD, SIZES, apply_train, federation, start

pytestmark = pytest.mark.usefixtures("wide")


def jitted(params, x, key, weights):
    return jax.jit(apply_train)(params, x, key, weights)


def checkpointed(params, x, key, weights):
    return jax.checkpoint(apply_train)(params, x, key, weights)


def in_part(params, x, key, weights):
    z, new = apply_train(params, x, key, weights)
    return z, jax.tree.map(lambda _: None, params) | {"moments": new["moments"]}


def as_they_came(params, x, key, weights):
    z, new = jax.jit(jax.checkpoint(apply_train))(params, x, key, weights)
    still = jax.tree.map(jax.lax.stop_gradient, params) | {
        "head": jax.tree.map(jnp.copy, params["head"])
    }
    return z, still | {"moments": new["moments"]}


FORMS = {f.__name__: f for f in (apply_train, jitted, checkpointed, in_part, as_they_came)}


@pytest.mark.parametrize("form", FORMS)
def test_statistics_are_what_training_returns_anew(form):
    """Among leaves that nobody trains, however the function that returns them is written."""
    mask = MASK | {"head": {"bias": False, "kernel": False}}
    model = MODEL._replace(apply_train=FORMS[form], mask=mask)
    found = leaves.split(model, start(), federation().inputs)
    assert tree.names(found.statistics) == MOMENTS
    assert tree.names(found.frozen) == ("head/bias", "head/kernel")
    how = {"key": jax.random.key(0), "optimizer": SGD, **HOW}
    both = [
        training.train(model._replace(apply_train=f), start(), federation(), **how)
        for f in (apply_train, FORMS[form])
    ]
    assert tree.names(both[1].frozen) == ("head/bias", "head/kernel")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12),
        both[0].models,
        both[1].models,
    )


def test_none_among_params_is_no_leaf_for_statistics_either():
    """As equinox's partition leaves it in place of what is no array."""
    begin = {
        "w": np.zeros((16, 2)),
        "activation": None,
        "layer": {"mean": np.zeros(16), "size": None},
    }

    def train(params, x, key, weights):
        x = x.reshape(len(x), -1)
        layer = {"mean": weights / weights.sum() @ x, "size": None}
        return (x - layer["mean"]) @ params["w"], params | {"w": None, "layer": layer}

    mask = {"w": True, "activation": None, "layer": {"mean": False, "size": None}}
    model = fj.Model(
        lambda p, x: (x.reshape(len(x), -1) - p["layer"]["mean"]) @ p["w"],
        fj.likelihoods.categorical,
        train,
        mask,
    )
    found = leaves.split(model, begin, federation().inputs)
    assert tree.names(found.statistics) == ("layer/mean",)
    how = {"key": jax.random.key(0), "optimizer": SGD, "epochs": 1, "batch_size": max(SIZES)}
    trained = training.train(model, begin, federation(), **how)
    rows = np.split(np.asarray(federation().inputs).reshape(sum(SIZES), -1), np.cumsum(SIZES)[:-1])
    means = trained.models["layer"]["mean"]
    np.testing.assert_allclose(means, [own.mean(0) for own in rows], rtol=1e-12)


# As flax, PyTorch, TensorFlow, haiku and nnx call them.
PAIRS = [
    ("batch_stats/norm/mean", "batch_stats/norm/var"),
    ("norm/running_mean", "norm/running_var"),
    ("norm/moving_mean", "norm/moving_variance"),
    ("norm/~/mean_ema/average", "norm/~/var_ema/average"),
    ("norm/mean/value", "norm/var/value"),
    ("var_net/mean", "var_net/var"),
]


def with_bare(mean, variance):
    """A network whose statistics have names of one's own, by those names."""
    return {"head": np.zeros((4, 2)), mean: np.zeros(4), variance: np.ones(4)}


def bare(mean, variance):
    def apply(params, x):
        x = x.reshape(len(x), -1)[:, :4]
        return (x - params[mean]) / jnp.sqrt(params[variance] + 1e-3) @ params["head"]

    def apply_train(params, x, key, weights):
        rows, shares = x.reshape(len(x), -1)[:, :4], weights / weights.sum()
        new = {mean: shares @ rows, variance: shares @ (rows - shares @ rows) ** 2}
        return apply(params | new, x), params | new

    mask = {"head": True, mean: False, variance: False}
    return fj.Model(apply, fj.likelihoods.categorical, apply_train, mask)


@pytest.mark.parametrize("names", PAIRS)
def test_a_mean_of_variances_is_refused_by_name(names):
    leaves.check_moments([names[0], names[1].replace("var", "second")])
    with pytest.raises(ValueError, match=f"'{names[1]}' stands beside '{names[0]}'"):
        leaves.check_moments(names)


@pytest.mark.long
def test_variances_are_refused_where_they_would_be_averaged():
    names = PAIRS[1]
    model, begin, method = bare(*names), with_bare(*names), algorithms.fedavg()
    how = {"key": jax.random.key(0), "optimizer": SGD, **HOW}
    own = training.train(model, begin, federation(), **how)
    sent = merging.summarize(method, own, federation(), key=jax.random.key(1))
    one = [jax.tree.map(lambda x, i=i: x[i : i + 1], sent) for i in range(2)]
    how = {"bound": 1000.0, "threshold": 2, "entropy": np.random.default_rng(0).bytes}
    # What each of two clients added up by itself.
    alone = [fj.secure_aggregation.contributions(method, begin, x)[0] for x in one]
    sums = jax.tree.map(jnp.add, *alone)
    experiment = rounds.federated(model, method, cohort=2, optimizer=SGD, **HOW)
    state, key = experiment.init(begin, federation()), jax.random.key(0)
    for merge in (
        lambda: merging.merge(method, begin, sent),
        lambda: merging.merge(method, begin, [jax.tree.map(lambda x: x[0], x) for x in one]),
        lambda: merging.merge_stream(method, begin, [(x, None) for x in one]),
        lambda: fj.secure_aggregation.secure_merge(method, begin, sent, **how),
        lambda: merging.merge_sums(method, begin, sums, jnp.arange(2)),
        lambda: list(rounds.run(experiment, state, federation(), key=key, rounds=1)),
    ):
        with pytest.raises(ValueError, match="'norm/running_var' stands beside"):
            merge()
    # Of one client nothing is averaged.
    whole, _, _ = merging.merge(method, begin, one[0])
    np.testing.assert_array_equal(whole[names[1]], own.statistics[names[1]][0])
    alone = experiment._replace(cohort=1)
    *_, (state, last) = rounds.run(alone, state, federation(), key=key, rounds=1)
    np.testing.assert_array_equal(state.params[names[1]], last.trained.statistics[names[1]][0])
    # Clients that keep theirs average none either.
    kept = algorithms.keep_local(method, frozenset(names))
    state, _ = played_bare(model, kept, begin)
    assert set(state.statistics) == set(names)


def played_bare(model, method, begin):
    experiment = rounds.federated(model, method, cohort=2, optimizer=SGD, **HOW)
    state = experiment.init(begin, federation())
    *_, last = rounds.run(experiment, state, federation(), key=jax.random.key(0), rounds=1)
    return last


def test_updates_by_hand_say_what_are_statistics():
    """FedNova's changes of moments would be scaled: two clients agree, of 1 and of 10 steps."""
    begin = {"w": jnp.zeros(1), "mean": jnp.zeros(1), "second_moment": jnp.ones(1)}
    moments = {"mean": jnp.full(1, 3.0), "second_moment": jnp.full(1, 10.0)}
    changed = {"w": jnp.ones(1), "mean": None, "second_moment": None}
    method = algorithms.fednova()
    updates = [
        algorithms.Update(
            {"change": changed | {"w": jnp.ones(1) / a}, "length": changed | {"w": jnp.asarray(a)}},
            method.kind,
            statistics=moments,
        )
        for a in (1.0, 10.0)
    ]
    found, _, _ = merging.merge(method, begin, updates)
    assert (found["mean"], found["second_moment"]) == (3.0, 10.0)
    served = algorithms.with_server_optimizer(algorithms.fedavg(), optax.sgd(3.0))
    own = {"params": changed}
    update = algorithms.Update(own, served.kind, statistics=moments)
    found, _, _ = merging.merge(served, begin, [update, update])
    assert (found["w"], found["mean"], found["second_moment"]) == (3.0, 3.0, 10.0)
