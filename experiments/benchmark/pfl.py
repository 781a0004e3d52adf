"""Rounds of federated averaging on pfl-research's CIFAR-10 workload, beside one call a batch.

Granqvist et al., "pfl-research: simulation framework for accelerating research in Private Federated
Learning", NeurIPS 2024: a cohort of 50 users with 50 images each, batches of 10, one local epoch,
and the network of its benchmarks, 1,626,442 parameters. Left out: its dropout, on both sides.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.benchmark.config import Config
from experiments.benchmark.flops import count, matmul_cases
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.train import chunk_name, chunks
from experiments.benchmark.workloads import CATEGORICAL, gradient, normalize, workload
from fisherjax.typing import Apply, Array, Params

DISPATCH = "one call a batch (FedJAX-style)"
_OPTIMIZER = optax.sgd(0.1)


class Network(flax.linen.Module):
    """Classify images: conv3 32, conv3 64, pool, dense 128, 10, with biases.

    Args:
        convolution: in place of `jax.lax.conv_general_dilated`.
    """

    convolution: Callable[..., Array] = fj.nn.conv_general_dilated

    @flax.linen.compact
    def __call__(self, images: Array) -> Array:
        """Return the logits [B, 10] of images [B, 32, 32, 3]."""
        hidden = images
        for channels in (32, 64):
            layer = flax.linen.Conv(
                channels, (3, 3), padding="VALID", conv_general_dilated=self.convolution
            )
            hidden = flax.linen.relu(layer(hidden))
        hidden = fj.nn.max_pool(hidden, 2)
        hidden = hidden.reshape(hidden.shape[0], -1)
        return flax.linen.Dense(10)(flax.linen.relu(flax.linen.Dense(128)(hidden)))


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each cohort: a round of local training and averaging.

    Args:
        config: with the suite's values filled in.
        note: told what images are used.

    Yields:
        Groups.
    """
    work = workload(config, "cnn", config.num_examples)
    note(f"pfl: {work.source} images")
    data = work.images, work.labels
    apply = fj.networks.apply_fn(Network(), normalize)
    native = fj.networks.apply_fn(Network(jax.lax.conv_general_dilated), normalize)
    params = fj.networks.init(Network(), jax.random.key(0), work.images)
    for num_clients in config.num_clients:
        partition = fj.partition.iid(work.labels, num_clients, seed=0)
        federation = fj.clients.federation(data, partition)
        batch = tuple(x[: config.batch_size] for x in data)
        flops = count(gradient(apply), params, *batch)
        flops *= config.epochs * len(work.labels) / config.batch_size

        def case(name: str, run: Callable[[], Any], flops: float = flops) -> Case:
            return Case(name, run, flops=flops)

        def dispatched(
            apply: Apply, partition: Sequence[np.ndarray] = partition
        ) -> Callable[[], Params]:
            return dispatch(apply, params, data, partition, config.epochs, config.batch_size)

        def ours(
            chunk: int, federation: fj.clients.Federation = federation
        ) -> Callable[[], Params]:
            return lambda: fedavg_round(
                apply, params, federation, config.epochs, config.batch_size, chunk
            )

        cases = [
            case(DISPATCH, dispatched(apply)),
            *(
                case(f"fisherjax, {chunk_name(chunk, num_clients)}", ours(chunk))
                for chunk in chunks(config.chunks, num_clients)
            ),
            case(f"{DISPATCH}, native convolutions", dispatched(native)),
            *matmul_cases(config.matmul_size),
        ]
        title = f"a round, M={num_clients}, {len(work.labels)} images, batch {config.batch_size}"
        yield Group(title, "rounds", DISPATCH, cases)


def fedavg_round(
    apply: Apply,
    params: Params,
    federation: fj.clients.Federation,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int,
) -> Params:
    """Train the cohort and average its models, by fisherjax."""
    trained = fj.training.train(
        fj.Model(apply, CATEGORICAL),
        params,
        federation,
        key=jax.random.key(1),
        optimizer=_OPTIMIZER,
        epochs=epochs,
        batch_size=batch_size,
        clients_per_chunk=clients_per_chunk,
    )
    fedavg = fj.algorithms.fedavg()
    updates = fj.algorithms.Update({"params": trained.params}, fedavg.kind)
    return fj.merging.merge(fedavg, params, updates, federation.weights)[0]


def dispatch(
    apply: Apply,
    params: Params,
    data: tuple[np.ndarray, np.ndarray],
    partition: Sequence[np.ndarray],
    epochs: int,
    batch_size: int,
) -> Callable[[], Params]:
    """Prepare the same round with one compiled step for each batch, called from Python loops.

    Args:
        apply: the network.
        params: the start.
        data: images [N, ...] and labels [N], on the host.
        partition: the rows of each client.
        epochs: local epochs.
        batch_size: examples of a step.

    Returns:
        A function that returns the averaged model.
    """
    images, labels = data
    total = sum(map(len, partition))
    random = np.random.default_rng(0)
    one_gradient = gradient(apply)

    @jax.jit
    def step(params: Params, state: Any, images: Array, labels: Array) -> tuple[Params, Any]:
        updates, state = _OPTIMIZER.update(one_gradient(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def add(mean: Params, own: Params, weight: Array) -> Params:
        return jax.tree.map(lambda x, y: x + weight * y, mean, own)

    def run() -> Params:
        mean = jax.tree.map(jnp.zeros_like, params)
        for rows in partition:
            own, state = params, _OPTIMIZER.init(params)
            for _ in range(epochs):
                shuffled = random.permutation(rows)
                for start in range(0, len(rows), batch_size):
                    batch = shuffled[start : start + batch_size]
                    own, state = step(own, state, images[batch], labels[batch])
            mean = add(mean, own, len(rows) / total)
        return mean

    return run
