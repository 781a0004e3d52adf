"""Updates that arrive in chunks merge to what they merge to at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import aggregation, clients, fisher, likelihoods

WEIGHTS = np.array([3.0, 0.0, 5.0, 1.0, 2.0])
PARAMS = {"w": jnp.zeros((3, 2))}


def apply(params, x):
    return x @ params["w"]


METHODS = {
    "fedavg": aggregation.fedavg(),
    "fisher_merge": aggregation.fisher_merge(apply, likelihoods.categorical),
    "fedfisher diagonal": aggregation.fedfisher(
        apply, likelihoods.categorical, fisher=fisher.diagonal, damping=0.5
    ),
    "fedfisher full": aggregation.fedfisher(
        apply, likelihoods.categorical, fisher=fisher.full, damping=0.5
    ),
    "regmean": aggregation.regmean(apply),
    "fednova": aggregation.fednova(epochs=2, batch_size=4, momentum=0.9),
}
MODELS = {"params": {"w": jnp.arange(5.0)[:, None]}}


@pytest.fixture(scope="module")
def updates():
    source = np.random.default_rng(0)
    data = source.normal(size=(40, 3)).astype(np.float32), source.integers(0, 2, 40)
    models = [{"w": jnp.asarray(source.normal(size=(3, 2)), jnp.float32)} for _ in WEIGHTS]
    federation = clients.federation(data, np.split(np.arange(40), [9, 20, 25, 32]))
    return {
        name: clients.summarize(
            method, models, federation, key=jax.random.key(0), global_params=PARAMS
        )
        for name, method in METHODS.items()
    }


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4], [2, 4]])
def test_chunks_merge_to_what_all_merge_to_at_once(updates, name, cuts):
    expected, _ = aggregation.merge(METHODS[name], PARAMS, updates[name], WEIGHTS)
    rows = np.split(np.arange(5), cuts)
    chunks = ((jax.tree.map(lambda x, r=r: x[r], updates[name]), WEIGHTS[r]) for r in rows)
    merged, _ = aggregation.merge_stream(METHODS[name], PARAMS, chunks)
    np.testing.assert_allclose(merged["w"], expected["w"], rtol=2e-4, atol=1e-6)


def test_lists_stream_too_and_weights_are_equal_without_any():
    one_by_one = (([{"params": {"w": jnp.full(1, x)}}], None) for x in (1.0, 2.0, 6.0))
    merged, _ = aggregation.merge_stream(aggregation.fedavg(), {"w": jnp.zeros(1)}, one_by_one)
    assert merged["w"] == pytest.approx(3.0)


def test_later_chunks_of_the_same_shape_compile_nothing(compilations):
    counts = []

    def chunks():
        for seed in range(4):
            counts.append(count())
            yield {"params": {"w": jax.random.normal(jax.random.key(seed), (7, 3))}}, None

    with compilations() as count:
        aggregation.merge_stream(aggregation.fedavg(), {"w": jnp.zeros(3)}, chunks())
    assert counts[2] == counts[3]


def test_a_diverged_client_is_counted_over_all_chunks_or_left_out():
    def chunks():
        yield MODELS, WEIGHTS
        yield {"params": {"w": jnp.array([[1.0], [jnp.nan]])}}, [1, 1]

    start = {"w": jnp.zeros(1)}
    with pytest.raises(ValueError, match=r"clients \[6\] are not finite .*client 6: leaf 'par"):
        aggregation.merge_stream(aggregation.fedavg(), start, chunks())
    merged, _ = aggregation.merge_stream(aggregation.fedavg(), start, chunks(), on_nonfinite="drop")
    expected = (WEIGHTS @ np.arange(5.0) + 1) / (WEIGHTS.sum() + 1)
    assert merged["w"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "chunks", "words"),
    [
        (aggregation.fedfisher(apply, likelihoods.categorical), [(MODELS, WEIGHTS)], "Kronecker"),
        (aggregation.fedavg(), [], "no chunks"),
        (aggregation.fedavg(), [(MODELS, 0 * WEIGHTS)], "None of the 5 clients has weight"),
        (aggregation.fedavg(), [(MODELS, WEIGHTS[:2])], r"shape \(2,\); expected \(5,\)"),
        (aggregation.fedavg(), [(MODELS, -WEIGHTS)], "non-negative"),
    ],
)
def test_what_cannot_be_streamed_is_refused(method, chunks, words):
    with pytest.raises(ValueError, match=words):
        aggregation.merge_stream(method, {"w": jnp.zeros(1)}, chunks)
