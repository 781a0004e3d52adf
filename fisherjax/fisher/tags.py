"""What kfac-jax tagged as layers in the trace of a network, and which of its tags hold.

Its graph matcher is generous. Where the formula of a layer (see `layers`) does not hold for what it
found, the result would be wrong without an error: so each tag is checked against the trace.

`jaxpr` is what kfac-jax extracts from a network applied to `MANY` examples: the trace
`jaxpr.jaxpr`, which takes the leaves of params and then the inputs, and the `layer_tags` in it,
whose first variable is the output of the layer. Variables are compared by identity.
"""

from collections import Counter
from typing import Any

# Layers are looked for at a number of examples that no other axis has, so that the axis of the
# examples is never mistaken for one of positions or channels that happens to be as long.
MANY = 10007
_CHANNELS_LAST = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))  # dimension_numbers of NHWC, HWIO


def read(
    jaxpr: Any, names: tuple[str, ...]
) -> tuple[dict[int, tuple[int, int | None]], dict[str, str]]:
    """Sort the tags into layers and leaves that no layer covers.

    Layers are {position of the tag: (number of the kernel's leaf, of the bias's or None)}, leaves
    without one {name: reason}.
    """
    uses = Counter(leaf for indices in jaxpr.layer_indices for leaf in indices)
    added = _added_biases(jaxpr)
    found, uncovered = {}, {}
    for position, indices in enumerate(jaxpr.layer_indices):
        reason = _obstacle(jaxpr, jaxpr.layer_tags[position])
        if any(uses[leaf] > 1 for leaf in indices):
            reason = "it is used by several layers (shared weights)"
        if reason is None:
            found[position] = indices[0], indices[1] if len(indices) == 2 else added.get(position)
        else:
            uncovered |= dict.fromkeys(indices, reason)
    # A bias that is added outside its layer's tag has a tag of its own.
    for _, bias in found.values():
        uncovered.pop(bias, None)
    return found, {names[leaf]: why or _explain(jaxpr, leaf) for leaf, why in uncovered.items()}


def mixes_examples(jaxpr: Any) -> bool:
    """Whether something that depends on the inputs has lost the axis of the examples on its way."""
    reached = _reached_from(jaxpr, jaxpr.jaxpr.invars[-1])
    # What still has the axis has a multiple of MANY, a prime, as its size.
    return any(getattr(variable.aval, "size", 0) % MANY for variable in reached.values())


def _obstacle(jaxpr: Any, tag: Any) -> str | None:
    """Say why a tag is not a layer that K-FAC covers, None if it is, "" if the uses must tell."""
    settings, variant = tag.params, tag.params["meta"].variant
    if variant == "scale_and_shift":
        return "it scales or shifts an activation, as in BatchNorm, LayerNorm and GroupNorm"
    if variant not in ("dense", "repeated_dense", "conv2d"):
        return ""
    output, inputs, kernel, *biases = tag.invars
    axes = inputs.aval.ndim
    if variant == "conv2d":
        if set((*settings["lhs_dilation"], *settings["rhs_dilation"])) != {1}:
            return "it belongs to a dilated or transposed convolution"
        if settings["feature_group_count"] != 1 or settings.get("batch_group_count", 1) != 1:
            return "it belongs to a grouped convolution"
        layout = settings["dimension_numbers"]
        if axes != 4 or tuple(map(tuple, layout)) != _CHANNELS_LAST:
            return "it belongs to a convolution other than of [B, H, W, C] by [kh, kw, cin, cout]"
    elif kernel.aval.ndim != 2:
        return f"it is a dense kernel of {kernel.aval.ndim} axes; only [inputs, outputs] is covered"
    elif settings.get("dimension_numbers") != (((axes - 1,), (0,)), ((), ())):
        return "it is not multiplied along the last axis of the layer's inputs"
    if inputs.aval.shape[0] != MANY:
        return "it belongs to a layer whose inputs do not have the examples as their first axis"
    if not all(_is_added_last(jaxpr, bias, output.aval.shape[-1]) for bias in biases):
        return "it belongs to a layer whose bias is not a vector [outputs] along the last axis"
    # Whether the layer is the only way from its parameters to the end of the network.
    ends = {id(variable) for variable in jaxpr.jaxpr.outvars}
    if any(ends & _reached_from(jaxpr, leaf, output).keys() for leaf in (kernel, *biases)):
        return "it, or what the layer makes of it, is used elsewhere too (shared weights)"
    return None


def _reached_from(jaxpr: Any, variable: Any, end: Any = None) -> dict[int, Any]:
    """Follow a variable to all that depends on it, by id, but not past `end`."""
    reached = {id(variable): variable}
    for equation in jaxpr.jaxpr.eqns:
        if any(id(v) in reached for v in equation.invars):
            reached |= {id(v): v for v in equation.outvars if v is not end}
    return reached


def _explain(jaxpr: Any, leaf: int) -> str:
    """Find out from its uses why the matcher did not recognise a parameter."""
    variable = jaxpr.jaxpr.invars[leaf]
    users = _consumers(jaxpr, variable)
    if not users:
        return "it is not used by the network"
    # Loops and branches have traces of their own, in a parameter with one of these names.
    for user in users:
        if any("jaxpr" in name or name == "branches" for name in user.params):
            return f"it is used inside {user.primitive.name}, where layers are not looked for"
    if len(users) > 1:
        return f"it is used {len(users)} times (shared weights)"
    if users[0].params.get("feature_group_count", 1) != 1:
        return "it belongs to a grouped convolution"
    result = users[0].outvars[0].aval.dtype
    if users[0].primitive.name == "convert_element_type" and result != variable.aval.dtype:
        return (
            f"it is cast to {result} between the parameter and its use; "
            "give the parameter and the activations one dtype"
        )
    return "its use was not recognised as a dense or two-dimensional convolution layer"


def _added_biases(jaxpr: Any) -> dict[int, int]:
    """Find biases added to a tagged convolution, as {position of the tag: leaf of the bias}.

    The matcher pairs kernel and bias of a native convolution. One that was tagged by hand has its
    bias outside the tag: y + broadcast(b), with no other use of y and b.
    """
    biases = {}
    for position, tag in enumerate(jaxpr.layer_tags):
        output, users = tag.invars[0], _consumers(jaxpr, tag.invars[0])
        is_added = len(users) == 1 and users[0].primitive.name == "add"
        # Four variables: output, inputs, kernel and a bias, which is inside the tag then.
        if tag.params["meta"].variant != "conv2d" or len(tag.invars) == 4 or not is_added:
            continue
        # None where the output is added to itself.
        (other,) = [v for v in users[0].invars if v is not output] or [None]
        producer = next((e for e in jaxpr.jaxpr.eqns if other in e.outvars), None)
        if producer is None or producer.primitive.name not in ("reshape", "broadcast_in_dim"):
            continue
        bias = producer.invars[0]
        is_leaf = any(bias is v for v in jaxpr.jaxpr.invars[:-1])
        if is_leaf and _is_added_last(jaxpr, bias, output.aval.shape[-1]):
            biases[position] = jaxpr.jaxpr.invars.index(bias)
    return biases


def _is_added_last(jaxpr: Any, bias: Any, outputs: int) -> bool:
    """Whether a bias is a vector [outputs], added along the last axis and used nowhere else."""
    users = _consumers(jaxpr, bias)
    if bias.aval.shape != (outputs,) or len(users) != 1:
        return False
    (user,), shape = users, users[0].outvars[0].aval.shape
    if user.primitive.name == "broadcast_in_dim":
        return shape[-1] == outputs and user.params["broadcast_dimensions"] == (len(shape) - 1,)
    # A reshape to [1, ..., 1, outputs]; or the bias itself is added.
    return shape[-1] == outputs and (user.primitive.name == "add" or set(shape[:-1]) <= {1})


def _consumers(jaxpr: Any, variable: Any) -> list[Any]:
    return [e for e in jaxpr.jaxpr.eqns if any(v is variable for v in e.invars)]
