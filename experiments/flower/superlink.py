"""Run the superlink, which passes messages between the run and its nodes.

    python -m experiments.flower superlink --keys runs/keys

It registers the nodes of --keys, and keeps what it knows of runs and nodes in its folder, so that
it goes on after it was killed. It sends nothing to others. Whoever reaches its port may start runs,
and so run code on the nodes: let only nodes and yourself reach it.
"""

import dataclasses
import shlex
import subprocess
from pathlib import Path

from rich.console import Console

from experiments.flower import keys, links, processes
from experiments.harness import commands

PROGRAM = "experiments.flower superlink"


@dataclasses.dataclass(frozen=True)
class Config(links.Security):
    """Options of the superlink."""

    host: str = "127.0.0.1"
    """Address on which it listens; 0.0.0.0 is every network of this machine."""
    port: int = 8000
    """Port for nodes and for runs."""
    folder: commands.Folder = Path("runs/superlink")
    """Folder for its database and the apps."""
    in_memory: bool = False
    """Keep no database on disk. Many nodes need this; a superlink that ends forgets its runs."""


def flower_command(asked: Config) -> list[str]:
    """Return Flower's command for the superlink."""
    command = [processes.program("flower-superlink"), "--host", asked.host]
    database = ":flwr-in-memory:" if asked.in_memory else str(asked.folder / "superlink.db")
    command += ["--port", str(asked.port), "--database", database]
    # Apps run in this environment.
    command += ["--disable-runtime-dependency-installation"]
    if asked.keys is None:
        return [*command, "--insecure"]
    for option, name in (("ca-certfile", keys.CA), ("certfile", keys.CERTIFICATE)):
        command += [f"--ssl-{option}", str(asked.keys / name)]
    command += ["--ssl-keyfile", str(asked.keys / keys.KEY)]
    return [*command, "--enable-supernode-auth"]


@commands.command(PROGRAM, __doc__, Config, links.check, cached=False)
def main(asked: Config, console: Console) -> None:
    processes.check_free(asked.host, asked.port)
    asked.folder.mkdir(parents=True, exist_ok=True)
    command = flower_command(asked)
    console.print(shlex.join(command), soft_wrap=True, style="dim")
    with processes.running(command, processes.environment(asked.folder / "flower")) as process:
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(asked.host, asked.host)
        processes.wait_for(reached, asked.port, process)
        if asked.keys is not None:
            address = f"[{reached}]:{asked.port}" if ":" in reached else f"{reached}:{asked.port}"
            _register(asked, links.connection(asked.folder / "cli", address, asked), console)
        console.print(f"The superlink listens on {asked.host}:{asked.port}.")
        raise ValueError(f"the superlink ended with status {process.wait()}; its output says why")


def _register(asked: Config, environment: dict[str, str], console: Console) -> None:
    """Let the nodes of the keys join; a database may know some of them."""
    assert asked.keys is not None
    for path in keys.public(asked.keys):
        command = [processes.program("flwr"), "supernode", "register", str(path), "fisherjax"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode and "already" not in said.lower():
            raise ValueError(f"{path.name} cannot be registered: {said.strip()[-500:]}")
    console.print(f"{len(keys.public(asked.keys))} nodes may join, with the keys of {asked.keys}.")
