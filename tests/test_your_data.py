"""Data as users have them: what the page says runs, and each way gives the rows that were given."""

import collections
import importlib.util
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj

PAGE = Path(__file__).parents[1] / "docs/how_to/your_data.md"
LIBRARIES = PAGE.with_name("data_libraries.md")
FOREIGN = re.findall(r"^```py\n(.*?)^```$", LIBRARIES.read_text(), re.DOTALL | re.MULTILINE)

ROWS = [[3, 1, 0], [], [4, 2, 5]]
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.array([0, 1, 1, 0, 1, 0])
PAIRS = [(X[rows], Y[rows]) for rows in ROWS]


def rows_of(federation, client):
    """Return the inputs and targets of a client."""
    view = fj.clients.view(federation, client)
    own = np.asarray(view.indices)[np.asarray(view.weights) > 0]
    return jax.tree.map(lambda x: np.asarray(x)[own], (view.inputs, view.targets))


# Stand-ins of the protocols of libraries that are not among the tests' requirements.


class Tensor:
    """An array as PyTorch has it: its dtype is none of NumPy's, and NumPy may not read it."""

    def __init__(self, values, refusal=None):
        self.values, self.refusal = np.asarray(values), refusal
        self.shape, self.ndim = self.values.shape, self.values.ndim
        self.dtype = types.SimpleNamespace(name=f"torch.{self.values.dtype}")

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        return Tensor(self.values[rows])

    def __array__(self, dtype=None, copy=None):
        del copy
        if self.refusal is not None:
            raise self.refusal
        return self.values if dtype is None else self.values.astype(dtype)


class Column(collections.abc.Sequence):
    """A column as Hugging Face has it: a sequence that is read when it is indexed."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, row):
        return self.values[row]


class Table(dict):
    """A data set of columns with the methods that the page calls."""

    def with_format(self, name):
        assert name == "numpy"
        return Table({key: Column(column) for key, column in self.items()})

    def batch(self, size):
        x, y = self.values()
        steps = range(0, len(y), size)
        return types.SimpleNamespace(
            as_numpy_iterator=lambda: ((x[i : i + size], y[i : i + size]) for i in steps)
        )


def data_loader(data, batch_size):
    """Yield batches as PyTorch's DataLoader does: lists of a stack of inputs and one of targets."""
    for i in range(0, len(data), batch_size):
        yield [Tensor(np.stack(column)) for column in zip(*data[i : i + batch_size], strict=True)]


@pytest.fixture
def libraries(monkeypatch):
    """Install stand-ins for libraries that are absent, and a loader that downloads nothing."""
    table = Table(image=X, label=Y)
    stand_ins = {"datasets": types.SimpleNamespace(load_dataset=lambda name, split: table)}
    if importlib.util.find_spec("torch") is None:
        stand_ins |= dict.fromkeys(("torch", "torch.utils"), types.SimpleNamespace())
        stand_ins["torch.utils.data"] = types.SimpleNamespace(DataLoader=data_loader)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    return {"np": np, "fj": fj, "partition": ROWS, "data": table}


def block(name):
    """Return the code of the page that has this name in it."""
    (found,) = [code for code in FOREIGN if name in code]
    return found


@pytest.mark.long
def test_the_page_runs(run_page):
    page = types.SimpleNamespace(**run_page(PAGE))
    assert page.clients.inputs["words"].shape == (60, 4)
    assert page.kfac.coverage == 1
    assert np.isfinite(page.trained.loss).all()


def test_loaders_of_clients_give_their_rows(libraries):
    libraries["data_sets"] = [list(zip(*pair, strict=True)) for pair in PAIRS if len(pair[1])]
    exec(block("import DataLoader"), libraries)
    for client, pair in enumerate([pair for pair in PAIRS if len(pair[1])]):
        for found, expected in zip(rows_of(libraries["clients"], client), pair, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_batches_that_are_dicts_give_inputs_that_are(libraries):
    batch = {"input_ids": Tensor(X), "attention_mask": Tensor(X > 0), "labels": Tensor(Y)}
    libraries["loader"] = [batch, {name: x[:2] for name, x in batch.items()}]
    exec(block("attention_mask"), libraries)
    found = libraries["examples"]
    np.testing.assert_array_equal(found.inputs["input_ids"], np.concatenate([X, X[:2]]))
    np.testing.assert_array_equal(found.inputs["attention_mask"], np.concatenate([X, X[:2]]) > 0)
    np.testing.assert_array_equal(found.targets, np.concatenate([Y, Y[:2]]))


def test_columns_give_their_rows(libraries):
    exec(block("load_dataset"), libraries)
    for client, pair in enumerate(PAIRS):
        for found, expected in zip(rows_of(libraries["clients"], client), pair, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_batches_of_tensorflow_give_their_rows(libraries):
    exec(block("as_numpy_iterator"), libraries)
    np.testing.assert_array_equal(libraries["examples"].inputs, X)
    np.testing.assert_array_equal(libraries["examples"].targets, Y)


@pytest.mark.long
def test_records_of_tensorflow_datasets_give_their_rows(libraries, shared):
    libraries["data_dir"], libraries["partition"] = shared / "data", [range(150), range(150, 200)]
    exec(block("data_source"), libraries)
    inputs, targets = rows_of(libraries["clients"], 1)
    records = libraries["records"][150:]
    np.testing.assert_array_equal(inputs, [record["image"] for record in records])
    np.testing.assert_array_equal(targets, [record["label"] for record in records])


def test_tables_give_their_rows(libraries):
    pandas = pytest.importorskip("pandas")
    columns = {"age": X[:, 0], "dose": X[:, 1], "outcome": Y, "hospital": [0, 1, 1, 0, 1, 0]}
    libraries["table"] = pandas.DataFrame(columns)
    exec(block("groupby"), libraries)
    np.testing.assert_array_equal(rows_of(libraries["clients"], 1)[0], X[[1, 2, 4], :2])


# Clients one by one.

VIEWS = fj.clients.federation((X, Y), ROWS)
WAYS = {
    "pairs": PAIRS,
    "lists": [[x.tolist(), y.tolist()] if len(y) else [x, y] for x, y in PAIRS],
    "Examples": [fj.Examples(*pair) for pair in PAIRS],
    "objects": [types.SimpleNamespace(inputs=x, targets=y) for x, y in PAIRS],
    "tensors": [(Tensor(x), Tensor(y)) for x, y in PAIRS],
    "arrays of JAX": [tuple(map(jnp.asarray, pair)) for pair in PAIRS],
    "big-endian": [(x.astype(">f4"), y.astype(">i8")) for x, y in PAIRS],
    "masked arrays without a mask": [(np.ma.masked_array(x), y) for x, y in PAIRS],
    "views of a federation": [fj.clients.view(VIEWS, client) for client in range(3)],
    "rows of a data set": [
        fj.Examples(X, Y, np.array(rows, int)) if rows else PAIRS[1] for rows in ROWS
    ],
}


def widened(own):
    """Give lists and floats of Python the dtypes of the others."""
    return [(np.asarray(x, np.float32), y) if isinstance(x, list) else (x, y) for x, y in own]


@pytest.mark.parametrize("way", WAYS)
def test_a_list_of_data_sets_gives_each_client_its_rows(way):
    own = widened(WAYS[way]) if way == "lists" else WAYS[way]
    found = fj.clients.federation(own)
    assert found.sizes.tolist() == [3, 0, 3]
    for client, pair in enumerate(PAIRS):
        for own_rows, expected in zip(rows_of(found, client), pair, strict=True):
            np.testing.assert_array_equal(own_rows, expected)


def test_a_list_of_data_sets_is_held_once():
    found = fj.clients.federation(PAIRS)
    assert found.inputs.nbytes == X.nbytes
    assert found.indices.shape == (3, 3)


def test_a_loader_may_use_one_array_for_all_batches():
    def batches():
        buffer = np.empty((2, 3), np.float32)
        for i in range(0, 6, 2):
            buffer[:] = X[i : i + 2]
            yield buffer, Y[i : i + 2]

    np.testing.assert_array_equal(BATCHES(batches()).inputs, X)


def test_a_federation_has_its_own_memory():
    """JAX may share that of an array that begins where it wants arrays to begin."""
    raw = np.empty(X.nbytes + 64, np.uint8)
    own = raw[-raw.ctypes.data % 64 :][: X.nbytes].view(X.dtype).reshape(X.shape)
    own[:] = X
    found = FED((own, Y), ROWS)
    own[:] = 0
    np.testing.assert_array_equal(found.inputs, X)


def test_rows_in_use_of_examples_are_those_of_a_partition():
    """An index of the partition counts the rows in use, not those of the whole data set."""
    examples = fj.Examples(X, Y, np.array([5, 4, 1]), np.array([1.0, 0.0, 1.0]))
    found = fj.clients.federation(examples, [[1], [0]])
    np.testing.assert_array_equal(rows_of(found, 0)[0], X[[1]])
    np.testing.assert_array_equal(rows_of(found, 1)[0], X[[5]])


BATCHES = fj.clients.from_batches
FED = fj.clients.federation


class Unreadable:
    pass


REFUSED = {
    "no client": (lambda: FED([]), "There is no client"),
    "a pair without a partition": (lambda: FED((X, Y)), "partition is None and data is a tuple"),
    "a dict of clients": (lambda: FED({"a": PAIRS[0]}), "partition is None and data is a dict"),
    "a loader as a client": (
        lambda: FED([iter(PAIRS)]),
        "client 0 is a list_iterator.*from_batches",
    ),
    "three arrays": (lambda: FED([PAIRS[0], (X, Y, Y)]), "client 1 is a tuple of 3; expected"),
    "other shapes": (
        lambda: FED([PAIRS[0], (X[:, :2], Y)]),
        r"client 1 has inputs \(2,\) float32.*client 0 has inputs \(3,\) float32",
    ),
    "other dtypes": (
        lambda: FED([PAIRS[0], (X.astype(float), Y)]),
        r"client 1 has inputs \(3,\) float64.*client 0 has inputs \(3,\) float32",
    ),
    "other keys": (
        lambda: FED([({"a": X}, Y), ({"b": X}, Y)]),
        r"client 1 has inputs\['b'\].*client 0 has inputs\['a'\]",
    ),
    "other lengths": (
        lambda: FED([(X, Y), (X, Y[:2])]),
        "inputs of client 1 have shape .6, 3",
    ),
    "weights": (
        lambda: FED([fj.Examples(X, Y, None, np.full(6, 0.5))]),
        "weights other than 0 and 1",
    ),
    "no targets": (lambda: FED([(X, None)]), "client 0 has no targets"),
    "no batch": (lambda: BATCHES([]), "There is no batch"),
    "one example a batch": (
        lambda: BATCHES(zip(X, Y, strict=True)),
        "inputs of batch 0 have shape",
    ),
    "batches of dicts": (lambda: BATCHES([{"x": X, "y": Y}]), "batch 0 is a dict.*data..image.."),
    "ragged batches": (lambda: BATCHES([(X, Y), (X[:, :2], Y)]), "An example of batch 1 has"),
    "a number as batches": (lambda: BATCHES(3), "batches is an int; expected batches"),
    "leaves of other lengths": (
        lambda: FED(({"a": X, "b": Y[:2]}, Y), ROWS),
        "the same first axis",
    ),
    "a list of two inputs": (lambda: FED(([X, X], Y), ROWS), "Several inputs are a dict"),
    "text": (
        lambda: FED((X, np.array(list("ababab"))), ROWS),
        "targets has dtype <U1.*numpy.unique",
    ),
    "ragged rows": (lambda: FED(([[1.0], [1.0, 2.0]], [0, 1]), ROWS), "cannot be read as an array"),
    "a mask": (lambda: FED((np.ma.masked_array(X, X > 0), Y), ROWS), "masked entries.*x.filled"),
    "an object": (lambda: FED((Unreadable(), Y), ROWS), "inputs is of type Unreadable; expected"),
    "a mapping": (
        lambda: FED((collections.UserDict({0: X, 1: X}), Y), ROWS),
        "another mapping by dict",
    ),
    "dict targets": (lambda: FED((X, {"a": Y}), ROWS), "targets is of type dict"),
    "a gradient": (
        lambda: FED((Tensor(X, RuntimeError("Can't call numpy()")), Y), ROWS),
        r"inputs of type Tensor.*Can't call numpy.*x.detach\(\).cpu\(\).numpy\(\)",
    ),
    "a gradient in Examples": (
        lambda: fj.Examples(X, Tensor(Y, TypeError("cuda:0"))),
        "targets of type Tensor.*cuda:0",
    ),
    "clients beside a partition": (
        lambda: FED([(np.ones(2), [0, 1]), (np.ones(2), [1, 0])], [[0], [1]]),
        "data is a list of two data sets.*Leave the partition out",
    ),
    "a tuple of clients": (
        lambda: FED(((np.ones(2), Y[:2]), (np.ones(2), Y[:2])), [[0], [1]]),
        "data is a tuple of two data sets",
    ),
    "clients as lists": (lambda: FED([[Y[:2], Y[:2]]] * 2, [[0], [1]]), "of two data sets"),
    "clients of Examples": (lambda: FED([fj.Examples(X, Y)] * 2, ROWS), "of two data sets"),
    "batches as a client": (lambda: FED([[(Y, Y), (Y, Y)]]), "client 0 is a list of two data sets"),
    "keys of two types": (
        lambda: FED([({"a": X, 1: X}, Y)]),
        "inputs of client 0 cannot be read as a pytree .*keys are all of one type",
    ),
    "keys of two types in Examples": (
        lambda: fj.Examples({"a": X, 1: X}, Y),
        "inputs cannot be read as a pytree",
    ),
    "params with keys of two types": (
        lambda: fj.metrics.logits(LINEAR, {"a": X, 1: X}, X),
        "params cannot be read as a pytree",
    ),
    "records": (
        lambda: FED(([{"a": 1.0}, {"a": 2.0}], [0, 1]), [[0], [1]]),
        r"inputs has rows that are dicts, \{'a': 1.0\} first; expected an array for each key",
    ),
    "empty clients": (
        lambda: FED([(X[:0], Y[:0])] * 2),
        "None of the 2 clients has an example",
    ),
    "hashes": (lambda: FED((np.arange(6) + 2**40, Y), ROWS), "inputs run from 1099511627776 to"),
    "hashes as labels": (lambda: FED((X, Y.astype(np.uint64) + 2**63), ROWS), "targets run from"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_data_that_cannot_be_read_are_refused_in_words(fault):
    make, words = REFUSED[fault]
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        make()


@pytest.mark.parametrize(
    "data",
    [
        ([[1.0, 2.0], [3.0, 4.0]], [[0, 1], [1, 0]]),
        ([[1.0, 2.0], [3.0, 4.0]], (0, 1)),
        [[[1.0], [2.0]], [0, 1]],
        [[[1.0], [2.0], [3.0]], [[0], [1], [2]]],
        ((X[:2], X[:2]), [np.int64(0), np.int64(1)]),
    ],
)
def test_rows_of_lists_are_no_clients(data):
    assert FED(data, [[0], [1]]).num_clients == 2


# What networks are given.


def dense(params, x):
    return x @ params


LINEAR = fj.Model(dense, fj.likelihoods.categorical)
W = np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)


def test_integers_that_jax_would_wrap_are_refused():
    huge = fj.Examples(np.full((6, 3), 2**40), Y)
    with pytest.raises(ValueError, match="which int32 does not hold"):
        fj.metrics.accuracy(LINEAR, W, huge)
    with pytest.raises(ValueError, match="which int32 does not hold"):
        fj.metrics.logits(LINEAR, W, huge.inputs)
    with pytest.raises(ValueError, match="which int32 does not hold"):
        fj.fisher.full(LINEAR, W, huge)


def test_tensors_are_inputs_targets_and_params():
    tensors = fj.Examples(Tensor(X), Tensor(Y))
    expected = np.mean((X @ W).argmax(1) == Y)
    assert fj.metrics.accuracy(LINEAR, Tensor(W), tensors) == pytest.approx(expected)
    np.testing.assert_allclose(fj.metrics.logits(LINEAR, Tensor(W), Tensor(X)), X @ W, rtol=1e-5)
    trained = fj.training.untrained(Tensor(W), 2)
    np.testing.assert_array_equal(trained.params[1], W)
    stacked = fj.tree.stack([{"w": Tensor(W)}, {"w": Tensor(2 * W)}])
    np.testing.assert_array_equal(stacked["w"], [W, 2 * W])


class Pair(tuple):
    """A registered container, as a user's class."""


jax.tree_util.register_pytree_node(Pair, lambda pair: (tuple(pair), None), lambda _, x: Pair(x))
Named = collections.namedtuple("Named", "tokens numbers")
TOKENS = np.random.default_rng(2).integers(0, 5, (6, 4))
PARAMS = {
    "embed": np.random.default_rng(3).normal(size=(5, 3)).astype(np.float32),
    "mix": np.random.default_rng(4).normal(size=(3, 3)).astype(np.float32),
    "last": W,
}


def of_two(params, tokens, numbers):
    hidden = jnp.tanh(params["embed"][tokens].mean(1) + numbers @ params["mix"])
    return hidden @ params["last"]


def of_tree(params, x):
    return of_two(params, *jax.tree.leaves(x)[::-1])


def of_array(params, x):
    return of_two(params, x[:, 3:].astype(int), x[:, :3])


TREE = fj.Model(of_tree, fj.likelihoods.categorical)
ARRAY = fj.Model(of_array, fj.likelihoods.categorical)
DICT = {"numbers": X, "tokens": TOKENS}
PACKED = np.concatenate([X, TOKENS], axis=1).astype(np.float32)


def test_the_fisher_of_several_inputs_is_that_of_its_definition(x64):
    """By derivatives of single examples: E over classes of the squared gradients."""
    params = jax.tree.map(np.float64, PARAMS)

    def outputs(params, tokens, numbers):
        return of_two(params, tokens[None], numbers[None])[0]

    @jax.jit
    def expected(params):
        def one(*x):
            z, jacobian = outputs(params, *x), jax.jacrev(outputs)(params, *x)
            flat = jnp.concatenate([g.reshape(2, -1) for g in jax.tree.leaves(jacobian)], axis=1)
            p = jax.nn.softmax(z)
            return flat.T @ (jnp.diag(p) - jnp.outer(p, p)) @ flat

        return jax.vmap(one)(TOKENS, X).mean(0)

    found = fj.fisher.full(TREE, params, fj.Examples(DICT, Y))
    np.testing.assert_allclose(found.dense(), expected(params), atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "inputs",
    [DICT, {"a": {"b": X}, "c": Pair((TOKENS, None))}],
    ids=["dict", "nested"],
)
def test_several_inputs_are_one_array_of_them(inputs, key):
    """In whatever container: training, metrics, K-FAC and a merge give the same."""
    how = {"optimizer": optax.sgd(0.1), "epochs": 2, "batch_size": 2}

    def everything(model, inputs):
        clients = FED((inputs, Y), ROWS)
        trained = fj.training.train(model, PARAMS, clients, key=key, **how)
        method = fj.algorithms.fedfisher(model)
        updates = fj.merging.summarize(method, trained, clients, key=key)
        merged, _, _ = fj.merging.merge(method, PARAMS, updates, clients.weights)
        found = fj.metrics.performance(model, merged, clients)
        accuracy = fj.metrics.accuracy(model, merged, fj.Examples(inputs, Y), batch_size=4)
        return merged, updates, found, accuracy

    found, expected = everything(TREE, inputs), everything(ARRAY, PACKED)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_consumer_of_inputs_takes_several(key):
    """Private training, exchanges, rounds, positions, the diagonal, products and memory."""
    how = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 2}
    private = [fj.privacy.dp_sgd(m, clip=0.5, noise_multiplier=0.1) for m in (TREE, ARRAY)]
    masks = (lambda x: x["tokens"] > 0), (lambda x: x[:, 3:] > 0)
    padded = [m._replace(positions=p) for m, p in zip((TREE, ARRAY), masks, strict=True)]

    def everything(model, private, padded, inputs):
        clients, examples = FED((inputs, Y), ROWS), fj.Examples(inputs, Y)
        yield fj.training.train(private, PARAMS, clients, key=key, **how).models
        for exchange in (fj.algorithms.analytic_head(model), fj.algorithms.natural_gradient(model)):
            yield fj.merging.exchange(exchange, PARAMS, clients, key=key)[0]
        rounds = fj.rounds.federated(model, fj.algorithms.fedavg(), cohort=2, **how)
        yield rounds.round(rounds.init(PARAMS, clients), clients, key)[0].params
        yield fj.training.train(padded, PARAMS, clients, key=key, **how).models
        yield fj.fisher.kfac(padded, PARAMS, examples, fallback=fj.fisher.diagonal).trace()
        yield fj.fisher.diagonal(model, PARAMS, examples, max_examples=4, key=key).entries
        yield fj.fisher.vector_product(model, PARAMS, examples, PARAMS)
        fish = fj.algorithms.fedfish(model, batch_size=2, last_epoch=False, average=True)
        yield fj.merging.summarize(fish, [PARAMS] * 3, clients, key=key)

    pairs = zip(
        everything(TREE, private[0], padded[0], DICT),
        everything(ARRAY, private[1], padded[1], PACKED),
        strict=True,
    )
    for found, expected in pairs:
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4)
    assert fj.algorithms.normalizations(TREE, PARAMS, DICT) == frozenset()
    assert fj.leaves.split(TREE, PARAMS, DICT).frozen["embed"] is None
