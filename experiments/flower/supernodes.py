"""Run supernodes of this machine, each of which is one client.

    python -m experiments.flower supernodes --keys runs/keys --nodes 2

A machine that has only the wheel of fisherjax runs Flower's own command, which is printed.
"""

import dataclasses
import json
import shlex
import time
from pathlib import Path

from rich.console import Console

from experiments.flower import keys, links, processes
from experiments.harness import commands

PROGRAM = "experiments.flower supernodes"
_SUMS = "signing-key", "verifiers"
_SHORT, _TRIES = 60.0, 2
"""Seconds below which a program ended at once, and how often that is no reason to give up."""


@dataclasses.dataclass(frozen=True)
class Config(links.Security):
    """Options of supernodes."""

    superlink: str = links.ADDRESS
    """HOST:PORT of the superlink."""
    nodes: int = 2
    """Number of nodes to start."""
    first: int = 0
    """Number of the first node; each is the client of that number."""
    port: int = 9094
    """Port of the first node for its own processes, on this machine only; others count on."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; None takes the environment's TFDS_DATA_DIR."""
    node_config: tuple[str, ...] = ()
    """Further entries of the nodes' configuration, KEY=VALUE, for an app of your own."""
    folder: commands.Folder = Path("runs/supernodes")
    """Folder for the apps and for what clients keep."""


def _check(asked: Config) -> None:
    commands.check(asked, "nodes", "1 or more", lambda number: number >= 1)
    commands.check(asked, "first", "0 or more", lambda number: number >= 0)
    commands.check(asked, "node_config", "KEY=VALUE", lambda entry: "=" in entry)
    links.check(asked)


def flower_command(asked: Config, node: int) -> list[str]:
    """Return Flower's command for one supernode."""
    command = [processes.program("flower-supernode"), "--superlink", asked.superlink]
    command += ["--port", str(asked.port + node - asked.first)]
    if asked.keys is None:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str(asked.keys / keys.CA)]
        command += ["--auth-supernode-private-key", str(keys.private(asked.keys, node))]
    own = {"partition-id": node, "state-dir": str((asked.folder / f"node-{node}").absolute())}
    if asked.keys is not None:
        paths = keys.signing(asked.keys, node), asked.keys / keys.VERIFIERS
        own |= {name: str(path.absolute()) for name, path in zip(_SUMS, paths, strict=True)}
    if asked.data_dir is not None:
        own["data-dir"] = str(asked.data_dir.absolute())
    words = [*(f"{name}={json.dumps(value)}" for name, value in own.items()), *asked.node_config]
    return [*command, "--node-config", " ".join(words)]


@commands.command(PROGRAM, __doc__, Config, _check, cached=False)
def main(asked: Config, console: Console) -> None:
    processes.check_reachable(asked.superlink)
    nodes = range(asked.first, asked.first + asked.nodes)
    for node in nodes if asked.keys is not None else ():
        if not keys.private(asked.keys, node).exists():
            raise ValueError(
                f"--keys {asked.keys} has no {keys.private(asked.keys, node).name}: copy it here, "
                f"or make it with python -m experiments.flower keys {asked.keys} --nodes {node + 1}"
            )
    started: list[_Kept] = []
    try:
        for node in nodes:
            processes.check_free("127.0.0.1", asked.port + node - asked.first)
            command = flower_command(asked, node)
            console.print(shlex.join(command), soft_wrap=True, style="dim")
            environment = processes.environment(asked.folder / f"node-{node}" / "flower")
            started.append(_Kept(f"node {node}", command, environment))
        console.print(f"Nodes {nodes[0]} to {nodes[-1]} are started.")
        while True:
            time.sleep(0.5)
            for kept in started:
                kept.look(console)
    finally:
        processes.end(*(kept.process for kept in started))


class _Kept:
    """A program that is started again when it ends.

    Flower's supernode ends when a connection is cut while it is being encrypted.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self._name, self._how, self._tries = name, (command, environment), 0
        self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        self.process = processes.start(*self._how)

    def look(self, console: Console) -> None:
        """Start the program again if it has ended; raise ValueError if it ends each time."""
        if (status := self.process.poll()) is None:
            return
        self._tries = self._tries + 1 if time.monotonic() - self._began < _SHORT else 1
        if self._tries > _TRIES:
            raise ValueError(
                f"{self._name} ended with status {status}, {_TRIES + 1} times; its output says why"
            )
        console.print(f"{self._name} ended with status {status}: it is started again.")
        time.sleep(1.0)
        self._start()
