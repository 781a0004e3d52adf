"""Time both Fishers over a data set beside nngeometry's and the gradients of one epoch."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import fisherjax as fj
from experiments.benchmark import peers
from experiments.benchmark.config import Config
from experiments.benchmark.flops import matmul_cases, products
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import Workload, gradient, workloads

_GRADIENTS = "gradients of one epoch"
_STRUCTURES = {
    "diagonal": (fj.fisher.diagonal, "PMatDiag", peers.compare_diagonals),
    "K-FAC": (fj.fisher.kfac, "PMatKFAC", peers.compare_factors),
}


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Yield a group for each network and structure: the true Fisher of ten classes.

    With several devices the examples are also spread over all of them. The fact is the relative
    Frobenius error between both sides.
    """
    reference = peers.NNGEOMETRY if peers.are_there(note, "torch", peers.NNGEOMETRY) else None
    for work in workloads(config, note):
        for structure, (fisher, representation, compare) in _STRUCTURES.items():
            cases = _cases(work, fisher, config, compare=partial(compare, work.name))
            if reference:
                cases.insert(0, peers.fisher(work, representation, config.batch_size))
            title = f"{structure} Fisher, {work.name}, {len(work.labels)} images"
            yield Group(title, "samples", reference, cases, _GRADIENTS)


def _cases(work: Workload, fisher: Callable[..., Any], config: Config, **how: Any) -> list[Case]:
    images, labels, samples = jnp.asarray(work.images), jnp.asarray(work.labels), len(work.labels)
    batch = min(config.batch_size, samples)
    batches = jnp.arange(samples - samples % batch).reshape(-1, batch)
    one_gradient = gradient(work.model)

    def ours(params: fj.typing.Params, images: Any, weights: Any = None) -> Any:
        examples = fj.Examples(images, weights=weights)
        return fisher(work.model, params, examples, batch_size=config.batch_size)

    @jax.jit
    def epoch(params: fj.typing.Params) -> fj.typing.Params:
        def add(total: fj.typing.Params, rows: Any) -> tuple[fj.typing.Params, None]:
            new = one_gradient(params, images[rows], labels[rows])
            return jax.tree.map(jnp.add, total, new), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]

    def case(name: str, program: Callable[..., Any], *given: Any, **how: Any) -> Case:
        return Case(name, partial(program, work.params, *given), samples, **how)

    first, many = (work.params, images[:batch], labels[:batch]), samples / batch
    flops = many * products(ours, *first[:2]).flops
    cases = [case("fisherjax", ours, images, flops=flops, **how)]
    if jax.device_count() > 1:
        spread = f"fisherjax, spread over {jax.device_count()} devices"
        cases.append(case(spread, ours, *_spread(images), **how))
    flops = many * products(one_gradient, *first).flops
    return [*cases, case(_GRADIENTS, epoch, flops=flops), *matmul_cases(config.matmul_size)]


def _spread(images: Any) -> tuple[Any, Any]:
    """Place equal numbers of images on all devices, padded by images of weight zero."""
    padding = -len(images) % jax.device_count()
    padded = jnp.pad(images, [(0, padding), *[(0, 0)] * (images.ndim - 1)])
    weights = (jnp.arange(len(padded)) < len(images)).astype(float)
    by_row = NamedSharding(fj.devices.client_mesh(), PartitionSpec(fj.devices.AXIS))
    return jax.device_put((padded, weights), by_row)
