"""Every example that counts is shown once in an epoch, with its weight; no other row is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import Examples, clients

ROWS = 8
SCATTERED = [0.0, 2.0, 0.0, 0.5, 1.0, 0.0, 3.0, 0.0]
INDICES = [5, 1, 1, 7, 0, 2]

VIEWS = {
    "all of it": (None, None),
    "rows": (INDICES, None),
    "weights": (None, SCATTERED),
    "rows and scattered weights": (INDICES, [0.0, 1.0, 2.0, 0.0, 0.5, 0.0]),
    "padding behind": (INDICES, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
    "one example": (INDICES, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
    "nobody": (INDICES, [0.0] * 6),
}


def view_of(name, targets=True):
    indices, weights = VIEWS[name]
    indices = None if indices is None else jnp.array(indices)
    weights = None if weights is None else jnp.array(weights)
    inputs = jnp.arange(float(ROWS))
    return Examples(inputs, 10 * jnp.arange(ROWS) if targets else None, indices, weights)


def weight_of_rows(examples):
    """What each row of the data set counts in all."""
    rows = np.arange(ROWS) if examples.indices is None else np.asarray(examples.indices)
    weights = np.ones(len(rows)) if examples.weights is None else np.asarray(examples.weights)
    return np.bincount(rows, weights, ROWS)


def run_through(examples, batch_size):
    """Collect (inputs, targets, weights) of all minibatches."""
    number, batch = clients.minibatches(examples, batch_size)
    shown = [batch(i) for i in range(int(number))]
    return (
        [[np.asarray(x) for x in column] for column in zip(*shown, strict=True)]
        if shown
        else [[], [], []]
    )


@pytest.mark.parametrize("batch_size", [1, 3, 4, 8, 100])
@pytest.mark.parametrize("name", VIEWS)
def test_every_example_counts_once_with_its_weight(name, batch_size):
    examples = view_of(name)
    inputs, targets, weights = run_through(examples, batch_size)
    total = np.zeros(ROWS)
    for x, y, w in zip(inputs, targets, weights, strict=True):
        assert len(x) == len(y) == len(w) <= batch_size
        np.testing.assert_array_equal(y, 10 * x)
        np.add.at(total, x.astype(int), w)
    np.testing.assert_allclose(total, weight_of_rows(examples))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
@pytest.mark.parametrize("name", VIEWS)
def test_what_does_not_count_is_never_read(name, batch_size):
    examples = view_of(name)
    rows = np.arange(ROWS) if examples.indices is None else np.asarray(examples.indices)
    weights = np.ones(len(rows)) if examples.weights is None else np.asarray(examples.weights)
    used = np.flatnonzero(weights).max(initial=-1) + 1
    inputs, _, shown = run_through(examples, batch_size)
    # Nor is anything run behind the last example that counts.
    assert len(inputs) == -(-used // min(batch_size, len(rows)))
    assert set(np.concatenate([*inputs, []]).tolist()) <= set(rows[weights > 0].tolist())
    # A minibatch is filled up behind its own examples, at weight zero.
    flat = np.concatenate([*shown, []])
    np.testing.assert_array_equal(flat[:used], weights[:used])
    np.testing.assert_array_equal(flat[used:], 0)


def test_examples_without_targets_have_none_in_a_minibatch():
    _, batch = clients.minibatches(view_of("rows", targets=False), 2)
    assert batch(0)[1] is None


def test_minibatches_may_be_numbered_and_weighted_under_tracing():
    @jax.jit
    def total(examples):
        number, batch = clients.minibatches(examples, 3)

        def body(step, sum_):
            inputs, _, weights = batch(step)
            return sum_ + (inputs * weights).sum()

        return jax.lax.fori_loop(0, number, body, 0.0)

    for name in VIEWS:
        examples = view_of(name)
        assert total(examples) == weight_of_rows(examples) @ np.arange(ROWS)


@pytest.mark.parametrize("name", VIEWS)
def test_shuffling_permutes_what_counts_and_leaves_the_rest_behind(name, key):
    examples = view_of(name)
    mixed = clients.shuffled(key, examples)
    np.testing.assert_allclose(weight_of_rows(mixed), weight_of_rows(examples))
    counts = np.asarray(mixed.weights) > 0
    assert not np.any(np.diff(counts.astype(int)) > 0)
    inputs, _, weights = run_through(mixed, 3)
    total = np.zeros(ROWS)
    for x, w in zip(inputs, weights, strict=True):
        np.add.at(total, x.astype(int), w)
    np.testing.assert_allclose(total, weight_of_rows(examples))


@pytest.mark.long
def test_shuffles_do_not_depend_on_how_much_padding_there_is(key):
    inputs = jnp.arange(20.0)
    few = Examples(inputs, None, jnp.arange(5), jnp.ones(5))
    padded = Examples(inputs, None, jnp.arange(9) % 5, (jnp.arange(9) < 5) * 1.0)
    orders = [clients.shuffled(key, examples).indices[:5] for examples in (few, padded)]
    np.testing.assert_array_equal(*orders)
    assert orders[0].tolist() != list(range(5))


@pytest.mark.parametrize("client", [-1, 3, 7])
def test_a_client_that_there_is_none_of_is_refused(client):
    data = np.arange(6.0), np.arange(6.0)
    federation = clients.federation(data, [[0, 1], [], [2]])
    with pytest.raises(IndexError, match=f"client is {client}; expected 0 to 2"):
        clients.view(federation, client)
    assert clients.view(federation, 1).weights.sum() == 0
