"""Under masks a run merges what it merges openly, and says what each way costs."""

import csv

import pytest

from experiments.secure import __main__ as secure

FEW = ("--terms", "1", "3", "--dampings", "1", "--num-clients", "3", "--epochs", "1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Blocks")
def test_a_run_leaves_each_merge_and_the_figure(tmp_path):
    assert secure.main([*FEW, "--out", str(tmp_path)]) == 0
    with open(tmp_path / "results.csv", newline="") as file:
        rows = {(row["way"], row["terms"]): row for row in csv.DictReader(file)}
    three = rows["sketched", "3"]
    assert float(three["difference"]) < 1e-4 < 1e-2 < float(rows["sketched", "1"]["difference"])
    for bits in (32, 64):
        masked = rows[f"masked, {bits} bits", "3"]
        assert float(masked["difference"]) < 1e-4
        assert masked["accuracy"] == rows["open", "0"]["accuracy"] == three["accuracy"]
        assert float(masked["sent"]) == pytest.approx(float(three["sent"]) * bits / 32)
    assert (tmp_path / "secure.png").read_bytes().startswith(b"\x89PNG")
    assert "| sketched | 3 | 1 |" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--terms 0", "--terms is 0, expected 1 or more"),
        ("--dampings 0", "--dampings is 0"),
        ("--reference nowhere.npz", "nowhere.npz"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, words, said):
    assert secure.main(["--out", str(tmp_path / "out"), *words.split()]) == 1
    assert said in capsys.readouterr().err
