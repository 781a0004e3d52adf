"""What a task compiles: programs, their sizes and seconds; no test asserts a time."""

import json
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.benchmark import __main__ as command
from experiments.benchmark import compile_tasks, compiling, measure, plot, programs, report
from experiments.benchmark.programs import Counts, Event, Texts, count, in_fresh_process


def test_an_event_inside_another_counts_once():
    # g calls f, and evaluates something while it is traced, which compiles.
    events = [
        Event("tracing", "f", 0, 2.0, 1.0),
        Event("compiling", "add", 0, 3.5, 0.5),
        Event("tracing", "g", 0, 4.0, 4.0),
        Event("compiling", "g", 0, 7.0, 2.0),
    ]
    found = count(events, 1, 9.0)
    assert (found.programs, found.missed, found.seconds) == (2, 1, 9.0)
    assert (found.tracing, found.lowering, found.compiling) == (3.5, 0.0, 2.5)
    assert found.waiting == 6.0
    assert found.names == {"g": [1, 4.5], "f": [0, 1.0], "add": [1, 0.5]}


def test_what_threads_do_at_once_is_waited_for_once():
    events = [Event("compiling", "f", 0, 5.0, 4.0), Event("compiling", "g", 1, 6.0, 3.0)]
    found = count(events, 0, 9.0)
    assert found.compiling == 7.0
    assert found.waiting == 5.0


def test_programs_are_counted_when_they_compile_and_not_when_they_run_again():
    events, _ = programs.listen()
    double, x = jax.jit(lambda x: 2 * x), jax.device_put(jnp.zeros(3))
    events.clear()
    for _ in range(2):
        double(x).block_until_ready()
    assert count(events, 0, 0.0).programs == 1
    double(x[:2]).block_until_ready()
    assert count(events, 0, 0.0).names["<lambda>"][0] == 2


def test_texts_are_counted_by_operation(tmp_path):
    for name in ("stablehlo", "hlo"):
        (tmp_path / name).mkdir()
    before = """
        module @jit_f {
          func.func public @main(%arg0: tensor<3xf32>) -> tensor<f32> {
            %cst = stablehlo.constant dense<0.0> : tensor<f32>
            %0 = stablehlo.sine %arg0 : tensor<3xf32>
            %1 = stablehlo.reduce(%0 init: %cst) applies stablehlo.add across dimensions = [0]
            return %1 : tensor<f32>
          }
        }
    """
    after = """
        HloModule jit_f

        %fused (p: f32[3]) -> f32[3] {
          %p = f32[3]{0} parameter(0)
          ROOT %sine.1 = f32[3]{0} sine(%p)
        }

        ENTRY %main (x: f32[3]) -> f32[] {
          %x = f32[3]{0} parameter(0)
          %zero = f32[] constant(0)
          %loop = f32[3]{0} fusion(%x), kind=kLoop, calls=%fused
          ROOT %sum = f32[] reduce(%loop, %zero), dimensions={0}, to_apply=%add
        }
    """
    (tmp_path / "stablehlo/jax_ir0_jit_f_compile.mlir").write_text(textwrap.dedent(before))
    for suffix in ("cpu_after_optimizations.txt", "cpu_after_optimizations-live-range.txt"):
        (tmp_path / f"hlo/module_0000.jit_f.{suffix}").write_text(textwrap.dedent(after))
    assert programs.texts(tmp_path) == Texts(operations=3, instructions=3, fusions=1, products=0)


def test_products_of_two_matrices_count_once_for_each_shape(tmp_path):
    x, stack, w = np.ones((3, 4)), np.ones((5, 3, 4)), np.ones(4)
    (tmp_path / "stablehlo").mkdir()

    def products(function, *args) -> int:
        text = jax.jit(function).lower(*args).as_text()
        (tmp_path / "stablehlo/jax_ir0_jit_f_compile.mlir").write_text(text)
        return programs.texts(tmp_path).products

    assert products(lambda x: x @ w, x) == 0
    assert products(lambda x, y: (x @ x.T) @ (y @ y.T), x, x) == 2
    assert products(lambda y: jnp.einsum("bij,bkj->bik", y, y), stack) == 1
    assert products(lambda y: jnp.einsum("bij,bj->bi", y, y[:, 0]), stack) == 0
    assert products(lambda x, y: (x @ x.T, y @ x.T), x, stack) == 2


@pytest.mark.long
def test_a_second_seed_of_equal_shapes_compiles_nothing():
    first, second = in_fresh_process("tiny_kfac", seeds=2)
    assert first.programs > 0
    assert second.programs == 0
    assert first.names["_summarize"][0] == 1


PATTERNS = """
from experiments.benchmark.workloads import synthetic

DATASETS = {"patterns": lambda _: [synthetic((28, 28, 1), number) for number in (800, 200)]}
"""


@pytest.mark.slow
def test_the_run_of_mnist_compiles_at_most_forty_programs(tmp_path):
    # Of as many images as fill every loop: what is compiled does not depend on their number.
    file = tmp_path / "patterns.py"
    file.write_text(PATTERNS)
    options = ["--import", str(file), "--dataset", "patterns", *compile_tasks.LENET]
    options += ["--seeds", "0", "--out", str(tmp_path / "out")]
    [found] = in_fresh_process("experiments.one_shot", *options)
    assert found.programs <= 40, found.names


@pytest.mark.slow
def test_a_run_compiles_at_most_forty_programs_and_another_seed_only_its_start():
    first, second = in_fresh_process("digits", seeds=2)
    assert first.programs <= 40, first.names
    # A command that is called again makes its network anew, and so the program of its start.
    assert {name for name, (number, _) in second.names.items() if number} == {"_start"}


@pytest.mark.slow
def test_a_second_process_reads_programs_from_the_cache_and_the_texts_are_of_all(tmp_path):
    how = {"cache": tmp_path / "cache"}
    [cold] = in_fresh_process("tiny_diagonal", **how)
    [warm] = in_fresh_process("tiny_diagonal", dump=tmp_path / "dump", **how)
    assert cold.missed == cold.programs == warm.programs
    assert warm.missed < cold.missed
    assert len([*(tmp_path / "dump/hlo").glob("*after_optimizations.txt")]) == warm.programs
    sizes = programs.texts(tmp_path / "dump")
    assert sizes.operations > warm.programs
    assert sizes.instructions > sizes.fusions > 0


@pytest.mark.slow
def test_a_task_that_fails_shows_its_error():
    with pytest.raises(programs.Failed, match=r"nothing is no task\. Known: digits, mnist"):
        in_fresh_process("nothing")
    with pytest.raises(programs.Failed, match=r"No module named experiments\.nothing"):
        in_fresh_process("experiments.nothing")
    with pytest.raises(programs.Failed, match="tiny_kfac was not finished after 0 s"):
        in_fresh_process("tiny_kfac", timeout=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("flax_cnn", 824_458), pytest.param("transformer", 21_396_874, marks=pytest.mark.long)],
)
def test_the_networks_have_the_sizes_that_are_stated(name, parameters):
    network, shape, _ = compile_tasks.SUBJECTS[name]
    inputs = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    params = jax.eval_shape(lambda: fj.networks.init(network, jax.random.key(0), inputs))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


def made_up_rows() -> list[report.Row]:
    """Return the rows of a task whose numbers all differ."""
    cold = Counts(7, 7, 30.0, 1.0, 2.0, 4.0, 6.5, {})
    warm, again = Counts(7, 1, 20.0, 1.1, 2.2, 0.5, 3.5, {}), Counts(0, 0, 3.0, 0, 0, 0, 0.0, {})
    measured = [
        compiling.measurement(cold),
        compiling.measurement(warm, Texts(100, 50, 20, 5)),
        compiling.measurement(again),
    ]
    cases = [
        measure.Apart(name, lambda own=own: own)
        for name, own in zip(("cold", "warm cache", "second seed"), measured, strict=True)
    ]
    group = measure.Group("digits", "runs", None, cases)
    return report.rows("compile", group, measure.measure(group, 1, 60.0))


def test_a_summary_has_a_line_for_each_task():
    table = compiling.summary(made_up_rows())
    [line] = table.lines
    shown = dict(zip(table.headings, line, strict=True))
    assert shown == {
        **{"task": "digits", "programs": "7", "operations": "100", "instructions": "50"},
        **{"fusions": "20", "products": "5"},
        **{"missed when warm": "1", "programs of a second seed": "0"},
        **{"tracing, s": "1.0", "lowering, s": "2.0", "compiling, s": "4.0", "other, s": "23.5"},
        **{"warm: compiler, s": "3.5", "warm: other, s": "16.5", "second seed, s": "3.0"},
    }


def test_seconds_are_stacked_a_bar_for_each_run():
    [panel] = plot.stacks(made_up_rows()).axes
    ends = [[bar.get_x() + bar.get_width() for bar in part] for part in panel.containers]
    assert ends[0] == [1.0, 1.1, 0.0]
    assert ends[-1] == pytest.approx([30.5, 20.3, 3.0])
    said = ["30.5 s, 7 programs", "20.3 s, 7 programs", "3.0 s"]
    assert [text.get_text().strip() for text in panel.texts] == said


def test_an_unknown_task_is_refused_with_those_that_are_like_it(tmp_path, capsys):
    options = ["--suite", "compile", "--tasks", "lenet_kfca", "--out", str(tmp_path / "out")]
    assert command.main(options) == 1
    assert "did you mean 'lenet_kfac'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_task_that_fails_is_left_out_and_the_others_are_kept(tmp_path, capsys, monkeypatch):
    def run(name: str, seeds: int = 1, dump: Path | None = None, **_) -> list[Counts]:
        if name == "tiny_layers":
            raise programs.Failed("tiny_layers ended with status 1:\nMemoryError")
        return [Counts(2, 2, 3.0, 0.5, 0.25, 1.0, 1.75, {})] * seeds

    monkeypatch.setattr(programs, "in_fresh_process", run)
    tasks = ["--tasks", "tiny_layers", "tiny_kfac"]
    assert command.main(["--suite", "compile", *tasks, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "left out: tiny_layers ended with status 1:\nMemoryError" in shown
    document = json.loads((tmp_path / report.JSON).read_text())
    assert {row["workload"] for row in document["results"]} == {"tiny_kfac"}
    assert any("MemoryError" in note for note in document["notes"])
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")


def test_a_run_of_which_nothing_is_left_is_an_error(tmp_path, capsys, monkeypatch):
    def run(name: str, **_) -> list[Counts]:
        raise programs.Failed(f"{name} ended with status 1")

    monkeypatch.setattr(programs, "in_fresh_process", run)
    options = ["--suite", "compile", "--tasks", "tiny_kfac", "--out", str(tmp_path)]
    assert command.main(options) == 1
    assert "nothing was measured" in capsys.readouterr().err
