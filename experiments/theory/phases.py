"""Draw accuracy over the number of clients and the signal-to-noise ratio.

The theory is about rounds of federated averaging. Clients that trained alone are also merged once,
by their mean and by curvature, to see whether one round learns what averaging learns in many.
"""

import dataclasses
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import figures, records, tables
from experiments.theory import parallel_runs
from fisherjax.theory import feature_learning, signal_noise
from fisherjax.theory.signal_noise import Data
from fisherjax.typing import Array, Key

MERGES = ("fedavg", "fedfisher_diag", "fedfisher_diag+rotated", "fedfisher_kfac")
"""Merges of one round. `rotated` merges in a random orthonormal basis of the inputs, in which only
the diagonal Fisher gives another result."""
LEARNED = 0.9
"""The accuracy from which the signal counts as learned."""
SIGNAL, NOISE = "signal kept", "noise kept"
Found = dict[str, dict[str, np.ndarray]]
"""Accuracies [points, ratios, seeds] by grid and way; by `way, part` the shares that are kept."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Two grids of numbers of clients and ratios of signal to noise."""

    clients: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
    """Numbers of clients, all with one signal."""
    similar: tuple[int, ...] = tuple(range(1, 13))
    """Numbers of clients, of `total`, that share the tested signal; the others have their own."""
    total: int = 12
    ratios: tuple[float, ...] = tuple(float(x) for x in np.geomspace(0.02, 0.25, 12).round(4))
    """||mu|| / (sigma sqrt(d))."""
    seeds: int = 3
    dim: int = 400
    width: int = 20
    num_examples: int = 20
    num_test: int = 500
    scale: float = 0.01
    rounds: int = 100
    local_steps: int = 5


FIGURES = {
    "phase": (
        Setting(),
        Setting(
            *((1, 2), (1, 2), 2, (0.05, 0.3), 1),
            **{"dim": 60, "width": 3, "num_examples": 8, "num_test": 40, "rounds": 8},
        ),
    )
}
"""The grid and a quick one."""


def grids(setting: Setting) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    """Return the points of both grids: the number of clients, and the signal of each client."""
    return {
        "clients": [(number, number * (0,)) for number in setting.clients],
        "similar": [
            (number, number * (0,) + tuple(range(1, setting.total - number + 1)))
            for number in setting.similar
        ],
    }


def compute(setting: Setting, each: parallel_runs.Each = iter) -> Found:
    """Compute the accuracies of both grids, point by point.

    One program computes all ratios and seeds of a point.
    """
    points = [(grid, owners) for grid, own in grids(setting).items() for _, owners in own]
    found = tables.gathered((grid, point(setting, owners)) for grid, owners in each(points))
    return {grid: jax.tree.map(lambda *x: np.stack(x), *own) for grid, own in found.items()}


def point(setting: Setting, owners: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Compute a point, whose clients have the signals `owners`; return arrays [ratios, seeds]."""
    keys = jax.vmap(jax.random.key)(jnp.arange(setting.seeds))
    pairs = len(setting.ratios), setting.seeds
    norms = jnp.repeat(jnp.array(setting.ratios) * setting.dim**0.5, setting.seeds)
    # Without what differs between grids, equal owners use the same program in both.
    shapes = dataclasses.replace(setting, clients=(), similar=(), ratios=())
    one = partial(_accuracies, shapes, owners)
    found = parallel_runs.compute(one, (jnp.tile(keys, pairs[0]), norms))
    return {way: accuracies.reshape(pairs) for way, accuracies in found.items()}


def _accuracies(
    setting: Setting, owners: tuple[int, ...], given: tuple[Key, Array]
) -> dict[str, Array]:
    """Measure accuracies on the signal of client 0."""
    key, norm = given
    start, data, test = parallel_runs.draw(setting, owners, key, norm, setting.scale)
    for_turn = jax.random.fold_in(key, 3)
    mean, alone = feature_learning.average(len(owners)), feature_learning.alone(len(owners))
    how = {"rounds": setting.rounds, "local_steps": setting.local_steps}
    averaged, _ = feature_learning.train(start, data, test, mean, **how)
    # One round takes as many steps as all rounds together.
    how = {"rounds": 1, "local_steps": setting.rounds * setting.local_steps}
    apart, _ = feature_learning.train(start, data, test, alone, **how)
    models = {"rounds": averaged.weights[0], "alone": apart.weights[0]}
    kept = {}
    for name in MERGES:
        method, *basis = name.split("+")
        # Signals are unit vectors: only in their basis does a diagonal separate them from noise.
        turn = jnp.linalg.qr(jax.random.normal(for_turn, (setting.dim, setting.dim)))[0]
        turn = turn if basis else None
        models[name] = _merged(method, setting.width, start, apart.weights, data, turn)
        shares = _kept(models[name] - start, apart.weights - start, len(data.signals))
        kept |= {f"{name}, {SIGNAL}": shares[0], f"{name}, {NOISE}": shares[1]}
    first = Data(data.signals, data.owners[:1], *test[2:])
    accuracies = {
        way: feature_learning.performance(weights[None], first)[1][0]
        for way, weights in models.items()
    }
    return accuracies | kept


def _kept(merged: Array, apart: Array, num_signals: int) -> tuple[Array, Array]:
    """Return the shares of the clients' mean signal and of their own noise that a merge keeps.

    The arguments are changes of weights, [d, 2 m] and [M, d, 2 m]; signals are the first unit
    vectors.
    """
    signal, noise = apart[:, :num_signals].mean(0), apart[:, num_signals:]
    return (
        jnp.vdot(merged[:num_signals], signal) / jnp.vdot(signal, signal),
        jnp.vdot(merged[num_signals:], noise.sum(0)) / jnp.vdot(noise, noise),
    )


def _merged(
    name: str, width: int, start: Array, weights: Array, data: Data, turn: Array | None
) -> Array:
    federation = signal_noise.federation(data)
    if turn is not None:  # the same networks in another basis: inputs x Q and weights Q^T w
        federation = federation._replace(inputs=federation.inputs @ turn)
        start, weights = turn.T @ start, turn.T @ weights
    model = signal_noise.network(width)
    merged = parallel_runs.merge(name, model, start, weights, federation)
    return merged if turn is None else turn @ merged


def section(name: str, setting: Setting, found: Found, out: Path) -> str:
    """Write the grids' numbers and picture into a folder; return a description in Markdown."""
    records.write_text(out / f"{name}.csv", _csv(setting, found))
    _draw(setting, found, out / f"{name}.png")
    parts = [
        f"""## {name}

Clients of {setting.num_examples} examples, d = {setting.dim}, {2 * setting.width} filters, \
{setting.rounds} rounds of {setting.local_steps} steps, {setting.seeds} seeds; one round: \
{setting.rounds * setting.local_steps} steps, then one merge. The signal counts as learned where \
the accuracy, mean over seeds, reaches {LEARNED:g}; the ratio where that happens is interpolated. \
The theorem says that n chi^2 SNR^4 d / M must be large: that the ratio falls with the power -1/4 \
of clients that all have the signal, and -1/2 of those among a fixed number that have it.
"""
    ]
    for grid, title in {
        "clients": "M clients, all with the signal",
        "similar": f"Of {setting.total} clients so many have the signal, the others one each",
    }.items():
        counts = [count for count, _ in grids(setting)[grid]]
        lines = []
        for way in _ways(found):
            ratios = [threshold(setting.ratios, row.mean(-1)) for row in found[grid][way]]
            known = [(m, r) for m, r in zip(counts, ratios, strict=True) if r is not None]
            slope = f"{power(known):+.2f}" if len(known) > 2 else "-"
            shown = ["-" if r is None else f"{r:.3f}" for r in ratios]
            strengths = [_strength(setting, grid, m, r) for m, r in known]
            between = f"{min(strengths):.2g} to {max(strengths):.2g}" if strengths else "-"
            lines.append((_words(way), *shown, slope, between))
        headings = ("learned from SNR", *map(str, counts), "power", "n chi^2 SNR^4 d / M there")
        parts.append(tables.markdown(tables.Table(title, headings, lines), level=3))
        pairs = itertools.product(MERGES, (SIGNAL, NOISE))
        lines = [
            (f"{_words(way)}: {x}", *(f"{row.mean():.2f}" for row in found[grid][f"{way}, {x}"]))
            for way, x in pairs
        ]
        parts.append(tables.markdown(tables.Table("", ("mean", *map(str, counts)), lines)))
    explained = """Kept is the share of the clients' mean signal that the merged network has, and \
of the noise that each client has memorised by itself, mean over ratios and seeds.
"""
    return "\n".join([*parts, explained, f"![{name}]({name}.png)\n"])


def threshold(ratios: tuple[float, ...], accuracies: np.ndarray) -> float | None:
    """Interpolate the ratio from which the signal is learned; None if beyond the grid."""
    learned = np.flatnonzero(accuracies < LEARNED)
    first = int(learned[-1]) + 1 if len(learned) else 0
    if first in (0, len(ratios)):  # the signal is learned everywhere, or nowhere
        return None
    low, high = accuracies[first - 1], accuracies[first]
    share = (LEARNED - low) / (high - low)
    return float(np.exp(np.interp(share, [0, 1], np.log(ratios[first - 1 : first + 1]))))


def power(known: list[tuple[int, float]]) -> float:
    """Return the exponent of a power law fitted to pairs of a count and a ratio."""
    return float(np.polyfit(*np.log(np.array(known)).T, 1)[0])


def _ways(found: Found) -> list[str]:
    return [way for way in found["clients"] if "," not in way]


def _strength(setting: Setting, grid: str, count: int, ratio: float) -> float:
    total = count if grid == "clients" else setting.total
    return signal_noise.strength(setting.num_examples, count, total, ratio, setting.dim)


def _words(way: str) -> str:
    words = {"rounds": "FedAvg, many rounds", "alone": "one client alone"}
    return words.get(way) or f"{figures.label(way)}, one round".replace(" + ", ", ")


def _csv(setting: Setting, found: Found) -> str:
    lines = (
        (grid, grids(setting)[grid][place][0], setting.ratios[number], seed, way, f"{x:.4f}")
        for grid, ways in found.items()
        for way, values in ways.items()
        for (place, number, seed), x in np.ndenumerate(values)
    )
    return tables.csv_text(("grid", "count", "snr", "seed", "way", "accuracy"), lines)


def _draw(setting: Setting, found: Found, path: Path) -> None:
    from matplotlib import patheffects

    ways = _ways(found)
    size, shared = (8, 2 * len(ways) + 0.6), {"sharex": "col", "sharey": True, "squeeze": False}
    figure, rows = figures.canvas(*size, len(found), len(ways), **shared)
    outlined = [patheffects.withStroke(linewidth=3, foreground="black")]
    shown: Any = None
    for (grid, own), panels in zip(found.items(), rows.T, strict=True):
        counts = np.array([count for count, _ in grids(setting)[grid]])
        for way, axes in zip(ways, panels, strict=True):
            look = {"cmap": "cividis", "vmin": 0.5, "vmax": 1, "shading": "nearest"}
            values = own[way].mean(-1).T
            shown = axes.pcolormesh(np.arange(len(counts)), setting.ratios, values, **look)
            # The theorem's boundary, with the constants 1 and 10 in place of "large".
            for constant, line in ((1, "-"), (10, "--")):
                ratio = [(constant / _strength(setting, grid, m, 1.0)) ** 0.25 for m in counts]
                how = {"color": "white", "linewidth": 1.4, "path_effects": outlined}
                axes.plot(range(len(counts)), ratio, line, **how)
            axes.set_ylim(setting.ratios[0], setting.ratios[-1])
            axes.set_yscale("log")
            ticks = setting.ratios[:: max(1, len(setting.ratios) // 4)]
            axes.set_yticks(ticks, [f"{tick:.2g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xticks(range(len(counts)), counts.tolist(), fontsize="small")
            axes.set_title(_words(way), fontsize="medium", loc="left")
        names = {"clients": "clients", "similar": f"clients of {setting.total} with the signal"}
        panels[-1].set_xlabel(names[grid])
    for axes in rows[:, 0]:
        axes.set_ylabel("signal / noise")
    words = "test accuracy (lines: the theorem's boundary with constant 1 and, dashed, 10)"
    figure.colorbar(shown, ax=rows, label=words, location="bottom", fraction=0.02, pad=0.01)
    figures.save(figure, path)
