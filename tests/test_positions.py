"""Which positions of a sequence count: padding leaves no trace, anywhere.

Sentences of 1 to 6 tokens are padded by 0 to 6 or to 9 tokens, for three networks that mask it: one
that pools (outputs of sentences), a transformer's encoder (the same, by attention with four axes),
and a language model (outputs of positions). References are those of each sentence run alone, cut to
its own length, and NumPy sums over its positions.
"""

from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import checks, sequences

R = np.random.default_rng(0)
N, WORDS, CLASSES, SHORT, LONG = 12, 9, 3, 6, 9
LENGTHS = np.array([1, 2, 3, 4, 5, 6, 6, 3, 2, 4, 1, 5])
TOKENS = np.where(np.arange(SHORT) < LENGTHS[:, None], R.integers(1, WORDS, (N, SHORT)), 0)
CLASS = jnp.asarray(R.integers(0, CLASSES, N), jnp.int32)
NEXT = np.where(TOKENS > 0, R.integers(0, CLASSES, (N, SHORT)), 0)
KINDS = [fj.fisher.true, fj.fisher.sampled, fj.fisher.empirical, fj.fisher.curvature_propagation]


def padded(tokens, length, fill=0):
    """Append padding."""
    return jnp.asarray(np.pad(tokens, ((0, 0), (0, length - SHORT)), constant_values=fill))


def is_token(tokens):
    return tokens != 0


def weights(*shape):
    return jnp.asarray(R.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)


def hidden(p, tokens):
    # A learned vector for each position too, of which there are more than in any sentence.
    return jnp.tanh((p["e"][tokens] + p["at"][: tokens.shape[1]]) @ p["W"] + p["b"])


def pooled(p, tokens):
    m = is_token(tokens)[..., None]
    return (hidden(p, tokens) * m).sum(1) / m.sum(1) @ p["h"]


def each(p, tokens):
    return hidden(p, tokens) @ p["h"]


class Encoder(flax.linen.Module):
    """A block of attention whose kernels have an axis of heads, with a mask, and a pooling."""

    @flax.linen.compact
    def __call__(self, tokens):
        m = is_token(tokens)
        x = flax.linen.Embed(WORDS, 4)(tokens)
        x = x + flax.linen.MultiHeadDotProductAttention(2)(x, mask=m[:, None, None])
        x = flax.linen.LayerNorm()(x) * m[..., None]
        return flax.linen.Dense(CLASSES)(x.sum(1) / m.sum(1, keepdims=True))


def made(seed=None):
    del seed
    return {
        "e": weights(WORDS, 4),
        "at": weights(12, 4),
        "W": weights(4, 5),
        "b": weights(5),
        "h": weights(5, CLASSES),
    }


PARAMS = [made(), made()]
encoder = Encoder()
ENCODED = [encoder.init(jax.random.key(s), padded(TOKENS, SHORT))["params"] for s in (0, 1)]
how = {"likelihood": fj.likelihoods.categorical, "positions": is_token}
MODELS = {
    "pooled": (fj.Model(pooled, **how), PARAMS, CLASS, None),
    "encoder": (fj.Model(fj.networks.apply_fn(encoder), **how), ENCODED, CLASS, None),
    "each": (fj.Model(each, **how), PARAMS, NEXT, 0),
}


def examples(name, length, fill=None):
    """Give the sentences at a length; the targets of padding are `fill`."""
    _, _, targets, own = MODELS[name]
    if own is None:
        return fj.Examples(padded(TOKENS, length), targets)
    filled = np.where(TOKENS > 0, targets, own if fill is None else fill)
    targets = padded(filled, length, own if fill is None else fill)
    return fj.Examples(padded(TOKENS, length), targets.astype(jnp.int32))


def alone(name):
    """Give every sentence by itself, without padding."""
    every = examples(name, SHORT)
    for n, length in enumerate(LENGTHS):
        y = every.targets[n : n + 1]
        yield fj.Examples(every.inputs[n : n + 1, :length], y if y.ndim == 1 else y[:, :length])


def assert_close(found, expected, rtol=1e-5):
    """Compare every leaf, in units of its largest entry."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.asarray(b)).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(scale, 1e-30))


def unmasked(model):
    return model._replace(positions=None)


@pytest.mark.long
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_the_mean_of_those_of_each_sentence_alone(name, sharing):
    model, (params, _), *_ = MODELS[name]
    kfac = partial(fj.fisher.kfac, kind=fj.fisher.true, sharing=getattr(fj.fisher, sharing))
    expected = [kfac(unmasked(model), params, one) for one in alone(name)]
    expected = jax.tree.map(lambda *x: sum(x) / N, *expected)
    for length in (SHORT, LONG):
        assert_close(kfac(model, params, examples(name, length)), expected)


def test_factors_are_sums_over_the_positions_that_count():
    """A = E_n sum_t m a a^T, G = E_n sum_k sum_t m g g^T / T_n, by NumPy and jax.jacrev."""
    model, (params, _), *_ = MODELS["pooled"]
    inputs, outputs, counts = np.zeros((5, 5)), np.zeros((5, 5)), np.zeros(WORDS)
    for one in alone("pooled"):
        tokens = one.inputs
        a = np.asarray(params["e"][tokens[0]] + params["at"][: tokens.shape[1]])
        a = np.pad(a, ((0, 0), (0, 1)), constant_values=1)

        def output(shift, tokens=tokens):
            inner = (params["e"][tokens] + params["at"][: tokens.shape[1]]) @ params["W"]
            return (jnp.tanh(inner + params["b"] + shift).mean(1) @ params["h"])[0]

        jacobian = np.asarray(jax.jacrev(output)(jnp.zeros((tokens.shape[1], 5))))  # [C, T, 5]
        p = np.asarray(jax.nn.softmax(output(0.0)))
        inputs += a.T @ a / N
        of_outputs = np.diag(p) - np.outer(p, p)
        products = np.einsum("cti,cd,dtj->ij", jacobian, of_outputs, jacobian)
        outputs += products / tokens.shape[1] / N
        np.add.at(counts, np.asarray(tokens[0]), 1 / N)
    found = fj.fisher.kfac(model, params, examples("pooled", LONG))
    assert_close(found.factors["W"], {"input": inputs, "output": outputs})
    assert_close(found.factors["e"]["input"], counts)
    assert counts[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_no_fisher_depends_on_padding_whatever_is_drawn(name, kind):
    model, (params, _), *_ = MODELS[name]
    structures = {
        "kfac": fj.fisher.kfac,
        "reduce": partial(fj.fisher.kfac, sharing=fj.fisher.reduce),
        "diagonal": fj.fisher.diagonal,
        "full": fj.fisher.full,
    }
    for structure in structures.values():
        # -100 where nothing is: read by the empirical kind only.
        found = [
            structure(model, params, examples(name, length, fill), kind=kind, key=jax.random.key(1))
            for length, fill in ((SHORT, None), (LONG, -100))
        ]
        assert_close(*found)


def test_draws_are_those_of_the_positions_number_and_true_is_their_mean(key):
    model, (params, _), *_ = MODELS["each"]
    exact = fj.fisher.diagonal(model, params, examples("each", SHORT), kind=fj.fisher.true)
    many = partial(fj.fisher.curvature_propagation, num_samples=3000)
    drawn = fj.fisher.diagonal(model, params, examples("each", LONG), kind=many, key=key)
    assert_close(drawn, exact, rtol=0.1)
    many = partial(fj.fisher.sampled, num_samples=3000)
    drawn = fj.fisher.diagonal(model, params, examples("each", LONG), kind=many, key=key)
    assert_close(drawn, exact, rtol=0.1)


def test_products_with_the_fisher_are_those_of_the_matrix():
    model, (params, vector), *_ = MODELS["each"]
    data = examples("each", LONG)
    found = fj.fisher.vector_product(model, params, data, vector)
    assert_close(found, fj.fisher.full(model, params, data, kind=fj.fisher.true).mv(vector))


A = fj.algorithms
METHODS = {
    "fedfisher": lambda m: A.fedfisher(m),
    "fedlpa": lambda m: A.fedlpa(m),
    "fedlpa, true": lambda m: A.fedlpa(m, kind=fj.fisher.true, balanced=True),
    "regmean": lambda m: A.regmean(m),
    "sequential": lambda m: A.fedfisher_sequential(m),
    "sketched": lambda m: A.fedfisher_sketched(m, terms=2),
    "fisher_merge": lambda m: A.fisher_merge(m),
    "fedfish": lambda m: A.fedfish(m, batch_size=3),
    "weighted_fedavg": lambda m: A.weighted_fedavg(m, temperature=0.1),
    "weighted_fedavg, kfac": lambda m: A.weighted_fedavg(m, fisher=fj.fisher.kfac),
}
EXCHANGES = {
    "analytic_head": lambda m: A.analytic_head(m),
    "ccvr": lambda m: A.ccvr(m, draws=200, epochs=1),
    "natural_gradient": lambda m: A.natural_gradient(m, damping=(1.0, 0.1)),
}
HALVES = [np.arange(7), np.arange(7, N)]


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["pooled", "each"])
def test_no_merge_depends_on_padding(name, method, key):
    model, models, *_ = MODELS[name]
    method, found = METHODS[method](model), []
    for length, fill in ((SHORT, None), (LONG, -100)):
        federation = fj.clients.federation(examples(name, length, fill), HALVES)
        updates = fj.merging.summarize(method, models, federation, key=key)
        merged, own, _ = fj.merging.merge(method, models[0], updates)
        found.append((updates.values, merged, own))
    assert_close(*found)


@pytest.mark.long
@pytest.mark.parametrize("method", EXCHANGES)
@pytest.mark.parametrize("name", ["pooled", "each"])
def test_no_exchange_depends_on_padding(name, method, key):
    model, (params, _), *_ = MODELS[name]
    found = []
    for length, fill in ((SHORT, None), (LONG, -100)):
        federation = fj.clients.federation(examples(name, length, fill), HALVES)
        merged, *_ = fj.merging.exchange(EXCHANGES[method](model), params, federation, key=key)
        found.append(merged)
    assert_close(*found, rtol=1e-4 if method == "natural_gradient" else 1e-5)
