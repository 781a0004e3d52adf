"""The benchmark: what it counts, compares and writes; no test asserts a time."""

import csv
import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_hex

import fisherjax as fj
from experiments.benchmark import __main__ as command
from experiments.benchmark import config, growing, measure, peers, plot, report, rounds, workloads
from experiments.benchmark.flops import products
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import NETWORKS, Workload, classifier, synthetic, workload
from experiments.harness import figures


def asked(suite: str, **options) -> config.Config:
    return config.filled(config.Config(suite, Path("out"), **options))


@pytest.mark.parametrize(("budget", "timed"), [(60.0, 3), (0.0, 1)])
def test_cases_take_turns_the_first_call_is_kept_apart_and_a_budget_ends_them(budget, timed):
    calls = []
    cases = [Case(name, lambda name=name: calls.append(name)) for name in "AB"]
    measured = measure.measure(Group("work", "units", None, cases), 3, budget)
    assert calls == ["A", "B"] * (1 + timed)
    assert [len(m.seconds) for m in measured] == [timed, timed]


def test_results_are_compared_with_the_reference_where_there_is_one():
    def case(name: str, result: float) -> Case:
        return Case(name, lambda: result, compare=lambda own, other: {"error": own - other})

    for reference, facts in (("peer", [{"error": 1.0}, {"error": 0.0}]), ("gone", [{}, {}])):
        group = Group("work", "units", reference, [case("ours", 3.0), case("peer", 2.0)])
        assert [m.facts for m in measure.measure(group, 1, 60.0)] == facts


def numbers_of(measurements, reference: str | None, beside: str | None = None) -> dict:
    group = Group("work", "units", reference, [], beside)
    rows = report.rows("train", group, measurements)
    return {(row.case, row.metric): row.value for row in rows if row.metric != "seconds"}


def measured(name: str, seconds: list[float], **options) -> measure.Measurement:
    return measure.Measurement(name, 9.0, seconds, 1, {"loss": 0.5}, **options)


def test_rates_and_ratios_are_of_the_median_and_of_a_unit_of_work():
    ours = measured("ours", [1.0, 2.0, 30.0], units=10.0)
    peer = measured("peer", [4.0], units=5.0)
    values = numbers_of([ours, peer], "peer", "ours")
    assert values["ours", "rate"] == 5.0
    assert values["ours", "speedup"] == 4.0
    assert values["peer", "speedup"] == 1.0
    assert values["peer", "cost"] == 4.0
    assert values["ours", "first_call"] == 9.0
    assert values["ours", "loss"] == 0.5


def test_the_fraction_of_the_peak_is_of_the_product_of_the_same_precision():
    peak = measured(f"{report.MATMUL} 8, bfloat16", [1.0], flops=8.0, precision="bfloat16")
    narrow = measured("narrow", [1.0], flops=2.0, precision="bfloat16")
    wide = measured("wide", [1.0], flops=2.0)
    values = numbers_of([narrow, wide, peak], None)
    assert values["narrow", "fraction_of_peak"] == 0.25
    assert ("wide", "fraction_of_peak") not in values


def test_what_is_extrapolated_is_multiplied_but_not_its_first_call():
    case = Case("slow", lambda: None, times=1e6)
    result = measure.alone(case, 1)
    assert result.seconds[0] > 1e3 * result.first


def test_flops_of_a_training_step_are_those_of_its_matrix_products():
    x, w = jnp.ones((7, 3)), {"a": jnp.ones((3, 5)), "b": jnp.ones((5, 2))}
    gradient = jax.grad(lambda w: jnp.cos(jnp.tanh(x @ w["a"]) @ w["b"]).sum())
    forward, weights, inputs = 2 * 7 * (15 + 10), 2 * 7 * (15 + 10), 2 * 7 * 10
    assert products(gradient, w).flops == forward + weights + inputs


def test_flops_of_a_scan_are_counted_every_round_and_under_jit_and_vmap():
    def rounds(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=4)[0]

    x = jnp.ones((2, 3, 3))
    assert products(jax.jit(jax.vmap(rounds)), x).flops == 2 * 4 * 2 * 27


def test_products_that_no_result_needs_are_not_counted():
    def rounds(x):
        def body(_, both):
            needed, unneeded = both
            return needed @ needed, unneeded @ needed

        return jax.lax.fori_loop(0, 4, body, (x, x))[0]

    def unneeded(x):
        return jax.lax.scan(lambda y, _: (y @ y, jnp.sum(x @ x)), x, length=3)[0]

    x = jnp.ones((3, 3))
    assert products(jax.jit(rounds), x).flops == 4 * 2 * 27
    assert products(unneeded, x).flops == 3 * 2 * 27
    assert products(lambda x: jnp.sum(x @ x) * 0 + x, x).flops == 2 * 27


def test_flops_of_a_convolution_are_those_of_its_patches():
    x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((5, 5, 3, 4))
    numbers = ("NHWC", "HWIO", "NHWC")
    counted = products(
        lambda x, k: fj.nn.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=numbers),
        *(x, kernel),
    )
    assert counted.flops == 2 * (2 * 4 * 4) * (5 * 5 * 3) * 4


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_native_convolutions_compute_the_same_network(name):
    work = workload(asked("train", data="synthetic"), name, 3)
    ours = jax.jit(work.model.apply)(work.params, work.images)
    native = jax.jit(workloads.native_convolutions(work.model).apply)(work.params, work.images)
    np.testing.assert_allclose(native, ours, rtol=1e-4, atol=1e-5)


def test_the_error_of_factors_is_that_of_their_products_whatever_their_scales():
    random = np.random.default_rng(0)
    a, g, b, h = (random.normal(size=(n, n)) for n in (3, 2, 3, 2))
    error = peers.kronecker_error([(a, g)], [(b, h)])
    difference = np.kron(a, g) - np.kron(b, h)
    assert error == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(np.kron(b, h)))
    assert peers.kronecker_error([(10 * a, g / 10)], [(a, g)]) < 1e-7


@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_in_pytorch_computes_the_same(name):
    pytest.importorskip("torch")
    work = workload(asked("train", data="synthetic"), name, 3)
    theirs = peers.network(work)(peers.tensors(work)[0]).detach().cpu().numpy()
    ours = jax.jit(work.model.apply)(work.params, work.images)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)


def test_one_full_batch_step_in_pytorch_has_the_loss_of_ours():
    pytest.importorskip("torch")
    work = workload(asked("train", data="synthetic"), "lenet", 12)
    outputs = jax.jit(work.model.apply)(work.params, work.images)
    mean = fj.likelihoods.categorical.negative_log_likelihood(outputs, work.labels).mean()
    theirs = peers.training(work, asked("train", batch_size=12), 2).run()
    assert theirs == pytest.approx(float(mean), rel=1e-4)


@pytest.mark.long
def test_rounds_by_either_dispatch_average_the_same_models():
    images, labels = synthetic((3, 3, 1), 6)
    network = fj.networks.MLP((5,))
    params = fj.networks.init(network, jax.random.key(0), images)
    work = Workload("mlp", classifier(network), params, images, labels)
    partition = [np.arange(4), np.arange(4, 6)]
    federation = fj.clients.federation((images, labels), partition)
    # One batch a client, so that the order of its examples does not matter.
    told = asked("pfl", epochs=2, batch_size=4)
    ours = rounds.fedavg_round(work, told, federation, 1)
    theirs = rounds.dispatch(work, told, partition)()
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_the_network_of_pfl_research_has_its_number_of_parameters():
    shape = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.uint8)
    params = jax.eval_shape(lambda: fj.networks.init(rounds.NETWORK, jax.random.key(0), shape))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 1_626_442


def test_growth_is_drawn_over_the_number_of_clients_or_uploads(tmp_path):
    def rows(title: str, case: str, **numbers):
        return [report.Row("clients", title, case, k, None, v, "") for k, v in numbers.items()]

    known = {"median": 2.0, "rate": 50.0, "peak_memory": 2.0**20}
    measured = rows("training", "M=5", clients=5.0, **known)
    measured += rows("merge", "9", uploads=9.0, **known)
    panels = plot.growth(measured).axes
    titles = [[line.get_label() for line in panel.get_lines()] for panel in panels]
    drawn = [[tuple(*line.get_xydata()) for line in panel.get_lines()] for panel in panels]
    # Row by row: seconds, milliseconds of a step or an upload, MiB; the columns share an axis.
    assert titles == 3 * [["training"], ["merge"]]
    assert drawn == [[(x, y)] for y in (2.0, 20.0, 1.0) for x in (5.0, 9.0)]
    assert all(panels[i].get_ylim() == panels[i + 1].get_ylim() for i in (0, 2, 4))


def test_panels_of_like_times_share_an_axis_and_others_do_not():
    def rows(other: float):
        values = {("a", "x"): 2.0, ("b", "x"): other}
        return [report.Row("train", *place, "median", None, v, "s") for place, v in values.items()]

    limits = [[panel.get_xlim() for panel in plot.bars(rows(x)).axes] for x in (3.0, 300.0)]
    assert limits[0][0] == limits[0][1]
    assert limits[1][0] != limits[1][1]


def test_bars_of_what_is_compared_with_are_grey_and_algorithms_have_their_colour():
    row = functools.partial(report.Row, "rounds", "work")
    cases = ["alone", "fedavg", "fisherjax, vmapped", f"{report.MATMUL} 8, default"]
    rows = [row(case, "median", None, 1.0, "s") for case in cases]
    [panel] = plot.bars([*rows, row("fedavg", "cost", None, 1.0, "x alone")]).axes
    [alone, fedavg, ours] = [to_hex(bar.get_facecolor()) for bar in panel.patches]
    assert alone == figures.GREY
    assert fedavg == figures.style("fedavg")["color"]
    assert ours not in (alone, fedavg)


def test_a_process_of_its_own_says_what_went_wrong_and_has_its_own_environment():
    assert measure.in_own_process(os.getenv, "FISHERJAX_TEST", FISHERJAX_TEST="set") == "set"
    assert "FISHERJAX_TEST" not in os.environ
    with pytest.raises(FileNotFoundError, match="no_such_folder"):
        measure.in_own_process(os.listdir, "no_such_folder")


def test_many_metrics_become_lines_of_the_table():
    many = {f"phase{i}_seconds": 1.0 for i in range(12)}
    result = measure.Measurement("a", 1.0, [1.0], None, many)
    rows = report.rows("pipeline", Group("work", "runs", None, []), [result])
    table = report.table(rows)
    assert table.headings == ("", "a")
    assert len(table.lines) == 3 + 12


def test_a_table_shows_shares_in_per_cent_and_says_what_ratios_are_of():
    peer = measure.Measurement("peer", 1.0, [3.0], 2**21, {"wasted_steps": 0.25})
    group = Group("work", "samples", "peer", [])
    table = report.table(report.rows("train", group, [peer]))
    assert table.title == "work; speedup: x peer"
    shown = dict(zip(table.headings, table.lines[0], strict=True))
    assert shown["median, s"] == "3"
    assert shown["samples/s"] == "0.333"
    assert shown["peak, MiB"] == "2"
    assert shown["wasted steps, %"] == "25"


@pytest.mark.parametrize("suite", config.SUITES)
def test_a_suite_has_a_function_and_fills_in_all_that_it_knows(suite):
    assert callable(command.GROUPS[suite])
    filled = asked(suite)
    for name, value in config.SUITES[suite].items():
        if value is not None:
            assert getattr(filled, name) == value


def test_exponents_of_a_power_law_are_its_own_over_all_sizes_and_at_the_end():
    sizes = [1, 10, 1_000]
    assert growing.exponents(sizes, [3 * x**1.5 for x in sizes]) == pytest.approx((1.5, 1.5))
    assert growing.exponents(sizes, [5, 5, 500])[1] == pytest.approx(1)


def test_what_grows_is_chosen_and_what_would_take_long_is_left_out():
    options = {"over": ("parameters", "layers"), "widths": (8, 9_000), "layers": (2, 99)}
    found = growing.groups(asked("growth", **options), lambda _: None)
    assert {group.workload: [case.name for case in group.cases] for group in found} == {
        "parameters: fedfisher_diag, MLPs of two layers": ["8", "9000"],
        "parameters: fedfisher_kfac, MLPs of two layers": ["8"],
        "layers: fedfisher_kfac, blocks that are scanned": ["2", "99"],
        "layers: fedfisher_kfac, blocks that are unrolled": ["2"],
    }


def test_growth_is_drawn_over_what_grows_and_summed_up_in_exponents():
    def of(size: int) -> dict[str, float]:
        known = {"layers": size, "before_bytes": 2**20, "programs": 4, "instructions": 100 * size}
        return known | {"processor_seconds": size**2, "first_processor_seconds": 2}

    title = "layers: fedfisher_kfac, blocks"
    cases = [measure.Measurement(f"{n}", 1.0, [0.5], (1 + n) * 2**20, of(n)) for n in (2, 4, 8)]
    rows = report.rows("growth", Group(title, "runs", None, []), cases)
    [line] = growing.summary(rows).lines
    assert line == [title, "2.00 (2.00)", "0.00 (0.00)", "0.00 (0.00)", *["1.00 (1.00)"] * 2]
    drawn = plot.growth(rows, growing.VALUES).axes
    assert [panel.get_ylabel() for panel in drawn] == list(growing.VALUES)
    assert list(drawn[-1].lines[0].get_ydata()) == [2, 4, 8]


@pytest.mark.parametrize("written", ["--suite {}", "--suite={}"])
def test_every_core_is_a_device_for_what_is_spread_over_them(written):
    found = {
        s for s in config.SUITES if command._spreads([*written.format(s).split(), "--out", "x"])
    }
    assert found == {"devices", "pipeline"}


def test_files_hold_every_number_with_the_machine_and_the_configuration(tmp_path):
    asked_for = config.filled(config.Config("server", tmp_path, adam_steps=3))
    case = Case("fisherjax, solve", lambda: jnp.ones(2), facts=lambda x: {"size": x.size})
    group = Group("solve", "solves", case.name, [case])
    rows = report.rows("server", group, measure.measure(group, 2, 60.0))
    report.write(asked_for, rows, ["a note"])

    with open(tmp_path / report.CSV, newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["repeat"] for row in written if row["metric"] == "seconds"] == ["1", "2"]
    document = json.loads((tmp_path / report.JSON).read_text())
    assert document["configuration"]["adam_steps"] == 3
    assert document["notes"] == ["a note"]
    assert {"jax", "torch", "device", "processor"} <= set(document["environment"])
    assert {row["metric"]: row["value"] for row in document["results"]}["size"] == 2
