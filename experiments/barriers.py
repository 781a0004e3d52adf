"""How much merging costs each client: errors and client-server barriers, as rows of a file."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import records, toy_regression
from experiments.toy_regression import Runs
from fisherjax.typing import Params


class Row(NamedTuple):
    """One number; a line of barriers.csv.

    Attributes:
        overlap: of the clients' inputs.
        seed: of data and initial model.
        algorithm: how the model was merged; `local` is the client's own.
        client: on whose points; None for the mean over clients.
        metric: "mse", or "barrier", which is a merged model's less the local one's.
        value: of the metric.
    """

    overlap: str
    seed: int
    algorithm: str
    client: int | None
    metric: str
    value: float


def evaluate(width: int, runs: Runs, merged: dict[str, Params]) -> list[Row]:
    """Measure errors and barriers on the clients' own points.

    Args:
        width: of the networks.
        runs: with trained clients.
        merged: by algorithm, leaves [R, ...].

    Returns:
        Rows, run by run.

    Raises:
        ValueError: if a merged model's error is not finite.
    """
    model = toy_regression.model(width)
    own = toy_regression.local_errors(model, runs)
    errors = {
        name: toy_regression.merged_errors(model, models, runs) for name, models in merged.items()
    }
    rows = []
    for run, cell in enumerate(zip(runs.overlaps, runs.seeds, strict=True)):
        rows += [Row(*cell, "local", i, "mse", float(x)) for i, x in enumerate(own[run])]
        for name, values in errors.items():
            if not np.isfinite(values[run]).all():
                raise ValueError(
                    f"{name} gave no finite model with overlap {cell[0]}, seed {cell[1]}"
                )
            barriers = values[run] - own[run]
            rows += [Row(*cell, name, i, "mse", float(x)) for i, x in enumerate(values[run])]
            rows += [Row(*cell, name, i, "barrier", float(x)) for i, x in enumerate(barriers)]
            rows.append(Row(*cell, name, None, "barrier", float(barriers.mean())))
    return rows


def barriers(rows: Sequence[Row]) -> dict[str, dict[str, np.ndarray]]:
    """Gather the barriers, mean over clients, by overlap and algorithm.

    Args:
        rows: from `evaluate`.

    Returns:
        Arrays over seeds, in one order of seeds for all.
    """
    gathered: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.metric == "barrier" and row.client is None:
            own = gathered.setdefault(row.overlap, {})
            own.setdefault(row.algorithm, []).append(row.value)
    return {
        overlap: {name: np.array(values) for name, values in own.items()}
        for overlap, own in gathered.items()
    }


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write barriers.csv; the file changes as a whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    # Nine digits tell all numbers of float32 apart.
    writer.writerows(row._replace(value=f"{row.value:.9g}") for row in rows)
    records.write_text(path, text.getvalue())
