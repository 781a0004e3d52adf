"""Draw two networks that learned pieces of one curve, and their merged networks.

    python -m experiments.function_space --out runs/function_space

Two clients learn y = sin(2 pi x) on inputs that overlap fully, partly or not at all. They are
merged in one round by FedAvg, Fisher merging, FedFish and FedFisher. The client-server barrier is
the merged model's mean squared error on a client's own points less that of the client's own model,
averaged over the clients.

functions.png shows the functions of one seed and barriers.png the barriers of all seeds;
barriers.csv holds every error and barrier, and summary.md the table.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from experiments.function_space import barriers, toy_regression
from experiments.function_space.toy_regression import SUPPORTS, Setting
from experiments.harness import commands, figures, limits, records, tables

PROGRAM = "experiments.function_space"
Other = Literal["fedfisher_kfac", "fedfisher_full"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Methods, seeds and the setting of the runs."""

    others: tuple[Other, ...] = ("fedfisher_kfac", "fedfisher_full")
    """More methods; the memory of the full Fisher grows with the fourth power of the width."""
    num_seeds: int = 20
    """Number of seeds, 0, 1, ..., of data and initial models."""
    drawn_seed: int = 0
    """Seed whose functions are drawn."""
    setting: tyro.conf.OmitArgPrefixes[Setting] = dataclasses.field(default_factory=Setting)
    out: commands.Folder = Path("runs/function_space")
    """Folder for the pictures, the table and the numbers."""


def summary(config: Config, errors: barriers.Errors) -> str:
    """Write the table of barriers over seeds and what they are of, in Markdown."""
    setting = config.setting
    spans = "; ".join(
        f"{overlap}: {' and '.join(f'[{low:g}, {high:g}]' for low, high in both)}"
        for overlap, both in SUPPORTS.items()
    )
    return f"""# Two clients that learned pieces of one curve, merged in one round

{tables.markdown(barriers.table(errors))}
Client-server barrier: mean over the clients of the merged model's mean squared error on a \
client's points less that of the client's own model; {config.num_seeds} seeds. Local MSE: of the \
clients' own models, median. For scale, the function that is zero everywhere has an error of about \
0.5.

y = sin(2πx) + {setting.noise:g} N(0, 1), {setting.num_points} points a client. Inputs of the two \
clients, {spans}. MLP 1-{setting.width}-{setting.width}-1 with tanh, {setting.steps} full-batch \
steps of {setting.optimizer}, learning rate {setting.learning_rate:g}, on both clients from one \
initial model ({setting.start.replace("_", " ")}). Fisher merging: the mean weighted by the \
diagonal Fisher, mean (df/dw)^2 over a client's points. FedFish: the mean weighted by squared \
gradients of the mean loss of minibatches of {min(setting.fedfish_batch, setting.num_points)} \
points, at the final weights.

![functions of seed {config.drawn_seed}](functions.png)

![barriers of all seeds](barriers.png)

```
{commands.write(config, PROGRAM)}
```
"""


def _check(config: Config) -> None:
    limits.check_options(config)
    last = config.num_seeds - 1
    seeds = f"one of the --num-seeds {config.num_seeds} seeds, 0 to {last}"
    commands.check(config, "drawn_seed", seeds, lambda x: 0 <= x <= last)


@commands.command(PROGRAM, __doc__, Config, _check, continues=False)
def main(config: Config, console: Console) -> None:
    setting, out = config.setting, config.out
    with records.folder(out):
        with console.status("training"):
            runs = toy_regression.train(setting, range(config.num_seeds))
        merged = {}
        for name in ("fedavg", "fisher_merge", "fedfish", *config.others):
            with console.status(figures.label(name)):
                method = toy_regression.algorithm(name, setting)
                merged[name] = toy_regression.merge(method, runs)
        errors = barriers.measure(setting.width, runs, merged)
        records.write_text(out / "barriers.csv", barriers.csv(runs, errors))
        drawn = setting.width, config.drawn_seed, runs, merged, errors
        barriers.draw_functions(*drawn, out / "functions.png")
        barriers.draw_barriers(errors, out / "barriers.png")
        text = summary(config, errors)
        records.write_text(out / "summary.md", text)
    files = "functions.png, barriers.png, barriers.csv, summary.md"
    console.print(text, f"In {out}/: {files}", sep="\n", markup=False, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
