"""Compute what a round of many devices costs, of sizes of uploads and measured coefficients.

An upload of b bytes in k arrays takes a server t(k, b) = k t_array + b t_byte seconds of a core to
decode, and as many, of other coefficients, to add. A tree of servers divides the seconds. Its
levels pass on sums only, whose size does not depend on the number of devices.

With secure groups of g devices, of which a share f drops out, each device expands g masks of its d
numbers. The server expands, for each device, (1 - f) masks of survivors and f (1 - f) g of pairs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from scipy.stats import binom

import fisherjax as fj
from experiments.harness.tables import Table
from experiments.scale.networks import Network
from fisherjax.typing import Params

DEVICES = (10**4, 10**6, 10**8)
MINUTES = 10  # in which a tree's servers have to be done
FAN_IN = 1_000  # sums that a server of the upper levels adds
GROUPS, LOST = (10, 100, 1_000), (0.05, 0.3)


class Line(NamedTuple):
    """Coefficients of a line: seconds of a core for each array, and for each byte."""

    array: float
    byte: float

    def seconds(self, sent: "Sent") -> float:
        """Return the seconds of a core for one upload."""
        return sent.arrays * self.array + sent.up * self.byte


class Coefficients(NamedTuple):
    """What was measured on one core.

    Attributes:
        decode: Seconds to read, check and decode an upload.
        add: Seconds to check and add it to the sums.
        masks: Numbers of 32 bits that are drawn and added to a mask in a second.
        pairs: Pairs of devices whose keys, boxes and shares are made and opened in a second.
    """

    decode: Line
    add: Line
    masks: float
    pairs: float


class Sent(NamedTuple):
    """A method's message of one device and the sums of all, in bytes; None if there are no sums."""

    name: str
    down: int
    up: int
    arrays: int
    sums: int | None


def sent(network: Network) -> Iterator[Sent]:
    """Yield the sizes of each method that needs one message up, and that the network allows."""
    outputs = jax.eval_shape(network.model.apply, network.params, network.inputs)
    data = network.inputs, jax.numpy.zeros(outputs.shape[:-1], int)
    federation = fj.clients.federation(data, [range(len(network.inputs))])
    down = fj.compression.size(fj.leaves.split_trained(network.model, network.params)[0])
    for name, row in fj.algorithms.METHODS.items():
        if row.gives != "model" or not isinstance(row.reads, Mapping):
            continue
        algorithm = fj.algorithms.make(name, network.model)

        def upload(params: Params, algorithm: Any = algorithm) -> Any:
            trained = fj.training.untrained(params, 1, network.model)._replace(start=params)
            return fj.merging.summarize(algorithm, trained, federation, key=jax.random.key(0))

        try:
            update = jax.eval_shape(upload, network.params)
        except ValueError:  # the network has leaves that the method cannot merge
            continue
        sums = None
        if algorithm.reduce is not None:
            weights = jax.ShapeDtypeStruct((1,), "float32")
            sums = fj.compression.size(jax.eval_shape(algorithm.reduce, update.values, weights))
        yield Sent(name, down, fj.compression.size(update), len(jax.tree.leaves(update)), sums)


def core_seconds(sent: Sent, known: Coefficients) -> float:
    """Return the seconds of a core that a server needs for one upload."""
    return known.decode.seconds(sent) + known.add.seconds(sent)


class Tree(NamedTuple):
    """A tree of servers: those that receive uploads, its levels, and seconds above the leaves."""

    leaves: int
    levels: int
    seconds: float


def tree(sent: Sent, known: Coefficients, devices: int) -> Tree:
    """Return the tree whose leaves, a core each, add the uploads of all devices in `MINUTES`."""
    leaves = math.ceil(devices * core_seconds(sent, known) / (60 * MINUTES))
    one = known.add.seconds(sent._replace(up=sent.sums or 0))
    levels, below, seconds = 1, leaves, 0.0
    while below > 1:
        seconds += min(below, FAN_IN) * one
        levels, below = levels + 1, math.ceil(below / FAN_IN)
    return Tree(leaves, levels, seconds)


def of_coefficients(one: Sent, known: Coefficients) -> Table:
    """Make the table of what was measured, with the uploads a second of one method."""
    lines = []
    for what, line in (("decode an upload", known.decode), ("add an upload", known.add)):
        each = f"{1e6 * line.array:.1f} us for each array, {1e9 * line.byte:.2f} ns for each byte"
        rate = f"{1 / line.seconds(one):,.0f} of {one.name}, {one.arrays} arrays, {_bytes(one.up)}"
        lines.append((what, each, rate))
    for what, rate in (("mask a number", known.masks), ("agree with a device", known.pairs)):
        lines.append((what, _time(1 / rate), f"{rate:.3g}"))
    return Table("One core", ("what", "core time", "a second"), lines)


def of_methods(network: str, sizes: Sequence[Sent], known: Coefficients) -> Table:
    """Make the table of all methods: bytes, memory, and cores for each number of devices."""
    headings = ["method", "down", "up", "memory of the server"]
    for devices in DEVICES:
        headings += [f"{_power(devices)}: up", "core time", "leaf servers"]
    lines = []
    for one in sizes:
        held = _bytes(one.sums) if one.sums else f"{_bytes(one.up)} x devices"
        line = [one.name, _bytes(one.down), _bytes(one.up), held]
        for devices in DEVICES:
            seconds = devices * core_seconds(one, known)
            leaves = f"{tree(one, known, devices).leaves:,}" if one.sums else "-"
            line += [_bytes(devices * one.up), _time(seconds), leaves]
        lines.append(line)
    return Table(f"{network}: one round, by method", headings, lines)


def of_tree(network: str, one: Sent, known: Coefficients) -> Table:
    """Make the table of the trees of a method whose updates add up."""
    headings = ("devices", "leaf servers", "levels", "sums to the level above")
    lines = []
    for devices in DEVICES:
        found = tree(one, known, devices)
        passed = f"{found.leaves:,} x {_bytes(one.sums or 0)}" if found.levels > 1 else "-"
        row = _power(devices), f"{found.leaves:,}", str(found.levels), passed
        lines.append((*row, _time(found.seconds) if found.levels > 1 else "-"))
    title = f"{network}: trees of servers for {one.name}"
    return Table(title, (*headings, "time above the leaves"), lines)


def of_groups(network: str, one: Sent, known: Coefficients) -> Table:
    """Make the table of secure sums in groups: work of a device and of the server, and losses."""
    numbers = (one.sums or 0) / 4
    headings = ["devices in a group", "a device: masks", "its pairs"]
    for share in LOST:
        lost = f"{100 * share:g} % lost"
        headings += [f"{lost}: server, for each device", "groups that fail"]
    lines = []
    for group in GROUPS:
        line = [f"{group:,}", _time(group * numbers / known.masks), _time(group / known.pairs)]
        for share in LOST:
            drawn = numbers * (1 - share) * (1 + share * group)
            line += [_time(drawn / known.masks), f"{failing(group, share):.2g}"]
        lines.append(line)
    return Table(f"{network}: secure sums of {one.name} in groups", headings, lines)


def failing(group: int, share: float) -> float:
    """Return the probability that fewer devices stay than the threshold, two thirds of a group."""
    threshold = 2 * group // 3 + 1
    return float(binom.cdf(threshold - 1, group, 1 - share))


def report(sizes: Mapping[str, Sequence[Sent]], known: Coefficients, of: str) -> list[Table]:
    """Make all tables of networks, by name; trees and groups are those of the method `of`."""
    first, *_ = (x for own in sizes.values() for x in own if x.name == of)
    made = [of_coefficients(first, known)]
    for network, own in sizes.items():
        (one,) = (x for x in own if x.name == of)
        made.append(of_methods(network, own, known))
        made += [table(network, one, known) for table in (of_tree, of_groups)]
    return made


def _power(devices: int) -> str:
    return f"10^{round(math.log10(devices))}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    unit, name = next((x for x in units if value >= x[0]), units[-1])
    return f"{value / unit:.3g} {name}"


_SIZES = ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_LONG = ((3.156e7, "years"), (8.64e4, "days"), (3600, "h"), (60, "min"))
_bytes = partial(_scaled, units=_SIZES)
_time = partial(_scaled, units=(*_LONG, (1, "s"), (1e-3, "ms"), (1e-6, "us")))
