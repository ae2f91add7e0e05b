"""What the tests of float16 over tensor ranks run on every rank, beside one rank in float16 and in float64."""

import functools

import lora_ranks
import tensor_ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import octavo
from octavo.collectives.blocks import local_of
from octavo.collectives.tensor import TensorGroup
from octavo.fp8.recipe import RECIPES
from octavo.nn.unrounded import unrounded_linear
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate
from octavo.train.optimizer import clip_grad_norm_

SCALE, CLIPPED = 2.0**12, 0.5


def trained(
    shape, degrees, *, dtype=torch.float16, scale=SCALE, steps=3, given=None, recipe=None, micro_batches=1, seed=None,
    lora=None, **options,
):  # fmt: skip
    """Losses, norms, gradients of the first step without the loss scale, and parameters behind the steps, whole."""
    recipe = None if recipe is None else RECIPES[recipe]()
    build = tensor_ranks.started if lora is None else functools.partial(lora_ranks.model_of, lora=lora)
    if degrees is None and not dist.is_initialized():
        octavo.init({})  # adapters draw by octavo.init's seed, which other tests of the process change
    model = build(shape, degrees, recipe, dtype=dtype, **options)
    device = next(model.parameters()).device
    optimizer, given, found = tensor_ranks.optimizer_of(model), tensor_ranks.batch(**given or {}), []
    given = {name: value.to(device) for name, value in given.items()}
    if seed is not None:
        torch.manual_seed(seed)
    count = (given["labels"][:, 1:] != -100).sum().item()
    mine = given if degrees is None else tensor_ranks.own_samples(given)
    parts = [dict(zip(mine, row, strict=True)) for row in zip(*(x.chunk(micro_batches) for x in mine.values()), strict=True)]
    for _ in range(steps):
        loss = torch.zeros((), device=device)
        for number, part in enumerate(parts):
            accumulate(model, last=number == micro_batches - 1)
            with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                one = model(**part, num_items_in_batch=count).loss
            (one * scale).backward()
            loss += one.detach()
        if degrees is not None and world.state.dp_size > 1:
            dist.all_reduce(loss, group=world.state.dp_process_group)
        gradients = {n: g / scale for n, g in tensor_ranks.whole(model, lambda p: p.grad).items()}
        norm = clip_grad_norm_(model, 1.0, loss_scale=scale)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item(), gradients))
    losses, norms, gradients = zip(*found, strict=True)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients[0],
        "parameters": tensor_ranks.whole(model, lambda parameter: parameter if parameter.requires_grad else None),
    }


def cells(degrees, cells):
    """`trained` of each (shape, options) over the ranks; of rank 0 alone, as the others' is the same."""
    found = [trained(shape, degrees, **options) for shape, options in cells]
    for each in found:
        numbers = torch.tensor(each["losses"] + each["norms"], device=world.state.device)
        first = numbers.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, numbers)
    return found if world.state.rank == 0 else None


def scaled_by_pytorch(degrees, kind, spoiled, *, clip=0.0, steps=6):
    """Of each step of PyTorch's scaler: its scale and whether a weight has changed; then the whole parameters.

    spoiled: step → the rank (None: one rank alone) that finds an infinity in its part of one gradient.
    """
    model = tensor_ranks.started("plain", degrees, None, torch.float16)
    if kind == "muon":
        optimizer = octavo.muon(model, lr=1e-2, eps=1e-3)
    else:
        optimizer = torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=1e-2, eps=1e-3, fused=kind == "fused")
    of = ShardedGradScaler if kind == "sharded" else torch.amp.GradScaler
    device = next(model.parameters()).device
    scaler = of(device.type, init_scale=2.0**8, growth_interval=2)
    given = {name: value.to(device) for name, value in tensor_ranks.batch().items()}
    mine = given if degrees is None else tensor_ranks.own_samples(given)
    count, found = (given["labels"][:, 1:] != -100).sum().item(), []
    rank = None if degrees is None else world.state.rank
    for number in range(steps):
        before = [local_of(parameter).clone() for parameter in model.parameters()]
        scaler.scale(model(**mine, num_items_in_batch=count).loss).backward()
        if number in spoiled and spoiled[number] == rank:
            local_of(model.layers[1].ffn.fc1.weight.grad)[0, 0] = torch.inf
        scale = scaler.get_scale()
        if clip:
            scaler.unscale_(optimizer)
            octavo.clip_grad_norm_(model, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [local_of(parameter) for parameter in model.parameters()]
        found.append((scale, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))))
    return found, tensor_ranks.whole(model, lambda parameter: parameter)


def relative(found, wanted):
    """Largest error of a part in float16, relative to the largest number of the whole."""
    assert found.dtype == torch.float16
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def beyond_float16():
    """Errors of a product split by columns and of the gradients of one split by rows, whose summands are beyond float16."""
    tensor, draw = TensorGroup(dist.group.WORLD), torch.Generator().manual_seed(8)
    n, rank, device = tensor.size, tensor.rank, torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    wide, narrow, tokens = 32 * n, 24, 4 * n
    signs = torch.ones(n)
    signs[1::2] = -1.0
    signs = signs.half().to(device) * 250.0

    def drawn(*shape):
        return torch.randn(shape, generator=draw).half().to(device)

    def local(whole):
        return whole.flatten(0, 1).chunk(n)[rank].unflatten(0, (2, -1))

    # A column that is 300 in the input of each rank, and 250 or -250 in its part of the weight.
    x, weight, bias = drawn(2, tokens, wide), drawn(narrow, wide), drawn(narrow)
    x[..., wide // n - 1 :: wide // n], weight[:, wide // n - 1 :: wide // n] = 300.0, signs
    layer = octavo.nn.Linear(wide // n, narrow, params_dtype=torch.float16, device=device)
    layer.tensor = tensor
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(n, 1)[rank])
        layer.bias.copy_(bias)
    wanted = x.double() @ weight.double().t() + bias.double()
    assert (x.double()[..., : wide // n] @ weight.double()[:, : wide // n].t()).abs().min() > 65504
    errors = {"output": relative(layer(x.chunk(n, -1)[rank].contiguous()), local(wanted))}

    # The same of an output's gradient, and of the rows of the weight.
    stream, weight, grad = drawn(2, tokens, narrow), drawn(wide, narrow), drawn(2, tokens, wide)
    grad[..., wide // n - 1 :: wide // n], weight[wide // n - 1 :: wide // n] = 300.0, signs[:, None]
    normed = octavo.nn.LayerNormLinear(narrow, wide // n, bias=False, params_dtype=torch.float16, device=device)
    normed.tensor = tensor
    with torch.no_grad():
        normed.weight.copy_(weight.chunk(n)[rank])
    own = local(stream).clone().requires_grad_()
    normed(own).backward(grad.chunk(n, -1)[rank])
    exact = stream.double().requires_grad_()
    (torch.nn.functional.layer_norm(exact, (narrow,)) @ weight.double().t()).backward(grad.double())
    errors["input's gradient"] = relative(own.grad, local(exact.grad))

    # Two words with the same gradient of their logits, of rows with other signs.
    hidden, head, d_logits = drawn(2, tokens, narrow), drawn(wide, narrow), drawn(2, tokens, wide)
    head[wide // n - 1 :: wide // n], d_logits[..., wide // n - 1 :: wide // n] = signs[:, None], 300.0
    own = local(hidden).clone().requires_grad_()
    whole = tensor.gathered(own)
    logits = unrounded_linear(whole, head.chunk(n)[rank], torch.float16)
    logits.backward(d_logits.chunk(n, -1)[rank])
    errors["logits"] = relative(logits, hidden.double() @ head.chunk(n)[rank].double().t())
    errors["states' gradient"] = relative(own.grad, local(d_logits.double() @ head.double()))
    return errors


def scaled_matrices(degrees):
    """What a scaler says of an optimizer of matrices."""
    model = tensor_ranks.started("plain", degrees, None, torch.float16)
    matrices = octavo.matrices(model, "model.layers.*")
    optimizer = torch.optim.Muon(matrices.values(), lr=0.1)
    matrices.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(**tensor_ranks.batch()).loss).backward()
    return tensor_ranks.refused(lambda: scaler.step(optimizer))


def cells_by_copies(degrees, cells_):
    """`cells` with every exchange of GPUs by copies."""
    with tensor_ranks.all_by_copies():
        return cells(degrees, cells_)
