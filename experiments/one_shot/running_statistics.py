"""Measure what running statistics that are computed again gain after a merge, on digits.

    python -m experiments.one_shot.running_statistics

Five clients, Dirichlet 0.1, train an MLP with BatchNorm for 30 epochs; each of four merges is
tested as it is, and after the exchange `running_statistics`. It takes a minute on two CPU cores and
writes table.md into experiments/results/running_statistics.
"""

from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import jax
import optax

import fisherjax as fj
from experiments.harness import figures, records, tables

RECORD = Path("experiments/results/running_statistics")
METHODS = "fedavg", "regmean", "fedfisher_kfac", "fedfisher_sequential"
SPLITS, EPOCHS = 5, 30


class NormedMLP(nn.Module):
    """Three hidden layers with BatchNorm, whose momentum is 0.9."""

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, 10] of inputs [B, ...]."""
        x = inputs.reshape(len(inputs), -1)
        for width in (64, 64, 64):
            x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(nn.Dense(width)(x)))
        return nn.Dense(10)(x)


def accuracies(split: int, epochs: int = EPOCHS) -> Iterator[tuple[str, float, float]]:
    """Yield each method with its accuracy as merged and after the exchange, in %."""
    train, test = fj.datasets.load("digits")
    params = fj.networks.init(NormedMLP(), jax.random.key(split), train.inputs)
    how = {"normalize": fj.datasets.normalizer(train)}
    model = fj.networks.model(NormedMLP(), params, fj.likelihoods.categorical, **how)
    rows = fj.partition.dirichlet_of_client(train.targets, 5, alpha=0.1, seed=split)
    federation = fj.clients.federation(train, rows)
    sgd, key = optax.sgd(0.05, 0.9), jax.random.key(split)
    local = {"optimizer": sgd, "epochs": epochs, "batch_size": 32, "key": key}
    trained = fj.training.train(model, params, federation, **local)
    again = fj.algorithms.running_statistics(model)
    examples = fj.Examples(test.inputs, test.targets)
    for name in METHODS:
        method = fj.algorithms.make(name, model)
        updates = fj.merging.summarize(method, trained, federation, key=key)
        merged, _, _ = fj.merging.merge(method, params, updates, federation.weights)
        after, _, _ = fj.merging.exchange(again, merged, federation, key=key)
        yield name, *(100 * float(fj.metrics.accuracy(model, x, examples)) for x in (merged, after))


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """Return means and standard deviations over splits as a table."""
    lines = ["| | as merged | after `running_statistics` |", "| --- | ---: | ---: |"]
    for name, runs in found.items():
        cells = map(tables.spread, zip(*runs, strict=True))
        lines.append(f"| {figures.label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(out: Path = RECORD, splits: int = SPLITS, epochs: int = EPOCHS) -> None:
    """Measure all splits and write the table."""
    rows = (row for split in range(splits) for row in accuracies(split, epochs))
    found = tables.gathered((name, (merged, after)) for name, merged, after in rows)
    heading = f"# Running statistics computed again\n\nDigits, {splits} splits, accuracy in %."
    command = "```bash\npython -m experiments.one_shot.running_statistics\n```"
    out.mkdir(parents=True, exist_ok=True)
    records.write_text(out / "table.md", f"{heading}\n\n{table(found)}\n\n{command}\n")
    print(table(found))


if __name__ == "__main__":
    main()
