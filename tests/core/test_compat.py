"""kfac-jax is patched where that is needed, only there, and `jax` itself stays as it is."""

import subprocess
import sys

import jax
import pytest

from fisherjax._core import compat

PATCHED = "from fisherjax._core import compat; kfac_jax = compat.import_kfac_jax()"
UNPATCHED = "import kfac_jax"

# With a constant and a branch, for what kfac-jax does to closed and to nested traced functions.
TWO_LAYERS = """
import jax, jax.numpy as jnp, numpy as np
{kfac_jax}

CONSTANT = jnp.arange(12.0).reshape(4, 3)

def model(params, inputs):
    inputs = inputs + CONSTANT
    hidden = jax.lax.cond(inputs.sum() > 0, lambda x: x, lambda x: -x, inputs @ params[0])
    kfac_jax.register_softmax_cross_entropy_loss(hidden @ params[1], jnp.zeros(4, jnp.int32))
    return jnp.zeros(())

arguments = [jnp.ones((3, 5)), jnp.ones((5, 2))], jnp.ones((4, 3))
_, vjp = kfac_jax.layer_tags_vjp(model)[0](arguments)
layers = vjp(((jnp.ones((4, 2)),),))
print(np.array_equal(layers[0].primals.inputs[0], 1 + CONSTANT), layers[1].primals.inputs[0].shape)
losses, vjp = kfac_jax.loss_tags_vjp(model)[0](arguments)
print(len(losses), [gradient.shape for gradient in vjp(((jnp.ones((4, 2)),),))])
print(kfac_jax.utils.in_pmap("axis"))
"""
EXPECTED = ["True (4, 5)", "1 [(3, 5), (5, 2)]", "False"]


def run(program: str) -> subprocess.CompletedProcess:
    """Run it in a process of its own: here the patch has been applied already."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.long
def test_kfac_jax_finds_layers_with_the_patch():
    result = run(TWO_LAYERS.format(kfac_jax=PATCHED))
    assert result.stdout.splitlines() == EXPECTED, result.stderr


@pytest.mark.long
def test_the_patch_is_applied_exactly_where_kfac_jax_fails_without_it():
    result = run(TWO_LAYERS.format(kfac_jax=UNPATCHED))
    assert (result.returncode != 0) == compat.is_patch_needed(), result.stderr
    if compat.is_patch_needed():
        causes = ["values to unpack", "jax.core.Effects", "has no attribute 'Effects'"]
        assert any(cause in result.stderr for cause in causes), result.stderr


@pytest.mark.long
def test_the_package_imports_kfac_jax_when_it_is_needed_and_leaves_jax_as_it_is():
    names = "[set(vars(module)) for module in (jax.core, jax.extend.core)]"
    program = f"""
import sys, jax, jax.extend.core, jax.extend.source_info_util
import distrax, flax, optax, scipy  # which import more of jax
before = {names}
import fisherjax._core.compat
loaded = "kfac_jax" in sys.modules
fisherjax._core.compat.import_kfac_jax()
changed = [now ^ old for now, old in zip({names}, before)]
print(loaded, [{{name for name in names if not name.startswith("_")}} for names in changed])
"""
    result = run(program)
    assert result.stdout.strip() == "False [set(), set()]", result.stdout + result.stderr


def test_a_failed_import_leaves_jax_as_it_is():
    compat.import_kfac_jax()  # jax 0.10 warns when one of the names is first looked up
    before = set(vars(jax.core))
    with pytest.raises(ImportError, match="no kfac"), compat._names_at_import():
        raise ImportError("no kfac")
    assert set(vars(jax.core)) == before


BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import jax.numpy as jnp
import fisherjax as fj
model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
for structure in (fj.fisher.kfac, fj.fisher.diagonal, fj.fisher.full):
    try:
        structure(model, jnp.eye(3), fj.Examples(jnp.ones((5, 3))))
    except ImportError as error:
        print(error)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "code", "said"),
    [
        ("immutabledict", "raise ValueError('too old')", "with ValueError: too old"),
        ("immutabledict", "import jax; jax.long_gone", "with AttributeError: "),
        ("tree", "import not_there", "with ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_package_that_fails_while_kfac_jax_is_imported_is_named(tmp_path, package, code, said):
    """It is no fault of the network, and no Fisher falls back to another way without a word."""
    (tmp_path / f"{package}.py").write_text(code)
    result = run(BROKEN.format(folder=str(tmp_path)))
    lines = result.stdout.splitlines()
    assert len(lines) == 3, result.stdout + result.stderr
    for line in lines:
        assert "kfac-jax" in line
        assert said in line
        assert "pip install -U" in line
        assert "layers of this network" not in line
        assert (package in line) or "not_there" in line


@pytest.mark.long
@pytest.mark.parametrize("package", ["distrax", "tensorflow_probability"])
def test_packages_of_distributions_may_fail(tmp_path, package):
    """TensorFlow Probability does not import beside a new JAX, and nothing here needs it.

    `BROKEN` prints errors only.
    """
    (tmp_path / f"{package}.py").write_text("raise ValueError('too old')")
    result = run(BROKEN.format(folder=str(tmp_path)))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


DISTRIBUTIONS = """
import sys, jax.numpy as jnp
from fisherjax._core import compat
losses = compat.import_kfac_jax().loss_functions
deferred = "distrax" not in sys.modules
found = losses.CategoricalLogitsNegativeLogProbLoss(jnp.zeros((2, 3))).dist
import distrax
print(deferred, isinstance(found, distrax.Categorical), losses.distrax.Normal is distrax.Normal)
"""


@pytest.mark.long
def test_kfac_jax_has_the_distributions_of_its_losses_when_it_is_asked():
    result = run(DISTRIBUTIONS)
    assert result.stdout.split() == ["True", "True", "True"], result.stderr


@pytest.mark.long
def test_a_distrax_that_is_imported_before_stays():
    program = "import distrax; mine = distrax.Categorical\n" + DISTRIBUTIONS
    result = run(program + "print(distrax.Categorical is mine, losses.distrax is distrax)")
    assert result.stdout.split() == ["False", "True", "True", "True", "True"], result.stderr


def test_the_installed_kfac_jax_is_not_mended_yet():
    advice = (
        f"kfac-jax {compat.import_kfac_jax().__version__} needs no patch: make it the lower bound "
        "in pyproject.toml and .ci/oldest.txt, lift the bound on jax, and delete "
        "fisherjax/_core/compat.py"
    )
    assert compat.is_patch_needed(jax_version="0.10.2"), advice


def test_patching_twice_is_patching_once():
    first = compat.import_kfac_jax()
    inside = dict(vars(first.tag_graph_matcher))
    assert compat.import_kfac_jax() is first
    assert vars(first.tag_graph_matcher) == inside


@pytest.mark.parametrize(
    ("jax_version", "kfac_jax_version", "needed"),
    [
        ("0.7.0", "0.0.8", False),
        ("0.9.1", "0.0.8", False),
        ("0.9.2", "0.0.8", True),
        ("0.10.2", "0.0.8", True),
        ("0.10.3.dev20260101", "0.0.8", True),
        ("0.12.0.1", "0.0.8", True),
        ("0.10.2", "0.0.9", False),
        ("0.12.0.1", "0.0.9", False),
        ("0.12.0.1", "0.1", False),
    ],
)
def test_guard_reads_both_versions(jax_version, kfac_jax_version, needed):
    assert compat.is_patch_needed(jax_version, kfac_jax_version) == needed
