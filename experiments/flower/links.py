"""Say who may connect to a superlink, and how."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from experiments.flower import keys, processes
from experiments.harness import commands

ADDRESS = "127.0.0.1:8000"


@dataclasses.dataclass(frozen=True)
class Security:
    """Who may connect."""

    keys: commands.FolderOrNone = None
    """Folder that `python -m experiments.flower keys` made."""
    insecure: bool = False
    """Encrypt nothing and let everybody join, for a first try on one machine."""


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


def check(asked: Any) -> None:
    """Refuse options of a superlink or of supernodes that cannot be."""
    commands.check(asked, "port", "1 to 65535", lambda port: 0 < port < 65536)
    check_security(asked)


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
