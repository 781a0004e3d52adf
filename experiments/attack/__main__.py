"""Attack clients as a curious server would: make images of what it sees of one of them.

    python -m experiments.attack --out runs/attack
    python -m experiments.attack --views model aggregate --gan-epochs 100 --channels 256 128 64

One client has all images of a digit. The server trains a generative network on images of the
others and descends over what it makes images of, until the model that it sees takes them for that
digit. An independent network judges how many are. results.csv: each view of each seed; attack.png:
what the server gets; summary.md: the table. An interrupted run continues.
"""

import math
import statistics
import sys
import textwrap
from collections.abc import Sequence
from functools import partial

from PIL import Image
from rich.console import Console

from experiments.attack import gan, runs
from experiments.attack.runs import VIEWS, Config, Point
from experiments.harness import commands, config, figures, measurements, records, tables
from experiments.harness.config import Data, Training

PROGRAM = "experiments.attack"
_COUNTS = (
    *("epochs", "others", "channels", "gan_epochs", "judge_epochs", "images", "restarts", "steps"),
)


@commands.command(PROGRAM)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, _default)
    _check(asked)
    with records.folder(asked.out):
        default, units = _default(asked.data.dataset), runs.units(asked)
        measured = partial(runs.measured, asked, console)
        points = measurements.continued(asked, PROGRAM, default, Point, units, measured)
        _report(asked, points, console)


def _default(dataset: str | None = None) -> Config:
    """Return what is run if nothing else is asked."""
    data = Data(dataset or "mnist", "lenet", num_clients=10)
    return Config(data, Training(learning_rate=0.01, batch_size=64))


def _check(asked: Config) -> None:
    commands.check_list(asked, "views", "seeds")
    for view in asked.views:
        commands.check_name("views", view, VIEWS)
    for option in _COUNTS:
        commands.check(asked, option, "1 or more", lambda number: number >= 1)
    least = gan.FEWEST
    commands.check(asked, "known", f"{least} or more", lambda number: number >= least)
    commands.check(asked, "digit", "0 to 9", lambda digit: 0 <= digit <= 9)
    for option in ("learning_rate_of_noise", "clip"):
        commands.check(asked, option, "above 0", lambda x: 0 < x < math.inf)
    for option in ("factor_weight", "noise_multiplier"):
        commands.check(asked, option, "0 or more", lambda x: 0 <= x < math.inf)
    commands.check(asked, "delta", "above 0 and below 1", lambda delta: 0 < delta < 1)
    commands.check(asked.data, "dataset", "mnist", lambda name: name == "mnist")
    commands.check(
        asked.data, "partition", "dirichlet_of_client", lambda name: name == "dirichlet_of_client"
    )
    commands.check(asked.data, "num_clients", "2 or more", lambda number: number >= 2)


def _report(asked: Config, measured: Sequence[Point], console: Console) -> None:
    title = f"{config.title(asked.data)}: images made of what the server sees"
    headings = ("seen", "taken for the digit, %", "its accuracy, %", "its epsilon")
    lines = []
    for view in asked.views:
        own = [point for point in measured if point.view == view and point.seed in asked.seeds]
        shares = [100 * point.recognized for point in own]
        accuracies = [100 * point.model_accuracy for point in own]
        cost = statistics.fmean(point.epsilon for point in own)
        cell = f"{cost:.3g}" if math.isfinite(cost) else "none"
        lines.append((VIEWS[view], tables.spread(shares), tables.spread(accuracies), cell))
    shown = tables.Table(title, headings, lines, text=1)
    console.print(tables.terminal(shown))
    _draw(asked, title)
    judge = 100 * statistics.fmean(point.judge_accuracy for point in measured)
    words = f"The judge is right for {judge:.1f} % of the test images."
    parts = [tables.markdown(shown), words, "", "![what the server gets](attack.png)", ""]
    parts += ["```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    console.print(f"In {asked.out}/: config.json, results.csv, attack.png, summary.md")


def _draw(asked: Config, title: str) -> None:
    seed = asked.seeds[0]
    rows = {"own": "what the client has", "known": "what the server has"} | {
        view: VIEWS[view] for view in asked.views
    }
    drawn, axes = figures.canvas(7.4, 0.48 * len(rows) + 0.4, 1, len(rows), squeeze=False)
    for (name, words), panel in zip(rows.items(), axes[:, 0], strict=True):
        images = Image.open(runs.strip(asked.out, seed, name))
        panel.imshow(images, cmap="gray", vmin=0, vmax=255)
        panel.set_ylabel(
            textwrap.fill(words, 22), rotation=0, ha="right", va="center", fontsize="small"
        )
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    drawn.suptitle(title, fontsize="small")
    figures.save(drawn, asked.out / "attack.png")


if __name__ == "__main__":
    sys.exit(main())
