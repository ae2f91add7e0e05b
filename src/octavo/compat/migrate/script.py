"""Finds uses of other libraries in a script, line by line, its command-line arguments, and its calls of an estimator.

Names are followed through imports and their aliases, and through variables with an instance of a followed class. Names that a
script builds at run time (`getattr`, `importlib`) are not seen.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.compat.migrate.doubts import doubts
from octavo.compat.migrate.known import OPTIONAL, REST, UNKNOWN, is_known
from octavo.compat.migrate.limits import odd, of_call, of_state, recipe_class, refused, unsure
from octavo.compat.migrate.meanings import Meanings, Target
from octavo.compat.migrate.names import (
    NAMES,
    PRECISIONS,
    Name,
    absent_attribute,
    canonical,
    find,
    is_layer,
    is_module,
    library_of,
    names_of,
    signature_of_name,
    unchecked,
)
from octavo.compat.migrate.notebook import content, no_python, notebook
from octavo.compat.migrate.scopes import binds, scope_nodes
from octavo.compat.migrate.values import Values
from octavo.errors import InputError, nearest

_CUDA = "torch.cuda."
_WORDS = re.compile(r"[^\W\d]\w*")
WITHOUT_GPU = (
    "Event", "amp", "device_count", "empty_cache", "get_arch_list", "get_rng_state_all", "is_available", "is_bf16_supported",
    "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
    "memory_reserved", "memory_stats", "nvtx", "seed_all",
)  # fmt: skip
"""Names of `torch.cuda` that work on a machine without a GPU."""
_RECOMPUTED = (
    "use_reentrant", "determinism_check", "debug", "early_stop", "context_fn", "preserve_rng_state",
    "distribute_saved_activations", "tp_group", "get_rng_state_tracker", "get_cuda_rng_tracker",
)  # fmt: skip
"""Arguments of `checkpoint` itself."""
_TEXTS = ("run_line_magic", "run_cell_magic", "run_cell")
"""Methods of IPython that run text."""
_ESTIMATORS = {
    "sagemaker.pytorch.PyTorch": (
        "entry_point", "framework_version", "py_version", "source_dir", "hyperparameters", "image_uri", "distribution",
        "compiler_config",
    ),
    "octavo.launch.PyTorch": (
        "entry_point", "source_dir", "hyperparameters", "instance_type", "instance_count", "distribution",
    ),
}  # fmt: skip
"""Estimator → its positional arguments."""
_PLACE_OF_PRECISION = {"lightning.Fabric": 4}
"""Class → position of its argument `precision`."""
_FIRST = _ESTIMATORS | {"sagemaker.inputs.TrainingInput": ("s3_data",)}
"""Callable with keyword arguments → its positional arguments."""


@dataclass(frozen=True)
class Use:
    """A use of another library's name in a line.

    Attributes:
        line: its number, from 1.
        name: the full dotted name.
        library: name of the library.
        row: of the table; None for a name without one.
    """

    line: int
    name: str
    library: str
    row: Name | None


@dataclass
class Script:
    """Findings in a script.

    Attributes:
        uses: in the order of lines, each name once a line.
        needs_gpu: (line, text) of uses that need a GPU.
        arguments: option of argparse → default, UNKNOWN if it is known only at run time.
        estimators: keyword → value of each call of an estimator; the inputs of `fit` are under "fit".
        notes: sentences on parts that are not read or not checked.
        cells: of a notebook, the first line of each code cell.
        is_module: it only defines names.
        unbound: sentences on names that the module uses, but binds only in statements that a known test skips.
    """

    path: Path
    uses: list[Use] = field(default_factory=list)
    needs_gpu: list[tuple[int, str]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    estimators: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    is_module: bool = False
    unbound: list[str] = field(default_factory=list)

    def place(self, line: int) -> str:
        """A line number as text; in a notebook the code cell and its line, "cell:line"."""
        cell = bisect_right(self.cells, line)
        return f"{cell}:{line - self.cells[cell - 1] + 1}" if cell else str(line)


def read(path: Path, others: Sequence[Path] = ()) -> Script:
    """Read a script, .py or .ipynb; it is not run.

    Args:
        path: the script's.
        others: scripts that are read in the same call of migrate.

    Raises:
        InputError: it cannot be read, or is not Python.
    """
    notes: list[str] = []
    cells: list[int] = []
    text = notebook(path, notes, cells) if path.suffix == ".ipynb" else content(path)
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        if not error.lineno:  # null bytes, or another encoding
            raise InputError(f"{path} is no Python: {error.msg}.") from None
        raise no_python(str(path), error) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no Python: {error}.") from None
    try:
        script = _Reader(path, tree, others, cells).script
    except RecursionError:
        raise InputError(f"{path} is nested too deeply to be read.") from None
    script.notes += notes
    return script


class _Reader:
    """Reads one syntax tree into a `Script`."""

    def __init__(self, path: Path, tree: ast.Module, others: Sequence[Path], cells: list[int]) -> None:
        self.script = Script(path, cells=cells, is_module=not cells and _is_module(tree))
        self._others = {other.resolve() for other in others}
        self._modules: set[str] = set()
        self._meanings = Meanings(tree)
        self._seen: set[tuple[int, str]] = set()
        self._unreached: dict[int, int] = {}
        self._makings: dict[str, list[dict[str, Any]]] = {}  # layer → arguments of each constructor
        self._parts: set[int] = set()  # attributes that belong to a longer one
        self._spared: set[str] = set()  # absent names whose import fails into an `except` of the script
        spared = _spared_imports(tree)
        self._spared_uses = _spared_uses(tree)
        nodes = sorted((node for node in ast.walk(tree) if hasattr(node, "lineno")), key=lambda node: node.lineno)
        imported = [
            (node, dotted)
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for dotted in self._import(node, spared=id(node) in spared)
        ]
        self._meanings.follow(nodes)
        self._values = Values(
            tree,
            positional=lambda dotted: _ESTIMATORS.get(canonical(dotted)),
            called=self._surely,
            maybe=self._meanings.dotted,
            has=_is_there,
            recipe_of=lambda dotted: recipe_class(canonical(dotted)),
            is_library=lambda dotted: library_of(dotted) is not None,
        )
        self._unreached = self._values.unreached
        self.script.estimators = self._values.jobs
        self.script.unbound = list(self._unbound(tree))
        for statement, dotted in imported:
            self._use(statement, dotted)
        for node in nodes:
            self._visit(node)
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for call in calls:
            self._making(call)
        for call in sorted(calls, key=lambda call: (call.end_lineno, call.end_col_offset)):  # PyTorch(…) before its .fit(…)
            self._call(call)
        for doubtful, text in doubts(nodes, self._meanings):
            self._note(doubtful, text)
        for stray, layer, way in self._meanings.strays:
            self._note(stray, f"{layer} is {way}: its calls there are not seen")
        self.script.uses.sort(key=lambda use: use.line)
        if not self.script.is_module:
            self.script.uses = _of_a_plain_script(self.script.uses)
        self.script.uses = _without_transform(self.script.uses)

    def _unbound(self, tree: ast.Module) -> Iterator[str]:
        """A sentence for each name that the module uses, but binds only in statements that a known test skips.

        Python raises a NameError there, so no value after that line is known.
        """
        left_out: dict[str, int] = {}
        elsewhere = set(dir(builtins))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a command of a notebook, or exec
                elsewhere |= set(_WORDS.findall(node.value))
            for name in binds(node):
                if id(node) in self._unreached:
                    left_out.setdefault(name, self._unreached[id(node)])
                else:
                    elsewhere.add(name)
        if "*" in elsewhere:
            return
        uses = (node for node in scope_nodes(tree.body) if isinstance(node, ast.Name) and id(node) not in self._unreached)
        first: dict[str, int] = {}
        for node in sorted(uses, key=lambda node: node.lineno):
            if node.id in left_out and node.id not in elsewhere:
                first.setdefault(node.id, node.lineno)
        for name, line in first.items():
            place, test = self.script.place(line), self.script.place(left_out[name])
            yield f"line {place}: {name} has no value, since the test in line {test} leaves out what binds it"

    def _import(self, node: ast.Import | ast.ImportFrom, *, spared: bool) -> Iterator[str]:
        """The imported dotted names. spared: if the import fails, an `except` of the script continues."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                first, dotted = alias.name.partition(".")[0], alias.name
                self._meanings.bind(alias.asname or first, alias.name if alias.asname else first)
            elif node.level or node.module is None:
                self._beside("." * node.level + (node.module or alias.name), node.lineno)
                continue
            elif alias.name == "*":
                dotted = node.module
                for name in names_of(dotted):
                    self._meanings.bind(name, f"{dotted}.{name}")
                if library_of(dotted) is not None:
                    self._note(node, "of import *, only names that Octavo has are seen")
                else:
                    self._note(node, f"names that import * takes from {dotted} are not seen")
            else:
                dotted = f"{node.module}.{alias.name}"
                self._meanings.bind(alias.asname or alias.name, dotted)
            self._beside(alias.name if isinstance(node, ast.Import) else node.module or "", node.lineno)
            if spared:
                self._spared.add(canonical(dotted))
            yield dotted

    def _beside(self, module: str, line: int) -> None:
        """Add a note on a module of the script's folder that is not among the scripts to be read."""
        folder = self.script.path.parent
        parts = module.lstrip(".").split(".")
        for _ in range(len(module) - len(module.lstrip(".")) - 1):
            folder = folder.parent
        files = [folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")]
        of_script = module.startswith(".") or any(file.is_file() for file in files)
        if of_script and not {file.resolve() for file in files} & self._others and module not in self._modules:
            self._modules.add(module)
            self.script.notes.append(f"line {self.script.place(line)}: {module} is a separate module: give its file too")

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in self._parts:
            dotted = self._meanings.dotted(node)
            layer = self._meanings.attribute_of_layer(node) if isinstance(node, ast.Attribute) else None
            if (
                isinstance(node, ast.Attribute)
                and layer is not None
                and (way := absent_attribute(layer, node.attr)) is not None
            ):
                self._put(node, Name(f"{layer}.{node.attr}", "absent", "not in Octavo's compatibility layer", way))
            elif layer is not None and unchecked(f"{layer}.{getattr(node, 'attr', '')}") is not None:
                self._note(node, f"{getattr(node, 'attr', '')} of {layer} is not checked")
            inner = node
            while isinstance(inner, ast.Attribute):
                inner = inner.value  # type: ignore[assignment]
                self._parts.add(id(inner))
            if dotted is not None:
                self._use(node, dotted, sure=self._meanings.is_sure(node))
                way = self._meanings.stray_way(node) if signature_of_name(canonical(dotted)) is not None else None
                if way is not None:
                    self._note(node, f"{canonical(dotted)} is {way}: its calls there are not seen")
                if dotted == "sys.modules":
                    self._note(node, "sys.modules gives modules whose uses are not seen")
                if dotted.startswith(_CUDA) and dotted.removeprefix(_CUDA).partition(".")[0] not in WITHOUT_GPU:
                    self._gpu(node, dotted)

        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (dotted := canonical(self._meanings.dotted(base) or "")) in PRECISIONS:
                    self._note(node, f"{node.name} is a {dotted}: the precision of its calls is not seen")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            replaced = self._meanings.dotted(node)
            if replaced is not None and library_of(replaced) is not None:
                self._note(node, f"{replaced} is replaced: its uses are not those of Octavo's")

    def _making(self, node: ast.Call) -> None:
        """Record the arguments of a layer's constructor: its calls are checked against them."""
        for target in self._meanings.targets(node):
            if is_layer(target.dotted):
                args, words = self._values.arguments(node)
                signature = signature_of_name(target.dotted)
                names = signature.names if signature is not None else ()
                more = {} if target.whole else {REST: UNKNOWN}
                self._makings.setdefault(target.dotted, []).append(dict(zip(names, args, strict=False)) | words | more)

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr.startswith("set_") and (node.args or node.keywords):
            layer = self._meanings.attribute_of_layer(node.func)
            if layer is not None and any(not _is_none(each) for each in (*node.args, *(w.value for w in node.keywords))):
                self._note(node, f"arguments of {layer}.{node.func.attr} are not checked")
        dotted = self._meanings.dotted(node.func)
        if dotted is not None and library_of(dotted) is None and (state := of_state(dotted)) is not None:
            self._note(node, f"{dotted}: {state}")
        for target in self._meanings.targets(node):
            if target.dotted in PRECISIONS:
                self._precision(node, target)
            else:
                self._arguments(node, target)
        self._indirect(node, dotted)
        if isinstance(node.func, ast.Attribute):
            self._method(node, node.func)
        for value in (*node.args, *(word.value for word in node.keywords)):
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(text, str) and (text == "nccl" or text.partition(":")[0] == "cuda"):
                self._gpu(node, f'"{text}"')

    def _arguments(self, node: ast.Call, target: Target) -> None:
        """Rows and notes for the arguments of a call."""
        args, words = self._values.arguments(node)
        where = {word.arg: word.value for word in node.keywords if word.arg}
        open_ended = REST in words or any(isinstance(each, ast.Starred) for each in node.args)
        signature = signature_of_name(target.dotted)
        of_checkpoint = _RECOMPUTED if target.recomputed else ()
        by_name = {name: value for name, value in words.items() if name != REST and name not in of_checkpoint}
        names = signature.names if signature is not None else _FIRST.get(target.dotted, ())
        if not any(isinstance(each, ast.Starred) for each in node.args):
            by_name = dict(zip(names, args[target.skip :], strict=False)) | by_name
            where = dict(zip(names, node.args[target.skip :], strict=False)) | where
            most = len(_FIRST.get(target.dotted, node.args))
            twice = sorted(set(names[: max(0, len(node.args) - target.skip)]) & set(words))
            twice += self._values.doubled(node)
            if twice:
                self._refuse(node, target, f"{twice[0]}=", "given twice")
            if len(node.args) > most:
                self._refuse(node, target, "…", f"{len(node.args)} positional arguments, and it takes {most}")
        for name, value in by_name.items():
            self._argument(where.get(name, node), target, name, value)
        if open_ended:
            self._note(node, f"arguments of {target.dotted} are computed at run time")
        elif signature is None and words and library_of(target.dotted) in ("Accelerate", "FSDP1", "Lightning", "SMP"):
            self._note(node, f"{', '.join(words)} of {target.dotted} is not checked")
        elif signature is not None and target.whole:
            count = len(node.args) - target.skip
            if count > signature.positional:
                told = f"{count} positional arguments, and it takes {signature.positional}"
                self._refuse(node, target, "…", told, f"{', '.join(signature.names)}")
            missing = [name for name in signature.required if name not in by_name]
            if missing and count <= signature.positional:
                self._refuse(node, target, "…", f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        rest = {REST: UNKNOWN} if open_ended or not target.whole else {}
        told_of = {name: value if value is not UNKNOWN else _maybe(where.get(name)) for name, value in by_name.items()}
        seen = set()
        for name, value, reason in refused(target.dotted, told_of | rest):
            seen.add(name)
            written = repr(value) if is_known(value) else "…"
            told = str(value) if isinstance(value, str) and value.startswith("Format.") else written
            self._refuse(where.get(name.partition(".")[0], node), target, f"{name}={told}", f"refused: {reason}")
        for name, value in (
            by_name | {name: words[name] for name in of_checkpoint if name in words and not target.recomputed}
        ).items():
            if (
                name not in seen
                and (is_known(value) or isinstance(value, list | dict))
                and (doubt := odd(target.dotted, signature, name, value)) is not None
            ):
                self._note(where.get(name, node), f"{target.dotted}({name}={value!r}) is not checked: {doubt}")
        state = of_state(target.dotted)
        if state is not None:
            self._note(node, f"{target.dotted}: {state}")
        if target.dotted.endswith(".forward"):
            layer = target.dotted.removesuffix(".forward")
            for need in of_call(target.dotted, by_name, self._makings.get(layer, [])):
                self._note(node, f"{target.dotted}: {need}")
        for name, reason in unsure(target.dotted, by_name):
            self._note(where.get(name, node), f"the value of {name} is known only at run time: {reason}")

    def _precision(self, node: ast.Call, target: Target) -> None:
        """The row for `precision` of Lightning or Composer, their only argument that concerns Transformer Engine."""
        args, words = self._values.arguments(node)
        open_ended = REST in words or not target.whole or any(isinstance(each, ast.Starred) for each in node.args)
        place = _PLACE_OF_PRECISION.get(target.dotted, len(args))
        value = words.get("precision", UNKNOWN if open_ended else args[place] if len(args) > place else None)
        texts = PRECISIONS[target.dotted]
        if isinstance(value, str) and value in texts:
            self._use(node, f'{target.dotted}(precision="{value}")')
            others = [name for name in words if name not in ("precision", REST)]
            if others:
                self._note(node, f"{', '.join(others)} of {target.dotted} is not checked")
        elif not is_known(value):
            means = " or ".join(map(repr, texts))
            self._note(node, f"the precision of {target.dotted} is known only at run time: {means} is of Transformer Engine")

    def _argument(self, node: ast.AST, target: Target, name: str, value: Any) -> None:
        """Rows of the table for an argument, or a row for one that Octavo lacks."""
        written = f"{target.dotted}({name}=)"
        exact = f"{target.dotted}({name}={json.dumps(value, default=str)})"
        for each in (written, exact):
            if each in NAMES and value is not None and value != []:
                self._use(node, each)
        row = find(written)
        if written in NAMES and row is not None and row.status == "differs" and value is UNKNOWN:
            self._note(node, f"the value of {name} is known only at run time: {row.here}")
        known = signature_of_name(target.dotted)
        if known is not None and name not in known.names:
            guess = nearest(name, known.names)
            way = f"Did you mean {guess}?" if guess else ""
            self._refuse(node, target, f"{name}=", f"no argument of it here: {', '.join(known.names)}", way)

    def _refuse(self, node: ast.AST, target: Target, what: str, here: str, way: str = "") -> None:
        """A row for a call that fails; a note if the callee may be something else."""
        name = f"{target.dotted}({what})"
        if target.sure:
            self._put(node, Name(name, "absent", here, way))
        else:
            self._note(node, f"if {target.dotted} is called here, it fails: {name}: {here}")

    def _indirect(self, node: ast.Call, dotted: str | None) -> None:
        """Uses of a library through a name in text, and libraries passed to a function."""
        function = getattr(node.func, "id", getattr(node.func, "attr", ""))
        text = self._values.arguments(node)[0][:2]
        if function in ("getattr", "hasattr") and len(node.args) > 1:
            owner = self._meanings.dotted(node.args[0])
            if owner is not None and library_of(owner) is not None and not (function == "hasattr" and isinstance(text[1], str)):
                if isinstance(text[1], str) and len(node.args) == 2:
                    self._use(node, f"{owner}.{text[1]}")
                elif not isinstance(text[1], str):
                    self._note(node, f"{function} on {owner} asks for a name that is known only at run time")
        elif function in ("import_module", "__import__") and text:
            if not isinstance(text[0], str):
                self._note(node, f"{function} imports a module that is known only at run time")
            elif library_of(text[0]) is not None:
                self._use(node, text[0])
                self._note(node, f"{function} imports {text[0]}: its uses are not seen")
        elif function in _TEXTS or (function in ("exec", "eval") and isinstance(node.func, ast.Name)):
            self._note(node, f"{function} runs text, whose uses are not seen")
        elif function in ("globals", "locals", "vars") and isinstance(node.func, ast.Name) and not node.args:
            self._note(node, f"{function}() gives names whose uses are not seen")
        elif dotted is None or library_of(dotted) is None:
            for number, each in enumerate((*node.args, *(word.value for word in node.keywords))):
                passed = self._meanings.dotted(each) if function != "partial" or number == 0 else None
                if passed is not None and is_module(passed):
                    self._note(node, f"{passed} is given to {function or 'a call'}: its uses there are not seen")
                elif passed is not None and library_of(passed) is not None and self._is_made_elsewhere(passed, function):
                    self._note(node, f"{canonical(passed)} is given to {function}: its arguments there are not seen")

    def _is_made_elsewhere(self, dotted: str, function: str) -> bool:
        """True if `function` may construct the layer or recipe; wrappers of FSDP and policies only compare classes."""
        if function == "partial":
            return not self._meanings.is_followed(dotted)
        return is_layer(canonical(dotted)) and function not in ("isinstance", "issubclass", "ModuleWrapPolicy", "set", "append")

    def _note(self, node: ast.AST, text: str) -> None:
        note = f"line {self.script.place(getattr(node, 'lineno', 0))}: {text}"
        if note not in self.script.notes and id(node) not in self._unreached:
            self.script.notes.append(note)

    def _surely(self, node: ast.AST) -> str | None:
        """The full name of an expression that is certainly a library's; None for others."""
        dotted = self._meanings.dotted(node)
        return dotted if dotted is not None and library_of(dotted) is not None and self._meanings.is_sure(node) else None

    def _method(self, node: ast.Call, function: ast.Attribute) -> None:
        if function.attr == "cuda":
            self._gpu(node, ".cuda()")
        elif function.attr == "add_argument":
            names = [value.value for value in node.args if isinstance(value, ast.Constant) and isinstance(value.value, str)]
            words = self._values.arguments(node)[1]
            action = words.get("action")
            switched = {"store_true": False, "store_false": True}.get(action) if isinstance(action, str) else None
            default = words.get("default", switched)
            for name in names:
                if name.startswith("--"):
                    self.script.arguments[name[2:].replace("-", "_")] = default

    def _use(self, node: ast.AST, dotted: str, *, sure: bool = True) -> None:
        library, line = library_of(dotted), getattr(node, "lineno", 0)
        name = canonical(dotted)
        if library is None or (line, name) in self._seen or _is_of_a_trainer(name):
            return
        row = find(name)
        if not sure and row is not None and row.status != "absent":
            return
        self._seen.add((line, name))
        if row is None or row.status == "absent":
            way = row.change if row else ""
            if id(node) in self._spared_uses or any(f"{name}.".startswith(f"{each}.") for each in self._spared):
                row = Name(name, "differs", "not there: the script goes on without it, by its own except", way)
            elif id(node) in self._unreached:
                test = self.script.place(self._unreached[id(node)])
                row = Name(name, "differs", f"not there, and not reached: the test of line {test} leaves it out", way)
            elif not sure:
                row = Name(name, "differs", "not there, if the name means this here: it is bound to something else too", way)
                self._note(node, f"{dotted} may be something else, whose names are not seen")
        elif (last := unchecked(name)) is not None:
            self._note(node, f"{last} of {name.removesuffix(f'.{last}')} is not checked")
        self.script.uses.append(Use(line, name, library, row))

    def _put(self, node: ast.AST, row: Name) -> None:
        """Add a row that is not in the table."""
        library, line = library_of(row.name), getattr(node, "lineno", 0)
        if library is not None and (line, row.name) not in self._seen and id(node) not in self._unreached:
            self._seen.add((line, row.name))
            self.script.uses.append(Use(line, row.name, library, row))

    def _gpu(self, node: ast.AST, text: str) -> None:
        place = (getattr(node, "lineno", 0), text)
        if place not in self.script.needs_gpu and id(node) not in self._unreached:
            self.script.needs_gpu.append(place)


def _is_of_a_trainer(name: str) -> bool:
    """True for classes of Lightning and Composer, whose calls have rows only for `precision`."""
    return any(name == each or name.startswith(f"{each}.") for each in PRECISIONS)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _maybe(node: ast.AST | None) -> Any:
    """The marker for an unknown value: UNKNOWN for the result of a call, OPTIONAL for a name, which may be None."""
    return UNKNOWN if isinstance(node, ast.Call) else OPTIONAL


def _of_a_plain_script(uses: list[Use]) -> list[Use]:
    """Uses, with rows of PyTorch's FSDP if the script uses nothing of SMP, and so transforms no model."""
    if any(use.library == "SMP" for use in uses):
        return uses
    plain = "PyTorch's own: this script transforms no model"
    return [
        replace(use, row=Name(use.name, "same", plain))
        if use.row is not None and use.library == "FSDP1" and not use.row.here.startswith("not ")
        else use
        for use in uses
    ]


_SHUFFLED = "torch.sagemaker.moe.moe_config.MoEConfig(global_token_shuffle=true)"


def _without_transform(uses: list[Use]) -> list[Use]:
    """Uses; a MoEConfig that `transform` refuses is not absent in a script without `transform`: another script may call it."""
    if any(use.name.startswith("torch.sagemaker.transform") for use in uses):
        return uses
    return [
        replace(use, row=replace(use.row, status="differs")) if use.row is not None and use.name == _SHUFFLED else use
        for use in uses
    ]


def _is_module(tree: ast.AST) -> bool:
    """True for code that defines functions or classes, and otherwise does nothing when it runs."""
    body = getattr(tree, "body", [])
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    quiet = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
        ast.Try,
    )
    texts = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    mains = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in body)
    return (
        not mains
        and any(isinstance(node, defined) for node in body)
        and all(
            isinstance(node, quiet)
            or (isinstance(node, ast.If) and not any(isinstance(each, ast.For) for each in ast.walk(node)))
            for node in texts
        )
    )


def _spared_imports(tree: ast.AST) -> set[int]:
    """`id` of each import in a `try` with an absent name whose `except` lets the script continue."""
    spared: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try):
            continue
        caught = [name for handler in node.handlers if not _ends(handler) for name in _caught(handler)]
        if {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"} & set(caught):
            inside = [each for statement in node.body for each in ast.walk(statement)]
            imports = [each for each in inside if isinstance(each, ast.Import | ast.ImportFrom)]
            if any(_is_absent(name) for each in imports for name in _imported(each)):
                spared.update(map(id, imports))
    return spared


def _spared_uses(tree: ast.AST) -> set[int]:
    """`id` of each node in a `try` whose `except` lets the script continue after an AttributeError."""
    spared: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = [name for handler in node.handlers if not _ends(handler) for name in _caught(handler)]
            if {"AttributeError", "Exception", "BaseException"} & set(caught):
                spared |= {id(each) for statement in node.body for each in ast.walk(statement)}
    return spared


def _is_there(dotted: str) -> bool | None:
    """True if Octavo has a library's name, False if not; None for other names, and if it is not known."""
    if library_of(dotted) is None:
        return None
    row = find(canonical(dotted))
    return None if row is None or unchecked(canonical(dotted)) is not None else row.status != "absent"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names of an import; empty for a relative one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"]


def _is_absent(dotted: str) -> bool:
    """True for a name of a known library that the compatibility layer lacks."""
    row = find(canonical(dotted))
    return library_of(dotted) is not None and (row is None or row.status == "absent")


def _caught(handler: ast.ExceptHandler) -> list[str]:
    """Names of the exceptions of a handler."""
    if handler.type is None:
        return ["BaseException"]
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [kind.id for kind in kinds if isinstance(kind, ast.Name)]


def _ends(handler: ast.ExceptHandler) -> bool:
    """True for a handler that raises, or ends the script."""
    return any(
        isinstance(node, ast.Raise)
        or (
            isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("exit", "_exit", "quit")
        )
        for node in ast.walk(handler)
    )


def known(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that are known without a run."""
    return ((name, value) for name, value in values.items() if value is not UNKNOWN)
