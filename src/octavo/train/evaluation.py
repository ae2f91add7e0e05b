"""Evaluations of the model in training: functions of a user, and tasks of lm-eval (`octavo.train.lm_tasks`).

They get the model itself, on every rank, in evaluation mode. Random states, FP8 scales and module modes are restored bit for
bit; changes of a parameter or a buffer are refused. So training computes the same numbers with evaluations as without.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.checkpoint.rng_state import random_scalars, random_tensors, restore_random
from octavo.config.run import EVALUATION
from octavo.config.train import TrainConfig
from octavo.errors import InputError, unknown
from octavo.fp8.scaling import restored
from octavo.parallel.coordination import all_ranks
from octavo.parallel.world import state
from octavo.run.sample import evaluating as evaluation_mode

Evaluation = Callable[[nn.Module, int], Mapping[str, float]]
"""A user's evaluation: model in evaluation mode and step → figures by name."""
Reduce = Literal["same", "mean", "sum"]


def load_function(name: str) -> Evaluation:
    """The function of "FILE.py:FUNCTION" in `train.eval`; the file is imported as a separate module.

    Raises:
        InputError: there is no such file or function, or it does not take model and step.
    """
    path, _, wanted = name.rpartition(":")
    file = Path(path).expanduser().resolve()
    key = f"train.eval = {name!r}"
    if not file.is_file():
        raise InputError(f"{key}: there is no file {str(file)!r}. Paths are from the folder in which the command runs.")
    return _function(file, wanted, key)


@functools.cache  # a run imports it once: the file may be edited while it trains
def _function(file: Path, wanted: str, key: str) -> Evaluation:
    spec = importlib.util.spec_from_file_location(f"octavo_evaluation_{file.stem}_{abs(hash(file)):x}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    beside = str(file.parent)
    sys.path.insert(0, beside)  # as for a script that runs there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{key}: importing {str(file)!r} failed: {type(error).__name__}: {error}.") from error
    finally:
        if beside in sys.path:
            sys.path.remove(beside)
    function = getattr(module, wanted, None)
    if function is None:
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise unknown(f"function of {file.name}", wanted, functions, key="train.eval")
    check_function(function, key)
    evaluation: Evaluation = function
    return evaluation


def check_function(function: Any, key: str) -> None:
    """Refuse a function that cannot be called with model and step, or whose result cannot be a dict."""
    if not callable(function) or isinstance(function, type):
        raise InputError(f"{key}: give a function of model and step, not {function!r}.")
    if what := never_runs(function):
        raise InputError(f"{key}: the function {what}. Make it a plain function.")
    if error := fault_of_arguments(function, "model", "step"):
        raise InputError(f"{key}: the function cannot be called with model and step ({error}).")


def never_runs(function: Callable[..., Any]) -> str:
    """The reason why a call would not run the function, such as "is async, …"; empty if it would."""
    if inspect.iscoroutinefunction(function):
        return "is async, and nothing would wait for it"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "has a yield, and nothing would run it"
    return ""


def fault_of_arguments(function: Callable[..., Any], *arguments: str) -> str:
    """Python's error about a call with these arguments; empty if they fit, or if a C function has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""


def figures_of(
    name: str, function: Evaluation, model: nn.Module, step: int, reduce: Reduce, alive: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The figures of a function, as `evaluation/NAME`: the same on all ranks. All ranks call it.

    Args:
        name: the function's name, for messages.
        reduce: `train.eval_reduce`.
        alive: called before each forward, for a watchdog.

    Raises:
        InputError: the result is not a dict of names and numbers, or differs between ranks under "same"; or the function
            changed the model.
    """
    error: Exception | None = None
    result: Any = None
    try:
        with unchanged(model, name, alive), torch.no_grad():
            result = function(model, step)
        result = _numbers(name, result)
    except Exception as raised:
        raised.add_note(f"raised in {name} at step {step}")
        vars(raised)["of_user"] = True  # not an error of Octavo
        error = raised
    all_ranks().share_error(error)
    return {f"{EVALUATION}{key}": value for key, value in _over_ranks(name, result, reduce).items()}


def _numbers(name: str, result: Any) -> dict[str, float]:
    if not isinstance(result, Mapping):
        raise InputError(
            f'{name} returned {type(result).__name__}: return a dict of names and numbers, such as {{"accuracy": 0.5}}.'
        )
    for key in result:
        if not isinstance(key, str) or not key.strip():
            raise InputError(
                f'{name} returned the name {key!r}: a name is text that is not blank, such as {{"accuracy": 0.5}}.'
            )
    return {key: _number(name, key, value) for key, value in result.items()}


def _number(name: str, key: str, value: Any) -> float:
    try:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} returned {key} = {value!r}: give a number, such as {math.pi:.2f}.") from None


def _over_ranks(name: str, own: dict[str, float], reduce: Reduce) -> dict[str, float]:
    ranks = all_ranks()
    if ranks.size == 1:
        return own
    every = ranks.all_gather(own)
    for rank, other in enumerate(every):
        if list(other) != list(every[0]):
            raise InputError(
                f"{name} returned {', '.join(every[0]) or 'nothing'} on rank 0 and {', '.join(other) or 'nothing'} on rank "
                f"{rank}: return the same names in the same order on all ranks."
            )
    sharing = state.cp_size * state.tp_size  # ranks that see the same samples
    reduced = {}
    for key in own:
        values = [other[key] for other in every]
        if reduce == "same":
            if any(value.hex() != values[0].hex() for value in values):
                rank = next(rank for rank, value in enumerate(values) if value.hex() != values[0].hex())
                raise InputError(
                    f"{name} returned {key} = {values[0]!r} on rank 0 and {values[rank]!r} on rank {rank}. Reduce it over "
                    'ranks, or set train.eval_reduce = "mean" or "sum".'
                )
            reduced[key] = values[0]
        else:
            total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
            reduced[key] = total / len(values) if reduce == "mean" else total / sharing
    return reduced


def _set_cudnn(values: tuple[bool, bool, bool]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = values


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),  # which determine the order of sums
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32), _set_cudnn),
)
"""PyTorch settings that affect training's numbers: (getter, setter) of each."""


def _working_folder() -> Path | None:
    """None if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _enter(folder: Path | None) -> None:
    if folder is not None:
        os.chdir(folder)


@contextlib.contextmanager
def same_settings() -> Iterator[None]:
    """Restore PyTorch's settings and the working folder at the end; the paths of a run may be relative to it."""
    settings: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = [
        (read, write, read()) for read, write in (*_SETTINGS, (_working_folder, _enter))
    ]
    try:
        yield
    finally:
        for read, write, value in settings:
            if read() != value:
                write(value)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Around an evaluation in a user's training loop: evaluation mode without gradients; restores training's state.

    Modes of modules, random states (PyTorch's, NumPy's, Python's), FP8 scales and histories are restored to the bit. Existing
    gradients stay. All ranks enter it.

    Raises:
        InputError: `model` is not a module; or a parameter, a buffer or `requires_grad` was changed inside.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"octavo.evaluating: model is of type {type(model).__name__}: give a torch.nn.Module.")
    with unchanged(model, "the block of octavo.evaluating"), torch.no_grad():
        yield


@contextlib.contextmanager
def unchanged(model: nn.Module, name: str, alive: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Around an evaluation: evaluation mode, gradients set aside; restores them, modes, random states and FP8 scales.

    name: the evaluation's name, for messages. alive: called before each forward of the model.

    Raises:
        InputError: a parameter or a buffer was changed inside.
    """
    before = _sums(model)
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    tensors, scalars = random_tensors(), random_scalars()
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    hook = model.register_forward_pre_hook(lambda *_: alive())
    try:
        with same_settings(), restored(model), evaluation_mode(model):
            yield
    finally:
        hook.remove()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        restore_random(tensors, scalars)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad != trained.get(key, parameter.requires_grad):
            raise InputError(f"{name} set requires_grad of {key}: an evaluation must not change it.")
    after = _sums(model)
    if changed := [key for key in {**before, **after} if before.get(key) != after.get(key)]:
        raise InputError(
            f"{name} changed {changed[0]} of the model, which is the one in training: evaluate without changing it, or "
            "restore the values before returning."
        )


def _sums(model: nn.Module) -> dict[str, int]:
    """A checksum of the bits of this rank's part of each parameter and buffer."""
    names, sums = [], []
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        own = tensor.detach()
        own = own.to_local() if isinstance(own, DTensor) else own
        if own.is_meta or not own.numel():
            continue
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()]
        names.append(key)
        sums.append(own.contiguous().view(bits).sum(dtype=torch.int64))
    on_host: dict[torch.device, list[int]] = {}
    by_name: dict[str, int] = {}
    for device in {each.device for each in sums}:
        on_host[device] = torch.stack([each for each in sums if each.device == device]).tolist()
    for key, each in zip(names, sums, strict=True):
        by_name[key] = on_host[each.device].pop(0)
    return by_name


def load_functions(config: TrainConfig) -> None:
    """Import the functions of `train.eval`, before a model is built.

    Raises:
        InputError: one does not exist, or cannot be called with model and step.
    """
    _function.cache_clear()  # of an earlier run in this process
    for name in config.eval_functions:
        load_function(name)
