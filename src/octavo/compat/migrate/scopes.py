"""Python's scoping rules for a script: the names that a function binds, and the effects of its code on names of outer scopes.

For functions that the interpreter does not follow, this is all that is known. Omitted: the values of names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.compat.migrate.heap import LEAK, METHOD, READ

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
READERS = ("print", "len", "repr", "str", "sorted", "isinstance", "bool", "list", "tuple", "dict", "id", "display", "min",
           "max", "sum", "any", "all", "enumerate", "zip", "reversed")  # fmt: skip
"""Functions of Python and Jupyter that change nothing, and return nothing of their arguments but entries."""
_GETTERS = ("items", "keys", "values", "get", "copy")
ANY_NAME = ("exec", "eval", "globals", "locals", "breakpoint", "__import__", "__builtins__")
"""Built-ins with access to every name."""
ANY_FRAME = (
    "__globals__", "__builtins__", "__closure__", "__code__", "__defaults__", "__kwdefaults__", "f_globals", "f_locals",
    "f_back", "_getframe", "cell_contents", "user_ns", "user_global_ns", "run_cell", "run_code", "__main__", "settrace",
    "setprofile",
)  # fmt: skip
"""Attributes with access to names of other frames."""


@dataclass
class Effects:
    """The effects of a piece of code on names of outer scopes.

    Attributes:
        loads: name → its strongest use, `READ`, `METHOD` or `LEAK`.
        shared: bound names of the module.
        outer: bound names of an enclosing function.
        anything: the code may change any name.
    """

    loads: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)
    anything: bool = False


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    """All parameters of a function."""
    args = node.args
    more = [each for each in (args.vararg, args.kwarg) if each is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *more]


def scope_nodes(parts: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of one scope; of inner scopes only nodes evaluated in this one, and walrus targets of comprehensions."""
    left = list(parts)
    while left:
        node = left.pop()
        yield node
        if isinstance(node, Scope):
            left += _evaluated_outside(node)
        elif isinstance(node, _COMPREHENSIONS):
            left.append(node.generators[0].iter)
            yield from (each for each in ast.walk(node) if isinstance(each, ast.NamedExpr))
        else:
            left += ast.iter_child_nodes(node)


def _evaluated_outside(node: Scope) -> list[ast.AST]:
    """Expressions of a definition that are evaluated in the enclosing scope."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *(word.value for word in node.keywords)]
    expressions: list[ast.AST] = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
    if not isinstance(node, ast.Lambda):
        expressions += node.decorator_list
        expressions += [each.annotation for each in arguments(node) if each.annotation is not None]
        expressions += [node.returns] if node.returns is not None else []
    return expressions


def bound(parts: Iterable[ast.AST]) -> set[str]:
    """Names that code binds or unbinds in its scope."""
    return {name for node in scope_nodes(parts) for name in binds(node)}


def binds(node: ast.AST) -> set[str]:
    """Names that a node itself binds or unbinds, without its child nodes."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.NamedExpr):
        return {node.target.id}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return {node.name}
    if isinstance(node, ast.MatchMapping) and node.rest:
        return {node.rest}
    if type(node).__name__ == "TypeAlias":
        return {node.name.id}  # type: ignore[attr-defined]
    return set()


def declared(parts: Iterable[ast.AST], kind: type[ast.Global] | type[ast.Nonlocal]) -> set[str]:
    """The names that code declares global, or nonlocal."""
    return {name for node in scope_nodes(parts) if isinstance(node, kind) for name in node.names}


def local_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """The local names of a function."""
    body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    outside = declared(body, ast.Global) | declared(body, ast.Nonlocal)
    return ({each.arg for each in arguments(node)} | bound(body)) - outside


def is_plain_function(node: ast.AST) -> bool:
    """True for a function whose call runs its body and gives its return value (no generator, no coroutine)."""
    if isinstance(node, ast.Lambda):
        return not any(isinstance(each, ast.Yield | ast.YieldFrom | ast.Await) for each in scope_nodes([node.body]))
    return (
        isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and not any(isinstance(each, ast.Yield | ast.YieldFrom) for each in scope_nodes(node.body))
    )


def starts_alone(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Names whose `fit` a function calls, with names and constants as arguments; empty if it does anything else."""
    body: list[ast.expr | None] = []
    for each in [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body:
        if not isinstance(each, ast.Expr | ast.Return):
            return set()
        body.append(each.value)
    names: set[str] = set()
    for value in body:
        if isinstance(value, ast.Constant) or value is None:
            continue
        if not isinstance(value, ast.Call):
            return set()
        function = value.func
        if not (isinstance(function, ast.Attribute) and function.attr == "fit" and isinstance(function.value, ast.Name)):
            return set()
        values = [*value.args, *(word.value for word in value.keywords)]
        if not all(isinstance(each, ast.Name | ast.Constant) for each in values):
            return set()
        names.add(function.value.id)
    return names


class Scopes:
    """Effects of the functions and statements of a syntax tree."""

    def __init__(self, tree: ast.AST) -> None:
        self.parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._everywhere = {
            name
            for node in ast.walk(tree)
            if isinstance(node, Scope | ast.Module)
            for name in (bound(node.body) if not isinstance(node, ast.Lambda) else ())
        } | {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}

    def of_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Effects:
        """The effects of a function's body, nested functions included."""
        effects = Effects()
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
        self._gather(body, local_names(node), declared(body, ast.Global), declared(body, ast.Nonlocal), effects)
        return effects

    def of_code(self, parts: Iterable[ast.AST]) -> Effects:
        """The effects of code on the names of its scope, except names that it binds (`bound`)."""
        effects = Effects()
        self._gather(list(parts), set(), set(), set(), effects)
        return effects

    def _gather(self, parts: Iterable[ast.AST], local: set[str], shared: set[str], outer: set[str], effects: Effects) -> None:
        """Add the effects of code in one scope with these local, module's (`shared`) and enclosing (`outer`) names."""
        parts = list(parts)
        self._walk(parts, local, shared, outer, effects)
        names = bound(parts)
        effects.shared |= names & shared
        effects.outer |= names & outer

    def _walk(self, parts: Iterable[ast.AST], local: set[str], shared: set[str], outer: set[str], effects: Effects) -> None:
        for node in parts:
            if isinstance(node, ast.Name):
                if node.id in local:
                    continue
                if isinstance(node.ctx, ast.Load):
                    effects.loads[node.id] = max(self.level(node), effects.loads.get(node.id, 0))
                    effects.anything |= node.id in ANY_NAME and node.id not in self._everywhere
                    effects.anything |= node.id == "vars" and "vars" not in self._everywhere and not self._is_of_object(node)
            elif isinstance(node, ast.Attribute):
                effects.anything |= node.attr in ANY_FRAME
                self._walk([node.value], local, shared, outer, effects)
            elif isinstance(node, Scope):
                self._walk(_evaluated_outside(node), local, shared, outer, effects)
                self._inside(node, local, effects)
            elif isinstance(node, _COMPREHENSIONS):
                self._walk([node.generators[0].iter], local, shared, outer, effects)
                targets = {
                    each.id
                    for part in node.generators
                    for each in ast.walk(part.target)
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                }
                rest = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.comprehension)]
                rest += [each for part in node.generators for each in (part.target, *part.ifs)]
                rest += [part.iter for part in node.generators[1:]]
                self._walk(rest, local | targets, shared, outer, effects)
            else:
                self._walk(ast.iter_child_nodes(node), local, shared, outer, effects)

    def _inside(self, node: Scope, local: set[str], effects: Effects) -> None:
        """Add the effects of a definition's body, except on `local`, the names of the enclosing scope."""
        if isinstance(node, ast.ClassDef):
            inner = Effects()
            shared = declared(node.body, ast.Global)
            self._gather(node.body, set(), shared, declared(node.body, ast.Nonlocal), inner)
        else:
            inner = self.of_function(node)
        for name, level in inner.loads.items():
            if name not in local:
                effects.loads[name] = max(level, effects.loads.get(name, 0))
        effects.shared |= inner.shared
        effects.outer |= inner.outer - local
        effects.anything |= inner.anything

    def _is_of_object(self, node: ast.Name) -> bool:
        parent = self.parents.get(id(node))
        return isinstance(parent, ast.Call) and parent.func is node and len(parent.args) == 1

    def level(self, node: ast.Name) -> int:
        """The strongest use of a name's object where the name is loaded."""
        parent = self.parents.get(id(node))
        if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.ctx, ast.Load):
            return READ
        if isinstance(parent, ast.Compare) and parent.left is not node:
            kinds = [kind for kind, each in zip(parent.ops, parent.comparators, strict=True) if each is node]
            return READ if all(isinstance(kind, ast.In | ast.NotIn) for kind in kinds) else LEAK
        if isinstance(parent, ast.Dict) and any(key is None and value is node for key, value in _pairs(parent)):
            return READ
        if isinstance(parent, ast.keyword) and parent.arg is None:
            return READ
        if (isinstance(parent, ast.For | ast.comprehension) and parent.iter is node) or isinstance(parent, ast.FormattedValue):
            return READ
        if isinstance(parent, ast.If | ast.While | ast.IfExp) and parent.test is node:
            return READ
        if isinstance(parent, ast.Attribute):
            around = self.parents.get(id(parent))
            called = isinstance(around, ast.Call) and around.func is parent
            if not isinstance(parent.ctx, ast.Load):
                return LEAK
            return READ if called and parent.attr in _GETTERS else METHOD
        if isinstance(parent, ast.Call) and node in parent.args and isinstance(parent.func, ast.Name):
            name = parent.func.id
            return READ if name in READERS and name not in self._everywhere and not parent.keywords else LEAK
        return LEAK


def _pairs(node: ast.Dict) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    return zip(node.keys, node.values, strict=True)
