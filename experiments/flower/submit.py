"""Run an experiment in rounds on the nodes of a superlink, and report it.

    python -m experiments.flower run --keys runs/keys --method fedfisher_kfac --rounds 3

This command runs on the superlink's machine, where the server keeps its state after each round, in
server/ of --out. The same command goes on after the last round that was saved, whichever process
was killed. In the end --out has results.csv with one row for each round, summary.md with the table,
accuracy.png, server/model.safetensors with the model, and flower.log with Flower's output. The exit
status is 0 only if all rounds were merged and saved.
"""

import dataclasses
import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import fisherjax as fj
from experiments.flower import keys, links, processes, report
from experiments.flower.report import Round
from experiments.harness import commands, folders, limits, progress, records

PROGRAM = "experiments.flower run"
APP = Path(__file__).with_name("app")
_LOG = "flower.log"
_SHOWN = 25  # lines of the log that are printed if a run fails


@dataclasses.dataclass(frozen=True)
class Config(links.Security):
    """An experiment on the nodes of a superlink."""

    dataset: str = "digits"
    """Data set of `fisherjax.datasets`, which the nodes and the superlink's machine have."""
    model: str = "mlp"
    """Network: mlp, lenet or simple_cnn; the last two take images of at least 16 x 16 pixels."""
    method: str = "fedfisher_kfac"
    """Method that merges; docs/reference/methods.md lists them."""
    num_clients: int = 2
    """Number of clients; client I is the node with partition-id=I."""
    alpha: float = 0.5
    """Parameter of the split: 0.05 is one or two classes a client, 100 nearly equal."""
    rounds: int = 3
    """Number of rounds."""
    epochs: int = 5
    """Passes of a client over its data in a round."""
    batch_size: int = 32
    """Examples of a minibatch."""
    learning_rate: float = 0.05
    """Step size of SGD."""
    momentum: float = 0.9
    """Momentum of SGD."""
    seed: int = 0
    """Seed of the split, of the first model and of minibatches."""
    timeout: float = 600.0
    """Seconds for which the server waits for the replies of a round."""
    connect: float = 60.0
    """Seconds for which the server waits until all clients are connected."""
    min_replies: int = 1
    """Number of sound uploads without which a round fails, and the run with it."""
    max_weight: float = 0.0
    """Largest number of examples that counts as a client's weight; 0 is any."""
    secure_bound: float = 0.0
    """Largest absolute value in a client's term of a secure sum; 0 lets clients send updates."""
    data_dir: commands.FolderOrNone = None
    """Folder of the data of the server, for its test images."""
    superlink: str = links.ADDRESS
    """HOST:PORT of the superlink."""
    app: commands.Folder = APP
    """Folder of Flower's app: a copy of experiments/flower/app with a client of your own."""
    out: commands.Folder = Path("runs/flower")
    """Folder for the results; an unfinished run there continues."""


def _check(asked: Config) -> None:
    limits.check_options(asked)
    links.check_security(asked)
    commands.check_name("dataset", asked.dataset, fj.datasets.NAMES)
    commands.check_name("method", asked.method, fj.algorithms.merges())
    commands.check_name("model", asked.model, ("mlp", "lenet", "simple_cnn"))
    expected = f"1 to the {asked.num_clients} clients"
    commands.check(asked, "min_replies", expected, lambda n: 1 <= n <= asked.num_clients)
    for option in ("timeout", "connect", "max_weight", "secure_bound"):
        commands.check(asked, option, "0 or more", lambda x: x >= 0)
    if not (asked.app / "pyproject.toml").exists():
        raise ValueError(
            f"--app is {asked.app}, which has no pyproject.toml; expected a copy of {APP}"
        )
    if asked.secure_bound:
        _check_secure(asked)


def _check_secure(asked: Config) -> None:
    if not asked.max_weight:
        raise ValueError(
            "--secure-bound is given without --max-weight; expected the number of examples that "
            "weighs one in a secure sum"
        )
    # Of a sum of two, each knows what the other sent.
    commands.check(asked, "num_clients", "3 or more with --secure-bound", lambda n: n >= 3)
    if asked.method not in (summed := _summed()):
        raise ValueError(
            f"--method is {asked.method}, which needs each client's update, so that no secure sum "
            f"can hide them; expected one of {', '.join(summed)}, or no --secure-bound"
        )
    number = asked.num_clients if asked.keys is None else len(keys.verifiers(asked.keys))
    if number < asked.num_clients:
        raise ValueError(
            f"--keys {asked.keys} has the keys of {number} nodes for secure sums, --num-clients is "
            f"{asked.num_clients}: python -m experiments.flower keys {asked.keys} --nodes "
            f"{asked.num_clients}"
        )


def _summed() -> list[str]:
    """Return the methods whose updates add up."""
    model = fj.Model(lambda _, x: x, fj.likelihoods.categorical)
    names = (n for n in fj.algorithms.merges() if not fj.algorithms.required(n))
    return [name for name in names if fj.algorithms.make(name, model).reduce is not None]


@commands.command(PROGRAM, __doc__, Config, _check, all_cores=lambda _: False, cached=False)
def main(asked: Config, console: Console) -> None:
    with records.folder(asked.out):
        asked, rows = folders.resume(asked, Config(), Round._fields, Round)
        if len(rows) < asked.rounds or not (asked.out / report.MODEL).exists():
            folders.begin(asked, PROGRAM, console, f"{len(rows)} rounds are done" if rows else "")
            processes.check_reachable(asked.superlink)
            _execute(asked, console)
        report.report(asked, _written(asked), PROGRAM, console)


def app_config(asked: Config) -> dict[str, Any]:
    """Return the configuration of Flower's app."""
    names = (
        *("dataset", "model", "num_clients", "alpha", "rounds", "epochs"),
        *("batch_size", "learning_rate", "momentum", "seed", "timeout", "connect", "min_replies"),
        *("max_weight", "secure_bound"),
    )
    found = {name.replace("_", "-"): getattr(asked, name) for name in names}
    data = "" if asked.data_dir is None else str(asked.data_dir.absolute())
    found["algorithm"] = asked.method
    verifiers = asked.keys and asked.keys / keys.VERIFIERS
    found["verifiers"] = str(verifiers.absolute()) if verifiers else ""
    return found | {"data-dir": data, "folder": str((asked.out / "server").absolute())}


def _execute(asked: Config, console: Console) -> None:
    """Run the rounds that are missing.

    Raises:
        ValueError: If the run failed.
    """
    # The server writes it in the end; one of fewer rounds must not pass for it.
    (asked.out / report.MODEL).unlink(missing_ok=True)
    environment = links.connection(asked.out / "flwr", asked.superlink, asked)
    options = asked.out / "flwr" / "run.toml"
    # A string of JSON is one of TOML.
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in app_config(asked).items())
    options.write_text("".join(lines))
    command = [processes.program("flwr"), "run", str(asked.app), "fisherjax", "--stream"]
    command += ["--run-config", str(options)]
    with open(asked.out / _LOG, "w") as log, progress.bar(console) as bar:
        shown = bar.add_task("waiting for the nodes", total=asked.rounds, speed="")

        def show(rows: list[Round]) -> None:
            if rows:
                reached = f"round {len(rows)}, test accuracy {100 * rows[-1].accuracy:.1f} %"
                bar.update(shown, completed=len(rows), description=reached)

        with processes.running(command, environment, log) as process:
            try:
                _follow(asked, process, show)
            except BaseException:
                _stop(asked, environment)
                raise
    # Flower's exit status is 0 also for a run that failed: what counts is what was written.
    if len(_written(asked)) < asked.rounds or not (asked.out / report.MODEL).exists():
        raise ValueError(_failure(asked))


def _follow(asked: Config, process: subprocess.Popen, show: Callable[[list[Round]], None]) -> None:
    """Write the rows of each round as it ends, until the run ends."""
    ended, before = False, -1
    while not ended:
        ended = process.poll() is not None
        found = _written(asked)
        if len(found) != before:
            show(found)
            records.write_rows(asked.out / records.RESULTS, found, Round._fields)
            before = len(found)
        if not ended:
            time.sleep(0.5)


def _written(asked: Config) -> list[Round]:
    """Return the rounds that the server saved."""
    path = asked.out / report.ROUNDS
    lines = path.read_text().splitlines() if path.exists() else []
    return [report.row_of(json.loads(line)) for line in lines]


def _stop(asked: Config, environment: dict[str, str]) -> None:
    """Stop the run on the superlink, which would go on without us."""
    found = re.search(r"started run (\d+)", (asked.out / _LOG).read_text())
    if found:
        command = [processes.program("flwr"), "stop", found[1], "fisherjax"]
        subprocess.run(command, env=environment, capture_output=True, timeout=60)


def _failure(asked: Config) -> str:
    """Return what went wrong, with the end of Flower's output."""
    done = len(_written(asked))
    lines = (asked.out / _LOG).read_text().splitlines()
    shown = "\n".join(f"  {line}" for line in lines[-_SHOWN:])
    return (
        f"the run failed after {done} of {asked.rounds} rounds; the same command goes on. The end "
        f"of {asked.out / _LOG}:\n{shown}"
    )
