"""Draw the inner workings of OTFusion, PFNM, DENSE and FedOV on small clients of digits.

    python -m experiments.baselines --out runs/comparators

otfusion.png shows where the units of one client belong in another's network, for clients with one
initial model and with two. pfnm.png shows how many clients share each unit of the merged network,
dense.png the images that the server generates and its student's accuracy, and fedov.png corrupted
digits and the probability of "unknown" that a client gives to its own classes and to others.
summary.md holds the numbers. A folder may be drawn again; a folder of another experiment is
refused.
"""

import time

from rich.console import Console

from experiments.baselines import pictures
from experiments.baselines.runs import METHODS, Config
from experiments.harness import commands, folders, limits, records

PROGRAM = "experiments.baselines"
_SUMMARY = "summary.md"


def _check(asked: Config) -> None:
    limits.check_options(asked)
    commands.check_names(asked, "algorithms", METHODS)


@commands.command(PROGRAM, __doc__, Config, _check, continues=False)
def main(asked: Config, console: Console) -> None:
    with records.folder(asked.out):
        for name in (_SUMMARY, records.RESULTS, records.CONFIG):
            if (asked.out / name).exists():
                asked = folders.grown(asked, Config(), found=name)
        folders.write_config(asked.out, asked, PROGRAM)
        parts = ["# What four methods do inside\n"]
        for name in asked.algorithms:
            start = time.perf_counter()
            with console.status(name):
                parts.append(pictures.section(name, asked))
            console.print(f"{name}.png ({time.perf_counter() - start:.0f} s)")
        folders.write_summary(asked, parts, PROGRAM)
    console.print("\n".join(parts), markup=False, soft_wrap=True)
    files = ", ".join(f"{name}.png" for name in asked.algorithms)
    console.print(f"In {asked.out}/: {files}, {_SUMMARY}, {records.CONFIG}", soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
