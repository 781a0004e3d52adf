"""Measure barriers: the merged model's error on a client's points less the client's own error."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.function_space.toy_regression import SUPPORTS, Runs, cells, errors, model
from experiments.harness.figures import canvas, label, line_style, save_with_legend, style
from experiments.harness.tables import Table, csv_text
from fisherjax.typing import Params

Errors = dict[str, np.ndarray]
"""Mean squared errors [R, 2] by algorithm, of every run and client; first of the `local` models."""
_CLIENTS = (("#7f7f7f", "."), ("#b5b5b5", "x"))
_CORNER = {"xy": (1, 1), "xycoords": "axes fraction", "ha": "right", "va": "top", "size": 9}
_PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}


def measure(width: int, runs: Runs, merged: dict[str, Params]) -> Errors:
    """Measure errors on the clients' own points; a ValueError names a merge that is not finite."""
    found = {"local": np.asarray(errors(model(width), runs.locals, runs, stacked=True))}
    for name, models in merged.items():
        found[name] = np.asarray(errors(model(width), models, runs))
        finite = np.isfinite(found[name]).all(-1)
        if not finite.all():
            overlap, seed = cells(runs)[finite.argmin()]
            raise ValueError(f"{name} gave no finite model with overlap {overlap}, seed {seed}")
    return found


def barriers(measured: Errors) -> dict[str, np.ndarray]:
    """Return the barriers by algorithm, mean over clients, [overlaps, seeds]."""
    local, *names = measured
    return {name: _by_overlap((measured[name] - measured[local]).mean(-1)) for name in names}


def csv(runs: Runs, measured: Errors) -> str:
    """Return every error and barrier as CSV; without a client a barrier is the mean."""
    lines = []
    for run, cell in enumerate(cells(runs)):
        for name, values in measured.items():
            found = [("mse", i, x) for i, x in enumerate(values[run])]
            if name != "local":
                own = values[run] - measured["local"][run]
                found += [("barrier", i, x) for i, x in [*enumerate(own), (None, own.mean())]]
            # Nine digits distinguish all numbers of float32.
            lines += [(*cell, name, i, metric, f"{x:.9g}") for metric, i, x in found]
    return csv_text(("overlap", "seed", "algorithm", "client", "metric", "value"), lines)


def table(measured: Errors) -> Table:
    """Return a table of medians and quartiles over seeds, and of the seeds below FedAvg."""
    lines, found, local = [], barriers(measured), _by_overlap(measured["local"])
    for place, overlap in enumerate(SUPPORTS):
        for name, values in found.items():
            quartiles = np.quantile(values[place], (0.5, 0.25, 0.75))
            shown = [f"{x:.4f}" for x in (*quartiles, np.median(local[place]))]
            lower = f"{100 * np.mean(values[place] < found['fedavg'][place]):.0f}"
            shown.insert(3, "-" if name == "fedavg" else lower)
            lines.append((overlap, label(name), *shown))
    headings = (
        *("overlap", "algorithm", "median barrier", "lower quartile", "upper quartile"),
        *("below FedAvg, % of seeds", "local MSE"),
    )
    return Table("", headings, lines, text=2)


def draw_functions(
    width: int, seed: int, runs: Runs, merged: dict[str, Params], measured: Errors, path: Path
) -> None:
    """Draw data, local and merged functions of one seed, a panel for each overlap."""
    apply, x = model(width).apply, np.linspace(-1, 1, 401)[:, None]
    figure, panels = canvas(8.4, 5, columns=3, sharex=True, sharey=True)
    for place, (axes, overlap) in enumerate(zip(panels, SUPPORTS, strict=True)):
        run = cells(runs).index((overlap, seed))
        data, models = _select((runs.federations, runs.locals), run)
        for client, (colour, marker) in enumerate(_CLIENTS):
            own, name = data.indices[client], f"client {client + 1}"
            points = data.inputs[own], data.targets[own]
            axes.plot(*points, marker, color=colour, ms=3.5, label=f"{name}, points")
            y = apply(_select(models, client), x)
            axes.plot(x, y, ":", color=colour, lw=2, label=f"{name}, own model")
        for number, (name, stacked) in enumerate(merged.items()):
            y = apply(_select(stacked, run), x)
            marks = {"markevery": (12 * number, 60), "ms": 5.5, "linestyle": line_style(name)}
            axes.plot(x, y, lw=1.6, **marks, **style(name))
        lines = [f"{label(n)} {own[place, seed]:.3f}" for n, own in barriers(measured).items()]
        axes.annotate("\n".join(["barriers:", *lines]), bbox=_PAPER, **_CORNER)
        axes.set_title(f"overlap: {overlap}", fontsize="medium", loc="left")
        axes.set_xlabel("x")
    panels[0].set(ylim=(-2, 3.2), xticks=[-1, -0.5, 0, 0.5, 1], ylabel="y")
    save_with_legend(figure, path)


def draw_barriers(measured: Errors, path: Path) -> None:
    """Draw the barriers, a dot for each seed and a line at the median of each algorithm."""
    (figure, axes), found = canvas(8, 4, grid="y"), barriers(measured)
    for number, (name, both) in enumerate(found.items()):
        look, beside = style(name), 0.8 * ((number + 0.5) / len(found) - 0.5)
        for place, values in enumerate(both):
            spread = np.linspace(-0.06, 0.06, len(values)) if len(values) > 1 else [0]
            axes.plot(place + beside + spread, values, lw=0, ms=4, alpha=0.6, **look)
            ends = place + beside - 0.08, place + beside + 0.08
            axes.hlines(np.median(values), *ends, look["color"], lw=3)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xticks(range(len(SUPPORTS)), list(SUPPORTS))
    axes.set(xlabel="overlap of the clients' inputs", ylabel="client-server barrier (MSE)")
    save_with_legend(figure, path)


def _by_overlap(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(SUPPORTS), -1).astype(float)


def _select(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], stacked)
