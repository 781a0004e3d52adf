"""Draw what FedFish is for: merge two networks that learned pieces of one curve.

    python -m experiments.function_space --out runs/function_space

Two clients learn y = sin(2 pi x) on inputs that overlap fully, partly or not at all, and are merged
in one round by FedAvg, by the Fisher-weighted mean of FedFish, and by FedFisher. The client-server
barrier is how much larger the merged model's mean squared error on a client's own points is than
that of the client's own model, mean over the clients.

functions.png: the functions of one seed. barriers.png: the barriers of all seeds. barriers.csv:
every error and barrier. summary.md: the table.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console

from experiments import commands, records, toy_regression
from experiments.barriers import Row, barriers, evaluate, write_rows
from experiments.choices import label
from experiments.figures import canvas, save
from experiments.toy_regression import SUPPORTS, Runs, Setting
from fisherjax.typing import Params

COLOURS = {
    "fedavg": "#222222",
    "fedfish": "#c4501b",
    "fedfisher_kfac": "#7a3fa0",
    "fedfisher_full": "#2a7f3f",
}
_CLIENTS = ("#6fa8dc", "#e0a63c")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compute."""

    others: tuple[Literal["fedfisher_kfac", "fedfisher_full"], ...] = (
        "fedfisher_kfac",
        "fedfisher_full",
    )
    """Besides FedAvg and FedFish; the full Fisher's memory grows with the fourth power of width."""
    num_seeds: int = 20
    """Seeds 0, 1, ... of data and initial models."""
    drawn_seed: int = 0
    """Whose functions are drawn."""
    num_points: int = 128
    """Of each client."""
    noise: float = 0.05
    """Standard deviation of the targets around the curve."""
    width: int = 64
    """Of both hidden layers."""
    steps: int = 2000
    """Of each client, on all its points."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Of the clients."""
    learning_rate: float = 1e-3
    """Of the clients."""
    start: Literal["zero_biases", "uniform"] = "zero_biases"
    """Initial model: LeCun's normal kernels and no biases, or PyTorch's uniform ones and biases."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/function_space")
    """Folder for the pictures, the table and the numbers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit status: 0 when all is drawn, 1 when something was refused.
    """
    console = Console(highlight=False)
    asked = tyro.cli(
        Config, prog="python -m experiments.function_space", args=arguments, description=__doc__
    )
    try:
        _check(asked)
        records.check_writable(asked.out)
        with console.status("training"):
            runs = toy_regression.train(_setting(asked), range(asked.num_seeds))
        merged = {}
        for name in ("fedavg", "fedfish", *asked.others):
            with console.status(label(name)):
                method = toy_regression.algorithm(name, asked.width)
                merged[name] = toy_regression.merge(method, runs)
        rows = evaluate(asked.width, runs, merged)
        text = summary(asked, rows)
        write_rows(asked.out / "barriers.csv", rows)
        draw_functions(asked, runs, merged, rows, asked.out / "functions.png")
        draw_barriers(rows, asked.out / "barriers.png")
        records.write_text(asked.out / "summary.md", text)
    except (ValueError, OSError) as error:
        return commands.refuse(error)
    console.print(text, markup=False, soft_wrap=True)
    names = "functions.png, barriers.png, barriers.csv, summary.md"
    console.print(f"In {asked.out}/: {names}", soft_wrap=True)
    return 0


def summary(asked: Config, rows: Sequence[Row]) -> str:
    """Write the table of barriers over seeds, in Markdown.

    Args:
        asked: what was computed.
        rows: from `evaluate`.

    Returns:
        The file's text.
    """
    lines = []
    for overlap, own in barriers(rows).items():
        local = [r.value for r in rows if (r.overlap, r.algorithm) == (overlap, "local")]
        for name, values in own.items():
            quantiles = (f"{x:.4f}" for x in np.quantile(values, (0.5, 0.25, 0.75)))
            lower = "-"
            if name != "fedavg":
                lower = f"{100 * np.mean(values < own['fedavg']):.0f}"
            lines.append((overlap, label(name), *quantiles, lower, f"{np.median(local):.4f}"))
    headings = (
        *("overlap", "algorithm", "median barrier", "lower quartile", "upper quartile"),
        *("below FedAvg, % of seeds", "local MSE"),
    )
    spans = "; ".join(
        f"{overlap}: {' and '.join(f'[{low:g}, {high:g}]' for low, high in both)}"
        for overlap, both in SUPPORTS.items()
    )
    return "\n".join(
        [
            "# Two clients that learned pieces of one curve, merged in one round",
            "",
            *(f"| {' | '.join(line)} |" for line in (headings, ("---",) * 2 + ("---:",) * 5)),
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
            "Client-server barrier: mean over the clients of the merged model's mean squared error "
            "on a client's points less that of the client's own model; "
            f"{asked.num_seeds} seeds. Local MSE: of the clients' own models, median. For scale, "
            "the function that is zero everywhere has an error of about 0.5.",
            "",
            f"y = sin(2πx) + {asked.noise:g} N(0, 1), {asked.num_points} points a client. Inputs "
            f"of the two clients, {spans}. MLP 1-{asked.width}-{asked.width}-1 with tanh, "
            f"{asked.steps} full-batch steps of {asked.optimizer}, learning rate "
            f"{asked.learning_rate:g}, on both clients from one initial model "
            f"({asked.start.replace('_', ' ')}). FedFish: the mean "
            "weighted by the diagonal Fisher of the squared loss, in one round.",
            "",
            f"![functions of seed {asked.drawn_seed}](functions.png)",
            "",
            "![barriers of all seeds](barriers.png)",
            "",
            "```",
            commands.write(asked, "experiments.function_space"),
            "```",
            "",
        ]
    )


def draw_functions(
    asked: Config, runs: Runs, merged: dict[str, Params], rows: Sequence[Row], path: Path
) -> None:
    """Draw data, local and merged functions of one seed, a panel for each overlap.

    Args:
        asked: which seed.
        runs: with trained clients.
        merged: by algorithm.
        rows: from `evaluate`.
        path: of the PNG file.
    """
    apply = toy_regression.network(asked.width)
    x = np.linspace(-1, 1, 401)[:, None]
    found = barriers(rows)
    figure, panels = canvas(13, 5.2, columns=3)
    for axes, overlap in zip(panels, SUPPORTS, strict=True):
        run = list(zip(runs.overlaps, runs.seeds, strict=True)).index((overlap, asked.drawn_seed))
        federation, models = _select((runs.federations, runs.locals), run)
        for client, colour in enumerate(_CLIENTS):
            own = federation.indices[client]
            axes.plot(federation.inputs[own], federation.targets[own], ".", color=colour, ms=3)
            y = apply(_select(models, client), x)
            axes.plot(x, y, "--", color=colour, lw=1.2, label=f"client {client + 1}")
        for name, stacked in merged.items():
            value = found[overlap][name][asked.drawn_seed]
            shown = f"{label(name)}, barrier {value:.3f}"
            axes.plot(x, apply(_select(stacked, run), x), color=COLOURS[name], lw=1.6, label=shown)
        axes.set_xticks([-1, -0.5, 0, 0.5, 1])
        axes.set_ylim(-2.2, 2.2)
        axes.set_title(f"overlap: {overlap}", fontsize="medium", loc="left")
        axes.legend(
            frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), fontsize="small"
        )
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def draw_barriers(rows: Sequence[Row], path: Path) -> None:
    """Draw the barriers, a dot for each seed and a line at the median of each algorithm.

    Args:
        rows: from `evaluate`.
        path: of the PNG file.
    """
    figure, axes = canvas(8, 3.6)
    found = barriers(rows)
    for group, own in enumerate(found.values()):
        for place, (name, values) in enumerate(own.items()):
            middle = group + 0.8 * ((place + 0.5) / len(own) - 0.5)
            spread = np.linspace(-0.06, 0.06, len(values)) if len(values) > 1 else 0
            style = {"color": COLOURS[name], "label": label(name) if group == 0 else None}
            axes.plot(middle + spread * np.ones(len(values)), values, "o", ms=3, alpha=0.6, **style)
            median = [np.median(values)] * 2
            axes.plot([middle - 0.08, middle + 0.08], median, color=COLOURS[name], lw=2.5)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_xlabel("overlap of the clients' inputs")
    axes.set_ylabel("client-server barrier (MSE)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def _setting(asked: Config) -> Setting:
    return Setting(**{field: getattr(asked, field) for field in Setting._fields})


def _select(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _check(asked: Config) -> None:
    for field in ("num_seeds", "num_points", "width", "steps"):
        if getattr(asked, field) < 1:
            option = f"--{field.replace('_', '-')}"
            raise ValueError(f"{option} is {getattr(asked, field)}, expected 1 or more")
    if not 0 <= asked.drawn_seed < asked.num_seeds:
        raise ValueError(
            f"--drawn-seed is {asked.drawn_seed}, expected one of the --num-seeds "
            f"{asked.num_seeds} seeds, 0 to {asked.num_seeds - 1}"
        )
    if not 0 <= asked.noise < math.inf:
        raise ValueError(f"--noise is {asked.noise}, expected a finite number, zero or more")
    if not 0 < asked.learning_rate < math.inf:
        raise ValueError(f"--learning-rate is {asked.learning_rate}, expected a number above 0")


if __name__ == "__main__":
    sys.exit(main())
