"""A Fisher of some examples is that of rows drawn without replacement, whatever is behind them."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import Examples, algorithms, fisher

# Inputs are unit vectors: an entry of the diagonal is the share of its example.
COUNT = 12
MODEL = fj.Model(lambda w, x: x @ w["w"], fj.likelihoods.gaussian)
PARAMS = {"w": jnp.ones((COUNT, 1))}
ALL = Examples(jnp.eye(COUNT))
diagonal = partial(fisher.diagonal, MODEL, PARAMS, batch_size=5)


def shares(examples, seed, most):
    return np.asarray(diagonal(examples, key=jax.random.key(seed), max_examples=most).entries["w"])


def test_each_example_is_drawn_once_and_equally_often():
    draws = np.stack([shares(ALL, seed, 5) for seed in range(150)])[..., 0]
    assert (np.count_nonzero(draws, 1) == 5).all()
    np.testing.assert_allclose(draws[draws != 0], 1 / 5, rtol=1e-6)
    # Unbiased: its mean is the Fisher of all, within four standard errors.
    error = 4 * np.sqrt(7 / 12 / 5 * 11 / 12 / 150 / 5)
    np.testing.assert_allclose(draws.mean(0), 1 / COUNT, atol=error)


@pytest.mark.long
def test_enough_for_all_changes_no_bit():
    for most in (None, COUNT, 100):
        np.testing.assert_array_equal(shares(ALL, 0, most), shares(ALL, 1, None))


@pytest.mark.long
def test_weights_count_and_rows_of_weight_zero_are_drawn_last():
    weights = jnp.where(jnp.arange(COUNT) % 2 == 0, jnp.arange(COUNT) + 1.0, 0)
    drawn = shares(ALL._replace(weights=weights), 3, 4)[:, 0]
    assert np.count_nonzero(drawn) == 4
    assert not drawn[1::2].any()
    chosen = np.flatnonzero(drawn)
    np.testing.assert_allclose(drawn[chosen], weights[chosen] / weights[chosen].sum(), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        partial(algorithms.fedfisher, MODEL),
        partial(algorithms.fisher_merge, MODEL),
        partial(algorithms.fedlpa, MODEL, kind=fisher.true),
        partial(algorithms.regmean, MODEL),
    ],
)
def test_clients_of_any_size_draw_what_they_draw_alone(make):
    data = np.eye(COUNT, dtype=np.float32), np.zeros((COUNT, 1), np.float32)
    together = fj.clients.federation(data, [range(7), [], range(7, 10), [10, 11]])
    method, models = make(max_examples=2, batch_size=2), [PARAMS] * 4
    summarize = partial(fj.merging.summarize, method, models, together, key=jax.random.key(0))
    updates = summarize(clients_per_chunk=4)
    chex.assert_trees_all_close(updates, summarize(clients_per_chunk=1), rtol=1e-6)
    # What it draws are two examples of its own.
    matrices = [x for x in jax.tree.leaves(updates.values) if x.shape[1:3] == (COUNT, COUNT)]
    for matrix in matrices:
        counted = [np.count_nonzero(np.diagonal(x)) for x in matrix]
        assert counted == [2, 0, 2, 2]
    assert matrices or make.func is algorithms.fisher_merge


@pytest.mark.long
def test_what_is_drawn_needs_a_key():
    for structure in (fisher.diagonal, fisher.kfac, fisher.full):
        with pytest.raises(ValueError, match="max_examples is 3 of 12 examples, which are drawn"):
            structure(MODEL, PARAMS, ALL, max_examples=3)
        with pytest.raises(ValueError, match="max_examples is 0"):
            structure(MODEL, PARAMS, ALL, max_examples=0)
        structure(MODEL, PARAMS, ALL, max_examples=12)
