"""Pictures of what four methods do inside: the files, the numbers beside them, what is refused."""

import re

import pytest

from experiments.baselines import __main__ as command

SMALL = ["--epochs", "2", "--open-epochs", "1", "--dense-epochs", "1"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    out = tmp_path_factory.mktemp("pictures") / "here"
    assert command.main([*SMALL, "--algorithms", "otfusion", "pfnm", "--out", str(out)]) == 0
    return out


@pytest.mark.long
def test_each_method_leaves_its_picture_and_its_numbers(drawn):
    files = {path.name for path in drawn.iterdir()}
    assert files == {"otfusion.png", "pfnm.png", "summary.md", "config.json"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.glob("*.png"))
    summary = (drawn / "summary.md").read_text()
    # Clients of one start keep their units, and then OTFusion is FedAvg.
    rows = re.findall(r"\| one start \| (\S+) % \| (\S+) % \| (\d+) \| (\d+) \|", summary)
    ((average, fused, *stay),) = rows
    assert average == fused
    assert stay == ["64", "64"]


@pytest.mark.slow
def test_the_same_folder_is_drawn_again_and_another_experiment_is_refused(drawn, capsys):
    other = ["--epochs", "3", *SMALL[2:], "--algorithms", "otfusion", "--out", str(drawn)]
    assert command.main(other) == 1
    assert "another experiment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithms", "fedavg"], "--algorithms is 'fedavg'"),
        (["--epochs", "0"], "--epochs is 0, expected 1 or more"),
        (["--seed", "-1"], "--seed is -1, expected 0 or more"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(arguments, said, tmp_path, capsys):
    assert command.main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
