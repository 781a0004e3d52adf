"""The accelerator's script: its limits, what it keeps, and the roofline's counts."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.benchmark import (
    accelerator,
    accelerator_parts,
    accelerator_programs,
    peers,
    roofline,
    workloads,
)
from experiments.benchmark.config import Config, filled
from experiments.benchmark.flops import Products, products


def numbers(out) -> list[dict]:
    return [json.loads(line) for line in (out / accelerator.NUMBERS).read_text().splitlines()]


def test_every_part_has_a_limit_and_those_of_a_run_fit_into_eight_minutes():
    assert set(accelerator.LIMITS) == {*accelerator_parts.PARTS, *accelerator_programs.PARTS}
    assert sum(accelerator.LIMITS[part] for part in accelerator.UNKNOWN) <= 480


def test_a_part_that_crashes_keeps_what_it_had_written(tmp_path, monkeypatch):
    def part(small, limit):
        yield "first", 1.5, "s"
        raise MemoryError

    monkeypatch.setitem(accelerator._MEASURE, "solve", part)
    with pytest.raises(MemoryError):
        accelerator.main(["--parts", "solve", "--here", "--out", str(tmp_path)])
    assert numbers(tmp_path) == [{"part": "solve", "what": "first", "value": 1.5, "unit": "s"}]


@pytest.mark.long
def test_a_part_that_takes_too_long_is_stopped_and_the_next_one_runs(tmp_path, monkeypatch):
    limits = {"tf32": 0.2, "solve": 0.2}
    monkeypatch.setattr(accelerator, "LIMITS", limits)
    start = time.monotonic()
    assert accelerator.main(["--parts", *limits, "--out", str(tmp_path)]) == 0
    assert time.monotonic() - start < 30
    outcomes = {line["part"]: line["value"] for line in numbers(tmp_path)}
    assert outcomes == dict.fromkeys(limits, "stopped after 0 s")
    assert "| tf32 | outcome | stopped after 0 s |" in (tmp_path / accelerator.TABLE).read_text()


def test_no_part_begins_when_no_time_is_left(tmp_path, monkeypatch):
    def stop(asked, part, limit):
        time.sleep(0.05)
        return "finished"

    monkeypatch.setattr(accelerator, "_in_own_process", stop)
    words = ["--parts", "tf32", "solve", "--minutes", "0.0005", "--out", str(tmp_path)]
    assert accelerator.main(words) == 0
    outcomes = [(line["part"], line["value"]) for line in numbers(tmp_path)]
    assert outcomes == [("tf32", "finished after 0 s"), ("solve", "not begun: no time was left")]


def test_an_unknown_part_is_refused(tmp_path, capsys):
    assert accelerator.main(["--parts", "slove", "--out", str(tmp_path)]) == 1
    assert "did you mean 'solve'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("part", accelerator_parts.PARTS)
def test_a_small_part_runs_to_its_end(tmp_path, part):
    assert accelerator.main(["--parts", part, "--small", "--here", "--out", str(tmp_path)]) == 0
    *found, last = numbers(tmp_path)
    assert last["what"] == "environment"
    assert found
    values = [line["value"] for line in found if isinstance(line["value"], float)]
    assert np.isfinite(values).all()


def test_one_step_of_clients_side_by_side_in_pytorch_has_the_loss_of_ours():
    pytest.importorskip("torch")
    asked = filled(Config("train", out=None, data="synthetic", batch_size=6))
    work = workloads.workload(asked, "lenet", 12)
    outputs = jax.jit(work.model.apply)(work.params, work.images)
    mean = fj.likelihoods.categorical.negative_log_likelihood(outputs, work.labels).mean()
    theirs = peers.vmapped_training(work, asked, np.split(np.arange(12), 2)).run()
    assert theirs == pytest.approx(float(mean), rel=1e-4)


# The roofline


def test_products_in_the_highest_precision_are_counted_apart():
    def both(x):
        return jnp.matmul(x, x, precision="highest") + x @ x

    assert products(both, jnp.ones((3, 3))) == Products(108.0, 216.0, 54.0)


def test_kernels_are_counted_by_the_rounds_of_their_loops():
    text = """HloModule jit_f

%fused (p: f32[3]) -> f32[3] {
  %p = f32[3]{0} parameter(0)
  ROOT %sine = f32[3]{0} sine(%p)
}

%body (carry: (f32[3], s32[])) -> (f32[3], s32[]) {
  %carry = (f32[3]{0}, s32[]) parameter(0)
  %value = f32[3]{0} get-tuple-element(%carry), index=0
  %loop = f32[3]{0} fusion(%value), kind=kLoop, calls=%fused
  %next = s32[] add(%count, %one)
  ROOT %both = (f32[3]{0}, s32[]) tuple(%loop, %next)
}

%condition (carry: (f32[3], s32[])) -> pred[] {
  ROOT %less = pred[] compare(%count, %four), direction=LT
}

%small (x: f32[3]) -> f32[3] {
  ROOT %copy = f32[3]{0} copy(%x)
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  %w = (f32[3]{0}, /*index=1*/s32[]) while(%t), condition=%condition, body=%body, ROUNDS
  %c = f32[3]{0} call(%x), to_apply=%small
  %e = f32[3]{0} conditional(%i, %x, %x), branch_computations={%small, %fused}
  ROOT %dot = f32[] dot(%c, %c), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
""".replace("ROUNDS", 'backend_config={"known_trip_count":{"n":"4"}}')
    # Four rounds of two kernels and a comparison, the call, a branch, and the product.
    assert roofline.launches(text) == 4 * 3 + 1 + 1 + 1


def test_kernels_of_a_compiled_loop_grow_with_its_length():
    def kernels(length):
        def rounds(x):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=length)[0]

        return roofline.launches(jax.jit(rounds).lower(jnp.ones((8, 8))).compile().as_text())

    few, more, most = map(kernels, (4, 8, 12))
    assert more - few == most - more >= 4


@pytest.mark.slow
def test_a_line_compares_a_measured_phase_with_its_floors():
    [training] = [x for x in roofline.PHASES if (x.network, x.phase) == ("lenet", "training step")]
    shown = dict(zip(roofline._HEADINGS, roofline.line(training), strict=True))
    one = roofline.line(training._replace(clients=1))
    assert float(shown["GFLOP"]) == pytest.approx(5 * float(one[1]), rel=0.01)
    assert float(shown["measured, µs"]) == pytest.approx(237, abs=1)
    floor = float(shown["bytes, µs"])
    assert float(shown["over the larger"]) >= 1
    assert floor > 0
