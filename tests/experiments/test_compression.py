"""The command that compresses: what it leaves, that it goes on, what it refuses."""

import re
from pathlib import Path

import pytest

from experiments.compression import __main__ as compression

FEW = (
    *("--epochs", "1", "--max-examples", "20", "--sizes", "0.3", "2"),
    *("--algorithms", "fedavg", "fedfisher_diag"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("compression")
    assert compression.main([*FEW, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_a_run_leaves_bytes_and_accuracies_and_the_figure(run):
    _, *lines = (run / "results.csv").read_text().splitlines()
    found = {tuple(line.split(",")[:2]): line.split(",")[2:] for line in lines if '"' not in line}
    whole = int(found["fedavg", "none"][0])
    assert whole == int(found["fedavg", "none"][1])
    assert int(found["fedfisher_diag", "none"][0]) == 2 * whole
    sizes = [
        int(line.split('"')[2].split(",")[1]) for line in lines if "water filling, 0.3" in line
    ]
    assert len(sizes) == 2
    assert all(0.29 * whole < size <= 0.3 * whole for size in sizes)
    assert (run / "compression.png").read_bytes().startswith(b"\x89PNG")
    assert "| FedAvg | even, 8 bits |" in (run / "summary.md").read_text()


@pytest.mark.long
def test_an_interrupted_run_continues_and_another_is_refused(run, capsys):
    path = run / "results.csv"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert compression.main([*FEW, "--out", str(run)]) == 0
    assert path.read_text() == whole
    assert compression.main([*FEW, "--epochs", "2", "--out", str(run)]) == 1
    assert "epochs was 1, is 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sizes", "0"), "--sizes is 0"),
        (("--algorithms", "fednova"), "did you mean"),
        (("--max-examples", "-1"), "--max-examples is -1"),
    ],
)
def test_bad_options_are_refused_by_name(options, words, tmp_path, capsys):
    assert compression.main([*options, "--out", str(tmp_path / "run")]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.long
def test_the_code_of_the_page_runs_and_prints_what_stands_under_it(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/how_to/compression.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    exec(code, {})
    assert f"It prints {capsys.readouterr().out.strip()}:" in page
