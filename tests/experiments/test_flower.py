"""The commands of a federation on Flower refuse what cannot run, and end what they start."""

import math
import os
import socket
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from experiments.flower import __main__ as flower
from experiments.flower import keys, processes, proxy, report, submit, supernodes
from experiments.flower.load import __main__ as measure
from experiments.flower.load.app import task as load
from experiments.flower.load.report import quotient
from experiments.harness import folders, records
from fisherjax.secure_aggregation.keys import verifier

COMPOSE = Path(submit.APP).with_name("compose.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("keys DIR --nodes 0", "--nodes is 0, expected 1 or more"),
        ("superlink", "expected either --keys DIR"),
        ("superlink --insecure --port 70000", "--port is 70000, expected 1 to 65535"),
        ("superlink --insecure --keys DIR", "expected either --keys DIR"),
        ("supernodes --keys DIR", "has no ca.crt: python -m experiments.flower keys"),
        ("supernodes --insecure --superlink here", "--superlink is here, expected HOST:PORT"),
        ("supernodes --insecure --superlink 127.0.0.1:1", "nothing answers at --superlink"),
        ("run --insecure --superlink 127.0.0.1:1 --out DIR/run", "nothing answers at --superlink"),
        ("run --insecure --min-replies 3", "--min-replies is 3, expected 1 to the 2 clients"),
        ("run --insecure --secure-bound 10", "--secure-bound is given without --max-weight"),
        (
            "run --insecure --secure-bound 10 --max-weight 9",
            "--num-clients is 2, expected 3 or more with --secure-bound",
        ),
        ("run --insecure --secure-bound -1", "--secure-bound is -1.0, expected 0 or more"),
        (
            "run --insecure --secure-bound 10 --max-weight 9 --num-clients 3 --method fedlpa",
            "--method is fedlpa, which needs each client's update, so that no secure sum can hide "
            "them; expected one of fedavg,",
        ),
        (
            "run --keys DIR/keys --secure-bound 10 --max-weight 9 --method fedavg --num-clients 3",
            "has the keys of 2 nodes for secure sums, --num-clients is 3: python -m experiments",
        ),
        ("run --insecure --app DIR", "which has no pyproject.toml; expected a copy of"),
        ("supernodes --insecure --node-config data", "--node-config is data, expected KEY=VALUE"),
        (
            "supernodes --insecure --superlink 127.0.0.1:USED --port USED",
            "cannot be used at 127.0.0.1 (Address already in use",
        ),
        ("superlink --insecure --port USED", "cannot be used at 127.0.0.1 (Address already in use"),
        ("run --insecure --rounds 0", "--rounds is 0, expected 1 or more"),
        ("run --insecure --method fedavgg", "did you mean 'fedavg'"),
        ("run --insecure --dataset digit", "did you mean 'digits'"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(tmp_path, capsys, words, said):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / keys.CA).touch()
    (tmp_path / "keys" / keys.VERIFIERS).write_text("00\n11\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = words.replace("DIR", str(tmp_path)).replace("USED", str(server.getsockname()[1]))
        assert flower.main(words.split()) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_load_whose_node_has_no_port_is_refused_in_one_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ["--port", str(port - 2), "--nodes", "2", "--out", str(tmp_path)]
        assert measure.main(words) == 1
    assert f"--port is {port}, which cannot be used" in capsys.readouterr().err


def test_programs_and_packages_that_are_missing_name_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert keys.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "error: keys needs the package cryptography: pip install 'fisherjax[secure]'\n"
    )
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"not installed: pip install 'fisherjax\[flower\]'"):
        processes.program("flower-of-nobody")


def test_an_unknown_command_is_refused_with_those_that_exist(capsys):
    assert flower.main(["start"]) == 2
    assert "expected one of keys, superlink, supernodes, run" in capsys.readouterr().err


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port is {port}, which cannot be used"):
            processes.check_free("127.0.0.1", port)
    processes.check_free("127.0.0.1", port)


@pytest.mark.skipif(not Path("/proc/sys/net/ipv6").exists(), reason="needs IPv6")
def test_a_port_of_ipv6_is_found_free():
    processes.check_free("::", 0)


def test_the_superlink_is_verified_by_its_authority_alone_and_secrets_are_the_owners(tmp_path):
    x509 = pytest.importorskip("cryptography.x509")
    assert keys.main([str(tmp_path / "own"), "--hosts", "server.example", "10.0.0.7"]) == 0
    assert keys.main([str(tmp_path / "others")]) == 0
    read = x509.load_pem_x509_certificate
    own, others = (read((tmp_path / n / keys.CA).read_bytes()) for n in ("own", "others"))
    server = read((tmp_path / "own" / keys.CERTIFICATE).read_bytes())
    server.verify_directly_issued_by(own)
    with pytest.raises(pytest.importorskip("cryptography.exceptions").InvalidSignature):
        server.verify_directly_issued_by(others)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", "server.example"} == set(names.get_values_for_type(x509.DNSName))
    assert {"127.0.0.1", "::1", "10.0.0.7"} == {
        str(address) for address in names.get_values_for_type(x509.IPAddress)
    }
    for path in (tmp_path / "own").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*/ca.key"))


def test_further_nodes_get_keys_and_the_others_keep_theirs(tmp_path, capsys):
    pytest.importorskip("cryptography")
    assert keys.main([str(tmp_path), "--nodes", "1"]) == 0
    # It went to its node, as it should.
    (tmp_path / "node-0.pem").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert keys.main([str(tmp_path), "--nodes", "2"]) == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() - before.keys() == {"node-1.pem", "node-1.pub", "sums-1.key"}
    before, lines = dict(before), after[keys.VERIFIERS].split()
    assert after[keys.VERIFIERS].startswith(before.pop(keys.VERIFIERS))
    assert before.items() <= after.items()
    signing = [after[f"sums-{node}.key"] for node in range(2)]
    assert [bytes.fromhex(line.decode()) for line in lines] == [*map(verifier, signing)]
    assert after["node-0.pub"] != after["node-1.pub"]
    assert keys.main([str(tmp_path), "--hosts", "other.example"]) == 1
    assert "choose another folder" in capsys.readouterr().err


def test_a_program_ends_with_all_that_it_started_also_in_sessions_of_their_own():
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {!r}], "
    child += "start_new_session=True); time.sleep(60)"
    # The grandchild ignores the signal to end.
    grandchild = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    process = processes.start([sys.executable, "-c", child.format(grandchild)], os.environ)
    limit = time.monotonic() + 20
    while not (started := processes.descendants(process.pid)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert started
    processes.end(process, grace=0.5)
    assert process.returncode is not None
    limit = time.monotonic() + 20
    while started & processes.alive() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not started & processes.alive()


def test_a_proxy_counts_what_passes_and_cuts():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        proxy.Proxy("127.0.0.1", server.getsockname()[1]) as between,
    ):
        with socket.create_connection(("127.0.0.1", between.port), 10) as client:
            far, _ = server.accept()
            client.sendall(b"a" * 100_000)
            far.sendall(b"b" * 7)
            assert len(far.recv(100_000, socket.MSG_WAITALL)) == 100_000
            assert client.recv(7, socket.MSG_WAITALL) == b"b" * 7
            assert between.traffic() == proxy.Traffic(down=7, up=100_000)
            between.cut()
            assert far.recv(1) == client.recv(1) == b""
            far.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", between.port), 10)
        between.mend()
        with socket.create_connection(("127.0.0.1", between.port), 10) as client:
            far, _ = server.accept()
            client.sendall(b"c")
            assert far.recv(1) == b"c"
            far.close()


def test_options_of_the_run_are_those_of_the_app():
    import tomllib

    project = tomllib.loads((submit.APP / "pyproject.toml").read_text())
    defaults = project["tool"]["flwr"]["app"]["config"]
    asked = submit.app_config(submit.Config(insecure=True))
    assert asked.keys() == defaults.keys()
    assert {n: x for n, x in asked.items() if n != "folder"} == {
        n: x for n, x in defaults.items() if n != "folder"
    }


def test_nodes_say_which_client_they_are_and_share_no_port(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "program", lambda name: name)
    asked = supernodes.Config(insecure=True, first=3, folder=tmp_path, node_config=("a=1",))
    three, four = (supernodes.flower_command(asked, node) for node in (3, 4))
    assert "partition-id=3" in three[-1]
    assert three[-1].endswith(" a=1")
    assert three[three.index("--port") + 1] != four[four.index("--port") + 1]
    secure = supernodes.flower_command(supernodes.Config(keys=tmp_path, folder=tmp_path), 1)
    assert "--insecure" not in secure
    assert secure[secure.index("--auth-supernode-private-key") + 1].endswith("node-1.pem")
    assert f'signing-key="{tmp_path / "sums-1.key"}"' in secure[-1]
    assert f'verifiers="{tmp_path / keys.VERIFIERS}"' in secure[-1]


def test_both_sides_of_the_app_have_the_same_terms_of_secure_sums(tmp_path, monkeypatch):
    pytest.importorskip("flwr.app")
    assert keys.main([str(tmp_path), "--nodes", "3"]) == 0
    monkeypatch.syspath_prepend(str(submit.APP))
    from fisherjax_app import task

    asked = submit.Config(keys=tmp_path, secure_bound=10.0, max_weight=50.0)
    config = submit.app_config(asked)
    server = task.secure(config, config["verifiers"])
    client = task.secure(config, config["verifiers"], str(keys.signing(tmp_path, 2)))
    assert client._replace(signing=b"") == server
    assert server.verifiers[2] == verifier(client.signing)
    assert task.secure(submit.app_config(submit.Config(keys=tmp_path)), "") is None


def test_a_node_that_sends_to_secure_sums_only_refuses_an_open_run(monkeypatch):
    pytest.importorskip("flwr.app")
    monkeypatch.syspath_prepend(str(submit.APP))
    from fisherjax_app import client_app

    config, node = submit.app_config(submit.Config(insecure=True)), {"secure-only": True}
    with pytest.raises(ValueError, match="expected a run with --secure-bound"):
        client_app.client(SimpleNamespace(run_config=config, node_config=node))


def test_rounds_that_were_saved_become_rows():
    saved = {"round": 0, "clients": 2, "left_out": {"1": "late"}, "accuracy": 0.9, "import": 1.0}
    row = report.row_of(saved)
    assert (row.round, row.clients, row.left_out, row.imports) == (1, 2, 1, 1.0)
    assert math.isnan(row.work)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e308])
def test_seconds_that_cannot_be_are_not_reported(monkeypatch, seconds):
    """Means of two such clients fail, and the server with them."""
    record = pytest.importorskip("flwr.app").MetricRecord
    monkeypatch.syspath_prepend(str(submit.APP))
    from fisherjax_app.metered import _measured

    assert not _measured(record({"start": 1.0, "work": seconds}))
    assert _measured(record({"start": 1.0, "work": 2}))


def test_rows_without_the_model_are_no_finished_run(tmp_path, capsys):
    """The server writes the rows of a round first, and may be killed before the rest."""
    asked = submit.Config(insecure=True, rounds=1, out=tmp_path)
    folders.begin(asked, submit.PROGRAM, Console(), "")
    row = report.row_of({"round": 0, "clients": 2, "left_out": {}, "accuracy": 0.9})
    records.write_rows(tmp_path / records.RESULTS, [row], report.Round._fields)
    words = ["run", "--insecure", "--rounds", "1", "--out", str(tmp_path)]
    assert flower.main([*words, "--superlink", "127.0.0.1:1"]) == 1
    assert "nothing answers at --superlink" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--method fedavg", "method was fedfisher_kfac, is fedavg"),
        ("--num-clients 3", "num_clients was 2, is 3"),
        ("--max-weight 9", "max_weight was 0.0, is 9.0"),
    ],
)
def test_a_folder_of_another_run_is_refused_in_one_line(tmp_path, capsys, words, said):
    asked = submit.Config(insecure=True, out=tmp_path)
    folders.begin(asked, submit.PROGRAM, Console(), "")
    row = report.row_of({"round": 0, "clients": 2, "left_out": {}, "accuracy": 0.9})
    records.write_rows(tmp_path / records.RESULTS, [row], report.Round._fields)
    assert flower.main(["run", "--insecure", "--out", str(tmp_path), *words.split()]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Choose another --out" in error
    assert error.count("\n") == 1


def test_a_server_refuses_the_state_of_another_run_and_goes_on_from_none(tmp_path, monkeypatch):
    pytest.importorskip("flwr.app")
    monkeypatch.syspath_prepend(str(submit.APP))
    from fisherjax_app import saved

    config = submit.app_config(submit.Config(insecure=True))

    def hold(**changes):
        with saved.locked(tmp_path, config | changes):
            pass

    hold()
    hold(algorithm="fedavg")  # no round was saved
    (tmp_path / saved.STATE).touch()
    hold(algorithm="fedavg", rounds=9, timeout=1.0)
    for changes in ({}, {"algorithm": "fedavg", "num-clients": 3}):
        with pytest.raises(ValueError, match=r"is of another run .* choose another folder"):
            hold(**changes)
    with (
        saved.locked(tmp_path, config | {"algorithm": "fedavg"}),
        pytest.raises(ValueError, match="another run writes to"),
    ):
        hold(algorithm="fedavg")


def test_an_app_whose_configuration_is_wrong_says_what_was_expected(tmp_path, monkeypatch):
    pytest.importorskip("flwr.app")
    monkeypatch.syspath_prepend(str(submit.APP))
    from fisherjax_app import server_app

    config = submit.app_config(submit.Config(insecure=True))
    for name, value, said in [
        ("folder", "", "the run has no folder for its state; expected one"),
        ("algorithm", "fedavgg", "did you mean|nearest|fedavg"),
        ("dataset", "digit", "digits"),
        ("min-replies", 3, "min_replies is 3"),
    ]:
        wrong = config | {"folder": str(tmp_path / name)} | {name: value}
        with pytest.raises(ValueError, match=said):
            server_app.app(None, SimpleNamespace(run_config=wrong))


@pytest.mark.parametrize("size", [0.35, 3.5, 20])
def test_the_network_of_the_load_has_the_size_that_was_asked_for(size):
    first, second = load.features(size)
    number = 64 * first + first * second + second * 10
    assert 4e-6 * number == pytest.approx(size, rel=0.01)


def test_the_interval_of_a_quotient_covers_the_truth_19_times_in_20():
    random = np.random.default_rng(0)
    pairs = (random.normal(mean, 0.3, size=(1000, 20)) for mean in (2.1, 2.0))
    found = [quotient(x.tolist(), y.tolist()) for x, y in zip(*pairs, strict=True)]
    covered = sum(low <= 2.1 / 2.0 <= high for low, _, high in found)
    assert 920 < covered < 975


def test_containers_get_the_keys_that_the_command_makes_and_options_that_exist(capsys):
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ("node-0", "node-1"):
        mounted = {each.split(":")[0].rpartition("/")[2] for each in services[name]["volumes"]}
        assert {keys.CA, f"{name}.pem"} < mounted
    for name in ("superlink", "run"):
        words = services[name]["command"][3:]
        with pytest.raises(SystemExit):
            flower.main([words[0], "--help"])
        read = capsys.readouterr().out
        for word in words[1:]:
            assert word.partition("=")[0] in read
