"""A command in several processes is the command in one, and ends with any of its processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fisherjax as fj
from experiments.harness import hosts, records
from experiments.one_shot.__main__ import main

OPTIONS = ("--epochs", "2", "--seeds", "0", "--partition-seeds", "0", "--no-central")
OPTIONS += ("--algorithms", "fedavg", "fedfisher_diag", "--calibrate", "analytic_head")
OPTIONS += ("--then-rounds", "1", "--keep-clients")
DEVICE = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


@contextlib.contextmanager
def processes(number, out, *options):
    """Start a run of one_shot in processes with a device each; stop in the end what still runs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "experiments.one_shot", *options, "--out", str(out)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how |= {"env": os.environ | DEVICE, "cwd": Path(__file__).parents[2]}
    words = ["--distributed", f"localhost:{port}", str(number)]
    started = [subprocess.Popen([*command, *words, str(i)], **how) for i in range(number)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def results(out):
    """Return what a run measured but for the seconds, and the clients that it trained."""
    rows = records.read_rows(out / records.RESULTS, records.ONE_SHOT)
    values = {r._replace(value=0, seconds=None): r.value for r in rows if "seconds" not in r.metric}
    (kept,) = out.glob("clients/*/0/default/arrays.safetensors")
    return values, fj.files.load_arrays(kept)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    assert main([*OPTIONS, "--out", str(out)]) == 0
    return results(out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_several_processes_give_the_results_of_one(number, alone, tmp_path):
    # Five clients, which neither two nor four devices divide.
    with processes(number, tmp_path, *OPTIONS) as started:
        printed = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * number, printed
    assert f"on each of {number} devices" in printed[0][0]
    assert all(
        not "".join(line for line in out.splitlines() if "Gloo" not in line)
        for out, _ in printed[1:]
    )
    values, clients = results(tmp_path)
    assert values == pytest.approx(alone[0], abs=1e-6)
    assert clients.keys() == alone[1].keys()
    for name, array in clients.items():
        np.testing.assert_allclose(array, alone[1][name], atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "how"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_where_a_process_is_lost_the_others_end_within_a_minute(lost, how, tmp_path):
    with processes(2, tmp_path, "--epochs", "1000000", "--algorithms", "fedavg") as started:
        other, line = started[1 - lost], ""
        while "all" not in line:  # the table of labels, after which clients train
            line = started[0].stdout.readline()
            assert line, started[0].stderr.read()
        time.sleep(5)
        started[lost].send_signal(how)
        begin = time.monotonic()
        _, error = other.communicate(timeout=120)
        assert time.monotonic() - begin < 60
        assert other.returncode != 0
        assert hosts.LOST in error or "another task died" in error


@pytest.mark.parametrize(
    "words", [("localhost",), ("localhost", "2", "0"), ("a:1", "2", "2"), ("a:1", "2", "one")]
)
def test_values_that_are_no_place_among_processes_are_refused(words):
    command = ["--epochs", "2", "--distributed", *words]
    refused = pytest.raises(ValueError, match=f"--distributed is {' '.join(words)}, expected the")
    with refused, hosts.connected(command, lambda *_: None):
        pass
