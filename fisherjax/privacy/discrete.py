"""Discrete Gaussian noise for sums of integers, sampled exactly, and its privacy accounting."""

import math
import secrets
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from fisherjax._core import checks
from fisherjax._core.secrecy import checked_entropy
from fisherjax.privacy import _cohorts

_Words = Callable[[int], np.ndarray]  # so many random integers of 64 bits


def discrete_gaussian(
    shape: int | Sequence[int],
    deviation: float | Fraction,
    *,
    entropy: Callable[[int], bytes] = secrets.token_bytes,
) -> np.ndarray:
    """Sample integers x with probabilities in proportion to e^(-x^2 / (2 sigma^2)), exactly.

    All arithmetic is of integers, so that there are no floating-point numbers whose digits could
    reveal what the noise hides. The time that sampling takes depends on the random numbers: do not
    let an attacker measure it.

    Each client of a secure sum adds it to its encoded integers before it masks them; the server
    then sees neither these integers nor a sum without noise.

    Args:
        shape: Shape of the result.
        deviation: sigma, at least 2^-20 and at most 2^50. The standard deviation of the integers
            differs from it by less than 1e-6 of it from 1 on. A float is taken for the rational
            number that it is.
        entropy: Function from a number of bytes to random bytes, by default those of the operating
            system; that of a seeded generator in tests.

    Returns:
        Integers of this shape, int64.

    Raises:
        ValueError: If a number is out of range, or the entropy is not as long as asked for, or not
            random.
        TypeError: If an argument has the wrong type.

    Example:
        >>> noise = discrete_gaussian((2, 3), 4.5)
        >>> noise.shape, noise.dtype
        ((2, 3), dtype('int64'))

    Source: Canonne, Kamath, Steinke, The discrete Gaussian for differential privacy, NeurIPS 2020,
        algorithms 1 to 3.
    """
    checks.number("deviation", deviation, 2.0**-20)
    if deviation > 2**50:
        raise ValueError(f"deviation is {deviation}; expected at most 2^50.")
    checks.function("entropy", entropy, "os.urandom")
    axes = [*shape] if isinstance(shape, Sequence) else [shape]
    sizes = [checks.count("An axis of shape", x, least=0) for x in axes]
    exact = deviation if isinstance(deviation, Fraction) else Fraction(_as_number(deviation))
    variance = exact**2
    above, below = variance.numerator, variance.denominator
    scale = math.isqrt(above // below) + 1

    result = np.zeros(math.prod(sizes), np.int64)
    words = _words_of(entropy, len(result))
    missing = np.arange(len(result))
    while missing.size:
        # Candidates are discrete Laplace, of scale `scale`.
        kept, candidates = _laplace(scale, missing.size, words)
        distances = (abs(candidates) * (below * scale) - above) ** 2
        accepted = _falls(distances, 2 * above * below * scale**2, words)
        result[missing[kept[accepted]]] = candidates[accepted].astype(np.int64)
        missing = np.delete(missing, kept[accepted])
    return result.reshape(sizes)


def discrete_epsilon(
    deviation: float,
    *,
    sensitivity: float,
    delta: float,
    clients: int = 1,
    size: int = 1,
    rounds: int = 1,
) -> float:
    """Bound the epsilon of integer sums with discrete Gaussian noise of one or several clients.

    A sum of discrete Gaussians is no discrete Gaussian; the difference vanishes quickly as the
    noise of each client grows, and is negligible from a deviation of 2 on.

    Args:
        deviation: sigma, the `deviation` of each client's `discrete_gaussian`.
        sensitivity: L2 norm by which one client can change the sum of integers. An update of norm C
            that is scaled by 2^e and rounded has a norm of at most 2^e C + sqrt(size) / 2.
        delta: Probability with which the guarantee may fail.
        clients: Number of clients whose noise is in the sum (default 1). Count those only that are
            sure to stay and to add their noise: of a secure sum its threshold, less those that may
            work with the server.
        size: Number of integers that are summed (default 1); it matters with several clients.
        rounds: Number of such sums about the same clients (default 1).

    Returns:
        epsilon, an upper bound.

    Raises:
        ValueError: If a number is out of range, or the noise of several clients has a deviation
            below 1/2, for which there is no bound.
        TypeError: If an argument is not a number.

    Example:
        >>> round(discrete_epsilon(10.0, sensitivity=10.0, delta=1e-5), 2)
        4.73
        >>> noise = {"clients": 100, "size": 10**6, "delta": 1e-5}
        >>> round(discrete_epsilon(2.0, sensitivity=20.0, **noise), 2)
        4.73

    Source: Canonne, Kamath, Steinke, NeurIPS 2020, theorem 4 and proposition 12; Kairouz, Liu,
        Steinke, The distributed discrete Gaussian mechanism for federated learning with secure
        aggregation, ICML 2021, proposition 14, for several clients.
    """
    for name, value in (("deviation", deviation), ("sensitivity", sensitivity), ("delta", delta)):
        checks.positive(name, value)
    checks.number("delta", delta, below=1.0)
    for name, value in (("clients", clients), ("size", size), ("rounds", rounds)):
        checks.count(name, value)
        checks.number(name, value)
    if clients > 1 and deviation < 0.5:
        raise ValueError(
            f"deviation is {deviation} for each of {clients} clients; expected at least 0.5, below "
            "which sums of discrete Gaussians have no bound. Scale updates by a larger number."
        )
    # The excess of the sum's Rényi divergences over a Gaussian's, for each integer.
    shares = np.arange(1, min(clients, 10**6)) / np.arange(2, min(clients, 10**6) + 1)
    terms = np.exp(-2 * (math.pi * float(deviation)) ** 2 * shares)
    # Shares grow: terms that are left out are smaller than the last one.
    excess = 10 * float(terms.sum() + max(clients - 10**6, 0) * (terms[-1] if terms.size else 0))
    ratio = float(sensitivity) / (math.sqrt(clients) * float(deviation))
    # The order of the divergence is 1 + theta, and any order gives a bound.
    theta = np.geomspace(1e-12, 1e12, 24_001)
    divergence = np.minimum(
        (1 + theta) / 2 * ratio**2 + excess * size,
        (1 + theta) / 2 * (ratio + excess * math.sqrt(size)) ** 2,
    )
    rest = (_cohorts.log_largest(theta) - math.log(delta)) / theta
    return max(0.0, float((rounds * divergence + rest).min()))


def _as_number(value: Any) -> Any:
    """Return arrays and NumPy's numbers as Python's, of which fractions are made."""
    return value.item() if hasattr(value, "item") else value


def _words_of(entropy: Callable[[int], bytes], numbers: int) -> _Words:
    """Make the function that draws words for so many numbers, and checks what it is given."""
    # About fifteen words are needed for each number, and never so many.
    left, draw = 200 * (numbers + 100), checked_entropy(entropy)

    def words(number: int) -> np.ndarray:
        nonlocal left
        left -= number
        if left < 0:
            raise ValueError(
                "entropy returned bytes that are not random; expected a function such as "
                "os.urandom, which returns other bytes at each call."
            )
        return np.frombuffer(draw(8 * number), np.uint64)

    return words


def _laplace(scale: int, number: int, words: _Words) -> tuple[np.ndarray, np.ndarray]:
    """Try `number` times to sample e^(-|x| / scale); return which tries succeeded, and their x."""
    limit = 2**64 - 2**64 % scale
    drawn = words(number)
    # The last words, which would make some remainders more likely, are drawn again.
    while (again := np.flatnonzero(drawn.astype(object) >= limit)).size:
        drawn = drawn.copy()
        drawn[again] = words(again.size)
    rest = (drawn % np.uint64(scale)).astype(object)
    kept = np.flatnonzero(_falls(rest, scale, words))
    whole, going = np.zeros(kept.size, np.int64), np.arange(kept.size)
    while going.size:
        going = going[_falls(np.ones(going.size, object), 1, words)]
        whole[going] += 1
    magnitudes = rest[kept] + scale * whole.astype(object)
    is_negative = words(kept.size) % 2 == 1
    # Zero has one sign only, so that it is not drawn twice as often.
    once = ~(is_negative & (magnitudes == 0).astype(bool))
    signed = np.where(is_negative, -magnitudes, magnitudes)
    return kept[once], signed[once]


def _falls(above: np.ndarray, below: int, words: _Words) -> np.ndarray:
    """Toss coins that fall on heads with probability e^(-above / below), for integers above >= 0.

    Heads of probability a, a / 2, a / 3, ... in turn end after an odd number with probability e^-a.
    """
    whole, rest = above // below, above % below
    heads = np.ones(len(above), bool)
    for number in range(int(whole.max(initial=0)) + 1):
        # One coin of e^-1 for each whole number, and one for the rest.
        some = np.flatnonzero(heads & (whole >= number).astype(bool))
        if not some.size:
            break
        numerators = np.where(whole[some] > number, below, rest[some])
        going, tosses = np.arange(some.size), 1
        while going.size:
            more = _coin(numerators[going], below * tosses, words)
            heads[some[going[~more]]] = tosses % 2 == 1
            going, tosses = going[more], tosses + 1
    return heads


def _coin(above: np.ndarray, below: int, words: _Words) -> np.ndarray:
    """Toss coins that fall on heads with probability above / below."""
    heads, going = np.zeros(len(above), bool), np.arange(len(above))
    # A uniform number is drawn as far as it takes to compare it.
    value, scale = np.zeros(len(above), object), 1
    while going.size:
        value, scale = value * 2**64 + words(going.size).astype(object), scale * 2**64
        limit = above[going] * scale
        is_less = ((value + 1) * below <= limit).astype(bool)
        heads[going[is_less]] = True
        is_open = ~is_less & (value * below < limit).astype(bool)
        going, value = going[is_open], value[is_open]
    return heads
