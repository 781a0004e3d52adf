"""A server that averages by fisherjax or by Flower's own strategy, and measures each round."""

import json
import resource
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np
from fisherjax_app import seconds
from fisherjax_app import task as tasks
from fisherjax_app.metered import Metered
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fisherjax as fj
from fisherjax import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run rounds, and write what they took."""
    config = context.run_config
    average = {"fisherjax": by_fisherjax, "flower": by_flower}[config["strategy"]]
    rows = average(grid, config)
    for row in rows[1:]:
        print(row)
    Path(config["record"]).write_text(json.dumps(rows))


def row(began: float, arrived: float, clients: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what is known of a round that ends now, whose last upload arrived at a time."""
    means = {name: fmean(own[name] for own in clients) for name in seconds.NAMES}
    ended = time.time()
    times = {"seconds": ended - began, "aggregate": ended - arrived}
    return {"clients": len(clients), **times, "memory": memory(), **means}


def memory() -> float:
    """Return the most bytes that this process had in memory."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def by_fisherjax(grid: Grid, config: dict[str, Any]) -> list[dict[str, float]]:
    """Average by fisherjax, as uploads come."""
    model, params = tasks.network(config["size"])
    metered, rows = Metered(grid), []
    server = flower.strategy(
        fj.algorithms.fedavg(),
        model,
        params,
        example=tasks.images(1, 0),
        num_clients=config["num-clients"],
        key=jax.random.key(0),
        # Flower's averaging waits for ever.
        terms=flower.Terms(connect=1800.0),
    )
    began = [time.time()]
    rows.append({"memory": memory()})

    def after(state: flower.ServerState, report: flower.Report) -> None:
        del report
        jax.block_until_ready(state.params)
        taken = metered.taken()
        last = max(each.arrived for each in taken)
        rows.append(row(began[0], last, [each.seconds for each in taken]))
        began[0] = time.time()

    server.run(metered, config["rounds"], after)
    return rows


class Timed(FedAvg):
    """Flower's averaging, with the time of each round."""

    rows: list[dict[str, float]]
    began: float

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """Begin a round."""
        self.began = time.time()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Aggregate a round."""
        replies, arrived = list(replies), time.time()
        own = [dict(reply.content["seconds"]) for reply in replies if reply.has_content()]
        found = super().aggregate_train(server_round, replies)
        self.rows.append(row(self.began, arrived, own))
        return found


def by_flower(grid: Grid, config: dict[str, Any]) -> list[dict[str, float]]:
    """Average by Flower's own strategy, when all uploads are there."""
    _, params = tasks.network(config["size"])
    number = config["num-clients"]
    how = {"min_train_nodes": number, "min_available_nodes": number, "fraction_evaluate": 0.0}
    server = Timed(min_evaluate_nodes=0, **how)
    server.rows = [{"memory": memory()}]
    arrays = ArrayRecord([np.asarray(x) for x in jax.tree.leaves(params)])
    server.start(grid, arrays, num_rounds=config["rounds"], timeout=600)
    return server.rows
