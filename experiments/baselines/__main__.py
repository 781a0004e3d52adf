"""Draw what four methods do inside, on small clients of digits, each picture with its numbers.

    python -m experiments.baselines --out runs/comparators

otfusion.png: where the units of one client belong in another's network, for clients of one start
and of two. pfnm.png: how many units of the merged network are shared by how many clients.
dense.png: images that the server drew, and its student's accuracy. fedov.png: destroyed digits, and
how unknown its own classes and others are to a client. summary.md holds the numbers. Drawing a
folder again is possible; one that holds something else is refused.
"""

import sys
import time
from collections.abc import Sequence

from rich.console import Console

from experiments.baselines import pictures
from experiments.baselines.runs import METHODS, Config
from experiments.harness import commands, records

PROGRAM = "experiments.baselines"
_SUMMARY = "summary.md"


@commands.command(PROGRAM, continues=False)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, Config)
    _check(asked)
    with records.folder(asked.out):
        for name in (_SUMMARY, records.RESULTS, records.CONFIG):
            if (asked.out / name).exists():
                records.check_config(asked.out, asked, Config(), found=name)
        records.write_config(asked.out, asked, PROGRAM)
        parts = ["# What four methods do inside\n"]
        for name in asked.algorithms:
            begun = time.perf_counter()
            with console.status(name):
                parts.append(pictures.section(name, asked))
            console.print(f"{name}.png ({time.perf_counter() - begun:.0f} s)")
        records.write_summary(asked, parts, PROGRAM)
    console.print("\n".join(parts), markup=False, soft_wrap=True)
    files = ", ".join(f"{name}.png" for name in asked.algorithms)
    console.print(f"In {asked.out}/: {files}, {_SUMMARY}, {records.CONFIG}", soft_wrap=True)


def _check(asked: Config) -> None:
    commands.check_list(asked, "algorithms")
    for name in asked.algorithms:
        commands.check_name("algorithms", name, METHODS)
    commands.check(asked, "seed", "0 or more", lambda x: x >= 0)
    for option in ("epochs", "open_epochs", "dense_epochs"):
        commands.check(asked, option, "1 or more", lambda x: x >= 1)


if __name__ == "__main__":
    sys.exit(main())
