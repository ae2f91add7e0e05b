"""Parallel degrees and batch sizes: checks that they divide the ranks, before any process group exists.

    world = replicate × hybrid_shard × tensor        hybrid_shard (H) is the size of the FSDP group
    H     = shard × context                          and contains the context group
    data  = replicate × shard                        ranks that see different samples
    expert divides H × tensor, and divides tensor or is a multiple of it

No torch is imported, so a laptop finds a mistake before a cluster is paid for. An error names every factor, the nearest
degrees that fit, and the keys to change. "Nearest" means the fewest changed keys, then the smallest ratios.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.errors import InputError

DEGREES = ("hybrid_shard_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
"""Keys of `octavo.init` and of [parallel]."""
MOST_CPU_RANKS = 256
"""Limit of ranks of `octavo verify` on CPUs: each is a process."""


@dataclass(frozen=True)
class Degrees:
    """Degrees that fit `world` ranks, from `fit_degrees`. Every attribute is a number of ranks.

    Attributes:
        world: all ranks.
        hybrid_shard: H, the size of an FSDP group.
        tensor: the size of a tensor-parallel group.
        context: the size of a context-parallel group, inside an FSDP group.
        expert: the size of an expert-parallel group, inside an FSDP group and the tensor groups of its ranks.
    """

    world: int
    hybrid_shard: int
    tensor: int
    context: int
    expert: int

    @property
    def replicate(self) -> int:
        """Replicas of the sharded model."""
        return self.world // (self.hybrid_shard * self.tensor)

    @property
    def shard(self) -> int:
        """Data-parallel ranks in an FSDP group."""
        return self.hybrid_shard // self.context

    @property
    def data(self) -> int:
        """Data-parallel ranks, which see different samples: replicate × shard."""
        return self.replicate * self.shard


def fit_degrees(
    *,
    hybrid_shard_degree: int = 0,
    tensor_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    expert_parallel_degree: int = 1,
    world_size: int,
    section: str = "parallel.",
) -> Degrees:
    """The degrees of a run on `world_size` ranks; hybrid_shard_degree 0 means world_size / tensor_parallel_degree.

    Args:
        section: prefix of keys in messages; empty for `octavo.init`.

    Raises:
        InputError: the degrees do not fit; the message names the nearest that do.
    """
    degrees = (hybrid_shard_degree, tensor_parallel_degree, context_parallel_degree, expert_parallel_degree)
    asked = dict(zip(DEGREES, degrees, strict=True))
    if world_size < 1:
        raise InputError(f"a world of {world_size} ranks cannot train: start at least 1.")
    problems = _problems(asked, world_size, section)
    if problems:
        raise _degrees_error(asked, world_size, problems, section)
    return Degrees(
        world=world_size,
        hybrid_shard=hybrid_shard_degree or world_size // tensor_parallel_degree,
        tensor=tensor_parallel_degree,
        context=context_parallel_degree,
        expert=expert_parallel_degree,
    )


def least_world(
    hybrid_shard_degree: int, tensor_parallel_degree: int, context_parallel_degree: int, expert_parallel_degree: int
) -> int:
    """The fewest ranks that the degrees may fit; `fit_degrees` checks them."""
    tensor, expert = max(1, tensor_parallel_degree), max(1, expert_parallel_degree)
    return tensor * (hybrid_shard_degree or math.lcm(max(1, context_parallel_degree), expert // math.gcd(expert, tensor)))


def check_composed(tensor: int, expert: int) -> None:
    """Raise an InputError for degrees that cannot be combined on any number of ranks.

    An expert group must be a part of a tensor group, or one or several whole ones. The ranks of a tensor group that hold the
    same expert then have all tokens of the group, and can reduce an expert's amaxes.
    """
    if tensor > 0 and expert > 0 and not composes(tensor, expert):
        fitting = divisors(tensor) + [tensor * times for times in range(2, expert // tensor + 2)]
        near = [*[degree for degree in fitting if degree < expert][-1:], *[degree for degree in fitting if degree > expert][:1]]
        raise InputError(
            f"expert_parallel_degree = {expert} with tensor_parallel_degree = {tensor}: an expert group must be a part of a "
            f"tensor group, or several groups. Set expert_parallel_degree to {_or(near)}."
        )


def fit_batch(global_batch: int, micro_batch: int | None, dp_size: int) -> tuple[int, int]:
    """Micro-batch and accumulation steps: global_batch = micro_batch × accumulation × dp_size.

    Args:
        global_batch: sequences in an optimizer step, over all ranks.
        micro_batch: sequences in a forward of one rank; None: global_batch / dp_size.
        dp_size: data-parallel ranks.

    Raises:
        InputError: a size does not divide; the message names the nearest that do.
    """
    share, rest = divmod(global_batch, dp_size)
    if rest or share < 1:
        works = sorted({max(share, 1) * dp_size, (share + 1) * dp_size}, key=lambda batch: abs(batch - global_batch))
        raise InputError(
            f"train.global_batch = {global_batch} sequences cannot be shared equally by {dp_size} data-parallel ranks: "
            f"it must be a multiple of {dp_size}. Nearest that works: {_or(works)}. Change train.global_batch, or the ranks."
        )
    micro = share if micro_batch is None else micro_batch
    if micro < 1 or share % micro:
        works = _nearest_divisors(share, micro)
        # Or retain the micro-batch: the nearest share that is a multiple of it.
        least = max(micro, 1)
        batch = dp_size * least * max(round(share / least), 1)
        raise InputError(
            f"train.micro_batch = {micro} does not divide a rank's share of {share} sequences "
            f"(train.global_batch = {global_batch} over {dp_size} data-parallel ranks). Nearest that works: {_or(works)}. "
            f"Change train.micro_batch, or set train.global_batch = {batch} and train.micro_batch = {least}."
        )
    return micro, share // micro


def _problems(asked: dict[str, int], world: int, section: str) -> list[str]:
    """Descriptions of the degrees that do not fit; empty if all fit."""
    too_low = [
        f"{section}{key} = {value} must be at least {int(key != 'hybrid_shard_degree')}"
        for key, value in asked.items()
        if value < (key != "hybrid_shard_degree")
    ]
    if too_low:
        return too_low
    hybrid, tensor, context, expert = asked.values()
    if world % tensor:
        return [f"tensor {tensor} does not divide the world of {world}"]
    problems = []
    if hybrid and world % (hybrid * tensor):
        problems.append(f"hybrid_shard {hybrid} x tensor {tensor} = {hybrid * tensor} does not divide the world of {world}")
    resolved = hybrid or world // tensor
    whole = f"hybrid_shard {resolved}" if hybrid else f"hybrid_shard {resolved} (world {world} / tensor {tensor})"
    if resolved % context:
        problems.append(f"context {context} does not divide {whole}")
    if resolved * tensor % expert:
        product = f"{whole} x tensor {tensor} = {resolved * tensor}" if tensor > 1 else whole
        problems.append(f"expert {expert} does not divide {product}")
    elif not composes(tensor, expert):
        problems.append(f"expert {expert} neither divides tensor {tensor} nor is a multiple of it")
    return problems


def composes(tensor: int, expert: int) -> bool:
    """True if an expert group is a part of a tensor group, or one or several whole ones."""
    return not (tensor % expert and expert % tensor)


def _degrees_error(asked: dict[str, int], world: int, problems: list[str], section: str) -> InputError:
    nearest = min(_fitting(asked, world), key=lambda candidate: _distance(asked, candidate, world))
    changed = [key for key in asked if asked[key] != nearest[key]]
    factors = ", ".join(f"{key} {value}" for key, value in asked.items())
    divide = "context and expert must divide hybrid_shard"
    if max(asked["tensor_parallel_degree"], nearest["tensor_parallel_degree"]) > 1:
        divide = "context must divide hybrid_shard, and expert hybrid_shard x tensor"
    return InputError(
        f"parallel degrees do not fit {world} {'rank' if world == 1 else 'ranks'}: {'; '.join(problems)}. "
        f"World {world} must be replicate x hybrid_shard x tensor, and {divide}; "
        f"given {factors}. Nearest that fit: {', '.join(f'{key} {value}' for key, value in nearest.items())}. "
        f"Change {', '.join(f'{section}{key} to {nearest[key]}' for key in changed)}"
        + (", or start more ranks with --ranks (--dry-run and describe: --world-size)." if world == 1 else ".")
    )


def _fitting(asked: dict[str, int], world: int) -> Iterator[dict[str, int]]:
    """Every set of degrees that fits; hybrid_shard stays 0 if that still means the same."""
    for tensor in divisors(world):
        for hybrid in divisors(world // tensor):
            written = 0 if asked["hybrid_shard_degree"] == 0 and hybrid == world // tensor else hybrid
            for context in divisors(hybrid):
                for expert in (each for each in divisors(hybrid * tensor) if composes(tensor, each)):
                    yield dict(zip(asked, (written, tensor, context, expert), strict=True))


def _distance(asked: dict[str, int], candidate: dict[str, int], world: int) -> tuple[int, float, tuple[int, ...]]:
    """Sort key: number of changed keys, sum of their log-ratios, the degrees themselves as a tie-break."""
    ratios = 0.0
    for key, value in asked.items():
        # 0 means the largest hybrid_shard; a degree below 1 counts as 1.
        before = value if value > 0 else world if key == "hybrid_shard_degree" else 1
        ratios += 0.0 if candidate[key] == value else abs(math.log2(max(candidate[key], 1) / before))
    return sum(candidate[key] != asked[key] for key in asked), round(ratios, 9), tuple(candidate.values())


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors just below and above `wanted`, the nearer first."""
    all_divisors = divisors(number)
    below = [n for n in all_divisors if n < wanted][-1:]
    above = [n for n in all_divisors if n > wanted][:1]
    return sorted(below + above, key=lambda n: abs(n - wanted))


def _or(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
