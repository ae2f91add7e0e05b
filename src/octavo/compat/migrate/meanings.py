"""Resolves a script's names: imports and their aliases, subclasses, partials, and variables that hold layers.

A name that is bound both to a library and to something else is unsure. Layers are followed through assignments, wrappers and
parameters of the script's functions; places where they are not followed are listed in `strays`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from octavo.compat.migrate.names import METHODS, canonical, is_called, library_of

_ITSELF = ("to", "cuda", "cpu", "half", "float", "bfloat16", "double", "eval", "train", "requires_grad_", "apply", "to_empty")
"""Methods of a module that return it."""
_WRAPPERS = (
    "FullyShardedDataParallel", "DistributedDataParallel", "DataParallel", "compile", "checkpoint_wrapper", "offload_wrapper",
    "prepare", "deepcopy", "copy", "fully_shard", "replicate",
)  # fmt: skip
"""Functions whose result is called like the module that they wrap."""
_QUIET = (
    "print", "isinstance", "issubclass", "type", "len", "repr", "str", "id", "hasattr", "super", "setattr", "add_module",
    "register_module", "Sequential", "getattr", "append", "summary", "numel", "callable", "assertIsInstance",
)  # fmt: skip
"""Functions that do not call their arguments, or call them with one argument."""


@dataclass(frozen=True)
class Target:
    """A possible callee of a call.

    Attributes:
        dotted: the canonical name; `….forward` for a call of a layer.
        skip: number of leading arguments that are not the callee's, such as self.
        sure: False if the callee may be something else.
        whole: False if a partial has further arguments.
        recomputed: the callee is called by `checkpoint`, whose own arguments do not count.
    """

    dotted: str
    skip: int = 0
    sure: bool = True
    whole: bool = True
    recomputed: bool = False


@dataclass
class Meanings:
    """Meanings of the names of a tree.

    Attributes:
        names: name in the script → dotted name.
        unsure: names that are bound both to a library and to something else.
        strays: (node, layer, place) where a layer is not followed.
    """

    tree: ast.AST
    names: dict[str, str] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    strays: list[tuple[ast.AST, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parents = {id(child): node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._layers: dict[str, set[str | None]] = {}  # text of a variable → layers; None for something else
        self._partial: set[str] = set()
        self._instances: set[str] = set()  # names of instances of `METHODS`
        self._constructed: dict[str, str] = {}  # subclass without a constructor → base
        self._called: dict[str, str] = {}  # subclass without a forward → base
        self._bases: dict[int, str] = {}  # class (`id`) → base
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._functions.setdefault(node.name, []).append(node)

    def bind(self, name: str, dotted: str) -> None:
        """Bind a name by an import; a library has precedence."""
        before = self.names.get(name)
        if before is not None and before != dotted and (library_of(before) or library_of(dotted)):
            self.unsure.add(name)
            dotted = before if library_of(before) else dotted
        self.names[name] = dotted

    def follow(self, nodes: Iterable[ast.AST]) -> None:
        """Follow assignments, classes and functions. nodes: all nodes of the tree, in the order of lines."""
        nodes = list(nodes)
        imported = set(self.names)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                self._subclass(node)
            for target, value in assigned(node):
                self._assign(target, value)
        for name in _bound_otherwise(nodes) & imported:
            if library_of(self.names[name]) is not None:
                self.unsure.add(name)
        before = -1
        while before != sum(map(len, self._layers.values())):  # layers reach further names through others
            before = sum(map(len, self._layers.values()))
            for node in nodes:
                for target, value in assigned(node):
                    for key in self._keys(target):
                        self._layers.setdefault(key, set()).update(self.layers_of(value) or {None})
                if isinstance(node, ast.Call):
                    self._hand_over(node)
                    self._register(node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    self._by_default(node.args)
        for node in nodes:
            self._stray(node)

    def dotted(self, node: ast.AST) -> str | None:
        """The full dotted name of an expression; None for others."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            owner, text = self.dotted(node.args[0]), node.args[1]
            if owner is None or not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
                return None
            return ".".join([owner, text.value, *reversed(parts)])
        if parts and isinstance(node, ast.Call):  # a method of a new instance
            cls = self.dotted(node.func)
            return ".".join([canonical(cls), *reversed(parts)]) if cls and canonical(cls) in METHODS else None
        if not isinstance(node, ast.Name):
            return None
        start = self.names.get(node.id)
        return None if start is None else ".".join([start, *reversed(parts)])

    def is_sure(self, node: ast.AST) -> bool:
        """False for a name that may be something else."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return not (isinstance(node, ast.Name) and node.id in self.unsure)

    def attribute_of_layer(self, node: ast.Attribute) -> str | None:
        """The layer of an expression `layer.attribute`; None if it may be something else."""
        kinds = self.layers_of(node.value)
        return next(iter(kinds)) if len(kinds) == 1 and not self.layers_of(node) else None

    def _around(self, node: ast.AST) -> ast.AST:
        return self._parents.get(id(node), self.tree)

    def is_followed(self, dotted: str) -> bool:
        """True if a partial of this name is assigned to a name."""
        return any(self.names.get(name) == dotted for name in self._partial)

    def targets(self, call: ast.Call) -> list[Target]:
        """The possible callees of a call: functions, classes and layers of libraries."""
        function = call.func
        dotted = self.dotted(function)
        inner = self.dotted(call.args[0]) if dotted == "functools.partial" and call.args else None
        if inner is not None and library_of(inner) is not None:
            return [Target(canonical(inner), skip=1, sure=self.is_sure(call.args[0]), whole=False)]
        if dotted is not None and library_of(dotted) is not None:
            name, last = canonical(dotted), dotted.rpartition(".")[2]
            owner = name.rpartition(".")[0]
            if last == "checkpoint" and call.args:
                handed = self.layers_of(call.args[0])
                older = 4 if len(call.args) > 4 and isinstance(call.args[1], ast.Constant) else 1  # positions of version 0.x
                return [
                    Target(name, sure=self.is_sure(function), whole=False),
                    *(Target(f"{kind}.forward", skip=older, sure=len(handed) == 1, recomputed=True) for kind in handed if kind),
                ]
            sure, whole = self.is_sure(function), not (isinstance(function, ast.Name) and function.id in self._partial)
            if last in ("__init__", "forward", "__call__") and is_called(owner):
                return [Target(owner if last == "__init__" else f"{owner}.forward", skip=1, sure=sure)]
            return [Target(name, sure=sure, whole=whole)]
        if isinstance(function, ast.Name) and function.id in self._constructed:
            return [Target(self._constructed[function.id])]
        if isinstance(function, ast.Attribute) and function.attr in ("__init__", "forward", "__call__"):
            base = self._base_of_super(function.value)
            if base is not None:
                return [Target(base if function.attr == "__init__" else f"{base}.forward")]
        called = (
            function.value if isinstance(function, ast.Attribute) and function.attr in ("forward", "__call__") else function
        )
        kinds = self.layers_of(called)
        if not kinds and isinstance(called, ast.Attribute):  # an attribute of another object: by its name
            kinds = {None, *(kind for key, each in self._layers.items() if key.endswith(f".{called.attr}") for kind in each)}
        return [Target(f"{kind}.forward", sure=len(kinds) == 1) for kind in sorted(filter(None, kinds))]

    def stray_way(self, node: ast.AST) -> str | None:
        """The place to which a class or function is passed, if it may be called from there; None if not."""
        parent = self._parents.get(id(node))
        if isinstance(node, ast.Name) and node.id in self._instances:
            return None
        if isinstance(parent, ast.IfExp) and node is parent.test:
            return None
        if isinstance(parent, ast.Assign | ast.AnnAssign) and node is parent.value:
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            inside = isinstance(self._parents.get(id(parent)), ast.ClassDef)
            plain = all(isinstance(target, ast.Name) for target in targets) and not inside
            return None if plain else "the value of an attribute or an entry"
        if isinstance(parent, ast.arguments):
            return "the default of an argument"
        if isinstance(parent, ast.Dict | ast.List | ast.IfExp | ast.BoolOp):
            return "one of several"
        if isinstance(parent, ast.Return):
            return "returned"
        if isinstance(parent, ast.Tuple) and not isinstance(self._parents.get(id(parent)), ast.Call | ast.Subscript):
            return "one of several"
        return None

    def _subclass(self, node: ast.ClassDef) -> None:
        bases = [canonical(each) for each in map(self.dotted, node.bases) if each is not None]
        bases += [self._bases_by_name(each) for each in node.bases if isinstance(each, ast.Name)]
        base = next((each for each in bases if each and is_called(each)), None)
        if base is None:
            return
        self._bases[id(node)] = base
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        if "__init__" not in methods and (node.bases and not self._own_init(node)):
            self._constructed[node.name] = base
        if not {"forward", "__call__"} & methods:
            self._called[node.name] = base

    def _bases_by_name(self, node: ast.Name) -> str:
        return next((base for key, base in self._named_bases() if key == node.id), "")

    def _named_bases(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef) and id(node) in self._bases:
                yield node.name, self._bases[id(node)]

    def _own_init(self, node: ast.ClassDef) -> bool:
        """True if a base class defined in the script has a constructor."""
        names = {each.id for each in node.bases if isinstance(each, ast.Name)}
        bases = {name for name, _ in self._named_bases()} & names
        return any(name not in self._constructed for name in bases)

    def _base_of_super(self, node: ast.AST) -> str | None:
        """The layer of `super()` in one of its subclasses."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"):
            return None
        around = self._parents.get(id(node))
        while around is not None and not isinstance(around, ast.ClassDef):
            around = self._parents.get(id(around))
        return None if around is None else self._bases.get(id(around))

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        """Bind a name to a known one, a partial of it, or an instance of a class in `METHODS`."""
        if not isinstance(target, ast.Name):
            return
        called = value.func if isinstance(value, ast.Call) else value
        partial = isinstance(value, ast.Call) and value.args and self.dotted(value.func) == "functools.partial"
        if partial and isinstance(value, ast.Call):
            called = value.args[0]
        dotted = self.dotted(called)
        if dotted is None or library_of(dotted) is None:
            return
        if isinstance(value, ast.Call) and not partial:
            if canonical(dotted) not in METHODS:
                return
            dotted = canonical(dotted)
            self._instances.add(target.id)
        if target.id not in self.names:
            self.names[target.id] = dotted
            if partial:
                self._partial.add(target.id)
        elif self.names[target.id] != dotted:
            self.unsure.add(target.id)

    def layers_of(self, node: ast.AST | None) -> set[str | None]:
        """The layers that an expression may be, with None if it may be something else; empty for no layer."""
        if isinstance(node, ast.Name | ast.Attribute):
            layers: set[str | None] = set()
            for key in self._keys(node):
                layers |= self._layers.get(key, set())
            return layers if any(layers) else set()
        if isinstance(node, ast.IfExp):
            left, right = self.layers_of(node.body), self.layers_of(node.orelse)
            return (left or {None}) | (right or {None}) if left or right else set()
        if not isinstance(node, ast.Call):
            return set()
        dotted = self.dotted(node.func)
        if dotted is not None and is_called(canonical(dotted)):
            return {canonical(dotted)} if self.is_sure(node.func) else {canonical(dotted), None}
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if isinstance(node.func, ast.Name) and name in self._called:
            return {self._called[name]}
        if isinstance(node.func, ast.Attribute) and name in _ITSELF:
            return self.layers_of(node.func.value)
        last = dotted.rpartition(".")[2] if dotted else name
        return self.layers_of(node.args[0]) if last in _WRAPPERS and node.args else set()

    def _keys(self, node: ast.AST) -> list[str]:
        """The keys of a variable in `_layers`: its text, with the class for an attribute of self."""
        if isinstance(node, ast.Name):
            around = self._parents.get(id(self._parents.get(id(node))))
            inside = isinstance(node.ctx, ast.Store) and isinstance(around, ast.ClassDef)
            return [node.id, f"{around.name}:self.{node.id}"] if inside and isinstance(around, ast.ClassDef) else [node.id]
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return []
        if node.value.id != "self":
            return [f"{node.value.id}.{node.attr}"]
        around = self._parents.get(id(node))
        while around is not None and not isinstance(around, ast.ClassDef):
            around = self._parents.get(id(around))
        return [f"{getattr(around, 'name', '')}:self.{node.attr}"]

    def _hand_over(self, call: ast.Call) -> None:
        """Bind parameters of the script's functions to layers in a call."""
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        for function in self._functions.get(name, ()):
            parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            if isinstance(call.func, ast.Attribute) and parameters[:1] in (["self"], ["cls"]):
                del parameters[0]
            passed = [*zip(parameters, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
            for parameter, value in passed:
                kinds = self.layers_of(value)
                if parameter and kinds:
                    self._layers.setdefault(parameter, set()).update(kinds)

    def _register(self, call: ast.Call) -> None:
        """Bind names to layers in calls of `setattr` and `add_module`."""
        for key, value in self._registered(call):
            if key is not None and (kinds := self.layers_of(value)):
                self._layers.setdefault(key, set()).update(kinds)

    def _registered(self, call: ast.Call) -> Iterator[tuple[str | None, ast.expr]]:
        """(key of the name, or None if it is known only at run time; value) of a call that registers a module."""
        by_method = isinstance(call.func, ast.Attribute) and call.func.attr in ("add_module", "register_module")
        by_name = isinstance(call.func, ast.Name) and call.func.id == "setattr"
        values = [*call.args, *(word.value for word in call.keywords)]
        if by_method and isinstance(call.func, ast.Attribute) and len(values) == 2:
            owner, name, value = call.func.value, values[0], values[1]
        elif by_name and len(values) == 3:
            owner, name, value = values
        else:
            return
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            yield None, value
        elif isinstance(owner, ast.Name) and owner.id != "self":
            yield f"{owner.id}.{name.value}", value
        else:
            around = self._parents.get(id(call))
            while around is not None and not isinstance(around, ast.ClassDef):
                around = self._parents.get(id(around))
            is_self = isinstance(owner, ast.Name)
            yield f"{getattr(around, 'name', '') if is_self else ''}:self.{name.value}", value

    def _by_default(self, args: ast.arguments) -> None:
        """Bind parameters to layers in their defaults; calls may pass something else."""
        names = [*args.posonlyargs, *args.args]
        pairs = [*zip(reversed(names), reversed(args.defaults), strict=False)]
        pairs += [(name, value) for name, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is not None]
        for name, value in pairs:
            if kinds := self.layers_of(value):
                self._layers.setdefault(name.arg, set()).update(kinds | {None})

    def _stray(self, node: ast.AST) -> None:
        """Add to `strays` a layer at a place where it is not followed."""
        kinds = self.layers_of(node) if isinstance(node, ast.Call | ast.Name | ast.Attribute) else set()
        if not kinds or (isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load)):
            return
        parent = self._parents.get(id(node))
        if isinstance(parent, ast.keyword):
            parent = self._parents.get(id(parent))
        layer = sorted(filter(None, kinds))[0]
        if isinstance(parent, ast.Call) and node is not parent.func:
            dotted, name = self.dotted(parent.func), getattr(parent.func, "id", getattr(parent.func, "attr", ""))
            last = dotted.rpartition(".")[2] if dotted else name
            followed = (
                (last == "checkpoint" and node is parent.args[0])
                or last in _WRAPPERS
                or last in _QUIET
                or name in self._functions
            )
            if any(key is None and value is node for key, value in self._registered(parent)):
                self.strays.append((node, layer, "given a name that only a run tells"))
            elif not followed and not (dotted or "").startswith("torch."):
                self.strays.append((node, layer, f"given to {name or 'a call'}"))
            elif last == "append":
                self.strays.append((node, layer, "put into a list"))
        elif isinstance(parent, ast.Return | ast.Lambda | ast.Yield | ast.YieldFrom):
            self.strays.append((node, layer, "returned"))
        elif isinstance(parent, _LISTS):
            if not any(value is node for _, value in assigned(self._around(parent))):
                self.strays.append((node, layer, "put into a list"))
        elif isinstance(parent, ast.Assign | ast.AnnAssign):
            if not all(self._keys(target) for target, value in assigned(parent) if value is node):
                self.strays.append((node, layer, "put where it has no name"))
        elif isinstance(parent, ast.BoolOp | ast.Starred | ast.Subscript | ast.IfExp | ast.Await) and node is not _test(parent):
            around = self._around(parent)
            if not (isinstance(parent, ast.IfExp) and isinstance(around, ast.Assign | ast.AnnAssign)):
                self.strays.append((node, layer, "one of several"))


_LISTS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def _test(node: ast.AST) -> ast.AST | None:
    return node.test if isinstance(node, ast.IfExp) else None


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each (target, value) of an assignment."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            several = isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, ast.Tuple | ast.List)
            left = list(getattr(target, "elts", ())) if several else [target]
            right = list(getattr(node.value, "elts", ())) if several else [node.value]
            starred = any(isinstance(each, ast.Starred) for each in (*left, *right))
            pairs = len(left) == len(right) and not starred
            yield from zip(left, right, strict=True) if pairs else [(target, node.value)]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


def _bound_otherwise(nodes: Iterable[ast.AST]) -> set[str]:
    """Names bound by anything but an import. Assignments of constants do not count, such as `name = None` in an `except`."""
    names: set[str] = set()
    plain: Callable[[ast.AST], bool] = lambda value: isinstance(value, ast.Constant)  # noqa: E731
    constant = {id(target) for node in nodes for target, value in assigned(node) if plain(value)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in constant:
            names.add(node.id)
    return names
