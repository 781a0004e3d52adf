"""Vary constants that the papers do not give, and test which reproduce their figures."""

import dataclasses
from pathlib import Path

import numpy as np

from experiments.harness import figures, records, tables
from experiments.theory import averaging, parallel_runs, theorem
from experiments.theory.theorem_figure import label, look

Found = dict[tuple[str, float], dict[str, np.ndarray]]
"""Losses or accuracies [points, seeds] by figure and constant, and then by way."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Values of the constants, varied one at a time, and the settings of the other figures."""

    widths: theorem.Setting
    steps: theorem.Setting
    rounds: averaging.Setting
    variances: tuple[float, ...] = (0.03125, 0.125, 0.5, 2.0)
    """Variances of the initial weights of FedFisher's networks; the paper's kappa is 1/2."""
    scales: tuple[float, ...] = (0.001, 0.01, 0.03, 0.1)
    """Scales of the initial weights of the networks that learn features."""
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Learning rates of the networks that learn features; the paper's is 1."""
    seeds: int = 2
    """Number of seeds of the networks that learn features."""


_FIGURES = theorem.FIGURES | averaging.FIGURES
_QUICK = [_FIGURES[name][1] for name in ("fedfisher1a", "fedfisher1b", "features1")]
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
"""All constants, and a quick selection."""


def compute(setting: Setting, each: parallel_runs.Each = iter) -> Found:
    """Compute each figure with each value of its constant."""
    found: Found = {}
    tried = {"widths": setting.variances, "steps": setting.variances}
    tried |= {"scale": setting.scales, "learning_rate": setting.rates}
    for name, value in each([(name, value) for name, values in tried.items() for value in values]):
        if name in ("widths", "steps"):
            losses = theorem.compute(dataclasses.replace(getattr(setting, name), variance=value))
            found[name, value] = {way: of.loss for way, of in losses.items()}
        else:
            own = dataclasses.replace(setting.rounds, seeds=setting.seeds, **{name: value})
            # The accuracy is that after the last round, averaged over clients.
            found[name, value] = {
                way: of.test_accuracy[:, -1].mean(-1)[None]
                for way, of in averaging.compute(own).items()
            }
    return found


def section(name: str, setting: Setting, found: Found, out: Path) -> str:
    """Write the numbers and the picture into a folder; return a description in Markdown."""
    lines = (
        (picture, constant, way, *place, f"{x:.6g}")
        for (picture, constant), ways in found.items()
        for way, values in ways.items()
        for place, x in np.ndenumerate(values)
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
        columns = [found[picture, variance] for variance in setting.variances]
        rows = [(label(way), *(f"{shown(x[way]):.2f}" for x in columns)) for way in ways]
        title = f"Loss, median over {setting.widths.seeds} seeds: {words}"
        headings = ("initial variance", *variances)
        parts.append(tables.markdown(tables.Table(title, headings, rows), level=3))
    for picture, values in {"scale": setting.scales, "learning_rate": setting.rates}.items():
        columns = [found[picture, value] for value in values]
        rows = [
            (averaging.WAYS[way][0], *(f"{100 * x[way].mean():.1f}" for x in columns))
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
    figure, panels = figures.canvas(12, 3.6, columns=4, grid="both")
    titles = {
        "widths": "widest / narrowest, loss",
        "steps": "most steps / best, loss",
        "scale": "features1, test accuracy",
        "learning_rate": "features1, test accuracy",
    }
    for axes, (picture, title) in zip(panels, titles.items(), strict=True):
        curve = {constant: ways for (name, constant), ways in found.items() if name == picture}
        shown = {"widths": _falls, "steps": _rises}.get(picture, np.mean)
        for way in next(iter(curve.values())):
            if picture in ("widths", "steps"):
                own = look(way)
            else:
                words, colour = averaging.WAYS[way]
                own = {"color": colour, "marker": "s", "label": words}
            axes.plot([*curve], [shown(ways[way]) for ways in curve.values()], **own)
        axes.set(xscale="log", title=title)
        axes.set_xlabel("variance" if picture in ("widths", "steps") else picture.replace("_", " "))
    for axes in panels[:2]:
        axes.axhline(1, color=figures.GREY, linewidth=0.8)
        axes.set_yscale("log")
    figures.save_with_legend(figure, path, columns=5, fontsize="small")
