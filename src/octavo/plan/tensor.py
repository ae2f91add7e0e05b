"""Checks that tensor-parallel ranks can split a run's matrices, from the keys of a run file, before a GPU is touched."""

from __future__ import annotations

from torch import nn

from octavo.config.degrees import Degrees, check_composed, divisors
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models import tensor_parallel as parts
from octavo.models.decoder import Decoder
from octavo.models.spec import ModelSpec

KEY = "parallel.tensor_parallel_degree"


def check_tensor(config: RunConfig, degrees: Degrees, model: nn.Module) -> None:
    """Refuse a run whose matrices the ranks of a tensor group cannot split.

    Raises:
        InputError: names the part that cannot be split, the key, and the nearest degrees that fit model and ranks.
    """
    degree = degrees.tensor
    if degree == 1:
        return
    check_composed(degree, degrees.expert)
    if not isinstance(model, Decoder):
        other = ', or model.blocks = "auto"' if config.model.blocks == "own" else ""
        raise InputError(
            f"{KEY} = {degree} splits the matrices of Octavo's decoder, and {type(model).__name__} runs its original code. Set "
            f"{KEY} = 1{other}: with 1 the ranks shard it."
        )
    spec = model.spec
    parts.check_router(spec, degree, section="moe.", key=KEY)
    spread = degrees.expert > 1
    if fault := tensor_fault(spec, degree, spread=spread):
        legal = [ranks for ranks in divisors(degrees.world) if not tensor_fault(spec, ranks, spread=spread)]
        near = [*[ranks for ranks in legal if ranks < degree][-1:], *[ranks for ranks in legal if ranks > degree][:1]]
        raise InputError(f"{KEY} = {degree}: {fault}. Set {KEY} = {' or '.join(map(str, near))}.")


def tensor_fault(spec: ModelSpec, degree: int, *, spread: bool) -> str:
    """The reason why `degree` tensor-parallel ranks cannot split a decoder, or "". spread: its experts are whole."""
    try:
        parts.check_tensor(spec, degree, spread=spread)
    except InputError as error:
        return str(error).partition(". Set ")[0].removeprefix(f"{parts.KEY} = {degree}: ")
    return ""
