"""Curvature, sums and private gradients of a network with a mask: those of its trained leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import fisher, merging, privacy, training, tree
from tests.masked import (
    FROZEN,
    assert_frozen,
    assert_same,
    federation,
    model,
    network,
    of_trained,
    params,
    start,
    summarized,
)

pytestmark = pytest.mark.usefixtures("wide")


def examples():
    return fj.Examples(federation().inputs, federation().targets)


KINDS = {
    "true": fisher.true,
    "sampled": functools.partial(fisher.sampled, num_samples=2),
    "empirical": fisher.empirical,
    "propagated": fisher.curvature_propagation,
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["diagonal", "full", "kfac"])
def test_curvature_is_that_of_the_network_with_constants(form, kind):
    how = {"kind": KINDS[kind], "key": jax.random.key(5), "batch_size": 4}
    for where in FROZEN:
        found, expected = (
            getattr(fisher, form)(model(where, c), params(where, c), examples(), **how)
            for c in (False, True)
        )
        assert_same(found, expected)
        assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_curvature_of_half_a_layer_is_that_of_its_derivatives():
    """By jax.jacrev of the network, whatever the library makes of its mask."""
    x, whole = federation().inputs, start()

    def roots(params, x):
        """One row a class, of root of its share times the derivative of its log-likelihood."""
        z = network(params, x[None])[0]
        return jnp.sqrt(jax.lax.stop_gradient(jax.nn.softmax(z))) * jax.nn.log_softmax(z)

    derivatives = jax.vmap(jax.jacrev(roots), (None, 0))(whole, x)
    columns = {
        n: np.asarray(d).reshape(len(x), 3, -1) for n, d in tree.by_name(derivatives).items()
    }

    def block(own):
        every = np.concatenate([columns[name] for name in own], axis=2)
        return np.einsum("nci,ncj->ij", every, every) / len(x)

    own = [name for name in columns if name not in FROZEN["inner"]]
    full = fisher.full(model("inner", False), whole, examples())
    np.testing.assert_allclose(full.matrix, block(own), rtol=1e-9, atol=1e-12)
    kfac = fisher.kfac(model("inner", False), whole, examples())
    # A bias alone has no input but one: its block is exact.
    parts = kfac.select(("second/bias",)).dense()
    np.testing.assert_allclose(parts, block(["second/bias"]), rtol=1e-9, atol=1e-12)
    # A kernel alone has the inputs without the one.
    hidden = x.reshape(len(x), -1)
    for name in ("first", "second"):
        hidden = jnp.tanh(hidden @ whole[name]["kernel"] + whole[name]["bias"])
    moment = np.asarray(hidden).T @ np.asarray(hidden) / len(x)
    np.testing.assert_allclose(kfac.factors["third/kernel"]["input"], moment, rtol=1e-9)


def test_products_with_the_exact_curvature_are_those_of_the_network_with_constants():
    for where in FROZEN:
        vector, point = jax.tree.map(jnp.cos, params(where, True)), (start(), examples())
        found = fisher.vector_product(model(where, False), *point, vector)
        assert_same(
            found,
            fisher.vector_product(model(where, True), params(where, True), examples(), vector),
        )
        # A vector of all leaves gives zeros for those that nobody trains.
        whole = fisher.vector_product(model(where, False), *point, jax.tree.map(jnp.cos, start()))
        assert_same(of_trained(whole, where), found)
        assert not any(np.any(tree.by_name(whole)[name]) for name in FROZEN[where])


ADD_UP = ["fedavg", "regmean", "fedfisher_diag", "fedfisher_sketched", "fisher_merge"]


@pytest.mark.long
@pytest.mark.parametrize("name", ADD_UP)
def test_streams_and_secure_sums_leave_frozen_leaves_alone(name):
    own, _, sent = summarized(name, "inner", closed=False)
    weights = federation().weights
    whole, _, _ = merging.merge(own, start(), sent, weights)
    chunks = [
        (jax.tree.map(lambda x, i=i: x[i : i + 1], sent), weights[i : i + 1]) for i in range(3)
    ]
    streamed, _, _ = merging.merge_stream(own, start(), chunks)
    how = {"bound": 100.0, "threshold": 2, "bits": 64, "entropy": np.random.default_rng(0).bytes}
    secure, _, _ = fj.secure_aggregation.secure_merge(own, start(), sent, weights, **how)
    for found in (streamed, secure):
        assert_frozen(found, "inner")
        for name, leaf in tree.by_name(whole).items():
            np.testing.assert_allclose(tree.by_name(found)[name], leaf, rtol=1e-3, atol=1e-3)


def with_noise(own):
    return privacy.dp_sgd(own, clip=0.5, noise_multiplier=0.3)


@pytest.mark.slow
def test_private_gradients_are_those_of_the_network_with_constants():
    for where in FROZEN:
        both = [summarized("fedavg", where, closed, with_noise) for closed in (False, True)]
        assert_same(both[0][2].values, both[1][2].values)
        assert both[0][2].frozen == FROZEN[where]
        whole, _, _ = merging.merge(both[0][0], start(), both[0][2])
        assert_frozen(whole, where)


def test_models_trained_elsewhere_are_told_apart_where_they_come_in():
    own, found, sent = summarized("fedfisher_kfac", "inner", closed=False)
    models = found.models
    several = [jax.tree.map(lambda x, i=i: x[i], models) for i in range(3)]
    for elsewhere in (several, training.Trained(models), training.Trained(models, start())):
        again = merging.summarize(own, elsewhere, federation(), key=jax.random.key(1))
        assert again.frozen == sent.frozen
        assert_same(again.values, sent.values)
    several[1]["third"]["bias"] = several[1]["third"]["bias"] + 1e-12
    with pytest.raises(ValueError, match="'third/bias' is not trained"):
        merging.summarize(own, several, federation(), key=jax.random.key(1))
