"""What is verified: every combination of a network, a program and the circumstances it runs in.

A cell is one combination; its name is the levels of the factors, joined by slashes. There are too
many for one run (`product`), so that a run takes a cover: cells chosen so that each pair, or each
triple, of levels that exists together is in at least one of them.

This module imports nothing but Python, so that cells can be listed before JAX starts.
"""

import fnmatch
import itertools
import random
from typing import NamedTuple

FACTORS: dict[str, tuple[str, ...]] = {
    # "_stock" computes with the framework's own convolution, the others with `fj.nn`'s if they can.
    "framework": ("linen", "linen_stock", "nnx", "nnx_stock", "equinox", "haiku"),
    "convolution": ("plain", "strided", "dilated", "grouped", "depthwise", "one_d", "three_d"),
    # Three of the framework's own, three of jnp over space, and two that broadcast a parameter.
    "pooling": (
        *("max_pool", "avg_pool", "global_pool", "mean", "max", "sum"),
        *("queries", "weights"),
    ),
    "program": (
        *("outputs", "grad", "examples", "scan", "clients"),
        *("factors", "summaries", "exchanges", "train"),
    ),
    "dtype": ("float32", "bfloat16"),
    "batch": ("1", "3", "32", "128"),
    "devices": ("1", "2"),
}
USERS = ("outputs", "grad", "examples", "scan", "clients")
"""Programs that a user compiles by `jax.jit`; the others are calls of the library."""

SHARED = ("outputs", "grad", "examples", "scan")
"""Programs of which two devices share the batch; of the others they share clients or rows."""


class Cell(NamedTuple):
    """One combination of levels."""

    framework: str
    convolution: str
    pooling: str
    program: str
    dtype: str
    batch: str
    devices: str

    @property
    def name(self) -> str:
        """The levels, such as linen/strided/max_pool/grad/float32/32/1."""
        return "/".join(self)

    @property
    def users_form(self) -> bool:
        """Whether the user's own program has the form that some versions of XLA miscompile.

        That is a product of which one operand is a broadcast along the batch. No library can mend
        what the user compiles by `jax.jit`, so these cells fail there until the flag is set.
        """
        return self.pooling in ("queries", "weights") and self.program in USERS


def named(name: str) -> Cell:
    """Find the cell of a name."""
    return Cell(*name.split("/"))


def exists(cell: Cell) -> bool:
    """Say whether a combination can be run, and compared to any purpose."""
    left_out = (
        # Two devices have half of a batch each.
        cell.devices == "2" and cell.program in SHARED and int(cell.batch) % 2 == 1,
        # Since 0.7.1 JAX refuses derivatives of grouped convolutions that are mapped over examples
        # inside `shard_map` (seen on 0.10.2 and 0.12.0.1), and `devices.on_each` says so.
        cell.devices == "2"
        and cell.program == "factors"
        and cell.convolution in ("grouped", "depthwise"),
        # Sums over positions, steps of training and solves round to bfloat16 again and again: two
        # right programs differ by more than any bound that would show a fault.
        cell.dtype == "bfloat16" and cell.program in ("examples", "exchanges", "train"),
        # The frameworks' own mean over all of space adds up in bfloat16 itself, in any order; and
        # the exponentials of a softmax round on the way to squares of derivatives.
        cell.dtype == "bfloat16" and cell.pooling == "global_pool",
        cell.dtype == "bfloat16" and cell.pooling == "queries" and cell.program == "factors",
        # Each of its thousand operations takes long to compile by itself, and most are the
        # server's. What networks add to it, derivatives and sums, is in other programs.
        cell.program == "exchanges" and not _is_for_exchanges(cell),
    )
    return not any(left_out)


def _is_for_exchanges(cell: Cell) -> bool:
    network = (cell.framework, cell.convolution, cell.pooling)
    return network == ("linen", "plain", "max_pool") and cell[-2:] == ("32", "2")


def product(pattern: str = "*") -> list[Cell]:
    """List all cells whose name matches a pattern."""
    every = itertools.starmap(Cell, itertools.product(*FACTORS.values()))
    return [cell for cell in every if fnmatch.fnmatch(cell.name, pattern) and exists(cell)]


def combinations(cell: Cell, strength: int) -> list[tuple[tuple[int, str], ...]]:
    """List the pairs (strength 2) or triples (3) of levels of a cell."""
    return list(itertools.combinations(enumerate(cell), strength))


def cover(every: list[Cell], strength: int, seed: int, candidates: int = 60) -> list[Cell]:
    """Choose few cells that have each combination of so many levels that any of `every` has.

    Greedily: of some cells that have a combination which is still missing, the one that has most.
    """
    draw = random.Random(seed)
    having: dict[tuple, list[Cell]] = {}
    for cell in every:
        for combination in combinations(cell, strength):
            having.setdefault(combination, []).append(cell)
    # Dictionaries keep their order: the same seed gives the same cover in every process.
    missing, chosen = dict.fromkeys(having), []
    while missing:
        wanted = next(iter(missing))
        some = draw.choices(having[wanted], k=candidates)
        best = max(some, key=lambda cell: sum(c in missing for c in combinations(cell, strength)))
        chosen.append(best)
        for combination in combinations(best, strength):
            missing.pop(combination, None)
    return chosen


def drawn(every: list[Cell], number: int, seed: int) -> list[Cell]:
    """Choose so many cells: of a cover of all pairs the first, and others at random if it is less.

    The first cells of a greedy cover have the most pairs.
    """
    chosen = cover(every, 2, seed)
    chosen_names = {cell.name for cell in chosen}
    rest = [cell for cell in every if cell.name not in chosen_names]
    more = random.Random(seed).sample(rest, min(max(number - len(chosen), 0), len(rest)))
    return [*chosen, *more][:number]


def ordered(chosen: list[Cell]) -> list[Cell]:
    """Put cells of one kind after another: what runs eagerly then compiles less."""
    return sorted(chosen, key=lambda c: (c.devices, c.dtype, c.convolution, c.program, c.pooling))
