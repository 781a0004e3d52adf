"""More and more examples give what as many at once do, and an interrupted run what a whole one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.knee import __main__ as knee
from experiments.knee import runs as harness

FEW = ("--counts", "8", "40", "0", "--draws", "2", "--epochs", "1", "--algorithms", "fisher_merge")


@pytest.mark.long
def test_the_examples_that_are_new_are_averaged_in():
    """The Fisher of all is that of all at once, whatever was seen before."""
    random = np.random.default_rng(0)
    data = random.normal(size=(30, 3)).astype(np.float32), random.integers(0, 2, 30, np.int32)
    federation = fj.clients.federation(data, [*np.split(np.arange(30), [4]), np.arange(0)])
    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
    trained = fj.training.Trained(jnp.asarray(random.normal(size=(3, 3, 2)), jnp.float32))
    method = fj.algorithms.fedfisher(model, max_examples=None)
    at_once = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
    for counts in ([0], [1, 0], [3, 7, 20, 0]):
        found = list(harness.growing(method, trained, federation, counts, draw=1))
        assert [count for count, _ in found] == counts
        chex.assert_trees_all_close(found[-1][1], at_once, rtol=1e-5)
    few, more = (jax.tree.leaves(sent.values["fisher"])[0][1] for _, sent in found[:2])
    assert not np.allclose(few, more)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("knee")
    assert knee.main([*FEW, "--out", str(out)]) == 0
    return out


@pytest.mark.long
def test_a_run_leaves_each_accuracy_and_the_figure(run):
    _, *lines = (run / "results.csv").read_text().splitlines()
    kinds = ("true", "curvature_propagation", "sampled", "empirical")
    units = [(kind, draw) for kind in kinds for draw in (0, 1)]
    expected = [(k, n, d) for k, d in units for n in (("8", "40", "0") if d == 0 else ("8", "40"))]
    assert [(k, n, int(d)) for _, k, n, d, *_ in (x.split(",") for x in lines)] == expected
    assert (run / "knee.png").read_bytes().startswith(b"\x89PNG")
    assert "| Fisher merging | true |" in (run / "summary.md").read_text()


@pytest.mark.slow
def test_an_interrupted_run_continues_and_another_is_refused(run, capsys):
    path = run / "results.csv"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-2]))
    assert knee.main([*FEW, "--out", str(run)]) == 0
    assert path.read_text() == whole
    assert knee.main([*FEW, "--epochs", "2", "--out", str(run)]) == 1
    assert "epochs was 1, is 2" in capsys.readouterr().err
    path.write_text(whole + "fisher_merge,true\n")
    assert knee.main([*FEW, "--out", str(run)]) == 0
    assert "is damaged: 1 of 21 rows" in capsys.readouterr().out
    assert path.read_text() == whole


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algorithms fedavg", "--algorithms is 'fedavg', did you mean"),
        ("--counts -1", "--counts is -1, expected 0 or more"),
        ("--draws 0", "--draws is 0, expected 1 or more"),
        ("--reference nowhere.npz", "nowhere.npz"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, words, said):
    assert knee.main(["--out", str(tmp_path / "out"), *words.split()]) == 1
    assert said in capsys.readouterr().err
