"""Draw what is proven about small networks, each picture with the numbers that judge its claim.

    python -m experiments.theory --figure fedfisher1a fedfisher1b --out runs/theory

fedfisher1a, fedfisher1b: FedFisher's theorem, the loss of a merged network with one hidden layer
over its width and over local steps, and where it comes from. features1 to features4: what FedAvg
learns of signal and noise, beside a client alone, in 1000 and in 8000 dimensions, step by step, and
for groups of clients. phase: accuracy over clients and signal-to-noise ratio, the boundary of the
theory, and what one merge by curvature does there. constants: which of the constants that the
papers do not give make their pictures.

Of each figure: FIGURE.png, FIGURE.csv with every seed, FIGURE.md with the claim and its numbers.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.harness import commands, records, tables
from experiments.harness.progress import bar
from experiments.theory import averaging, constants, phases, theorem

PROGRAM = "experiments.theory"
FIGURES = {
    name: (module, *settings)
    for module in (theorem, averaging, phases, constants)
    for name, settings in module.FIGURES.items()
}
"""Where each is computed, and its setting, as the papers have it and quick."""
Figure = Literal[
    *("fedfisher1a", "fedfisher1b", "features1", "features2", "features3", "features4"),
    *("phase", "constants"),
]


@dataclasses.dataclass(frozen=True)
class Config:
    """What to draw."""

    figure: tuple[Figure, ...] = tuple(FIGURES)
    """Figures, in this order."""
    seeds: int | None = None
    """How many seeds, 0, 1, ...; those of the papers if None."""
    quick: bool = False
    """Small networks, few rounds and seeds: to see that it runs, not what is true."""
    out: commands.Folder = Path("runs/theory")
    """Folder for the pictures and the numbers."""


@commands.command(PROGRAM, continues=False)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, Config)
    commands.check_list(asked, "figure")
    if asked.seeds is not None:
        commands.check(asked, "seeds", "1 or more", lambda x: x >= 1)
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
    begun = time.perf_counter()
    with bar(console) as shown:
        watched = shown.add_task(name, total=module.length(setting), speed="")
        found = module.compute(setting, lambda: shown.advance(watched))
    seconds = time.perf_counter() - begun
    told = f"{seconds:.0f} s" if seconds < 90 else tables.duration(seconds)
    return f"{module.section(name, setting, found, asked.out)}\nComputed in {told}.\n"


if __name__ == "__main__":
    sys.exit(main())
