"""Faults over real sockets: every run ends with the model of the sound uploads, or says it failed.

One scenario has all faults, as each start of Flower's programs takes seconds; the tests judge what
it left. Clients replay recorded uploads, so that the model after each round is known.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.flower import keys, processes, submit
from experiments.flower.proxy import Proxy
from tests.flower_loopback.commands import Command, free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="signals of Unix")]

HERE, CLIENTS, MOST, TIMEOUT = Path(__file__).parent, 3, 1000.0, 40
FAULTS = {
    "0-1": ["send", "nan.safetensors"],
    "0-2": ["send", "other.safetensors"],
    # It answers while its connection is cut: what is cut in the middle of a reply is lost.
    "1-0": ["sleep once", 3],
    "1-1": ["claim", 1e12],
    "1-2": ["huge"],
    "2-1": ["garbage"],
    "2-2": ["raise", "no data today"],
    "3-2": ["sleep once", 15],
    "4-1": ["kill"],
    "4-2": ["sleep", TIMEOUT + 10],
}
"""What goes wrong, by round and client."""
MERGED = {0: {0}, 1: {0, 1}, 2: {0}, 3: {0, 1, 2}, 4: {0}}
"""The clients that remain."""
REASONS = {
    "0-1": "finite",
    "0-2": "another network",
    "1-2": "damaged",
    "2-1": "damaged",
    "2-2": "no data today",
    "4-1": "",
    "4-2": "",
}
"""A word of the reason for which a client is left out."""


class Outcome(NamedTuple):
    """What the scenario left."""

    folder: Path
    statuses: list[int]  # exit statuses of the runs
    states: dict[int, dict[str, np.ndarray]]  # by number of rounds
    kept: list[bool]  # whether the state was the same, bit for bit, after each killed server
    rows: list[dict[str, Any]]
    intruders: dict[str, tuple[int, str]]  # exit statuses and output
    left: set[str]  # programs that outlived the scenario


def record(folder: Path) -> None:
    """Write the uploads of three clients for digits' network, and those that are refused."""
    folder.mkdir()
    network = fj.networks.MLP(num_classes=10)
    images = np.zeros((1, 8, 8, 1), np.uint8)
    for place in range(CLIENTS):
        params = fj.networks.init(network, jax.random.key(place), images)
        write(folder / f"{place}.safetensors", params, place)
        about = {"version": fj.__version__, "format": 1, "partition-id": place, "loss": 0.5}
        about |= {"layout": "upload", "examples": 100.0 * (1 + place)}
        (folder / f"{place}.json").write_text(json.dumps(about))
    write(folder / "nan.safetensors", jax.tree.map(lambda x: x * np.nan, params), 1)
    other = fj.networks.init(
        fj.networks.MLP(features=(8,), num_classes=10), jax.random.key(0), images
    )
    write(folder / "other.safetensors", other, 2)
    (folder / "faults.json").write_text(json.dumps(FAULTS))


def write(path: Path, params: Any, place: int) -> None:
    update = fj.algorithms.base.Update({"params": params}, kind=fj.algorithms.fedavg().kind)
    how = {"algorithm": "fedavg", "client": str(place), "examples": 100 * (1 + place)}
    fj.files.save_update(path, update, **how)


def mean(folder: Path, weights: dict[int, float]) -> dict[str, np.ndarray]:
    """Compute the weighted mean of recorded models."""
    models = {k: fj.files.load_update(folder / f"{k}.safetensors")[0].values for k in weights}
    named = {k: fj.tree.by_name(model) for k, model in models.items()}
    total = sum(weights.values())
    return {
        name: sum(w / total * np.asarray(named[k][name], float) for k, w in weights.items())
        for name in named[0]
    }


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = tmp_path_factory.mktemp("loopback")
    record(folder / "recorded")
    app = folder / "app"
    shutil.copytree(submit.APP, app)
    shutil.copy(HERE / "replaying_client.py", app / "fisherjax_app" / "client_app.py")
    assert keys.main([str(folder / "keys"), "--nodes", "3"]) == 0
    assert keys.main([str(folder / "others"), "--nodes", "3"]) == 0
    started: list[subprocess.Popen] = []
    try:
        yield scenario(folder, started)
    finally:
        for process in reversed(started):
            processes.end(process)


def scenario(folder: Path, started: list[subprocess.Popen]) -> Outcome:
    port, state = free_port(), folder / "out" / "server" / "state.safetensors"

    def command(name: str, *words: object) -> Command:
        made = Command(folder / f"{name}.log", *words)
        started.append(made.process)
        return made

    def superlink(name: str) -> Command:
        where = "--port", port, "--keys", folder / "keys", "--folder", folder / "superlink"
        made = command(name, "superlink", *where)
        made.says("listens on")
        return made

    def nodes(name: str, first: int, number: int, to: int) -> Command:
        where = "--superlink", f"127.0.0.1:{to}", "--port", free_port(), "--keys", folder / "keys"
        own = "--node-config", f'recorded="{folder / "recorded"}"', "--folder", folder / "nodes"
        return command(name, "supernodes", "--first", first, "--nodes", number, *where, *own)

    def run(number: int) -> Command:
        where = "--superlink", f"127.0.0.1:{port}", "--keys", folder / "keys"
        what = "--app", folder / "app", "--method", "fedavg", "--num-clients", CLIENTS
        how = "--rounds", len(MERGED), "--timeout", TIMEOUT, "--max-weight", MOST
        return command(f"run{number}", "run", *where, *what, *how, "--out", folder / "out")

    states: dict[int, dict[str, np.ndarray]] = {}

    def rounds() -> int:
        """Return how many rounds are saved, and keep the state after each."""
        if not state.exists():
            return 0
        arrays = fj.files.load_arrays(state)
        number = int(arrays["number"])
        states.setdefault(number, arrays)
        return number

    def asked(number: int, place: int, what: str = "asked") -> bool:
        return (folder / "recorded" / f"{what}-{number}-{place}").exists()

    link = superlink("superlink")
    intruding = {n: command(n, *words) for n, words in intruders(folder, port).items()}
    with Proxy("127.0.0.1", port) as proxy:
        some, others = nodes("node0", 0, 1, proxy.port), nodes("nodes", 1, 2, port)
        first = run(1)
        # The connection of client 0 is cut in the second round.
        until(lambda: asked(1, 0) or first.process.poll() is not None)
        proxy.cut()
        time.sleep(4)
        proxy.mend()
        # The server is killed between two rounds.
        until(lambda: rounds() >= 2 or first.process.poll() is not None)
        before = state.read_bytes()
        os.kill(int((state.parent / "lock").read_text()), signal.SIGKILL)
        statuses, kept = [first.status()], [state.read_bytes() == before]
        second = run(2)
        # The server and the superlink are killed while the sum holds two of three uploads.
        until(lambda: rounds() >= 3 or second.process.poll() is not None)
        before = state.read_bytes()
        both = lambda: asked(3, 0, "answered") and asked(3, 1, "answered")  # noqa: E731
        until(lambda: both() or second.process.poll() is not None)
        time.sleep(6)
        # Without its superlink the proxy would accept connections and close them; a supernode of
        # Flower 1.42 may hang where that happens during the handshake of TLS.
        proxy.cut()
        for pid, _ in processes.descendants(link.process.pid):
            os.kill(pid, signal.SIGKILL)
        statuses.append(second.status())
        assert link.status() == 1
        kept.append(state.read_bytes() == before)
        superlink("superlink_again")
        proxy.mend()
        third = run(3)
        until(lambda: rounds() >= len(MERGED) or third.process.poll() is not None)
        statuses.append(third.status())
        said = {n: (x.process.poll(), x.log.read_text()) for n, x in intruding.items()}
        alive = set().union(*(processes.descendants(each.pid) for each in started))
        for each in (some, others, *intruding.values()):
            processes.end(each.process)
        for process in started:
            processes.end(process)
    left = {f"{pid} {began}" for pid, began in alive & processes.alive()}
    lines = (state.parent / "rounds.jsonl").read_text().splitlines()
    return Outcome(folder, statuses, states, kept, [json.loads(x) for x in lines], said, left)


def intruders(folder: Path, port: int) -> dict[str, list[object]]:
    """Return commands of nodes that must not get in."""
    where = ["--superlink", f"127.0.0.1:{port}", "--folder", folder / "intruders", "--nodes", 1]
    strange = folder / "strange"
    strange.mkdir()
    shutil.copy(folder / "keys" / keys.CA, strange)
    # A key that nobody registered, with the right authority of the superlink.
    shutil.copy(keys.private(folder / "others", 0), keys.private(strange, 0))
    options = {
        "other_key": ["--keys", strange],
        "other_certificate": ["--keys", folder / "others"],
        "insecure": ["--insecure"],
    }
    return {n: ["supernodes", *where, "--port", free_port(), *x] for n, x in options.items()}


def test_a_run_fails_when_its_server_is_killed_and_the_same_command_completes_it(outcome):
    assert outcome.statuses == [1, 1, 0], (outcome.folder / "run3.log").read_text()
    assert [row["round"] for row in outcome.rows] == [*MERGED]


def test_a_killed_server_leaves_the_state_of_the_last_whole_round(outcome):
    assert outcome.kept == [True, True]


@pytest.mark.parametrize("number", MERGED)
def test_a_round_merges_the_sound_uploads_and_nothing_of_the_others(outcome, number):
    row = outcome.rows[number]
    left = {str(place) for place in range(CLIENTS)} - {str(place) for place in MERGED[number]}
    assert row["clients"] == len(MERGED[number])
    assert set(row["left_out"]) == left
    for place in left:
        assert REASONS[f"{number}-{place}"] in row["left_out"][place]


@pytest.mark.parametrize("number", MERGED)
def test_the_model_is_the_weighted_mean_in_which_a_false_number_of_examples_is_bounded(
    outcome, number
):
    own = {place: 100.0 * (1 + place) for place in MERGED[number]}
    claimed = {1: MOST} if number == 1 else {}
    expected = mean(outcome.folder / "recorded", own | claimed)
    for name, array in expected.items():
        found = outcome.states[number + 1][name]
        np.testing.assert_allclose(found, array, atol=1e-6)


@pytest.mark.parametrize("name", ["other_key", "other_certificate", "insecure"])
def test_a_node_without_a_registered_key_or_with_other_certificates_gets_nowhere(outcome, name):
    status, said = outcome.intruders[name]
    assert "Received successfully" not in said
    assert "SuperNode ID" not in said
    assert status != 0


def test_no_program_of_flower_outlives_what_started_it(outcome):
    assert not outcome.left
