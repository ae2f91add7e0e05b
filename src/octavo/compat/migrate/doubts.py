"""Warnings about code of a script that static analysis cannot check, and that a run may refuse.

These are attributes of a layer's submodules, writes to them, calls of objects that may be layers, and dtypes that no layer
supports. Omitted: dtypes of tensors from files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from octavo.compat.migrate.meanings import Meanings, assigned
from octavo.compat.migrate.names import is_layer

_PARAMETER = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")
_OF_TENSORS = (
    "data", "grad", "shape", "dtype", "device", "sum", "size", "numel", "requires_grad", "detach", "clone", "float",
    "norm", "mean", "abs", "copy_", "zero_", "fill_", "dim", "T", "t", "cpu", "to", "item", "view", "reshape",
    "requires_grad_", "register_hook", "std", "min", "max", "normal_", "uniform_", "ndim", "contiguous", "is_contiguous",
    "data_ptr", "stride", "element_size", "half", "bfloat16", "square", "flatten", "is_meta", "tolist", "numpy",
    "backward", "mul_", "add_", "div_", "any", "all",
)  # fmt: skip
"""Attributes of a parameter that need no note."""
_META = ("recipe", "num_gemms", "fp8_checkpoint")
"""Entries that `fp8_meta` always has."""
_WIDE = ("torch.float64", "torch.double", "torch.DoubleTensor", "numpy.float64", "numpy.double", "torch.complex64")
_COUNTING = ("randint", "arange", "randperm", "argmax", "argsort", "from_numpy", "bincount", "LongTensor", "IntTensor")
"""torch functions whose results have, or may have, an integer dtype, which no layer supports."""
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "short", "int", "long", "bool")
_REACHED = (
    "get_submodule",
    "children",
    "modules",
    "named_children",
    "named_modules",
    "get",
    "pop",
    "values",
    "items",
    "__getitem__",
)
"""Methods that return a module without a name."""


def doubts(nodes: Sequence[ast.AST], meanings: Meanings) -> Iterator[tuple[ast.AST, str]]:
    """(node, text of the note) for each. nodes: all nodes of the tree."""
    seen: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Subscript) and id(node) not in seen:
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute | ast.Subscript):
                inner = inner.value
                seen.add(id(inner))
            yield from _inside(node, meanings)
    layers = [
        kind
        for node in nodes
        if isinstance(node, ast.Call | ast.Name | ast.Attribute)
        for kind in meanings.layers_of(node)
        if kind
    ]
    if not layers:
        return
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        for target, value in assigned(node):
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(value)
    unnamed = {
        each.id
        for node in nodes
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        for each in ast.walk(node.target)
        if isinstance(each, ast.Name)
    }
    several = any(kind.endswith((".GroupedLinear", ".DotProductAttention")) for kind in layers)
    for node in nodes:
        yield from _wide(node, meanings)
        if isinstance(node, ast.Call):
            plain = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
            if not (plain and not several) and _may_be_layer(node.func, meanings, values, unnamed):
                yield node, "this may be a call of a layer; its arguments are not checked"
            yield from _counted(node, meanings, values)


def _inside(node: ast.Attribute | ast.Subscript, meanings: Meanings) -> Iterator[tuple[ast.AST, str]]:
    """A chain of attributes and entries that begins at a layer."""
    chain: list[ast.Attribute | ast.Subscript] = [node]
    while isinstance(chain[0].value, ast.Attribute | ast.Subscript):
        chain.insert(0, chain[0].value)
    for number, part in enumerate(chain):
        layer = meanings.attribute_of_layer(part) if isinstance(part, ast.Attribute) else None
        if layer is None or not isinstance(part, ast.Attribute):
            continue
        rest = chain[number + 1 :]
        if not isinstance(node.ctx, ast.Load) and not (rest and part.attr in _PARAMETER):
            yield node, f"{part.attr} of {layer} is written to, which is not checked"
        elif rest and not _is_usual(part.attr, rest[0]):
            yield node, f"{_named(rest[0])} of {part.attr} of {layer} is not checked"
        return


def _is_usual(name: str, part: ast.Attribute | ast.Subscript) -> bool:
    """True for attributes of a parameter, and entries of `fp8_meta`."""
    if name in _PARAMETER:
        return isinstance(part, ast.Subscript) or part.attr in _OF_TENSORS
    key = part.slice if isinstance(part, ast.Subscript) else None
    return name == "fp8_meta" and isinstance(key, ast.Constant) and key.value in _META


def _named(part: ast.Attribute | ast.Subscript) -> str:
    return part.attr if isinstance(part, ast.Attribute) else f"[{ast.unparse(part.slice)}]"


def _wide(node: ast.AST, meanings: Meanings) -> Iterator[tuple[ast.AST, str]]:
    """A mention of a dtype that no layer supports."""
    dotted = meanings.dotted(node) if isinstance(node, ast.Name | ast.Attribute) else None
    doubled = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "double"
    named = isinstance(node, ast.Constant) and node.value in ("float64", "double")
    if dotted in _WIDE or doubled or named:
        yield (
            node,
            "layers take inputs and parameters of bfloat16, float16 and float32: whether others reach one is not checked",
        )


def _may_be_layer(func: ast.expr, meanings: Meanings, values: dict[str, list[ast.expr]], unnamed: set[str]) -> bool:
    """True for a callee that may be a module without a name: an entry, the result of a method, a loop's item."""
    if meanings.dotted(func) is not None or meanings.layers_of(func):
        return False
    if isinstance(func, ast.Subscript):
        return True
    if isinstance(func, ast.Call):
        name = getattr(func.func, "id", getattr(func.func, "attr", ""))
        reached = name in (*_REACHED, "getattr", "next", "Sequential")
        return reached or _may_be_layer(func.func, meanings, values, unnamed)
    if isinstance(func, ast.Attribute) and func.attr in ("forward", "__call__"):
        return _may_be_layer(func.value, meanings, values, unnamed)
    if isinstance(func, ast.Name):
        return func.id in unnamed or any(
            isinstance(value, ast.Subscript | ast.Call) and _may_be_layer(value, meanings, {}, set())
            for value in values.get(func.id, ())
        )
    return False


def _counted(node: ast.Call, meanings: Meanings, values: dict[str, list[ast.expr]]) -> Iterator[tuple[ast.AST, str]]:
    """A call of a layer with an input that may have an integer dtype."""
    kinds = [target.dotted for target in meanings.targets(node) if target.dotted.endswith(".forward")]
    layers = [kind.removesuffix(".forward") for kind in kinds if is_layer(kind.removesuffix(".forward"))]
    inputs = node.args[: 3 if any(kind.endswith("DotProductAttention") for kind in layers) else 1]
    inputs = inputs + [word.value for word in node.keywords if word.arg in ("inp", "hidden_states")]
    if layers and any(_is_whole(each, meanings, values, 4) for each in inputs):
        yield node, f"the input of {layers[0]} may be of whole numbers: it takes bfloat16, float16 and float32"


def _is_whole(node: ast.expr, meanings: Meanings, values: dict[str, list[ast.expr]], depth: int) -> bool:
    """True if an expression may be a tensor of an integer dtype."""
    if depth == 0:
        return False
    if isinstance(node, ast.Name):
        return any(_is_whole(value, meanings, values, depth - 1) for value in values.get(node.id, ()))
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.BinOp) and all(
            _is_whole(each, meanings, values, depth) or isinstance(each, ast.Constant) for each in (node.left, node.right)
        )
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    dotted = [meanings.dotted(each) or "" for each in (*node.args, *(word.value for word in node.keywords))]
    types = [each.removeprefix("torch.") for each in dotted if each.startswith("torch.")]
    if any(each in _WHOLE for each in types):
        return True
    if any(each in ("float32", "float", "bfloat16", "float16", "half") for each in types) or name in (
        "float",
        "bfloat16",
        "half",
    ):
        return False
    if name in _COUNTING or (name in _WHOLE and isinstance(node.func, ast.Attribute)):
        return True
    if name in ("tensor", "full", "as_tensor") and node.args:
        numbers = [each.value for each in ast.walk(node.args[-1]) if isinstance(each, ast.Constant)]
        return bool(numbers) and not any(isinstance(each, float) for each in numbers)
    inside = node.func.value if isinstance(node.func, ast.Attribute) and meanings.dotted(node.func) is None else None
    return inside is not None and _is_whole(inside, meanings, values, depth)
