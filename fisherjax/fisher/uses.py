"""Where each parameter of a network meets the examples, read off its flat list of equations.

A parameter is followed from its leaf through what only moves its entries (transpose, reshape, cast,
broadcast, a slice of a stack) to the equation whose other operand depends on the inputs. Where that
equation is a matrix product, a convolution, a look-up, a sum or an elementwise product, the
gradient of an example has a known form (see `layers`); anything else is a reason why the leaf is
not covered.
"""

from collections import Counter
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from fisherjax.fisher.inline import Flat, variables

# Networks are read at a number of examples that no other axis has, so that the axis of the examples
# is never mistaken for one of positions or channels that happens to be as long.
MANY = 10007

PRODUCT, CONVOLUTION, LOOKUP, SHIFT, SCALE = (
    "product",
    "convolution",
    "lookup",
    "shift",
    "scale",
)

Axes = tuple[tuple[int, ...] | None, ...]
"""For each axis of a value the axes of the leaf that it runs over; None if it repeats entries."""
Place = tuple[int, int | None]
"""A value: (number of the equation, which operand); None is the equation's result."""
Groups = tuple[tuple[int, ...], ...]
"""Axes of a value: that of the examples, positions, (for sums: summed positions,) features."""


class Use(NamedTuple):
    """An equation where a leaf, or a slice of one, meets the examples.

    Attributes:
        form: What the equation is.
        leaf: Number of the leaf.
        index: Place of the slice in a stack of layers; () is the whole leaf.
        outputs: Axes of the slice that are outputs.
        tangent: Whose tangent g is.
        tangent_axes: How its axes are arranged.
        inputs: What the inputs a are made of, or, for a scale, what it is multiplied by; None where
            there is nothing.
        input_axes: How its axes are arranged.
        after: For a sum: which product it follows, so that it is that layer's bias.
    """

    form: str
    leaf: int
    index: tuple[int, ...]
    outputs: tuple[int, ...]
    tangent: Place
    tangent_axes: Groups
    inputs: Place | range | None = None
    input_axes: Groups = ()
    after: int | None = None


class Reading(NamedTuple):
    """What was found in a network.

    Attributes:
        uses: In the order of their equations.
        obstacles: {number of a leaf: why it is not covered}.
        mixes_examples: Whether something depends on several examples.
    """

    uses: list[Use]
    obstacles: dict[int, str]
    mixes_examples: bool


class _View(NamedTuple):
    """A value that has the entries of a leaf, moved."""

    leaf: int
    axes: Axes
    index: tuple[int, ...] = ()
    rows: Place | range | None = None  # which rows of the leaf it has, if not all
    factor: tuple[Place, Axes] | None = None  # what it was multiplied by


class _Obstacle(Exception):
    """Why a leaf is not covered."""


def read(network: Flat) -> Reading:
    """Follow the leaves through the equations of a network on `MANY` examples."""
    return _Reader(network).reading()


class _Reader:
    """The state of one walk through the equations."""

    def __init__(self, network: Flat):
        *leaves, inputs = network.arguments
        self.network = network
        # What has the axis of the examples is theirs, such as a recurrent network's first state.
        self.data = {inputs, *(v for v, _ in network.constants if _has_examples(v))}
        whole = [tuple((axis,) for axis in range(v.aval.ndim)) for v in leaves]
        self.views = {v: _View(leaf, whole[leaf]) for leaf, v in enumerate(leaves)}
        # What is made of params by anything else: {leaf: what was done to it}.
        self.changed: dict[Any, dict[int, str]] = {}
        # Results of products, moved: (number of the use, axes).
        self.products: dict[Any, tuple[int, Axes]] = {}
        self.consumers = Counter(v for e in network.equations for v in variables(e.invars))
        self.uses: list[Use] = []
        self.obstacles: dict[int, str] = {}
        self.mixes = False
        self.sizes = [v.aval.shape for v in leaves]

    def reading(self) -> Reading:
        """Walk, and say of every leaf where it is used or why it is not covered."""
        for number, equation in enumerate(self.network.equations):
            if any(v in self.data for v in variables(equation.invars)):
                self._meet(number, equation)
            else:
                self._prepare(number, equation)
        self._give_up(self.network.output, "it is an output of the network by itself")
        for leaf, stack in self._stacks().items():
            if sorted(stack) != [(i,) for i in range(self.sizes[leaf][0])]:
                self.obstacles.setdefault(leaf, "parts of it are used in different ways")
        for leaf in set(range(len(self.sizes))) - {use.leaf for use in self.uses}:
            self.obstacles.setdefault(leaf, "it is not used by the network")
        return Reading(self.uses, self.obstacles, self.mixes)

    def _stacks(self) -> dict[int, set[tuple[int, ...]]]:
        stacks: dict[int, set[tuple[int, ...]]] = {}
        for use in self.uses:
            stacks.setdefault(use.leaf, set()).add(use.index)
        return {leaf: places for leaf, places in stacks.items() if places != {()}}

    def _meet(self, number: int, equation: Any) -> None:
        """Read an equation that depends on the inputs."""
        outputs = [v for v in equation.outvars if not _counts(equation, v)]
        self.data.update(outputs)
        self.mixes = self.mixes or _mixes(equation, outputs, self.data)
        for operand, v in enumerate(equation.invars):
            view = None if isinstance(v, Literal) else self.views.get(v)
            if view is None:
                self._give_up(v)
                continue
            try:
                self._use(number, operand, equation, view)
            except _Obstacle as obstacle:
                self.obstacles.setdefault(view.leaf, str(obstacle))
        # Where the result of a product is only moved, a bias may still follow.
        [first, *_] = [v for v in variables(equation.invars) if v in self.data]
        use, axes = self.products.get(first, (None, None))
        is_moved = use is not None and self.consumers[first] == 1 and len(equation.invars) == 1
        if is_moved and (moved := _moved(equation, axes)) is not None:
            self.products[equation.outvars[0]] = use, moved

    def _prepare(self, number: int, equation: Any) -> None:
        """Read an equation that does not depend on the inputs."""
        name = equation.primitive.name
        operands = [v for v in variables(equation.invars) if v in self.views or v in self.changed]
        if not operands:
            self.data.update(filter(_has_examples, equation.outvars))
            return
        if operands[0] in self.views and len(operands) == 1:
            view, [result] = self.views[operands[0]], equation.outvars
            moved = self._moved_view(number, equation, view)
            if moved is not None and MANY in result.aval.shape:
                self.data.add(result)
                self._use_guarded(lambda: self._sum(number, None, equation, moved), view.leaf)
                return
            if moved is not None:
                self.views[result] = moved
                return
        if name == "mul" and sum(v in self.views for v in operands) == 1:
            # Multiplied by what does not depend on it, such as a running standard deviation.
            [operand] = [i for i, v in enumerate(equation.invars) if _is_in(v, self.views)]
            view, [result] = self.views[equation.invars[operand]], equation.outvars
            if view.factor is None and result.aval.shape == equation.invars[operand].aval.shape:
                self._give_up(equation.invars[1 - operand])
                factor = (number, 1 - operand), view.axes
                self.views[result] = view._replace(factor=factor)
                return
        reasons = {}
        for v in operands:
            reasons |= self.changed.get(v, {})
            if v in self.views:
                reasons[self.views[v].leaf] = (
                    _inside(name) or f"{name} is applied to it before it meets the inputs"
                )
        self.changed |= dict.fromkeys(equation.outvars, reasons)

    def _moved_view(self, number: int, equation: Any, view: _View) -> _View | None:
        """Follow a view through an equation that only moves entries; None if it does more."""
        name, how = equation.primitive.name, equation.params
        source = equation.invars[0]
        if name == "slice" and set(how["strides"] or ()) <= {1}:
            taken = list(zip(how["start_indices"], how["limit_indices"], strict=True))
            cut = [a for a, ends in enumerate(taken) if ends != (0, source.aval.shape[a])]
            if not cut:
                return view
            [axis, *others] = cut
            start, end = taken[axis]
            if others or view.rows is not None or view.factor is not None:
                return None
            if axis == 0 and end - start == 1 and not view.index and view.axes[0] == (0,):
                # A layer of a stack: axes are counted in the slice from here on.
                rest = tuple(a if not a else tuple(i - 1 for i in a) for a in view.axes[1:])
                return view._replace(axes=((), *rest), index=(start,))
            wide = [a for a, size in enumerate(self._shape(view)) if size > 1]
            is_rows = len(wide) == 2 and view.axes[axis] == (wide[0],)
            return view._replace(rows=range(start, end)) if is_rows else None
        if name == "gather" and source in self.views and view.rows is None:
            axes = _looked_up(equation, view, self._shape(view))
            if axes is None or axes.count(None) != 1 or len(self._shape(view)) != 2:
                return None
            axes = tuple((0,) if a is None else a for a in axes)
            return view._replace(axes=axes, rows=(number, 1))
        axes = _moved(equation, view.axes)
        return None if axes is None else view._replace(axes=axes)

    def _use_guarded(self, use: Any, leaf: int) -> None:
        try:
            use()
        except _Obstacle as obstacle:
            self.obstacles.setdefault(leaf, str(obstacle))

    def _use(self, number: int, operand: int, equation: Any, view: _View) -> None:
        name = equation.primitive.name
        if name in ("add", "add_any"):
            self._sum(number, operand, equation, view)
        elif name == "mul":
            self._scale(number, operand, equation, view)
        elif view.factor is not None:
            raise _Obstacle("it is multiplied by something before it is used")
        elif view.rows is not None:
            raise _Obstacle("parts of it are used in different ways")
        elif name == "dot_general":
            self._product(number, operand, equation, view)
        elif name == "conv_general_dilated" and operand == 1:
            self._convolution(number, equation, view)
        elif name == "gather" and operand == 0:
            self._lookup(number, equation, view)
        elif name == "sub":
            raise _Obstacle("it is subtracted, as a running mean")
        else:
            raise _Obstacle(_inside(name) or f"it is used by {name}, which is not a layer")

    def _product(self, number: int, operand: int, equation: Any, view: _View) -> None:
        contracted, batched = equation.params["dimension_numbers"]
        mine, others = contracted[operand], contracted[1 - operand]
        if any(view.axes[axis] for axis in batched[operand]):
            raise _Obstacle("there is a matrix of it for each group of its inputs")
        shape, batch = equation.invars[1 - operand].aval.shape, batched[1 - operand]
        contraction = sorted(zip((view.axes[a] or () for a in mine), others, strict=True))
        rest = [a for a in range(len(shape)) if a not in (*others, *batch)]
        own = [a for a in range(len(view.axes)) if a not in (*mine, *batched[operand])]
        # Axes of the result: batched ones first, then what is left of either side; ~a is our own.
        ours = [~a for a in own]
        result = [*batch, *rest, *ours] if operand == 1 else [*batch, *ours, *rest]
        example, positions = _example(shape, [*batch, *rest])
        features = sorted((view.axes[a] or (), result.index(~a)) for a in own)
        outputs = sum((axes for axes, _ in features), ())
        self._check_whole(view, sum((axes for axes, _ in contraction), ()) + outputs)
        labels = tuple(view.axes[~a] if a < 0 else None for a in result)
        self.products[equation.outvars[0]] = len(self.uses), labels
        places, rows = tuple(map(result.index, positions)), tuple(a for _, a in contraction)
        self.uses.append(
            Use(
                PRODUCT,
                view.leaf,
                view.index,
                outputs,
                (number, None),
                ((result.index(example),), places, tuple(a for _, a in features)),
                (number, 1 - operand),
                ((example,), tuple(positions), rows),
            )
        )

    def _convolution(self, number: int, equation: Any, view: _View) -> None:
        how = equation.params
        if how["feature_group_count"] != 1 or how["batch_group_count"] != 1:
            raise _Obstacle("it belongs to a grouped convolution")
        layout, result = how["dimension_numbers"], equation.outvars[0].aval
        outputs = view.axes[layout.rhs_spec[0]]
        self._check_whole(view, sum((a or () for a in view.axes), ()))
        if equation.invars[0].aval.shape[layout.lhs_spec[0]] != MANY:
            raise _Obstacle("the examples of its inputs share an axis with something else")
        channel = layout.out_spec[1]
        # Patches come as [B, T, kernel axes other than that of the outputs].
        use = Use(
            CONVOLUTION,
            view.leaf,
            view.index,
            outputs,
            (number, None),
            ((layout.out_spec[0],), tuple(layout.out_spec[2:]), (channel,)),
            (number, 0),
            tuple(view.axes[a] or () for a in (*layout.rhs_spec[2:], layout.rhs_spec[1])),
        )
        axes = [outputs if a == channel else None for a in range(result.ndim)]
        self.products[equation.outvars[0]] = len(self.uses), tuple(axes)
        self.uses.append(use)

    def _lookup(self, number: int, equation: Any, view: _View) -> None:
        axes = _looked_up(equation, view, self._shape(view))
        if axes is None:
            raise _Obstacle("it is used by gather, which is not a look-up of rows")
        result = equation.outvars[0].aval
        places = [a for a in range(result.ndim) if axes[a] is None]
        example, positions = _example(result.shape, places)
        features = tuple(a for a in range(result.ndim) if axes[a] is not None)
        order = tuple(places.index(a) for a in positions)
        self.uses.append(
            Use(
                LOOKUP,
                view.leaf,
                view.index,
                sum((axes[a] for a in features), ()),
                (number, None),
                ((example,), tuple(positions), features),
                (number, 1),
                ((places.index(example),), order),
            )
        )

    def _sum(self, number: int, operand: int | None, equation: Any, view: _View) -> None:
        """Read a sum with the examples; as the equation's result it is repeated for each."""
        shape = equation.outvars[0].aval.shape
        if view.factor is not None:
            raise _Obstacle("it is multiplied by something before it is used")
        example, others = _example(shape, range(len(shape)))
        labels = self._labels(view, shape, operand, equation)
        held = sorted((labels[a], a) for a in others if labels[a])
        summed = tuple(a for a in others if not labels[a])
        wide = [pair for pair in held if shape[pair[1]] > 1] or held
        outputs, last = wide[-1] if wide else ((), None)
        rows = tuple(a for _, a in held if a != last)
        after = None
        if operand is not None:
            v = equation.invars[1 - operand]
            use, axes = self.products.get(v, (None, ()))
            if use is not None and self.consumers[v] == 1 and view.rows is None:
                own = sorted((axes[a], a) for a in range(len(shape)) if axes[a] and shape[a] > 1)
                # The same axes in the same order, all outputs and nothing else.
                if [a for _, a in own] == [a for _, a in wide]:
                    after = use
        self.uses.append(
            Use(
                SHIFT,
                view.leaf,
                view.index,
                outputs,
                (number, operand),
                ((example,), rows, summed, () if last is None else (last,)),
                view.rows,
                (),
                after,
            )
        )

    def _scale(self, number: int, operand: int, equation: Any, view: _View) -> None:
        shape = equation.outvars[0].aval.shape
        if view.rows is not None:
            raise _Obstacle("parts of it are used in different ways")
        example, others = _example(shape, range(len(shape)))
        labels = self._labels(view, shape, operand, equation)
        held = sorted((labels[a], a) for a in others if labels[a])
        summed = tuple(a for a in others if not labels[a])
        factor, axes = view.factor or (None, ())
        own = tuple(a for _, a in sorted((axes[a], a) for a in range(len(axes)) if axes[a]))
        # Their size is one: the factor was not larger than what it multiplied.
        repeated = tuple(a for a in range(len(axes)) if not axes[a])
        if None in axes:
            raise _Obstacle("it is multiplied by something before it is used")
        self.uses.append(
            Use(
                SCALE,
                view.leaf,
                view.index,
                tuple(range(len(self._shape(view)))),
                (number, operand),
                ((example,), (), summed, tuple(a for _, a in held)),
                factor,
                (repeated, own),
            )
        )

    def _labels(self, view: _View, shape: Any, operand: int | None, equation: Any) -> Axes:
        """Give the view's axes along a result that it is broadcast to."""
        own = shape if operand is None else equation.invars[operand].aval.shape
        if not own:
            return (None,) * len(shape)
        return tuple(a if n == m else None for a, n, m in zip(view.axes, own, shape, strict=True))

    def _shape(self, view: _View) -> tuple[int, ...]:
        return self.sizes[view.leaf][len(view.index) :]

    def _check_whole(self, view: _View, labels: tuple[int, ...]) -> None:
        wide = [axis for axis, size in enumerate(self._shape(view)) if size > 1]
        if not set(wide) <= set(labels):
            raise _Obstacle("parts of it are used in different ways")

    def _give_up(self, variable: Any, otherwise: str = "it is used by something else too") -> None:
        if _is_in(variable, self.views):
            self.obstacles.setdefault(self.views[variable].leaf, otherwise)
        elif _is_in(variable, self.changed):
            for leaf, reason in self.changed[variable].items():
                self.obstacles.setdefault(leaf, reason)


def _example(shape: Any, among: Any) -> tuple[int, list[int]]:
    """Split axes into that of the examples and the others."""
    [*found] = [a for a in among if shape[a] == MANY]
    if len(found) != 1:
        raise _Obstacle("the examples of its inputs share an axis with something else")
    return found[0], [a for a in among if a != found[0]]


def _has_examples(variable: Any) -> bool:
    sizes = getattr(variable.aval, "shape", ())
    return 0 in sizes or [size % MANY for size in sizes].count(0) == 1


def _counts(equation: Any, variable: Any) -> bool:
    """Whether a variable is the counter of a loop, which only seems to depend on its inputs."""
    is_loop, aval = equation.primitive.name in ("scan", "while"), variable.aval
    return is_loop and not aval.shape and jnp.issubdtype(aval.dtype, jnp.integer)


def _mixes(equation: Any, outputs: list[Any], data: set[Any]) -> bool:
    """Whether what depends on the inputs has lost the examples' axis, or runs along it."""
    # The axis has a multiple of MANY, a prime, as its size; examples times examples have two.
    if not all(map(_has_examples, outputs)):
        return True
    how, name = equation.params, equation.primitive.name
    along = []
    if name.startswith("cum"):
        along = [how["axis"]]
    elif name == "sort":
        along = [how["dimension"]]
    elif name == "rev":
        along = how["dimensions"]
    elif name == "fft":
        along = range(-len(how["fft_lengths"]), 0)
    elif "window_dimensions" in how:
        along = [a for a, size in enumerate(how["window_dimensions"]) if size > 1]
    elif name == "conv_general_dilated":
        along = how["dimension_numbers"].lhs_spec[1:]
    shapes = [v.aval.shape for v in equation.invars[:1] if _is_in(v, data)]
    return any(shape[axis] % MANY == 0 for shape in shapes for axis in along)


def _moved(equation: Any, axes: Axes) -> Axes | None:
    """Follow axes through an equation that only moves entries; None if it does more."""
    name, how = equation.primitive.name, equation.params
    [source, *_], [result] = equation.invars, equation.outvars
    old, new = source.aval.shape, result.aval.shape
    if name == "convert_element_type":
        return axes if jnp.issubdtype(result.aval.dtype, jnp.floating) else None
    if name in ("copy", "copy_p", "reduce_precision", "sharding_constraint"):
        return axes
    if name == "transpose":
        return tuple(axes[a] for a in how["permutation"])
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(axes, old, new)
    if name == "tile" and all(n in (1, m) for n, m in zip(old, new, strict=True)):
        return tuple(a if n == m else None for a, n, m in zip(axes, old, new, strict=True))
    if name == "broadcast_in_dim":
        moved: list = [() if size == 1 else None for size in new]
        for a, place in enumerate(how["broadcast_dimensions"]):
            moved[place] = axes[a] if old[a] == new[place] else None
        return tuple(moved)
    return None


def _reshaped(axes: Axes, old: Any, new: Any) -> Axes | None:
    """Follow axes through a reshape that merges neighbours, or adds and drops axes of size one."""
    left = [(a, size) for a, size in zip(axes, old, strict=True) if size > 1]
    result: list = []
    for wanted in new:
        group, size = [], 1
        while size < wanted and left:
            a, n = left.pop(0)
            group.append(a)
            size *= n
        if size != wanted or (None in group and set(group) != {None}):
            return None
        result.append(None if None in group else sum(group, ()))
    return tuple(result)


def _looked_up(equation: Any, view: _View, shape: tuple[int, ...]) -> Axes | None:
    """Give the axes of rows looked up in a leaf, None for the places; None if it is no look-up."""
    how, result = equation.params["dimension_numbers"], equation.outvars[0].aval
    sizes = equation.params["slice_sizes"]
    plain = tuple((a,) for a in range(len(shape)))
    if view.axes != plain or 0 not in how.start_index_map:
        return None
    if sizes != (1, *shape[1:]) or how.operand_batching_dims:
        return None
    kept = [a for a in range(len(shape)) if a not in how.collapsed_slice_dims]
    axes: list = [None] * result.ndim
    for place, axis in zip(how.offset_dims, kept, strict=True):
        axes[place] = (axis,) if axis else ()
    return tuple(axes)


def _inside(name: str) -> str | None:
    # Loops, branches and functions with derivatives of their own have equations of their own.
    if name in ("scan", "while", "cond") or name.startswith("custom_"):
        return f"it is used inside {name}, where layers are not looked for"
    return None


def _is_in(variable: Any, known: Any) -> bool:
    return not isinstance(variable, Literal) and variable in known
