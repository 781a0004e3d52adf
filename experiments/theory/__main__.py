"""Draw theorems about small networks in figures, each with the numbers that test its claim.

    python -m experiments.theory --figure fedfisher1a fedfisher1b --out runs/theory

fedfisher1a and fedfisher1b show FedFisher's theorem: the loss of a merged network with one hidden
layer over its width and over local steps, and the sources of this loss. features1 to features4 show
what FedAvg and a single client learn of signal and noise: in 1000 and in 8000 dimensions, step by
step, and for groups of clients. phase shows accuracy over clients and signal-to-noise ratio, the
boundary that theory predicts, and the result of one merge by curvature. directions shows the test
error over each number of the theorem's signal strength. constants varies the constants that the
papers do not give.

Each figure writes FIGURE.png, FIGURE.csv with every seed, and FIGURE.md with the claim and its
numbers.
"""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.harness import commands, records, studies, tables
from experiments.theory import averaging, constants, directions, phases, theorem

PROGRAM = "experiments.theory"
FIGURES = {
    name: (module, *settings)
    for module in (theorem, averaging, phases, directions, constants)
    for name, settings in module.FIGURES.items()
}
"""The module that computes each figure, its setting as in the papers, and its quick setting."""
Figure = Literal[
    *("fedfisher1a", "fedfisher1b", "features1", "features2", "features3", "features4"),
    *("phase", "directions", "constants"),
]


@dataclasses.dataclass(frozen=True)
class Config:
    """Figures that are drawn, and their seeds."""

    figure: tuple[Figure, ...] = tuple(FIGURES)
    """Figures, in the order in which they are drawn."""
    seeds: int | None = None
    """Number of seeds, 0, 1, ...; None takes the number of the papers."""
    quick: bool = False
    """Take small networks, few rounds and few seeds, to test that everything runs."""
    out: commands.Folder = Path("runs/theory")
    """Folder for the pictures and the numbers."""


def _check(asked: Config) -> None:
    commands.check_list(asked, "figure")
    commands.check(asked, "seeds", "1 or more", lambda x: x is None or x >= 1)


@commands.command(PROGRAM, __doc__, Config, _check, continues=False)
def main(asked: Config, console: Console) -> None:
    with records.folder(asked.out):
        for name in asked.figure:
            text = _drawn(asked, name, console)
            again = commands.write(dataclasses.replace(asked, figure=(name,)), PROGRAM)
            records.write_text(asked.out / f"{name}.md", f"{text}\n```\n{again}\n```\n")
            console.print(text, markup=False, soft_wrap=True)
    files = ", ".join(f"{name}.*" for name in asked.figure)
    console.print(f"In {asked.out}/: {files}", soft_wrap=True)


def _drawn(asked: Config, name: Figure, console: Console) -> str:
    module, *settings = FIGURES[name]
    setting: Any = settings[asked.quick]
    if asked.seeds is not None:
        setting = dataclasses.replace(setting, seeds=asked.seeds)
    start = time.perf_counter()
    found = module.compute(setting, partial(studies.each, console, words=lambda _: name))
    seconds = time.perf_counter() - start
    took = f"{seconds:.0f} s" if seconds < 90 else tables.duration(seconds)
    return f"{module.section(name, setting, found, asked.out)}\nComputed in {took}.\n"


if __name__ == "__main__":
    raise SystemExit(main())
