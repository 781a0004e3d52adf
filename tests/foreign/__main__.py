"""Verify that compiled programs of foreign networks equal eager ones, on the JAX installed.

    python -m tests.foreign                          about 500 programs: every triple of levels
    python -m tests.foreign --cover 60               60 programs, of which most pairs are in one
    python -m tests.foreign --only 'linen/*/max_pool/grad/float32/32/1'

It ends with a table of the worst relative error and the number of failures for each quantity and
framework, and exits with status 1 if anything failed that should be right.
"""

import argparse
import sys
import time

from rich.progress import Progress

from tests.foreign import cells, processes, tables
from tests.foreign.cells import Cell


def main(arguments: list[str] | None = None) -> int:
    """Run the cells asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    chosen = _chosen(options)
    begin, answers = time.perf_counter(), []
    with Progress(transient=True) as progress:
        task = progress.add_task("programs", total=len(chosen))
        for answer in processes.run(chosen, options.processes):
            answers.append(answer)
            progress.update(task, advance=1, description=answer.cell)
            if not progress.console.is_terminal:
                print(f"{len(answers)}/{len(chosen)} {answer.cell} {answer.seconds:.1f} s")
    tables.show(answers, processes.versions(), time.perf_counter() - begin)
    return int(any(tables.is_failure(finding) for a in answers for finding in a.findings))


def _chosen(options: argparse.Namespace) -> list[Cell]:
    every = [cell for cell in cells.product(options.only) if cell.devices in options.devices]
    if not every:
        sys.exit(f"No cell matches {options.only!r}; a name is {'/'.join(cells.FACTORS)}.")
    if options.cover is not None:
        chosen = cells.drawn(every, options.cover, options.seed)
    elif options.only != "*":
        chosen = every
    else:
        chosen = cells.cover(every, 3, options.seed)
    return cells.ordered(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.foreign",
        description="Verify compiled programs of foreign networks against eager ones.",
    )
    names = "/".join(cells.FACTORS)
    parser.add_argument("--only", default="*", metavar="PATTERN", help=f"run all cells {names}")
    parser.add_argument("--cover", type=int, metavar="N", help="run a drawn cover of N programs")
    parser.add_argument("--seed", type=int, default=0, help="of the cover (default 0)")
    parser.add_argument(
        "--devices", nargs="+", choices=("1", "2"), default=["1", "2"], help="CPU devices"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="child processes at once (default 2)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
