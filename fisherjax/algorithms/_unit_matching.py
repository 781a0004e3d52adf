"""Match units of several networks by the posterior of a Beta-Bernoulli process."""

from typing import NamedTuple

import numpy as np

_MOST_COUNTED = 10  # clients that raise a unit's prior probability; further ones do not


class Prior(NamedTuple):
    """The prior of the Beta-Bernoulli process, and how matches are searched; see `pfnm`."""

    precision: float
    mean: float
    concentration: float
    sweeps: int
    most_new: int


def match_units(
    prior: Prior, mean: np.ndarray, clients: list[np.ndarray], order: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Match units [o_i, D] of all clients; return merged units [o, D] and matches [o_i] of each."""
    start = prior.precision * mean
    totals, popularity = np.zeros((0, len(mean))), np.zeros(0)
    places: list[np.ndarray] = [np.zeros(0, int)] * len(clients)

    def add(client: int) -> None:
        nonlocal totals, popularity
        units = clients[client]
        found = _assigned(prior, start, units, totals, popularity, len(clients))
        # New units keep the client's order, whichever new places were assigned to them.
        fresh = np.flatnonzero(found >= len(totals))
        found[fresh] = len(totals) + np.arange(len(fresh))
        totals = np.vstack([totals, np.tile(start, (len(fresh), 1))])
        popularity = np.concatenate([popularity, np.zeros(len(fresh))])
        totals[found] += units
        popularity[found] += 1
        places[client] = found

    def remove(client: int) -> None:
        nonlocal totals, popularity
        totals[places[client]] -= clients[client]
        popularity[places[client]] -= 1
        kept = popularity > 0
        names = np.cumsum(kept) - 1
        totals, popularity = totals[kept], popularity[kept]
        for other in range(len(clients)):
            if other != client:
                places[other] = names[places[other]]

    # The widest client is matched first.
    for client in sorted(range(len(clients)), key=lambda i: -len(clients[i])):
        add(client)
    for _ in range(prior.sweeps):
        for client in order.permutation(len(clients)):
            remove(client)
            add(client)
    return totals / (prior.precision + popularity)[:, None], places


def _assigned(
    prior: Prior,
    start: np.ndarray,
    units: np.ndarray,
    totals: np.ndarray,
    popularity: np.ndarray,
    clients: int,
) -> np.ndarray:
    """Assign units [o, D] of a client to existing units or to new ones, by largest gain."""
    squares, precision = np.square(units).sum(1)[:, None], prior.precision
    sizes = np.square(totals).sum(1)
    strength = precision + popularity
    counted = np.minimum(popularity, _MOST_COUNTED)
    gain = (squares + 2 * units @ totals.T + sizes) / (1 + strength) - sizes / strength
    gain += np.log(counted / (clients - counted))
    # At least so many new units that each unit of the client has a place.
    number = min(len(units), max(prior.most_new - len(totals), len(units) - len(totals), 1))
    ranks = np.arange(1, number + 1)
    new = np.square(units + start).sum(1)[:, None] / (1 + precision)
    new = new - np.square(start).sum() / precision
    new = new - 2 * np.log(ranks) + 2 * np.log(prior.concentration / clients)
    # Imported here, because the import takes half a second and only PFNM needs it.
    from scipy.optimize import linear_sum_assignment

    _, found = linear_sum_assignment(np.hstack([gain, new]), maximize=True)
    return found
