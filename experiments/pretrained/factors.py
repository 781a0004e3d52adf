"""Draw what a factor of the changes does to merges of sentence encoders, from the recorded table.

    python -m experiments.pretrained.factors

It reads experiments/results/pretrained_text/results.csv, trains nothing, and takes seconds.
"""

from pathlib import Path

import numpy as np

from experiments.harness import figures, records
from experiments.pretrained.text_table import Measurement

RECORD = Path("experiments/results/pretrained_text")
SHOWN = (
    *("fedavg", "ties", "dare", "iso_c", "regmean", "regmean_plus_plus", "fedfisher_diag"),
    "fedfisher_kfac",
)
"""Algorithms that are drawn."""
LEVELS = {"start": "the common start", "joint": "trained on all sentences"}


def means(rows: list[Measurement], algorithm: str) -> dict[float, float]:
    """Return the mean accuracy over seeds and domains, in %, for each factor of the change."""
    own = [row for row in rows if row.algorithm == algorithm]
    return {
        scale: 100 * float(np.mean([row.accuracy for row in own if row.scale == scale]))
        for scale in sorted({row.scale for row in own})
    }


def main(record: Path = RECORD) -> None:
    """Draw factors.png into the folder of the record."""
    rows = records.read_rows(record / records.RESULTS, Measurement._fields, Measurement)
    drawn, panel = figures.canvas(7.2, 4.2)
    for name in SHOWN:
        found = means(rows, name)
        look = figures.style(name) | {"linestyle": figures.line_style(name)}
        panel.plot([*found], [*found.values()], **look)
    for (name, shown), line in zip(LEVELS.items(), (":", "--"), strict=True):
        (level,) = means(rows, name).values()
        panel.axhline(level, color=figures.GREY, linewidth=1.2, linestyle=line, label=shown)
    panel.set(xticks=(1, 2, 3), xlabel="factor of the merged change", ylabel="accuracy, %")
    panel.set_title("Four sentence encoders, each of one domain, become one", loc="left")
    figures.save_with_legend(drawn, record / "factors.png", columns=3)


if __name__ == "__main__":
    main()
