"""Holds the code to the house: its layers, no cycle, defining modules only, a docstring in each file.

Imports are read from the syntax tree, so that one inside a function counts as much as one at the top.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "octavo"

LAYERS = (
    ("_version", "errors", "dtypes", "hub", "process", "stored_names", "versions"),
    ("hardware", "storage", "libraries", "job_ranks", "supervision"),
    ("config",),
    ("launch",),
    ("kernels",),
    ("collectives",),
    ("fp8",),
    ("nn",),
    ("models",),
    ("parallel",),
    ("context_parallel", "recipe", "matrix_parts", "groups"),
    ("build",),
    ("data",),
    ("checkpoint", "watchdog"),
    ("run",),
    ("plan",),
    ("train",),
    ("doctor", "bench", "compat", "arguments", "verify", "fp8_export"),
    ("cli",),
    ("__main__",),
)
"""A line imports only from lines above it; within a line, nobody imports a neighbour."""

FORBIDDEN = {
    "launch": {"_version", "dtypes", "hub"},
    "kernels": {"config", "launch"},
    "collectives": {"config"},
    "fp8": {"config"},
    "nn": {"config"},
    "parallel": {"models"},
}
"""What a component may not import although it stands above: these take plain arguments, blocks and plans."""

WITHOUT_TORCH = {"_version", "errors", "job_ranks", "supervision", "config", "launch", "compat/migrate", "compat/sagemaker"}
"""Components, and folders of them, that never import torch, not even inside a function."""

LEAVES = {"compat": {"cli"}}
"""Components that nothing imports but these, although they stand below: names and habits of other libraries end there."""

LIGHT = (
    "octavo",
    "octavo.errors",
    "octavo.compat.sagemaker.estimator",
    "octavo.compat.start",
    "octavo.config",
    "octavo.hardware",
    "octavo.job_ranks",
    "octavo.launch",
    "octavo.launch.supervisor",
    "octavo.libraries",
    "octavo.versions",
    "octavo.compat.migrate.run_file",
    "octavo.compat.migrate.script",
    "octavo.config.degrees",
    "octavo.plan.flops",
    "octavo.models.families",
    "octavo.run.finished",
    "octavo.run.paths",
    "octavo.run.plots",
    "octavo.supervision",
    "octavo.watchdog.launcher",
)
"""Modules that load no torch when they are imported."""

STATELESS = ("kernels", "fp8", "nn", "parallel", "collectives")
"""Components whose modules keep nothing: `octavo.process` has what belongs to the process, with the reason."""

OWNERS = {
    "fp8/buffers.py: default": "the buffers of layers outside of octavo.transform, which are one model's",
    "parallel/world.py: state": "octavo.state, public: the ranks of this process",
}
"""Objects of a module that change."""

CONSTANTS = {
    "tl.constexpr", "TypeVar", "frozenset", "functools.partial", "datetime.timedelta", "dict.fromkeys",
    "torch.tensor(LOG2_E.value, dtype=torch.float32, device='cpu').item", "Tiles", "Tile", "Only", "Scores", "RowShape",
    "QuantizedTensor", "FloatFormat",
}  # fmt: skip
"""Calls whose results do not change, and `OfThread`, whose state is a thread's."""

CACHED = {
    "kernels/attention/flash.py": {"missing", "_interface", "_packing"},
    "kernels/cublaslt.py": {"library", "_handle"},
    "kernels/gemm.py": {"capability", "cpu_has_bf16", "has_grouped_products", "_bf16_values"},
    "kernels/norm_rows.py": {"forward_shape", "backward_shape"},
    "kernels/tiles.py": {"processors"},
    "collectives/schedule.py": {"diagonal", "earlier", "ring"},
}
"""Functions with a cache: their results follow from their arguments and this machine alone."""

_CHANGES = {"append", "add", "update", "clear", "pop", "popitem", "setdefault", "extend", "insert", "remove", "discard"}

FILES = sorted(SOURCE.rglob("*.py"))
parsed = functools.cache(ast.parse)
LINE_OF = {component: number for number, line in enumerate(LAYERS) for component in line}


def component_of(path: Path) -> str:
    """The part of the house that a file belongs to: its first name under octavo/."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import anywhere in the tree; relative ones begin with a dot.

    A plain `import octavo` counts as what is taken from it, since the package hands names on lazily.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name != "octavo" or alias.asname)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "octavo":
            yield node.lineno, f"octavo.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.module == "octavo":
            yield from ((node.lineno, f"octavo.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def violations(component: str, source: str) -> list[str]:
    """What the imports of a file of this component break, one sentence each."""
    return [
        f"line {line}: {component} imports {name}: {fault}"
        for line, name in imports(parsed(source))
        if (fault := fault_of(component, name))
    ]


def fault_of(component: str, name: str) -> str | None:
    """Why `component` may not import `name`; None when it may."""
    package, _, rest = name.partition(".")
    if name.startswith("."):
        return "relative imports are refused, write octavo.… in full"
    if package == "torch" and component in WITHOUT_TORCH:
        return f"{component} never needs torch"
    if package == "benchmarks":
        return "benchmarks is no part of the package"
    if package != "octavo":
        return None
    target = rest.partition(".")[0]
    if not target:
        return "import the module that is meant, not the whole package"
    if target not in LINE_OF:
        return f"{target} is no component of the house; it stands in LAYERS or it does not exist"
    if target == component:
        return None
    if target in FORBIDDEN.get(component, set()):
        return f"{component} takes what it needs from {target} as plain arguments"
    if component not in LEAVES.get(target, {component}):
        return f"nothing imports {target} but {', '.join(LEAVES[target])}"
    if LINE_OF[target] >= LINE_OF[component]:
        return f"{target} does not stand above {component}"
    return None


def may_import(component: str) -> str:
    """The sentence about imports in the docstring of a folder's `__init__`."""
    refused = FORBIDDEN.get(component, set())
    nearest = next(level for level in reversed(LAYERS[: LINE_OF[component]]) if not refused.issuperset(level))
    others = sorted(name for name in refused if LINE_OF[name] < LINE_OF[nearest[0]])
    but = f", but not {', '.join(others)}" if others else ""
    return f"May import {', '.join(nearest)} and lower levels{but}."


def modules_imported(source: str, modules: set[str]) -> set[str]:
    """The modules of `modules` that a source imports from, anywhere; a package stands for its `__init__`."""
    plain = {alias.name for node in ast.walk(parsed(source)) if isinstance(node, ast.Import) for alias in node.names}
    return (plain & modules) | taken_from(source, modules)


def taken_from(source: str, modules: set[str]) -> set[str]:
    """Of these the modules whose names, or which themselves, are imported by `from … import …`."""
    froms = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom)]
    names = [(str(node.module), f"{node.module}.{alias.name}") for node in froms for alias in node.names]
    return {name if name in modules else module for module, name in names} & modules


def names_at_run_time(source: str) -> list[str]:
    """Packages that a module loads when it is imported: outside functions and `if TYPE_CHECKING:`."""
    body = [
        node for node in parsed(source).body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    outside = [node for node in body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [name.partition(".")[0] for node in outside for _, name in imports(node)]


def by_file(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("component", [name for name in LINE_OF if (SOURCE / name).is_dir()])
def test_a_folder_says_what_it_may_import(component):
    docstring = ast.get_docstring(ast.parse((SOURCE / component / "__init__.py").read_text(encoding="utf-8")))
    assert may_import(component) in " ".join(str(docstring).split("\n"))


def test_imports_go_up_only():
    broken = []
    for path in FILES:
        component = component_of(path)
        if component == "__init__" or by_file(path) == "launch/__init__.py":  # names that are handed on when they are asked for
            continue
        assert component in LINE_OF, (
            f"octavo/{component} is not in LAYERS: give it a line, or put it in a component that has one"
        )
        source, part = path.read_text(encoding="utf-8"), "/".join(path.relative_to(SOURCE).parts[:2])
        found = violations(component, source)
        if part in WITHOUT_TORCH and "torch" in {name.partition(".")[0] for _, name in imports(parsed(source))}:
            found.append(f"{part} never needs torch")
        broken += [f"{by_file(path)}: {each}" for each in found]
    assert not broken, "\n".join(broken)


def dotted(path: Path) -> str:
    """The name of a file's module."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_files_import_each_other_in_a_cycle():
    modules = {dotted(path) for path in FILES}
    graph = {dotted(path): modules_imported(path.read_text(encoding="utf-8"), modules) - {dotted(path)} for path in FILES}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the files
    assert sorted(order) == sorted(modules)


def test_names_are_imported_from_the_module_that_defines_them():
    """`import octavo.nn`, the public face as a user has it, is no name that is taken from there."""
    packages = {dotted(path) for path in FILES if path.name == "__init__.py"}
    modules = {dotted(path) for path in FILES}
    taken = {
        by_file(path): sorted(taken_from(path.read_text(encoding="utf-8"), modules) & packages)
        for path in FILES
        if path.name != "__init__.py"
    }
    assert {path: found for path, found in taken.items() if found} == {}


def kept_by_module(source: str, file: str) -> list[str]:
    """What a module keeps between its calls, a sentence each: globals that change, and caches without an entry."""
    tree = parsed(source)
    found = [f"line {node.lineno}: global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    changed = {name for node in ast.walk(tree) if (name := _changed(node)) is not None}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        value, call = node.value, ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else None
        table = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
        is_constant = call in CONSTANTS | {"OfThread"} or (table and (name == "__all__" or name == name.upper()))
        if (table or call) and (not is_constant or name in changed) and f"{file}: {name}" not in OWNERS:
            found.append(f"line {node.lineno}: {name} = {ast.unparse(value)[:60]}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            caches = [ast.unparse(each) for each in node.decorator_list]
            cached = any(each.startswith(("functools.cache", "functools.lru_cache", "cache", "lru_cache")) for each in caches)
            plain = any(each.startswith("functools.cached_property") for each in caches)
            if cached and not plain and node.name not in CACHED.get(file, ()):
                found.append(f"line {node.lineno}: {node.name} has a cache")
    return found


def _changed(node: ast.AST) -> str | None:
    """The name of what a statement or call changes in place: `NAME[…] = …`, `del NAME[…]`, `NAME.update(…)`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name):
        return node.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None


@pytest.mark.parametrize("path", [path for path in FILES if component_of(path) in STATELESS], ids=by_file)
def test_no_module_keeps_state(path):
    found = kept_by_module(path.read_text(encoding="utf-8"), by_file(path))
    assert not found, "\n".join([f"{by_file(path)}: octavo.process is the place, with the reason", *found])


def test_owners_and_caches_are_there():
    sources = {by_file(path): path.read_text(encoding="utf-8") for path in FILES}
    for owner in OWNERS:
        file, name = owner.split(": ")
        assert f"\n{name} = " in sources[file], owner
    for file, functions in CACHED.items():
        assert all(f"\ndef {function}(" in sources[file] for function in functions), file


def test_files_explain_themselves():
    sources = {by_file(path): path.read_text(encoding="utf-8") for path in FILES}
    empty = {name for name, source in sources.items() if name.endswith("__init__.py") and not source.strip()}
    silent = [name for name, source in sources.items() if name not in empty and not ast.get_docstring(parsed(source))]
    assert silent == [], "say why these files exist in a docstring"


def test_the_front_door_imports_only_the_standard_library():
    source = (SOURCE / "__init__.py").read_text(encoding="utf-8").replace("from octavo._version import", "from sys import")
    assert set(names_at_run_time(source)) <= sys.stdlib_module_names


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# The checker itself, on small sources.


@pytest.mark.parametrize(
    ("component", "source", "fault"),
    [
        ("fp8", "from octavo.nn.linear import Linear", "nn does not stand above fp8"),
        ("fp8", "def f():\n    from octavo.nn import linear", "line 2: fp8 imports octavo.nn: nn does not stand above fp8"),
        ("fp8", "if TYPE_CHECKING:\n    import octavo.train.loop", "train does not stand above fp8"),
        ("kernels", "class A:\n    def f(self):\n        import octavo.fp8.cast as cast", "fp8 does not stand above kernels"),
        ("errors", "from octavo import config", "config does not stand above errors"),
        ("storage", "from octavo.hardware import lookup", "hardware does not stand above storage"),
        ("errors", "from octavo import __version__", "line 1: errors imports octavo.__version__"),
        ("bench", "import octavo.doctor", "doctor does not stand above bench"),
        ("data", "importlib.import_module('octavo.cli')", "cli does not stand above data"),
        ("data", "from importlib import import_module\nimport_module('octavo.train.loop')", "train does not stand above data"),
        ("parallel", "from octavo.models import decoder", "parallel takes what it needs from models as plain arguments"),
        ("nn", "def f():\n    from octavo.config import Fp8Config", "nn takes what it needs from config as plain arguments"),
        ("config", "from torch import Tensor", "config never needs torch"),
        ("nn", "from .linear import Linear", "relative imports are refused"),
        ("nn", "from .. import kernels", "relative imports are refused"),
        ("nn", "import octavo as o", "not the whole package"),
        ("nn", "import octavo\ndef f():\n    return octavo.train.loop", "line 3: nn imports octavo.train"),
        ("nn", "from octavo.helpers import f", "helpers is no component of the house"),
        ("train", "import octavo.compat.te", "nothing imports compat but cli"),
        ("__main__", "def f():\n    from octavo.compat import start", "nothing imports compat but cli"),
        ("cli", "def f():\n    from benchmarks.run import run_suite", "benchmarks is no part of the package"),
    ],
)
def test_a_violation_is_found(component, source, fault):
    found = violations(component, source)
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "_seen = {}",
        "_seen: set[str] = set()",
        "_thread = threading.local()",
        "_numbers = itertools.count()",
        "_last = None\ndef f(x):\n    global _last\n    _last = x",
        "TABLE = {1: 2}\ndef f(x):\n    TABLE[x] = 3",
        "NAMES = [1]\ndef f(x):\n    NAMES.append(x)",
        "NAMES = [1]\ndef f(x):\n    del NAMES[0]",
        "SHAPES = weakref.WeakSet()",
        "@functools.cache\ndef f(x):\n    return x",
    ],
)
def test_what_a_module_keeps_is_found(source):
    assert len(kept_by_module(source, "fp8/new.py")) == 1


def test_constants_are_nothing_that_a_module_keeps():
    source = "TABLE = {1: 2}\n_LIMIT = 3\n__all__ = ['f']\nT = TypeVar('T')\n_threads = OfThread('key', list)\nPAIR = (1, 2)"
    assert kept_by_module(source, "fp8/new.py") == []


def test_imports_are_resolved_to_modules():
    source = "from octavo.nn import linear, Linear\nfrom octavo.fp8.recipe import Format\nimport octavo.errors"
    known = {"octavo.nn", "octavo.nn.linear", "octavo.fp8.recipe", "octavo.errors"}
    assert modules_imported(source, known) == known


@pytest.mark.parametrize(
    ("component", "source"),
    [
        ("fp8", "from octavo.kernels import reference\nfrom octavo.fp8.recipe import Format\nimport torch"),
        ("config", "from octavo.errors import InputError"),
        ("cli", "def train():\n    from octavo.train import loop\n    from octavo.bench import run"),
        ("cli", "def migrate():\n    from octavo.compat.migrate.script import read"),
        ("data", "from octavo._version import __version__"),
        ("plan", "from octavo.config.degrees import fit_degrees\nfrom octavo.hardware import lookup"),
        ("train", "importlib.import_module(name)"),
        ("data", "'import octavo.cli'  # text is no import"),
    ],
)
def test_what_is_allowed_is_not_a_violation(component, source):
    assert violations(component, source) == []


def test_imports_at_run_time_are_told_from_lazy_ones():
    source = "import os\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import numpy\n"
    source += "try:\n    import yaml\nexcept ImportError: ...\n"
    assert names_at_run_time(source) == ["os", "yaml"]
