"""Measure accuracies of merges of compressed updates, and the bytes that a client sends."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, steps, studies, trained_clients
from fisherjax.compression import Codec, compose, quantized


@dataclasses.dataclass(frozen=True)
class Config(trained_clients.Clients):
    """Clients, methods that merge them, and codecs of their updates."""

    algorithms: tuple[str, ...] = (
        *("fedavg", "fedfisher_diag", "regmean", "fedlpa", "fedfisher_kfac"),
        "fedfisher_sequential",
    )
    """Methods whose updates hold weights."""
    codecs: tuple[str, ...] = ("none", "even", "paper", "water filling")
    """Kinds of compression: none, evenly rounded numbers, the paper's codec, water filling."""
    max_examples: int = 2000
    """Largest number of examples of a client in its Fisher pass; 0 takes all."""
    sizes: tuple[float, ...] = (0.1, 0.18, 0.25, 0.35, 0.5, 1.0)
    """Sizes of updates by water filling, in units of the weights' size in float32."""
    trust: float = 0.03
    """Share of the cost of errors in factors that water filling counts (default 0.03)."""
    out: commands.Folder = Path("runs/compression")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[str, str]
"""Algorithm and codec."""


class Measurement(NamedTuple):
    """One accuracy on the test data, a fraction; see `studies`.

    `bytes` is the size of one client's update, `fedavg` that of its weights in float32.
    """

    algorithm: str
    codec: str
    bytes: int
    fedavg: int
    accuracy: float

    @property
    def unit(self) -> Unit:
        """The unit that the measurement belongs to."""
        return self.algorithm, self.codec


def codecs(asked: Config, name: str) -> dict[str, Codec | None]:
    """Return the codecs of a method's updates by name; None leaves the update as it is."""
    found: dict[str, Codec | None] = {"none": None}
    # The start of clients that come from a file is not known.
    before = [] if asked.reference else [fj.compression.differences()]
    before.append(fj.compression.triangles())
    for bits in (16, 8, 6, 4):
        found[f"even, {bits} bits"] = compose(*before, quantized(bits))
    part = {"regmean": "grams", "fedfisher_kfac": "fisher", "fedlpa": "fisher"}.get(name)
    if part is not None:
        # The rank rule counts with the 8 bits of the paper's text where the authors' code has 9.
        for bits, counted in ((16, 16), (9, 8), (8, 8), (5, 5)):
            rounded = quantized({"params": 16, part: bits})
            found[f"paper, {bits} bits"] = compose(fj.compression.truncated(bits=counted), rounded)
    filled = partial(fj.compression.water_filling, trust=asked.trust)
    return found | {f"water filling, {size:g}": filled(size) for size in asked.sizes}


def units(asked: Config) -> dict[Unit, int]:
    """Return the units, each computed and written as a whole, and their numbers of measurements."""
    return {
        (name, codec): 1
        for name in asked.algorithms
        for codec in codecs(asked, name)
        if codec.startswith(asked.codecs)
    }


def measured(
    asked: Config, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Train the clients, or read them, compress what they send, and merge it."""
    task, federation, start, trained = trained_clients.clients(asked, asked.algorithms, console)
    sent: dict[str, fj.algorithms.Update] = {}
    average = steps.upload_bytes(steps.changed(trained))
    for name, codec_name in studies.each(console, missing, ", ".join):
        known = fj.algorithms.options(name)
        chosen = {"max_examples": asked.max_examples or None} if "max_examples" in known else {}
        method = fj.algorithms.make(name, task.model, **chosen)
        # The sequential merge takes the same updates as K-FAC's.
        if method.kind not in sent:
            key = jax.random.key(asked.seed)
            sent = {method.kind: fj.merging.summarize(method, trained, federation, key=key)}
        update, codec = sent[method.kind], codecs(asked, name)[codec_name]
        if codec is not None:
            method = fj.compression.compressed(method, codec)
            update = fj.compression.encode(update, codec, start=trained.start)
        merged, *_ = fj.merging.merge(method, start, update, federation.weights)
        accuracy = round(float(task.accuracy(merged, task.test)), 6)
        size = fj.compression.size(update) // federation.num_clients
        yield [Measurement(name, codec_name, size, average, accuracy)]
