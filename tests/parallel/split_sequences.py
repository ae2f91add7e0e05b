"""What the tests of context parallelism run on every rank: a decoder whose sequences are split beside one that is whole."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from llamas import llama_config

from building import built_model
from octavo.collectives import causal
from octavo.collectives.whole import whole_tensor
from octavo.config import MoeConfig
from octavo.errors import InputError
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.fp8.scaling import states_of
from octavo.kernels.experts import assignment
from octavo.parallel import offload, world
from octavo.parallel.fsdp import accumulate
from octavo.parallel.sharding import sharding_of
from octavo.train.optimizer import clip_grad_norm_

SAMPLES = 4
FAMILIES = {"parallel block": "gpt_neox", "normed queries": "qwen3", "experts": "mixtral"}
"""Cases that are of another family, of an odd length, of documents and of padding."""
EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5, "sliding_window": None}
SIZES = {"vocab_size": 29, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}


def positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def inputs(case, device="cpu"):
    """Arguments of the forward for all samples."""
    tokens = {"odd": 37, "parallel block": 37, "short": 3}.get(case, 48)
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, SIZES["vocab_size"], (SAMPLES, tokens), generator=draw)
    labels = ids.where(torch.rand(ids.shape, generator=draw) < 0.9, -100)
    given = {"input_ids": ids, "labels": labels}
    if case in ("documents", "normed queries"):
        rows = [positions(5, 1, 24, 18), positions(48), positions(12, 12, 12, 12), positions(47, 1)]
        given["position_ids"] = torch.stack(rows)
    if case in ("padding", "experts"):
        mask = torch.ones_like(ids)
        mask[0, 40:], mask[1, :9], mask[2, :13], mask[2, 30:] = 0, 0, 0, 0
        given["attention_mask"] = mask
        given["labels"] = labels.where(mask.bool(), -100)
    return {name: value.to(device) for name, value in given.items()}


def config(window, heads, family="llama", queries=4):
    kind = {"model_type": "mistral", "sliding_window": window} if window else {"model_type": family}
    kind |= EXPERTS if family == "mixtral" else {}
    return llama_config(**SIZES | kind | {"num_attention_heads": queries, "num_key_value_heads": heads})


def build(
    strategy, *, window=None, heads=2, queries=4, family="llama", dtype=torch.float32, recipe=None, split=True, **options
):
    """A model of the same weights for the same config, over the ranks or (split=False) whole on each."""
    state = world.state
    sharding = sharding_of(state, recipe, dtype=dtype, params_dtype=torch.float32, strategy=strategy)
    if family == "mixtral":
        options.setdefault("moe", MoeConfig(moe_z_loss_coeff=0.3))
    return built_model(
        config(window, heads, family, queries),
        dtype=dtype,
        params_dtype=torch.float32,
        device=state.device,
        seed=3,
        sharding=sharding if split else None,
        **options,
    )


def full(tensor):
    return whole_tensor(tensor).detach().cpu()


def gradients(model):
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def own_samples(given):
    """Those of this rank among the data-parallel ones."""
    size, rank = world.state.dp_size, world.state.dp_rank
    return {name: value.chunk(size)[rank] for name, value in given.items()}


def largest_error(found, wanted):
    return max(((found[n] - g).norm() / (g.norm() + 1e-6)).item() for n, g in wanted.items())


def assigned_errors(degrees, balancing):
    """(error of the loss, of the gradients) by an assignment, beside a whole model that assigns each rank's tokens apart."""
    world.init(degrees)
    moe, given = MoeConfig(moe_load_balancing=balancing, moe_z_loss_coeff=0.3), inputs("experts", world.state.device)
    whole, split = (build("all_gather", family="mixtral", split=split, moe=moe) for split in (False, True))
    with contextlib.ExitStack() as apart:
        for name in ("sinkhorn", "round_robin"):
            assign = by_ranks(getattr(assignment, name), world.state.cp_size, world.state.dp_size)
            apart.enter_context(mock.patch.object(assignment, name, assign))
        wanted = whole(**given).loss
    wanted.backward()
    found = split(**own_samples(given)).loss
    found.backward()
    return abs(found - wanted).item(), largest_error(gradients(split), gradients(whole))


def by_ranks(assign, ranks, replicas):
    """An assignment of each rank's tokens: of its samples chunk i and chunk 2n - 1 - i, as in `octavo.collectives.context`."""

    def assigned(logits, top_k, *masks):
        chunks, *masks = (None if x is None else x.view(SAMPLES, 2 * ranks, -1, *x.shape[1:]) for x in (logits, *masks))
        chosen = torch.empty(*chunks.shape[:-1], top_k, dtype=torch.int64)
        for samples in torch.arange(SAMPLES).chunk(replicas):
            for rank in range(ranks):
                own = samples[:, None], torch.tensor([rank, 2 * ranks - 1 - rank])
                of_rank = [None if mask is None else mask[own].flatten() for mask in masks]
                part = chunks[own]
                chosen[own] = assign(part.flatten(0, 2), top_k, *of_rank).view(*part.shape[:-1], top_k)
        return chosen.view(-1, top_k)

    return assigned


def exact_cells(degrees, cases, strategies=("all_gather", "p2p", "a2a")):
    """{cell: (error of the loss, of the gradients, of the logits)} without FP8, in float32."""
    world.init(degrees)
    device, errors = world.state.device, {}
    for case in cases:
        window, family = {"window": 11, "narrow window": 2}.get(case), FAMILIES.get(case, "llama")
        for heads in (4,) if case in FAMILIES else (2, 4):
            whole = build("all_gather", window=window, heads=heads, family=family, split=False)
            given = inputs(case, device)
            wanted = whole(**given).loss
            wanted.backward()
            wanted_gradients = gradients(whole)
            mine = own_samples({name: value for name, value in given.items() if name != "labels"})
            with torch.no_grad():
                wanted_logits = whole(**mine).logits
            for strategy in strategies:
                if window and strategy == "p2p":
                    continue
                model = build(strategy, window=window, heads=heads, family=family)
                loss = model(**own_samples(given)).loss
                loss.backward()
                with torch.no_grad():
                    logits = model(**mine).logits
                real = mine.get("attention_mask", torch.ones_like(mine["input_ids"])).bool()
                if family == "mixtral":
                    check_recorded(model, whole)
                errors[case, heads, strategy] = (
                    abs(loss.item() - wanted.item()) / wanted.item(),
                    largest_error(gradients(model), wanted_gradients),
                    (logits - wanted_logits)[real].abs().max().item(),
                )
    return errors


def covering_cells(degrees, cells):
    """Of each cell, in its second step: errors of the loss, of the gradients' norm and of the gradients; offloaded tensors."""
    world.init(degrees)
    found = []
    for strategy, mask, heads, recipe, recompute, away in cells:
        chosen = None if recipe is None else RECIPES[recipe]()
        given = inputs(mask, world.state.device)
        how = {"window": 11 if mask == "window" else None, "heads": heads, "queries": 8, "recipe": chosen}
        whole, split = build("all_gather", split=False, **how), build(strategy, recompute=recompute, offload=away, **how)
        results = []
        with mock.patch("octavo.parallel.offload.SMALLEST_BYTES", 0), counted_stores() as stores:
            for model, mine in ((whole, given), (split, own_samples(given))):
                for _ in range(2):  # delayed scaling has its amaxes from the first
                    model.zero_grad()
                    with fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
                        loss = model(**mine).loss
                    loss.backward()
                results.append((loss.item(), gradients(model)))
        (wanted, theirs), (loss, ours) = results
        norms = [torch.stack([g.norm() for g in each.values()]).norm().item() for each in (theirs, ours)]
        apart = torch.stack([(ours[name] - g).norm() for name, g in theirs.items()]).norm().item()
        found.append((abs(loss / wanted - 1), abs(norms[1] / norms[0] - 1), apart / norms[0], len(stores)))
    return found


@contextlib.contextmanager
def counted_stores():
    """A list with an element for each tensor that is offloaded within the context."""
    stores, store = [], offload._Offloader.store

    def counted(self, tensor, into):
        stores.append(tensor.shape)
        return store(self, tensor, into)

    with mock.patch.object(offload._Offloader, "store", counted):
        yield stores


def check_recorded(model, whole):
    """Routing and losses of the routers, summed over ranks, are those of all samples on one rank, whose are kept there."""
    for found, wanted in zip(model.take_routing(), whole._routing, strict=True):
        dist.all_reduce(found)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def logits_with_gradients(degrees):
    """The largest error of gradients of a loss that is made of whole logits."""
    world.init(degrees)
    given = inputs("odd", world.state.device)
    ids = given["input_ids"]
    found = []
    for split in (True, False):
        model = build("all_gather", split=split)
        mine = own_samples(given)["input_ids"] if split else ids
        output = model(input_ids=mine, output_hidden_states=True, logits_to_keep=20)
        weights = torch.linspace(-1, 1, output.logits.numel() // len(mine), device=ids.device).view(output.logits.shape[1:])
        states = sum(state.square().sum() for state in output.hidden_states)
        (((output.logits * weights).sum() + states) / len(mine)).backward()  # the mean of this rank
        found.append((gradients(model), [h.shape for h in output.hidden_states], output.logits.shape))
    (ours, shapes, _), (theirs, whole, _) = found
    same = [s[1:] for s in shapes] == [s[1:] for s in whole]
    return largest_error(ours, theirs), same


def fp8_steps(
    degrees, recipe, strategy, *, steps=5, split=True, micro_batches=1, recompute=False, offload=False, case="documents"
):
    """Loss and gradient norm of each step of a training in FP8."""
    if dist.is_initialized():
        world.init(degrees)
    chosen = None if recipe is None else RECIPES[recipe]()
    model = build(strategy, recipe=chosen, split=split and dist.is_initialized(), recompute=recompute, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    given = inputs(case, world.state.device)
    mine = own_samples(given) if split else given
    count = (given["labels"][:, 1:] != -100).sum().item()
    found = []
    for _ in range(steps):
        loss = torch.zeros((), device=world.state.device)
        parts = [
            dict(zip(mine, row, strict=True)) for row in zip(*(x.chunk(micro_batches) for x in mine.values()), strict=True)
        ]
        for index, part in enumerate(parts):
            accumulate(model, last=index == len(parts) - 1)
            with microbatch(first=index == 0), fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
                output = model(**part, num_items_in_batch=count)
            output.loss.backward()
            loss += output.loss.detach()
        if world.state.dp_process_group is not None and world.state.dp_size > 1:
            dist.all_reduce(loss, group=world.state.dp_process_group)
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), full(norm).item()))
    scales = {}
    for name, layer in states_of(model):
        for operand, slot in layer.slots.items():
            scales[name, operand.value] = slot.scale.item()
    return found, scales


def gathers(degrees, cells):
    """Of each cell of options, whether the gathers of attention's backwards had begun before them."""
    world.init(degrees)
    found = []
    for options in cells:
        begun = []

        def noted(*args, computed=causal.backward, seen=begun):
            seen.append(bool(args[9]))
            return computed(*args)

        model = build("all_gather", recipe=RECIPES["delayed"](), **options)
        given = own_samples(inputs("plain", world.state.device))
        with mock.patch.object(causal, "backward", noted), fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]()):
            loss = model(**given).loss
            loss.backward()
        found.append(begun)
    return found


def fp8_runs(degrees, cells, **options):
    """`fp8_steps` of each (recipe, strategy, options)."""
    return [fp8_steps(degrees, recipe, strategy, **others, **options) for recipe, strategy, others in cells]


def different_samples(*changes):
    """What a rank says whose sequences are not those of the other rank, by change."""
    world.init({"context_parallel_degree": 2})
    given, said = inputs("documents"), []
    for change in changes:
        try:
            build("all_gather")(**(change(given) if world.state.rank == 1 else given))
        except InputError as error:
            said.append(str(error))
    return said


def other_sample(given):
    return {name: value.roll(1, 0) for name, value in given.items()}


def one_label(given):
    labels = given["labels"].clone()
    labels[1, 7] = -100 if labels[1, 7] >= 0 else 1
    return given | {"labels": labels}


def shorter(given):
    return {name: value[:, :40] for name, value in given.items()}


def another_count(given):
    return given | {"num_items_in_batch": 17}


def no_positions(given):
    return {name: value for name, value in given.items() if name != "position_ids"}
