"""Train, summarize and merge on one device and spread over many; run by test_distributed.py.

`python distributed.py 8` forces eight devices on this process; `python distributed.py 2 PORT ID`
is process ID of two, with two devices each. It fails where the results differ by more than
rounding, and prints how many devices took part.
"""

import os
import sys
from functools import partial


def main(devices: int, port: str | None = None, process: str | None = None) -> None:
    """Compare every step on all devices with the same step on one."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    if process is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", 2, int(process))

    import fisherjax as fj

    fj.devices.one_per_core()
    random = np.random.default_rng(0)
    data = random.normal(size=(60, 3)).astype(np.float32), random.integers(0, 3, 60, np.int32)
    rows = np.split(np.arange(60), [3, 13, 14, 14, 30, 41, 55])  # one client has no examples
    alone = fj.clients.federation(data, rows)
    spread = fj.clients.shard(alone)
    params = {"a": jnp.asarray(random.normal(size=(3, 4)), jnp.float32), "b": jnp.ones((4, 3))}
    optimizer = optax.sgd(0.1, 0.9)
    model = fj.Model(
        lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"], fj.likelihoods.categorical
    )

    replicated = jax.sharding.NamedSharding(spread.mesh, jax.sharding.PartitionSpec())
    replicate = jax.jit(lambda tree: tree, out_shardings=replicated)

    def whole(tree):
        """Bring arrays to every process; one process sees them all as they are."""
        return jax.tree.map(np.asarray, tree if process is None else replicate(tree))

    def same(one, many):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(y, x, rtol=2e-5, atol=1e-6), one, whole(many)
        )

    def trained(federation, algorithm, **how):
        return fj.training.train(
            model,
            params,
            federation,
            key=jax.random.key(0),
            optimizer=algorithm.optimizer(optimizer),
            epochs=2,
            batch_size=4,
            **how,
        )

    # Whatever the number of clients, of devices, and side by side; in another's program too.
    ways = (1, 1, 8), (5, 1, 2), (5, 2, 3), (8, 2, 8), (11, 1, 3), (11, 4, 8)
    for number, chunk, most in ways:
        mesh = fj.devices.client_mesh(jax.devices()[:most]) if process is None else spread.mesh
        draws, sizes = random.normal(size=(number, 2)), jnp.asarray(random.integers(0, 9, number))
        how = {"sizes": sizes, "clients_per_chunk": min(chunk, number)}
        mapped = jax.jit(partial(fj.parallel.map_clients, jnp.multiply, mesh=mesh, **how))
        same(draws * 2.0, mapped(jnp.asarray(draws), 2.0))
    fedavg = fj.algorithms.fedavg()
    one = trained(alone, fedavg)
    for how in ({}, {"progress": lambda *_: None, "clients_per_chunk": 2}):
        many = trained(spread, fedavg, **how)
        # One process's CPU has one memory; what lies with several stays where it was computed.
        spec = getattr(many.params["a"].sharding, "spec", None)
        assert (spec is None) if process is None else spec[0] == "clients"
        same(one, many)
    # Seven clients on any number of devices, of one chunk or of several.
    fewer, some = (fj.clients.select(f, np.arange(7)) for f in (alone, spread))
    same(trained(fewer, fedavg), trained(some, fedavg))
    same(trained(fewer, fedavg), trained(some, fedavg, clients_per_chunk=2))
    algorithms = [fedavg, fj.algorithms.fedfisher(model)]
    if process is None:
        algorithms += [fj.algorithms.regmean(model), fj.algorithms.fisher_merge(model)]
    # All train as federated averaging does, but one whose optimiser keeps something.
    fednova = fj.algorithms.fednova()
    ways = [(algorithm, one, many) for algorithm in algorithms]
    ways.append((fednova, trained(alone, fednova), trained(spread, fednova)))
    same(*ways[-1][1:])
    for algorithm, here, there in ways:
        key = jax.random.key(1)
        updates = fj.merging.summarize(algorithm, here, alone, key=key)
        spread_updates = fj.merging.summarize(algorithm, there, spread, key=key)
        same(updates, spread_updates)
        merge = partial(fj.merging.merge, algorithm, params)
        merged, state, _ = merge(updates, alone.weights)
        spread_merged, spread_state, _ = merge(spread_updates, spread.weights)
        same((merged, state), (spread_merged, spread_state))
        # One process's CPU merges on one device, not on every one.
        if process is None:
            assert fj.devices.mesh_of(spread_merged) is None
            assert fj.devices.mesh_of(spread.weights) is None
    # One data set whose examples are spread; some carry no weight, on one device none does.
    x, y = random.normal(size=(64, 3)).astype(np.float32), random.integers(0, 3, 64, np.int32)
    weights = random.uniform(size=64).astype(np.float32) * (np.arange(64) > 17)
    by_row = jax.sharding.NamedSharding(spread.mesh, jax.sharding.PartitionSpec("clients"))
    alone_rows = [jnp.asarray(array) for array in (x, y, weights)]
    spread_rows = [jax.device_put(array, by_row) for array in (x, y, weights)]
    for fisher in (fj.fisher.diagonal, fj.fisher.kfac):
        one, many = (
            fisher(
                model,
                params,
                fj.Examples(x, y, weights=w),
                kind=fj.fisher.empirical,
                batch_size=3,
            )
            for x, y, w in (alone_rows, spread_rows)
        )
        same(one, many)
    # The same rows on every device: only labels that are drawn anew on each make a difference.
    share, key = x[: len(x) // spread.mesh.size], jax.random.key(3)
    everywhere = jax.device_put(np.tile(share, (spread.mesh.size, 1)), by_row)
    drawn = partial(fj.fisher.diagonal, model, params, kind=fj.fisher.sampled)
    first = drawn(fj.Examples(jnp.asarray(share)), key=jax.random.fold_in(key, 0)).entries["b"]
    both = drawn(fj.Examples(everywhere), key=key).entries["b"]
    assert not np.allclose(whole(both), first, rtol=0.01)
    for algorithm in (fj.algorithms.fedfish(model, last_epoch=True), fj.algorithms.scaffold()):
        experiment = fj.rounds.federated(
            model, algorithm, cohort=8, optimizer=optimizer, epochs=2, batch_size=4
        )
        ends = []
        for federation in (alone, spread):
            start, key = experiment.init(params, federation.num_clients), jax.random.key(2)
            *_, (state, _) = fj.rounds.run(experiment, start, federation, key=key, rounds=2)
            ends.append((state.params, state.algorithm, state.local))
        same(*ends)
    print(jax.process_count(), "processes,", jax.device_count(), "devices")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
