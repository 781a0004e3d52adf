"""Compute all seeds of a split in one program.

The program computes what `one_round.run` computes and returns the same rows, without the seconds of
its phases. Seeds are computed side by side and spread over the devices, each seed with all of its
clients.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.harness import memory, one_round, records, steps, tasks
from experiments.harness.memory import Need
from fisherjax.algorithms import Stages
from fisherjax.typing import Array, Examples


@jax.tree_util.register_static
class _Named(records.Row):
    """A row without its value, which a compiled program keeps as a static label."""


class _Given(NamedTuple):
    """The arrays that a program takes besides the seed."""

    federation: fj.clients.Federation
    test: Examples
    validation: Examples | None


class Program(NamedTuple):
    """Functions that compute the units of a split at once, and predict their memory."""

    run: Callable[[Sequence[steps.Unit]], list[records.Row]]
    memory: Callable[[Sequence[steps.Unit]], Need]


def groups(units: Iterable[steps.Unit]) -> list[list[steps.Unit]]:
    """Group the units by split; the ceilings, on all data, are the last group."""
    ordered = sorted(units, key=lambda unit: (unit[0] is None, unit[0] or 0, unit[1]))
    return [list(own) for _, own in itertools.groupby(ordered, key=lambda unit: unit[0])]


def program(task: tasks.OneRound) -> Program:
    """Make one program of all steps of a seed, compiled once for all splits.

    Raises:
        ValueError: If an algorithm cannot be part of one program.
    """
    _refuse(task)
    asked, mesh = task.config.seeds_together, task.central.mesh

    def one(seed: Array, given: _Given, central: bool) -> tuple[list[tuple[_Named, Array]], Array]:
        losses: list[Array] = []
        unit = (None if central else 0, seed)
        own = task._replace(test=given.test, validation=lambda _: given.validation)
        if central:
            own = own._replace(central=given.federation, federations={})
        else:
            own = own._replace(federations={0: given.federation}, central=None)
        # Other steps call it with a description.
        tell = lambda now: None if isinstance(now, str) else losses.append(now)  # noqa: E731
        rows = [row for row in one_round.run(own, unit, tell) if row.metric != steps.SERVER]
        nameless = {"value": 0.0, "seconds": None, "seed": 0, "partition_seed": None}
        named = [(_Named(*row._replace(**nameless)), row.value) for row in rows]
        return named, jnp.stack(losses)

    @partial(jax.jit, static_argnums=0)
    def all_seeds(central: bool, seeds: Array, given: _Given) -> fj.parallel.Spread:
        how = {"clients_per_chunk": min(asked, len(seeds)), "mesh": mesh}
        return fj.parallel.spread_clients(partial(one, central=central), seeds, given, **how)

    def arguments(units: Sequence[steps.Unit]) -> tuple[bool, Array, _Given]:
        split = units[0][0]
        federation = task.central if split is None else task.federations[split]
        validation = None if split is None else task.validation(split)
        given = _Given(federation, task.test, validation)
        seeds = np.array([seed for _, seed in units], np.uint32)
        # All clients of a seed are on one device.
        return split is None, *fj.devices.replicate((seeds, given), mesh)

    def run(units: Sequence[steps.Unit]) -> list[records.Row]:
        found = all_seeds(*arguments(units))
        numbers, losses = jax.device_get(fj.parallel.in_order(found, mesh))
        check(units, numbers, losses, task.config.training.learning_rate)
        return [
            records.Row(*name)._replace(
                value=round(float(values[place]), 6), seed=seed, partition_seed=split
            )
            for place, (split, seed) in enumerate(units)
            for name, values in numbers
        ]

    def predict(units: Sequence[steps.Unit]) -> Need:
        found = fj.devices.memory(all_seeds, *arguments(units))
        step, side_by_side = "all that a seed asks for", min(asked, len(units))
        how = {"option": "seeds-together", "fewer": "Leave --seeds-together out"}
        return memory.of(step, found, side_by_side, mesh)._replace(**how)

    return Program(run, predict)


def check(
    units: Sequence[steps.Unit],
    numbers: Sequence[tuple[records.Row, np.ndarray]],
    losses: np.ndarray,
    learning_rate: float,
) -> None:
    """Raise if losses [S, trainings] or numbers [S] are not finite, which a program cannot do."""
    for place, (_, seed) in enumerate(units):
        if not np.isfinite(losses[place]).all():
            raise ValueError(
                f"a client diverged with seed {seed}: its model or its loss is not finite. "
                f"Lower --learning-rate (now {learning_rate:g}), or leave --seeds-together out to "
                "see which client it was, and for --on-nonfinite drop."
            )
        spoilt = [row.algorithm for row, values in numbers if not np.isfinite(values[place])]
        if spoilt:
            raise ValueError(
                f"the model of {spoilt[0]} is not finite with seed {seed}, though those of all "
                "clients are: leave --seeds-together out to see why."
            )


def _refuse(task: tasks.OneRound) -> None:
    """Refuse algorithms that need several programs or the host, and clients that are kept."""
    if task.config.keep_clients:
        raise ValueError(
            f"--seeds-together is {task.config.seeds_together}, whose clients are part of one "
            "program and not kept: leave it out, or choose another --out without --keep-clients"
        )
    made = {name: own.server(None) for name, own in task.methods.items()}
    several = [name for name, method in made.items() if isinstance(method.aggregate, Stages)]
    host = [name for name, method in made.items() if method.gives == "wider model"]
    voting = [] if task.voting is None else list(task.voting.names)
    if several + host + voting:
        raise ValueError(
            f"--seeds-together is {task.config.seeds_together} with --algorithms "
            f"{' '.join(several + host + voting)}, expected algorithms that are one program: run "
            "these without it"
        )
