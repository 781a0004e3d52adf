"""Commands of experiments.flower in processes of their own, and how tests wait for them."""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.flower import processes

HUNG = 600.0
"""Seconds after which a test gives up; the slowest machine so far takes a third of it."""


class Command:
    """A command of experiments.flower, or of a module in it, in a process of its own."""

    def __init__(self, log: Path, *words: object, module: str = "experiments.flower") -> None:
        self.log = log
        command = [sys.executable, "-m", module, *map(str, words)]
        with open(log, "a") as output:
            self.process = processes.start(command, os.environ, output)

    def says(self, words: str) -> None:
        until(lambda: words in self.log.read_text() or self.process.poll() is not None)
        assert words in self.log.read_text(), self.log.read_text()

    def status(self, seconds: float = HUNG) -> int:
        return self.process.wait(seconds)


def until(met: Callable[[], Any]) -> None:
    limit = time.monotonic() + HUNG
    while not met():
        assert time.monotonic() < limit, "waited for too long"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
