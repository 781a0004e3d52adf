"""What a newcomer tries in a first hour, in order: from the install line to a method of one's own.

Each step is what stopped or misled somebody once, or what comes right before it. Steps of a part
share their data, network and folder.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from experiments import __main__ as listing
from experiments.harness import records
from experiments.one_shot import __main__ as one_shot
from fisherjax import __main__ as program

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
STARTS = ROOT / "docs/get_started"
CLASSES = fj.likelihoods.categorical
SOURCE = np.random.default_rng(0)
INPUTS = SOURCE.normal(size=(90, 4)).astype(np.float32)
TARGETS = INPUTS[:, :3].argmax(1)
EXAMPLES = fj.Examples(INPUTS, TARGETS)
ROWS = np.array_split(np.argsort(TARGETS), 3)


def apply(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]


def initial(seed=0):
    first, last = jax.random.split(jax.random.key(seed))
    return {"first": jax.random.normal(first, (4, 8)), "last": jax.random.normal(last, (8, 3)) / 3}


MODEL, PARAMS = fj.Model(apply, CLASSES), initial()
HOW = {"optimizer": optax.sgd(0.1), "epochs": 5, "batch_size": 10, "key": jax.random.key(1)}


def run(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)


# Install and look around


def test_01_importing_loads_neither_flax_nor_kfac_jax_nor_scipy_optimize():
    heavy = ("flax", "kfac_jax", "scipy.optimize", "tensorflow_datasets", "matplotlib")
    shown = run("-c", f"import fisherjax, sys; print([x for x in {heavy} if x in sys.modules])")
    assert (shown.stdout, shown.stderr) == ("[]\n", "")


def test_02_the_program_says_what_it_can_do_with_examples(capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  python -m fisherjax {x}" in shown for x in ("merge", "fisher", "inspect"))


@pytest.mark.slow
def test_03_it_checks_the_machine_and_names_the_device():
    shown = run("-m", "fisherjax", "check")
    assert re.match(r"jax \S+, jaxlib \S+, \d+ \w+ device\(s\)\n", shown.stdout)
    assert re.search(r"\d+ of \d+ identities hold\.\n$", shown.stdout)
    # A fault has its remedy beside it.
    assert (shown.returncode == 1) == ("FAULT" in shown.stdout) == ("To mend it" in shown.stdout)


def test_04_the_experiments_are_listed(capsys):
    assert listing.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("one_shot", "federated"))


def test_05_the_help_of_the_first_experiment_is_short(capsys):
    with pytest.raises(SystemExit):
        one_shot.main(["--help"])
    assert len(capsys.readouterr().out.splitlines()) < 160


def test_06_make_lists_what_it_can_do():
    if not (make := shutil.which("make")):
        pytest.skip("no make")
    shown = subprocess.run([make, "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert all(re.search(rf"^{x} +[A-Z]", shown, re.MULTILINE) for x in ("demo", "test", "docs"))


def test_07_each_question_of_the_first_page_has_a_page_that_exists():
    rows = re.findall(r"^\| (.*\?) \| \[.*\]\((\S+)\) \|$", (STARTS / "index.md").read_text(), re.M)
    assert len(rows) >= 6
    assert all((STARTS / page).exists() for _, page in rows)


# Data


def test_08_one_data_set_and_the_rows_of_each_client():
    assert fj.clients.federation((INPUTS, TARGETS), ROWS).sizes.tolist() == [30, 30, 30]


def test_09_clients_as_separate_arrays():
    own = [(INPUTS[:20], TARGETS[:20]), (INPUTS[20:], TARGETS[20:])]
    assert fj.clients.federation(own).sizes.tolist() == [20, 70]


def test_10_batches_of_a_loader():
    batches = ((INPUTS[i : i + 32], TARGETS[i : i + 32]) for i in range(0, 90, 32))
    found = fj.clients.from_batches(batches)
    np.testing.assert_array_equal(found.inputs, INPUTS)


def test_11_inputs_that_are_a_dict():
    both = {"left": INPUTS[:, :2], "right": INPUTS[:, 2:]}
    model = fj.Model(lambda w, x: apply(w, jnp.concatenate([x["left"], x["right"]], 1)), CLASSES)
    clients = fj.clients.federation((both, TARGETS), ROWS)
    trained = fj.training.train(model, PARAMS, clients, **HOW)
    assert trained.loss.shape == (3, 5)


@pytest.mark.parametrize(
    ("targets", "remedy"),
    [(np.eye(3)[TARGETS], "argmax"), (TARGETS.astype(float), "astype"), (TARGETS + 7, "class")],
)
def test_12_labels_of_another_kind_are_refused_with_the_remedy(targets, remedy):
    clients = fj.clients.federation((INPUTS, targets), ROWS)
    with pytest.raises((TypeError, ValueError), match=remedy):
        fj.training.train(MODEL, PARAMS, clients, **HOW)


def test_13_an_array_of_another_shape_is_refused_by_its_client():
    with pytest.raises(ValueError, match="client 1"):
        fj.clients.federation([(INPUTS, TARGETS), (INPUTS[:, :3], TARGETS)])


# A network


def test_14_a_bare_function_is_covered_and_its_fisher_prints_in_a_line():
    kfac = fj.fisher.kfac(MODEL, PARAMS, EXAMPLES)
    assert kfac.coverage == 1
    assert len(str(kfac)) < 100


def test_15_params_of_another_network_are_refused():
    with pytest.raises((TypeError, ValueError)):
        fj.fisher.kfac(MODEL, {"first": jnp.zeros((5, 8)), "last": jnp.zeros((8, 3))}, EXAMPLES)


def test_16_label_smoothing_by_a_loss_of_ones_own():
    def smoothed(z, y):
        log_p = jax.nn.log_softmax(z)
        return -0.9 * log_p[y] - 0.1 * log_p.mean()

    own = fj.Model(apply, fj.likelihoods.custom(smoothed, like=CLASSES))
    ours = fj.Model(apply, fj.likelihoods.smoothed(0.1))
    clients = fj.clients.federation((INPUTS, TARGETS), ROWS)
    losses = [fj.metrics.performance(x, PARAMS, clients).loss for x in (own, ours)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    with pytest.raises(ValueError, match="factor"):  # its true Fisher needs more than a loss
        fj.fisher.kfac(fj.Model(apply, fj.likelihoods.custom(smoothed)), PARAMS, EXAMPLES)


def test_17_padding_of_a_language_model_has_no_loss():
    weights = {"embed": jnp.ones((9, 4)) / 9, "last": jnp.eye(4, 9)}
    model = fj.Model(lambda w, x: w["embed"][x] @ w["last"], CLASSES, positions=lambda x: x > 0)
    tokens, losses = np.array([[1, 2, 3], [4, 5, 6]]), []
    for padding in (0, 2):
        x = np.pad(tokens, ((0, 0), (0, padding)))
        y = np.pad(tokens, ((0, 0), (0, padding)), constant_values=-100)
        losses.append(fj.metrics.performance(model, weights, fj.clients.federation([(x, y)])).loss)
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_18_the_accuracy_of_a_gaussian_is_refused_in_its_own_words():
    model = fj.Model(apply, fj.likelihoods.gaussian)
    with pytest.raises(ValueError, match=r"means of a Gaussian.*metrics\.performance"):
        fj.metrics.accuracy(model, PARAMS, fj.Examples(INPUTS, np.zeros((90, 3))))


def test_19_the_accuracy_of_independent_bits():
    model = fj.Model(apply, fj.likelihoods.bernoulli)
    bits = fj.Examples(INPUTS, np.eye(3, dtype=int)[TARGETS])
    assert 0 <= fj.metrics.accuracy(model, PARAMS, bits) <= 1


# Train and merge


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Return three trained clients and a folder."""
    clients = fj.clients.federation((INPUTS, TARGETS), ROWS)
    trained = fj.training.train(MODEL, PARAMS, clients, **HOW)
    return SimpleNamespace(
        clients=clients, trained=trained, folder=tmp_path_factory.mktemp("first"), models={}
    )


def merged_by(name, desk):
    method = fj.algorithms.make(name, MODEL)
    updates = fj.merging.summarize(method, desk.trained, desk.clients, key=jax.random.key(2))
    return fj.merging.merge(method, PARAMS, updates, desk.clients.weights)


def test_20_each_client_learns(desk):
    assert bool((desk.trained.loss[:, -1] < desk.trained.loss[:, 0]).all())


def test_21_each_client_has_an_accuracy(desk):
    own = fj.metrics.accuracy(MODEL, desk.trained.models, EXAMPLES, stacked=True)
    assert own.shape == (3,)


def test_22_the_mean_is_the_mean(desk):
    desk.models["fedavg"], _, _ = merged_by("fedavg", desk)
    means = jax.tree.map(lambda leaf: leaf.mean(0), desk.trained.models)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), means, desk.models["fedavg"]
    )


def test_23_a_merge_by_curvature_says_how_it_ended(desk):
    desk.models["kfac"], _, info = merged_by("fedfisher_kfac", desk)
    names = {fj.solvers.Status(int(x)).name for x in jax.tree.leaves(info.status)}
    assert names == {"CONVERGED"}


def test_24_an_unknown_method_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="fedfisher_kfac"):
        fj.algorithms.make("fedfisher_kfca", MODEL)


def test_25_clients_improve_the_merge_without_training(desk):
    head, mean = fj.algorithms.analytic_head(MODEL), desk.models["fedavg"]
    better, _, _ = fj.merging.exchange(head, mean, desk.clients, key=jax.random.key(4))
    assert fj.metrics.accuracy(MODEL, better, EXAMPLES) >= fj.metrics.accuracy(
        MODEL, mean, EXAMPLES
    )


def test_26_rounds_report_whole_numbers(desk):
    how = {"optimizer": HOW["optimizer"], "epochs": 1, "batch_size": 10}
    experiment = fj.rounds.federated(MODEL, fj.algorithms.fedavg(), cohort=2, **how)
    state = experiment.init(PARAMS, desk.clients)
    steps = fj.rounds.run(experiment, state, desk.clients, key=jax.random.key(3), rounds=2)
    assert [(type(done.number), done.number) for _, done in steps] == [(int, 0), (int, 1)]


# Files


def path(desk, name):
    return str(desk.folder / f"{name}.safetensors")


def test_27_a_model_comes_back_from_its_file(desk):
    fj.files.save_arrays(path(desk, "kfac"), desk.models["kfac"])
    found = fj.files.load_arrays(path(desk, "kfac"), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, desk.models["kfac"])


def test_28_three_checkpoints_of_another_program_merge_by_one_command(desk, capsys):
    numpy = pytest.importorskip("safetensors.numpy")
    for i in range(3):
        arrays = {name: np.asarray(x[i]) for name, x in desk.trained.models.items()}
        numpy.save_file(arrays, path(desk, f"plain{i}"))
    plain = [path(desk, f"plain{i}") for i in range(3)]
    assert program.main(["merge", path(desk, "mean"), *plain]) == 0
    assert "The mean of 3 plain checkpoints, with equal weights" in capsys.readouterr().out
    found = fj.files.load_arrays(path(desk, "mean"), PARAMS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, desk.models["fedavg"]
    )


def test_29_a_checkpoint_of_another_network_is_refused_in_one_line(desk, capsys):
    fj.files.save_arrays(path(desk, "other"), {"else": np.ones(3, np.float32)})
    words = ["merge", path(desk, "no"), path(desk, "plain0"), path(desk, "other")]
    assert program.main(words) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error:")
    assert len(shown.splitlines()) == 1


def test_30_uploads_merge_by_the_same_command(desk, capsys):
    method = fj.algorithms.make("fedfisher_kfac", MODEL)
    sent = fj.merging.summarize(method, desk.trained, desk.clients, key=jax.random.key(2))
    for i in range(3):
        about = {"algorithm": "fedfisher_kfac", "client": f"client{i}", "examples": 30}
        fj.files.save_update(path(desk, f"sent{i}"), fj.files.of_client(sent, i), **about)
    uploads = [path(desk, f"sent{i}") for i in range(3)]
    assert program.main(["merge", path(desk, "merged"), *uploads]) == 0
    found = fj.files.load_arrays(path(desk, "merged"), PARAMS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, desk.models["kfac"]
    )


def test_31_a_file_is_inspected(desk, capsys):
    assert program.main(["inspect", path(desk, "sent0")]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("fedfisher_kfac", "client0", "params/first"))


# Commands, and a method of one's own


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Write the file of the page on one's own method, with small data, and the words of a run."""
    folder = tmp_path_factory.mktemp("board")
    _, code = (STARTS / "own_method.md").read_text().split("```python\n# my_file.py\n", 1)
    code = code.split("```")[0] + (
        "import numpy as np\n\n\ndef blobs(data_dir):\n    random = np.random.default_rng(0)\n"
        "    y = random.integers(0, 3, 300)\n"
        "    x = (random.normal(size=(300, 8)) + 2 * np.eye(3, 8)[y]).astype(np.float32)\n"
        "    return (x[:200], y[:200]), (x[200:], y[200:])\n\n\nDATASETS = {'blobs': blobs}\n"
    )
    (folder / "my_file.py").write_text(code)
    words = f"--import {folder}/my_file.py --dataset blobs --epochs 1 --seeds 0 --no-central"
    words = [*words.split(), "--partition-seeds", "0", "--out", f"{folder}/run", "--keep-clients"]
    return SimpleNamespace(folder=folder / "run", words=words)


def algorithms_of(board):
    return {
        name for name in records.frame(board.folder)["algorithm"] if name in fj.algorithms.METHODS
    }


def test_32_the_command_runs_a_method_and_data_of_ones_own(board):
    assert one_shot.main([*board.words, "--algorithms", "fedavg", "median"]) == 0
    assert algorithms_of(board) == {"fedavg", "median"}


def test_33_its_options_are_options_of_the_command(board, capsys):
    with pytest.raises(SystemExit):
        one_shot.main([*board.words, "--algorithms", "median", "--help"])
    assert "--median.mean-share" in capsys.readouterr().out


def test_34_the_table_has_its_accuracy_bytes_and_seconds(board):
    rows = re.findall(r"^\| \**(\w+)\** \|(.*)\|$", (board.folder / "summary.md").read_text(), re.M)
    mine, mean = (dict(rows)[name].split("|") for name in ("median", "fedavg"))
    assert float(mine[0].strip(" *")) > 0
    assert mine[3].strip(" *") == mean[3].strip(" *")  # they send the same


def test_35_the_folder_is_extended_without_training_again(board, capsys):
    before = records.frame(board.folder)
    assert one_shot.main([*board.words, "--algorithms", "median@mean_share=1.0"]) == 0
    after = records.frame(board.folder)
    assert algorithms_of(board) == {"fedavg", "median", "median@mean_share=1.0"}

    def accuracies(frame, name):
        rows = zip(frame["algorithm"], frame["value"], frame["metric"], strict=True)
        return [value for one, value, metric in rows if (one, metric) == (name, "accuracy")]

    assert accuracies(after, "median") == accuracies(before, "median")
    assert accuracies(after, "median@mean_share=1.0") == accuracies(before, "fedavg")


def test_36_the_command_that_the_folder_names_runs_again_and_computes_nothing(board):
    text = (board.folder / "summary.md").read_text()
    (line,) = re.findall(r"^python -m experiments\.one_shot (.*)$", text, re.MULTILINE)
    before = (board.folder / "results.csv").read_bytes()
    assert one_shot.main(line.split()) == 0
    assert (board.folder / "results.csv").read_bytes() == before


def test_37_an_unknown_method_is_answered_with_the_nearest(board, capsys):
    assert one_shot.main([*board.words, "--algorithms", "medain"]) == 1
    assert "did you mean" in capsys.readouterr().err


# Notebooks and pictures


@pytest.mark.parametrize("page", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda x: x.stem)
def test_38_a_notebook_says_what_it_shows_and_for_how_long(page):
    first = page.read_text().split("# %%")[1]
    text = " ".join(first.replace("#", "").split())
    assert re.search(r"colab\.research\.google\.com/.*/notebooks/\w+\.ipynb", text)
    assert re.search(r"minutes? on two CPU cores", text)


def test_39_the_first_figure_has_few_bars_and_a_plain_title():
    text = (ROOT / "README.md").read_text()
    assert "Five LeNets, each trained on its own part of MNIST" in text


def test_40_every_method_of_the_table_can_be_made():
    text = (ROOT / "docs/reference/methods.md").read_text()
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert len(names) > 20
    assert all(isinstance(fj.algorithms.METHODS[name].label, str) for name in names)
