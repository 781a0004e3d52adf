"""Cohorts that are drawn in proportion to the clients' availability."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import rounds
from fisherjax.rounds._cohorts import draw_cohort

MODEL = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
FEDAVG = fj.algorithms.fedavg()
HOW = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 2}
START = jnp.zeros((1, 1))


def by_night(number):
    """Let clients 0 and 1 take part in even rounds, all four in odd ones."""
    return jnp.where(number % 2 == 0, jnp.array([1.0, 1, 0, 0]), jnp.ones(4))


def alone(number):
    return jnp.where(number == 0, jnp.ones(4), jnp.array([0.0, 0, 0, 1]))


@pytest.fixture(scope="module")
def federation():
    return fj.clients.federation((jnp.ones((4, 1)), jnp.arange(4.0)[:, None]), [[0], [1], [2], [3]])


def play(availability, federation, cohort, number=2):
    method = rounds.federated(MODEL, FEDAVG, cohort=cohort, availability=availability, **HOW)
    state = method.init(START, federation)
    how = {"key": jax.random.key(0), "rounds": number}
    return [(state.params, done) for state, done in rounds.run(method, state, federation, **how)]


def test_clients_are_drawn_in_proportion_to_their_chances():
    chances = jnp.array([1.0, 2, 0, 5])
    keys = jax.random.split(jax.random.key(0), 20_000)
    one, two = (jax.vmap(lambda k, n=n: draw_cohort(k, 4, n, chances))(keys) for n in (1, 2))
    found = np.bincount(np.asarray(one).ravel(), minlength=4) / len(keys)
    np.testing.assert_allclose(found, chances / 8, atol=0.012)
    assert not (two == 2).any()
    assert (two[:, 0] < two[:, 1]).all()
    # The first is drawn alone or after another one.
    first = 1 / 8 + 2 / 8 * 1 / 6 + 5 / 8 * 1 / 3
    assert (two == 0).any(1).mean() == pytest.approx(first, abs=0.012)


@pytest.mark.long
def test_who_is_not_available_takes_no_part(federation):
    for number, (_, done) in enumerate(play(by_night, federation, 2, 4)):
        assert number % 2 == 1 or set(done.cohort.tolist()) == {0, 1}
    # In the second round of `alone` there is one client, whose target is 3.
    (before, _), (after, done) = play(alone, federation, 4)
    assert done.cohort.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(after, before + 0.1 * (3 - before), rtol=1e-6)


@pytest.mark.parametrize(
    ("availability", "cohort", "message"),
    [
        (by_night, 3, "cohort is 3, but 2 of 4 clients are available in round 0"),
        (lambda number: jnp.ones(3), 2, r"availability returned float32\[3\]"),
        (lambda number: None, 2, r"availability returned object\[\] for round 0; expected"),
        (lambda number: -jnp.ones(4), 2, "expected a finite number, zero or more"),
    ],
)
def test_what_is_no_availability_is_refused(federation, availability, cohort, message):
    with pytest.raises(ValueError, match=message):
        play(availability, federation, cohort)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_chances_of_a_later_round_are_checked_before_the_first(federation, wrong):
    later = lambda number: jnp.ones(4).at[2].set(jnp.where(number == 7, wrong, 1))  # noqa: E731
    with pytest.raises(ValueError, match=r"for round 7; expected a finite number, zero or more"):
        play(later, federation, 2, 9)


@pytest.mark.long
@pytest.mark.parametrize("kind", [np.array, list])
def test_chances_may_be_any_array(federation, kind):
    found = play(lambda number: kind([1.0, 0, 0, 1]), federation, 2)
    assert [done.cohort.tolist() for _, done in found] == [[0, 3], [0, 3]]


@pytest.mark.parametrize(
    "availability",
    [
        lambda number: np.ones((2, 4))[number],
        lambda number: jnp.ones(4) if number else jnp.arange(4.0),
    ],
    ids=["a table of NumPy", "a Python if"],
)
def test_a_number_that_is_traced_has_no_value(federation, availability):
    with pytest.raises(TypeError, match=r"traced; .*jnp\.asarray\(table\)\[number\]"):
        play(availability, federation, 2)


def test_availability_is_a_function():
    with pytest.raises(TypeError, match="availability is"):
        rounds.federated(MODEL, FEDAVG, cohort=1, availability=np.ones(4), **HOW)
