"""Layers of one shape that are solved one after another are solved as all layers together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import solvers
from fisherjax._layers.layer import Layer
from fisherjax.algorithms import _layer_solves
from fisherjax.fisher import Diagonal, Kronecker
from fisherjax.fisher.operators import Template

_SOLVER = solvers.conjugate_gradients()


def _semidefinite(random, *shape):
    x = random.normal(size=(*shape, 2 * shape[-1]))
    return (x @ np.swapaxes(x, -1, -2)).astype(np.float32)


def _problem(repeats=3, clients=2):
    """Return a stacked operator with layers of every kind, of which most are repeated, and models.

    Layers are dense with and without bias, transposed, slices of a stack, grouped, and scales.
    """
    layers = [Layer("alone", "alone_bias", (4, 3))]
    for number in range(repeats):
        layers += [
            Layer(f"dense{number}", f"bias{number}", (3, 2)),
            Layer(f"transposed{number}", None, (2, 3), outputs=(0,)),
            Layer(f"stack[{number}]", None, (3, 2), index=(number,), part_of="stack"),
            Layer(f"grouped{number}", None, (3, 2, 4), outputs=(2,), groups=(1,)),
            Layer(f"scale{number}", f"shift{number}", (5,), form="scale"),
        ]
    random, shapes, factors, entries = np.random.default_rng(0), {"plain": (7,)}, {}, {}
    entries["plain"] = random.exponential(size=(clients, 7)).astype(np.float32)
    for layer in layers:
        stack = (repeats,) if layer.index else ()
        shapes |= {layer.leaf: (*stack, *layer.shape)}
        shapes |= {layer.bias: (layer.columns,)} if layer.bias else {}
        rows, groups = layer.rows + bool(layer.bias), (clients, *layer.stack)
        if layer.form == "scale":
            blocks = _semidefinite(random, clients, 5, 2)
            entries[layer.kernel] = np.moveaxis(blocks, 1, -1)
        else:
            sides = {"input": rows, "output": layer.columns}
            factors[layer.kernel] = {x: _semidefinite(random, *groups, n) for x, n in sides.items()}
    one = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    models = {name: np.stack([x] * clients) for name, x in one.items()}
    models = {n: x + random.normal(size=x.shape).astype(np.float32) for n, x in models.items()}
    fishers = Kronecker(factors, entries, tuple(layers), Template.of(one))
    return jax.tree.map(jnp.asarray, (fishers, models, one))


@pytest.mark.slow
@pytest.mark.parametrize("damping", [0.0, 1.0])
def test_layers_solved_apart_are_those_solved_together(damping):
    fishers, models, start = _problem()
    assert {layer.kernel for layer in fishers.layers} - {
        layer.kernel for layer in _layer_solves.repeated(fishers)
    } == {"alone"}
    weights = jnp.array([0.25, 0.75])
    for centre in (None, start):
        given = fishers, models, weights, damping, centre
        together = _SOLVER(_layer_solves.about_mean(*given))
        apart = _layer_solves.solve_about_mean(_SOLVER, *given)
        for found, expected in zip(
            *map(jax.tree.leaves, (apart.params, together.params)), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        assert apart.info.iterations == together.info.iterations
        assert apart.info.status == together.info.status


@pytest.mark.long
def test_a_deeper_network_compiles_no_more(compilations):
    for repeats, programs in ((3, None), (5, 3), (6, None)):
        fishers, models, _ = _problem(repeats)
        with compilations() as count:
            given = fishers, models, jnp.array([0.5, 0.5]), 1.0
            _layer_solves.solve_about_mean(_SOLVER, *given)
        if programs is None:
            continue
        # A slice of a larger stack, and the whole params.
        assert count() <= programs


@pytest.mark.long
def test_what_is_not_repeated_or_not_known_is_one_system():
    fishers, models, _ = _problem(repeats=2)
    assert not _layer_solves.repeated(fishers)
    assert not _layer_solves.repeated(Diagonal(models))
    seen = []

    def solver(problem):
        seen.append(jax.tree.structure(problem.init))
        return _SOLVER(problem)

    fishers, models, _ = _problem()
    given = fishers, models, jnp.array([0.5, 0.5]), 1.0
    found = _layer_solves.solve_about_mean(solver, *given)
    assert len(seen) == 1
    expected = _layer_solves.solve_about_mean(_SOLVER, *given)
    for name, leaf in expected.params.items():
        np.testing.assert_allclose(found.params[name], leaf, rtol=1e-6, atol=1e-6)
