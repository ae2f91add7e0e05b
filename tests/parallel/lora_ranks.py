"""What the tests of adapters over ranks run on every rank: losses, norms, whole gradients and adapters of some steps."""

import contextlib
import zlib
from unittest import mock

import torch
import torch.distributed as dist
from tensor_ranks import batch, started, step, whole

import octavo
from octavo.collectives.blocks import fill, parameters_of, shape_of, with_block
from octavo.fp8.recipe import RECIPES
from octavo.fp8.scaling import states_of
from octavo.models.lora import adapted
from octavo.parallel.fsdp2 import direct_gather


def model_of(shape, degrees, recipe=None, lora=None, *, random=True, **options):
    """A model whose adapters' B are random, the same over any ranks; random: False leaves those of its folder."""
    model = started(shape, degrees, recipe, lora=lora, **options)
    if not random:
        return model
    blocks = parameters_of(model)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(shape_of(parameter, blocks), generator=draw) * 0.1
            fill(with_block(parameter, blocks[parameter]), values)
    return model


def optimizer_of(model):
    # A gradient that is 0 but for rounding moves nothing.
    return torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=1e-2, eps=1e-3, fused=True)


@contextlib.contextmanager
def gathered_bytes():
    """A list of the bytes of each gathering inside."""
    found = []

    def counted(gather):
        def run(output, *args, **options):
            found.append(output.nbytes)
            return gather(output, *args, **options)

        return run

    with contextlib.ExitStack() as stack:
        # FSDP2's before and since torch 2.13, and that of a large matrix in place.
        for owner, name in ((dist, "all_gather_into_tensor"), (dist, "all_gather_single"), (direct_gather, "all_gather")):
            if (gather := getattr(owner, name, None)) is not None:
                stack.enter_context(mock.patch.object(owner, name, counted(gather)))
        yield found


def trained(shape, degrees, cases, *, recipe=None, steps=2, given=None, micro_batches=1, load=None, save=None, export=None,
            **options):  # fmt: skip
    """`cases` (name → options of `model_of`) → losses, norms, gradients of the last step and adapters behind it, whole.

    load, save: checkpoints to begin with and to end in. export: folder of PEFT's to end in.
    """
    chosen, found = None if recipe is None else RECIPES[recipe](), {}
    for name, case in cases.items():
        model = model_of(shape, degrees, chosen, **options, **case)
        optimizer = optimizer_of(model)
        torch.manual_seed(7)
        if load is not None:
            octavo.load(load, model, optimizer)
        of_steps = [
            step(model, optimizer, batch(**given or {}, seed=5 + number), degrees=degrees, recipe=chosen,
                 micro_batches=micro_batches)
            for number in range(steps)
        ]  # fmt: skip
        if save is not None:
            octavo.save(save, model, optimizer)
        if export is not None:
            octavo.export(model, export)
        losses, norms, gradients = zip(*of_steps, strict=True) if of_steps else ((), (), ({},))
        frozen = [p for p in model.layers.parameters() if not p.requires_grad]
        found[name] = {
            "losses": losses,
            "norms": norms,
            "gradients": gradients[-1],
            "parameters": whole(model, lambda p: p if p.requires_grad else None),
            "base": adapted(model).base,
            "stored": sum(state.stored is not None for _, state in states_of(model)),
            "bytes": sum(getattr(p, "_local_tensor", p).nbytes for p in frozen),
            "elements": sum(getattr(p, "_local_tensor", p).numel() for p in frozen),
        }
        with torch.no_grad(), octavo.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
            found[name]["evaluation"] = model.eval()(**batch(**given or {}, seed=9)).loss.item()
        del model, optimizer
    return found


def gathered(shape, degrees, recipe, **options):
    """(bytes that a forward gathers, bytes of the parameters as they are stored, in equal rows of all ranks)."""
    chosen = RECIPES[recipe]()
    model = model_of(shape, degrees, chosen, octavo.LoRA(4, base="fp8"), **options)
    model.train()
    with gathered_bytes() as found, octavo.fp8_autocast(fp8_recipe=chosen):
        model(**batch())
    count = dist.get_world_size()
    rows = [-(-parameter.shape[0] // count) * count for parameter in model.parameters()]
    of_rows = [parameter.nbytes // parameter.shape[0] for parameter in model.parameters()]
    return sum(found), sum(number * size for number, size in zip(rows, of_rows, strict=True))
