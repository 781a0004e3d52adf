"""The files of a run: rows come back, damage names itself, a folder is one process's and whole."""

import contextlib
import dataclasses
import hashlib
import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.harness import commands, config, folders, one_round, records, titles
from experiments.harness.config import Merging, OneShot
from experiments.harness.records import ONE_SHOT, RESULTS
from experiments.one_shot import __main__ as one_shot

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "experiments" / "results"
PROGRAM = "experiments.one_shot"
# They took all examples.
FIRST = OneShot(merging=Merging(max_examples=0))
WRITTEN_BY_01 = """{
  "configuration": {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 5,
    "partition": "fedfisher",
    "alpha": 0.1,
    "beta": 0.1,
    "min_size": 10,
    "classes_per_client": 2,
    "partition_seeds": [0, 1, 2, 3],
    "epochs": 30,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "batch_size": 32,
    "augment": false,
    "augment_border": "constant",
    "normalize": true,
    "seeds": [0, 1, 2],
    "algorithms": ["fedavg", "fisher_merge", "regmean", "fedfisher_diag", "fedfisher_kfac"],
    "fisher_kind": "true",
    "damping": "default",
    "solver": "cg",
    "fedlpa_damping": 0.001,
    "fedlpa_balanced": false,
    "mu": 0.001,
    "then_rounds": 0,
    "central": true,
    "on_nonfinite": "raise",
    "clients_per_chunk": "auto",
    "data_dir": null,
    "out": "runs/digits"
  },
  "command": "python -m experiments.one_shot --dataset digits --damping default --mu 0.001",
  "environment": {
    "python": "3.11.7",
    "fisherjax": "0.1.0",
    "jax": "0.10.2",
    "backend": "cpu",
    "devices": 1
  }
}
"""
# Holds the first folder until it is told to stop, and says so.
HOLDER = """
import sys
from pathlib import Path
from experiments.harness import records

with records.folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def resume(out: Path, asked: OneShot | None = None) -> list[records.Row]:
    return folders.resume(dataclasses.replace(asked or OneShot(), out=out), OneShot())[1]


@pytest.fixture
def finished(tmp_path, rows_of) -> Path:
    """The folder of a run that has computed all, but shown nothing yet."""
    out = tmp_path / "finished"
    out.mkdir()
    folders.write_config(out, OneShot(), PROGRAM)
    records.write_rows(out / RESULTS, rows_of(OneShot()), ONE_SHOT)
    return out


# Rows


def test_rows_come_back_from_their_file_as_they_were(tmp_path, rows_of):
    rows = rows_of(OneShot())
    records.write_rows(tmp_path / RESULTS, rows, ONE_SHOT)
    assert records.read_rows(tmp_path / RESULTS, ONE_SHOT) == rows
    assert one_round.missing(OneShot(), rows) == {}
    assert [path.name for path in tmp_path.iterdir()] == [RESULTS]


def test_rows_of_rounds_come_back_too(tmp_path):
    row = records.Row("fedavg", 1, 2, "held_out", "loss", 0.1 + 0.2)
    row = row._replace(local_epochs=4, server_learning_rate=1e-3, fraction=0.25)
    records.write_rows(tmp_path / RESULTS, [row], records.FEDERATED)
    assert records.read_rows(tmp_path / RESULTS, records.FEDERATED) == [row]


def test_folders_that_cannot_hold_the_results_are_refused(tmp_path, rows_of):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to --out"), records.folder(tmp_path / "file"):
        pass
    (tmp_path / RESULTS).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="does not begin with the columns"):
        resume(tmp_path)
    records.write_rows(tmp_path / RESULTS, rows_of(OneShot()), ONE_SHOT)
    with pytest.raises(ValueError, match=r"without a config\.json"):
        resume(tmp_path)


# Damage


@pytest.mark.parametrize(
    "found",
    [
        *("", "{", "[]", "null", "{}", '{"configuration": {}}'),
        *('{"configuration": 1, "environment": {}}', b"\x89PNG\r\n\x1a\n"),
    ],
)
def test_a_corrupt_configuration_names_itself(finished, capsys, found):
    path = finished / records.CONFIG
    path.write_bytes(found if isinstance(found, bytes) else found.encode())
    assert one_shot.main(["--out", str(finished)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path} is not a configuration that was written here")
    assert error.count("\n") == 1


def test_options_that_nobody_knows_are_refused_by_name(finished):
    document = json.loads((finished / records.CONFIG).read_text())
    document["configuration"] |= {"fedavg.nu": 2.0, "nobody_knows": 1}
    del document["checksum"]  # as version 0.2 wrote it
    (finished / records.CONFIG).write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"fedavg\.nu was 2\.0, is the def.*nobody_knows was 1"):
        resume(finished)


HEADING = ",".join(ONE_SHOT) + "\n"
ROW = "fedavg,0,0,1,,test,accuracy,0.5,0.25,4000\n"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("a,b\n", "does not begin with the columns algorithm,partition_seed"),
        (",".join(records.FEDERATED) + "\n", "it is not of this command"),
        (b"\x89PNG\r\n\x1a\n", "it is not of this command"),
    ],
)
def test_foreign_results_name_themselves(finished, capsys, found, said):
    path = finished / RESULTS
    path.write_bytes(found if isinstance(found, bytes) else found.encode())
    assert one_shot.main(["--out", str(finished)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path} ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "broken",
    [
        *("fedavg,0,0,1,,test", f"{ROW[:-1]},7\n", ROW.replace("0.5", "half")),
        *(ROW.replace("0.5", ""), '"' + 20_000 * "fedavg,", "\n", "\x00\xff"),
    ],
)
def test_lines_that_are_no_rows_are_left_out_and_said(tmp_path, broken, capsys):
    (tmp_path / RESULTS).write_text(f"{HEADING}{ROW}{broken}")
    (row,) = records.read_rows(tmp_path / RESULTS, ONE_SHOT)
    assert row == records.Row("fedavg", 0, 1, "test", "accuracy", 0.5, 0, None, 0.25, 4000)
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / RESULTS} is damaged: 1 of 2 rows are not as they were")
    assert said.count("\n") == 1


# One process in a folder


@pytest.mark.long
def test_a_second_process_in_a_folder_is_refused_at_once(tmp_path, capsys):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "held")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        assert one_shot.main(["--out", str(tmp_path / "held")]) == 1
        error = capsys.readouterr().err
        assert f"another process is writing to --out {tmp_path / 'held'}" in error
        with records.folder(tmp_path / "other"):
            pass
        holder.communicate()
    with records.folder(tmp_path / "held"):  # who has ended lets go
        pass
    assert list((tmp_path / "held").iterdir()) == []


def test_a_folder_is_let_go_when_the_work_fails(tmp_path):
    with pytest.raises(KeyError), records.folder(tmp_path):
        raise KeyError
    with records.folder(tmp_path):
        pass


# A full disk


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the system refuse to write more into any file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_else(tmp_path, rows_of):
    rows = rows_of(OneShot())
    path = tmp_path / RESULTS
    records.write_rows(path, rows[:1], ONE_SHOT)
    before = path.read_bytes()
    with files_of_at_most(200), pytest.raises(OSError, match=str(path)) as stop:
        records.write_rows(path, rows, ONE_SHOT)
    assert str(stop.value) == f"[Errno 27] File too large: '{path}'"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with files_of_at_most(200):  # there is room for what fits
        records.write_rows(path, rows[1:2], ONE_SHOT)
    assert records.read_rows(path, ONE_SHOT) == rows[1:2]


@pytest.mark.long
def test_a_full_disk_stops_a_command_on_one_line_with_the_path(finished, capsys):
    def files():
        return {path.name: path.read_bytes() for path in finished.iterdir()}

    before = files()
    with files_of_at_most(2000):
        assert one_shot.main(["--out", str(finished)]) == 1
    error = capsys.readouterr().err
    assert error == f"error: [Errno 27] File too large: '{finished / 'accuracy.png'}'\n"
    assert files() == before
    assert one_shot.main(["--out", str(finished)]) == 0
    assert files() | before == files()


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(OSError, match=f"No such file or directory: '{tmp_path}/no/results.csv'"):
        records.write_text(tmp_path / "no" / RESULTS, "")


# Folders of version 0.1


@pytest.fixture
def old(finished) -> Path:
    (finished / records.CONFIG).write_text(WRITTEN_BY_01)
    return finished


def edit(out: Path, **options: object) -> None:
    document = json.loads((out / records.CONFIG).read_text())
    document["configuration"] |= options
    (out / records.CONFIG).write_text(json.dumps(document))


def test_a_folder_of_the_first_version_is_read_and_shown(old, capsys, rows_of, compilations):
    assert resume(old, FIRST) == rows_of(OneShot())
    with compilations() as count:
        assert one_shot.main(["--out", str(old), "--max-examples", "0"]) == 0
    assert count() == 0
    assert "fedfisher_kfac" in capsys.readouterr().out
    assert "fisherjax 0.1.0" in (old / "summary.md").read_text()
    assert (old / records.CONFIG).read_text() == WRITTEN_BY_01


@pytest.mark.parametrize(
    ("option", "value", "methods", "today"),
    [
        ("damping", 0.5, ("fedfisher_diag", "fedfisher_full", "fedfisher_kfac"), "damping"),
        ("mu", 0.5, ("fedprox",), "mu"),
        ("fedlpa_damping", 0.5, ("fedlpa", "fedlpa_ea", "fedlpa_gd"), "damping"),
        ("fedlpa_balanced", True, ("fedlpa", "fedlpa_ea", "fedlpa_gd"), "balanced"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_what_the_first_version_was_told_is_told_by_its_name_of_today_for_methods_that_run(
    old, rows_of, option, value, methods, today, count
):
    methods = methods[:count]
    names = [f"{method}.{today}" for method in methods]
    edit(old, **{option: value, "algorithms": ["fedavg", *methods]})
    merging = config.Merging(("fedavg", *methods), max_examples=0)
    with pytest.raises(ValueError, match="another experiment") as stop:
        resume(old, OneShot(merging=merging))
    said = re.findall(rf"([a-z_.]+) was {value}, is the default", str(stop.value))
    assert said == names
    merging = dataclasses.replace(merging, options=tuple((name, value) for name in names))
    asked = OneShot(merging=merging, out=old)
    words = shlex.split(commands.write(asked, PROGRAM))[3:]
    assert resume(old, commands.read(words, "", "", config.one_shot)) == rows_of(OneShot())


def test_other_options_of_the_first_version_are_still_compared(old):
    edit(old, epochs=7, clients_per_chunk=2)
    with pytest.raises(ValueError, match=r"experiment: epochs was 7, is 30\. Choose"):
        resume(old, FIRST)


def test_the_damping_of_the_first_versions_rounds_was_that_of_kfac(tmp_path):
    merging = config.Merging(("fedfisher_diag", "fedfisher_kfac"))
    asked = config.Federated(merging=merging, out=tmp_path)
    found = commands.contents(asked)
    found["algorithm"] = found.pop("algorithms")
    for damping, is_same in ((1.0, True), (0.5, False)):
        document = {"configuration": found | {"damping": damping}, "environment": {}}
        (tmp_path / records.CONFIG).write_text(json.dumps(document))
        if is_same:
            folders.grown(asked, asked)
            continue
        with pytest.raises(ValueError, match=r"experiment: fedfisher_kfac\.damping was 0\.5, is"):
            folders.grown(asked, asked)


ONE_SHOT_RUNS = sorted(
    path.parent.name for path in STORED.glob("*/config.json") if PROGRAM in path.read_text()
)
MOVED = ("--damping default", "--fedlpa-damping 0.001", "--no-fedlpa-balanced", "--mu 0.001")


@pytest.mark.parametrize("name", ONE_SHOT_RUNS)
def test_stored_runs_continue(tmp_path, name):
    out = tmp_path / name
    shutil.copytree(STORED / name, out)
    stored = json.loads((out / records.CONFIG).read_text())
    command = stored["command"]
    for words in (*MOVED, "--clients-per-chunk auto"):  # they had other names, or no name
        command = command.replace(f" {words} ", " ")
    command = command.replace("--partition fedfisher", "--partition dirichlet_of_client")
    # They took all examples.
    asked = commands.read(
        ["--max-examples", "0", *shlex.split(command)[3:]], "", "", config.one_shot
    )
    default = config.one_shot(asked.data.dataset)
    asked = dataclasses.replace(asked, out=out)
    again, rows = folders.resume(asked, default)
    assert again == asked
    assert rows == records.read_rows(STORED / name / RESULTS, ONE_SHOT) != []
    for method in ("none", asked.merging.algorithms[0]):
        merging = dataclasses.replace(asked.merging, options=((f"{method}.mu", 0.5),))
        changed = dataclasses.replace(asked, merging=merging)
        if method == "none":  # it does not run
            assert folders.resume(changed, default)[1] == rows
            continue
        with pytest.raises(ValueError, match=rf"experiment: {method}\.mu was the default, is 0\.5"):
            folders.resume(changed, default)


def test_runs_from_before_most_options_keep_their_folder():
    """The first runs knew neither the options after `solver` nor those of NIID-Bench."""
    later = ("beta", "min_size", "classes_per_client", "weight_decay", "augment_border")
    later += ("normalize", "fedlpa_damping", "fedlpa_balanced", "mu", "then_rounds", "central")
    first = json.loads(WRITTEN_BY_01)["configuration"]
    before = {k: v for k, v in first.items() if k not in (*later, *folders.WHERE_AND_HOW)}
    digest = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:6]
    asked = OneShot(merging=Merging(max_examples=0))
    assert titles.name(asked) == f"digits-mlp-m5-fedfisher0.1-{digest}"


def test_columns_of_a_run_are_its_rows_by_their_types():
    for folder, columns in (("digits_mlp", ONE_SHOT), ("federated_mnist", records.FEDERATED)):
        rows = records.read_rows(STORED / folder / RESULTS, columns)
        frame = records.frame(STORED / folder)
        assert list(frame) == list(columns)
        for name, column in frame.items():
            assert column == [getattr(row, name) for row in rows], name
            assert len({type(x) for x in column} - {type(None)}) == 1, name


def test_columns_leave_out_damaged_rows_and_need_a_run(tmp_path):
    rows = [records.Row("fedavg", seed, 1, "test", "accuracy", 0.5, 0) for seed in (0, 1)]
    records.write_rows(tmp_path / RESULTS, rows, ONE_SHOT)
    assert records.frame(tmp_path)["seed"] == [0, 1]
    text = (tmp_path / RESULTS).read_text()
    (tmp_path / RESULTS).write_text(text.replace("0,1,1,,test", "0,1,2,,test"))
    assert records.frame(tmp_path)["seed"] == [0]
    (tmp_path / RESULTS).write_text(text.splitlines()[0] + "\n")
    assert records.frame(tmp_path) == {name: [] for name in ONE_SHOT}
    (tmp_path / RESULTS).write_text("seed,value\n0,0.5\n1\n\n")  # no checksums, as in version 0.2
    assert records.frame(tmp_path) == {"seed": [0], "value": [0.5]}
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        records.frame(tmp_path / "nothing")


def test_columns_are_taken_by_tables_of_other_packages():
    frame = records.frame(STORED / "digits_mlp")
    pandas, polars = (pytest.importorskip(name) for name in ("pandas", "polars"))
    assert pandas.DataFrame(frame).shape == polars.DataFrame(frame).shape
