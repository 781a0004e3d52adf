"""Define the parts of `experiments.benchmark.accelerator` that measure in their own process.

A part is a function of whether sizes are tiny, and of the seconds that it may take. It yields the
name, the value and the unit of each number as soon as it is known.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.benchmark import compile_tasks, measure, peers, server, workloads
from experiments.benchmark.config import Config, filled
from experiments.benchmark.workloads import Workload

Numbers = Iterator[tuple[str, Any, str]]


def tensor_float_32(small: bool, _: float) -> Numbers:
    """Compare summaries, merges and exchanges in the default precision with the highest."""
    work, federation, trained = _trained(small)
    algorithm = fj.algorithms.fedfisher(work.model)
    step, key = fj.algorithms.natural_gradient(work.model), jax.random.key(2)
    precisions = {"default": None, "highest": "highest"}
    factors, merged, better = {}, {}, {}
    for name, precision in precisions.items():
        with jax.default_matmul_precision(precision):
            updates = fj.merging.summarize(algorithm, trained, federation, key=key)
            given = work.params, updates, federation.weights
            merged[name], _, info = fj.merging.merge(algorithm, *given)
        factors[name] = updates
        yield f"{name}: largest relative residual", _largest(info.residual), ""
        yield f"{name}: most products of a layer", _largest(info.iterations), ""
        converged = all(map(bool, jax.tree.leaves(info.converged)))
        yield f"{name}: every layer reached its tolerance", converged, ""
        yield f"{name}: accuracy after the merge", _accuracy(work, merged[name]), ""
    for name, precision in precisions.items():
        with jax.default_matmul_precision(precision):
            better[name] = fj.merging.exchange(step, merged[name], federation, key=key)[0]
        yield f"{name}: accuracy after the exchange", _accuracy(work, better[name]), ""
    for what, both in {"factors": factors, "merge": merged, "exchange": better}.items():
        different = _distance(both["default"], both["highest"])
        yield f"{what}: default against highest", different, "relative"


def cnn_solve(small: bool, _: float) -> Numbers:
    """Time the CNN's K-FAC solve beside the paper's Adam, of which 200 steps are run."""
    sizes: dict[str, Any] = {"num_examples": 5_000, "adam_steps": 200, "models": ("cnn",)}
    if small:
        sizes |= {"num_examples": 24, "adam_steps": 2, "models": ("lenet",), "num_clients": (2,)}
    yield from _groups(server.groups, "server", repeats=1 if small else 3, **sizes)


def transformer(small: bool, _: float) -> Numbers:
    """Time four clients' K-FAC summaries and their merge, for 21.4 million parameters."""
    subject = compile_tasks.SUBJECTS["tiny"] if small else compile_tasks.TRANSFORMER
    images, labels = workloads.synthetic(subject.shape, 4 * (4 if small else 256))
    params = jax.jit(lambda key: fj.networks.init(subject.network, key, images))(jax.random.key(0))
    model = workloads.classifier(subject.network)
    federation = fj.clients.federation((images, labels), np.split(np.arange(len(labels)), 4))
    noise = np.random.default_rng(0).normal
    models = jax.tree.map(
        lambda x: np.asarray(x) * (1 + 0.1 * noise(size=(4, *x.shape)).astype(x.dtype)), params
    )
    algorithm = fj.algorithms.fedfisher(model)
    trained = fj.training.Trained(models)
    for call in ("first", "later"):
        start = time.perf_counter()
        updates = fj.merging.summarize(algorithm, trained, federation, key=jax.random.key(1))
        jax.block_until_ready(updates)
        yield f"{call} summaries", time.perf_counter() - start, "s"
        start = time.perf_counter()
        merged, _, info = fj.merging.merge(algorithm, params, updates, federation.weights)
        jax.block_until_ready(merged)
        yield f"{call} merge", time.perf_counter() - start, "s"
    yield "largest relative residual", _largest(info.residual), ""
    yield "memory, peak", measure.peak_bytes() / 2**20, "MiB"


def many_clients(small: bool, _: float) -> Numbers:
    """Time the training of clients of equal size, all at once, beside `torch.func.vmap`."""
    total = 120 if small else 60_000
    work = _lenet(total)
    asked = Config("train", Path(), epochs=1, batch_size=10 if small else 60)
    notes: list[str] = []
    for number in (2, 4) if small else (20, 100, 1_000):
        rows = np.split(np.arange(total - total % number), number)
        federation = fj.clients.federation((work.images, work.labels), rows)

        def ours(federation: Any = federation, number: int = number) -> Any:
            return workloads.train(work, asked, federation, clients_per_chunk=number)

        cases = [measure.Case("fisherjax, all at once", ours, total)]
        if peers.are_there(notes.append, "torch"):
            cases.append(peers.vmapped_training(work, asked, rows))
        yield from _measured(measure.Group(f"{number} clients", "images", None, cases), 3)
    yield from (("note", note, "") for note in dict.fromkeys(notes))


def bfloat16(small: bool, _: float) -> Numbers:
    """Train in float32 and in bfloat16, and merge both by the same float32 curvature."""
    for name, change in {"float32": lambda x: x, "bfloat16": workloads.in_bfloat16}.items():
        work, federation, trained = _trained(small, change)
        for method in ("fedavg", "fedfisher_kfac"):
            algorithm = fj.algorithms.make(method, work.model)
            updates = fj.merging.summarize(algorithm, trained, federation, key=jax.random.key(2))
            merged = fj.merging.merge(algorithm, work.params, updates, federation.weights)[0]
            yield f"clients trained in {name}, {method}: accuracy", _accuracy(work, merged), ""


def spread(small: bool, _: float) -> Numbers:
    """Repeat training and both Fisher passes three times after the call that compiles."""
    work, federation, trained = _trained(small)
    asked = Config("train", Path(), epochs=1, batch_size=64)
    phases: dict[str, Callable[[], Any]] = {
        "training": lambda: workloads.train(work, asked, federation)
    }
    for method in ("fedfisher_diag", "fedfisher_kfac"):
        algorithm = fj.algorithms.make(method, work.model)
        phases[method] = lambda own=algorithm: fj.merging.summarize(
            own, trained, federation, key=jax.random.key(2)
        )
    cases = [measure.Case(name, run, len(work.labels)) for name, run in phases.items()]
    yield from _measured(measure.Group("LeNet, 5 clients", "images", None, cases), 3)


PARTS = {
    **{"tf32": tensor_float_32, "transformer": transformer, "solve": cnn_solve},
    **{"bfloat16": bfloat16, "clients": many_clients, "spread": spread},
}


def _lenet(number: int) -> Workload:
    return workloads.workload(Config("train", Path()), "lenet", number)


def _trained(
    small: bool, change: Callable[[fj.Model], fj.Model] = lambda model: model
) -> tuple[Workload, fj.clients.Federation, fj.training.Trained]:
    """Train five clients for one epoch, with a changed model."""
    work = _lenet(240 if small else 20_000)
    federation = workloads.federate(work, 5)
    changed = work._replace(model=change(work.model))
    asked = Config("train", Path(), epochs=1, batch_size=64)
    return work, federation, workloads.train(changed, asked, federation)


def _groups(groups: Callable[..., Any], suite: Any, *, repeats: int, **sizes: Any) -> Numbers:
    asked = filled(Config(suite, Path(), repeats=repeats, **sizes))
    for group in groups(asked, lambda _: None):
        yield from _measured(group, repeats)


def _measured(group: measure.Group, repeats: int) -> Numbers:
    """Measure a group, and yield its numbers: the first call, each later one, and the facts."""
    for m in measure.measure(group, repeats, 30.0):
        name = f"{group.workload}: {m.name}"
        yield f"{name}, first call", m.first, "s"
        yield f"{name}, later calls", " ".join(f"{x:.4g}" for x in m.seconds), "s"
        yield f"{name}, rate", m.units / m.median, f"{group.unit}/s"
        yield from ((f"{name}, {fact}", value, "") for fact, value in m.facts.items())


def _largest(values: Any) -> float:
    return max(float(jnp.max(x)) for x in jax.tree.leaves(values))


def _accuracy(work: Workload, params: Any) -> float:
    return float(fj.metrics.accuracy(work.model, params, fj.Examples(work.images, work.labels)))


def _distance(ours: Any, theirs: Any) -> float:
    """Return ||ours - theirs|| / ||theirs|| of all leaves together, in float64 of the host."""

    def flat(tree: Any) -> np.ndarray:
        leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
        return np.concatenate(leaves)

    own, other = flat(ours), flat(theirs)
    return float(np.linalg.norm(own - other) / np.linalg.norm(other))
