"""Accuracies of merges of compressed updates, over the bytes that a client sends."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, steps, trained_clients
from experiments.harness.progress import bar
from fisherjax.compression import (
    Codec,
    compose,
    differences,
    quantized,
    triangles,
    truncated,
    water_filling,
)


@dataclasses.dataclass(frozen=True)
class Config(trained_clients.Clients):
    """Which clients, and how small their updates are."""

    algorithms: tuple[str, ...] = (
        *("fedavg", "fedfisher_diag", "regmean", "fedlpa", "fedfisher_kfac"),
        "fedfisher_sequential",
    )
    """Methods whose updates hold weights."""
    codecs: tuple[str, ...] = ("none", "even", "paper", "water filling")
    """Ways to compress."""
    max_examples: int = 2000
    """Examples of a client in its Fisher pass, at most; 0 is all."""
    sizes: tuple[float, ...] = (0.1, 0.18, 0.25, 0.35, 0.5, 1.0)
    """Of updates by water filling, in units of the weights' size in float32."""
    trust: float = 0.03
    """Of water filling: how much of what errors of factors cost counts."""
    out: commands.Folder = Path("runs/compression")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[str, str]
"""Algorithm and codec."""


class Point(NamedTuple):
    """One accuracy on the test data, a fraction; a line of results.csv.

    Bytes are those of an update of one client, and of its weights in float32, which FedAvg sends.
    """

    algorithm: str
    codec: str
    bytes: int
    fedavg: int
    accuracy: float

    @property
    def unit(self) -> Unit:
        """What is measured as a whole."""
        return self.algorithm, self.codec


def codecs(asked: Config, name: str) -> dict[str, Codec | None]:
    """List the codecs of a method's updates by what they are called; None sends it as it is."""
    found: dict[str, Codec | None] = {"none": None}
    # What clients of a file started from is not known.
    before = [triangles()] if asked.reference else [differences(), triangles()]
    for bits in (16, 8, 6, 4):
        found[f"even, {bits} bits"] = compose(*before, quantized(bits))
    part = {"regmean": "grams", "fedfisher_kfac": "fisher"}.get(name)
    if part is not None:
        # The rank rule counts with the text's 8 bits where the authors' code has 9.
        for bits, counted in ((16, 16), (9, 8), (8, 8), (5, 5)):
            rounded = quantized({"params": 16, part: bits})
            found[f"paper, {bits} bits"] = compose(truncated(bits=counted), rounded)
    filled = partial(water_filling, trust=asked.trust)
    return found | {f"water filling, {size:g}": filled(size) for size in asked.sizes}


def units(asked: Config) -> list[Unit]:
    """List what is computed, and written, as a whole."""
    return [
        (name, codec)
        for name in asked.algorithms
        for codec in codecs(asked, name)
        if codec.startswith(asked.codecs)
    ]


def measured(asked: Config, console: Console, missing: Sequence[Unit]) -> Iterator[list[Point]]:
    """Train the clients, or read them, compress what they send, and merge it."""
    task, start, trained = trained_clients.clients(asked, asked.algorithms, console)
    (federation,) = task.federations.values()
    sent: dict[str, fj.algorithms.Update] = {}
    average = steps.upload_bytes(steps.changed(trained))
    with bar(console) as shown:
        watched = shown.add_task("", total=len(missing), speed="")
        for name, called in missing:
            shown.update(watched, description=f"{name}, {called}")
            known = fj.algorithms.options(name)
            chosen = {"max_examples": asked.max_examples or None} if "max_examples" in known else {}
            method = fj.algorithms.make(name, task.model, **chosen)
            # The layer by layer merge takes what K-FAC's does.
            if method.kind not in sent:
                key = jax.random.key(asked.seed)
                sent = {method.kind: fj.merging.summarize(method, trained, federation, key=key)}
            update, codec = sent[method.kind], codecs(asked, name)[called]
            if codec is not None:
                method = fj.compression.compressed(method, codec)
                update = fj.compression.encode(update, codec, start=trained.start)
            merged, *_ = fj.merging.merge(method, start, update, federation.weights)
            accuracy = round(float(task.accuracy(merged, task.test)), 6)
            size = fj.compression.size(update) // federation.num_clients
            shown.advance(watched)
            yield [Point(name, called, size, average, accuracy)]
