"""Discrete Gaussian noise has its distribution exactly, and costs no more than what is said."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import optimize, stats

from fisherjax import privacy
from fisherjax.privacy import discrete
from fisherjax.secure_aggregation import fixed_point

NUMBER = 20_000


def probabilities(deviation, most):
    """Return the integers up to `most`, and their probabilities."""
    values = np.arange(-most, most + 1)
    density = np.exp(-(values**2) / (2 * deviation**2))
    return values, density / density.sum()


@pytest.mark.parametrize("deviation", [0.3, 1.0, 4.5, Fraction(70, 3)])
def test_the_noise_has_the_probabilities_of_the_discrete_gaussian(deviation):
    noise = privacy.discrete_gaussian(NUMBER, deviation, entropy=np.random.default_rng(1).bytes)
    values, expected = probabilities(float(deviation), math.ceil(12 * deviation))
    counts = np.bincount(noise - values[0], minlength=len(values))
    assert counts.sum() == NUMBER == len(noise)
    # Rare integers are counted together.
    rare = expected * NUMBER < 10
    seen = [*counts[~rare], counts[rare].sum()]
    wanted = np.array([*expected[~rare], expected[rare].sum()]) * NUMBER
    # Fails by chance once in ten thousand generators; this one is fixed.
    assert stats.chisquare(seen, wanted * NUMBER / wanted.sum()).pvalue > 1e-4
    variance = values**2 @ expected
    assert noise.var() == pytest.approx(variance, rel=5 * math.sqrt(3 / NUMBER) / min(variance, 1))
    assert abs(noise.mean()) < 5 * math.sqrt(variance / NUMBER)


@pytest.mark.parametrize("deviation", [2.0**-20, 1e6, 2.0**50])
def test_noise_of_any_size_is_sampled(deviation):
    noise = privacy.discrete_gaussian((40, 50), deviation, entropy=np.random.default_rng(1).bytes)
    assert (noise.shape, noise.dtype) == ((40, 50), np.int64)
    if deviation > 1:
        assert stats.kstest(noise.ravel() / deviation, "norm").pvalue > 1e-4
    else:
        assert not noise.any()


def test_a_coin_is_decided_by_as_many_words_as_it_needs():
    """Heads if the uniform number whose digits the words are is below the fraction, exactly."""
    third = 2**64 // 3  # every digit of a third to the base 2^64
    first = [third - 1, third + 1, third, third, third, 2**64 - 1, 0]
    # Three coins are open after the first words, and one of them after the second.
    words = iter([*first, third - 1, third, third + 1, 0])
    above = np.array([1, 1, 1, 1, 1, 3, 0], object)

    def draw(number):
        return np.array([*itertools.islice(words, number)], np.uint64)

    heads = discrete._coin(above, 3, draw)
    assert heads.tolist() == [True, False, True, True, False, True, False]
    assert next(words, None) is None


def test_entropy_alone_decides():
    draw = [np.random.default_rng(seed).bytes for seed in (1, 1, 2)]
    one, same, other = (privacy.discrete_gaussian(100, 9.0, entropy=x) for x in draw)
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert (privacy.discrete_gaussian(100, 9.0) != privacy.discrete_gaussian(100, 9.0)).any()


@pytest.mark.parametrize(
    "deviation", [0.0, -1.0, math.nan, math.inf, True, "1", None, 2.0**51, [1.0]]
)
def test_a_deviation_that_makes_no_sense_is_refused(deviation):
    with pytest.raises((ValueError, TypeError), match="deviation is"):
        privacy.discrete_gaussian(3, deviation)


@pytest.mark.parametrize("shape", [-1, 2.5, (1, -2), True, (None,)])
def test_a_shape_that_makes_no_sense_is_refused(shape):
    with pytest.raises(ValueError, match="An axis of shape is"):
        privacy.discrete_gaussian(shape, 1.0)


def test_entropy_that_makes_no_sense_is_refused():
    with pytest.raises(TypeError, match="entropy is b'123'"):
        privacy.discrete_gaussian(3, 1.0, entropy=b"123")
    with pytest.raises(ValueError, match="returned 3 bytes; expected 24 random"):
        privacy.discrete_gaussian(3, 1.0, entropy=lambda n: b"123")
    with pytest.raises(ValueError, match="returned a list; expected 24 random"):
        privacy.discrete_gaussian(3, 1.0, entropy=lambda n: [1])


@pytest.mark.parametrize("words", [[0], [2**64 - 1], [0, 1]])
def test_entropy_that_is_not_random_is_refused_instead_of_taking_for_ever(words):
    stream = itertools.cycle(b"".join(word.to_bytes(8, "little") for word in words))
    with pytest.raises(ValueError, match=r"equal bytes|the same bytes|not random"):
        privacy.discrete_gaussian(3, 1.0, entropy=lambda n: bytes(itertools.islice(stream, n)))


# What it costs


def least_delta(moved, both, epsilon):
    """Compute the exact delta of noise with these probabilities, moved by some places."""
    one, other = both[: len(both) - moved], both[moved:]
    return np.maximum(one - math.exp(epsilon) * other, 0).sum()


@pytest.mark.parametrize(("deviation", "moved"), [(1.0, 1), (3.0, 7), (10.0, 10)])
def test_the_cost_of_one_noise_is_a_bound_and_the_best_by_moments(deviation, moved):
    found = privacy.discrete_epsilon(deviation, sensitivity=moved, delta=1e-5)
    _, mass = probabilities(deviation, math.ceil(40 * deviation) + moved)
    assert least_delta(moved, mass, found) <= 1e-5
    assert least_delta(moved, mass, 0.85 * found) > 1e-5
    rho = moved**2 / deviation**2 / 2

    def bound(order):
        rest = math.log(1e5) + (order - 1) * math.log1p(-1 / order) - math.log(order)
        return rho * order + rest / (order - 1)

    best = optimize.minimize_scalar(lambda x: bound(1 + math.exp(x)), bounds=(-10, 10)).fun
    assert best <= found <= best * (1 + 1e-6)


@pytest.mark.parametrize(("deviation", "clients"), [(0.5, 4), (0.6, 9), (1.0, 20)])
@pytest.mark.parametrize("moved", [1, 3])
def test_the_cost_of_the_noise_of_several_clients_is_a_bound(deviation, clients, moved):
    """Of sums that are no discrete Gaussians, convolved here."""
    _, one = probabilities(deviation, 40)
    mass = np.ones(1)
    for _ in range(clients):
        mass = np.convolve(mass, one)
    found = privacy.discrete_epsilon(deviation, sensitivity=moved, delta=1e-6, clients=clients)
    assert least_delta(moved, mass, found) <= 1e-6
    if deviation == 1.0:
        assert least_delta(moved, mass, 0.85 * found) > 1e-6


def test_the_cost_of_several_clients_grows_with_rounds_and_numbers_and_falls_with_clients():
    how = {"sensitivity": 20.0, "delta": 1e-5}
    cost = privacy.discrete_epsilon
    assert cost(4.0, **how, clients=25) == pytest.approx(cost(20.0, **how), rel=1e-6)
    assert cost(0.7, **how, clients=25) < cost(0.7, **how, clients=25, size=100)
    assert (
        cost(2.0, **how, clients=26) < cost(2.0, **how, clients=25) < cost(1.9, **how, clients=25)
    )
    # Two rounds are one with the noise divided by the root of two.
    assert cost(20.0, **how, rounds=2) == pytest.approx(cost(20 / math.sqrt(2), **how), rel=1e-9)
    # Ten million clients have noise of a tiny deviation each, and terms of the bound beyond memory.
    assert cost(1.0, **how, clients=10**7) <= cost(1.0, **how, clients=10**7, size=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deviation": 0.0}, "deviation is 0.0"),
        ({"deviation": math.nan}, "deviation is nan"),
        ({"deviation": 0.4, "clients": 2}, "expected at least 0.5"),
        ({"sensitivity": -1.0}, "sensitivity is -1"),
        ({"sensitivity": math.inf}, "sensitivity is inf"),
        ({"delta": 1.0}, "delta < 1"),
        ({"clients": 2.5}, "clients is 2.5"),
        ({"clients": True}, "clients is True"),
        ({"size": 0}, "size is 0"),
        ({"rounds": -1}, "rounds is -1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(options, said):
    given = {"deviation": 1.0, "sensitivity": 1.0, "delta": 1e-5} | options
    with pytest.raises(ValueError, match=said):
        privacy.discrete_epsilon(given.pop("deviation"), **given)


def test_noise_is_added_to_encoded_integers_before_they_are_masked():
    """The sum is that of the rounded values and of the noise, to the last digit."""
    draw = np.random.default_rng(3)
    values = draw.normal(size=(5, 4))
    agreed = fixed_point.ring(values[0], 100.0, 5)
    [leaf] = agreed.leaves
    noise = [
        privacy.discrete_gaussian(leaf.shape, math.ldexp(0.5, leaf.exponent), entropy=draw.bytes)
        for _ in values
    ]
    sent = [
        fixed_point.encode(agreed, x) + n.astype(agreed.dtype)
        for x, n in zip(values, noise, strict=True)
    ]
    found = fixed_point.decode(agreed, np.sum(sent, axis=0, dtype=agreed.dtype))
    rounded = np.rint(np.ldexp(values, leaf.exponent)).astype(int).sum(0)
    np.testing.assert_array_equal(found, np.ldexp(rounded + np.sum(noise, axis=0), -leaf.exponent))
