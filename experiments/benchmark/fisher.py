"""Both Fishers over a data set beside nngeometry's, and beside the gradients of one epoch."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import fisherjax as fj
from experiments.benchmark import nngeometry_peer, torch_peer
from experiments.benchmark.config import Config
from experiments.benchmark.flops import count, matmul_cases
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import Workload, gradient, workloads
from fisherjax.typing import Params

OURS, PEER, GRADIENTS = "fisherjax", nngeometry_peer.NAME, "gradients of one epoch"
_STRUCTURES = {
    "diagonal": (fj.fisher.diagonal, "PMatDiag", nngeometry_peer.compare_diagonals),
    "K-FAC": (fj.fisher.kfac, "PMatKFAC", nngeometry_peer.compare_factors),
}


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each network and structure: the true Fisher of ten classes.

    With several devices the examples are also spread over all of them. The fact is the relative
    Frobenius error between both sides.
    """
    reference = PEER if torch_peer.is_there(note, "torch", PEER) else None
    for work in workloads(config, note):
        for structure, (fisher, representation, compare) in _STRUCTURES.items():
            cases = _cases(work, fisher, config, compare=partial(compare, work.name))
            if reference:
                theirs = nngeometry_peer.fisher(work, representation, config.batch_size)
                cases.insert(0, Case(PEER, theirs, len(work.labels), peak=torch_peer.peak))
            title = f"{structure} Fisher, {work.name}, {len(work.labels)} images"
            yield Group(title, "samples", reference, cases, GRADIENTS)


def _cases(work: Workload, fisher: Callable[..., Any], config: Config, **how: Any) -> list[Case]:
    images, labels, size = jnp.asarray(work.images), jnp.asarray(work.labels), config.batch_size
    batch, samples = min(size, len(labels)), len(labels)
    one_gradient = gradient(work.apply)
    batches = jnp.arange(samples - samples % batch).reshape(-1, batch)

    def ours(params: Params, images: Any, weights: Any = None) -> Any:
        examples = fj.Examples(images, weights=weights)
        return fisher(work.model, params, examples, batch_size=size)

    @jax.jit
    def epoch(params: Params) -> Params:
        """Add up the gradients of all minibatches."""

        def add(total: Params, rows: Any) -> tuple[Params, None]:
            new = one_gradient(params, images[rows], labels[rows])
            return jax.tree.map(jnp.add, total, new), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]

    first, many = (work.params, images[:batch], labels[:batch]), samples / batch
    ours_flops, epoch_flops = many * count(ours, *first[:2]), many * count(one_gradient, *first)
    cases = [Case(OURS, partial(ours, work.params, images), samples, ours_flops, **how)]
    if jax.device_count() > 1:
        run = partial(ours, work.params, *_spread(images))
        cases.append(Case(f"{OURS}, spread over {jax.device_count()} devices", run, samples, **how))
    gradients = Case(GRADIENTS, partial(epoch, work.params), samples, epoch_flops)
    return [*cases, gradients, *matmul_cases(config.matmul_size)]


def _spread(images: Any) -> tuple[Any, Any]:
    """Give every device as many images, filled up with some of weight zero."""
    padding = -len(images) % jax.device_count()
    padded = jnp.pad(images, [(0, padding), *[(0, 0)] * (images.ndim - 1)])
    weights = (jnp.arange(len(padded)) < len(images)).astype(float)
    by_row = NamedSharding(fj.parallel.client_mesh(), PartitionSpec(fj.parallel.AXIS))
    return jax.device_put((padded, weights), by_row)
