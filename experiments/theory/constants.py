"""Constants that the papers do not give: which of them make their pictures."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.harness import figures, records, tables
from experiments.theory import averaging, theorem

Found = dict[tuple[str, float], dict[str, np.ndarray]]
"""By picture and constant: losses or accuracies by way, [points, seeds]."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is varied, one at a time, in which picture."""

    widths: theorem.Setting
    steps: theorem.Setting
    rounds: averaging.Setting
    variances: tuple[float, ...] = (0.03125, 0.125, 0.5, 2.0)
    """Of the initial weights of FedFisher's networks; the paper's kappa is 1/2."""
    scales: tuple[float, ...] = (0.001, 0.01, 0.03, 0.1)
    """Of the initial weights of the networks that learn features."""
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Learning rates of theirs; the paper's is 1."""
    seeds: int = 2
    """Of the networks that learn features."""


_QUICK = [
    figures[name][1]
    for figures, name in (
        (theorem.FIGURES, "fedfisher1a"),
        (theorem.FIGURES, "fedfisher1b"),
        (averaging.FIGURES, "features1"),
    )
]
FIGURES = {
    "constants": (
        Setting(
            theorem.Setting(widths=(32, 128, 512), seeds=20),
            theorem.Setting(widths=(512,), steps=(16, 256, 4096, 16384), seeds=20),
            averaging.Setting(),
        ),
        Setting(*_QUICK, (0.5,), (0.01,), (1.0,), 1),
    )
}
"""All of it, and quick."""


def length(setting: Setting) -> int:
    """Count the constants that are tried."""
    return 2 * len(setting.variances) + len(setting.scales) + len(setting.rates)


def compute(setting: Setting, advance: Callable[[], None] = lambda: None) -> Found:
    """Compute every picture with every constant, and say after each that it is done."""
    found: Found = {}
    for name, variance in _pairs("widths", setting.variances) + _pairs("steps", setting.variances):
        own = dataclasses.replace(getattr(setting, name), variance=variance)
        found[name, variance] = {way: of.loss for way, of in theorem.compute(own).items()}
        advance()
    for name, value in _pairs("scale", setting.scales) + _pairs("learning_rate", setting.rates):
        own = dataclasses.replace(setting.rounds, seeds=setting.seeds, **{name: value})
        histories = averaging.compute(own)
        # At the end, mean over clients.
        found[name, value] = {
            way: of.test_accuracy[:, -1].mean(-1)[None] for way, of in histories.items()
        }
        advance()
    return found


def _pairs(name: str, values: tuple[float, ...]) -> list[tuple[str, float]]:
    return [(name, value) for value in values]


def section(name: str, setting: Setting, found: Found, out: Path) -> str:
    """Write the numbers and the picture into a folder, and tell what they say in Markdown."""
    lines = (
        (picture, constant, way, place, seed, f"{values[place, seed]:.6g}")
        for (picture, constant), ways in found.items()
        for way, values in ways.items()
        for place, seed in np.ndindex(values.shape)
    )
    columns = ("picture", "constant", "way", "point", "seed", "value")
    records.write_text(out / f"{name}.csv", tables.csv_text(columns, lines))
    _draw(found, out / f"{name}.png")
    parts = [f"## {name}\n"]
    variances = [f"{value:g}" for value in setting.variances]
    for picture, shown, words in (
        ("widths", _falls, f"widest over narrowest, {setting.widths.points}"),
        ("steps", _rises, f"most local steps over the best number, {setting.steps.points}"),
    ):
        ways = [way for way in found[picture, setting.variances[0]] if way != "fedavg"]
        rows = [
            (
                theorem.label(way),
                *(f"{shown(found[picture, v][way]):.2f}" for v in setting.variances),
            )
            for way in ways
        ]
        title = f"Loss, median over {setting.widths.seeds} seeds: {words}"
        headings = ("initial variance", *variances)
        parts.append(tables.markdown(tables.Table(title, headings, rows), level=3))
    for picture, values in {"scale": setting.scales, "learning_rate": setting.rates}.items():
        rows = [
            (
                averaging.WAYS[way][0],
                *(f"{100 * found[picture, value][way].mean():.1f}" for value in values),
            )
            for way in setting.rounds.ways
        ]
        title = f"Test accuracy in %, {setting.rounds.rounds} rounds, {setting.seeds} seeds"
        headings = (f"{picture.replace('_', ' ')} (features1)", *(f"{x:g}" for x in values))
        parts.append(tables.markdown(tables.Table(title, headings, rows), level=3))
    return "\n".join([*parts, f"![{name}]({name}.png)\n"])


def _falls(losses: np.ndarray) -> float:
    medians = np.median(losses, 1)
    return float(medians[-1] / medians[0])


def _rises(losses: np.ndarray) -> float:
    medians = np.median(losses, 1)
    return float(medians[-1] / medians.min())


def _draw(found: Found, path: Path) -> None:
    figure, panels = figures.canvas(12, 3.6, columns=4)
    titles = {
        "widths": "widest / narrowest, loss",
        "steps": "most steps / best, loss",
        "scale": "features1, test accuracy",
        "learning_rate": "features1, test accuracy",
    }
    for axes, (picture, title) in zip(panels, titles.items(), strict=True):
        own = {constant: ways for (name, constant), ways in found.items() if name == picture}
        for way in next(iter(own.values())):
            if picture in ("widths", "steps"):
                shown = _falls if picture == "widths" else _rises
                axes.plot([*own], [shown(ways[way]) for ways in own.values()], **theorem.look(way))
            else:
                words, colour = averaging.WAYS[way]
                means = [ways[way].mean() for ways in own.values()]
                axes.plot([*own], means, color=colour, marker="s", label=words)
        axes.set(xscale="log", title=title)
        axes.set_xlabel("variance" if picture in ("widths", "steps") else picture.replace("_", " "))
        axes.grid(color=figures.GRID)
    for axes in panels[:2]:
        axes.axhline(1, color=figures.GREY, linewidth=0.8)
        axes.set_yscale("log")
    figures.legend(figure, panels, columns=5, fontsize="small")
    figures.save(figure, path)
