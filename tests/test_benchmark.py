"""The benchmark: what it counts, compares and writes; no test asserts a time."""

import csv
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.benchmark import (
    apart,
    clients,
    config,
    fisher,
    flops,
    measure,
    pfl,
    plot,
    report,
    torch_peer,
)
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import (
    SHAPES,
    native_convolutions,
    normalize,
    split,
    synthetic,
    workload,
)


def asked(suite: str, **options) -> config.Config:
    return config.filled(config.Config(suite, Path("out"), **options))


def test_cases_take_turns_and_the_first_call_is_kept_apart():
    calls = []
    cases = [Case(name, lambda name=name: calls.append(name)) for name in "AB"]
    measured = measure.measure(Group("work", "units", None, cases), 3, 60.0, lambda _: None)
    assert calls == ["A", "B"] * 4
    assert [len(m.seconds) for m in measured] == [3, 3]


def test_a_case_over_its_budget_is_timed_once_and_the_others_go_on():
    calls = []
    cases = [Case(name, lambda name=name: calls.append(name)) for name in "AB"]
    measured = measure.measure(Group("work", "units", None, cases), 3, 0.0, lambda _: None)
    assert [len(m.seconds) for m in measured] == [1, 1]


def numbers_of(measurements, reference: str | None, beside: str | None = None) -> dict:
    group = Group("work", "units", reference, [m.case for m in measurements], beside)
    rows = measure.rows("train", group, measurements)
    return {(row.case, row.metric): row.value for row in rows if row.metric != "seconds"}


def measured(name: str, seconds: list[float], **options) -> measure.Measurement:
    return measure.Measurement(Case(name, lambda: None, **options), 9.0, seconds, 1, {"loss": 0.5})


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
    peak = measured(f"{measure.MATMUL} 8, bfloat16", [1.0], flops=8.0, precision="bfloat16")
    narrow = measured("narrow", [1.0], flops=2.0, precision="bfloat16")
    wide = measured("wide", [1.0], flops=2.0)
    values = numbers_of([narrow, wide, peak], None)
    assert values["narrow", "fraction_of_peak"] == 0.25
    assert ("wide", "fraction_of_peak") not in values


def test_what_is_extrapolated_is_multiplied_but_not_its_first_call():
    case = Case("slow", lambda: None, times=1e6)
    [result] = measure.measure(Group("work", "units", None, [case]), 1, 60.0, lambda _: None)
    assert result.seconds[0] > 1e3 * result.first


def test_flops_of_a_training_step_are_those_of_its_matrix_products():
    x, w = jnp.ones((7, 3)), {"a": jnp.ones((3, 5)), "b": jnp.ones((5, 2))}
    gradient = jax.grad(lambda w: jnp.cos(jnp.tanh(x @ w["a"]) @ w["b"]).sum())
    forward, weights, inputs = 2 * 7 * (15 + 10), 2 * 7 * (15 + 10), 2 * 7 * 10
    assert flops.count(gradient, w) == forward + weights + inputs


def test_flops_of_a_scan_are_counted_every_round_and_under_jit_and_vmap():
    def rounds(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=4)[0]

    x = jnp.ones((2, 3, 3))
    assert flops.count(jax.jit(jax.vmap(rounds)), x) == 2 * 4 * 2 * 27


def test_products_that_no_result_needs_are_not_counted():
    def rounds(x):
        def body(_, both):
            needed, unneeded = both
            return needed @ needed, unneeded @ needed

        return jax.lax.fori_loop(0, 4, body, (x, x))[0]

    def unneeded(x):
        return jax.lax.scan(lambda y, _: (y @ y, jnp.sum(x @ x)), x, length=3)[0]

    x = jnp.ones((3, 3))
    assert flops.count(jax.jit(rounds), x) == 4 * 2 * 27
    assert flops.count(unneeded, x) == 3 * 2 * 27
    assert flops.count(lambda x: jnp.sum(x @ x) * 0 + x, x) == 2 * 27


def test_flops_of_a_convolution_are_those_of_its_patches():
    x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((5, 5, 3, 4))
    numbers = ("NHWC", "HWIO", "NHWC")
    counted = flops.count(
        lambda x, k: fj.nn.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=numbers),
        *(x, kernel),
    )
    assert counted == 2 * (2 * 4 * 4) * (5 * 5 * 3) * 4


@pytest.mark.parametrize("name", SHAPES)
def test_native_convolutions_compute_the_same_network(name):
    work = workload(asked("train", data="synthetic"), name, 3)
    ours = jax.jit(work.apply)(work.params, jnp.asarray(work.images))
    native = jax.jit(native_convolutions)(work.params, jnp.asarray(work.images))
    np.testing.assert_allclose(native, ours, rtol=1e-4, atol=1e-5)


def test_the_error_of_factors_is_that_of_their_products_whatever_their_scales():
    random = np.random.default_rng(0)
    a, g, b, h = (random.normal(size=(n, n)) for n in (3, 2, 3, 2))
    error = fisher.kronecker_error([(a, g)], [(b, h)])
    difference = np.kron(a, g) - np.kron(b, h)
    assert error == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(np.kron(b, h)))
    assert fisher.kronecker_error([(10 * a, g / 10)], [(a, g)]) < 1e-7


@pytest.mark.parametrize("name", SHAPES)
def test_the_network_in_pytorch_computes_the_same(name):
    pytest.importorskip("torch")
    work = workload(asked("train", data="synthetic"), name, 3)
    net = torch_peer.network(name)
    torch_peer.load(net, name, work.params)
    theirs = net(torch_peer.tensors(work)[0]).detach().cpu().numpy()
    ours = jax.jit(work.apply)(work.params, jnp.asarray(work.images))
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)


def test_one_full_batch_step_in_pytorch_has_the_loss_of_ours():
    pytest.importorskip("torch")
    work = workload(asked("train", data="synthetic"), "lenet", 12)
    partition = split(work, 2)
    outputs = jax.jit(work.apply)(work.params, jnp.asarray(work.images))
    mean = fj.likelihoods.categorical.negative_log_likelihood(outputs, work.labels).mean()
    assert torch_peer.training(work, partition, 1, 12)() == pytest.approx(float(mean), rel=1e-4)


def test_rounds_by_either_dispatch_average_the_same_models():
    images, labels = synthetic((3, 3, 1), 6)
    model = fj.networks.MLP((5,))
    apply = fj.networks.apply_fn(model, normalize)
    params = fj.networks.init(model, jax.random.key(0), images)
    partition = [np.arange(4), np.arange(4, 6)]
    federation = fj.clients.federation((images, labels), partition)
    # One batch a client, so that the order of its examples does not matter.
    ours = pfl.fedavg_round(apply, params, federation, 2, 4, 1)
    theirs = pfl.dispatch(apply, params, (images, labels), partition, 2, 4)()
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_the_network_of_pfl_research_has_its_number_of_parameters():
    shape = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.uint8)
    params = jax.eval_shape(lambda: fj.networks.init(pfl.Network(), jax.random.key(0), shape))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 1_626_442


def test_growth_is_drawn_over_the_number_of_clients_or_uploads(tmp_path):
    def rows(title: str, case: str, **numbers):
        return [measure.Row("clients", title, case, k, None, v, "") for k, v in numbers.items()]

    known = {"median": 2.0, "rate": 50.0, "peak_memory": 2.0**20}
    drawn = clients.panels(
        rows("training", "M=5", clients=5.0, **known) + rows("merge", "9", uploads=9.0, **known)
    )
    assert drawn["clients", "seconds"] == {"training": [(5.0, 2.0)]}
    assert drawn["uploads", "seconds"] == {"merge": [(9.0, 2.0)]}
    assert drawn["uploads", "milliseconds a step, or an upload"]["merge"] == [(9.0, 20.0)]
    assert drawn["clients", "peak memory, MiB"]["training"] == [(5.0, 1.0)]
    plot.growth(drawn, tmp_path / report.PLOT)
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")


def test_a_failure_in_a_process_of_its_own_says_what_happened():
    with pytest.raises(RuntimeError, match="no_such_option"):
        apart.call(clients.streamed, {"no_such_option": 1})


def test_many_metrics_become_lines_of_the_table():
    many = {f"phase{i}_seconds": 1.0 for i in range(12)}
    result = measure.Measurement(Case("a", lambda: None), 1.0, [1.0], None, many)
    rows = measure.rows("pipeline", Group("work", "runs", None, [result.case]), [result])
    table = report.table("work", rows)
    assert len(table.columns) == 2
    assert table.row_count == 3 + 12


@pytest.mark.parametrize("suite", config.SUITES)
def test_a_suite_fills_in_all_that_it_knows(suite):
    filled = asked(suite)
    for name, value in config.SUITES[suite].items():
        if value is not None and not isinstance(value, dict):
            assert getattr(filled, name) == value


def test_files_hold_every_number_with_the_machine_and_the_configuration(tmp_path):
    asked_for = config.filled(config.Config("server", tmp_path, adam_steps=3))
    case = Case("fisherjax, solve", lambda: jnp.ones(2), facts=lambda x: {"size": x.size})
    group = Group("solve", "solves", case.name, [case])
    rows = measure.rows("server", group, measure.measure(group, 2, 60.0, lambda _: None))
    report.write(asked_for, rows, ["a note"])
    plot.bars(rows, tmp_path / report.PLOT)

    with open(tmp_path / report.CSV, newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["repeat"] for row in written if row["metric"] == "seconds"] == ["1", "2"]
    document = json.loads((tmp_path / report.JSON).read_text())
    assert document["configuration"]["adam_steps"] == 3
    assert document["notes"] == ["a note"]
    assert {"jax", "torch", "device", "processor"} <= set(document["environment"])
    assert {row["metric"]: row["value"] for row in document["results"]}["size"] == 2
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")
