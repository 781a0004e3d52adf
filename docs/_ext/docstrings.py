"""Show docstrings and signatures as they are written in the source.

Signatures keep the names of types (`Params`, `Array`) that Python has resolved when it runs them.
"""

import ast
import builtins
import enum
import inspect
import textwrap
from collections.abc import Callable

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

from _ext import markup, public


def process_docstring(
    _app: Sphinx, what: str, name: str, value: object, _options: object, lines: list[str]
) -> None:
    """Mark up a docstring, unless Python made it."""
    is_made = inspect.isclass(value) and value.__doc__ == _automatic(value)
    lines[:] = [] if is_made or _is_constant(what, name) else markup.marked_up(lines)


def process_constant(
    _app: Sphinx, what: str, name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Take the text of a constant from the source that defines it.

    It comes after napoleon, which would take the words before a colon for a type.
    """
    if _is_constant(what, name):
        lines[:] = markup.marked_up(public.constants_text(name))


def _is_constant(what: str, name: str) -> bool:
    # Sphinx takes some functions for data: those of jax.custom_vmap are objects.
    module, _, own = name.rpartition(".")
    return what == "data" and public.kind(module, own) in ("type", "value")


def _automatic(value: type) -> str | None:
    """Return the docstring that `NamedTuple` and `dataclass` make up."""
    fields = getattr(value, "_fields", None) or getattr(value, "__match_args__", ())
    return f"{value.__name__}({', '.join(fields)})"


def process_signature(
    _app: Sphinx, what: str, _name: str, value: object, _options: object, *_: str | None
) -> tuple[str, str] | None:
    """Write a signature from the source; None leaves what Python says of it."""
    if what in ("function", "method"):
        return of_function(value)
    return of_class(value) if what == "class" else None


def of_function(value: object) -> tuple[str, str] | None:
    """Return the parameters and the result of a function, as its source has them."""
    function = inspect.unwrap(value)
    function = getattr(function, "__func__", function)
    node = _node(function)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if set(inspect.signature(function).parameters) != {x.arg for x in _arguments(node.args)}:
        return None
    return _written(node, function.__module__, is_method="." in function.__qualname__)


def of_class(value: type) -> tuple[str, str] | None:
    """Return the parameters of a class: those of its `__init__` or `__new__`, or its fields."""
    if issubclass(value, enum.Enum):
        return "", ""
    bodies = [(x, _node(x)) for x in reversed(value.__mro__) if x.__module__[:9] == "fisherjax"]
    shown: dict[str, str] = {}
    for owner, node in bodies:
        for line in node.body if node else []:
            if isinstance(line, ast.FunctionDef) and line.name in ("__init__", "__new__"):
                return _written(line, owner.__module__, is_method=True)[0], ""
            if isinstance(line, ast.AnnAssign):
                written = _qualifier(owner.__module__)(line.annotation)
                shown[line.target.id] = f"{line.target.id}: {written}{_default(line.value)}"
    try:
        # flax adds two to every module.
        given = [x for x in inspect.signature(value).parameters if x not in ("parent", "name")]
    except (TypeError, ValueError):
        return None
    known = set(given) <= shown.keys()
    return (f"({', '.join(shown[name] for name in given)})", "") if known else None


def _node(value: object) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [x for x in (arguments.vararg, arguments.kwarg) if x]


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        # The default of a dataclass's field, and of one that the class itself makes.
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        value = given.get("default", ast.Constant(...) if "default_factory" in given else None)
    if value is None:
        return ""
    shown = ast.unparse(value)
    return f" = {shown}" if len(shown) < 60 else " = ..."


def _written(node: ast.FunctionDef, module: str, *, is_method: bool) -> tuple[str, str]:
    qualify, arguments = _qualifier(module), node.args
    static = any(getattr(x, "id", "") == "staticmethod" for x in node.decorator_list)
    if is_method and not static:
        (arguments.posonlyargs or arguments.args).pop(0)
    for argument in _arguments(arguments):
        if argument.annotation:
            argument.annotation = ast.Name(qualify(argument.annotation))
    result = qualify(node.returns) if node.returns else ""
    return f"({ast.unparse(arguments)})", result


def _qualifier(module: str) -> Callable[[ast.expr], str]:
    """Return what writes an annotation of a module with the full names of the reference."""

    class Qualify(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            # A string is a type that is defined further down.
            is_name = isinstance(node.value, str) and node.value.isidentifier()
            return self.visit_Name(ast.Name(node.value)) if is_name else node

        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Name(shortened(full_name(module, node.id)))

        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            owner = ast.unparse(self.visit(node.value)).removeprefix("~")
            return ast.Name(shortened(full_name(owner, node.attr)))

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            if ast.unparse(node.value).endswith("Literal"):
                return node
            return self.generic_visit(node)

    return lambda annotation: ast.unparse(Qualify().visit(annotation))


def full_name(module: str, name: str) -> str:
    """Return the full name of what a module calls `name`: that of the reference, where it is."""
    if module.partition(".")[0] != "fisherjax":
        return f"{module}.{name}"
    here = public.sources(module)
    if name not in here.defined and name not in here.imported and hasattr(builtins, name):
        return name
    source, theirs = public.origin(module, name)
    plain = f"{source}.{theirs}" if theirs else source
    return public.documented().get((source, theirs), plain)


def shortened(name: str) -> str:
    """Return a name of which Sphinx shows the last part, and links the whole."""
    return f"~{name}" if "." in name else name


def skip_member(
    _app: Sphinx, _what: str, name: str, value: object, _skip: bool, _options: object
) -> bool | None:
    """Leave out fields, which the class's own docstring describes, and underscored names."""
    is_field = type(value).__name__ in ("_tuplegetter", "member_descriptor")
    return True if is_field or name.startswith("_") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect all of that; what is marked up here is read by napoleon, at 500."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as our docstrings call them
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
    app.connect("autodoc-process-docstring", process_constant, priority=600)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
