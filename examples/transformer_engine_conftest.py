"""A `conftest.py` with which Transformer Engine's PyTorch tests run on Octavo's layers, on a machine without a GPU.

Copy it to `conftest.py` beside the tests: docs/migrating.md says which. "cuda" is the CPU here. Internals of Transformer Engine
are stand-ins: imports find them, and a use of one fails by its name. There is one attention and no backend to choose, so tests
that compare backends compare layouts, padding and recomputation. `ModelConfig` is of a size for a CPU.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import octavo.compat.te
from octavo.compat.te.shim import MODULES

octavo.compat.te.install()


class OnCpu(TorchFunctionMode):
    """Creates tensors for "cuda" on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value

        if function is torch.Tensor.cuda:
            return args[0]
        return function(*map(here, args), **{name: here(value) for name, value in (kwargs or {}).items()})


class CpuAutocast(torch.autocast):
    """`torch.autocast` for the CPU, for any device."""

    def __init__(self, device_type: str, **options: Any) -> None:
        super().__init__("cpu", **options)


class Internal(type):
    """A stand-in for an internal class, function or module."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name, f"{cls.__name__}.{name}")

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __setitem__(cls, key: Any, value: Any) -> None:
        """Ignores settings of backends: Octavo has none."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refused by name."""
        raise NotImplementedError(f"{cls.__name__} is an internal of Transformer Engine: {cls.reason}")


def window(kind: str, size: tuple[int, int] | None = None) -> tuple[int, int]:
    """window_size for a mask type, in the form that tests expect."""
    left, right = (-1, -1) if size is None else size
    if "causal" in kind:
        return (left, 0)
    return (-1, -1) if (left, right) == (-1, 0) else (left, right)


def normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """Fills a weight from a normal distribution."""
    return lambda weight: torch.nn.init.normal_(weight, 0.0, sigma)


VALUES: dict[str, Any] = {
    "get_device_compute_capability": lambda: (9, 0),
    "get_cudnn_version": lambda: (9, 99, 0),
    "is_bf16_compatible": lambda: True,
    "init_method_normal": normal,
    "scaled_init_method_normal": lambda sigma, layers: normal(sigma / (2 * layers) ** 0.5),
    "attention_mask_func": lambda scores, mask: scores.masked_fill(mask, -10000.0),
    "check_set_window_size": window,
    "v4_is_installed": False,
}
"""Internals whose function the tests need."""


def stand_in(name: str, path: str, reason: str = "Octavo has nothing like it.") -> Any:
    """A stand-in for an internal. reason: for the message when it is used."""
    return VALUES[name] if name in VALUES else Internal(path, (), {"reason": reason})


class Internals(MetaPathFinder, Loader):
    """Finds the modules of Transformer Engine that Octavo lacks."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of such a module."""
        ours = fullname.partition(".")[0] not in ("transformer_engine", "transformer_engine_torch")
        return None if ours or fullname in MODULES else ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module stand-ins for all names."""
        vars(module)["__getattr__"] = missing(module, None)


def missing(module: ModuleType, first: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """`__getattr__` of a module: the names that `first` finds, otherwise stand-ins."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{module.__name__}.{name}"
        if first is None:
            return stand_in(name, path)
        try:
            return first(name)
        except AttributeError as error:  # the message names the alternative
            return stand_in(name, path, str(error))

    return find


OnCpu().__enter__()
torch.autocast = CpuAutocast
for name in ("synchronize", "manual_seed", "set_rng_state", "get_rng_state"):
    setattr(torch.cuda, name, lambda *state: None)
torch.cuda.current_device = lambda: torch.device("cpu")
sys.meta_path.insert(0, Internals())
for name in MODULES:
    module = importlib.import_module(name)
    vars(module)["__getattr__"] = missing(module, vars(module)["__getattr__"])

sys.path.insert(0, str(Path(__file__).parent))
if (Path(__file__).parent / "utils.py").exists():
    utils = importlib.import_module("utils")
    utils.get_available_attention_backends = lambda *given, **named: ([True, True, True], None, [1])
    Whole = utils.ModelConfig

    class ModelConfig(Whole):
        """At most 64 queries and 96 keys, and heads of a quarter of their size."""

        def __init__(
            self, batch_size: int, max_seqlen_q: int, num_heads: int, head_dim_qk: int, *, max_seqlen_kv: int | None = None,
            head_dim_v: int | None = None, **more: Any,
        ) -> None:  # fmt: skip
            keys = None if max_seqlen_kv is None else min(max_seqlen_kv, 96)
            values = None if head_dim_v is None else max(8, head_dim_v // 4)
            sizes = batch_size, min(max_seqlen_q, 64), num_heads, max(8, head_dim_qk // 4)
            super().__init__(*sizes, max_seqlen_kv=keys, head_dim_v=values, **more)

    utils.ModelConfig = ModelConfig

refused: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Records names that were refused."""
    for error in ("InputError: ", "NotImplementedError: "):
        if report.when == "call" and error in str(report.longrepr):
            refused[report.nodeid] = str(report.longrepr).partition(error)[2].splitlines()[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The reasons, each once."""
    terminalreporter.write_line(f"{len(refused)} refused by name")
    for message in sorted({text[:160] for text in refused.values()}):
        terminalreporter.write_line(message)
