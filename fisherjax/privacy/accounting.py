"""Gaussian noise and its privacy accounting."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fisherjax._core import checks
from fisherjax.privacy import _cohorts
from fisherjax.typing import AnyArray, Array, Key, Scalar

_MOST_CLIENTS = 10**15
_NOISE_OF_COHORTS = 1e-3, 1e6
_ROUNDS_OF_COHORTS = 10**12
"""Noise multipliers and numbers of rounds for which the grid of `_cohorts` is computed."""


class Ledger(NamedTuple):
    """The privacy spent so far, by group of the sums; nothing in it depends on the data.

    Fingerprints are hashes of keys, from which a system key cannot be computed. A key that
    `jax.random.key` made from a number of 32 bits is found from its fingerprint by trying all.

    Attributes:
        rounds: Number of releases of the sums, including this one.
        sensitivity: L2 norm by which one client can change the sum: the clip.
        deviation: Standard deviation of the noise on every entry of the sum.
        noise_multiplier: deviation / sensitivity.
        info: The `info` of the wrapped algorithm, computed from the noisy sums.
        fingerprints: [1024, 2] hashes of the keys of the latest releases; other rows are zero.
    """

    rounds: Array
    sensitivity: Mapping[str, Scalar]
    deviation: Mapping[str, Scalar]
    noise_multiplier: Mapping[str, Scalar]
    info: Any
    fingerprints: AnyArray | tuple[()] = ()


def epsilon(
    *spent: Ledger | float, delta: float, rounds: int = 1, cohort: tuple[int, int] | None = None
) -> float:
    """Compute the epsilon of all releases about the same clients, or the same examples.

    Without a cohort the result is exact: it is the smallest epsilon for this delta, for noise
    multipliers from 1e-300 to 1e300 and any number of rounds. Several Gaussian releases are
    together one Gaussian mechanism, for which there is a formula. With a cohort the result is an
    upper bound: a formula for one release, and the distribution of the privacy loss on a grid of
    bounded size for several. It is never above the cost without sampling, which is what it is for
    noise multipliers below 0.001 or above 1e6.

    Noise is real-valued here, but floating-point numbers are not: see `private`.

    Args:
        spent: Ledgers, or noise multipliers of `rounds` releases each. Their costs compose.
        delta: Probability with which the guarantee may fail; choose it far below one over the
            number of clients.
        rounds: Number of releases with each noise multiplier (default 1). Ledgers have their own
            number, and are refused beside another one.
        cohort: (K, M) if each round drew K of M clients at random and kept the draw secret.
            Neighbouring data sets then differ in one client that is replaced by another, which
            doubles the sensitivity, and sampling without replacement amplifies privacy. None
            (default) assumes that every client takes part in every round, and that neighbours
            differ in one client whose contribution is zero.

    Returns:
        epsilon. It is infinite without noise, and where it exceeds the floating-point numbers.

    Raises:
        ValueError: If a number is out of range, a ledger has no groups, or one key made the noise
            of two releases.
        TypeError: If an argument is not a number, or is known only while a function is traced.

    Example:
        >>> round(epsilon(1.0, delta=1e-5), 2), epsilon(0.0, delta=1e-5)
        (4.38, inf)

    Source: Balle, Wang, Improving the Gaussian mechanism for differential privacy, ICML 2018,
        theorem 8; Dong, Roth, Su, Gaussian differential privacy, JRSS B 2022, corollary 3.3, for
        the composition. With a cohort: Balle, Barthe, Gaboardi, Privacy amplification by
        subsampling, NeurIPS 2018, theorem 9, and Zhu, Dong, Wang, Optimal accounting of
        differential privacy via characteristic function, AISTATS 2022, for the composition.
    """
    # Bisection and SciPy need numbers. Under `jit` they would fail with an error about a tracer.
    if checks.is_traced(spent, delta):
        raise TypeError(
            "epsilon got a number that is known only while a function is traced; call it outside "
            "of jax.jit and jax.vmap, with the numbers that these return."
        )
    checks.positive("delta", delta)
    checks.number("delta", delta, below=1.0)
    checks.count("rounds", rounds)
    checks.number("rounds", rounds)
    if cohort is not None:
        cohort = _checked_cohort(cohort)
    ledgers = [one for one in spent if isinstance(one, Ledger)]
    if ledgers and rounds != 1:
        raise ValueError(
            f"rounds is {rounds}, but a ledger has its own number of rounds, which this would "
            "not change; pass ledgers alone, or each noise multiplier once for each of its rounds."
        )
    _check_keys(ledgers)
    # Everything released about the same clients composes, whichever method released it.
    releases = [_release(one, rounds) for one in spent]
    if not releases:
        raise ValueError(
            "epsilon got no releases; expected at least one ledger or noise multiplier."
        )
    # Sums that were never released cost nothing, whatever their noise.
    releases = [(sigma, times) for sigma, times in releases if times]
    # A release without noise reveals its sum exactly, which no other noise can repair.
    if not all(sigma > 0 for sigma, _ in releases):
        return math.inf
    # The distance by which one client moves all releases together, in units of their noise.
    distance = math.hypot(*(math.sqrt(times) / sigma for sigma, times in releases))
    if cohort is None or not releases:
        return _gaussian_epsilon(distance, float(delta))
    # One client is replaced by another: each sum moves by up to two clips.
    unsampled = _gaussian_epsilon(2 * distance, float(delta))
    return min(unsampled, _cohort_epsilon(releases, cohort[0] / cohort[1], float(delta)))


def add_noise(key: Key, leaves: list[Array], deviations: Sequence[float]) -> list[Array]:
    """Add independent Gaussian noise to the leaves, with one standard deviation for each."""
    # Leaves of equal shapes must not share their noise, which would cancel in their difference.
    keys = jax.random.split(key, len(leaves))
    return [
        leaf + deviation * jax.random.normal(leaf_key, leaf.shape, leaf.dtype)
        for leaf_key, leaf, deviation in zip(keys, leaves, deviations, strict=True)
    ]


def _release(spent: Ledger | float, rounds: int) -> tuple[float, int]:
    """Return the noise multiplier of one release, and the number of releases."""
    if not isinstance(spent, Ledger):
        checks.number("noise_multiplier", spent)
        return float(spent), rounds
    if not (isinstance(spent.noise_multiplier, Mapping) and spent.noise_multiplier):
        raise ValueError(
            "A ledger has no groups of sums; expected a ledger that a private merge returned, "
            "which has a noise multiplier for each group."
        )
    for group, sigma in spent.noise_multiplier.items():
        checks.number(f"noise_multiplier of '{group}'", sigma)
    times = checks.count("rounds of a ledger", _as_int(spent.rounds), least=0)
    checks.number("rounds of a ledger", times)
    # Divided by their deviations, groups with independent noise are one Gaussian mechanism.
    multipliers = [float(sigma) for sigma in spent.noise_multiplier.values()]
    if not all(multipliers):
        return 0.0, times
    return 1 / math.hypot(*(1 / sigma for sigma in multipliers)), times


def _as_int(value: Any) -> Any:
    """Return an integer array of shape () as an integer, and anything else as it is."""
    is_array = isinstance(value, (np.ndarray, jax.Array)) and not value.shape
    return int(value) if is_array and np.issubdtype(value.dtype, np.integer) else value


def _check_keys(ledgers: Sequence[Ledger]) -> None:
    """Raise ValueError if a key made the noise of two releases."""
    rows = [tuple(row) for one in ledgers for row in np.asarray(one.fingerprints).tolist()]
    used = [row for row in rows if any(row)]
    if len(set(used)) < len(used):
        raise ValueError(
            "One key made the noise of two releases in these ledgers, and the difference of two "
            "releases with the same noise reveals what changed between them; expected another key "
            "for each release, such as privacy.system_key(). Of a run of several rounds pass the "
            "last ledger only, which counts all of them."
        )


def _checked_cohort(cohort: Any) -> tuple[int, int]:
    try:
        drawn, total = (checks.count("cohort", size, most=_MOST_CLIENTS) for size in cohort)
    except (TypeError, ValueError):
        drawn, total = 1, 0
    if drawn > total:
        raise ValueError(
            f"cohort is {cohort!r}; expected (K, M), for K of M clients in each round, both "
            "integers with 1 <= K <= M <= 10^15."
        )
    return drawn, total


def _gaussian_epsilon(distance: float, delta: float) -> float:
    """Compute the smallest epsilon of a Gaussian mechanism.

    The means for two neighbouring data sets differ by d = `distance` standard deviations. With phi
    and Phi of the standard normal distribution, and Mills' ratio m(x) = Phi(-x) / phi(x),

        delta(epsilon) = Phi(-x) - e^epsilon Phi(-x - d) = phi(x) (m(x) - m(x + d)),
        x = epsilon / d - d / 2.

    The second form has no exponential of epsilon. Where d is small, the difference would lose
    digits; there it is computed as the integral of -m'(s) = 1 - s m(s) by a Gauss-Legendre rule.
    """
    from scipy import special

    nodes, weights = np.polynomial.legendre.leggauss(8)

    def ratio(x: Any) -> Any:
        return math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2))

    def log_delta(place: float) -> float:
        x = place - distance / 2
        log_density = -x * x / 2 - math.log(2 * math.pi) / 2
        if distance <= 1:
            between = x + distance * (nodes + 1) / 2
            slopes = 1 - between * ratio(between)
            return log_density + math.log(distance / 2 * float(weights @ slopes))
        if x < 0:
            return math.log(special.ndtr(-x) - math.exp(log_density) * ratio(x + distance))
        return log_density + math.log(ratio(x) - ratio(x + distance))

    if not 0 < distance < math.inf:
        return distance
    # Bisection in epsilon / d. At x = 40, delta is below every positive floating-point number.
    low, high = 0.0, distance / 2 + 40
    if log_delta(low) <= math.log(delta):
        return 0.0
    while low < (middle := (low + high) / 2) < high:
        if log_delta(middle) <= math.log(delta):
            high = middle
        else:
            low = middle
    return distance * high


def _cohort_epsilon(releases: list[tuple[float, int]], rate: float, delta: float) -> float:
    """Bound the epsilon of releases about secret cohorts; infinity leaves that without sampling."""
    rounds = sum(times for _, times in releases)
    if rounds == 1:
        [(sigma, _)] = releases
        # Balle, Barthe, Gaboardi: delta(epsilon) = q delta'(epsilon') for one release.
        return _cohorts.amplified(_gaussian_epsilon(2 / sigma, delta / rate), rate)
    low, high = _NOISE_OF_COHORTS
    is_known = rounds <= _ROUNDS_OF_COHORTS and all(low <= sigma <= high for sigma, _ in releases)
    return _cohorts.cohort_epsilon(releases, rate, delta) if is_known and rate < 1 else math.inf
