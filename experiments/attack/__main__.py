"""Attack a client as a curious server would: reconstruct its images from what the server sees.

    python -m experiments.attack --out runs/attack
    python -m experiments.attack --views model aggregate --gan-epochs 100 --channels 256 128 64

One client has all images of a digit. The server trains a generative network on images of the other
clients, and optimises the network's input until the model that the server sees classifies the
output as that digit. An independent network measures how many of these images show it.
results.csv holds each view of each seed, attack.png the images that the server makes, and
summary.md the table. The same command continues an interrupted run.
"""

import math
import statistics
import textwrap
from collections.abc import Sequence

from PIL import Image
from rich.console import Console

from experiments.attack import gan, runs
from experiments.attack.runs import VIEWS, Config, Measurement
from experiments.harness import commands, figures, studies, tables, titles

PROGRAM = "experiments.attack"


def _check(asked: Config) -> None:
    commands.check_names(asked, "views", VIEWS)
    least, data = gan.FEWEST, asked.data
    commands.check(asked, "known", f"{least} or more", lambda number: number >= least)
    commands.check(asked, "others", "1 or more", lambda number: number >= 1)
    commands.check(asked, "digit", "0 to 9", lambda digit: 0 <= digit <= 9)
    for option, word in {"dataset": "mnist", "partition": "dirichlet_of_client"}.items():
        commands.check(data, option, word, word.__eq__)
    commands.check(data, "num_clients", "2 or more", lambda number: number >= 2)


def _report(asked: Config, measured: Sequence[Measurement], console: Console) -> None:
    heading = f"{titles.title(asked.data)}: images made of what the server sees"
    headings = ("seen", "taken for the digit, %", "its accuracy, %", "its epsilon")
    lines = []
    for view in asked.views:
        ones = [one for one in measured if one.view == view and one.seed in asked.seeds]
        shares = tables.spread([100 * one.recognized for one in ones])
        accuracies = tables.spread([100 * one.model_accuracy for one in ones])
        cost = statistics.fmean(one.epsilon for one in ones)
        lines.append(
            (VIEWS[view], shares, accuracies, f"{cost:.3g}" if cost < math.inf else "none")
        )
    _draw(asked, heading)
    right = 100 * statistics.fmean(one.judge_accuracy for one in measured)
    words = (
        f"The judge is right for {right:.1f} % of the test images. DP-SGD's noise comes from "
        f"{runs.NOISE[asked.seeded_noise]}."
    )
    shown = [tables.Table(heading, headings, lines)]
    pictures = {"attack.png": "what the server gets"}
    studies.report(asked, PROGRAM, shown, pictures, console, words)


def _draw(asked: Config, heading: str) -> None:
    rows = {"own": "what the client has", "known": "what the server has"}
    rows |= {view: VIEWS[view] for view in asked.views}
    drawn, axes = figures.canvas(8.4, 0.52 * len(rows) + 0.5, 1, len(rows), squeeze=False)
    for (name, words), panel in zip(rows.items(), axes[:, 0], strict=True):
        images = Image.open(runs.strip(asked.out, asked.seeds[0], name))
        figures.image(panel, images, textwrap.fill(words, 24), cmap="gray", vmin=0, vmax=255)
        panel.spines[:].set_visible(False)
    drawn.suptitle(heading.replace(": ", "\n"), fontsize="medium")
    figures.save(drawn, asked.out / "attack.png")


main = studies.study(PROGRAM, __doc__, runs, _check, _report)

if __name__ == "__main__":
    raise SystemExit(main())
