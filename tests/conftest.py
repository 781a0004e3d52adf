"""Fixtures that every test may ask for."""

import contextlib
import gc
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Two test processes share one accelerator: neither may claim its whole memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Two processes have a core each: a second thread of BLAS would wait for the other's, busily.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the tests' time is compiling, and their arrays are small: this saves a quarter. The newest
# versions are tested with all optimisations (Makefile).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Commands that tests start in processes of their own leave the user's compiled programs alone.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")

import jax
import jax.numpy as jnp
import pytest

from experiments.harness import choices
from fisherjax.typing import ByPosition

# Scripts for a type checker, which are not run.
collect_ignore = ["types"]

# XLA's older code generator saves half of the rest, and one program in one piece a seventh; newer
# versions, which may not know these flags, would stop. Flags are read at the first compilation.
FLAGS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
flags = os.environ.get("XLA_FLAGS", "")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and jax.__version_info__ < (0, 11):
    # What somebody has chosen stays.
    chosen = [flag for flag in FLAGS if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *chosen])
# Tracing makes much garbage: to look for it as often as Python does takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)

SHARED = Path(__file__).resolve().parents[2] / "shared"
COMPILED = "/jax/core/compile/backend_compile_duration"
MOST_MAPS = 8_000

_compiled: list[str] = []


def _note_compilation(event: str, duration: float, **_) -> None:
    if event == COMPILED:
        _compiled.append(event)


# Registered once: older versions of JAX cannot take a listener away again.
jax.monitoring.register_event_duration_secs_listener(_note_compilation)


@pytest.fixture(autouse=True, scope="module")
def _few_programs_in_memory() -> Iterator[None]:
    """Forget compiled programs while they are few: each is looked for among all when it goes.

    In time that grows with their square it took a sixth of a process with 9,000 of them. Each has
    several memory maps, too, and beyond 65,530, which is what Linux allows, the compiler crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a law that long tests ask of many cases leave one; the others are slow.

    Or as many as `@pytest.mark.long(cases=8)` says, far apart. The name of the law draws the first,
    so that among many laws every method has its turn.
    """
    laws: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("slow"):
            laws.setdefault((item.path, item.nodeid.split("[")[0]), []).append(item)
    for cases in laws.values():
        few = cases[0].get_closest_marker("long").kwargs.get("cases", 1)
        first = zlib.crc32(cases[0].nodeid.split("[")[0].encode())
        kept = {(first + place * len(cases) // few) % len(cases) for place in range(few)}
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker("slow")


@contextlib.contextmanager
def own_choices() -> Iterator[None]:
    """Forget what was added to the methods, networks and data sets."""
    before = {name: dict(table) for name, table in choices._TABLES.items()}
    try:
        yield
    finally:
        for name, table in choices._TABLES.items():
            table.clear()
            table.update(before[name])


@pytest.fixture(autouse=True, scope="module")
def _own_choices() -> Iterator[None]:
    """Leave no method, variant, network or data set of one file of tests to the next."""
    with own_choices():
        yield


@pytest.fixture(scope="session")
def run_page() -> Callable[..., dict]:
    """Execute the examples of a page, and of those that continue it, and return their names."""

    def run(*pages: Path) -> dict:
        names: dict = {}
        for text in (page.read_text() for page in pages):
            for code in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
                exec(code, names)
        return names

    return run


@pytest.fixture(scope="session")
def written_out() -> Callable[[jax.Array | ByPosition], jax.Array]:
    """Write out all columns of an output factor, [K, B, ..., C]."""

    def write(columns: jax.Array | ByPosition) -> jax.Array:
        if not isinstance(columns, ByPosition):
            return columns
        few, batch, *positions, outputs = columns.factors.shape
        flat = columns.factors.reshape(few, batch, -1, outputs)
        # Zero but where both positions agree.
        spread = jnp.einsum("kblc,lm->mkblc", flat, jnp.eye(flat.shape[2], dtype=flat.dtype))
        return spread.reshape(-1, batch, *positions, outputs)

    return write


@pytest.fixture
def x64() -> Iterator[None]:
    """Compute in float64 for the length of one test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def wide() -> Iterator[None]:
    """Compute in float64 throughout a module, whose tests may share what they computed."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def rounding() -> float:
    """How far two programs of the same formulas may differ: no bit, unless they are optimised.

    The compiler then fuses what differs between them otherwise.
    """
    return 0.0 if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" else 1e-12


@pytest.fixture
def key() -> jax.Array:
    """A key to fold and split."""
    return jax.random.key(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and reference models beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared (real data, reference models) beside the repository")
    return SHARED


@pytest.fixture
def compilations() -> Callable[[], contextlib.AbstractContextManager[Callable[[], int]]]:
    """Count compilations: `with compilations() as count: ...`, then `assert count() == 0`."""

    @contextlib.contextmanager
    def counting() -> Iterator[Callable[[], int]]:
        start, stop = len(_compiled), None
        yield lambda: (len(_compiled) if stop is None else stop) - start
        stop = len(_compiled)

    return counting
