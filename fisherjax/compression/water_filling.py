"""Bits where the server's quadratic needs them: an update of a given size.

Reverse water-filling is the best division of bits among Gaussian sources of different strength:
one level for all, whoever is below it sends nothing (Cover and Thomas, Elements of information
theory, 2nd edition, theorem 10.3.3). Here a source is a column: an eigenvector of a factor, scaled
by the root of its eigenvalue, or the weights of an output. What an error of its entries costs is
said here; `stream` divides the bits.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks, linalg
from fisherjax._core.caching import cached
from fisherjax.compression.base import Codec, Encoded, Leaves, check_field
from fisherjax.compression.matrices import Root
from fisherjax.compression.quantized import Difference, codes
from fisherjax.compression.stream import Priced, filled
from fisherjax.fisher import Dense, Diagonal, Operator
from fisherjax.fisher.operators import PRECISION
from fisherjax.typing import Array, Params

_OTHER = 16  # bits of what the quadratic does not know


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Squares(Encoded):
    """Roots of entries that are not negative, f = s^2."""

    roots: Any

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Square: not negative whatever was done to the roots."""
        del leaves
        return jnp.square(inner(self.roots))

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Say how large the array is."""
        return check_field("roots", inner(self.roots))


@cached
def water_filling(size: float, *, trust: float = 0.03) -> Codec:
    """Make the codec that fills so many bytes with what the server's quadratic needs most.

    Weights are sent as differences to the start, where that is known; factors as A = B B^T, with
    B = U sqrt(s), entries of diagonals as their roots. An error e of an entry costs c e^2,

        c = 2 tr(A) tr(G) / (a o)                      for the weights V [a, o] of a layer,
        c = trust r_A tr(D G D^T) / a                  for its B of A,   D = V - V_start,
        c = trust r_G tr(D^T A D) / o                  for its B of G,

    to first order what it adds to the minimum of the quadratic: a wrong A moves the minimum by
    F^-1 dA D G. r_A = sum_j s_j / (s_j + mean s) is the number of eigenvalues that count beside the
    damping. Steps are theta / sqrt(c), with the least theta that fits. Weights cost a hundredth of
    the mean of all layers besides, as damping pulls to their mean; D has 3 % of V besides, as the
    merged model moves away from a client that does not move itself.

    Args:
        size: Of an update, in units of FedAvg's, 4 bytes for each trained weight. More than 15 bits
            for each number that there is are not used. Running statistics are sent besides, as they
            are.
        trust: How much of what errors of factors cost to first order counts. What errors of the
            weights cost is too little: the Fisher information of a model that is sure of itself
            says too little of large ones, and where they are lost, all is.

    Returns:
        The codec. It serves methods that send weights alone, with Fisher information or with Gram
        matrices; whatever else an update holds has 16 bits. An update of equal shapes has
        the same size for all clients and data, however its bits are divided.

    Raises:
        ValueError: If a number is not positive; on encoding, if size is less than what says how
            the bits are divided, or an update would have more than 2^31 bits.

    Example:
        >>> from fisherjax import compression
        >>> params = {"w": jnp.array([[1.0, 0.01], [-1.0, 0.01]])}
        >>> fisher = Diagonal({"w": jnp.array([[1.0, 1.0], [1.0, 1.0]])})
        >>> sent = water_filling(2.0).encode({"params": params, "fisher": fisher}, None)
        >>> found = compression.decode(sent, params)["params"]["w"]
        >>> compression.size(sent) <= 2 * 4 * 4, bool(jnp.abs(found - params["w"]).max() < 1e-3)
        (True, True)

    Source: this library; the theorem is named above. The default of trust was chosen on the
        FedFisher authors' clients of MNIST, among 0.01 to 1 (docs/how_to/compression.md).
    """
    checks.positive("size", size)
    checks.positive("trust", trust)

    def encode(values: dict[str, Any], start: Params | None) -> Any:
        if "params" not in values:
            raise ValueError(
                f"This update holds {sorted(values)}, and no weights; expected a method that sends "
                "params. Use quantized for others."
            )
        weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values["params"]))
        return filled(_priced(values, start, trust), int(size * 32 * weights))

    return Codec(encode, f"{size:g} of the size of the weights", needs_start=True)


def _priced(values: dict[str, Any], start: Params | None, trust: float) -> dict[str, Any]:
    """Write an update as arrays to be rounded, each with its cost; the rest is rounded here."""
    params, done = values["params"], {}
    leaves, structure = tree.by_name(params), jax.tree.structure(params)
    started = {} if start is None else tree.by_name(start)
    far = {name: 1.03 * x - started[name] if started else x for name, x in leaves.items()}
    way = jax.tree.unflatten(structure, list(far.values()))
    costs: dict[str, Array] = {}
    for name, value in values.items():
        if isinstance(value, Operator):
            done[name] = _fisher(value, way, trust, costs)
        elif name == "grams":
            done[name] = _grams(value, far, trust, costs)
        elif name != "params":
            done[name] = codes(value, _OTHER)
    mean = jnp.asarray(sum(costs.values())) / len(costs) if costs else jnp.ones(())
    weights = []
    for name, x in leaves.items():
        cost = costs.get(name, mean) + 0.01 * mean
        moved = Priced(x - started[name] if started else x, cost)
        weights.append(Difference(moved, name) if started else moved)
    return done | {"params": jax.tree.unflatten(structure, weights)}


def _fisher(fisher: Operator, way: Params, trust: float, costs: dict[str, Array]) -> Operator:
    """Price a Fisher, and add what its leaves' errors cost to `costs`, by their names."""
    if isinstance(fisher, Diagonal):
        costs |= {name: 2 * jnp.mean(f) for name, f in tree.by_name(fisher.entries).items()}
        return Diagonal(jax.tree.map(partial(_squares, trust), fisher.entries, way))
    if isinstance(fisher, Dense):
        mean, squared = fisher.block_means(), trust * tree.inner(way, way)
        costs |= {name: 2 * mean for name in fisher.template.names()}
        return dataclasses.replace(fisher, matrix=_root(fisher.matrix, squared))
    means, ways = fisher.block_means(), fisher.blocks(way)
    leaves = {layer.kernel: (layer.leaf, layer.bias) for layer in fisher.layers}
    for block, mean in means.items():
        for name in leaves.get(block, (block,)):
            # A leaf of several layers counts for each.
            costs |= {name: costs.get(name, 0) + 2 * mean} if name else {}
    factors = {name: _factors(factor, ways[name], trust) for name, factor in fisher.factors.items()}
    entries = {
        name: codes(f, _OTHER) if name in fisher.scales else _squares(trust, f, ways[name])
        for name, f in fisher.entries.items()
    }
    return dataclasses.replace(fisher, factors=factors, entries=entries)


def _factors(factor: dict[str, Array], way: Array, trust: float) -> dict[str, Any]:
    left, right = factor["input"], factor["output"]
    turned = left[:, None] * way if left.ndim == 1 else _product(left, way)
    energies = {"input": tree.inner(_product(way, right), way), "output": tree.inner(turned, way)}
    return {side: _root(factor[side], trust * energy) for side, energy in energies.items()}


def _grams(
    grams: dict[str, Array], way: dict[str, Array], trust: float, costs: dict[str, Array]
) -> dict[str, Any]:
    done = {}
    for name, gram in grams.items():
        leaf = name.removesuffix("^T")
        costs[leaf] = 2 * jnp.trace(gram) / len(gram)
        # Least squares weigh all outputs alike.
        done[name] = _root(gram, trust * tree.inner(way[leaf], way[leaf]))
    return done


def _root(factor: Array, energy: Array) -> Any:
    """Price the root of a factor by the other one's energy of the way."""
    if factor.ndim == 1:
        return Squares(Priced(_roots_of(factor), 4 * energy / len(factor)))
    values, vectors = linalg.eigh(factor)
    values = jnp.maximum(values, 0)
    mean = values.mean()
    counting = (values / jnp.where(mean > 0, values + mean, 1)).sum()
    # In descending order.
    columns = (vectors * jnp.sqrt(values))[:, ::-1]
    # Not finite, and eigenvalues may hide it: the server has to see it.
    columns = jnp.where(jnp.isfinite(factor).all(), columns, jnp.nan)
    return Root(Priced(columns, counting * energy / len(factor)))


def _squares(trust: float, entries: Array, way: Array) -> Squares:
    return Squares(Priced(_roots_of(entries), 4 * trust * jnp.square(way).mean()))


def _roots_of(entries: Array) -> Array:
    return jnp.sqrt(jnp.maximum(entries, 0))


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=PRECISION)
