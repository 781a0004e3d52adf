"""The client: trains when the server asks for it, and reports its seconds.

A node's configuration has `partition-id`, the number of the client, and may have `data-dir`, the
folder of the data; `state-dir`, the folder for what the client keeps from round to round; and for
secure sums `signing-key` and `verifiers`, the paths of the client's private key and of all public
ones. With `secure-only=true` the client sends nothing but to secure sums.
"""

from fisherjax_app import seconds  # isort: skip  # it measures the imports that follow

import time

from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fisherjax import flower
from fisherjax_app import task as tasks

_END_OF_IMPORTS = time.time()


class Client(ClientApp):
    """A client that is made from the configuration of the run, which comes with a message."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        seconds.listen()
        tasks.keep_programs()
        reply = client(context)(message, context)
        if reply.has_content():
            reply.content["seconds"] = MetricRecord(_measured())
        return reply


def client(context: Context) -> ClientApp:
    """Make fisherjax's app of a client."""
    config, node = context.run_config, context.node_config
    task = tasks.task(config, node.get("data-dir", ""))

    def load(context: Context) -> tuple:
        return tasks.examples(config, task.train, context.node_config["partition-id"])

    secure = tasks.secure(config, node.get("verifiers", ""), node.get("signing-key", ""))
    if secure is None and node.get("secure-only"):
        raise ValueError(
            "The run has no secure sums, but the node has secure-only=true; expected a run with "
            "--secure-bound"
        )
    return flower.client_app(
        task.algorithm,
        task.model,
        task.optimizer,
        load,
        params=task.params,
        epochs=config["epochs"],
        batch_size=config["batch-size"],
        folder=node.get("state-dir"),
        secure=secure,
    )


def _measured() -> dict[str, float]:
    compiled = seconds.compiled()
    work = time.time() - _END_OF_IMPORTS - compiled
    start = seconds.IMPORTED - seconds.process_began()
    imports = _END_OF_IMPORTS - seconds.IMPORTED
    return dict(zip(seconds.NAMES, (start, imports, compiled, work), strict=True))


app = Client()
