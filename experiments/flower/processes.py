"""Start Flower's programs, and end them with everything that they started."""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_GRACE = 10.0  # seconds for which a program may end by itself


def program(name: str) -> str:
    """Return the path of one of Flower's programs, of this environment first.

    Raises:
        ValueError: If Flower is not installed.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ValueError(f"{name} is not installed: pip install 'fisherjax[flower]'")
    return found


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs, with a folder of their own."""
    home.mkdir(parents=True, exist_ok=True)
    # They start one another by name; and they ask flower.ai for news of versions and report use.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"PATH": path, "FLWR_HOME": str(home.absolute()), "PYTHONUNBUFFERED": "1"}
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**os.environ, **quiet, **own}


def start(
    command: Sequence[str], environment: Mapping[str, str], output: Any = None
) -> subprocess.Popen:
    """Start a program in a session of its own, so that Ctrl-C reaches only us."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
    )


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], output: Any = None
) -> Iterator[subprocess.Popen]:
    """Start a program, and end it and all that it started in the end."""
    process = start(command, environment, output)
    try:
        yield process
    finally:
        end(process)


def end(*processes: subprocess.Popen, grace: float = _GRACE) -> None:
    """End programs side by side, and all that they started, also in sessions of their own.

    Flower's superlink starts `flower-superexec`, and this the app; both outlive a superlink that is
    killed.
    """
    started = descendants(*(each.pid for each in processes))
    limit = time.monotonic() + grace
    for each in processes:
        each.terminate()
    _signal(started, signal.SIGTERM)
    for each in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(max(0.0, limit - time.monotonic()))
        each.kill()
        each.wait()
    while (left := started & alive()) and time.monotonic() < limit:
        time.sleep(0.1)
    _signal(left, signal.SIGKILL)


def _signal(processes: set[tuple[int, str]], number: signal.Signals) -> None:
    for pid, _ in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(*pids: int) -> set[tuple[int, str]]:
    """Return what processes started, and what that started: numbers and times of beginning."""
    children: dict[int, list[tuple[int, str]]] = {}
    for own, parent, began in _listed():
        children.setdefault(parent, []).append((own, began))
    found: set[tuple[int, str]] = set()
    left = [*pids]
    while left:
        new = children.get(left.pop(), [])
        found.update(new)
        left += [own for own, _ in new]
    return found


def alive() -> set[tuple[int, str]]:
    """Return the numbers and the beginnings of all processes."""
    return {(own, began) for own, _, began in _listed()}


def _listed() -> list[tuple[int, int, str]]:
    """Return the number, the parent and the beginning of each process that has not ended."""
    command = ["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    cells = (line.split(maxsplit=3) for line in lines)
    return [
        (int(own), int(parent), began) for own, parent, state, began in cells if state[0] != "Z"
    ]


def check_free(host: str, port: int) -> None:
    """Refuse an address on which something listens already."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"--port is {port}, which cannot be used at {host} ({error.strerror}): choose "
            "another port, or end the program that has it"
        ) from error


def wait_for(host: str, port: int, process: subprocess.Popen, seconds: float = 120.0) -> None:
    """Wait until a process listens.

    Raises:
        ValueError: If it ends before.
    """
    limit = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < limit:
        with contextlib.suppress(OSError, ssl.SSLError), socket.create_connection((host, port), 2):
            return
        time.sleep(0.2)
    raise ValueError(f"the superlink did not start (exit status {process.poll()}); see its output")


def check_reachable(address: str) -> None:
    """Refuse an address at which nothing listens."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"--superlink is {address}, expected HOST:PORT")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 10):
            pass
    except OSError as error:
        raise ValueError(
            f"nothing answers at --superlink {address} ({error}): start it with python -m "
            "experiments.flower superlink, or give the address that it printed"
        ) from error
