"""Secure sums over real sockets: at each stage three of ten nodes are lost, and nothing with them.

Ten nodes in two processes take part in one run of the app, whose messages are signed. Those of the
second process are lost at another stage in each round, and killed in training in the last one.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.flower import keys, links, processes, submit, superlink
from tests.flower.conftest import STAGES, distance
from tests.flower_loopback import quick_nodes
from tests.flower_loopback.commands import free_port, until

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.name == "nt", reason="signals of Unix")]

CLIENTS, LOST = 10, (1, 4, 8)
FAULTS = [
    *((stage, "fail") for stage in ("advertise", "share", "accept", "confirm")),
    ("unmask", "silent"),
    ("mask", "killed"),
]
"""The stage at which nodes are lost in each round, and how."""
ARRIVED = [STAGES.index(stage) > STAGES.index("mask") for stage, _ in FAULTS]
"""Whether the vectors of the lost have arrived by then, and so are in the sum."""
SILENT = 15.0  # seconds for which the server waits at a stage


class Outcome(NamedTuple):
    """What a run left."""

    plan: quick_nodes.Plan
    states: dict[int, Any]  # by number of rounds
    rows: list[dict[str, Any]]
    statuses: tuple[int, int]  # of the nodes that stayed, and of those that were lost, in the end
    said: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = tmp_path_factory.mktemp("dropouts")
    assert keys.main([str(folder / "keys"), "--nodes", str(CLIENTS)]) == 0
    started: list[subprocess.Popen] = []
    try:
        yield run(folder, started)
    finally:
        processes.end(*started)


def run(folder: Path, started: list[subprocess.Popen]) -> Outcome:
    asked = submit.Config(
        insecure=True,
        method="fedavg",
        num_clients=CLIENTS,
        rounds=len(FAULTS),
        epochs=1,
        timeout=SILENT,
        secure_bound=10.0,
        max_weight=100.0,
        out=folder / "out",
    )
    config = submit.app_config(asked)
    config["verifiers"] = str(folder / "keys" / keys.VERIFIERS)
    link = superlink.Config(insecure=True, port=free_port(), folder=folder)
    address = f"127.0.0.1:{link.port}"
    environment = links.connection(folder / "flwr", address, asked)
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def begun(name: str, *command: str) -> subprocess.Popen:
        # Tests beside this one count seconds.
        with open(folder / f"{name}.log", "w") as log:
            started.append(processes.start(("nice", "-n", "5", *command), environment, log))
        return started[-1]

    def nodes(name: str, places: list[int], faults: list[tuple[str, str]]) -> subprocess.Popen:
        own = places, address, config, str(folder / "keys"), str(folder / "clients"), faults
        (folder / f"{name}.json").write_text(json.dumps(quick_nodes.Plan(*own)._asdict()))
        words = sys.executable, "-m", quick_nodes.__name__, str(folder / f"{name}.json")
        return begun(name, *words)

    # In memory a superlink answers sooner than from its database.
    command = superlink.flower_command(link)
    command[(place := command.index("--database")) : place + 2] = []
    first = begun("superlink", *command)
    processes.wait_for(link.host, link.port, first)
    stay = nodes("stay", [place for place in range(CLIENTS) if place not in LOST], [])
    lost = nodes("lost", [*LOST], FAULTS)
    for name in ("stay", "lost"):
        until(lambda name=name: "connected" in (folder / f"{name}.log").read_text())
    (folder / "run.toml").write_text("".join(f"{n} = {json.dumps(x)}\n" for n, x in config.items()))
    words = str(submit.APP), "fisherjax", "--stream", "--run-config", str(folder / "run.toml")
    server = begun("run", processes.program("flwr"), "run", *words)
    states: dict[int, Any] = {}
    path = asked.out / "server" / "state.safetensors"

    def over() -> bool:
        ended = server.poll() is not None
        if path.exists():
            arrays = fj.files.load_arrays(path)
            states.setdefault(int(arrays["number"]), arrays)
        return ended

    until(over)
    plan = quick_nodes.Plan(**json.loads((folder / "stay.json").read_text()))
    rounds = path.with_name("rounds.jsonl")
    rows = [json.loads(x) for x in rounds.read_text().splitlines()] if rounds.exists() else []
    said = "".join((folder / f"{name}.log").read_text()[-3000:] for name in ("run", "stay", "lost"))
    return Outcome(plan, states, rows, (stay.poll(), lost.poll()), said)


def test_the_nodes_of_a_process_are_killed_in_training_and_the_others_answer_until_the_end(outcome):
    assert len(outcome.rows) == len(FAULTS), outcome.said
    assert outcome.statuses == (None, -signal.SIGKILL)


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_those_who_are_lost_at_a_stage_are_left_out_by_name(outcome, number):
    row = outcome.rows[number]
    assert set(row["left_out"]) == set(map(str, LOST))
    assert row["clients"] == (CLIENTS if ARRIVED[number] else CLIENTS - len(LOST))


@pytest.fixture(scope="module")
def opened(outcome):
    """Run a round in the open, in this process, from the model before it."""
    client = quick_nodes.client(outcome.plan, is_secure=False)

    def after(number: int, places: list[int]) -> Any:
        terms = fj.flower.Terms(connect=0.0)
        server = quick_nodes.server(outcome.plan, num_clients=CLIENTS, terms=terms)
        if number:
            before = by_name(outcome.states[number], server.state.params)
            server.state = server.state._replace(number=number, params=before)
        own = [{"partition-id": place} for place in places]
        server.run(fj.flower.InProcess(client, own), number + 1)
        return server.state.params

    return after


def by_name(arrays: dict[str, np.ndarray], like: Any) -> Any:
    """Return the params of a saved state."""
    names = fj.tree.names({"params": like})
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in names])


@pytest.mark.filterwarnings("ignore:Client . is left out of round")
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_the_model_is_the_open_one_of_all_whose_vectors_arrived(outcome, opened, number):
    places = [place for place in range(CLIENTS) if ARRIVED[number] or place not in LOST]
    expected = opened(number, places)
    assert distance(by_name(outcome.states[number + 1], expected), expected) < 1e-5
