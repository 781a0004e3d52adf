"""A measurement that is interrupted ends what it started, keeps its rows, and can go on."""

import os
import signal
import time
from pathlib import Path

import pytest

from experiments.flower import processes
from experiments.flower.load import runs
from experiments.harness import records
from tests.flower_loopback.commands import Command, free_port, until

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.name == "nt", reason="signals of Unix")]


@pytest.fixture
def interruptible():
    """Let a program that is started be interrupted, also where these tests cannot be."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def measured(out: Path) -> list[str]:
    """Return the strategies of the rounds that were measured, one for each."""
    path = out / records.RESULTS
    return [row.strategy for row in records.read_rows(path, runs.Measured._fields, runs.Measured)]


@pytest.fixture
def load(tmp_path):
    """Start a measurement of a run of each strategy, and end it whatever happens."""
    words = "--nodes", 1, "--sizes", 0.05, "--rounds", 2, "--repeats", 1, "--port", free_port()
    started = []

    def start() -> Command:
        own = *words, "--out", tmp_path / "out"
        started.append(Command(tmp_path / "said.log", *own, module="experiments.flower.load"))
        return started[-1]

    yield start
    processes.end(*(command.process for command in started))


def test_an_interrupt_ends_all_in_seconds_and_the_same_command_completes_the_rows(
    tmp_path, interruptible, load
):
    out = tmp_path / "out"

    def said(words: str) -> int:
        log = out / "flower" / "flower.log"
        return log.read_text().count(words) if log.exists() else 0

    # When the node has connected; and in the second run, when the rows of the first are there.
    for sent, status, rows, words in [
        (signal.SIGINT, 130, [], "SuperNode ID"),
        (signal.SIGTERM, 143, ["fisherjax"], "Sent successfully"),
    ]:
        command = load()
        until(lambda rows=rows: measured(out) == rows)
        before = said(words)
        until(lambda words=words, before=before: said(words) > before)
        started, began = processes.descendants(command.process.pid), time.monotonic()
        command.process.send_signal(sent)
        assert command.status(60) == status
        assert time.monotonic() - began < 20
        assert len(started) > 3
        assert not started & processes.alive()
        assert measured(out) == rows
    assert (tmp_path / "said.log").read_text().count("the same command continues it") == 2
    assert load().status() == 0
    assert measured(out) == ["fisherjax", "flower"]
    assert (out / "summary.md").exists()
