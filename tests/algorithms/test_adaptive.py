"""FedAdam and FedYogi against their formulas by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms

SECOND = {
    "fedadam": lambda v, d: 0.99 * v + 0.01 * d**2,
    "fedyogi": lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2),
}
"""Second moments after a change d, by method."""


def play(method, start, means):
    """Merge two clients with each mean; return the models after each merge."""
    params, state, found = start, None, []
    for mean in means:
        values = {"params": jnp.stack([mean - 1, mean + 1])}
        how = {} if state is None else {"state": state}
        params, state, _ = fj.merging.merge(
            method, params, algorithms.Update(values, method.kind), **how
        )
        found.append(params)
    return found


@pytest.mark.parametrize("name", SECOND)
def test_merges_are_those_of_a_loop_by_hand(x64, name):
    means = np.random.default_rng(0).normal(size=(4, 3))
    found = play(getattr(algorithms, name)(learning_rate=0.2), jnp.ones(3), jnp.asarray(means))
    w, m, v = np.ones(3), 0, np.full(3, 1e-6)
    for mean, merged in zip(means, found, strict=True):
        d = mean - w
        m, v = 0.9 * m + 0.1 * d, SECOND[name](v, d)
        w = w + 0.2 * m / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(merged, w, rtol=1e-12)


@pytest.mark.parametrize("name", SECOND)
def test_with_much_tau_a_first_step_is_along_the_change(x64, name):
    """The second moment starts at tau^2, and squares of changes do not count beside it."""
    tau = 1e4
    method = getattr(algorithms, name)(learning_rate=0.2, b2=0.99, tau=tau)
    (found,) = play(method, jnp.ones(2), jnp.asarray([[3.0, -1.0]]))
    root = np.sqrt(SECOND[name](tau**2, 2.0))
    step = 0.2 * 0.1 * np.array([2.0, -2.0]) / (root + tau)
    np.testing.assert_allclose(found - 1, step, rtol=1e-6)


@pytest.mark.parametrize(("options", "message"), [({"b2": 1.0}, "b2 is 1.0"), ({"tau": 0}, "tau")])
def test_what_is_out_of_range_is_refused(options, message):
    for name in SECOND:
        with pytest.raises(ValueError, match=message):
            getattr(algorithms, name)(**options)
