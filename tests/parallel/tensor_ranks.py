"""What the tests of tensor parallelism run on every rank: a decoder whose matrices are split beside one that is whole."""

import contextlib
import copy
import dataclasses
import os
from unittest import mock

import torch
import torch.distributed as dist
from llamas import SHAPES, VOCABULARY, llama
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import first_casts
import octavo
from octavo.collectives import copies
from octavo.collectives import tensor as tensor_groups
from octavo.collectives.amaxes import ROOM, Joins
from octavo.collectives.blocks import local_of, parameters_of, with_block
from octavo.collectives.tensor import TensorGroup
from octavo.collectives.whole import whole_tensor
from octavo.collectives.work import Pending
from octavo.errors import InputError
from octavo.fp8 import experts as fp8_experts
from octavo.fp8 import tensor_parallel as tensor_products
from octavo.fp8.linear import LinearGemms
from octavo.fp8.quantizer import LinearQuantizer
from octavo.fp8.recipe import RECIPES, Granularity, Operand
from octavo.fp8.scaling import states_of
from octavo.fp8.tensor_parallel import ColumnParallelGemms, RowParallelGemms
from octavo.kernels import gemm, reference
from octavo.kernels.cross_entropy import Objective, cross_entropy_
from octavo.kernels.experts import router
from octavo.kernels.quantize.cast_scaled import scale_from_amax
from octavo.kernels.quantize.quantized import QuantizedTensor
from octavo.models.tensor_parallel import rows_of_words, words_of
from octavo.nn import attention, experts, moe
from octavo.nn.word_slices import cross_entropy_of_slices_
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate

SAMPLES = 4
ALIGNED = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Sizes whose parts FP8 products take."""
MIXTURE = ALIGNED | {"model_type": "mixtral", "num_local_experts": 4}


def batch(tokens=12, *, documents=False, padding=False, seed=5):
    """Arguments of the forward for all samples: ids, labels, some of them without a target."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (SAMPLES, tokens), generator=draw)
    labels = ids.where(torch.rand(ids.shape, generator=draw) < 0.9, -100)
    given = {"input_ids": ids, "labels": labels}
    if documents:
        given["position_ids"] = torch.arange(tokens).remainder(tokens // 2 + 1)[None].expand(SAMPLES, -1)
    if padding:
        mask = torch.ones_like(ids)
        mask[0, 7:] = mask[2, :3] = 0
        given |= {"attention_mask": mask, "labels": labels.where(mask.bool(), -100)}
    return given


def own_samples(given):
    """Those of this rank among the data-parallel ones."""
    size, rank = world.state.dp_size, world.state.dp_rank
    return {name: value.chunk(size)[rank] for name, value in given.items()}


def whole(model, values):
    """`values(parameter)` of each parameter by name, whole."""
    blocks, found = parameters_of(model), {}
    for name, parameter in model.named_parameters():
        value = values(parameter)
        if value is not None:
            found[name] = whole_tensor(with_block(value, blocks[parameter])).detach().to("cpu", copy=True)
    return found


def started(shape, degrees, recipe=None, dtype=torch.float32, **options):
    """A model of random weights, over the ranks or (degrees None) on one."""
    if degrees is not None:
        octavo.init(degrees)
    model = llama(**(SHAPES[shape] if isinstance(shape, str) else shape))
    if torch.cuda.is_available():
        model.cuda()  # that of one rank too
    return octavo.transform(model, recipe, dtype=dtype, **options)


def optimizer_of(model):
    # A gradient that is 0 but for rounding moves nothing.
    return torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=1e-2, eps=1e-3, fused=True)


def step(model, optimizer, given, *, degrees, recipe=None, micro_batches=1, gradients=True):
    """Loss, norm and, unless they are not asked for, whole gradients of a step."""
    device = next(model.parameters()).device
    given = {name: value.to(device) for name, value in given.items()}
    mine = given if degrees is None else own_samples(given)
    count = (given["labels"][:, 1:] != -100).sum().item()
    parts = [dict(zip(mine, row, strict=True)) for row in zip(*(x.chunk(micro_batches) for x in mine.values()), strict=True)]
    loss = torch.zeros((), device=device)
    for number, part in enumerate(parts):
        accumulate(model, last=number == micro_batches - 1)
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            of_part = model(**part, num_items_in_batch=count).loss
        of_part.backward()
        loss += of_part.detach()
    if degrees is not None and world.state.dp_size > 1:
        dist.all_reduce(loss, group=world.state.dp_process_group)
    found = whole(model, lambda parameter: parameter.grad) if gradients else {}
    norm = octavo.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item(), found


def trained(shape, degrees, *, steps=2, given=None, recipe=None, micro_batches=1, frozen=(), seed=None, **options):
    """Losses and norms of some steps, gradients of the first and the parameters behind them, whole."""
    recipe = None if recipe is None else RECIPES[recipe]()
    model = started(shape, degrees, recipe, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(tuple(frozen)) if frozen else True)
    optimizer, given = optimizer_of(model), batch(**given or {})
    if seed is not None:
        torch.manual_seed(seed)
    options = {"degrees": degrees, "recipe": recipe, "micro_batches": micro_batches}
    found = [step(model, optimizer, given, gradients=number == 0, **options) for number in range(steps)]
    losses, norms, gradients = zip(*found, strict=True)
    return {"losses": losses, "norms": norms, "gradients": gradients[0], "parameters": whole(model, lambda p: p)}


@contextlib.contextmanager
def attention_by_streams(ranks):
    """On one rank: dropout of attention as `ranks` tensor ranks draw it, the heads of each from another stream of numbers."""

    def attended(q, k, v, pattern, *, dropout=0.0, **options):
        if not dropout:
            return attend(q, k, v, pattern, **options)
        seed, state, parts = torch.randint(1 << 62, ()).item(), torch.get_rng_state(), []
        for rank, heads in enumerate(zip(*(x.chunk(ranks, 2) for x in (q, k, v)), strict=True)):
            torch.manual_seed((seed + rank * 11400714819323198485) % 2**64)
            parts.append(attend(*heads, pattern, dropout=dropout, **options))
        torch.set_rng_state(state)
        return torch.cat(parts, 2)

    attend = attention.attend
    with mock.patch.object(attention, "attend", attended):
        yield


def numbers_of_ranks():
    """Numbers of this rank's own stream, of the one behind it, and of an equal state once more."""
    tensor, device = TensorGroup(dist.group.WORLD), torch.device("cpu")
    torch.manual_seed(3)

    def own():
        with tensor.forked_rng(device):
            return torch.rand(4).tolist()

    state = torch.get_rng_state()
    found = own(), own(), torch.rand(4).tolist()
    torch.set_rng_state(state)
    assert (own(), own(), torch.rand(4).tolist()) == found
    return found


def exchanged(rounds):
    """Exchanges by copies between the ranks' GPUs beside NCCL's: names of those whose numbers differ.

    Of many sizes, several under way, read late and in another order, beside products that take longer on one rank."""
    tensor, gpus, wrong = TensorGroup(dist.group.WORLD), torch.cuda.device_count(), []
    device = torch.device("cuda", tensor.rank % gpus)
    torch.cuda.set_device(device)
    if gpus < tensor.size:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    draw = torch.Generator(device).manual_seed(9 + tensor.rank)
    slow = torch.randn(2048, 2048, device=device)
    kinds = [
        (rows, columns, dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32)
        for rows, columns in ((1024, 2048), (24, 100000), (4099, 777), (2048, 4096))
    ]

    def drawn(*shape, dtype):
        return torch.randn(shape, device=device, generator=draw).to(dtype)

    def by_nccl(call, *arguments):
        with mock.patch.object(tensor_groups, "by_copies", return_value=False):
            return call(*arguments)

    def compared(name, found, wanted):
        # Sums of more than two are rounded once here, and NCCL's again and again.
        exact = found.dtype.itemsize == 1 or tensor.size == 2 or name.startswith("gather")
        if not (
            torch.equal(*(x.view(torch.uint8) for x in (found, wanted))) if exact else torch.allclose(found, wanted, atol=0.1)
        ):
            wrong.append(name)

    with mock.patch.object(tensor_groups, "by_copies", return_value=True):
        for round in range(rounds):
            under_way = []
            for number, (rows, columns, dtype) in enumerate(kinds[round % 3 :: 2] if round else kinds):
                if (round + number + tensor.rank) % 2:
                    for _ in range(20):
                        slow @ slow
                name = f"round {round}, {rows} x {columns} {dtype}"
                own = drawn(rows, columns, dtype=dtype)
                under_way.append((f"gather {name}", tensor.start_gather(own.clone()), by_nccl(tensor.gather, own)))
                if dtype.itemsize > 1:
                    parts = drawn(rows * tensor.size, columns, dtype=dtype)
                    wanted = by_nccl(tensor.scatter, parts)
                    under_way.append((f"sum {name}", tensor.start_scatter(parts.clone()), wanted))
                    made = tensor.summed(parts.__getitem__, (rows, columns), dtype, device, parts=True)
                    compared(f"summed {name}", made, wanted)
                while len(under_way) > (round % 4):
                    name, flight, wanted = under_way.pop(-1 if round % 2 else 0)
                    compared(name, flight.wait(), wanted)
            for name, flight, wanted in under_way:
                with contextlib.ExitStack() as stack:
                    found = torch.cat(stack.enter_context(flight.parts())) if name.startswith("gather") else flight.wait()
                    compared(name, found, wanted)
    for _ in range(2):  # the second is measured
        tensor.gather(drawn(1024, 4096, dtype=torch.bfloat16))
    return wrong, tensor.exchanges


def joined(rounds):
    """Joins of amaxes in the memory of the ranks' GPUs beside NCCL's: those that differ, and the ways.

    Of many sizes, on two streams, beside products that take longer on one rank than on the other.
    """
    joins, group, rank, wrong = Joins(), dist.group.WORLD, dist.get_rank(), []
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if gpus < dist.get_world_size():
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    draw = torch.Generator(device).manual_seed(11 + rank)
    slow, streams = torch.randn(2048, 2048, device=device), (torch.cuda.current_stream(), torch.cuda.Stream())
    for round in range(rounds):
        made, wanted = [], []
        for number, count in enumerate((1, 8, 1, 33, ROOM, ROOM + 1, 1, 1)):
            largest = 10 * torch.rand(count, device=device, generator=draw)
            if number % 4 == 1:
                largest[: count // 2] = 0.0
            if number == 3 and rank == 1:
                largest[0] = torch.inf
            own, shape = largest.clone(), () if count == 1 else (count,)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            if (round + number + rank) % 3 == 0:
                for _ in range(10):
                    slow @ slow
            streams[round % 2].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[round % 2]):
                scales = joins.scale(own.view(shape), [group], 448.0, number == 2)
            torch.cuda.current_stream().wait_stream(streams[round % 2])
            made += [own, scales.flatten()]
            wanted += [largest, scale_from_amax(largest, 448.0, number == 2)]
        pairs = enumerate(zip(made, wanted, strict=True))
        wrong += [(round, number) for number, (found, want) in pairs if not torch.equal(found, want)]
    return wrong, joins.methods()


@contextlib.contextmanager
def all_by_copies():
    """Every exchange of GPUs by copies, and every product of gathered rows and sum in parts."""
    with (
        mock.patch.object(tensor_groups, "by_copies", return_value=True),
        mock.patch.object(tensor_groups, "LEAST_BYTES", 0),
        mock.patch.object(tensor_products, "LEAST_OPERATIONS", 0),
    ):
        yield


def cells_by_copies(degrees, cells_):
    """`cells` with every exchange by copies; the bytes that other ranks write."""
    with all_by_copies():
        return cells(degrees, cells_), copies.memory_bytes()


def evaluated(degrees, shape):
    """Losses of a model with dropout in evaluation, and the change of the generator's state."""
    model, before = started(shape, degrees).eval(), torch.get_rng_state()
    with torch.no_grad():
        loss = model(**batch()).loss.item()
    return loss, torch.equal(before, torch.get_rng_state())


def cells(degrees, cells):
    """`trained` of each (shape, options) over the ranks; of rank 0 alone, as the others' is the same."""
    found = [trained(shape, degrees, **options) for shape, options in cells]
    same = [torch.tensor(each["losses"] + each["norms"], device=world.state.device) for each in found]
    for each in same:
        first = each.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, each)
    return found if world.state.rank == 0 else None


def errors(found, wanted):
    """Largest relative error of losses, norms, gradients and parameters, with the name of the tensor."""
    assert found["gradients"].keys() == wanted["gradients"].keys()
    result = {kind: max(abs(a / b - 1) for a, b in zip(found[kind], wanted[kind], strict=True)) for kind in ("losses", "norms")}
    for kind in ("gradients", "parameters"):
        apart = {n: ((found[kind][n] - w).norm() / (w.norm() + 1e-6)).item() for n, w in wanted[kind].items()}
        name = max(apart, key=apart.__getitem__)
        result[f"{kind} ({name})"] = apart[name]
    return result


def distance(found, wanted):
    """Relative error of all tensors together."""
    squares = torch.tensor([[(found[n] - w).square().sum().item(), w.square().sum().item()] for n, w in wanted.items()])
    error, size = squares.sum(0).sqrt().tolist()
    return error / (size + 1e-6)


@contextlib.contextmanager
def exact_products():
    """FP8 products in float64, rounded once: those of a rank's part behind the sum over the ranks."""
    inside = []

    def values(data, scale_inv):
        if scale_inv.dim() and scale_inv.shape != data.shape:  # of rows, or of blocks of 128 columns and one or 128 rows
            high = 1 if len(scale_inv) == len(data) else 128
            scale_inv = scale_inv.repeat_interleave(high, 0)[: len(data)]
            if scale_inv.shape[1] > 1:
                scale_inv = scale_inv.repeat_interleave(128, 1)[:, : data.shape[1]]
        return data.double() * scale_inv.double()

    def multiplied(a, a_scale_inv, b, b_scale_inv, *, out_dtype, bias=None, out=None, **_):
        y = values(a, a_scale_inv) @ values(b, b_scale_inv).t()
        y = y if bias is None else y + bias.double()
        if out is not None:
            return out.copy_(y)
        return y if inside else y.to(out_dtype)

    def part(method):
        def called(self, *arguments, **named):
            inside.append(self)
            try:
                return method(self, *arguments, **named)
            finally:
                inside.clear()

        return called

    def grad_input(self, *arguments, **named):
        return (part(of_column) if isinstance(self, ColumnParallelGemms) else of_column)(self, *arguments, **named)

    def start_scatter(self, parts):
        pending = scatter(self, parts)
        return Pending([], lambda: pending.wait().to(torch.float32)) if parts.dtype == torch.float64 else pending

    of_column, scatter = LinearGemms.grad_input, TensorGroup.start_scatter
    with (
        mock.patch.object(gemm, "scaled_mm", multiplied),
        mock.patch.object(RowParallelGemms, "output", part(RowParallelGemms.output)),
        mock.patch.object(LinearGemms, "grad_input", grad_input),
        mock.patch.object(TensorGroup, "start_scatter", start_scatter),
    ):
        yield


@contextlib.contextmanager
def exact_experts():
    """Beside `exact_products`: sums of a mixture over columns of an expert, over copies and over ranks in float64."""

    def products(a, b, routes, *_, **__):
        (x, x_scale_inv), (w, w_scale_inv) = a, b
        parts = [
            (x[begin:end].double() * x_scale_inv[expert].double()) @ (w[expert].double() * w_scale_inv[expert].double()).t()
            for expert, (begin, end) in enumerate(routes.bounds)
        ]
        return torch.cat(parts)

    def activation_backward(curve, dy, x, weights, routes, quantizer, **options):
        found = of_activation(curve, dy, x, weights, routes, quantizer, **options)
        y = reference.activation(curve, x, x.shape[1] // 2)
        return *found[:2], (dy.double() * y.double()).sum(1)

    def router_gradients(grad, x, weight, dx, **options):
        d_weight = of_router(grad, x, weight, dx, **options)[1]
        return (grad.double() @ weight.double() + dx).to(x.dtype), d_weight

    def computed(self, x, scores, *others):
        scores = scores.double() if self.experts.group is None else scores  # whose gradients are sums over slices
        return of_mixture(self, x.double(), scores, *others).to(x.dtype)

    of_activation, of_router, of_mixture = experts.expert_activation_backward, router.gradients, moe.LayerNormMoE._computed
    with (
        mock.patch.object(fp8_experts, "grouped_mm", products),
        mock.patch.object(experts, "add_copies", lambda y, rows, tile: y[rows.long()].double().sum(1)),
        mock.patch.object(experts, "expert_activation_backward", activation_backward),
        mock.patch.object(router, "logits", lambda x, weight: (x.double() @ weight.double().t()).float()),
        mock.patch.object(router, "gradients", router_gradients),
        mock.patch.object(moe.LayerNormMoE, "_computed", computed),
    ):
        yield


def scaled(degrees, cells, shape=ALIGNED):
    """Of each (recipe, ranks that join amaxes): sums of the last states, and every scale and history, in passes over the same
    weights with exact products. Scales of experts elsewhere are 0."""
    found = []
    for name, joins in cells:
        recipe = RECIPES[name]()
        if joins == "none":
            recipe = dataclasses.replace(recipe, reduce_amax=False)
        model, given = started(shape, degrees, recipe), batch()
        gradient = torch.randn(SAMPLES, 12, 64, generator=torch.Generator().manual_seed(4))
        ids = given["input_ids"]
        if degrees is not None:
            ids, gradient = (each.chunk(world.state.dp_size)[world.state.dp_rank] for each in (ids, gradient))
        group = None if degrees is None or joins != "samples" else world.state.dp_process_group
        with exact_products(), exact_experts():
            for _ in range(3):
                model.zero_grad()
                with octavo.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group):
                    hidden = model(ids, output_hidden_states=True).hidden_states[-1]
                hidden.backward(gradient * (1 if degrees is None else world.state.dp_size))  # is divided by the ranks
        scales = {}
        for layer, state in states_of(model):
            for operand, scale in state.observed.items():
                every = scales[f"{layer}.{operand.value}"] = torch.zeros(state.experts or 1)
                every[state.local_experts or slice(None)] = scale
            for operand, slot in state.slots.items() if not layer.endswith("head") else ():
                scales[f"{layer}.{operand.value}"] = torch.cat((slot.scale.flatten(), slot.history.flatten()))
        found.append((hidden.detach().clone(), scales))
    return found


def restored(layout, granularity, runs, parts):
    """Casts with a scale for each element: rows of `layout` [R, C] in so many parts, columns in so many runs."""
    data, scales = [], []
    for block in layout.float().chunk(parts):
        pieces = []
        for piece in block.chunk(runs, 1):
            if granularity is Granularity.ROW:
                q, scale = reference.cast_rows(piece, torch.float8_e4m3fn, 448.0)
            else:
                high = 128 if granularity is Granularity.BLOCK_128X128 else 1
                q, scale = reference.cast_blocks(piece, torch.float8_e4m3fn, 448.0, high)
                scale = scale.repeat_interleave(high, 0)[: len(piece)].repeat_interleave(128, 1)[:, : piece.shape[1]]
            pieces.append((q, (1 / scale.double()).float().expand(piece.shape)))
        for into, row in zip((data, scales), zip(*pieces, strict=True), strict=True):
            into.append(torch.cat([each.view(torch.uint8) if each.itemsize == 1 else each for each in row], 1))
    return torch.cat(data).view(torch.float8_e4m3fn), torch.cat(scales)


def sliced_casts(n):
    """On one rank: the casts of n tensor ranks with scales of rows or blocks, of parts that are runs of rows or columns."""

    def quantized(self, operand, matrix, how, *, rowwise, columnwise):
        by_rows = any(f".{name}" in self.state.name for name in ("qkv", "fc1"))  # of the weight
        across = n if operand is (Operand.GRAD_OUTPUT if by_rows else Operand.INPUT) else 1
        down, height = 1, 1
        if operand is Operand.WEIGHT:
            across, height = (1, n) if by_rows else (n, 1)
        elif how.granularity is Granularity.BLOCK_1X128:
            down = n
        one = restored(matrix, how.granularity, across, height) if rowwise else (None, None)
        # Transposed: tokens, or the weight's rows, lie along a row.
        other = restored(matrix.t(), how.granularity, down * height, across) if columnwise else (None, None)
        return QuantizedTensor(*one, *other), None

    return mock.patch.object(LinearQuantizer, "_quantize", quantized)


def with_scales_of_rows(degrees, name, n, shape, tokens):
    """Last states and gradients of passes with exact products; without degrees by the casts of n ranks, if n is above 1."""
    recipe = RECIPES[name]()
    model, given = started(shape, degrees, recipe), batch(tokens)
    if degrees is None:
        for path, state in states_of(model):
            state.name = f".{path}"
    width = model.spec.hidden_size
    gradient = torch.randn(SAMPLES, tokens, width, generator=torch.Generator().manual_seed(4))
    with exact_products(), sliced_casts(n) if degrees is None and n > 1 else contextlib.nullcontext():
        for _ in range(2):
            model.zero_grad()
            with octavo.fp8_autocast(enabled=True, fp8_recipe=recipe):
                hidden = model(given["input_ids"], output_hidden_states=True).hidden_states[-1]
            hidden.backward(gradient)
    return hidden.detach().clone(), whole(model, lambda parameter: parameter.grad)


def scales_of_experts(degrees, name, begun_by_one):
    """Scales and histories of a mixture behind a step, by layer and operand: an entry an expert, NaN of one elsewhere.

    begun_by_one: under delayed scaling, whose first casts are else by the amaxes of a rank's samples.
    """
    recipe = RECIPES[name]()
    model = started(MIXTURE, degrees, recipe)
    with first_casts.by_one() if begun_by_one else contextlib.nullcontext():
        step(model, optimizer_of(model), batch(), degrees=degrees, recipe=recipe)
    found = {}
    for layer, state in states_of(model):
        for operand, scale in state.observed.items():
            found[f"{layer}.{operand.value}"] = torch.full((state.experts or 1,), torch.nan)
            found[f"{layer}.{operand.value}"][state.local_experts or slice(None)] = scale
        for operand, slot in state.slots.items():
            found[f"{layer}.{operand.value}"] = torch.cat((slot.scale.flatten(), slot.history.flatten()))
    return {name: scales for name, scales in found.items() if "experts" in name}


def logits_and_states(degrees, shape="all-biases", tokens=13):
    """Logits, hidden states, and gradients of a loss that is made of them; logits of some positions without gradients."""
    model, given = started(shape, degrees), batch(tokens)
    mine = given if degrees is None else own_samples(given)
    output = model(input_ids=mine["input_ids"], output_hidden_states=True)
    weights = torch.linspace(-1, 1, output.logits.numel() // len(mine["input_ids"])).view(output.logits.shape[1:])
    states = sum(state.square().sum() for state in output.hidden_states)
    (((output.logits * weights).sum() + states) / len(mine["input_ids"])).backward()
    with torch.no_grad():
        model.eval()
        last = model(input_ids=given["input_ids"], logits_to_keep=3).logits
        loss = model(**given).loss
    gradients = whole(model, lambda parameter: parameter.grad)
    return output.logits.detach(), [state.detach() for state in output.hidden_states], gradients, last, loss.item()


def refused(call):
    """What an InputError of a call says; empty without one."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def refusals(degree, shapes):
    """The messages of models that cannot be split, and of calls that would be wrong."""
    degrees = {"tensor_parallel_degree": degree}
    said = {
        name: refused(lambda options=options: started(*options[:1], degrees, **options[1])) for name, options in shapes.items()
    }
    model = started("plain", degrees)
    given = batch()
    rolled = {name: value.roll(world.state.rank, 0) for name, value in given.items()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    said["embedding"] = refused(lambda: embedding(given["input_ids"]))
    said["head"] = refused(lambda: head(torch.zeros(1, 2, 48)))
    said["samples"] = refused(lambda: model(**rolled))
    said["embedding behind an error"] = refused(lambda: embedding(given["input_ids"]))
    model(**given).loss.backward()
    before = [local_of(parameter.grad).clone() for parameter in model.parameters()]
    said["clip"] = refused(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    same = (torch.equal(a, local_of(p.grad)) for a, p in zip(before, model.parameters(), strict=True))
    assert all(same)
    far = given["input_ids"].clone()
    far[1, 2] = VOCABULARY
    said["id"] = refused(lambda: model(input_ids=far))
    far = given["labels"].clone()
    far[1, 2] = VOCABULARY + 3
    said["label"] = refused(lambda: model(given["input_ids"], labels=far))
    said["own code"] = refused(lambda: octavo.transform(torch.nn.Sequential(torch.nn.Linear(4, 4)), dtype=torch.float32))
    model.layers[0].ffn.register_parameter("lora", torch.nn.Parameter(torch.zeros(3)))
    model._compared = False
    said["adapter"] = refused(lambda: model(**given))
    return said, str(octavo.describe(model))


def loss_of_slices(vocabulary, objective, fp8_dtype):
    """(loss, gradient) of this rank's columns beside all, and how many numbers the collectives have moved."""
    tensor = TensorGroup(dist.group.WORLD)
    words, rows = words_of(vocabulary, tensor), rows_of_words(vocabulary, tensor.size)
    draw = torch.Generator().manual_seed(11)
    logits = torch.randn(9, vocabulary, generator=draw) * 6
    target = torch.randint(vocabulary, (9,), generator=draw)
    target[3], target[5] = -100, vocabulary - 1
    own = torch.full((9, rows), 77.0)  # what padding has counts nothing
    own[:, : words.number] = logits[:, words.first : words.first + words.number]
    scale = torch.tensor(0.25)
    room = None if fp8_dtype is None else torch.empty(9, rows, dtype=fp8_dtype)
    loss, gradient = cross_entropy_of_slices_(own, target, scale, Objective(*objective), room, words)
    all_room = None if fp8_dtype is None else torch.empty(9, vocabulary, dtype=fp8_dtype)
    wanted, theirs = cross_entropy_(logits.clone(), target, scale, Objective(*objective), all_room)
    found, expected = ((g.high_precision if g.fp8 is None else g.fp8.float() * g.scale_inv) for g in (gradient, theirs))
    assert (found[:, words.number :] == 0).all()
    apart = found[:, : words.number] - expected[:, words.first : words.first + words.number]
    bad = target.clone()
    bad[0] = vocabulary
    of_bad = cross_entropy_of_slices_(own, bad, None, Objective(*objective), None, words)[0]
    return (
        (loss - wanted).abs().item() / wanted.item(),
        apart.abs().max().item() if apart.numel() else 0.0,
        of_bad.isnan().item(),
    )


def saved(path, degrees, shape):
    """A checkpoint behind two steps; returns the parameters."""
    model = started(shape, degrees)
    optimizer = optimizer_of(model)
    for _ in range(2):
        step(model, optimizer, batch(), degrees=degrees)
    octavo.save(path, model, optimizer)
    return whole(model, lambda parameter: parameter)


def continued(path, degrees, wanted, shape):
    """Names of parameters that differ from `wanted` behind a load, and the result of a further step."""
    model = started(shape, degrees)
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "_local_tensor", parameter).fill_(torch.nan)
    optimizer = optimizer_of(model)
    octavo.load(path, model, optimizer)
    found = whole(model, lambda parameter: parameter)
    wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    return wrong, step(model, optimizer, batch(), degrees=degrees), whole(model, lambda parameter: parameter)


def exported(path, degrees, shape):
    """Names of tensors of an exported model that differ from the model it was made of."""
    source = llama(**SHAPES[shape] | {"tie_word_embeddings": True})
    wanted = {name: value.clone() for name, value in source.state_dict().items()}
    octavo.init(degrees)
    model = octavo.transform(source, dtype=torch.float32)
    octavo.export(model, path)
    loaded = started({**SHAPES[shape], "tie_word_embeddings": True}, degrees, load_from=path)
    ours, theirs = whole(loaded, lambda parameter: parameter), whole(model, lambda parameter: parameter)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    return wanted


def from_rank_0(degrees, shape):
    """Names of parameters that are not those of rank 0's model, where others have other weights; and the description."""
    octavo.init(degrees)
    source = llama(seed=world.state.rank, **SHAPES[shape])
    model = octavo.transform(source, dtype=torch.float32, load_state_dict_from_rank0=True)
    wanted = octavo.transform(llama(seed=0, **SHAPES[shape]), dtype=torch.float32)
    found, wanted = (whole(each, lambda parameter: parameter) for each in (model, wanted))
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)], str(octavo.describe(model))


def expert_groups(degrees):
    """This rank's number among those with other experts, how many there are, and which."""
    octavo.init(degrees)
    state = world.state
    return state.ep_rank, state.ep_size, dist.get_process_group_ranks(state.ep_process_group)


def steps_of_whole_matrices(degrees, shape):
    """What steps of optimizers say that measure whole parameters, of parameters of each kind; and which ones have changed."""
    model = started(shape, degrees)
    given = own_samples(batch())
    model(**given).loss.backward()
    before = whole(model, lambda parameter: parameter)
    named = dict(model.named_parameters())
    attention = [p for n, p in named.items() if n.endswith("proj.weight")]
    said = {
        "Muon": refused(torch.optim.Muon(attention, lr=0.02).step),
        "fc2": refused(torch.optim.Muon([named["layers.1.ffn.fc2.weight"]], lr=0.02).step),
        "Adafactor": refused(torch.optim.Adafactor([named["embedding.weight"]], lr=0.02).step),
        "bias": refused(torch.optim.Adafactor([named["layers.0.ffn.fc1.bias"]], lr=0.02).step),
        "LBFGS": refused(lambda: torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)),
        "Lamb": refused(type("Lamb", (torch.optim.SGD,), {})(attention, lr=0.02).step),
    }
    after = whole(model, lambda parameter: parameter)
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    said["norms"] = refused(type("Lamb", (torch.optim.SGD,), {})([named["norm.weight"]], lr=0.02).step)
    said["SGD"] = refused(torch.optim.SGD(model.parameters(), lr=0.02).step)
    return said, changed


def stepped_by_matrices(degrees, shape):
    """Whole parameters behind a step of an optimizer of matrices."""
    model = started(shape, degrees)
    matrices = octavo.matrices(model, "model.layers.*")
    optimizer = torch.optim.Muon(matrices.values(), lr=0.1)
    matrices.attach(optimizer)
    model(**(batch() if degrees is None else own_samples(batch()))).loss.backward()
    optimizer.step()
    return whole(model, lambda parameter: parameter)


def sums_of_backward(degrees, shape, micro_batches=1, **options):
    """The sums over ranks of a step's backward: elements of each all-reduce, and how many parameters all tensor ranks hold."""
    model, found = started(shape, degrees, **options), []
    given = {name: value.chunk(micro_batches)[0] for name, value in own_samples(batch()).items()}
    loss = model(**given).loss
    summed = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda x, *more, **how: (found.append(x.numel()), summed(x, *more, **how))[1]):
        loss.backward()
    return found, [parameter.numel() for parameter, block in parameters_of(model).items() if block.is_whole]


def other_settings(degrees, which):
    """What is said where the last rank has another setting."""
    model, other = started("plain", degrees), world.state.rank == 1
    model.train(not (other and which == "evaluation"))
    model.layers[0].requires_grad_(not (other and which == "frozen"))
    gradients = contextlib.nullcontext() if not (other and which == "no gradients") else torch.no_grad()
    with gradients, octavo.fp8_autocast(enabled=other and which == "FP8"):
        return refused(lambda: model(**batch()))


def taken_for_whole(degrees, which):
    """What is said where another library takes the parameters of a tensor rank for whole ones."""
    model = started("plain", degrees)
    model(**batch())
    calls = {
        "deepcopy": copy.deepcopy,
        "DDP": DistributedDataParallel,
        "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "FSDP2": fully_shard,
        "FSDP2 of a block": lambda model: fully_shard(model.layers[0]) and model(**batch()),
        "compile": lambda model: torch.compile(model, backend="eager")(**batch()),
    }
    return refused(lambda: calls[which](model))


def norms_and_whole_tensors(degrees):
    """What PyTorch's norms and whole tensors of parameters and gradients say, and gradients that are clipped by value."""
    from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

    octavo.init(degrees)
    model = octavo.transform(llama(**SHAPES["neox"]).requires_grad_(False), dtype=torch.float32)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)
    model(**own_samples(batch())).loss.backward()
    wanted = whole(model, lambda parameter: parameter.grad.clamp(-1e-3, 1e-3))
    named = dict(model.named_parameters())
    part, norm = named["layers.0.self_attention.qkv.weight"], named["norm.weight"]
    gradients = [parameter.grad for parameter in model.parameters()]
    said = {
        "total": refused(lambda: get_total_norm(gradients)),
        "foreach": refused(lambda: get_total_norm(gradients, foreach=False)),
        "weights": refused(lambda: get_total_norm(model.parameters())),
        "clip": refused(lambda: clip_grad_norm_(model.parameters(), 1e-3)),
        "known": refused(lambda: clip_grads_with_norm_(model.parameters(), 1e-3, torch.ones(()))),
        "whole": refused(part.full_tensor),
        "gradient": refused(part.grad.full_tensor),
        "norm": refused(part.grad.norm),
        "state": refused(model.state_dict()["layers.0.self_attention.qkv.weight"].full_tensor),
    }
    norm.grad.norm()  # is whole
    before, known = [gradient.clone() for gradient in gradients], octavo.clip_grad_norm_(model, 0.0)
    clip_grads_with_norm_(model.parameters(), known / 2, known)
    for gradient, own in zip(gradients, before, strict=True):
        torch.testing.assert_close(gradient, own / 2, rtol=1e-4, atol=1e-6)
        gradient.copy_(own)
    plain = torch.nn.Linear(3, 3)
    plain(torch.ones(1, 3)).sum().backward()
    clip_grad_norm_(plain.parameters(), 1e-3)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    found = whole(model, lambda parameter: parameter.grad)
    return said, [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def loaded_whole(degrees):
    """Names of tensors that differ from a whole state dict behind PyTorch's `set_model_state_dict`."""
    whole_state = {
        name: value.clone()
        for name, value in octavo.transform(llama(**SHAPES["plain"]), dtype=torch.float32).state_dict().items()
    }
    model = started("plain", degrees)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(whole_state), options=options)
    found = whole(model, lambda parameter: parameter)
    return [name for name, value in whole_state.items() if not torch.equal(found[name], value)]


def base_states(degrees, shape):
    """`model.base_model`'s states before and behind a step, with gradients of a loss of a head of one's own, and loss and norm
    of steps before and after."""
    model, given = started(shape, degrees), batch()
    mine = given if degrees is None else own_samples(given)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for number in range(2):
        states = model.base_model(mine["input_ids"]).last_hidden_state
        (states * torch.linspace(-1, 1, states.numel() // len(states)).view(states.shape[1:])).sum().div(len(states)).backward()
        gradients = whole(model, lambda parameter: parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            last = model.base_model(given["input_ids"][:, :5], use_cache=False).last_hidden_state
        loss, norm, _ = step(model, optimizer, given, degrees=degrees)
        found.append((states.detach(), last, gradients, loss, norm))
        assert number or "labels" in refused(lambda: model.base_model(**mine))
    return found


def torch_states(degrees):
    """What PyTorch's optimizer states say; the model's whole state dict, parameters, and their number."""
    model = started("neox", degrees)
    optimizer = optimizer_of(model)
    step(model, optimizer, batch(), degrees=degrees)
    options = StateDictOptions(full_state_dict=True)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    said = {
        "get": refused(lambda: get_state_dict(model, optimizer)),
        "whole": refused(lambda: get_optimizer_state_dict(model, optimizer, options=options)),
        "set": refused(lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []})),
    }
    state, host = (dict(get_model_state_dict(model, options=each)) for each in (options, offloaded))
    counts = model.num_parameters(), model.num_parameters(exclude_embeddings=True)
    return said, state, host, whole(model, lambda parameter: parameter), counts
