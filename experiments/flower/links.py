"""Run Flower's superlink, or supernodes that connect to it, until they are interrupted."""

import contextlib
import dataclasses
import json
import shlex
import subprocess
import time
from pathlib import Path

from rich.console import Console

from experiments.flower import keys, processes
from experiments.harness import commands

_SUPERLINK = """Run the superlink, which passes messages between the run and its nodes.

    python -m experiments.flower superlink --keys runs/keys

It registers the nodes of --keys, and keeps what it knows of runs and nodes in its folder, so that
it goes on after it was killed. It sends nothing to others. Whoever reaches its port may start runs,
and so run code on the nodes: let only nodes and yourself reach it.
"""
_SUPERNODES = """Run supernodes of this machine, each of which is one client.

    python -m experiments.flower supernodes --keys runs/keys --nodes 2

A machine that has only the wheel of fisherjax runs Flower's own command, which is printed.
"""
ADDRESS = "127.0.0.1:8000"
_SHORT, _TRIES = 60.0, 2
"""Seconds below which a program ended at once, and how often that is no reason to give up."""


@dataclasses.dataclass(frozen=True)
class Security:
    """Who may connect."""

    keys: commands.FolderOrNone = None
    """Folder that `python -m experiments.flower keys` made."""
    insecure: bool = False
    """Encrypt nothing and let everybody join, for a first try on one machine."""


@dataclasses.dataclass(frozen=True)
class SuperLink(Security):
    """Options of the superlink."""

    host: str = "127.0.0.1"
    """Address on which it listens; 0.0.0.0 is every network of this machine."""
    port: int = 8000
    """Port for nodes and for runs."""
    folder: commands.Folder = Path("runs/superlink")
    """Folder for its database and the apps."""


@dataclasses.dataclass(frozen=True)
class SuperNodes(Security):
    """Options of supernodes."""

    superlink: str = ADDRESS
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


def check_security(asked: Security) -> None:
    """Refuse options that do not say who may connect, and keys that are missing."""
    if (asked.keys is None) != asked.insecure:
        raise ValueError(
            "expected either --keys DIR, which python -m experiments.flower keys makes, or "
            "--insecure for a first try on one machine"
        )
    if asked.keys is not None and not (asked.keys / keys.CA).exists():
        raise ValueError(
            f"--keys is {asked.keys}, which has no {keys.CA}: python -m experiments.flower keys "
            f"{asked.keys}"
        )


def _check(asked: SuperLink | SuperNodes) -> None:
    if isinstance(asked, SuperNodes):
        commands.check(asked, "nodes", "1 or more", lambda number: number >= 1)
        commands.check(asked, "first", "0 or more", lambda number: number >= 0)
    commands.check(asked, "port", "1 to 65535", lambda port: 0 < port < 65536)
    check_security(asked)


def superlink_command(asked: SuperLink) -> list[str]:
    """Return Flower's command for the superlink."""
    command = [processes.program("flower-superlink"), "--host", asked.host]
    command += ["--port", str(asked.port), "--database", str(asked.folder / "superlink.db")]
    # Apps run in this environment.
    command += ["--disable-runtime-dependency-installation"]
    if asked.keys is None:
        return [*command, "--insecure"]
    for option, name in (("ca-certfile", keys.CA), ("certfile", keys.CERTIFICATE)):
        command += [f"--ssl-{option}", str(asked.keys / name)]
    command += ["--ssl-keyfile", str(asked.keys / keys.KEY)]
    return [*command, "--enable-supernode-auth"]


def supernode_command(asked: SuperNodes, node: int) -> list[str]:
    """Return Flower's command for one supernode."""
    command = [processes.program("flower-supernode"), "--superlink", asked.superlink]
    command += ["--port", str(asked.port + node - asked.first)]
    if asked.keys is None:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str(asked.keys / keys.CA)]
        command += ["--auth-supernode-private-key", str(keys.private(asked.keys, node))]
    own = {"partition-id": node, "state-dir": str((asked.folder / f"node-{node}").absolute())}
    if asked.data_dir is not None:
        own["data-dir"] = str(asked.data_dir.absolute())
    words = [*(f"{name}={json.dumps(value)}" for name, value in own.items()), *asked.node_config]
    return [*command, "--node-config", " ".join(words)]


def connection(home: Path, address: str, security: Security) -> dict[str, str]:
    """Write Flower's configuration of a superlink; return the environment of `flwr`."""
    environment = processes.environment(home)
    lines = ["[superlink]", 'default = "fisherjax"', "[superlink.fisherjax]"]
    lines.append(f"address = {json.dumps(address)}")
    if security.keys is None:
        lines.append("insecure = true")
    else:
        path = str((security.keys / keys.CA).absolute())
        lines.append(f"root-certificates = {json.dumps(path)}")
    (home / "config.toml").write_text("\n".join([*lines, ""]))
    return environment


@commands.command("experiments.flower superlink", _SUPERLINK, SuperLink, _check, cached=False)
def superlink(asked: SuperLink, console: Console) -> None:
    processes.check_free(asked.host, asked.port)
    asked.folder.mkdir(parents=True, exist_ok=True)
    command = superlink_command(asked)
    console.print(shlex.join(command), soft_wrap=True, style="dim")
    with processes.running(command, processes.environment(asked.folder / "flower")) as process:
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(asked.host, asked.host)
        processes.wait_for(reached, asked.port, process)
        if asked.keys is not None:
            address = f"{reached}:{asked.port}"
            _register(asked, connection(asked.folder / "cli", address, asked), console)
        console.print(f"The superlink listens on {asked.host}:{asked.port}.")
        raise ValueError(f"the superlink ended with status {process.wait()}; its output says why")


def _register(asked: SuperLink, environment: dict[str, str], console: Console) -> None:
    """Let the nodes of the keys join; a database may know some of them."""
    assert asked.keys is not None
    for path in keys.public(asked.keys):
        command = [processes.program("flwr"), "supernode", "register", str(path), "fisherjax"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode and "already" not in said.lower():
            raise ValueError(f"{path.name} cannot be registered: {said.strip()[-500:]}")
    console.print(f"{len(keys.public(asked.keys))} nodes may join, with the keys of {asked.keys}.")


@commands.command("experiments.flower supernodes", _SUPERNODES, SuperNodes, _check, cached=False)
def supernodes(asked: SuperNodes, console: Console) -> None:
    processes.check_reachable(asked.superlink)
    nodes = range(asked.first, asked.first + asked.nodes)
    for node in nodes if asked.keys is not None else ():
        if not keys.private(asked.keys, node).exists():
            raise ValueError(
                f"--keys {asked.keys} has no key of node {node}: python -m experiments.flower keys "
                f"{asked.keys} --nodes {node + 1}"
            )
    with contextlib.ExitStack() as stack:
        started = []
        for node in nodes:
            processes.check_free("127.0.0.1", asked.port + node - asked.first)
            command = supernode_command(asked, node)
            console.print(shlex.join(command), soft_wrap=True, style="dim")
            environment = processes.environment(asked.folder / f"node-{node}" / "flower")
            kept = _Kept(f"node {node}", command, environment)
            started.append(kept)
            stack.callback(kept.end)
        console.print(f"Nodes {nodes[0]} to {nodes[-1]} are started.")
        while True:
            time.sleep(0.5)
            for kept in started:
                kept.look(console)


class _Kept:
    """A program that is started again when it ends.

    Flower's supernode ends when a connection is cut while it is being encrypted.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self._name, self._how, self._tries = name, (command, environment), 0
        self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._process = processes.start(*self._how)

    def look(self, console: Console) -> None:
        """Start the program again if it has ended; raise ValueError if it ends each time."""
        if (status := self._process.poll()) is None:
            return
        self._tries = self._tries + 1 if time.monotonic() - self._began < _SHORT else 1
        if self._tries > _TRIES:
            raise ValueError(
                f"{self._name} ended with status {status}, {_TRIES + 1} times; its output says why"
            )
        console.print(f"{self._name} ended with status {status}: it is started again.")
        time.sleep(1.0)
        self._start()

    def end(self) -> None:
        """End the program."""
        processes.end(self._process)
