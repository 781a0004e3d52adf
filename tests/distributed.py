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
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    if process is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", 2, int(process))

    import fisherjax as fj

    random = np.random.default_rng(0)
    data = random.normal(size=(60, 3)).astype(np.float32), random.integers(0, 3, 60, np.int32)
    rows = np.split(np.arange(60), [3, 13, 14, 14, 30, 41, 55])  # one client has no examples
    alone = fj.clients.federation(data, rows)
    spread = fj.clients.shard(alone)
    params = {"a": jnp.asarray(random.normal(size=(3, 4)), jnp.float32), "b": jnp.ones((4, 3))}
    categorical = fj.likelihoods.categorical
    optimizer = optax.sgd(0.1, 0.9)

    def apply(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    def whole(x):
        """Bring an array to every process."""
        replicated = jax.sharding.NamedSharding(spread.mesh, jax.sharding.PartitionSpec())
        return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(x))

    def same(one, many):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(whole(y), x, rtol=2e-5, atol=1e-6), one, many
        )

    def trained(federation, **how):
        return fj.training.train(
            apply,
            categorical,
            params,
            federation,
            key=jax.random.key(0),
            optimizer=optimizer,
            epochs=2,
            batch_size=4,
            **how,
        )

    one = trained(alone)
    for how in ({}, {"progress": lambda *_: None, "clients_per_chunk": 2}):
        many = trained(spread, **how)
        assert many.params["a"].sharding.spec[0] == "clients"
        assert len(many.params["a"].addressable_shards) == jax.local_device_count()
        same(one, many)
    aggregators = [fj.aggregation.fedavg(), fj.aggregation.fedfisher(apply, categorical)]
    if process is None:
        aggregators.append(fj.aggregation.regmean(apply))
        aggregators.append(fj.aggregation.fisher_merge(apply, categorical))
    for aggregator in aggregators:
        key = jax.random.key(1)
        updates = fj.clients.summarize(aggregator, one, alone, key=key)
        spread_updates = fj.clients.summarize(aggregator, many, spread, key=key)
        same(updates, spread_updates)
        merged, _ = fj.aggregation.merge(aggregator, params, updates, alone.weights)
        spread_merged, _ = fj.aggregation.merge(aggregator, params, spread_updates, spread.weights)
        same(merged, spread_merged)
    # One data set whose examples are spread; some carry no weight, on one device none does.
    x, y = random.normal(size=(64, 3)).astype(np.float32), random.integers(0, 3, 64, np.int32)
    weights = random.uniform(size=64).astype(np.float32) * (np.arange(64) > 17)
    by_row = jax.sharding.NamedSharding(spread.mesh, jax.sharding.PartitionSpec("clients"))
    alone_rows = [jnp.asarray(array) for array in (x, y, weights)]
    spread_rows = [jax.device_put(array, by_row) for array in (x, y, weights)]
    for fisher in (fj.fisher.diagonal, fj.fisher.kfac):
        one, many = (
            fisher(
                apply, categorical, params, x, y, kind=fj.fisher.empirical, weights=w, batch_size=3
            )
            for x, y, w in (alone_rows, spread_rows)
        )
        same(one, many)
    # The same rows on every device: only labels that are drawn anew on each make a difference.
    share, key = x[: len(x) // spread.mesh.size], jax.random.key(3)
    everywhere = jax.device_put(np.tile(share, (spread.mesh.size, 1)), by_row)
    drawn = partial(fj.fisher.diagonal, apply, categorical, params, kind=fj.fisher.sampled)
    first = drawn(jnp.asarray(share), key=jax.random.fold_in(key, 0)).entries["b"]
    assert not np.allclose(whole(drawn(everywhere, key=key).entries["b"]), first, rtol=0.01)
    fedfish = fj.aggregation.fedfish(apply, categorical, batch_size=4, last_epoch=True)
    method = fj.rounds.federated(
        apply, categorical, fedfish, cohort=8, optimizer=optimizer, epochs=2, batch_size=4
    )
    ends = []
    for federation in (alone, spread):
        start, key = method.init(params), jax.random.key(2)
        *_, (state, _) = fj.rounds.run(method, start, federation, key=key, rounds=2)
        ends.append(state.params)
    same(*ends)
    print(jax.process_count(), "processes,", jax.device_count(), "devices")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
