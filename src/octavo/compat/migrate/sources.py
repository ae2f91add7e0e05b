"""Signatures and names in installed modules, read from their source without importing them.

The answer is None for what the source does not show: names of a module with `__getattr__` or `import *`, arguments of a
function with `**kwargs`.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from octavo.compat.migrate.values import Values

_TE_LAYERS = ("octavo.compat.te.layers", "octavo.compat.te.attention")
_ALIASES = {"RMSNorm": "LayerNorm"}
_FOLLOWED = ("octavo.", "torch.", "accelerate.")
"""Packages whose imports are followed."""
_NN = {
    "Linear": "octavo.nn.linear", "LayerNormLinear": "octavo.nn.linear", "LayerNormMLP": "octavo.nn.mlp",
    "GroupedLinear": "octavo.nn.grouped", "LayerNorm": "octavo.nn.norm", "RMSNorm": "octavo.nn.norm",
    "DotProductAttention": "octavo.nn.attention", "MultiheadAttention": "octavo.nn.attention",
    "TransformerLayer": "octavo.nn.block",
}  # fmt: skip
"""Layer → the module of its base in `octavo.nn`."""
_INNER = ("handover", "inter", "counted")
"""Arguments that Octavo's layers pass to each other."""
_MODULE = ("torch.nn.modules.module", "Module")
_TORCH = {"nn.Module": _MODULE, "Module": _MODULE, "nn.Linear": ("torch.nn.modules.linear", "Linear")}
"""Base → (its module, its name)."""


@cache
def _tree(module: str) -> ast.Module | None:
    root, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(root)  # the root alone: nothing is imported
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, *rest.split(".")) if rest else Path(folder)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                try:
                    return ast.parse(file.read_bytes())
                except (OSError, SyntaxError, ValueError):
                    return None
    return None


def has_name(module: str, name: str) -> bool | None:
    """True if an installed module has a name; None if its source does not show it."""
    tree = _tree(module)
    if tree is None or _tree(f"{module}.{name}") is not None:
        return None if tree is None else True
    names: set[str] = set()
    for node in _outermost(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if name in names:
        return True
    return None if {"*", "__getattr__"} & names else False


def _outermost(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module outside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _outermost(child)


class Signature(NamedTuple):
    """The arguments of a function or class.

    Attributes:
        names: of all arguments, in order.
        positional: number of the first ones, which may be positional.
        required: names without a default.
        kinds: name → annotation, as text; for Transformer Engine's layers the type of the default.
    """

    names: tuple[str, ...]
    positional: int
    required: tuple[str, ...]
    kinds: Mapping[str, str] = MappingProxyType({})


def arguments_of(module: str, name: str) -> tuple[str, ...] | None:
    """The arguments of a function or class of Octavo, in order; None if the source does not show them."""
    signature = signature_of(module, name)
    return None if signature is None else signature.names


def signature_of(module: str, name: str) -> Signature | None:
    """The signature of a function or class of Octavo; None if the source does not show it."""
    if module in _TE_LAYERS:
        return _te_signatures().get(_ALIASES.get(name, name))
    for node, home in _found(module, name):
        if isinstance(node, ast.FunctionDef):
            return _signature(node, skip=0)
        inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if inits:
            return _signature(inits[0], skip=1)
        is_data = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        return _of_fields(node) if is_data and all(_is_plain(base, home) for base in node.bases) else None
    return None


@cache
def constructor(layer: str) -> Signature | None:
    """The constructor's signature of one of Transformer Engine's layers, with the additional arguments of Octavo's."""
    signature = _te_signatures().get(_ALIASES.get(layer, layer))
    more = list(tables("octavo.nn.arguments", ("ARGUMENTS",)).get("ARGUMENTS", {}).get(layer, {}))
    base: str | None = layer
    kinds = dict(signature.kinds) if signature is not None else {}
    while signature is not None and base is not None:
        node = next((each for each, _ in _found(_NN[layer], base)), None)
        methods = [each for each in getattr(node, "body", ()) if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        of_forward = _signature(methods[0], skip=1, rest=True) if methods else None
        more += of_forward.names if of_forward is not None else ()
        kinds = (dict(of_forward.kinds) if of_forward is not None else {}) | kinds
        bases = [each.id for each in getattr(node, "bases", ()) if isinstance(each, ast.Name)]
        base = None if methods or not bases else bases[0]
    names = () if signature is None else tuple(dict.fromkeys((*signature.names, *more)))
    return signature if signature is None else signature._replace(names=names, kinds=kinds)


@cache
def forward_of(layer: str) -> Signature | None:
    """The signature of a call of one of Transformer Engine's layers; None if the sources do not show it."""
    names: list[str] = []
    required: tuple[str, ...] = ()
    positional = None
    kinds: dict[str, str] = {}
    module = next((m for m in _TE_LAYERS if any(_found(m, layer))), None)
    while module is not None:
        node = next((each for each, _ in _found(module, layer)), None)
        if not isinstance(node, ast.ClassDef):
            return None
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "forward"]
        if methods:
            signature = _signature(methods[0], skip=1, rest=True)
            if signature is None:
                return None
            inside = (
                signature.names[signature.positional :] if positional is not None else signature.names
            )  # passed on by **kwargs
            names += [each for each in inside if each not in (*names, *_INNER)]
            kinds = dict(signature.kinds) | kinds
            if positional is None:
                positional, required = signature.positional, signature.required
            if methods[0].args.kwarg is None:
                break
            if methods[0].args.kwarg.arg == "others" and not module.startswith("octavo.compat"):
                arguments = tables("octavo.nn.arguments", ("ARGUMENTS",)).get("ARGUMENTS", {})
                names += [each for each in arguments.get(f"{layer}.forward", {}) if each not in names]
                break
        module = None if module.startswith("octavo.nn") else _NN.get(layer)
    return None if positional is None else Signature(tuple(names), positional, required, kinds)


def method_of(module: str, name: str, method: str) -> Signature | None:
    """The signature of a method of a class of Octavo; None for a property, and if the source does not show it."""
    node, home = next(iter(_found(module, name)), (None, module))
    methods = [each for each in getattr(node, "body", ()) if isinstance(each, ast.FunctionDef) and each.name == method]
    if not methods:  # of a base
        bases = [each.id for each in getattr(node, "bases", ()) if isinstance(each, ast.Name)]
        return next((inherited for base in bases if (inherited := method_of(home, base, method)) is not None), None)
    kinds = list(map(ast.unparse, methods[0].decorator_list))
    return None if "property" in kinds else _signature(methods[0], skip=int("staticmethod" not in kinds))


def fields_of(module: str, name: str) -> tuple[str, ...] | None:
    """The annotated fields of a class; None if there is no such class."""
    for node, _ in _found(module, name):
        if isinstance(node, ast.ClassDef):
            return _of_fields(node).names
    return None


def has_attribute(module: str, name: str, attribute: str) -> bool | None:
    """True if a class of Octavo, or an instance, has an attribute; None if the source does not show it."""
    attributes = members(module, name)
    return None if attributes is None else attribute in attributes or attribute.startswith("__")


@cache
def members(module: str, name: str) -> frozenset[str] | None:
    """Attributes of a class, of its bases, and of `self` in its methods; None if a base is not known."""
    node, home = next(iter(_found(module, name)), (None, ""))
    if not isinstance(node, ast.ClassDef):
        return None
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.id if isinstance(each, ast.Name) else each.attr)
    for base in map(ast.unparse, node.bases):
        if base in ("Enum", "NamedTuple", "object"):
            names |= {"name", "value"} if base == "Enum" else set()
            continue
        first, _, rest = base.rpartition(".")
        inside = members(*_TORCH.get(base, (_imported(home, first) if first else home, rest)))
        if inside is None:
            return None
        names |= inside
    return frozenset(names)


def _imported(module: str, name: str) -> str:
    """The dotted name of a module that another one imports under a name."""
    tree = _tree(module)
    for node in tree.body if tree is not None else ():
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                return f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
    return name


def _found(module: str, name: str) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, str]]:
    """(definition of a name, its module), followed through imports."""
    tree = _tree(module)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ImportFrom) and not node.level and node.module and node.module.startswith(_FOLLOWED):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    yield from _found(node.module, alias.name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            yield node, module
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id != name:
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from _found(module, node.value.id) if name in targets else ()


def _is_plain(base: ast.expr, module: str) -> bool:
    """True for a base class of the same module that adds no arguments."""
    definition = next((node for node, _ in _found(module, base.id)), None) if isinstance(base, ast.Name) else None
    return (
        isinstance(definition, ast.ClassDef)
        and not definition.bases
        and not _of_fields(definition).names
        and not any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in definition.body)
    )


def _of_fields(node: ast.ClassDef) -> Signature:
    fields = [
        each
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    ]
    names = tuple(each.target.id for each in fields if isinstance(each.target, ast.Name))
    required = tuple(name for name, each in zip(names, fields, strict=True) if each.value is None)
    kinds = {name: ast.unparse(each.annotation) for name, each in zip(names, fields, strict=True)}
    return Signature(names, len(names), required, kinds)


def _signature(node: ast.FunctionDef, *, skip: int, rest: bool = False) -> Signature | None:
    """The signature of a definition; None with `*args` or `**kwargs`. skip: leading arguments. rest: allow `**kwargs`."""
    args = node.args
    if args.vararg is not None or (args.kwarg is not None and not rest):
        return None
    first = [*args.posonlyargs, *args.args][skip:]
    required = [each.arg for each in first[: len(first) - len(args.defaults)]]
    required += [each.arg for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    every = (*first, *args.kwonlyargs)
    kinds = {each.arg: ast.unparse(each.annotation) for each in every if each.annotation is not None}
    return Signature(tuple(each.arg for each in every), len(first), tuple(required), kinds)


def tables(module: str, names: tuple[str, ...], reference: Any = None) -> dict[str, Any]:
    """Tables of a module of Octavo that imports torch, without importing it: assignments that need no import are executed.

    reference: takes the place of `octavo.kernels.reference`.
    """
    tree = _tree(module)
    space: dict[str, Any] = {"NamedTuple": NamedTuple, "Any": Any, "reference": reference, "__name__": module}
    for node in tree.body if tree is not None else ():
        plain = isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        if plain or (isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["NamedTuple"]):
            code = compile(
                ast.Module([node], []), module, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
            )
            with contextlib.suppress(Exception):  # it needs an import
                exec(code, space)
    return {name: space[name] for name in names if name in space}


@cache
def _te_signatures() -> dict[str, Signature]:
    """Layer → signature, from the table of Transformer Engine's signatures."""
    tree = _tree("octavo.compat.te.signatures")
    texts = Values(tree).last("_TEXTS") if tree is not None else None
    if not isinstance(texts, dict):
        return {}
    signatures = {}
    for name, text in texts.items():
        if isinstance(text, str):
            parts = [part.partition("=") for part in text.split()]
            required = tuple(part[0] for part in parts if not part[1])
            kinds = {part[0]: kind for part in parts if (kind := _kind_of(part[2])) is not None}
            signatures[name] = Signature(tuple(part[0] for part in parts), len(parts), required, kinds)
    return signatures


def _kind_of(default: str) -> str | None:
    """The type of an argument by its default; None for a default of None."""
    value = ast.literal_eval(default) if default else None
    return None if value is None else "bool" if isinstance(value, bool) else "str" if isinstance(value, str) else "float"


def takes(annotation: str, value: Any) -> bool:
    """True if an annotation allows a constant; only built-in types and collections are known."""
    try:
        return _takes(ast.parse(annotation, mode="eval").body, value)
    except SyntaxError:
        return False


def _takes(kind: ast.expr, value: Any) -> bool:
    if isinstance(kind, ast.BinOp):
        return _takes(kind.left, value) or _takes(kind.right, value)
    if isinstance(kind, ast.Constant):
        return value is None if kind.value is None else isinstance(kind.value, str) and takes(kind.value, value)
    if isinstance(kind, ast.Subscript):
        outer, inner = ast.unparse(kind.value).rpartition(".")[2], kind.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer == "Literal":
            return any(
                isinstance(part, ast.Constant) and type(part.value) is type(value) and part.value == value for part in parts
            )
        if outer in ("Union", "Optional"):
            return (outer == "Optional" and value is None) or any(_takes(part, value) for part in parts)
        whole = [part for part in parts if not (isinstance(part, ast.Constant) and part.value is Ellipsis)]
        if isinstance(value, list) and outer not in ("dict", "Dict", "Mapping", "MutableMapping"):
            known = [each for each in value if isinstance(each, bool | int | float | str | None)]
            return _takes(ast.Name(outer), value) and all(any(_takes(part, each) for part in whole) for each in known)
        return _takes(ast.Name(outer), value)
    name = ast.unparse(kind).rpartition(".")[2]
    if name == "Any":
        return True
    kinds: dict[str, tuple[type, ...]] = {
        "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "PathLike": (str,), "Path": (str,),
        **dict.fromkeys(("list", "List", "Sequence", "tuple", "Tuple", "Iterable", "Collection", "set"), (list,)),
        **dict.fromkeys(("dict", "Dict", "Mapping", "MutableMapping"), (dict,)),
    }  # fmt: skip
    return isinstance(value, kinds.get(name, ())) and (name == "bool" or not isinstance(value, bool))
