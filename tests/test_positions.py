"""Which positions of a sequence count: padding leaves no trace, anywhere.

Sentences of 1 to 6 tokens are padded by 0 to 6 or to 9 tokens, for three networks that mask it: one
that pools (outputs of sentences), a transformer's encoder (the same, by attention with four axes),
and a language model (outputs of positions). References are those of each sentence run alone, cut to
its own length, and NumPy sums over its positions.
"""

from functools import partial

import flax.linen
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import _padding
from fisherjax._core import checks, output_checks
from fisherjax.algorithms.exchanges._head_sums import head_sums

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
    at = p["at"][jnp.arange(tokens.shape[1])]
    return jnp.tanh((p["e"][tokens] + at) @ p["W"] + p["b"])


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
    """Compare leaves in units of their largest entry, or of a thousandth of the largest of all."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = jax.tree.leaves(expected)
    largest = max(float(jnp.abs(leaf).max()) for leaf in leaves)
    for a, b in zip(jax.tree.leaves(found), leaves, strict=True):
        # What is zero but for rounding, such as the curvature of attention's keys, has no scale.
        scale = max(float(jnp.abs(b).max()), largest / 1000)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * scale)


def unmasked(model):
    return model._replace(positions=None)


# Attention takes long to compile: a release asks.
OFTEN = [pytest.param(n, marks=pytest.mark.slow) if n == "encoder" else n for n in MODELS]


@pytest.mark.long
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", OFTEN)
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


EXPAND, REDUCE = fj.fisher.kfac, partial(fj.fisher.kfac, sharing=fj.fisher.reduce)
# Attention takes long to compile; the diagonal takes nothing of a layer but its gradients.
STRUCTURES = {
    "pooled": [EXPAND, REDUCE],
    "encoder": [EXPAND],
    "each": [EXPAND, REDUCE, fj.fisher.diagonal],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "name", [n if n == "each" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_no_fisher_depends_on_padding_whatever_is_drawn(name, kind):
    model, (params, _), *_ = MODELS[name]
    for structure in STRUCTURES[name]:
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
# Each with what float32 may make of equal sums. Of natural gradients two solves follow each other,
# for moves of the head and for shares of ways. Two ways of nearly one direction magnify rounding:
# what clients send, changed by 3e-7 in float64, changes the model by 2.6e-5 to 2.1e-4, with a
# single way by 1e-5. So the law of two ways is held in float64.
EXCHANGES = {
    "analytic_head": (A.analytic_head, 1e-5),
    "ccvr": (partial(A.ccvr, draws=200, epochs=1), 1e-5),
    "natural_gradient": (partial(A.natural_gradient, damping=(1.0,)), 5e-5),
}
WIDE = EXCHANGES | {"natural_gradient": (partial(A.natural_gradient, damping=(1.0, 0.1)), None)}
HALVES = [np.arange(7), np.arange(7, N)]
# Of ten examples of a client, natural gradients hold one aside.
MANY = [np.arange(11), np.arange(11, N)]


# The same law of another network: one method of each kind of curvature stands for the rest.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "method"),
    [("each", method) for method in METHODS]
    + [("pooled", method) for method in ("fedfisher", "weighted_fedavg")]
    + [
        pytest.param("pooled", method, marks=pytest.mark.slow)
        for method in METHODS
        if method not in ("fedfisher", "weighted_fedavg")
    ],
)
def test_no_merge_depends_on_padding(name, method, key):
    model, models, *_ = MODELS[name]
    method, found = METHODS[method](model), []
    for length, fill in ((SHORT, None), (LONG, -100)):
        federation = fj.clients.federation(examples(name, length, fill), HALVES)
        updates = fj.merging.summarize(method, models, federation, key=key)
        merged, own, _ = fj.merging.merge(method, models[0], updates)
        found.append((updates.values, merged, own))
    assert_close(*found)


def played(make, name, partition, key):
    """Play an exchange on sentences of either length, in the precision that JAX has."""
    model, (params, _), *_ = MODELS[name]
    params = jax.tree.map(lambda x: x.astype(jnp.result_type(float)), params)
    for length, fill in ((SHORT, None), (LONG, -100)):
        federation = fj.clients.federation(examples(name, length, fill), partition)
        yield list(fj.merging.messages(make(model), params, federation, key=key))


@pytest.mark.long
@pytest.mark.parametrize("method", EXCHANGES)
@pytest.mark.parametrize("name", ["pooled", pytest.param("each", marks=pytest.mark.slow)])
def test_no_exchange_depends_on_padding(name, method, key):
    make, rounding = EXCHANGES[method]
    short, long = played(make, name, HALVES, key)
    assert_close([message.sent for message in short], [message.sent for message in long])
    assert_close(short[-1].params, long[-1].params, rtol=rounding)


@pytest.mark.long
@pytest.mark.parametrize("method", EXCHANGES)
@pytest.mark.parametrize("name", ["pooled", pytest.param("each", marks=pytest.mark.slow)])
def test_no_exchange_depends_on_padding_by_more_than_rounding(name, method, key, x64):
    make, _ = WIDE[method]
    short, long = played(make, name, MANY, key)
    assert_close([message.sent for message in short], [message.sent for message in long], 1e-9)
    assert_close(short[-1].params, long[-1].params, rtol=1e-9)


# Of the language model: two labels of real tokens are ignored too.
IGNORED = np.where(np.isin(np.arange(N * SHORT).reshape(N, SHORT), [3, 12, 13]), -100, NEXT)
IGNORED = np.where(TOKENS > 0, IGNORED, -100)


def ignoring(length):
    targets = padded(IGNORED, length, -100).astype(jnp.int32)
    return fj.Examples(padded(TOKENS, length), targets)


def by_hand(params, n):
    """Sum the losses of the positions of a sentence that have a label."""
    z = each(params, padded(TOKENS, SHORT)[n : n + 1])[0]
    losses = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, NEXT[n][:, None], -1)[:, 0]
    return (losses * (IGNORED[n] >= 0)).sum()


def mean_by_hand(params):
    return sum(by_hand(params, n) for n in range(N)) / N


@pytest.mark.long
def test_training_and_metrics_leave_out_padding_and_ignored_labels(key):
    model, (params, _), *_ = MODELS["each"]
    data = ignoring(LONG)
    federation = fj.clients.federation(data, [np.arange(N)])
    settings = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": N}
    trained = fj.training.train(model, params, federation, key=key, **settings)
    loss, gradient = jax.value_and_grad(mean_by_hand)(params)
    expected = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradient)
    assert_close(jax.tree.map(lambda x: x[0], trained.params), expected)
    np.testing.assert_allclose(trained.loss[0, 0], loss, rtol=1e-5)
    measured = fj.metrics.performance(model, params, federation)
    right = each(params, padded(TOKENS, SHORT)).argmax(-1) == IGNORED
    share = right.sum() / (IGNORED >= 0).sum()
    np.testing.assert_allclose(measured.loss[0], loss, rtol=1e-5)
    np.testing.assert_allclose(measured.accuracy[0], share, rtol=1e-6)
    np.testing.assert_allclose(fj.metrics.accuracy(model, params, data), share, rtol=1e-6)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    half = jnp.array([0.5, 0.5])
    found = fj.metrics.ensemble_accuracy(model, two, half, data)
    np.testing.assert_allclose(found, share, rtol=1e-6)


@pytest.mark.slow
def test_the_empirical_fisher_reads_ignored_labels_and_the_true_one_does_not():
    model, (params, _), *_ = MODELS["each"]
    flat, restore = jax.flatten_util.ravel_pytree(params)
    scores = jax.jacrev(lambda w: jnp.stack([by_hand(restore(w), n) for n in range(N)]))(flat)
    kinds = fj.fisher.empirical, fj.fisher.true
    empirical, true = (
        fj.fisher.full(model, params, ignoring(LONG), kind=kind).matrix for kind in kinds
    )
    assert_close(empirical, scores.T @ scores / N)
    every = fj.fisher.full(model, params, examples("each", SHORT), kind=fj.fisher.true).matrix
    assert_close(true, every)
    # The inputs of a position without a label still count.
    factors = fj.fisher.kfac(model, params, ignoring(LONG), kind=fj.fisher.empirical).factors
    tokens = np.bincount(TOKENS.ravel(), minlength=WORDS) * (np.arange(WORDS) > 0) / N
    assert_close(factors["e"]["input"], tokens)


@pytest.mark.long
def test_sums_of_a_head_are_over_positions_with_a_label():
    model, (params, _), *_ = MODELS["each"]
    found = head_sums(model, 5, params, ignoring(LONG))
    chosen = IGNORED >= 0
    a = np.asarray(hidden(params, padded(TOKENS, SHORT)))[chosen]
    y = np.eye(CLASSES)[IGNORED[chosen]]
    assert_close(found.inputs, a.T @ a / N)
    assert_close(found.products, a.T @ y / N)
    assert_close(found.targets, y.sum(0) / N)
    np.testing.assert_allclose([found.squares, found.count / N], [len(y) / N] * 2, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pooled", "each"])
def test_sentences_without_tokens_leave_no_trace_and_no_nan(name, key):
    """They have weight zero, although the network that pools divides zero by zero for them."""
    model, models, *_ = MODELS[name]
    more = fj.Examples(
        *(jnp.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1)) for x in examples(name, SHORT)[:2])
    )
    cut = {False: [np.arange(N), []], True: [np.arange(N + 2), [N, N + 1]]}
    found = []
    for empty, data in ((False, examples(name, SHORT)), (True, more)):
        federation, sums = fj.clients.federation(data, cut[empty]), []
        for method in (
            A.fedlpa(model, kind=fj.fisher.true),
            A.regmean(model),
            A.analytic_head(model),
        ):
            sums.append(fj.merging.summarize(method, models, federation, key=key).values)
        settings = {"optimizer": optax.sgd(0.1), "epochs": 2, "batch_size": N + 2}
        trained = fj.training.train(model, models[0], federation, key=key, **settings)
        measured = fj.metrics.performance(model, models[0], federation)
        found.append((sums, trained.params, trained.steps, trained.loss, measured))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found[1]))
    assert_close(*found)


def test_a_model_without_positions_goes_through_nothing():
    model = fj.Model(each, fj.likelihoods.categorical)
    data = examples("each", SHORT)
    assert _padding.drop_uncounted(model, data) is data
    assert _padding.counted_positions(model, data.inputs) is None
    assert _padding.likelihood(model, data.inputs, (N, SHORT, CLASSES)) is model.likelihood
    assert _padding.counted_targets(model, data.inputs, (N, SHORT, CLASSES), data.targets) is None
    assert output_checks.replace_ignored(model, (N, SHORT, CLASSES), data.targets) is data.targets


def test_positions_are_a_field_of_the_model():
    model = fj.Model(each, fj.likelihoods.categorical)
    masked = model._replace(positions=is_token)
    assert masked == fj.Model(*masked) == MODELS["each"][0]
    assert hash(masked) == hash(fj.Model(*masked))
    assert masked != model
    same = fj.networks.model(encoder, ENCODED[0], fj.likelihoods.categorical, positions=is_token)
    assert same == MODELS["encoder"][0]
    with pytest.raises(TypeError, match="positions is 3; expected a function"):
        checks.model(model._replace(positions=3))


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (lambda x: x[:, 0], r"positions returned shape \(\d+,\) .*expected \[\d+, T\]"),
        (lambda x: (x != 0)[:5], r"shape \(5, 6\)"),
        (lambda x: x / 2, "other than 0 and 1"),
        (lambda x: x, "other than 0 and 1"),
        (lambda x: None, "positions returned a NoneType"),
        (lambda x: (x != 0).astype(complex), "returned complex64; expected booleans"),
        (lambda x: x.nothing, "positions failed on inputs of shape"),
        (
            lambda x: (x != 0)[:, 1:],
            r"sequence of 6, but positions returned a mask of 5.*\[B, 6\]",
        ),
    ],
)
def test_what_is_no_mask_of_positions_is_refused(positions, said):
    model, (params, _), *_ = MODELS["each"]
    model = model._replace(positions=positions)
    with pytest.raises((TypeError, ValueError), match=said):
        fj.fisher.diagonal(model, params, examples("each", SHORT), kind=fj.fisher.true)
    federation = fj.clients.federation(examples("each", SHORT), HALVES)
    with pytest.raises((TypeError, ValueError), match=said):
        fj.metrics.performance(model, params, federation)


def test_zeros_and_ones_are_as_good_as_booleans():
    model, *_ = MODELS["pooled"]
    inputs = padded(TOKENS, LONG)
    for dtype in (jnp.int8, jnp.float32):
        other = model._replace(positions=lambda x, d=dtype: is_token(x).astype(d))
        np.testing.assert_array_equal(_padding.counted_positions(other, inputs), is_token(inputs))


def shared_by_heads(p, tokens):
    m = is_token(tokens)[..., None]
    heads = p["e"][tokens].reshape(*tokens.shape, 2, 2)
    x = jnp.tanh(heads @ p["W"]).reshape(*tokens.shape, -1)
    return (x * m).sum(1) / m.sum(1) @ p["h"]


def every_other(p, tokens):
    x = jnp.tanh(p["e"][tokens[:, ::2]] @ p["W"])
    return x.mean(1) @ p["h"]


def recurrent(p, tokens):
    state = jnp.zeros((len(tokens), 3))
    for step in range(tokens.shape[1]):
        state = jnp.tanh(p["e"][tokens][:, step] + state @ p["W"])
    return state @ p["h"]


def sized(*shapes):
    return dict(zip("eWh", (weights(*shape) for shape in shapes), strict=True))


@pytest.mark.slow
def test_axes_of_heads_repeat_what_counts():
    model, params = fj.Model(shared_by_heads, **how), sized((WORDS, 4), (2, 3), (6, CLASSES))
    kfac = partial(fj.fisher.kfac, kind=fj.fisher.true)
    expected = [kfac(unmasked(model), params, one) for one in alone("pooled")]
    expected = jax.tree.map(lambda *x: sum(x) / N, *expected)
    assert_close(kfac(model, params, examples("pooled", LONG)), expected)
    with pytest.raises(ValueError, match=r"Layer 'W' .*at 2 x 2 locations, and more than one"):
        kfac(model, params, fj.Examples(padded(TOKENS, SHORT)[:, :2], CLASS))


@pytest.mark.parametrize(
    ("apply", "params", "said"),
    [
        (every_other, sized((WORDS, 4), (4, 5), (5, CLASSES)), "Layer 'e' .*at 3 locations"),
        (recurrent, sized((WORDS, 3), (3, 3), (3, CLASSES)), "Layer 'W' .*each example 6"),
    ],
)
def test_a_layer_of_another_length_is_refused_by_name(apply, params, said):
    model, data = fj.Model(apply, **how), examples("pooled", SHORT)
    for method in (A.fedlpa(model), A.regmean(model)):
        federation = fj.clients.federation(data, [np.arange(N)])
        with pytest.raises(ValueError, match=said):
            fj.merging.summarize(method, [params], federation, key=jax.random.key(0))
    # That takes gradients of examples, whatever a layer's locations are.
    fj.fisher.diagonal(model, params, data)


def test_ignored_labels_need_positions():
    model, (params, _), *_ = MODELS["each"]
    with pytest.raises(ValueError, match=r"from -100 to 2.*have no loss if the Model has pos"):
        fj.metrics.accuracy(unmasked(model), params, ignoring(SHORT))


def test_gradients_at_positions_that_do_not_count_are_left_out():
    """Of a network that does not mask them: a gradient there leaks into no factor."""
    model = fj.Model(lambda p, x: hidden(p, x).mean(1) @ p["h"], **how)
    params, tokens, expected = PARAMS[0], padded(TOKENS, SHORT), np.zeros((5, 5))

    def output(shift, n):
        inner = (params["e"][tokens[n]] + params["at"][:SHORT]) @ params["W"]
        return jnp.tanh(inner + params["b"] + shift).mean(0) @ params["h"]

    for n, length in enumerate(LENGTHS):
        jacobian = np.asarray(jax.jacrev(output)(jnp.zeros((SHORT, 5)), n))[:, :length]
        p = np.asarray(jax.nn.softmax(output(0.0, n)))
        of_outputs = np.diag(p) - np.outer(p, p)
        expected += np.einsum("cti,cd,dtj->ij", jacobian, of_outputs, jacobian) / length / N
    found = fj.fisher.kfac(model, params, fj.Examples(tokens))
    assert_close(found.factors["W"]["output"], expected)
