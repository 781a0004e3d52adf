"""Run Flower on this machine and collect what the server measured."""

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import fisherjax as fj
from experiments.flower import links, processes, submit, superlink, supernodes
from experiments.flower.load.app import task
from experiments.flower.proxy import Proxy, Traffic

STRATEGIES = ("fisherjax", "flower")
_OVERLAY = Path(__file__).with_name("app")
_NAMES = ("start", "import", "compile", "work")

_ON_DISK = 8  # most nodes of a superlink whose database is a file


class Measured(NamedTuple):
    """One round of a run; a line of results.csv. Seconds of clients are means."""

    work: str
    nodes: int
    size: float  # megabytes of a model
    strategy: str
    repeat: int
    round: int
    clients: int  # that replied
    start: float  # seconds
    imports: float
    compile: float
    train: float  # seconds of the clients' work
    transfer: float  # seconds of the round without all of these and aggregation
    aggregate: float  # seconds from the last upload's arrival to the merged model
    memory: float  # peak bytes of the server app above those before the first round
    superlink: float  # peak bytes of the superlink since its start
    wire: float  # bytes through the sockets of the nodes in the run, over those of its arrays

    @property
    def unit(self) -> tuple:
        """What was measured at once: a run."""
        return self.work, self.nodes, self.size, self.strategy, self.repeat


def measured(asked: Any, done: set[tuple], console: Console) -> Iterator[list[Measured]]:
    """Run what is not measured yet; nodes stay while a size and number is measured."""
    for nodes in asked.nodes:
        for size in asked.sizes:
            units = [
                (asked.work, nodes, size, strategy, repeat)
                for repeat in range(asked.repeats)
                for strategy in STRATEGIES
            ]
            missing = [unit for unit in units if unit not in done]
            if not missing:
                continue
            with _flower(asked, nodes, size) as (proxy, superlink):
                for unit in missing:
                    console.print(*unit)
                    before = proxy.traffic()
                    rows = _run(asked, unit)
                    yield _rows(unit, rows, _peak(superlink), before, proxy.traffic())


@contextlib.contextmanager
def _flower(asked: Any, nodes: int, size: float) -> Iterator[tuple[Proxy, int]]:
    """Start a superlink, whose number is returned, and supernodes, which reach it by a proxy."""
    folder = asked.out / "flower"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    where = {"port": asked.port, "folder": folder / "superlink"}
    # A database on disk is locked for seconds by more nodes.
    link = superlink.Config(insecure=True, in_memory=nodes > _ON_DISK, **where)
    link.folder.mkdir()
    for port in range(asked.port, asked.port + nodes + 1):
        processes.check_free(link.host, port)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(folder / "flower.log", "w"))
        environment = processes.environment(folder / "superlink" / "flower")
        command = superlink.flower_command(link)
        process = stack.enter_context(processes.running(command, environment, log))
        processes.wait_for(link.host, link.port, process)
        proxy = stack.enter_context(Proxy(link.host, link.port))
        started: list[subprocess.Popen] = []
        stack.callback(lambda: processes.end(process, *started))
        for node in range(nodes):
            # Flower sends equal bytes once.
            path = (folder / f"upload-{node}.safetensors").absolute()
            _record(path, size, node)
            own = f"recorded={json.dumps(str(path))}"
            options = supernodes.Config(
                insecure=True,
                superlink=f"127.0.0.1:{proxy.port}",
                first=node,
                port=asked.port + 1 + node,
                folder=folder / "nodes",
                node_config=(own,),
            )
            command = supernodes.flower_command(options, node)
            environment = processes.environment(folder / "nodes" / str(node))
            # As in a second process of a client, programs are there.
            environment["JAX_COMPILATION_CACHE_DIR"] = str((folder / "programs").absolute())
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            started.append(processes.start(command, environment, log))
        yield proxy, process.pid


def _peak(pid: int) -> float:
    """Return the most bytes that a process had in memory; NaN where the system does not say."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(1024.0 * int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))
    return math.nan


def _record(path: Path, size: float, node: int) -> None:
    """Write the upload that a client replays, and its description."""
    random, shapes = np.random.default_rng(node), _shapes(size)
    params = jax.tree.map(lambda x: 0.1 * random.normal(size=x.shape).astype(np.float32), shapes)
    update = fj.algorithms.base.Update({"params": params}, kind=fj.algorithms.fedavg().kind)
    fj.files.save_update(path, update, algorithm="fedavg", client=str(node), examples=256)
    own = {"version": fj.__version__, "format": 1, "layout": "upload"}
    path.with_suffix(".json").write_text(json.dumps(own | {"examples": 256.0, "loss": 0.5}))


def _shapes(size: float) -> Any:
    return jax.eval_shape(partial(task.first_params, size))


def _run(asked: Any, unit: tuple) -> list[dict[str, float]]:
    """Run rounds of one strategy; return what the server measured in each."""
    work, nodes, size, strategy, _ = unit
    folder = asked.out / "flower"
    app, record = folder / "app", (folder / "record.json").absolute()
    record.unlink(missing_ok=True)
    config = {"strategy": strategy, "size": size, "num-clients": nodes, "rounds": asked.rounds}
    config |= {"work": work, "epochs": asked.epochs, "record": str(record)}
    _make_app(app, config)
    security = links.Security(insecure=True)
    environment = links.connection(folder / "cli", f"127.0.0.1:{asked.port}", security)
    command = [processes.program("flwr"), "run", str(app), "fisherjax", "--stream"]
    with (
        open(folder / "run.log", "w") as log,
        processes.running(command, environment, log) as process,
    ):
        process.wait()
    if not record.exists():
        said = (folder / "run.log").read_text()[-3000:]
        raise ValueError(f"a run of {strategy} failed:\n{said}")
    return json.loads(record.read_text())


def _make_app(app: Path, config: dict[str, Any]) -> None:
    """Copy the app, with the clients and the server of the load, and its configuration."""
    shutil.rmtree(app, ignore_errors=True)
    shutil.copytree(submit.APP, app)
    for path in _OVERLAY.glob("*.py"):
        shutil.copy(path, app / "fisherjax_app")
    project = app / "pyproject.toml"
    head, table, _ = project.read_text().partition("[tool.flwr.app.config]\n")
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items())
    project.write_text(head + table + lines)


def _rows(
    unit: tuple, rows: list[dict[str, float]], superlink: float, before: Traffic, after: Traffic
) -> list[Measured]:
    """Return the rounds of a run but the first."""
    _, nodes, size, *_ = unit
    first, *rounds = rows
    arrays = sum(4.0 * np.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(size)))
    passed = after.down - before.down + after.up - before.up
    wire = passed / (2 * arrays * nodes * len(rounds))
    found = []
    for number, row in enumerate(rounds[1:], 2):
        times = [row[name] for name in _NAMES]
        # Clients' start, import, compilation and work are of the round, as they run side by side.
        times += [row["seconds"] - sum(times) - row["aggregate"], row["aggregate"]]
        counts, memory = (number, int(row["clients"])), row["memory"] - first["memory"]
        found.append(Measured(*unit, *counts, *times, memory, superlink, wire))
    return found
