"""Nodes of Flower that answer at once, without the process that a supernode starts for a message.

    python -m tests.flower_loopback.quick_nodes FILE

Each node of the file, a `Plan` as JSON, has its own connection to the superlink and its own keys.
The clients are fisherjax's and train on digits; in each round of the plan's faults all nodes of
this process fail at a stage, or stay silent, or are killed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supernode.fleet_http_connection import http_request_response

from experiments.flower import keys, submit
from fisherjax import flower
from tests.flower.conftest import stage_of

sys.path.insert(0, str(submit.APP))
from fisherjax_app import task as tasks

EXAMPLES = 128
App = Callable[[Message, Context], Message]


class Plan(NamedTuple):
    """What the nodes of a process do.

    Attributes:
        places: Numbers of their clients.
        address: Address of the superlink.
        config: Configuration of the run.
        keys: Folder of the keys of secure sums.
        folder: Folder for what clients keep.
        faults: Stage at which the nodes "fail", are "silent" or are "killed", and which of these it
            is, by round.
    """

    places: list[int]
    address: str
    config: dict[str, Any]
    keys: str
    folder: str
    faults: list[tuple[str, str]]


def node_config(plan: Plan, place: int) -> dict[str, Any]:
    """Return the configuration of a node, which has the paths of its keys."""
    folder = Path(plan.keys)
    paths = {"signing-key": keys.signing(folder, place), "verifiers": folder / keys.VERIFIERS}
    return {"partition-id": place, **{name: str(path) for name, path in paths.items()}}


def client(plan: Plan, is_secure: bool = True) -> ClientApp:
    """Make the app of all clients, which have equally many examples."""
    config, task = plan.config, tasks.task(plan.config, "")

    def load(context: Context) -> tuple[Any, Any]:
        rows = slice(context.node_config["partition-id"], None, config["num-clients"])
        return task.train.inputs[rows][:EXAMPLES], task.train.targets[rows][:EXAMPLES]

    def secure(context: Context) -> flower.Secure | None:
        own = context.node_config
        return tasks.secure(config, own["verifiers"], own["signing-key"])

    how = {"params": task.params, "batch_size": config["batch-size"], "folder": plan.folder}
    secured = {"secure": secure} if is_secure else {}
    return flower.client_app(
        task.algorithm, task.model, task.optimizer, load, **how, **secured, epochs=config["epochs"]
    )


def server(plan: Plan, **options: Any) -> flower.Strategy:
    """Make the strategy of the run, for clients in this process."""
    import jax

    task, config = tasks.task(plan.config, ""), plan.config
    example = task.train.inputs[:1], task.train.targets[:1]
    how = {"example": example, "key": jax.random.key(config["seed"])} | options
    return flower.strategy(task.algorithm, task.model, task.params, **how)


def main() -> None:
    """Answer messages until the process is ended."""
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    app = client(plan)
    # What is compiled by then does not count as silence.
    secure = tasks.secure(plan.config, str(Path(plan.keys) / keys.VERIFIERS))
    grid = flower.InProcess(app, [node_config(plan, place) for place in range(3)])
    server(plan, num_clients=3, secure=secure).run(grid, 1)
    with ExitStack() as stack:
        nodes = [
            Node(plan, place, stack.enter_context(http_request_response(plan.address, True)))
            for place in plan.places
        ]
        print("connected", flush=True)
        while True:
            if not sum(node.look(app) for node in nodes):
                time.sleep(0.5)


class Node:
    """A node, and how often it was asked to take part in a sum."""

    def __init__(self, plan: Plan, place: int, connection: tuple) -> None:
        self._plan, self._sums = plan, 0
        number, self._receive, self._send, _, _, *others = connection
        self._pull, self._push, self._confirm = others
        self._context = Context(1, number, node_config(plan, place), RecordDict(), {})

    def look(self, app: App) -> bool:
        """Answer the next message; return whether there was one."""
        if (found := self._receive()) is None:
            return False
        run, tree = found[0].metadata.run_id, found[1]
        take = partial(self._pull, run), partial(self._confirm, run)
        message = pull_and_inflate_object_from_tree(tree, *take, return_type=Message)
        message.metadata.__dict__["_message_id"] = tree.object_id
        if (reply := self._reply(app, message)) is not None:
            reply.metadata.__dict__["_message_id"] = reply.object_id
            with no_object_id_recompute():
                wanted, session = self._send(reply, get_object_tree(reply), 0.0)
                give = partial(self._push, run, session)
                push_objects(get_all_nested_objects(reply), give, object_ids_to_push=wanted)
        return True

    def _reply(self, app: App, message: Message) -> Message | None:
        stage = stage_of(message)
        self._sums += stage == "advertise"
        try:
            match dict(self._plan.faults[: self._sums][-1:]).get(stage):
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "silent":
                    return None
                case "fail":
                    raise RuntimeError("the disk is full")
            return app(message, self._context)
        except Exception as error:  # as Flower's process of a client does
            return Message(Error(2, repr(error)), reply_to=message)


if __name__ == "__main__":
    main()
