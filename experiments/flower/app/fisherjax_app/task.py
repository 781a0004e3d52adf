"""Compute what both sides have in common from the configuration of a run: data, model, method."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import fisherjax as fj
from fisherjax import flower

MODELS = {"mlp": fj.networks.MLP, "lenet": fj.networks.LeNet, "simple_cnn": fj.networks.SimpleCNN}


class Task(NamedTuple):
    """What a run trains, and how."""

    train: fj.datasets.Dataset
    test: fj.datasets.Dataset
    model: fj.Model
    params: Any
    algorithm: Any
    optimizer: optax.GradientTransformation


def task(config: Mapping[str, Any], data_dir: str) -> Task:
    """Read the data and make the network and the method; equal on the server and all clients."""
    train, test = fj.datasets.load(config["dataset"], data_dir or None)
    network = MODELS[config["model"]](num_classes=train.num_classes)
    params = fj.networks.init(network, jax.random.key(config["seed"]), train.inputs)
    normalize = fj.datasets.normalizer(train)
    categorical = fj.likelihoods.categorical
    model = fj.networks.model(network, params, categorical, normalize=normalize)
    algorithm = fj.algorithms.make(config["algorithm"], model)
    optimizer = optax.sgd(config["learning-rate"], config["momentum"] or None)
    return Task(train, test, model, params, algorithm, optimizer)


def examples(config: Mapping[str, Any], train: fj.datasets.Dataset, client: int) -> tuple[Any, Any]:
    """Return the images and labels of one client, whose shares of the classes are drawn.

    Replace this function by one that reads the client's own data.
    """
    number = config["num-clients"]
    if not 0 <= client < number:
        raise ValueError(
            f"the node has partition-id {client}; expected 0 to {number - 1}, as the run has "
            f"{number} clients: start the node with another number, or use --num-clients"
        )
    how = {"alpha": config["alpha"], "seed": config["seed"]}
    rows = fj.partition.dirichlet_of_client(train.targets, number, **how)[client]
    return train.inputs[rows], train.targets[rows]


def secure(config: Mapping[str, Any], verifiers: str, signing: str = "") -> flower.Secure | None:
    """Return the terms of secure sums; None if clients send their updates.

    `verifiers` is the path of the public keys of all clients, a line of hexadecimal digits each,
    and `signing` that of the private key of a client; without them the server has to be honest.
    """
    if not config["secure-bound"]:
        return None
    lines = Path(verifiers).read_text().split() if verifiers else ()
    return flower.Secure(
        config["secure-bound"],
        config["max-weight"],
        verifiers=tuple(map(bytes.fromhex, lines)),
        signing=Path(signing).read_bytes() if signing else b"",
    )


def keep_programs() -> None:
    """Keep compiled programs in the user's cache: Flower starts a process for each message."""
    if jax.config.jax_compilation_cache_dir or "JAX_ENABLE_COMPILATION_CACHE" in os.environ:
        return  # as the user has chosen
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "fisherjax" / "programs"
    try:
        # Only the user may write here: who can replace a program can run any code.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Most programs compile in less than JAX's default of a second, and together take most time.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
