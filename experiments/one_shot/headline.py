"""Draw the README's figure, the accuracies of merging five LeNets, from a recorded experiment.

    python -m experiments.one_shot.headline

It reads experiments/results/mnist_lenet/results.csv, trains nothing, and takes seconds.
"""

from pathlib import Path

from experiments.harness import accuracies, records

RECORD = Path("experiments/results/mnist_lenet")
TITLE = "Five LeNets that were trained apart on MNIST become one"
SHOWN = {
    "fedfisher_sequential+analytic_head": "FedFisher (sequential), then one exchange",
    "fedfisher_sequential": "FedFisher (sequential)",
    "fedfisher_kfac": "FedFisher (K-FAC)",
    "regmean": "RegMean",
    "fisher_merge": "Fisher merging",
    "fedlpa": "FedLPA",
    "fedavg": "FedAvg: their plain mean",
    "local": "no merge: one of the five, on average",
    "central": "one LeNet trained on all the data",
}
"""Algorithms that are drawn, from the top, and their labels."""


def main(record: Path = RECORD) -> None:
    """Draw headline.png into the folder of the record."""
    rows = records.read_rows(record / records.RESULTS, records.ONE_SHOT)
    merges = [name for name in SHOWN if "+" not in name]
    found = {line.algorithm: line for line in accuracies.lines(rows, merges)}
    drawn = [found[name] for name in SHOWN]
    accuracies.figure(drawn, TITLE, record / "headline.png", SHOWN)


if __name__ == "__main__":
    main()
