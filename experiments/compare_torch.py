"""Training speed beside plain PyTorch: the same networks, clients and steps, in one run.

`python -m experiments.compare_torch --model lenet` alternates epochs of a loop over clients in
PyTorch with epochs of `training.train`, and prints the medians. It needs the extra `bench`. Other
work on the machine slows PyTorch's threads down more than XLA's: compare on an idle one, or pin
the command to one core (`taskset -c 0`).
"""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
import optax
import torch
import tyro

import fisherjax as fj

IMAGES = {"lenet": (28, 28, 1), "cnn": (32, 32, 3)}
CHANNELS = {"lenet": (6, 16), "cnn": (32, 64)}
FEATURES = {"lenet": (256, 120, 84, 10), "cnn": (1600, 512, 128, 10)}
MODELS = {"lenet": fj.models.LeNet, "cnn": fj.models.CNN}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time; random images, because speed does not depend on them."""

    model: Literal["lenet", "cnn"] = "lenet"
    """The network: LeNet on 28 x 28 x 1 or the CNN on 32 x 32 x 3 images."""
    num_examples: int = 20_000
    """Examples of all clients together."""
    num_clients: int = 5
    """Clients, of Dirichlet sizes."""
    batch_size: int = 64
    """Examples a step."""
    epochs: int = 10
    """Timed epochs of each side; one more comes before, to compile and to warm up."""


class Network(torch.nn.Module):
    """The network of `fisherjax.models`, without biases."""

    def __init__(self, model: str):
        super().__init__()
        channels = (IMAGES[model][2], *CHANNELS[model])
        features = FEATURES[model]
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 5, bias=False) for a, b in itertools.pairwise(channels)
        )
        self.dense = torch.nn.ModuleList(
            torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(features)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, 10] of images [B, C, H, W]."""
        for convolution in self.convolutions:
            x = torch.nn.functional.max_pool2d(torch.relu(convolution(x)), 2)
        x = x.flatten(1)
        for dense in self.dense[:-1]:
            x = torch.relu(dense(x))
        return self.dense[-1](x)


def normalize(x):
    """Scale bytes to [-1, 1]."""
    return x.astype("float32") / 127.5 - 1


def torch_epochs(config: Config, images, labels, partition) -> Callable[[], None]:
    """Prepare a function that trains every client for one epoch in PyTorch."""
    inputs = torch.from_numpy(normalize(images).transpose(0, 3, 1, 2).copy())
    targets = torch.from_numpy(labels).long()
    clients = []
    for rows in partition:
        network = Network(config.model)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        clients.append((torch.from_numpy(rows), network, optimizer))

    def epoch() -> None:
        for rows, network, optimizer in clients:
            for batch in rows[torch.randperm(len(rows))].split(config.batch_size):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(network(inputs[batch]), targets[batch])
                loss.backward()
                optimizer.step()

    return epoch


def train_jax(config: Config, images, labels, partition, progress) -> None:
    """Train every client with fisherjax, one epoch more than is timed."""
    model = MODELS[config.model]()
    fj.training.train(
        fj.models.apply_fn(model, normalize),
        fj.likelihoods.categorical,
        fj.models.init(model, jax.random.key(0), images),
        fj.clients.federation((images, labels), partition),
        key=jax.random.key(1),
        optimizer=optax.sgd(0.01, momentum=0.9),
        epochs=config.epochs + 1,
        batch_size=config.batch_size,
        progress=progress,
    )


def main(config: Config) -> None:
    """Time both sides in turn and print the medians."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (config.num_examples, *IMAGES[config.model]), np.uint8)
    labels = rng.integers(0, 10, config.num_examples).astype(np.int32)
    partition = fj.partition.fedfisher(labels, config.num_clients, alpha=0.1, seed=3)
    torch_epoch = torch_epochs(config, images, labels, partition)
    seconds = {"PyTorch": [], "fisherjax": []}
    marks = [time.perf_counter()]

    def progress(_: int, loss: jax.Array) -> None:
        loss.block_until_ready()
        seconds["fisherjax"].append(time.perf_counter() - marks[-1])
        start = time.perf_counter()
        torch_epoch()
        marks.append(time.perf_counter())
        seconds["PyTorch"].append(marks[-1] - start)

    train_jax(config, images, labels, partition, progress)
    speeds = {name: config.num_examples / np.median(s[1:]) for name, s in seconds.items()}
    for name, speed in speeds.items():
        print(f"{config.model:6} {name:10} {speed:8,.0f} samples/s")
    print(f"{config.model:6} ratio      {speeds['fisherjax'] / speeds['PyTorch']:8.2f}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
