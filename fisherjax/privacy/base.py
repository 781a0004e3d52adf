"""Gaussian noise, and what it costs."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fisherjax import checks
from fisherjax.typing import Array, Key


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
    sensitivity: dict[str, Array]
    deviation: dict[str, Array]
    noise_multiplier: dict[str, Array]
    info: Any


def epsilon(
    *spent: Ledger | float, delta: float, rounds: int = 1, cohort: tuple[int, int] | None = None
) -> float:
    """Compute the epsilon of everything that was released about the same clients, or examples.

    Args:
        spent: Ledgers, or noise multipliers of `rounds` releases each; they compose.
        delta: What is left to chance, far below one over the number of clients.
        rounds: How often each of the multipliers was used; ledgers know it.
        cohort: (K, M) if each round drew K of M clients at random and in secret: neighbours then
            differ in one client that is another, at twice the sensitivity, and the cost is
            amplified by sampling without replacement. None assumes that everybody takes part in
            every round, and neighbours in one client that adds zeros.

    Returns:
        epsilon; infinity without noise.

    Raises:
        ImportError: Without dp-accounting, the extra `privacy`.
        ValueError: If a number is out of range.

    Example:
        >>> round(epsilon(1.0, delta=1e-5), 2), epsilon(0.0, delta=1e-5)
        (4.38, inf)

    Source: the accountants of dp-accounting, of privacy loss distributions (Koskela, Jälkö,
        Honkela, AISTATS 2020), or with cohorts of Rényi divergences (Wang, Balle, Kasiviswanathan,
        AISTATS 2019).
    """
    checks.positive("delta", delta)
    checks.number("delta", delta, below=1.0)
    checks.count("rounds", rounds)
    if cohort is not None and not 1 <= cohort[0] <= cohort[1]:
        raise ValueError(f"cohort is {cohort}; expected (K, M), K of M clients in a round.")
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "epsilon needs dp-accounting; install it by pip install 'fisherjax[privacy]'."
        ) from error
    releases = [_release(one, rounds) for one in spent]
    if not releases:
        raise ValueError("Nothing was spent: expected ledgers or noise multipliers.")
    # What was never released costs nothing, whatever its noise.
    releases = [(sigma, times) for sigma, times in releases if times]
    if not all(sigma > 0 for sigma, _ in releases):
        return math.inf
    relation = dp_accounting.NeighboringRelation
    if cohort is None:
        accountant = dp_accounting.pld.PLDAccountant(relation.REPLACE_SPECIAL)
    else:
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    for sigma, times in releases:
        event = dp_accounting.GaussianDpEvent(sigma)
        if cohort is not None:
            drawn, everybody = cohort
            # Another client in place of one: the sum moves by up to two clips.
            event = dp_accounting.GaussianDpEvent(sigma / 2)
            event = dp_accounting.SampledWithoutReplacementDpEvent(everybody, drawn, event)
        accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def noisy(key: Key, leaves: list[Array], deviations: Sequence[float]) -> list[Array]:
    """Add independent Gaussian noise to every leaf, of its standard deviation."""
    keys = jax.random.split(key, len(leaves))
    return [
        leaf + deviation * jax.random.normal(own, leaf.shape, leaf.dtype)
        for own, leaf, deviation in zip(keys, leaves, deviations, strict=True)
    ]


def _release(spent: Ledger | float, rounds: int) -> tuple[float, int]:
    """Give the noise multiplier of a round, and how many there were."""
    if not isinstance(spent, Ledger):
        checks.number("noise_multiplier", spent)
        return float(spent), rounds
    # Groups that are noised apart are one Gaussian once each is divided by its deviation.
    multipliers = [float(sigma) for sigma in spent.noise_multiplier.values()]
    if not all(multipliers):
        return 0.0, int(spent.rounds)
    return sum(sigma**-2 for sigma in multipliers) ** -0.5, int(spent.rounds)
