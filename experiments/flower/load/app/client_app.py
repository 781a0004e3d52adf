"""A client that trains, or replays a recorded upload, for both strategies.

A node's configuration has `recorded`, the file of an upload that fisherjax wrote; beside it is its
description, a file of the same name that ends in .json.
"""

from fisherjax_app import seconds  # isort: skip  # it measures the imports that follow

import json
import time
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


class Client(ClientApp):
    """A client that answers as the run's configuration says."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, with the seconds that it took."""
        config, began = context.run_config, [time.time()]
        if message.metadata.message_type.startswith("query"):
            about = dict(message.content["fisherjax"])
            about["partition-id"] = context.node_config["partition-id"]
            return Message(RecordDict({"fisherjax": ConfigRecord(about)}), reply_to=message)
        answer = {
            ("fisherjax", "replay"): replayed,
            ("fisherjax", "jax"): trained,
            ("flower", "replay"): arrays_replayed,
            ("flower", "jax"): arrays_trained,
        }[config["strategy"], config["work"]]
        content = answer(message, context, began)
        compiled, now = seconds.compiled(), time.time()
        start = seconds.IMPORTED - seconds.process_began()
        imports = began[0] - seconds.IMPORTED
        own = (start, imports, compiled, now - began[0] - compiled)
        times = dict(zip(seconds.NAMES, own, strict=True))
        # Flower's averaging takes exactly one record of metrics, with the weight.
        content["seconds"] = MetricRecord({**times, "num-examples": 256.0})
        return Message(content, reply_to=message)


def replayed(message: Message, context: Context, began: list[float]) -> RecordDict:
    """Send the bytes of the recorded upload."""
    began[0] = time.time()
    recorded = Path(context.node_config["recorded"])
    about = json.loads(recorded.with_suffix(".json").read_text())
    about |= {"partition-id": context.node_config["partition-id"]}
    about |= {"round": message.content["fisherjax"]["round"]}
    data = recorded.read_bytes()
    array = Array("uint8", (len(data),), "fisherjax.safetensors", data)
    records = {"fisherjax": ConfigRecord(about), "file": ArrayRecord({"file": array})}
    return RecordDict(records)


def arrays_replayed(message: Message, context: Context, began: list[float]) -> RecordDict:
    """Send the same arrays as Flower's own records."""
    import safetensors.numpy

    del message
    began[0] = time.time()
    found = safetensors.numpy.load_file(context.node_config["recorded"])
    return RecordDict({"arrays": ArrayRecord([found[name] for name in sorted(found)])})


def trained(message: Message, context: Context, began: list[float]) -> RecordDict:
    """Train by fisherjax's app."""
    from fisherjax_app import task as tasks

    import fisherjax as fj
    from fisherjax import flower

    seconds.listen()
    began[0] = time.time()
    model, params = tasks.network(context.run_config["size"])

    def load(context: Context) -> tuple[Any, Any]:
        return tasks.images(tasks.EXAMPLES, context.node_config["partition-id"])

    how = {"params": params, "epochs": context.run_config["epochs"], "batch_size": 32}
    app = flower.client_app(fj.algorithms.fedavg(), model, tasks.optimizer(), load, **how)
    return app(message, context).content


def arrays_trained(message: Message, context: Context, began: list[float]) -> RecordDict:
    """Train the same network by the same function, with Flower's own records."""
    import jax
    import numpy as np
    from fisherjax_app import task as tasks

    import fisherjax as fj

    seconds.listen()
    began[0] = time.time()
    model, params = tasks.network(context.run_config["size"])
    place = context.node_config["partition-id"]
    federation = fj.clients.federation([tasks.images(tasks.EXAMPLES, place)])
    structure = jax.tree.structure(params)
    params = jax.tree.unflatten(structure, message.content["arrays"].to_numpy_ndarrays())
    how = {"optimizer": tasks.optimizer(), "epochs": context.run_config["epochs"]}
    key = jax.random.key(message.content["config"]["server-round"])
    done = fj.training.train(model, params, federation, key=key, batch_size=32, **how)
    found = [np.asarray(x[0]) for x in jax.tree.leaves(done.models)]
    return RecordDict({"arrays": ArrayRecord(found)})


app = Client()
