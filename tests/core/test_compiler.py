"""What jaxlib's CPU compiler gets wrong is kept out of our programs, and told about elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import _self_check, devices
from fisherjax._core import compiler

ROOT = Path(__file__).resolve().parents[2]
# Each program runs in a process of its own, fully optimised, with flags that nobody has chosen.
PROGRAM = """
import os, warnings
before = dict(os.environ)
import jax, jaxlib, jax.numpy as jnp, numpy as np
import fisherjax as fj
from fisherjax._core import compiler
assert dict(os.environ) == before, "importing fisherjax has changed the environment"

def shared(rows, weights):
    both = jnp.broadcast_to(weights, (len(rows), *weights.shape))
    return jnp.einsum("gnk,gok->gno", rows, both).max(1)

draw = np.random.default_rng(0).normal
rows, weights = draw(size=(8, 256, 72)), draw(size=(8, 72))
right = (rows @ weights.T).max(1)
ours = compiler.jit(shared)

def assert_right(found):
    np.testing.assert_allclose(found, right, rtol=1e-4)
"""


def run(program, **environment):
    unset = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    own = {name: value for name, value in os.environ.items() if name not in unset}
    own |= {"JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, cwd=ROOT, env=own
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_programs_of_the_library_are_right_without_any_flag():
    run(
        """
warnings.simplefilter("error")  # nor is there anything to warn of
assert_right(ours(rows, weights))
assert_right(ours.lower(rows, weights).compile()(rows, weights))
assert_right(compiler.jit(lambda r, w: ours(r, w) * 1)(rows, weights))  # one within another
assert compiler.eval_shape(ours, rows, weights).shape == right.shape
assert dict(os.environ) == before
"""
    )


@pytest.mark.long
def test_a_program_of_the_user_is_warned_of_once_where_it_may_be_wrong():
    run(
        """
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        jax.jit(lambda r, w: ours(r, w))(rows, weights)
    jax.vmap(ours)(rows[None], weights[None])
    jax.grad(lambda w: ours(rows, w).sum())(weights)
told = [str(w.message) for w in said if "disable_faulty_fusion" in str(w.message)]
assert len(told) == compiler.IS_AFFECTED, said
assert {w.filename for w in said} <= {"<string>"}  # where the user called it
assert all(jaxlib.__version__ in text and compiler.FLAG in text for text in told)
"""
    )


@pytest.mark.long
def test_one_call_makes_the_programs_of_the_user_right():
    run(
        """
warnings.simplefilter("error")
fj.devices.disable_faulty_fusion()
fj.devices.disable_faulty_fusion()
assert os.environ.get("XLA_FLAGS", "").count(compiler.FLAG) == compiler.IS_AFFECTED
assert_right(jax.jit(lambda r, w: ours(r, w))(rows, weights))
assert_right(jax.jit(shared)(rows, weights))
"""
    )


@pytest.mark.skipif(not compiler.IS_AFFECTED, reason="this jaxlib needs no flag")
def test_a_call_that_comes_too_late_says_so(monkeypatch):
    np.asarray(compiler.jit(lambda x: x)(1.0))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=individual_dot")
    devices.disable_faulty_fusion()  # chosen already
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(RuntimeError, match=r"already started.*before JAX computes anything"):
        devices.disable_faulty_fusion()


def test_users_may_forbid_their_own_arithmetic_to_promote():
    draw = np.random.default_rng(0).normal
    params = {"w": draw(size=(3, 2)).astype("float32")}
    data = draw(size=(6, 3)).astype("float32"), np.array([0, 1] * 3)
    model = fj.Model(lambda p, x: x @ p["w"], fj.likelihoods.categorical)
    federation, key = fj.clients.federation(data, [range(3), range(3, 6)]), jax.random.key(0)
    how = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 2}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        trained = fj.training.train(model, params, federation, key=key, **how)
        method = fj.algorithms.fedfisher(model, fisher=fj.fisher.diagonal)
        updates = fj.merging.summarize(method, trained, federation, key=key)
        merged, _, _ = fj.merging.merge(method, params, updates)
    again, _, _ = fj.merging.merge(method, params, updates)
    np.testing.assert_array_equal(merged["w"], again["w"])


def test_only_programs_that_repeat_are_autotuned_on_a_gpu_unless_the_user_has_chosen(monkeypatch):
    x = np.ones((2, 2), np.float32)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    product = compiler.jit(lambda x: x @ x)  # this jaxlib knows the option
    np.testing.assert_array_equal(product(x), x @ x)
    # An option that no compiler knows shows where options are given.
    monkeypatch.setattr(compiler, "_GPU_OPTIONS", {"xla_unknown": 0})
    brief = compiler.jit(lambda x: x @ x)
    with pytest.raises(Exception, match="No such compile option"):
        brief(x)
    compiler.jit(lambda x: x @ x, autotune=True)(x)
    jax.vmap(brief)(x[None])
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    np.testing.assert_array_equal(brief(x), x @ x)


def test_a_planted_fault_is_one_line_that_says_what_to_do():
    def identity(name, computed):
        return _self_check.Identity(name, lambda: (computed, [2.0, -4.0]), "all", "reboot")

    right = identity("right", [2.0, -4.00001])
    wrong, lost = identity("wrong", [2.0, -3.0]), identity("lost", [2.0, np.nan])
    assert _self_check.faults([right]) == ()
    first, second = _self_check.faults([right, wrong, lost])
    assert str(first) == (
        "wrong: wrong by 0.25 of the largest entry. Affected: all. To mend it: reboot."
    )
    assert second.identity == "lost"


@pytest.mark.long
def test_the_check_finds_nothing_once_its_cures_are_taken():
    program = "fj.devices.disable_faulty_fusion(); from fisherjax.__main__ import main\n"
    program += "raise SystemExit(main(['check', '--one-per-core']))"
    lines = run(program).stdout.splitlines()
    number = len(_self_check.IDENTITIES)
    assert lines[-1] == f"{number} of {number} identities hold."


@pytest.mark.long
@pytest.mark.skipif(not compiler.IS_AFFECTED, reason="this jaxlib has none of the three")
def test_the_check_finds_what_is_known_of_this_version():
    found = run("print(*(fault.identity for fault in fj.devices.self_check()), sep='\\n')").stdout
    known = {"a product whose operand is broadcast, and a maximum", "a sum of a broadcast"}
    assert known <= set(found.splitlines())
