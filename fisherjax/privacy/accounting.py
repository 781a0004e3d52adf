"""Gaussian noise, and what it costs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fisherjax._core import checks
from fisherjax.typing import Array, Key, Scalar

_SOUND = 1e-2, 1e5
"""Between these noise multipliers the accountant's divergences are never too small."""


class Ledger(NamedTuple):
    """What was spent so far, by group of the sums; nothing in it depends on the data.

    Attributes:
        rounds: How many times the sums were released, this one included.
        sensitivity: How far one client moves the sum, in L2 norm: the clip.
        deviation: Standard deviation of the noise on every entry of the sum.
        noise_multiplier: deviation / sensitivity.
        info: What the wrapped algorithm reports, computed from the noisy sums.
    """

    rounds: Array
    sensitivity: Mapping[str, Scalar]
    deviation: Mapping[str, Scalar]
    noise_multiplier: Mapping[str, Scalar]
    info: Any


def epsilon(
    *spent: Ledger | float, delta: float, rounds: int = 1, cohort: tuple[int, int] | None = None
) -> float:
    """Compute the epsilon of everything that was released about the same clients, or examples.

    Without a cohort it is exact, the least epsilon for that delta, from noise of 1e-300 to 1e300
    and for any number of rounds: Gaussian releases are one Gaussian mechanism together, for which
    there is a formula. With a cohort it is an upper bound.

    Args:
        spent: Ledgers, or noise multipliers of `rounds` releases each; they compose.
        delta: What is left to chance, far below one over the number of clients.
        rounds: How often each of the multipliers was used; ledgers know it.
        cohort: (K, M) if each round drew K of M clients at random and in secret: neighbours then
            differ in one client that is another, at twice the sensitivity, and the cost is
            amplified by sampling without replacement. None assumes that everybody takes part in
            every round, and neighbours in one client that adds zeros.

    Returns:
        epsilon; infinity without noise, and where it is beyond the floating-point numbers.

    Raises:
        ImportError: With a cohort, without dp-accounting, the extra `privacy`.
        ValueError: If a number is out of range, or a ledger has no groups.
        TypeError: If something is no number, or known only while a function is traced.

    Example:
        >>> round(epsilon(1.0, delta=1e-5), 2), epsilon(0.0, delta=1e-5)
        (4.38, inf)

    Source: Balle, Wang, Improving the Gaussian mechanism for differential privacy, ICML 2018,
        theorem 8; Dong, Roth, Su, Gaussian differential privacy, JRSS B 2022, corollary 3.3, for
        the composition. With cohorts the least of that, which sampling never exceeds, and of the
        accountant of dp-accounting by Rényi divergences (Wang, Balle, Kasiviswanathan, AISTATS
        2019).
    """
    if checks.is_traced(spent, delta):
        raise TypeError(
            "epsilon got a number that is known only while a function is traced; call it outside "
            "of jax.jit and jax.vmap, with what they return."
        )
    checks.positive("delta", delta)
    checks.number("delta", delta, below=1.0)
    checks.count("rounds", rounds)
    checks.number("rounds", rounds)
    if cohort is not None:
        cohort = _checked_cohort(cohort)
    releases = [_release(one, rounds) for one in spent]
    if not releases:
        raise ValueError("Nothing was spent: expected ledgers or noise multipliers.")
    # What was never released costs nothing, whatever its noise.
    releases = [(sigma, times) for sigma, times in releases if times]
    if not all(sigma > 0 for sigma, _ in releases):
        return math.inf
    # How far one client moves all releases together, in units of their noise.
    moved = math.hypot(*(math.sqrt(times) / sigma for sigma, times in releases))
    if cohort is None:
        return _of_gaussian(moved, float(delta))
    # Another client in place of one: each sum moves by up to two clips.
    whole = _of_gaussian(2 * moved, float(delta))
    return min(whole, _of_cohorts(releases, cohort, float(delta)))


def noisy(key: Key, leaves: list[Array], deviations: Sequence[float]) -> list[Array]:
    """Add independent Gaussian noise to every leaf, of its standard deviation."""
    keys = jax.random.split(key, len(leaves))
    return [
        leaf + deviation * jax.random.normal(own, leaf.shape, leaf.dtype)
        for own, leaf, deviation in zip(keys, leaves, deviations, strict=True)
    ]


def _release(spent: Ledger | float, rounds: int) -> tuple[float, int]:
    """Return the noise multiplier of a round, and how many there were."""
    if not isinstance(spent, Ledger):
        checks.number("noise_multiplier", spent)
        return float(spent), rounds
    if not spent.noise_multiplier:
        raise ValueError(
            "A ledger has no groups of sums; expected one that a private merge returned, with a "
            "noise multiplier for each group."
        )
    for group, sigma in spent.noise_multiplier.items():
        checks.number(f"noise_multiplier of '{group}'", sigma)
    checks.number("rounds of a ledger", spent.rounds)
    # Groups that are noised apart are one Gaussian once each is divided by its deviation.
    multipliers = [float(sigma) for sigma in spent.noise_multiplier.values()]
    if not all(multipliers):
        return 0.0, int(spent.rounds)
    return 1 / math.hypot(*(1 / sigma for sigma in multipliers)), int(spent.rounds)


def _checked_cohort(cohort: Any) -> tuple[int, int]:
    try:
        drawn, everybody = (checks.count("cohort", size) for size in cohort)
    except (TypeError, ValueError):
        drawn, everybody = 1, 0
    if drawn > everybody:
        raise ValueError(
            f"cohort is {cohort!r}; expected (K, M), K of M clients in a round, both integers."
        )
    return drawn, everybody


def _of_gaussian(moved: float, delta: float) -> float:
    """Find the least epsilon of a Gaussian mechanism that moves by so many deviations.

    With phi and Phi of the standard normal, Mills' ratio m(x) = Phi(-x) / phi(x), and d the move,

        delta(epsilon) = Phi(-x) - e^epsilon Phi(-x - d) = phi(x) (m(x) - m(x + d)),
        x = epsilon / d - d / 2.

    The second form has no exponential of epsilon. Where d is small, and the difference would lose
    digits, it is the integral of -m'(s) = 1 - s m(s), by a Gauss-Legendre rule.
    """
    from scipy import special

    nodes, weights = np.polynomial.legendre.leggauss(8)

    def ratio(x: Any) -> Any:
        return math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2))

    def log_delta(place: float) -> float:
        x = place - moved / 2
        log_density = -x * x / 2 - math.log(2 * math.pi) / 2
        if moved <= 1:
            between = x + moved * (nodes + 1) / 2
            slopes = 1 - between * ratio(between)
            return log_density + math.log(moved / 2 * float(weights @ slopes))
        if x < 0:
            return math.log(special.ndtr(-x) - math.exp(log_density) * ratio(x + moved))
        return log_density + math.log(ratio(x) - ratio(x + moved))

    if not 0 < moved < math.inf:
        return moved
    # By bisection in epsilon / d; at x = 40 no delta that is a number is left.
    low, high = 0.0, moved / 2 + 40
    if log_delta(low) <= math.log(delta):
        return 0.0
    while low < (middle := (low + high) / 2) < high:
        if log_delta(middle) <= math.log(delta):
            high = middle
        else:
            low = middle
    return moved * high


def _of_cohorts(releases: list[tuple[float, int]], cohort: tuple[int, int], delta: float) -> float:
    """Bound the epsilon of releases about secret cohorts by their Rényi divergences."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "epsilon of cohorts needs dp-accounting; install it by pip install 'fisherjax[privacy]'"
        ) from error
    drawn, everybody = cohort
    # Without sampling the formula is exact. Tiny noise is not amplified; where noise is huge, the
    # accountant loses the digits of 1 - exp(-2 / sigma^2), and would say too little.
    if drawn == everybody or not all(_SOUND[0] <= sigma <= _SOUND[1] for sigma, _ in releases):
        return math.inf
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    for sigma, times in releases:
        # Another client in place of one: the sum moves by up to two clips.
        event = dp_accounting.GaussianDpEvent(sigma / 2)
        event = dp_accounting.SampledWithoutReplacementDpEvent(everybody, drawn, event)
        accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))
