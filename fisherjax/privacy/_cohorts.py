"""Epsilon of Gaussian noise on sums over secret cohorts, from the distribution of the privacy loss.

Cohorts are K of M clients, drawn without replacement; neighbours replace one client. One release
with noise sigma then satisfies, at every epsilon >= 0 and for both orders of the neighbours,

    delta(epsilon) <= q H(epsilon'),    e^epsilon' = 1 + (e^epsilon - 1) / q,    q = K / M,

where H is the curve of two normal distributions whose means are 2 / sigma standard deviations
apart. This curve is that of a loss whose negative half mirrors its positive one, and the losses of
several releases add up.

The loss is put on a grid: every loss between two points moves to both of them, such that the curve
becomes its own chord, which lies above it. Sums of losses are powers of a Fourier transform. Before
that, probabilities are tilted by e^(theta loss) towards the losses that matter, so that rounding is
relative to delta, and so that few standard deviations have to be covered. What is outside of the
grid is bounded and counted. The grid has at most `POINTS` points, whatever the noise and the
rounds: then the result is less tight, and still a bound.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

POINTS = 2**20
"""Largest number of points of the grid."""
TOLERANCE = 1e-4
"""Relative error of epsilon that the grid causes, if `POINTS` suffice."""
_OUTSIDE = 1e-6  # share of delta for losses beyond the largest point
_DEVIATIONS = 12.0  # standard deviations of the tilted sum on each side of the grid


class _Loss(NamedTuple):
    """Loss of one release: points [2 n + 1], logarithms of their mass, and mass at infinity."""

    points: np.ndarray
    log_mass: np.ndarray
    infinite: float
    times: int

    def log_moment(self, theta: float) -> float:
        """Return log E e^(theta loss) without the mass at infinity."""
        exponents = self.log_mass + theta * self.points
        largest = exponents.max()
        return float(largest + math.log(np.exp(exponents - largest).sum()))

    def tilted(self, theta: float) -> np.ndarray:
        """Return probabilities in proportion to mass times e^(theta loss)."""
        return np.exp(self.log_mass + theta * self.points - self.log_moment(theta))


def cohort_epsilon(releases: Sequence[tuple[float, int]], rate: float, delta: float) -> float:
    """Bound the epsilon of releases (noise multiplier, times) about cohorts with rate q = K / M.

    Source: Balle, Barthe, Gaboardi, Privacy amplification by subsampling, NeurIPS 2018, theorem 9,
        for the curve; Zhu, Dong, Wang, Optimal accounting of differential privacy via
        characteristic function, AISTATS 2022, theorems 10 and 11, for the composition; Doroshenko
        et al., Connect the dots, PoPETs 2022, for the grid; Canonne, Kamath, Steinke, The discrete
        Gaussian for differential privacy, NeurIPS 2020, proposition 12, for the start.
    """
    rounds = sum(times for _, times in releases)
    tops = [_largest_loss(sigma, rate, _OUTSIDE * delta / rounds) for sigma, _ in releases]
    coarse = max(tops) / 2**11

    def losses(step: float) -> list[_Loss]:
        numbers = (math.ceil(top / step) for top in tops)
        return [_loss(*one, rate, step, n) for one, n in zip(releases, numbers, strict=True)]

    # A first grid finds the tilt: that of the best bound by exponential moments.
    first, delta = losses(coarse), delta * (1 - _OUTSIDE)
    bounds = {t: _moment_epsilon(first, t, delta) for t in np.geomspace(1e-12, 1e12, 241).tolist()}
    theta, bound = min(bounds.items(), key=lambda item: item[1])
    deviation = math.sqrt(sum(one.times * _variance(one, theta) for one in first))
    width, points = 2 * (_DEVIATIONS * deviation + max(tops) + coarse), 0
    while bound > 0:
        # Chords add at most step^2 (1 + theta) / 8 to epsilon for each round.
        wanted = width * math.sqrt(rounds * (1 + theta) / (8 * TOLERANCE * bound))
        if min(wanted, POINTS) <= points:
            break
        points = 2 ** math.ceil(math.log2(min(max(wanted, 2**10), POINTS)))
        # A smaller bound may want a finer grid.
        bound = min(bound, _composed(losses(width / points), theta, points, delta, bound))
    return max(bound, 0.0)


def _largest_loss(sigma: float, rate: float, share: float) -> float:
    """Return a loss that one release exceeds with a probability below `share`."""
    from scipy import special

    unsampled = 2 / sigma * (1 / sigma - special.ndtri_exp(math.log(share)))
    return amplified(float(unsampled), rate)


def amplified(epsilon: float, rate: float) -> float:
    """Return the epsilon of a cohort with rate q: log(1 + q (e^epsilon - 1))."""
    # Beyond 700 the exponential overflows, and the other terms are lost in rounding.
    return math.log1p(rate * math.expm1(epsilon)) if epsilon < 700 else epsilon + math.log(rate)


def _loss(sigma: float, times: int, rate: float, step: float, number: int) -> _Loss:
    """Put the loss of one release on the points step * (-number, ..., number)."""
    from scipy import special

    distance, upper = 2 / sigma, step * np.arange(number + 1)
    # Loss of the release if the client was drawn, from that of the secret cohort.
    small = np.log1p(np.expm1(np.minimum(upper, 1)) / rate)
    large = upper + np.log1p(-(1 - rate) * np.exp(-np.maximum(upper, 1))) - math.log(rate)
    places = np.where(upper < 1, small, large) / distance
    # Tails of the two neighbours' distributions beyond each point, in logarithms.
    other = special.log_ndtr(-places - distance / 2)
    drawn = special.log_ndtr(distance / 2 - places)
    own = np.logaddexp(math.log1p(-rate) + other, math.log(rate) + drawn)
    with np.errstate(divide="ignore", invalid="ignore"):
        own_mass, other_mass = (x[:-1] + np.log(-np.expm1(np.diff(x))) for x in (own, other))
        # Both neighbours' masses between two points stay the same if this share moves up.
        share = np.expm1(upper[:-1] + other_mass - own_mass) / np.expm1(-step)
        # Rounding, and masses below the floating-point numbers: up is the safe side.
        share = np.clip(np.nan_to_num(share, nan=1.0), 0, 1)
        half = np.logaddexp(
            np.append(own_mass + np.log1p(-share), -np.inf),
            np.insert(own_mass + np.log(share), 0, -np.inf),
        )
        # A loss of zero, of all outcomes that both neighbours make likely.
        atom = math.log1p(-rate) + np.log(math.erf(distance / math.sqrt(8)))
    # Mirrored, the other neighbour's mass counts.
    lower = half - upper
    lower[-1] = np.logaddexp(lower[-1], other[-1])
    middle = np.logaddexp(half[0] + math.log(2), atom)
    log_mass = np.concatenate([lower[:0:-1], [middle], half[1:]])
    points = step * np.arange(-number, number + 1)
    return _Loss(points, log_mass, math.exp(own[-1]), times)


def _moment_epsilon(losses: Sequence[_Loss], theta: float, delta: float) -> float:
    """Bound epsilon by the moment of one order; the mass at infinity is not counted."""
    moment = sum(one.times * one.log_moment(theta) for one in losses)
    return float(moment - math.log(delta) + log_largest(theta)) / theta


def log_largest(theta: Any) -> Any:
    """Return the logarithm of the maximum of e^(-theta x) (1 - e^-x) over x > 0."""
    return -theta * np.log1p(1 / theta) - np.log1p(theta)


def _variance(loss: _Loss, theta: float) -> float:
    mass = loss.tilted(theta)
    return float(mass @ np.square(loss.points - mass @ loss.points))


def _composed(
    losses: Sequence[_Loss], theta: float, points: int, delta: float, high: float
) -> float:
    """Bound epsilon by the distribution of the sum of all losses; infinite if above `high`."""
    step = losses[0].points[-1] / (len(losses[0].points) // 2)
    transform, mean = np.ones(points // 2 + 1, complex), 0.0
    for one in losses:
        mass, number = one.tilted(theta), len(one.points) // 2
        mean += one.times * float(mass @ one.points)
        row = np.zeros(points)
        np.add.at(row, np.arange(-number, number + 1) % points, mass)
        transform *= np.fft.rfft(row) ** float(one.times)
    total = np.maximum(np.fft.irfft(transform, points), 0)
    # The transform is periodic: this is the period around the mean of the tilted sum.
    first = round(mean / step) - points // 2
    places = step * (first + np.arange(points))
    total = np.roll(total, -(first % points))

    def log_moment(tilt: float) -> float:
        return sum(one.times * one.log_moment(tilt) for one in losses)

    # Larger sums come back below the period, where they would not count: a Chernoff bound does.
    # Smaller ones come back above, where they count too much.
    tilts = [theta + x / (step * points) for x in (0, 60, 120, 240)]
    beyond = min(log_moment(tilt) - tilt * places[-1] for tilt in tilts)
    moment, rounds = log_moment(theta), sum(one.times for one in losses)
    # Rounding errors of the transforms and of their powers, as a root mean square over the points.
    relative = 1e-15 * math.log2(points) * rounds * float(np.linalg.norm(total)) * points**0.5
    rounding = math.log(relative) + log_largest(theta)
    places, total = places[places > 0], total[places > 0]
    # More than e^100 would be far more than delta, whose epsilon is not here.
    mass = total * np.exp(np.minimum(moment - theta * places, 100))

    def is_enough(epsilon: float) -> bool:
        some = np.searchsorted(places, epsilon, side="right")
        spent = mass[some:] @ -np.expm1(epsilon - places[some:])
        extra = min(beyond, 0.0), min(moment - theta * epsilon + rounding, 0.0)
        return spent + sum(map(math.exp, extra)) <= delta

    if not is_enough(high):
        return math.inf
    low = 0.0
    if is_enough(low):
        return low
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
