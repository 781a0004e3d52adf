"""The server: runs the rounds, saves each, and measures the model on the test data."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fisherjax as fj
from fisherjax import flower
from fisherjax_app import saved, seconds
from fisherjax_app import task as tasks
from fisherjax_app.metered import Exchanged, Metered

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are missing."""
    config = context.run_config
    if not config["folder"]:
        raise ValueError(
            "the run has no folder for its state; expected one on the superlink's machine: use "
            "--run-config 'folder=\"/var/lib/fisherjax/run\"'"
        )
    folder = Path(config["folder"])
    tasks.keep_programs()
    with saved.locked(folder, config):
        run(Metered(grid), config, folder)


def run(grid: Metered, config: Mapping[str, Any], folder: Path) -> None:
    """Run rounds, from the last one that was saved."""
    task = tasks.task(config, config["data-dir"])
    server = flower.strategy(
        task.algorithm,
        task.model,
        task.params,
        example=(task.train.inputs[:1], task.train.targets[:1]),
        num_clients=config["num-clients"],
        key=jax.random.key(config["seed"]),
        terms=terms(config),
        secure=tasks.secure(config, config["verifiers"]),
    )
    server.state = saved.load(folder, server.state) or server.state
    rows = saved.rows(folder, server.state.number)
    accuracy = _measure(task)

    def after(state: flower.ServerState, report: flower.Report) -> None:
        # The round that changes nothing is not saved: the next run tries it again.
        if not report.clients:
            raise RuntimeError(f"Round {report.number} merged nothing: {report.left_out}")
        aggregated = time.time()
        row = row_of(report, grid.taken(), aggregated) | accuracy(state.params)
        rows.append(row | {"seconds": time.time() - began[0]})
        saved.save(folder, state, rows)
        print(
            f"Round {report.number + 1} of {config['rounds']}: test accuracy "
            f"{100 * row['accuracy']:.1f} %, {len(report.clients)} clients",
            flush=True,
        )
        began[0] = time.time()

    began = [time.time()]
    server.run(grid, config["rounds"], after)
    fj.files.save_arrays(folder / saved.MODEL, server.state.params)


def terms(config: Mapping[str, Any]) -> flower.Terms:
    """Return what the server accepts of clients."""
    return flower.Terms(
        timeout=config["timeout"],
        connect=config["connect"],
        min_replies=config["min-replies"],
        max_weight=config["max-weight"] or math.inf,
    )


def row_of(report: flower.Report, exchanged: list[Exchanged], aggregated: float) -> dict[str, Any]:
    """Return the record of a round; bytes and seconds are means over the clients that replied."""
    names = (*seconds.NAMES, "transfer")
    means = {
        name: fmean(each.seconds.get(name, math.nan) for each in exchanged)
        for name in (names if exchanged else ())
    }
    last = max((each.arrived for each in exchanged), default=aggregated)
    return {
        "round": report.number,
        "clients": len(report.clients),
        "left_out": {str(client): reason for client, reason in report.left_out.items()},
        "loss": report.loss,
        "down": fmean(each.down for each in exchanged) if exchanged else 0,
        "up": fmean(each.up for each in exchanged) if exchanged else 0,
        **means,
        "aggregate": aggregated - last,
    }


def _measure(task: tasks.Task) -> Callable[[Any], dict[str, float]]:
    test = fj.clients.federation([(task.test.inputs, task.test.targets)])

    def measured(params: Any) -> dict[str, float]:
        found = fj.metrics.performance(task.model, params, test)
        return {"accuracy": float(found.accuracy[0]), "test_loss": float(found.loss[0])}

    return measured
