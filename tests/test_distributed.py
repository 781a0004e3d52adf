"""Spread over devices or processes, training, summaries and merges are those of one device."""

import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("distributed.py")


def start(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=SCRIPT.parents[1],
    )


def finish(*processes):
    """Wait for all, and stop all where one fails or hangs."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
            yield output.splitlines()[-1]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_eight_devices_give_the_result_of_one():
    assert list(finish(start(8))) == ["1 processes, 8 devices"]


def test_two_processes_give_the_result_of_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outputs = list(finish(start(2, port, 0), start(2, port, 1)))
    assert outputs == ["2 processes, 4 devices"] * 2
