"""Uses of other libraries in a script, line by line; its arguments, and the calls of an estimator.

Names are followed through imports with their aliases, and through variables that hold an instance of a followed class. What a
script builds at run time (`getattr`, `importlib`) is not seen.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import InputError
from octavo.migrate.names import (
    LIBRARIES,
    METHODS,
    NAMES,
    Name,
    find,
    is_below_absent,
    is_module,
    library_of,
    names_of,
    unknown_argument,
)
from octavo.migrate.values import REST, UNKNOWN, Values

_CUDA = "torch.cuda."
WITHOUT_GPU = (
    "Event", "amp", "device_count", "empty_cache", "get_arch_list", "get_rng_state_all", "is_available", "is_bf16_supported",
    "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
    "memory_reserved", "memory_stats", "nvtx", "seed_all",
)  # fmt: skip
"""Names of `torch.cuda` that a machine without a GPU has too."""
_COMMAND = re.compile(r"^(\s*)(?:[%!?]|[\w, ]+=\s*[%!]|[\w.]+\?\??\s*$).*$")
"""A line of a notebook that is no Python."""
_PYTHON_CELLS = ("time", "timeit", "capture", "prun", "debug", "python", "python3")
"""Magics (`%%name`) of cells that are Python."""
_ESTIMATORS = {
    "sagemaker.pytorch.PyTorch": (
        "entry_point", "framework_version", "py_version", "source_dir", "hyperparameters", "image_uri", "distribution",
        "compiler_config",
    ),
    "octavo.launch.PyTorch": (
        "entry_point", "source_dir", "hyperparameters", "instance_type", "instance_count", "distribution",
    ),
}  # fmt: skip
"""Estimators, with their positional arguments."""

_SAME = {"torch.sagemaker.state_handler.state": "torch.sagemaker.state"}
"""Other names of an object → the one in the table."""


@dataclass(frozen=True)
class Use:
    """A name of another library in a line.

    Attributes:
        line: from 1.
        name: dotted, in full.
        library: in words.
        row: of the table; None for a name that it does not have.
    """

    line: int
    name: str
    library: str
    row: Name | None


@dataclass
class Script:
    """Findings in a script.

    Attributes:
        uses: in order of lines, each name of a line once.
        needs_gpu: (line, text) of what only works on a GPU.
        arguments: options of argparse with their defaults, UNKNOWN where only a run tells.
        estimators: keyword → value of each call of an estimator; its `fit` too, under "fit".
        notes: what was not read.
        cells: of a notebook, the first line of each code cell.
        is_module: it defines names and calls nothing.
    """

    path: Path
    uses: list[Use] = field(default_factory=list)
    needs_gpu: list[tuple[int, str]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    estimators: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    is_module: bool = False

    def place(self, line: int) -> str:
        """A line number as text; in a notebook the code cell and its line, "cell:line"."""
        cell = bisect_right(self.cells, line)
        return f"{cell}:{line - self.cells[cell - 1] + 1}" if cell else str(line)


def read(path: Path, others: Sequence[Path] = ()) -> Script:
    """Read a script, .py or .ipynb; it is not run.

    Args:
        path: of the script.
        others: scripts that are read beside it.

    Raises:
        InputError: it cannot be read, or is no Python.
    """
    notes: list[str] = []
    cells: list[int] = []
    text = _notebook(path, notes, cells) if path.suffix == ".ipynb" else _bytes(path)
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        if not error.lineno:  # null bytes, or another encoding
            raise InputError(f"{path} is no Python: {error.msg}.") from None
        raise _no_python(str(path), error) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no Python: {error}.") from None
    try:
        script = _Reader(path, tree, others, cells).script
    except RecursionError:
        raise InputError(f"{path} is nested too deeply to be read.") from None
    script.notes += notes
    return script


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"script {str(path)!r} cannot be read: {error.strerror or error}. Give a .py file.") from None


def _notebook(path: Path, notes: list[str], first: list[int]) -> str:
    """The Python of a notebook's cells, line for line. Adds cells left out to `notes`, the first line of each to `first`."""
    try:
        cells = json.loads(_bytes(path).decode("utf-8-sig"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{str(path)!r} is no notebook. Give a .py file, or an .ipynb file that Jupyter has written."
        ) from None
    found: list[str] = []
    for number, source in enumerate(sources, start=1):
        lines = source.splitlines()
        first.append(len(found) + 1)
        if source.startswith("%%"):
            magic = lines[0][2:].split()
            if not magic or magic[0] not in _PYTHON_CELLS:
                notes.append(f"code cell {number} is not read: {lines[0].strip()}")
                found += [""] * len(lines)
                continue
            lines[0] = ""
        if not _parses("\n".join(lines)):
            lines = [_COMMAND.sub(_in_python, line) for line in lines]
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            notes.append(
                f"code cell {number} is not read, line {error.lineno}: {error.msg}: {(error.text or '').strip()[:80]!r}"
            )
            lines = [""] * len(lines)
        found += lines
    return "\n".join(found)


def _in_python(command: re.Match[str]) -> str:
    """A statement in place of a line of the notebook's own: names that it sets are known only at run time."""
    names, _, rest = command[0].strip().partition("=")
    if rest.strip()[:1] in ("%", "!") and rest:
        return f"{command[1]}{names.strip()} = __command__()"
    stored = names.split()
    if stored[:2] == ["%store", "-r"] and len(stored) > 2 and all(name.isidentifier() for name in stored[2:]):
        return f"{command[1]}{' = '.join(stored[2:])} = __command__()"
    return f"{command[1]}pass"


def _no_python(place: str, error: SyntaxError) -> InputError:
    line = (error.text or "").strip()[:80]
    return InputError(f"{place}, line {error.lineno}: {error.msg}: {line!r}. Mend it, and run migrate again.")


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


class _Reader:
    """One pass over a tree, with the meaning of its names."""

    def __init__(self, path: Path, tree: ast.AST, others: Sequence[Path], cells: list[int]) -> None:
        self.script = Script(path, cells=cells, is_module=not cells and _is_module(tree))
        self._others = {other.resolve() for other in others}
        self._modules: set[str] = set()
        self._meaning: dict[str, str] = {}  # a name of the script → dotted
        self._seen: set[tuple[int, str]] = set()
        self._parts: set[int] = set()  # attributes that belong to a longer one
        self._spared: set[str] = set()  # absent names that the script's own `except` does without
        spared = _spared_imports(tree)
        nodes = sorted((node for node in ast.walk(tree) if hasattr(node, "lineno")), key=lambda node: node.lineno)
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node, spared=id(node) in spared)
        for node in nodes:
            if isinstance(node, ast.Assign):
                self._assign(node)
        for node in nodes:
            self._visit(node)
        self._values = Values(tree, self._positional, self._dotted)
        self.script.estimators = self._values.jobs
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: (call.end_lineno, call.end_col_offset)):  # PyTorch(…) before its .fit(…)
            self._call(call)
        self.script.uses.sort(key=lambda use: use.line)

    def _import(self, node: ast.Import | ast.ImportFrom, *, spared: bool) -> None:
        """spared: the script's own `except` goes on without these names."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                first, dotted = alias.name.partition(".")[0], alias.name
                self._meaning[alias.asname or first] = alias.name if alias.asname else first
            elif node.level or node.module is None:
                self._beside("." * node.level + (node.module or alias.name), node.lineno)
                continue
            elif alias.name == "*":
                dotted = node.module
                self._meaning |= {name: f"{dotted}.{name}" for name in names_of(dotted)}
                if library_of(dotted) is not None:
                    self._note(node, "of import *, only names that Octavo has are seen")
                else:
                    self._note(node, f"names that import * takes from {dotted} are not seen")
            else:
                dotted = f"{node.module}.{alias.name}"
                self._meaning[alias.asname or alias.name] = dotted
            self._beside(alias.name if isinstance(node, ast.Import) else node.module or "", node.lineno)
            if spared:
                self._spared.add(canonical(dotted))
            self._use(node.lineno, dotted)

    def _beside(self, module: str, line: int) -> None:
        """Note a module of the script's own, which is read only if it is given too."""
        folder = self.script.path.parent
        parts = module.lstrip(".").split(".")
        for _ in range(len(module) - len(module.lstrip(".")) - 1):
            folder = folder.parent
        files = [folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")]
        own = module.startswith(".") or any(file.is_file() for file in files)
        if own and not {file.resolve() for file in files} & self._others and module not in self._modules:
            self._modules.add(module)
            self.script.notes.append(f"line {self.script.place(line)}: {module} is a module of its own: give its file too")

    def _assign(self, node: ast.Assign) -> None:
        """Follow an instance of a known class, and another name for a known one."""
        value = node.value.func if isinstance(node.value, ast.Call) else node.value
        dotted = self._dotted(value)
        if dotted is None or library_of(dotted) is None:
            return
        followed = canonical(dotted) in METHODS if isinstance(node.value, ast.Call) else True
        for target in node.targets:
            if isinstance(target, ast.Name) and followed and target.id not in self._meaning:
                self._meaning[target.id] = canonical(dotted) if isinstance(node.value, ast.Call) else dotted

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in self._parts:
            dotted = self._dotted(node)
            inner = node
            while isinstance(inner, ast.Attribute):
                inner = inner.value  # type: ignore[assignment]
                self._parts.add(id(inner))
            if dotted is not None:
                self._use(node.lineno, dotted)
                if dotted.startswith(_CUDA) and dotted.removeprefix(_CUDA).partition(".")[0] not in WITHOUT_GPU:
                    self._gpu(node.lineno, dotted)

    def _call(self, node: ast.Call) -> None:
        dotted = self._dotted(node.func)
        if dotted is not None and library_of(dotted) is not None:
            given = self._values.arguments(node)[1]
            for word in node.keywords:
                name = f"{canonical(dotted)}({word.arg}=)"
                exact = f"{canonical(dotted)}({word.arg}={json.dumps(given.get(word.arg or ''), default=str)})"
                unset = isinstance(word.value, ast.Constant) and word.value.value is None
                for each in (name, exact):
                    if each in NAMES and not unset:
                        self._use(word.value.lineno, each)
                row = find(name)
                if name in NAMES and row is not None and row.status == "differs" and given.get(word.arg or "") is UNKNOWN:
                    self._note(word.value, f"the value of {word.arg} is known only at run time: {row.here}")
                absent = unknown_argument(canonical(dotted), word.arg) if word.arg else None
                if absent is not None:
                    self._put(word.value.lineno, absent)
            for argument in (
                given.keys() - {word.arg for word in node.keywords} - {REST}
            ):  # of a dictionary whose keys are known
                absent = unknown_argument(canonical(dotted), argument)
                if absent is not None:
                    self._put(node.lineno, absent)
            if REST in given or any(isinstance(each, ast.Starred) for each in node.args):
                self._note(node, f"arguments of {canonical(dotted)} are made at run time")
        self._indirect(node, dotted)
        if isinstance(node.func, ast.Attribute):
            self._method(node, node.func)
        for value in (*node.args, *(word.value for word in node.keywords)):
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(text, str) and (text in ("nccl", "smddp") or text.partition(":")[0] == "cuda"):
                self._gpu(node.lineno, f'"{text}"')

    def _indirect(self, node: ast.Call, dotted: str | None) -> None:
        """Uses of a library by a name that is text, and a library that is given to a function."""
        function = getattr(node.func, "id", getattr(node.func, "attr", ""))
        text = self._values.arguments(node)[0][:2]
        if function in ("getattr", "hasattr") and len(node.args) > 1:
            owner = self._dotted(node.args[0])
            if owner is not None and library_of(owner) is not None and not (function == "hasattr" and isinstance(text[1], str)):
                if isinstance(text[1], str) and len(node.args) == 2:
                    self._use(node.lineno, f"{owner}.{text[1]}")
                elif not isinstance(text[1], str):
                    self._note(node, f"{function} on {owner} asks for a name that is known only at run time")
        elif function in ("import_module", "__import__") and text:
            if not isinstance(text[0], str):
                self._note(node, f"{function} imports a module that is known only at run time")
            elif library_of(text[0]) is not None:
                self._use(node.lineno, text[0])
                self._note(node, f"{function} imports {text[0]}: its uses are not seen")
        elif dotted is None or library_of(dotted) is None:
            for each in (*node.args, *(word.value for word in node.keywords)):
                given = self._dotted(each)
                if given is not None and is_module(given):
                    self._note(node, f"{given} is given to {function or 'a call'}: its uses there are not seen")
                elif given is not None and function == "partial" and library_of(given) is not None:
                    self._note(node, f"{canonical(given)} is given to partial: its arguments there are not seen")

    def _note(self, node: ast.AST, text: str) -> None:
        note = f"line {self.script.place(getattr(node, 'lineno', 0))}: {text}"
        if note not in self.script.notes:
            self.script.notes.append(note)

    def _positional(self, function: ast.AST) -> tuple[str, ...] | None:
        """The positional arguments of an estimator that an expression names; None for another."""
        dotted = self._dotted(function)
        return None if dotted is None else _ESTIMATORS.get(canonical(dotted))

    def _method(self, node: ast.Call, function: ast.Attribute) -> None:
        if function.attr == "cuda":
            self._gpu(node.lineno, ".cuda()")
        elif function.attr == "add_argument":
            names = [value.value for value in node.args if isinstance(value, ast.Constant) and isinstance(value.value, str)]
            words = self._values.arguments(node)[1]
            action = words.get("action")
            switched = {"store_true": False, "store_false": True}.get(action) if isinstance(action, str) else None
            default = words.get("default", switched)
            for name in names:
                if name.startswith("--"):
                    self.script.arguments[name[2:].replace("-", "_")] = default

    def _dotted(self, node: ast.AST) -> str | None:
        """The full dotted name of an expression; None for others."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        start = self._meaning.get(node.id)
        return None if start is None else ".".join([start, *reversed(parts)])

    def _use(self, line: int, dotted: str) -> None:
        library = library_of(dotted)
        name = canonical(dotted)
        if library is None or (line, name) in self._seen:
            return
        self._seen.add((line, name))
        row = find(name)
        if (row is None or row.status == "absent") and any(f"{name}.".startswith(f"{each}.") for each in self._spared):
            row = Name(
                name, "differs", "not there: the script goes on without it, by its own except", row.change if row else ""
            )
        self.script.uses.append(Use(line, name, library, row))

    def _put(self, line: int, row: Name) -> None:
        """Add a row of its own."""
        library = library_of(row.name)
        if library is not None and (line, row.name) not in self._seen:
            self._seen.add((line, row.name))
            self.script.uses.append(Use(line, row.name, library, row))

    def _gpu(self, line: int, text: str) -> None:
        if (line, text) not in self.script.needs_gpu:
            self.script.needs_gpu.append((line, text))


def _is_module(tree: ast.AST) -> bool:
    """True for code that defines functions or classes, and of which a run by itself does nothing."""
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
    """Imports (`id`) in a `try` of which one is not there, and whose `except` goes on without them."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try):
            continue
        caught = [name for handler in node.handlers if not _ends(handler) for name in _caught(handler)]
        if {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"} & set(caught):
            inside = [each for statement in node.body for each in ast.walk(statement)]
            imports = [each for each in inside if isinstance(each, ast.Import | ast.ImportFrom)]
            if any(_is_absent(name) for each in imports for name in _imported(each)):
                found.update(map(id, imports))
    return found


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that an import asks for; none of a relative one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"]


def _is_absent(dotted: str) -> bool:
    """True for a name of a known library that the compatibility layer does not have."""
    row = find(canonical(dotted))
    return library_of(dotted) is not None and (row is None or row.status == "absent")


def _caught(handler: ast.ExceptHandler) -> list[str]:
    """Names of the exceptions that a handler catches."""
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


def canonical(dotted: str) -> str:
    """The name of the table for a name that a library has in several modules, such as the private ones."""
    for other, name in _SAME.items():
        if dotted == other or dotted.startswith(f"{other}."):
            return name + dotted.removeprefix(other)
    if dotted in NAMES or is_below_absent(dotted):
        return dotted
    last = dotted.rpartition(".")[2]
    if library_of(dotted) is None:
        return dotted
    root = next(root for root in LIBRARIES if dotted == root or dotted.startswith(f"{root}."))
    same = [name for name in NAMES if name.startswith(f"{root}.") and name.rpartition(".")[2] == last and last[:1].isupper()]
    return same[0] if len(same) == 1 else dotted


def known(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that are known without a run."""
    return ((name, value) for name, value in values.items() if value is not UNKNOWN)
