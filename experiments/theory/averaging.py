"""Draw what federated averaging, a single client and groups learn of signal and noise."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import figures, records, tables
from experiments.theory import parallel_runs
from fisherjax.theory import feature_learning, signal_noise
from fisherjax.theory.feature_learning import History
from fisherjax.typing import Array, Key

# Labels and colours of the ways of averaging.
WAYS = {
    "alone": ("one client alone", "#8a8a8a"),
    "fedavg": ("FedAvg", "#1a1a1a"),
    "weighted": ("Weighted FedAvg", "#c4501b"),
}
GROUPS = (0,) + 3 * (1,) + 6 * (2,) + 10 * (3,)
"""The signal of each of twenty clients, in groups of 1, 3, 6 and 10."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of the paper's synthetic experiment, which does not report the initial scale."""

    owners: tuple[int, ...] = 20 * (0,)
    ways: tuple[str, ...] = ("fedavg", "alone")
    dim: int = 1000
    num_examples: int = 100
    num_test: int = 2000
    norm: float = 2.0
    width: int = 50
    scale: float = 0.01
    rounds: int = 100
    local_steps: int = 5
    learning_rate: float = 1.0
    seeds: int = 3


_QUICK = {"dim": 200, "num_examples": 20, "num_test": 100, "width": 5, "rounds": 10, "seeds": 2}
_SETTINGS = {
    "features1": Setting(seeds=5),
    "features2": Setting(owners=(0, 0), seeds=5),
    "features3": Setting(dim=8000),
    "features4": Setting(owners=GROUPS, ways=tuple(WAYS), seeds=5),
}
FIGURES = {name: (own, dataclasses.replace(own, **_QUICK)) for name, own in _SETTINGS.items()}
"""The paper's figures, each as in the paper and quick."""
Found = dict[str, History]
"""Histories by way of averaging, with leaves [seeds, rounds, ...]."""


def compute(setting: Setting, each: parallel_runs.Each = iter) -> Found:
    """Train with each way of averaging, all seeds in one program."""
    found = {}
    keys = jax.vmap(jax.random.key)(jnp.arange(setting.seeds))
    for way in each(setting.ways):
        mixing = mixing_of(way, setting.owners)
        # These numbers are traced, so that other values do not compile a new program.
        numbers = jnp.array([setting.norm, setting.scale, setting.learning_rate])
        shapes = dataclasses.replace(setting, norm=1, scale=1, learning_rate=1, seeds=1, ways=())
        found[way] = parallel_runs.compute(partial(_history, shapes), keys, mixing, numbers)
    return found


def mixing_of(way: str, owners: tuple[int, ...]) -> Array:
    """Return the mixing matrix [M, M] of a way of averaging."""
    if way == "weighted":
        return feature_learning.within_groups(owners)
    return getattr(feature_learning, {"fedavg": "average"}.get(way, way))(len(owners))


def _history(setting: Setting, key: Key, mixing: Array, numbers: Array) -> History:
    norm, scale, learning_rate = numbers
    drawn = parallel_runs.draw(setting, setting.owners, key, norm, scale)
    how = {"rounds": setting.rounds, "local_steps": setting.local_steps}
    return feature_learning.train(*drawn, mixing, learning_rate=learning_rate, **how)[1]


def section(name: str, setting: Setting, found: Found, out: Path) -> str:
    """Write a figure's numbers and picture into a folder; return a description in Markdown."""
    records.write_text(out / f"{name}.csv", _csv(setting, found))
    path = out / f"{name}.png"
    show = {"features2": _growth, "features4": _groups}.get(name, _curves)
    claim = show(setting, found, path)
    snr = setting.norm / setting.dim**0.5
    sizes = np.bincount(setting.owners).tolist()
    number, count, dim = setting.num_examples, len(setting.owners), setting.dim
    strengths = [signal_noise.strength(number, size, count, snr, dim) for size in sizes]
    alone = signal_noise.strength(number, 1, 1, snr, dim)
    return f"""## {name}

{len(setting.owners)} clients of {setting.num_examples} examples, d = {setting.dim}, \
{2 * setting.width} filters, ||mu|| = {setting.norm:g}, initial scale {setting.scale:g}, \
{setting.rounds} rounds of {setting.local_steps} steps, {setting.seeds} seeds. Clients with the \
same signal: {", ".join(map(str, sizes))}; what the theorem asks to be large, \
n chi^2 SNR^4 d / M: {", ".join(f"{x:.3g}" for x in strengths)}; alone {alone:.3g}.

{claim}
![{name}]({name}.png)
"""


def _curves(_: Setting, found: Found, path: Path) -> str:
    """Draw losses and accuracies of client 1 over rounds, and tabulate those of all clients."""
    figure, panels = figures.canvas(11, 3.6, columns=4, grid="both")
    for axes, field in zip(panels, History._fields[:4], strict=True):
        for way, history in found.items():
            words, colour = WAYS[way]
            of_rounds = getattr(history, field)[:, :, 0].T.tolist()
            series = dict(enumerate(of_rounds, start=1))
            figures.curve(axes, series, color=colour, label=words)
        axes.set(xlabel="round", title=field.replace("_", " "))
        if "loss" in field:
            axes.set_yscale("log")
    figures.save_with_legend(figure, path)
    lines = []
    for way, history in found.items():
        last = [getattr(history, field)[:, -1] for field in History._fields[:4]]
        ratio = history.signal[:, -1, -1].mean(-1) / history.noise[:, -1, -1].mean(-1)
        shown = [tables.spread([*x.mean(-1)], 3) for x in last]
        lines.append((WAYS[way][0], *shown, tables.spread([*ratio], 2)))
    headings = (
        *("after the last round, mean over clients", "train loss", "train accuracy", "test loss"),
        *("test accuracy", "signal / noise"),
    )
    return tables.markdown(tables.Table("", headings, lines))


def _growth(setting: Setting, found: Found, path: Path) -> str:
    """Draw coefficients step by step, and tabulate how much of them each mean keeps."""
    figure, panels = figures.canvas(10, 3.6, columns=2, grid="both")
    rounds = np.arange(setting.rounds)[:, None]
    lines = []
    for way, history in found.items():
        words, colour = WAYS[way]
        row = []
        for axes, field in zip(panels, ("signal", "noise"), strict=True):
            # Coefficients of client 1, [seeds, rounds, E + 1], after each step and the mean.
            values = getattr(history, field)[..., 0]
            # The mean follows the last step at the same place, so that it is drawn as a drop.
            within = np.minimum(np.arange(1, values.shape[-1] + 1) / setting.local_steps, 1)
            axes.plot((rounds + within).ravel(), values.mean(0).ravel(), color=colour, label=words)
            row += kept(values)
        ratio = history.signal[:, -1, -1, 0] / history.noise[:, -1, -1, 0]
        lines.append((words, *row, tables.spread([*ratio], 3)))
    titles = "signal learned, largest gamma", "noise memorised, largest rho"
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlabel="round", title=title)
    shown = min(5, setting.rounds)
    inset = panels[1].inset_axes((0.5, 0.1, 0.45, 0.4), xlim=(0, shown))
    for line in panels[1].get_lines():
        x, y = np.asarray(line.get_data())
        inset.plot(x[x <= shown], y[x <= shown], color=line.get_color(), linewidth=1)
    inset.set_title(f"first {shown} rounds", fontsize="small")
    figures.save_with_legend(figure, path)
    each = "steps at which it does not fall, %", "share of a round's gain that the mean keeps"
    headings = ("client 1", *(f"{what}: {x}" for what in ("signal", "noise") for x in each))
    headings += ("signal / noise after the last round",)
    return tables.markdown(tables.Table("", headings, lines))


def kept(own: np.ndarray) -> list[str]:
    """Return the share of local steps that do not fall, and the share of gains that means keep.

    The coefficients [seeds, rounds, E + 1] are those after each local step and after the mean.
    """
    before = np.concatenate([np.zeros_like(own[:, :1, -1]), own[:, :-1, -1]], 1)
    steps = np.diff(np.concatenate([before[..., None], own[..., :-1]], -1))
    gained, kept = own[..., -2] - before, own[..., -1] - before
    # The share is undefined in rounds in which a coefficient hardly grows.
    enough = gained > 1e-3 * own.max()
    share = np.median(kept[enough] / gained[enough])
    return [f"{100 * np.mean(steps >= -1e-6):.1f}", f"{share:.3f}"]


def _groups(setting: Setting, found: Found, path: Path) -> str:
    """Draw the accuracy of each client, and tabulate the mean of each group."""
    figure, axes = figures.canvas(8, 3.6, grid="y")
    sizes = np.bincount(setting.owners)
    clients, lines = np.arange(len(setting.owners)), []
    for number, (way, history) in enumerate(found.items()):
        last = 100 * history.test_accuracy[:, -1]
        beside = 0.26 * (number - 1)
        words, colour = WAYS[way]
        axes.bar(clients + beside, last.mean(0), 0.24, color=colour, label=words)
        axes.vlines(clients + beside, last.min(0), last.max(0), color=figures.GREY, linewidth=1)
        owners = np.array(setting.owners)
        groups = [last[:, owners == group].mean(-1) for group in range(len(sizes))]
        lines.append((words, *(tables.spread([*x]) for x in (*groups, last.mean(-1)))))
    axes.set(ylabel="test accuracy, %", ylim=(40, 101), xticks=clients)
    axes.set_xticklabels([f"{size}" for size in sizes[np.array(setting.owners)]])
    axes.set_xlabel("client, by how many have its signal")
    figures.save_with_legend(figure, path)
    headings = ("test accuracy, %, of groups of", *map(str, sizes), "all clients")
    return tables.markdown(tables.Table("", headings, lines))


def _csv(setting: Setting, found: Found) -> str:
    fields = History._fields[:4]
    lines = (
        (*(way, seed, number + 1, client), *(f"{x[seed, number, client]:.6g}" for x in columns))
        for way, of in found.items()
        for columns in [[getattr(of, field) for field in fields] + _ends(of)]
        for seed in range(setting.seeds)
        for number in _recorded(setting.rounds)
        for client in range(len(setting.owners))
    )
    ends = [f"{field}_{when}_mean" for when in ("before", "after") for field in ("signal", "noise")]
    return tables.csv_text(("averaging", "seed", "round", "client", *fields, *ends), lines)


def _ends(of: History) -> list[np.ndarray]:
    """Return signal and noise [seeds, rounds, M] before and after the mean of each round."""
    return [x[:, :, end] for x in (of.signal, of.noise) for end in (-2, -1)]


def _recorded(rounds: int) -> list[int]:
    # Early rounds change most. Later ones are recorded every tenth, so that the file stays small.
    return [number for number in range(rounds) if number < 10 or (number + 1) % 10 == 0]
