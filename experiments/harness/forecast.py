"""Predict how long runs will take, from finished runs or by a probe.

The probe trains all clients on a few of their minibatches and summarizes even fewer, with the
programs that the runs compile anyway, so it costs little more than compilation. Of a long merge in
stages it computes the first two stages and the last, and of FedOV's student a few epochs.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.harness import steps, tables, votes
from experiments.harness.methods import Method, options_of
from experiments.harness.tasks import OneRound
from fisherjax.algorithms import Stages, Update
from fisherjax.typing import Key, Params

_TRAINED, _SUMMARIZED = 8, 2  # numbers of minibatches of a client
_EPOCHS = 3  # the first epoch compiles


class Forecast(NamedTuple):
    """Seconds of several runs together; `distillation` is the server's training only."""

    training: float
    summaries: float
    distillation: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return sum(self)


def probe(ready: Sequence[OneRound]) -> Forecast:
    """Time a small part of the first run, and scale the time to all runs."""
    task, federations = ready[0], [_clients(own) for own in ready]
    params, key = steps.start(task, task.config.seeds[0])
    options = steps.training_options(task, federations[0])
    batch, chunk = options["batch_size"], options["clients_per_chunk"]
    little, less = (_few(federations[0], count * batch) for count in (_TRAINED, _SUMMARIZED))
    training, distillation = _of_votes(ready, key)
    summaries = 0.0
    for optimizer, methods in steps.by_training(task).items():
        clock, how = _Clock(), {"key": key, "optimizer": optimizer, **options, "epochs": _EPOCHS}
        trained = fj.training.train(task.model, params, little, progress=clock, **how)
        passes = task.config.epochs * sum(_work(own, chunk, batch) for own in federations)
        training += clock.shortest * passes / _work(little, chunk, batch)
        # Methods with equal uploads share a summary, which the first of them computes.
        first = {method.sent: name for name, method in reversed(methods.items())}
        for name in first.values():
            summarized = methods[name].clients, trained, less
            for _ in range(2):  # the first compiles
                clock = _Clock()
                sent = fj.merging.summarize(*summarized, key=key, clients_per_chunk=chunk)
                clock(0, jax.tree.leaves(sent))
            most = _most_examples(task, name)
            examples = sum(_work(_few(own, most), chunk) for own in federations)
            summaries += clock.shortest * examples / _work(_few(less, most), chunk)
            for method in methods.values():
                if method.sent == methods[name].sent:
                    distillation += len(ready) * _of_stages(task, method, params, sent, key)
    return Forecast(training, summaries, distillation)


def _of_votes(ready: Sequence[OneRound], key: Key) -> tuple[float, float]:
    """Time FedOV's clients and its student, if they are chosen, and scale the time to all runs."""
    task, voting = ready[0], ready[0].voting
    if voting is None:
        return 0.0, 0.0
    each = [votes.ready(voting, _clients(own), own.test, key) for own in ready]
    federations = [own.federation for own in each]
    options = steps.training_options(task, federations[0])
    batch, chunk = options["batch_size"], options["clients_per_chunk"]
    little, clock = _few(federations[0], _TRAINED * batch), _Clock()
    for _ in range(2):  # the first compiles
        stacked = votes.trained(voting, little, (key, key), **options | {"epochs": 1}).params
        clock(0, stacked)
    passes = task.config.epochs * sum(_work(own, chunk, batch) for own in federations)
    training = clock.shortest * passes / _work(little, chunk, batch)
    if each[0].aside is None:
        return training, 0.0
    clock = _Clock()
    for epochs in (1, 1, _EPOCHS):  # the first compiles
        clock(0, votes.distil(voting, stacked, each[0].aside, key, epochs=epochs))
    _, first, all_ = np.diff(clock.ends)
    # The vote itself is computed once and does not scale with epochs.
    more = max(all_ - first, 0.0) / (_EPOCHS - 1)
    return training, len(ready) * float(first + (voting.learning["epochs"] - 1) * more)


def _of_stages(task: OneRound, method: Method, params: Params, sent: Update, key: Key) -> float:
    """Time the first and the last stage of a merge in stages, and scale their mean to all."""
    ((split, federation),) = task.federations.items()
    server, seconds = method.server(task.validation(split)), []
    stages = server.aggregate
    if not isinstance(stages, Stages):
        return 0.0
    number = stages.number
    # The last stage learns from the images of all stages, which are blank here, and may diverge.
    finish = lambda _, state: (params, state, ())  # noqa: E731
    server = server._replace(aggregate=stages._replace(finish=finish))
    for left, done in ((2, 0), (1, number - 1)):  # the first compiles
        clock, resume = _Clock(), partial(_skipped, max(number - left, 0), done)
        merge = fj.algorithms.in_stages(server, clock, resume)
        fj.merging.merge(merge, params, sent, federation.weights, key=key)
        seconds.append(clock.shortest)
    return number * statistics.fmean(seconds)


def _skipped(number: int, done: int, work: Any) -> tuple[int, Any]:
    """Skip a number of stages, and set the epochs that the work counts as done, if it counts."""
    counts = "epoch" in getattr(work, "_fields", ())
    return number, work._replace(epoch=jnp.full_like(work.epoch, done)) if counts else work


class _Clock:
    """Record the times at which results are computed."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def __call__(self, _: int, results: Any) -> None:
        jax.block_until_ready(results)
        self.ends.append(time.perf_counter())

    @property
    def shortest(self) -> float:
        """The shortest time between results, which excludes compilation and other work."""
        return float(np.diff(self.ends).min())


def describe(forecasts: Sequence[tuple[str, int, Forecast | float]]) -> str:
    """Describe the expected time of runs, by their name and number, and of all together.

    A number in place of a forecast is the seconds of one finished run.
    """
    lines, total, probed = [], 0.0, False
    for name, count, found in forecasts:
        if isinstance(found, Forecast):
            seconds, probed = found.seconds, True
            parts = f"training {_time(found.training)}, summaries {_time(found.summaries)}"
            if found.distillation:
                parts += f", distillation {_time(found.distillation)}"
        else:
            seconds, parts = count * found, "as those that are done"
        lines.append(f"{name}: {count} to run, about {_time(seconds)} ({parts})")
        total += seconds
    lines.append(f"Predicted: about {_time(total)} in all")
    if probed:
        lines[-1] += ", by a probe; compiling and the server's other merges come on top"
    return "\n".join(lines) + "."


def _clients(task: OneRound) -> fj.clients.Federation:
    (federation,) = task.federations.values()
    return federation


def _few(federation: fj.clients.Federation, most: int | None) -> fj.clients.Federation:
    """Limit the examples of each client, in arrays of the same shapes."""
    if most is None:
        return federation
    sizes = jnp.asarray(np.minimum(federation.sizes, most))
    return federation._replace(sizes=fj.devices.replicate(sizes, federation.mesh))


def _work(federation: fj.clients.Federation, chunk: int | None, batch: int = 1) -> float:
    """Return the minibatches of a pass, with those that clients side by side wait for others."""
    batches = np.asarray(fj.clients.num_batches(federation.sizes, batch))
    side_by_side = fj.parallel.chunk_size(chunk, federation.num_clients)
    number = federation.mesh.size if federation.mesh else 1
    return float(batches.sum()) / (1 - fj.parallel.idle_share(batches, side_by_side, number))


def _most_examples(task: OneRound, name: str) -> int | None:
    """Return the largest number of examples of a client that a method summarizes."""
    name = name.partition("+")[0]
    if "max_examples" not in fj.algorithms.options(name):
        return None
    merging = task.config.merging
    return options_of(merging, name).get("max_examples", merging.max_examples) or None


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else tables.duration(seconds)
