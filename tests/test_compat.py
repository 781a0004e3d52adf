"""The patch of kfac-jax is applied where it is needed, and only there."""

import subprocess
import sys

import kfac_jax
import pytest

from fisherjax import compat

TWO_LAYERS = """
import jax, jax.numpy as jnp, kfac_jax
{patch}

def model(params, inputs):
    hidden = jax.nn.relu(inputs @ params[0])
    kfac_jax.register_softmax_cross_entropy_loss(hidden @ params[1], jnp.zeros(4, jnp.int32))
    return jnp.zeros(())

arguments = [jnp.ones((3, 5)), jnp.ones((5, 2))], jnp.ones((4, 3))
_, vjp = kfac_jax.layer_tags_vjp(model)[0](arguments)
print([layer.primals.inputs[0].shape for layer in vjp(((jnp.ones((4, 2)),),))])
"""
PATCH = "from fisherjax import compat; compat.patch_kfac_jax()"


def run(program: str) -> subprocess.CompletedProcess:
    """Run it in a process of its own: here the patch may have been applied long ago."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_kfac_jax_finds_layers_with_the_patch():
    result = run(TWO_LAYERS.format(patch=PATCH))
    assert result.stdout.strip() == "[(4, 3), (4, 5)]", result.stderr


def test_the_patch_is_applied_exactly_where_kfac_jax_fails_without_it():
    result = run(TWO_LAYERS.format(patch=""))
    assert (result.returncode != 0) == compat.is_patch_needed(), result.stderr
    if compat.is_patch_needed():
        assert "too many values to unpack" in result.stderr, result.stderr


def test_the_installed_kfac_jax_is_not_mended_yet():
    advice = (
        f"kfac-jax {kfac_jax.__version__} needs no patch: make it the lower bound in "
        "pyproject.toml and .ci/oldest.txt, lift the bound on jax, delete fisherjax/compat.py"
    )
    assert compat.is_patch_needed(jax_version="0.10.2"), advice


def test_patching_twice_is_patching_once():
    compat.patch_kfac_jax()
    first = compat.tag_graph_matcher.eval_jaxpr_eqn
    compat.patch_kfac_jax()
    assert compat.tag_graph_matcher.eval_jaxpr_eqn is first


@pytest.mark.parametrize(
    ("jax_version", "kfac_jax_version", "needed"),
    [
        ("0.7.0", "0.0.8", False),
        ("0.9.1", "0.0.8", False),
        ("0.9.2", "0.0.8", True),
        ("0.10.2", "0.0.8", True),
        ("0.10.3.dev20260101", "0.0.8", True),
        ("0.10.2", "0.0.9", False),
        ("0.10.2", "0.1", False),
    ],
)
def test_guard_reads_both_versions(jax_version, kfac_jax_version, needed):
    assert compat.is_patch_needed(jax_version, kfac_jax_version) == needed
