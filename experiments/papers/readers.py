"""Read the numbers of a record that a paper has cells for.

A reader takes the folder of a record and returns its measurements. Each has a key, the data set,
the settings, the algorithm and the metric that a cell of the paper must have too, under the names
of `experiments.harness.papers`; and how it was measured, which may differ from the paper.
"""

import csv
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness import papers, records, tables


class Ours(NamedTuple):
    """A measurement of a record, in the unit of the paper's cell."""

    key: Mapping[str, str]  # what the cell of the paper must have too
    value: float
    spread: float | None  # standard deviation of the runs; None for a single run
    how: Mapping[str, str]  # settings that may differ from the paper's


Reader = Callable[[Path], list[Ours]]


def agrees(ours: Ours, cell: papers.Number) -> bool:
    """Return whether a cell of a paper has everything that the key of a measurement has."""
    theirs = {"dataset": cell.dataset, "algorithm": cell.algorithm, "metric": cell.metric}
    theirs |= cell.setting
    return all(theirs.get(name) == value for name, value in ours.key.items())


def niid_table(record: Path) -> list[Ours]:
    """Read the accuracies of FedLPA's grid; the epochs must be the paper's."""
    (clients,) = set(re.findall(r"(\d+) clients", (record / "table.md").read_text()))
    found = []
    for row in _merges(record):
        number = "beta" if row["partition"] == "niid_bench" else "classes"
        key = {"partition": row["partition"], number: row["number"], "epochs": row["epochs"]}
        found.append(_of_grid(row, {**key, "clients": clients}, {}))
    return found


def fedfisher_table(record: Path) -> list[Ours]:
    """Read the accuracies of FedFisher's grid."""
    return [
        _of_grid(
            row, {"alpha": row["alpha"], "clients": row["num_clients"]}, {"epochs": row["epochs"]}
        )
        for row in _merges(record)
    ]


def uncompressed(record: Path) -> list[Ours]:
    """Read FedFisher's grid as the rows without compression of tables about compression."""
    return [one._replace(key={**one.key, "compression": "none"}) for one in fedfisher_table(record)]


def one_shot(record: Path) -> list[Ours]:
    """Read the accuracies of models that were merged in one round, of a split of FedFisher."""
    asked = _asked(record)
    key, how = _of_fedfisher(asked)
    merged = (x for x in _rows(record) if x["metric"] == "accuracy" and x["client"] is None)
    pairs = (
        (key | {"algorithm": row["algorithm"]}, 100 * row["value"])
        for row in merged
        if row["round"] == 1
    )
    return _means(pairs, how)


_CODECS = {  # the paper's factor s_q of an algorithm and a codec
    ("fedfisher_diag", "none"): "1",
    ("fedfisher_diag", "even, 16 bits"): "2",
    ("fedfisher_kfac", "none"): "1",
    ("fedfisher_kfac", "paper, 16 bits"): "2",
    ("fedfisher_kfac", "paper, 8 bits"): "4",
    ("fedfisher_kfac", "paper, 5 bits"): "6",
}


def compression(record: Path) -> list[Ours]:
    """Read accuracies after compression; 5 bits of 32 are the paper's factor 6."""
    key, how = _of_fedfisher(_asked(record))
    pairs = (
        (key | {"algorithm": row["algorithm"], "quantization": factor}, 100 * row["accuracy"])
        for row in _rows(record)
        if (factor := _CODECS.get((row["algorithm"], row["codec"])))
    )
    return _means(pairs, how)


_VIEWS = {
    "model": ("otfusion|pfnm|dense", "local_model"),
    "aggregate": ("fedavg", "aggregate"),
    "aggregate+kfac": ("fedfisher_kfac", "aggregate_and_factors"),
}


def attack(record: Path) -> list[Ours]:
    """Read the share of images that the judge takes for the attacked class."""
    asked, pairs = _asked(record), []
    key, how = _of_fedfisher(asked, "attack_accuracy")
    for row in _rows(record):
        if row["view"] in _VIEWS:
            algorithm, sees = _VIEWS[row["view"]]
            own = {"algorithm": algorithm, "server_sees": sees, "label": str(asked["digit"])}
            pairs.append((key | own, 100 * row["recognized"]))
    return _means(pairs, how | {"weight of the factors": f"{asked['factor_weight']:g}"})


def overheads(record: Path) -> list[Ours]:
    """Read what clients' summaries take, in percent of their training, over all runs of a grid."""
    pairs, epochs = [], set()
    for folder in sorted(path.parent for path in record.glob("*/*/results.csv")):
        asked, rows = _asked(folder), _rows(folder)
        (training,) = {row["seconds"] for row in rows if row["algorithm"] == "local"}
        server = {x["algorithm"]: x["value"] for x in rows if x["metric"] == "server_seconds"}
        both = {x["algorithm"]: x["seconds"] for x in rows if x["metric"] == "accuracy"}
        key = _federation(asked, "overhead") | {"relative_to": "fedavg"}
        pairs += [
            (key | {"algorithm": name}, 100 * (both[name] - seconds) / training)
            for name, seconds in server.items()
        ]
        epochs.add(str(asked["epochs"]))
    return _means(pairs, {"epochs": ", ".join(epochs)})


def uploads(record: Path) -> list[Ours]:
    """Read the MB that the clients of a round send together."""
    asked = _asked(record)
    key = _federation(asked, "communication")
    sizes = _upload_bytes(record).items()
    return [_exact(key | {"algorithm": n}, asked["num_clients"] * x / 1e6) for n, x in sizes]


def upload_ratios(record: Path) -> list[Ours]:
    """Read how many times FedAvg's upload that of each algorithm is."""
    key = {"dataset": _asked(record)["dataset"], "metric": "communication_ratio", "network": "cnn"}
    key |= {"relative_to": "fedavg"}
    sizes = _upload_bytes(record)
    return [_exact(key | {"algorithm": n}, x / sizes["fedavg"]) for n, x in sizes.items()]


def owners(record: Path) -> list[Ours]:
    """Read how many images of each label each client has; the paper counts clients from 1."""
    dataset, found = _asked(record)["dataset"], []
    for row in _lines(record / "label_counts.csv"):
        key = {"dataset": dataset, "partition": row["partition"], "beta": row["number"]}
        key |= {"seed": row["partition_seed"], "client": str(int(row["client"]) + 1)}
        key |= {"metric": "images"}
        found += [_exact(key | {"label": str(x)}, float(row[str(x)])) for x in range(10)]
    return found


_PERSONAL = {"weighted_fedbn": "weighted_fedavg_personal_bn"}
_SPLITS = {"pathological": ("classes", "classes"), "dirichlet": ("alpha", "beta")}


def personalized(record: Path) -> list[Ours]:
    """Read the mean accuracy of the clients' own models, at the paper's temperature of 1."""
    asked, pairs = _asked(record), []
    for row in _rows(record):
        last = row["round"] == asked["rounds"] and row["client"] is None and not row["held"]
        if last and row["temperature"] in (None, 1.0):
            number, option = _SPLITS[row["split"]]
            key = {"dataset": asked["table"], "metric": "accuracy", "partition": row["split"]}
            key |= {number: f"{asked[option]:g}"}
            key |= {"algorithm": _PERSONAL.get(row["algorithm"], row["algorithm"])}
            pairs.append((key, 100 * row["accuracy"]))
    return _means(pairs, {"rounds": str(asked["rounds"])})


def _merges(record: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of table.csv that were measured, without exchanges after a merge."""
    rows = _lines(record / "table.csv")
    return (row for row in rows if row["mean"] and "+" not in row["algorithm"])


def _of_grid(row: Mapping[str, str], key: Mapping[str, str], how: Mapping[str, str]) -> Ours:
    cell = {"dataset": row["dataset"], **key, "algorithm": row["algorithm"], "metric": "accuracy"}
    spread = float(row["std"]) if row["std"] else None
    return Ours(cell, float(row["mean"]), spread, {**how, "runs": row["runs"]})


def _federation(asked: Mapping[str, Any], metric: str) -> dict[str, str]:
    return {"dataset": asked["dataset"], "clients": str(asked["num_clients"]), "metric": metric}


def _of_fedfisher(
    asked: Mapping[str, Any], metric: str = "accuracy"
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the key of a run of FedFisher's splits, and how it was measured."""
    key = _federation(asked, metric) | {"alpha": f"{asked['alpha']:g}"}
    return key, {"epochs": str(asked["epochs"])}


def _means(pairs: Iterable[tuple[dict[str, str], float]], how: dict[str, str]) -> list[Ours]:
    """Return mean and standard deviation of the values of each key, and the number of runs."""
    found = []
    for key, own in tables.gathered((tuple(key.items()), value) for key, value in pairs).items():
        spread = tables.deviation(own) if len(own) > 1 else None
        found.append(Ours(dict(key), statistics.fmean(own), spread, how | {"runs": str(len(own))}))
    return found


def _exact(key: Mapping[str, str], value: float) -> Ours:
    return Ours(key, value, None, {})


def _upload_bytes(record: Path) -> dict[str, int]:
    """Return the bytes of a client's upload by algorithm."""
    rows = _rows(record)
    return {x["algorithm"]: x["upload_bytes"] for x in rows if x["upload_bytes"] is not None}


def _asked(record: Path) -> dict[str, Any]:
    """Return the options of a record by name."""
    parts = json.loads((record / records.CONFIG).read_text()).items()
    (asked,) = (value for name, value in parts if name.startswith("configuration"))
    return asked


def _rows(record: Path) -> list[dict[str, Any]]:
    columns = records.frame(record)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _lines(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
