"""Networks with weights compute what PyTorch computes, and their params are state dicts again.

The numbers were recorded with PyTorch 2.14.1, torchvision 0.29.1, ccexam 1.0.0 and
efficientnet_lite_pytorch 0.1.0 (ResNet-20 and 32 as in akamaster/pytorch_resnet_cifar10).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.pretrained import models, weights
from experiments.pretrained.networks import NETWORKS

# The first three outputs of two images: of leaves that are drawn, and of the file's.
OUTPUTS = {
    "svhn": (
        [[-8.3519373, 2.9699657, -0.27004176], [-8.0262413, 2.2056253, 0.24356742]],
        [[-5.491528, -3.0660076, -6.3343687], [-6.5506577, -3.1313365, -5.6437225]],
    ),
    "mnist": (
        [[-1.9379166, -4.3398237, -3.4619374], [-1.643119, -2.9277864, -4.1090503]],
        [[-2.5003085, -38.87204, -3.2417533], [-2.369477, -50.499969, -6.9769959]],
    ),
    "usps": (
        [[-4.7002048, 1.3183894, 3.4931302], [-4.090445, 2.1691058, 2.4945729]],
        [[-6.2260127, -21.002594, 14.652059], [-22.184656, -31.632765, 17.918583]],
    ),
    "resnet20": (
        [[20.701256, -9.5926046, 52.380711], [20.436596, -8.732049, 55.885265]],
        [[-1.0673, 0.54399836, 9.3540506], [2.3336301, 2.2789996, 10.779071]],
    ),
    "resnet32": (
        [[-827.68359, 149.82896, -411.43402], [-830.51556, 135.32855, -405.09451]],
        [[2.8963411, 4.4095941, 1.3763216], [4.3690157, 2.9618106, 3.9520359]],
    ),
    "efficientnet_lite0": (
        [[2.4591064, 6.9995461, -2.1803985], [2.4339523, 5.1224251, -2.3480654]],
        [[-3.9144213, -0.44366029, -0.94415236], [-4.0378203, -3.1807141, -4.1623278]],
    ),
    "resnet18": ([[35.666401, 20.478683, -20.39081], [31.695482, 22.363785, -19.138344]], None),
}
# A ten-class head where the original's constructor has no other.
CLASSES = dict.fromkeys(OUTPUTS, 7) | {"mnist": 10, "usps": 10}
QUICK = "mnist", "usps"


def images(network):
    rows, columns, channels = network.shape
    b, i, j, k = np.meshgrid(*map(range, (2, rows, columns, channels)), indexing="ij")
    return ((7 * i * j + 13 * i + 29 * k * j + 101 * b + (i * j) % 17 * 11) % 256).astype("uint8")


def drawn(name):
    """Draw a state dict: each leaf from the seed of its place among the sorted names."""
    leaves, norms = models.shapes(NETWORKS[name], CLASSES[name])
    kinds = leaves | {
        f"{n}.running_{x}": (size,) for n, size in norms.items() for x in ("mean", "var")
    }
    state = {}
    for number, (leaf, shape) in enumerate(sorted(kinds.items())):
        x = np.random.RandomState(number).uniform(-1, 1, shape)
        if leaf.endswith("running_var"):
            x = 1 + 0.5 * x
        elif len(shape) == 1:
            x = leaf.endswith("weight") + 0.2 * x
        else:
            x = x * np.sqrt(6 / np.prod(shape[1:]))
        state[leaf] = x.astype("float32")
    return state


def prepared(name):
    """Read the state dict of a network's file, or skip the test if it was not prepared."""
    try:
        path = weights.path(NETWORKS[name].file)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    read = fj.files.load_arrays if path.suffix == ".safetensors" else fj.files.load_torch
    return read(path)


def outputs(name, state):
    network = NETWORKS[name]
    params = models.from_state(network, state)
    return jax.jit(models.model(network, params).apply)(params, images(network))[:, :3]


def close(found, expected):
    expected = np.array(expected)
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max() / 20)
    )


MARKS = dict.fromkeys(OUTPUTS, pytest.mark.long) | dict.fromkeys(QUICK, ())
MARKS["resnet32"] = pytest.mark.slow  # as resnet20, of more blocks
CASES = [pytest.param(name, marks=marks) for name, marks in MARKS.items()]


@pytest.mark.parametrize("network", CASES)
def test_outputs_are_those_of_pytorch(network):
    close(outputs(network, drawn(network)), OUTPUTS[network][0])


@pytest.mark.slow
@pytest.mark.parametrize("network", [name for name in OUTPUTS if NETWORKS[name].file])
def test_outputs_of_the_prepared_weights_are_those_of_pytorch(network):
    close(outputs(network, prepared(network)), OUTPUTS[network][1])


@pytest.mark.parametrize("network", CASES)
def test_params_are_a_state_dict_again(network):
    """Bit for bit, without the count of minibatches, which PyTorch does without."""
    state = drawn(network)
    counted = state | {"bn1.num_batches_tracked": np.array(7)}
    found = models.to_state(models.from_state(NETWORKS[network], counted))
    assert found.keys() == state.keys()
    for name, x in state.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize(
    "network",
    [
        "usps",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("svhn", "resnet20", "resnet18")),
        pytest.param("efficientnet_lite0", marks=pytest.mark.slow),
    ],
)
def test_kfac_covers_every_leaf_that_is_trained(network):
    """Only shapes are computed."""
    of = NETWORKS[network]
    params = jax.eval_shape(lambda: models.init(of, jax.random.key(0), 5))
    model = models.model(of, params)
    images, labels = np.zeros((2, *of.shape), "uint8"), np.zeros(2, "int32")
    how = {"kind": fj.fisher.empirical, "key": jax.random.key(0), "batch_size": 2}

    def fisher(params):
        return fj.fisher.kfac(model, params, fj.Examples(images, labels), **how)

    assert jax.eval_shape(fisher, params).coverage == 1


@pytest.mark.slow
def test_pytorch_reads_the_file_of_a_merge(tmp_path):
    """With every name of its modules, and the same outputs."""
    torch, read = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    nn, network = torch.nn, NETWORKS["usps"]
    pairs = [models.from_state(network, drawn("usps"))] * 2
    clients = jax.tree.map(lambda *x: jnp.stack([x[0], 1.1 * x[1]]), *pairs)
    merged = fj.tree.weighted_sum(clients, jnp.array([0.3, 0.7]))
    fj.files.save_arrays(tmp_path / "merged.safetensors", models.to_state(merged))

    def block(a, b):
        return nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)

    dense = nn.Dropout(), nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10)
    layers = {"features": (*block(1, 32), *block(32, 64)), "classifier": dense}
    theirs = nn.ModuleDict({name: nn.Sequential(*own) for name, own in layers.items()}).eval()
    theirs.load_state_dict(read.load_file(tmp_path / "merged.safetensors"), strict=True)
    pixels = (images(network).transpose(0, 3, 1, 2) / 255 - 0.2471) / 0.2994
    hidden = theirs["features"](torch.tensor(pixels, dtype=torch.float32)).flatten(1)
    expected = theirs["classifier"](hidden).detach().numpy()
    close(models.model(network, merged).apply(merged, images(network)), expected)


def test_training_normalises_and_averages_as_pytorch_does():
    """PyTorch divides the running variance by n - 1; rows of weight zero count for nothing."""
    network = NETWORKS["usps"]
    params = models.from_state(network, drawn("usps"))
    model = models.model(network, params)
    few = images(network)
    padded = np.concatenate([few, np.full_like(few[:1], 200)])
    train = jax.jit(model.apply_train)
    found, new = train(params, padded, jax.random.key(0), jnp.array([1.0, 1.0, 0.0]))
    close(
        found[:2, :3],
        [[0.24653566, 2.4669702, 0.95472044], [1.2809737, 0.97970837, -0.70992309]],
    )
    running = models.to_state(new)
    mean = [-0.08123510330915451, -0.025989599525928497, -0.163184255361557]
    np.testing.assert_allclose(running["features.1.running_mean"][:3], mean, rtol=1e-5)
    old, n = drawn("usps")["features.5.running_var"][:3], 2 * 8 * 8
    theirs = np.array([1.0079058408737183, 1.2259399890899658, 1.4228746891021729])
    ours = 0.9 * old + (theirs - 0.9 * old) * (n - 1) / n
    np.testing.assert_allclose(running["features.5.running_var"][:3], ours, rtol=1e-5)
    assert [name for name, trained in model.mask if not trained] == [
        f"moments/features.{n}/{x}" for n in (1, 5) for x in ("mean", "second_moment", "within")
    ]


def test_other_state_dicts_are_refused_with_their_names():
    state = drawn("usps")
    for change in ({"features.0.weight": np.zeros((32, 3, 3, 3))}, {"conv.weight": np.zeros(3)}):
        with pytest.raises(
            ValueError, match=rf"\['{next(iter(change))}'\] differ in name or shape"
        ):
            models.from_state(NETWORKS["usps"], state | change)
    with pytest.raises(ValueError, match="not that of this network"):
        models.from_state(NETWORKS["mnist"], {})


def test_a_new_head_has_its_own_classes_and_leaves_the_rest():
    network = NETWORKS["usps"]
    params = models.from_state(network, drawn("usps"))
    found = models.with_new_head(network, params, jax.random.key(0), 24)
    assert found["params"]["classifier.4.weight"].shape == (24, 128)
    changed = {n for n, x in found["params"].items() if x is not params["params"][n]}
    assert changed == {"classifier.4.weight", "classifier.4.bias"}
    new = models.init(network, jax.random.key(1), 24)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, found)
    kernel = new["params"]["features.4.weight"]
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (32 * 9)), rtol=0.02)
    assert models.to_state(new)["features.1.running_var"].tolist() == [1.0] * 32
