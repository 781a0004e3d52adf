"""What secret cohorts cost, against integrals, closed forms and limits that are computed apart."""

import math
import time
import tracemalloc
from functools import partial

import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize, special

from fisherjax import privacy
from fisherjax.privacy import _cohorts


def curve(epsilon, sigma, rate):
    """Compute delta of one release about a secret cohort, both neighbours being alike."""
    if epsilon < 0:
        return math.exp(epsilon) * curve(-epsilon, sigma, rate) + 1 - math.exp(epsilon)
    distance, drawn = 2 / sigma, math.log1p(math.expm1(epsilon) / rate)
    tails = (
        special.ndtr(distance / 2 - drawn / distance),
        special.ndtr(-distance / 2 - drawn / distance),
    )
    return rate * (tails[0] - math.exp(drawn) * tails[1])


def mean_over_losses(function, sigma, rate):
    """Integrate a function of one release's loss, whose negative half mirrors the positive one."""
    distance = 2 / sigma

    def density(z, mean):
        return math.exp(-((z - mean) ** 2) / 2) / math.sqrt(2 * math.pi)

    def integrand(z):
        loss = math.log1p(rate * math.expm1(distance * z - distance**2 / 2))
        other = density(z, 0)
        own = (1 - rate) * other + rate * density(z, distance)
        return own * function(loss) + other * function(-loss)

    middle = distance / 2
    found, _ = integrate.quad(integrand, middle, middle + 30, limit=400, epsabs=0, epsrel=1e-9)
    return found + (1 - rate) * math.erf(distance / math.sqrt(8)) * function(0.0)


def cohort_of(rate):
    return round(1000 * rate), 1000


CASES = [(1.0, 0.01, 1e-5), (0.5, 0.2, 1e-6), (4.0, 0.1, 1e-8), (30.0, 0.5, 1e-3)]


@pytest.mark.parametrize(("sigma", "rate", "delta"), CASES)
def test_two_cohorts_cost_the_integral_of_the_curve_over_the_loss(sigma, rate, delta):
    def excess(epsilon):
        return (
            mean_over_losses(lambda loss: curve(epsilon - loss, sigma, rate), sigma, rate) - delta
        )

    exact = optimize.brentq(excess, 0, 60, xtol=1e-7)
    found = privacy.epsilon(sigma, delta=delta, rounds=2, cohort=cohort_of(rate))
    assert exact * (1 - 1e-6) <= found <= exact * (1 + 5e-4)


@pytest.mark.parametrize("delta", [0.2, 1e-5, 1e-15])
@pytest.mark.parametrize("sigma", [1e-3, 0.3, 2.0, 1e4])
def test_one_cohort_costs_the_formula(sigma, delta):
    """Balle, Barthe and Gaboardi's, inverted in numbers of 60 digits."""
    found = privacy.epsilon(sigma, delta=delta, cohort=(3, 10))
    with mpmath.workdps(60):
        rate, distance = mpmath.mpf("0.3"), 2 / mpmath.mpf(sigma)

        def spent(epsilon):
            drawn = mpmath.log(1 + (mpmath.exp(epsilon) - 1) / rate)
            tails = [mpmath.ncdf(s * distance / 2 - drawn / distance) for s in (1, -1)]
            return rate * (tails[0] - mpmath.exp(drawn) * tails[1])

        if found == 0:
            assert spent(mpmath.mpf(0)) <= delta
            return
        assert spent(mpmath.mpf(found) * (1 + mpmath.mpf("1e-9"))) <= delta
        assert spent(mpmath.mpf(found) * (1 - mpmath.mpf("1e-9"))) >= delta


@pytest.mark.parametrize(("sigma", "rounds"), [(0.01, 1), (0.3, 10), (1.0, 1000), (100.0, 10**6)])
def test_cohorts_of_nearly_all_clients_cost_what_no_sampling_costs(sigma, rounds):
    exact = privacy.epsilon(sigma / 2, delta=1e-5, rounds=rounds)
    found = _cohorts.cohort_epsilon([(sigma, rounds)], 1 - 1e-9, 1e-5)
    assert exact * (1 - 1e-6) <= found <= exact * (1 + 1e-3)


@pytest.mark.parametrize(
    ("sigma", "rate", "rounds", "largest"),
    [(1.0, 0.01, 1000, 10), (0.1, 0.1, 100, 1), (3.0, 0.001, 10**6, 10)],
)
def test_the_cost_of_many_cohorts_is_below_every_bound_by_moments(sigma, rate, rounds, largest):
    """Those of orders 1 + theta, by quadrature, with the conversion of Canonne, Kamath, Steinke."""
    bounds = []
    for theta in np.geomspace(0.003, largest, 20):
        moment = mean_over_losses(lambda loss, t=theta: math.exp(t * loss), sigma, rate)
        rest = math.log(1e5) + theta * math.log(theta / (1 + theta)) - math.log1p(theta)
        bounds.append((rounds * math.log(moment) + rest) / theta)
    found = privacy.epsilon(sigma, delta=1e-5, rounds=rounds, cohort=cohort_of(rate))
    # Moments are never exact, and never far off.
    assert 0.7 * min(bounds) < found < min(bounds)


def test_many_cohorts_with_much_noise_cost_a_gaussian_of_their_variance():
    """The central limit: a million losses of 0.002 each."""
    sigma, rate, rounds = 100.0, 0.1, 10**6
    variance = rounds * mean_over_losses(lambda loss: loss**2, sigma, rate)
    limit = privacy.epsilon(1 / math.sqrt(variance), delta=1e-5)
    found = privacy.epsilon(sigma, delta=1e-5, rounds=rounds, cohort=(1, 10))
    assert found == pytest.approx(limit, rel=2e-3)


def test_the_cost_of_cohorts_grows_with_rounds_and_rates_and_falls_with_noise():
    cost = partial(privacy.epsilon, delta=1e-5)
    assert (
        cost(1.0, rounds=5, cohort=(1, 50))
        < cost(1.0, rounds=6, cohort=(1, 50))
        < cost(1.0, rounds=6, cohort=(1, 49))
        < cost(0.99, rounds=6, cohort=(1, 49))
        < cost(0.99, rounds=6)
    )
    # Two noises compose, in any order, and to between what the two cost alone.
    both = cost(1.0, 2.0, rounds=3, cohort=(1, 50))
    assert both == pytest.approx(cost(2.0, 1.0, rounds=3, cohort=(1, 50)), rel=1e-9)
    assert cost(2.0, rounds=6, cohort=(1, 50)) < both < cost(1.0, rounds=6, cohort=(1, 50))


@pytest.mark.long
@pytest.mark.parametrize(("sigma", "total"), [(0.01, 10), (1.0, 100), (100.0, 1000)])
def test_a_million_cohorts_take_two_seconds_and_200_megabytes_at_most(sigma, total):
    tracemalloc.start()
    before = time.process_time()
    assert privacy.epsilon(sigma, delta=1e-5, rounds=10**6, cohort=(1, total)) > 0
    assert time.process_time() - before < 2
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


@pytest.mark.parametrize("cohort", [None, (1, 2)])
def test_sums_that_were_never_released_cost_nothing(cohort):
    never = privacy.Ledger(np.asarray(0), {}, {}, {"a": 1.0}, ())
    assert privacy.epsilon(never, delta=1e-5, cohort=cohort) == 0
    both = privacy.epsilon(never, 3.0, delta=1e-5, cohort=cohort)
    assert both == privacy.epsilon(3.0, delta=1e-5, cohort=cohort)


@pytest.mark.parametrize("sigma", [1e-300, 1e-4, 1e8, 1e300])
def test_noise_beyond_the_grid_costs_no_more_than_without_sampling(sigma):
    whole = privacy.epsilon(sigma / 2, delta=1e-5, rounds=3)
    assert privacy.epsilon(sigma, delta=1e-5, rounds=3, cohort=(1, 100)) == whole
