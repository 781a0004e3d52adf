"""What a file of `--import` defines is refused on one line that names the file and the entry."""

import re
from pathlib import Path

import numpy as np
import pytest

from experiments.harness import choices, commands, config
from tests.conftest import own_choices

HEAD = """
import numpy as np, sys
import fisherjax as fj
from fisherjax.algorithms import Row, fedavg
x, t = np.zeros((20, 4), "f4"), np.arange(20) % 3
"""


def written(folder: Path, text: str) -> str:
    path = folder / "own.py"
    path.write_text(HEAD + text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("METHODS = [1]", "METHODS is list, expected a dict"),
        ("METHODS = {'m': 'fedavg'}", "'m' in METHODS is 'fedavg', expected a fisherjax"),
        ("METHODS = {'m': Row('M', 'p', 'weights', 42)}", "'m' in METHODS has the factory 42"),
        ("METHODS = {'m': Row(3, 'p', 'weights', fedavg)}", "has the label 3, expected a text"),
        ("METHODS = {'m': Row('M', 'p', 'w', fedavg, 'sum')}", "has the laws 'sum', expected some"),
        ("METHODS = {'m': Row('M', 'p', 'w', fedavg, gives=1)}", "gives 1, expected one of model"),
        ("METHODS = {3: 4}", "3 in METHODS is no word"),
        ("NETWORKS = {'n': lambda: None}", "'n' in NETWORKS is .*num_classes"),
        ("NETWORKS = {'n': 3}", "'n' in NETWORKS is 3, expected a function"),
        ("DATASETS = {'d': lambda: None}", "'d' in DATASETS is .*expected a function of the fold"),
        ("sys.exit(0)", "fails, line 6: SystemExit"),
    ],
)
def test_an_entry_that_is_none_is_refused_when_the_file_is_read(tmp_path, text, said, capsys):
    path = written(tmp_path, text)
    run = commands.command("p", "", config.one_shot)(lambda asked, console: None)
    with own_choices():
        assert run(["--import", path]) == 1
    error = capsys.readouterr().err
    assert re.search(f"error: --import {re.escape(path)}.*{said}", error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lambda num_classes: (lambda x: x)", "returned .*, expected a module of flax.linen"),
        ("lambda num_classes: 1 / 0", "fails, own.py line 6: ZeroDivisionError"),
    ],
)
def test_a_network_that_is_no_module_is_refused(tmp_path, text, said):
    path = written(tmp_path, f"NETWORKS = {{'n': {text}}}")
    with own_choices():
        choices.add([path])
        with pytest.raises(ValueError, match=f"'n' in NETWORKS {said}"):
            choices.MODELS["n"](num_classes=3)


def test_a_factory_that_makes_no_algorithm_is_refused(tmp_path):
    path = written(tmp_path, "METHODS = {'m': Row('M', 'p', 'weights', lambda mu=1: 42)}")
    said = "'m' in METHODS: its factory returned 42, expected a fisherjax.algorithms.Algorithm"
    with own_choices():
        choices.add([path, path], ["m@mu=2"])
        for name in ("m", "m@mu=2"):
            with pytest.raises(ValueError, match=f"{re.escape(path)}: {said}"):
                choices.METHODS[name].factory()


OWN_DATA = "fj.datasets.Dataset(x, t{}, {}, 1.0, (0.0,), (1.0,), 'd')"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("None", "returned None, expected training and test data"),
        ("(x, t)", r"returned a tuple of 2 \(ndarray, ndarray\), expected training"),
        ("((x, t),)", "returned a tuple of 1"),
        ("((x, t, t), (x, t))", "returned a tuple of 2"),
        ("(({'a': x}, t), (x, t))", "inputs of the training data are a dict, expected an array"),
        ("((x, t), ([['a']] * 20, t))", "inputs of the test data are a list of 20"),
        ("((t, t), (t, t))", r"inputs of the training data are an array int64\[20\]"),
        ("(([[1], [1, 2]], t), (x, t))", "'d' in DATASETS fails: ValueError"),
        ("((x, t), (x[:0], t[:0]))", "the test data have inputs .*N of 1 or more"),
        ("((x, t[:5]), (x, t))", r"inputs \[20, 4\] and targets \[5\], expected targets"),
        ("((x, t), (x[:, :2], t))", r"test data are an array float32\[20, 2\], expected"),
        ("((x, t), (x.astype('u1'), t))", "test data are an array uint8.*dtype of the training"),
        ("((x, t + .7), (x, t))", "labels of the training data are float64, .*: number the cl"),
        ("((x, t), (x, t + 1.0))", r"test data are float64, such as 1.0.*: convert them with"),
        ("((x, t > 0), (x, t > 0))", r"are bool, such as False.*: convert them with"),
        ("((x, t.astype(str)), (x, t))", "are <U21, such as '0'.*: number the classes"),
        ("((x, t - 1), (x, t))", "are as low as -1, expected integers from 0"),
        ("((x, t + 2**32), (x, t))", r"\(the largest label is 4294967298\) are more than the 20"),
        ("((x, t), (x, t * 1000000))", "2000001 classes .* are more than the 20 training"),
        (f"2 * ({OWN_DATA.format('+.7', 3)},)", "labels of the training data are float"),
        (f"2 * ({OWN_DATA.format('', 2)},)", "num_classes is 2, expected 3 or more"),
        (f"2 * ({OWN_DATA.format('', 2**32)},)", "4294967296 classes .* more than the 20"),
        (f"({OWN_DATA.format('', 3)}, (x, t))", "expected training and test data, both"),
    ],
)
def test_data_that_are_no_inputs_and_labels_are_refused_by_the_file_and_entry(tmp_path, data, said):
    path = written(tmp_path, f"DATASETS = {{'d': lambda folder: {data}}}")
    with own_choices():
        choices.add([path])
        with pytest.raises(ValueError, match=f"--import {re.escape(path)}: 'd' in DATA") as stop:
            choices.load("d", None)
    assert re.search(said, str(stop.value))


def test_integer_labels_of_every_width_and_lists_are_read(tmp_path):
    data = "((x, t.astype('u8')), (x, list(t)))"
    path = written(tmp_path, f"DATASETS = {{'d': lambda folder: {data}}}")
    with own_choices():
        choices.add([path])
        train, test = choices.load("d", None)
    for split in (train, test):
        assert split.targets.dtype == np.int32
        assert split.num_classes == 3
        np.testing.assert_array_equal(split.targets, np.arange(20) % 3)
