"""Define the parts of `experiments.benchmark.accelerator`: what each measures.

A part is a function of whether sizes are tiny, and of the seconds that it may take. It yields the
name, the value and the unit of each number as soon as it is known.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.benchmark import compile_tasks, measure, peers, programs, server, workloads
from experiments.benchmark.config import Config, filled
from experiments.benchmark.workloads import Workload

Numbers = Iterator[tuple[str, Any, str]]
_RUN = ("--dataset", "mnist", "--model", "lenet", "--epochs", "10")
_METHODS = ("fedavg", "fisher_merge", "regmean", "fedfisher_kfac")
_NAMED = 8
# Switches of XLA for GPUs, each beside none.
_SWITCHES = (
    "",
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_cudnn_gemm_fusion_level=0",
    "--xla_gpu_enable_llvm_module_compilation_parallelism=true",
    "--xla_gpu_enable_command_buffer=",
    "--xla_llvm_disable_expensive_passes=true",
)
# What no accelerator has run; K-FAC, diagonals, merges, solvers and rounds have passed on an H100.
_TESTS = (
    *("tests/test_secure_aggregation.py", "tests/test_privacy.py", "tests/test_differentiable.py"),
    *("tests/test_compression.py", "tests/algorithms"),
)


def compile_table(small: bool, limit: float) -> Numbers:
    """Count the programs of tasks, cold and with a warm persistent cache."""
    standard = ("lenet_kfac", "transformer_summaries", "flax_cnn_kfac", "lenet_exchange", "digits")
    end = time.monotonic() + limit
    for task in ("tiny_kfac",) if small else standard:
        yield from _cold_and_warm(task, task, end=end)


def whole_runs(small: bool, limit: float) -> Numbers:
    """Time the standard one-shot run, cold and with a warm persistent cache."""
    end = time.monotonic() + limit
    how = ("--dataset", "digits", "--model", "mlp", "--epochs", "1") if small else _RUN
    with tempfile.TemporaryDirectory() as out:
        more = ("--algorithms", *_METHODS, "--seeds", "0", "--exchanges", "5")
        options = (*how, *(("--algorithms", "fedavg", "--seeds", "0") if small else more))
        # Each process has its own folder, so that the second one does not find results.
        yield from _cold_and_warm("one_shot", "experiments.one_shot", *options, end=end, out=out)


def _cold_and_warm(name: str, *task: str, end: float, out: str | None = None) -> Numbers:
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            place = () if out is None else ("--out", f"{out}/{kind}")
            left = end - time.monotonic()
            if left <= 0:
                yield f"{name}, {kind}", "not begun: no time was left", ""
                continue
            try:
                [found] = programs.in_fresh_process(*task, *place, cache=Path(cache), timeout=left)
            except programs.Failed as error:
                yield f"{name}, {kind}", str(error), ""
                continue
            yield f"{name}, {kind}: programs", found.programs, ""
            yield f"{name}, {kind}: cache misses", found.missed, ""
            for part in ("tracing", "lowering", "compiling", "waiting", "seconds"):
                yield f"{name}, {kind}: {part}", getattr(found, part), "s"
            yield f"{name}, {kind}: longest", _longest(found), "s"


def _longest(found: programs.Counts) -> str:
    """Name the functions that tracing, lowering and compiling took longest for."""
    most = list(found.names.items())[:_NAMED]
    return ", ".join(f"{name} ({int(number)}) {seconds:.3g}" for name, (number, seconds) in most)


def tensor_float_32(small: bool, _: float) -> Numbers:
    """Compare summaries, merges and exchanges in the default precision with the highest."""
    work, federation, trained = _trained("lenet", 240 if small else 20_000)
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
    work = _workload("lenet", total)
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
        work, federation, trained = _trained("lenet", 240 if small else 20_000, change)
        for method in ("fedavg", "fedfisher_kfac"):
            algorithm = fj.algorithms.make(method, work.model)
            updates = fj.merging.summarize(algorithm, trained, federation, key=jax.random.key(2))
            merged = fj.merging.merge(algorithm, work.params, updates, federation.weights)[0]
            yield f"clients trained in {name}, {method}: accuracy", _accuracy(work, merged), ""


def spread(small: bool, _: float) -> Numbers:
    """Repeat training and both Fisher passes three times after the call that compiles."""
    work, federation, trained = _trained("lenet", 240 if small else 20_000)
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


def switches(small: bool, limit: float) -> Numbers:
    """Measure first and later calls under switches of XLA, each in a fresh process, uncached."""
    end = time.monotonic() + limit
    for switch in ("", "--xla_cpu_enable_fast_math=false") if small else _SWITCHES:
        name = switch or "no switch"
        with tempfile.TemporaryDirectory() as out:
            flags = f"{os.environ.get('XLA_FLAGS', '')} {switch}".strip()
            changed = {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
            words = ["--out", out, "--parts", "spread", "--here", *["--small"] * small]
            run = [sys.executable, "-m", "experiments.benchmark.accelerator", *words]
            left, begun = end - time.monotonic(), time.monotonic()
            try:
                how = {"timeout": left, "capture_output": True, "text": True}
                done = subprocess.run(run, cwd=programs.ROOT, env=os.environ | changed, **how)
            except subprocess.TimeoutExpired:
                yield name, "not finished", ""
                return
            yield f"{name}, status {done.returncode}", time.monotonic() - begun, "s"
            if done.returncode:
                yield name, done.stderr.strip()[-200:], ""
                continue
            for line in Path(out, "numbers.jsonl").read_text().splitlines():
                found = json.loads(line)
                if found["what"] != "environment":
                    yield f"{name}, {found['what']}", found["value"], found["unit"]


def tests(small: bool, limit: float) -> Numbers:
    """Run the tests that have not run on an accelerator, with matrix products in full precision."""
    chosen = ("tests/test_tree.py",) if small else _TESTS
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        options = [
            "-q",
            "-n",
            "8",
            "--dist",
            "loadfile",
            "-p",
            "no:benchmark",
            "-p",
            "no:cacheprovider",
            *chosen,
        ]
        with open(said, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options],
                cwd=programs.ROOT,
                env={**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "highest"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(0.9 * limit)
            except subprocess.TimeoutExpired:
                process.kill()
        lines = said.read_text().strip().splitlines() or ["nothing was printed"]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        yield from (("failed", line, "") for line in failed)
        yield ", ".join(chosen), lines[-1], ""


PARTS = {
    **{"compile": compile_table, "runs": whole_runs, "tf32": tensor_float_32, "solve": cnn_solve},
    **{"transformer": transformer, "clients": many_clients, "bfloat16": bfloat16},
    **{"spread": spread, "tests": tests, "switches": switches},
}


def _workload(name: str, number: int) -> Workload:
    return workloads.workload(Config("train", Path()), name, number)


def _trained(
    name: str, number: int, change: Callable[[fj.Model], fj.Model] = lambda model: model
) -> tuple[Workload, fj.clients.Federation, fj.training.Trained]:
    """Train five clients for one epoch, with a changed model."""
    work = _workload(name, number)
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
