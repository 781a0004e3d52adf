"""Both Fishers over a data set beside nngeometry's, and beside the gradients of one epoch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import fisherjax as fj
from experiments.benchmark import torch_peer
from experiments.benchmark.config import Config, num_examples
from experiments.benchmark.flops import count, matmul_cases
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import Workload, gradient, workload
from fisherjax.typing import Params

OURS, PEER, GRADIENTS = "fisherjax", "nngeometry", "gradients of one epoch"
_STRUCTURES = {
    "diagonal": (fj.fisher.diagonal, "PMatDiag"),
    "K-FAC": (fj.fisher.kfac, "PMatKFAC"),
}
Factors = Sequence[tuple[np.ndarray, np.ndarray]]


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each network and structure: the true Fisher of ten classes.

    With several devices the examples are also spread over all of them.

    Args:
        config: with the suite's values filled in.
        note: told what is missing, and what images are used.

    Yields:
        Groups; the fact is the relative Frobenius error between both sides.
    """
    missing = torch_peer.missing("torch") or torch_peer.missing("nngeometry")
    if missing:
        note(missing)
    for name in config.models:
        work = workload(config, name, num_examples(config, name))
        note(f"{name}: {work.source} images")
        for structure in _STRUCTURES:
            cases = _cases(work, structure, config, peer=not missing)
            title = f"{structure} Fisher, {name}, {len(work.labels)} images"
            compare = _comparison(name, structure)
            yield Group(title, "samples", None if missing else PEER, cases, GRADIENTS, compare)


def _cases(work: Workload, structure: str, config: Config, peer: bool) -> list[Case]:
    function, representation = _STRUCTURES[structure]
    images, labels, size = jnp.asarray(work.images), jnp.asarray(work.labels), config.batch_size
    batch, samples = min(size, len(labels)), len(labels)

    def ours(params: Params, images: Any, weights: Any = None) -> Any:
        examples = fj.Examples(images, weights=weights)
        return function(work.model, params, examples, batch_size=size)

    one_gradient = gradient(work.apply)
    first = images[:batch], labels[:batch]
    ours_flops = samples / batch * count(ours, work.params, images[:batch])
    epoch_flops = samples / batch * count(one_gradient, work.params, *first)
    epoch = _epoch(one_gradient, images, labels, batch)
    cases = [
        Case(OURS, lambda: ours(work.params, images), samples, ours_flops),
        Case(GRADIENTS, lambda: epoch(work.params), samples, epoch_flops),
        *matmul_cases(config.matmul_size),
    ]
    if jax.device_count() > 1:
        spread, weights = _spread(images)
        run = partial(ours, work.params, spread, weights=weights)
        cases.insert(1, Case(_spread_name(), run, samples))
    if peer:
        theirs = torch_peer.fisher(work, representation, size)
        cases.insert(0, Case(PEER, theirs, samples, peak=torch_peer.peak))
    return cases


def _spread_name() -> str:
    return f"{OURS}, spread over {jax.device_count()} devices"


def _spread(images: Any) -> tuple[Any, Any]:
    """Give every device as many images, filled up with some of weight zero."""
    padding = -len(images) % jax.device_count()
    padded = jnp.pad(images, [(0, padding), *[(0, 0)] * (images.ndim - 1)])
    weights = (jnp.arange(len(padded)) < len(images)).astype(float)
    by_row = NamedSharding(fj.parallel.client_mesh(), PartitionSpec(fj.parallel.AXIS))
    return jax.device_put((padded, weights), by_row)


def _epoch(
    one_gradient: Callable[..., Params], images: Any, labels: Any, batch: int
) -> Callable[[Params], Params]:
    """Make a compiled pass that adds up the gradients of all minibatches."""
    rows = jnp.arange(len(labels) - len(labels) % batch).reshape(-1, batch)

    @jax.jit
    def run(params: Params) -> Params:
        def add(i: Any, total: Params) -> Params:
            new = one_gradient(params, images[rows[i]], labels[rows[i]])
            return jax.tree.map(jnp.add, total, new)

        return jax.lax.fori_loop(0, len(rows), add, jax.tree.map(jnp.zeros_like, params))

    return run


def _comparison(
    name: str, structure: str
) -> Callable[[dict[str, Any]], dict[str, dict[str, float]]]:
    def error(ours: Any, theirs: Any) -> float:
        if structure == "diagonal":
            return _relative(torch_peer.kernels(ours.entries), torch_peer.diagonal(name, theirs))
        pairs = [
            (ours.factors[k]["input"], ours.factors[k]["output"]) for k in sorted(ours.factors)
        ]
        return kronecker_error(pairs, torch_peer.factors(name, theirs))

    def compare(results: dict[str, Any]) -> dict[str, dict[str, float]]:
        if PEER not in results:
            return {}
        return {
            case: {"relative_error": error(results[case], results[PEER])}
            for case in (OURS, _spread_name())
            if case in results
        }

    return compare


def _relative(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    difference = sum(np.sum((a - b) ** 2) for a, b in zip(ours, theirs, strict=True))
    return float(np.sqrt(difference / sum(np.sum(b**2) for b in theirs)))


def kronecker_error(ours: Factors, theirs: Factors) -> float:
    r"""Compare products of factors, ||ours - theirs|| / ||theirs|| in the Frobenius norm.

    The factors themselves may split the scale differently; the products never appear:
    ||A (x) G - B (x) H||^2 = |A|^2 |G|^2 - 2 <A, B> <G, H> + |B|^2 |H|^2.

    Args:
        ours: factors (A, G) of each layer.
        theirs: factors (B, H) of the same layers.

    Returns:
        The relative error over all layers.
    """
    difference = total = 0.0
    for own, other in zip(ours, theirs, strict=True):
        (a, g), (b, h) = ([np.asarray(x, np.float64) for x in pair] for pair in (own, other))
        norm = np.vdot(b, b) * np.vdot(h, h)
        difference += np.vdot(a, a) * np.vdot(g, g) - 2 * np.vdot(a, b) * np.vdot(g, h) + norm
        total += norm
    return float(np.sqrt(max(difference, 0.0) / total))
