"""Columns of output factors: the same whether they are written out or kept by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import Examples, Model, fisher, likelihoods
from fisherjax.fisher import _columns
from fisherjax.typing import ByPosition

SOME = {
    "outputs": ((19, 4, 3), jnp.asarray),  # K, B, C
    "sequences": ((2, 4, 5, 3), ByPosition),  # k, B, L, C
    "images": ((2, 4, 2, 3, 3), ByPosition),
    "long sequences": ((1, 2, 17, 2), ByPosition),
}


@pytest.fixture(params=SOME)
def some(request, x64):
    shape, form = SOME[request.param]
    return form(jnp.asarray(np.random.default_rng(0).normal(size=shape)))


def test_columns_by_number_are_those_written_out_and_zero_after_the_last(some, written_out):
    every = np.asarray(written_out(some))
    numbers = np.array([3, len(every) - 1, 0, len(every), len(every) + 5, 7])
    expected = np.concatenate([every, np.zeros((6, *every.shape[1:]))])[numbers]
    np.testing.assert_array_equal(_columns.select(some, numbers), expected)


@pytest.mark.parametrize("at_once", [1, 4, 16, 100])
def test_a_sum_over_columns_is_of_each_once_and_takes_no_more_at_once(some, written_out, at_once):
    sizes = []

    def squares(few):
        sizes.append(len(few))
        return {"sum": few.sum(0), "squares": jnp.einsum("kb...,kb...->b", few, few)}

    found = _columns.sum_over_columns(squares, some, at_once)
    every = written_out(some)
    expected = {"sum": every.sum(0), "squares": jnp.einsum("kb...,kb...->b", every, every)}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-13)
    # A column of a sequence counts as often as it has positions: so much is written out.
    positions = np.prod(every.shape[2:-1], dtype=int)
    assert max(sizes) * positions <= max(at_once, positions)


def test_squares_of_weighted_columns_carry_the_weights(some, written_out):
    w = np.arange(len(_columns.values(some)[0])) / 2
    squares = np.square(written_out(some))
    expected = squares * w.reshape(1, -1, *(1,) * (squares.ndim - 2))
    np.testing.assert_allclose(
        np.square(written_out(_columns.weight(some, w))), expected, rtol=1e-12
    )


def test_blocks_have_the_products_of_all_columns(some, written_out):
    every, blocks = np.asarray(written_out(some)), _columns.blocks(some)
    examples, outputs = every.shape[1], np.prod(every.shape[2:])
    flat = every.reshape(len(every), examples, outputs)
    products = np.einsum("kni,knj->nij", flat, flat)
    by_position = np.einsum("knpi,knpj->npij", blocks, blocks)
    found = np.zeros_like(products)
    width = blocks.shape[-1]
    for number in range(blocks.shape[2]):
        place = slice(number * width, (number + 1) * width)
        found[:, place, place] = by_position[:, number]
    np.testing.assert_allclose(found, products, rtol=1e-12, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize("name", ["categorical", "gaussian", "bernoulli"])
def test_a_user_may_write_columns_out(sequence, written_out, name):
    """A likelihood or kind that returns an array means the same as one that returns positions."""
    apply, params, x = sequence
    likelihood = getattr(likelihoods, name)
    written = likelihood._replace(factor=lambda z: written_out(likelihood.factor(z)))
    for structure in (fisher.diagonal, fisher.kfac, fisher.full):
        short, long = (
            structure(Model(apply, one), params, Examples(x), kind=fisher.true)
            for one in (likelihood, written)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14), short, long
        )
