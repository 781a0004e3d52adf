"""Codec of a given size, which spends bits where the server's quadratic needs them.

Reverse water-filling is the optimal division of bits among Gaussian sources of different variance:
there is one level for all sources, and sources below it send nothing (Cover and Thomas, Elements of
information theory, 2nd edition, theorem 10.3.3). Here a source is a column: an eigenvector of a
factor, scaled by the root of its eigenvalue, or the weights of an output. This module computes the
cost of errors of its entries; `stream` divides the bits.
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
from fisherjax.compression.base import Codec
from fisherjax.compression.encoded import Encoded, Leaves, check_field
from fisherjax.compression.matrices import Root
from fisherjax.compression.quantized import Difference, codes
from fisherjax.compression.stream import Priced, filled
from fisherjax.fisher import Dense, Diagonal, Operator
from fisherjax.fisher.operators import PRECISION
from fisherjax.typing import Array, Params

_OTHER = 16  # bits of entries that are not in the quadratic


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Squares(Encoded):
    """Roots s of non-negative entries f = s^2."""

    roots: Any

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Return the squares, which are non-negative even if roots were quantised."""
        del leaves
        return jnp.square(inner(self.roots))

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the array."""
        return check_field("roots", inner(self.roots))


@cached
def water_filling(size: float, *, trust: float = 0.03) -> Codec:
    """Make the codec that fills a number of bytes with what the server's quadratic needs most.

    Weights are sent as differences to the start if it is known, factors as roots B = U sqrt(s) of
    A = B B^T, and entries of diagonals as their roots. An error e of an entry costs c e^2 with

        c = 2 tr(A) tr(G) / (a o)                      for the weights V [a, o] of a layer,
        c = trust r_A tr(D G D^T) / a                  for its B of A,   D = V - V_start,
        c = trust r_G tr(D^T A D) / o                  for its B of G,

    which is to first order what the error adds to the minimum of the quadratic: an error dA moves
    the minimum by F^-1 dA D G. The number r_A = sum_j s_j / (s_j + mean s) counts the eigenvalues
    that are large compared with the damping. Steps are theta / sqrt(c) with the smallest theta that
    fits the size. Two terms are added: weights cost one hundredth of the mean over all layers more,
    because damping pulls to the mean of the weights; and D has 3 % of V more, because the merged
    model moves away from a client that does not move itself.

    Args:
        size: Size of an update relative to FedAvg's, which has 4 bytes for each trained weight. At
            most 15 bits for each number are used. Running statistics are sent in addition, as they
            are.
        trust: Factor of the first-order cost of errors of Fisher factors (default 0.03). It is
            below one because the cost of errors of weights is underestimated: the Fisher
            information of a model with confident predictions is too small to describe the effect
            of large errors of its weights, which ruin the model.

    Returns:
        The codec. It serves methods that send weights alone, with Fisher information or with Gram
        matrices; all other values of an update have 16 bits. Updates of equal shapes have equal
        sizes for all clients and data, however their bits are divided.

    Raises:
        ValueError: If a number is not positive; on encoding, if the tables that describe the
            division of bits do not fit the size, or an update has more than 2^31 bits.

    Example:
        >>> from fisherjax import compression
        >>> params = {"w": jnp.array([[1.0, 0.01], [-1.0, 0.01]])}
        >>> fisher = Diagonal({"w": jnp.array([[1.0, 1.0], [1.0, 1.0]])})
        >>> sent = water_filling(2.0).encode({"params": params, "fisher": fisher}, None)
        >>> found = compression.decode(sent, params)["params"]["w"]
        >>> compression.size(sent) <= 2 * 4 * 4, bool(jnp.abs(found - params["w"]).max() < 1e-3)
        (True, True)

    Source: this library, with the theorem that the module names. The default of trust was chosen
        on the FedFisher authors' clients of MNIST, from values between 0.01 and 1
        (docs/methods/water_filling.md).
    """
    checks.positive("size", size)
    checks.positive("trust", trust)

    def encode(values: dict[str, Any], start: Params | None) -> Any:
        if "params" not in values:
            raise ValueError(
                f"This update holds {sorted(values)}, and no weights; expected a method that sends "
                "params. Use quantized for other methods."
            )
        weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values["params"]))
        return filled(_priced(values, start, trust), int(size * 32 * weights))

    return Codec(encode, f"{size:g} of the size of the weights", needs_start=True)


def _priced(values: dict[str, Any], start: Params | None, trust: float) -> dict[str, Any]:
    """Replace arrays of an update by roots or differences with their costs; quantise the others."""
    params, done = values["params"], {}
    leaves, structure = tree.by_name(params), jax.tree.structure(params)
    started = {} if start is None else tree.by_name(start)
    # Without the start, the weights themselves stand for D.
    far = {name: 1.03 * x - started[name] if started else x for name, x in leaves.items()}
    way = jax.tree.unflatten(structure, list(far.values()))
    costs: dict[str, Array] = {}
    for name, value in values.items():
        if isinstance(value, Operator):
            done[name] = _fisher(value, way, trust, costs)
        elif name == "grams":
            done[name] = _grams(value, far, trust, costs)
        # Other values are few, and no cost is known for their errors.
        elif name != "params":
            done[name] = codes(value, _OTHER)
    mean = jnp.asarray(sum(costs.values())) / len(costs) if costs else jnp.ones(())
    weights = []
    for name, x in leaves.items():
        # A leaf without curvature costs like the mean leaf, because the merge averages it.
        cost = costs.get(name, mean) + 0.01 * mean
        moved = Priced(x - started[name] if started else x, cost)
        weights.append(Difference(moved, name) if started else moved)
    return done | {"params": jax.tree.unflatten(structure, weights)}


def _fisher(fisher: Operator, way: Params, trust: float, costs: dict[str, Array]) -> Operator:
    """Price the arrays of a Fisher operator, and add the costs of its leaves to `costs` by name.

    `way` is D: the difference of params to the start.
    """
    if isinstance(fisher, Diagonal):
        costs |= {name: 2 * jnp.mean(f) for name, f in tree.by_name(fisher.entries).items()}
        return Diagonal(jax.tree.map(partial(_squares, trust), fisher.entries, way))
    # The matrix is one block: an error of any of its entries moves every leaf.
    if isinstance(fisher, Dense):
        mean, squared = fisher.block_means(), trust * tree.inner(way, way)
        costs |= {name: 2 * mean for name in fisher.template.names()}
        return dataclasses.replace(fisher, matrix=_root(fisher.matrix, squared))
    means, ways = fisher.block_means(), fisher.blocks(way)
    leaves = {layer.kernel: (layer.leaf, layer.bias) for layer in fisher.layers}
    for block, mean in means.items():
        for name in leaves.get(block, (block,)):
            # The costs of a leaf that several layers use add up.
            costs |= {name: costs.get(name, 0) + 2 * mean} if name else {}
    grouped = {layer.kernel for layer in fisher.layers if layer.groups}
    factors = {
        # Factors of groups are many and small.
        name: codes(x, _OTHER) if name in grouped else _factors(x, ways[name], trust)
        for name, x in fisher.factors.items()
    }
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
        # Least squares have equal weights for all outputs.
        done[name] = _root(gram, trust * tree.inner(way[leaf], way[leaf]))
    return done


def _root(factor: Array, energy: Array) -> Any:
    """Price the root of a factor, given the energy of D in terms of the other factor."""
    if factor.ndim == 1:
        return Squares(Priced(_roots_of(factor), 4 * energy / len(factor)))
    values, vectors = linalg.eigh(factor)
    values = jnp.maximum(values, 0)
    mean = values.mean()
    counting = (values / jnp.where(mean > 0, values + mean, 1)).sum()
    # Columns in descending order of the eigenvalues.
    columns = (vectors * jnp.sqrt(values))[:, ::-1]
    # Eigenvalues may hide that the factor is not finite, which the server must notice.
    columns = jnp.where(jnp.isfinite(factor).all(), columns, jnp.nan)
    return Root(Priced(columns, counting * energy / len(factor)))


def _squares(trust: float, entries: Array, way: Array) -> Squares:
    return Squares(Priced(_roots_of(entries), 4 * trust * jnp.square(way).mean()))


def _roots_of(entries: Array) -> Array:
    return jnp.sqrt(jnp.maximum(entries, 0))


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=PRECISION)
