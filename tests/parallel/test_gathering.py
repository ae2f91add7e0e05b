"""Weights that travel in FP8 where a loop of one's own is less regular than ours: a sharded model is still one rank's."""

import gc
import weakref

import pytest
import sharded
import torch
import torch.distributed as dist

import first_casts
import ranks
from octavo.errors import InputError
from octavo.fp8 import scaling
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import CurrentScaling, DelayedScaling
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate, settle, sharded_modules
from octavo.parallel.fsdp2 import fp8_gather

IDS = torch.randint(0, 17, (4, 12), generator=torch.Generator().manual_seed(3))
RECIPE = DelayedScaling(amax_history_len=4)
SIZES = {"llama": None, "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": None}}
"""Of three experts on two ranks one has rows on both."""


def start(keep=False, sizes=None, **options):
    """This rank's model, and its samples."""
    if dist.is_initialized():
        world.init({})
    settings = {"settings": {"reshard_after_forward": not keep}} if world.state.world_size > 1 else {}
    model = sharded.build(torch.float32, RECIPE, sizes=sizes, **settings, **options)
    return model, IDS.chunk(world.state.dp_size)[world.state.dp_rank]


@first_casts.by_one()
def evaluated_before_backward(keep, sizes, evaluation):
    """A forward without gradients, in high precision or under another recipe, between a forward in FP8 and its backward."""
    model, ids = start(keep, sizes)
    losses = []
    for _ in range(2):
        with fp8_autocast(fp8_recipe=RECIPE):
            loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad(), fp8_autocast(enabled=evaluation is not None, fp8_recipe=evaluation):
            other = model(input_ids=ids, labels=ids).loss
        losses += [other.item()] if evaluation is None else []  # current scaling of an input is each rank's own
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@first_casts.by_one()
def evaluated_between_micro_batches(keep, sizes):
    """The gradients that were accumulated in FP8 outlast a forward in high precision."""
    model, ids = start(keep, sizes)
    losses = []
    for index in range(3):
        accumulate(model, last=index == 2)
        with microbatch(first=index == 0), fp8_autocast(enabled=index != 1, fp8_recipe=RECIPE):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            losses += [loss.item(), model(input_ids=ids, labels=ids).loss.item()]
    return losses, gradients(model)


@first_casts.by_one()
def two_forwards_one_backward(keep, sizes):
    model, ids = start(keep, sizes)
    with fp8_autocast(fp8_recipe=RECIPE):
        loss = model(input_ids=ids, labels=ids).loss + model(input_ids=ids.flip(1), labels=ids).loss
    loss.backward()
    return [loss.item()], gradients(model)


@first_casts.by_one()
def last_block_in_high_precision(keep, sizes):
    """It is fetched while the block before runs, which is in FP8."""
    model, ids = start(keep, sizes)

    def run_block(layer, *arguments, **options):
        with fp8_autocast(enabled=layer is not model.layers[-1], fp8_recipe=RECIPE):
            return layer.forward_residual(*arguments, **options)

    model.run_block = run_block
    losses = []
    for _ in range(2):
        with fp8_autocast(fp8_recipe=RECIPE):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@first_casts.by_one()
def told_by_argument(keep, sizes):
    """Micro-batches that the caller tells the model about by `is_first_microbatch`."""
    model, ids = start(keep, sizes)
    losses = []
    for index in range(3):
        accumulate(model, last=index == 2)
        with fp8_autocast(fp8_recipe=RECIPE):
            loss = model(input_ids=ids, labels=ids, is_first_microbatch=index == 0).loss
        loss.backward()
        losses.append(loss.item())
    records = {name: value.float() for name, value in scaling.state_records(model).items() if ".weight." in name}
    assert records
    return losses, gradients(model) | records


def gradients(model):
    return {name: sharded.full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.long(
    lambda keep, sizes, function: (
        keep == (sizes is SIZES["llama"]) or keep == (function in (two_forwards_one_backward, evaluated_before_backward))
    )
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (evaluated_before_backward, (None,)),
        (evaluated_before_backward, (CurrentScaling(),)),
        (evaluated_between_micro_batches, ()),
        (two_forwards_one_backward, ()),
        (last_block_in_high_precision, ()),
        (told_by_argument, ()),
    ],
)
def test_two_ranks_equal_one(function, arguments, keep, sizes):
    losses, values = function(keep, sizes, *arguments)
    for found, others in ranks.run(2, function, keep, sizes, *arguments):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in values.items():
            assert (others[name] - value).norm() <= 1e-2 * value.norm(), name


def of_every_part(call):
    return lambda model, recipe: [call(part) for part in sharded_modules(model)]


def under_autocast(model, recipe):
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        for part in sharded_modules(model):
            part.unshard()


CALLS = {
    "keep all": ("start", lambda model, _: model.set_reshard_after_forward(False)),
    "keep a block": ("start", lambda model, _: model.layers[1].set_reshard_after_forward(False)),
    "free all": ("start", lambda model, _: model.set_reshard_after_forward(True)),
    "free a block": ("start", lambda model, _: model.layers[1].set_reshard_after_forward(True)),
    "keep behind backward": ("start", lambda model, _: model.set_reshard_after_backward(False)),
    "embedding not in backward": ("start", lambda model, _: model.embedding.set_unshard_in_backward(False)),
    "keep from here": ("forward", lambda model, _: model.set_reshard_after_forward(False)),
    "free from here": ("forward", lambda model, _: model.set_reshard_after_forward(True)),
    "gather": ("forward", of_every_part(lambda part: part.unshard())),
    "begin to gather": ("forward", of_every_part(lambda part: part.unshard(async_op=True))),
    "gather under autocast": ("forward", under_autocast),
    "gather for backward": ("backward", of_every_part(lambda part: part.unshard())),
    "begin to gather for backward": ("backward", of_every_part(lambda part: part.unshard(async_op=True))),
    "gather for backward under autocast": ("backward", under_autocast),
}
"""Of FSDP2's own methods: when they are called (before training, before a forward, or before a backward), and how."""


def with_calls(calls, keep, sizes, recipe, micro_batches):
    """Losses, gradients and weights of two steps, for each of these calls."""
    world.init({})
    return [_with_call(call, keep, sizes, recipe, micro_batches) for call in calls]


def _with_call(name, keep, sizes, recipe, micro_batches):
    model = sharded.build(torch.float32, recipe, sizes=sizes, settings={"reshard_after_forward": not keep})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moment, call = CALLS.get(name, ("", None))
    ids, found = IDS.chunk(world.state.dp_size)[world.state.dp_rank], []
    for step in range(2):
        for index in range(micro_batches):
            accumulate(model, last=index == micro_batches - 1)
            if moment == "forward" or (moment == "start" and step == index == 0):
                call(model, recipe)
            part, first = (ids + step + index) % 17, index == 0 if micro_batches > 1 else None
            with microbatch(first=first), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                loss = model(input_ids=part, labels=part).loss
            if moment == "backward":
                call(model, recipe)
            loss.backward()
            found.append(loss.item())
        settle(model)
        found.append({name: sharded.full(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {name: sharded.full(p) for name, p in model.named_parameters()}]


def differences(found, wanted):
    """Which losses and named tensors differ from the wanted ones in a bit."""
    names = []
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(other, float):
            names += [f"loss {number}"] if one != other else []
        else:
            assert one.keys() == other.keys()
            names += [name for name, value in other.items() if not torch.equal(one[name], value)]  # NaN differs too
    return names


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "micro_batches", "keep", "sizes"),
    [
        *((None, 3, keep, "llama") for keep in (False, True)),
        *((RECIPE, count, False, sizes) for count, sizes in ((1, "mixtral"), (3, "llama"))),
        *((CurrentScaling(), count, False, sizes) for count, sizes in ((1, "llama"), (3, "mixtral"))),
        *((recipe, 3, True, "llama") for recipe in (RECIPE, CurrentScaling())),
    ],
)
def test_when_a_caller_gathers_and_frees_weights_changes_no_bit(recipe, micro_batches, keep, sizes):
    for wanted, *others in ranks.run(2, with_calls, ["nothing", *CALLS], keep, SIZES[sizes], recipe, micro_batches):
        found = {name: differences(one, wanted) for name, one in zip(CALLS, others, strict=True)}
        assert found == {name: [] for name in CALLS}


def never_in_backward(keep):
    """What a block in FP8 says that is not to be gathered in backward."""
    model, ids = start(keep)
    model.layers[1].set_unshard_in_backward(False)
    with fp8_autocast(fp8_recipe=RECIPE):
        loss = model(input_ids=ids, labels=ids).loss
    try:
        loss.backward()
    except InputError as error:
        return str(error)
    return None


def test_a_weight_that_backward_reads_has_to_be_there():
    for said in ranks.run(2, never_in_backward, False):
        assert said.startswith("set_unshard_in_backward(False): layers.1 has FP8 weights")
        assert "set_reshard_after_forward(False)" in said
    assert ranks.run(2, never_in_backward, True) == [None, None]


def casts_of_a_step(keep, sizes, recipe, micro_batches, recompute):
    """How often each step casts a matrix of this rank's shards, matrices there, and bytes that a step leaves and held."""
    model, ids = start(keep, sizes, recompute=recompute)
    weights = sharded.weights_in_fp8(model)
    found, bytes_of_rows = [], []
    cast = fp8_gather.cast
    for _ in range(2):
        calls = []
        fp8_gather.cast = lambda rows, how: calls.append(rows.shape) or cast(rows, how)  # noqa: B023 - in this step
        try:
            for index in range(micro_batches):
                accumulate(model, last=index == micro_batches - 1)
                first = index == 0 if micro_batches > 1 else None
                with fp8_autocast(fp8_recipe=recipe):
                    loss = model(input_ids=ids, labels=ids, is_first_microbatch=first).loss
                bytes_of_rows.append(sharded.bytes_held(weights))
                loss.backward()
        finally:
            fp8_gather.cast = cast
        found.append((len(calls), sharded.bytes_held(weights)))
    there = sum(rows.stop > rows.start for weight in weights for rows in weight.matrices.values())
    return found, there, bytes_of_rows, sum(weight.parameter.shard.numel() for weight in weights)


@pytest.mark.long(
    lambda keep, sizes, recipe, recompute: (
        keep == (sizes is SIZES["llama"]) or keep == (isinstance(recipe, CurrentScaling) != recompute)
    )
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("recipe", [RECIPE, CurrentScaling()], ids=["delayed", "current"])
@pytest.mark.parametrize(("micro_batches", "recompute"), [(1, False), (1, True), (3, False)])
def test_no_shard_is_cast_twice_in_a_step(keep, sizes, recipe, micro_batches, recompute):
    for found, there, held, elements in ranks.run(2, casts_of_a_step, keep, sizes, recipe, micro_batches, recompute):
        assert there > 8
        assert found == [(there, 0)] * 2
        later = 0 if keep else elements
        assert held == ([elements] * (micro_batches - 1) + [later]) * 2


def without_joined_amaxes(kind, sizes):
    """(scales and histories of weights, each matrix's amax) under an autocast that joins no ranks."""
    world.init({})
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=kind != "reduce_amax")
    model = sharded.build(torch.float32, recipe, sizes=sizes)
    own = [dist.new_group([rank]) for rank in range(world.state.world_size)][world.state.rank]
    ids = IDS[world.state.rank, None]
    for _ in range(2):
        with fp8_autocast(fp8_recipe=recipe, fp8_group=own if kind == "fp8_group" else None):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    weights = {
        name.replace("_weight", ".weight"): (
            sharded.full(p).view(3, -1).abs().amax(1) if ".experts." in name else sharded.full(p).abs().max()
        )
        for name, p in model.named_parameters()
    }
    records = scaling.state_records(model)
    return {name: value for name, value in records.items() if ".weight." in name}, weights, records


@pytest.mark.long(lambda sizes, kind: (sizes is SIZES["llama"]) == (kind == "fp8_group"))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", ["reduce_amax", "fp8_group"])
def test_the_scale_of_a_weight_is_that_of_the_whole_also_where_amaxes_are_not_joined(kind, sizes):
    first, second = ranks.run(2, without_joined_amaxes, kind, sizes)
    assert any(not torch.equal(first[2][name], second[2][name]) for name in first[2])  # of inputs: each rank its own
    for name, value in first[0].items():
        assert torch.equal(second[0][name], value), name
        if name.endswith("amax_history"):
            assert torch.equal(value[-1], first[1][name.removesuffix(".amax_history")]), name


def slots_after_garbage():
    """Where the slots of a model are, when this rank alone has already collected the models before it."""
    world.init({})
    gc.disable()
    for use in (True, False, True):
        slots = slots_of_new_model(use)
        if world.state.rank == 0:
            gc.collect()
    return slots


def slots_of_new_model(use):
    model = sharded.build(torch.float32, RECIPE)
    if use:
        with fp8_autocast(fp8_recipe=RECIPE):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    return {name: {o.value: slot.index for o, slot in s.slots.items()} for name, s in scaling.states_of(model)}


def test_slots_are_at_the_same_place_on_all_ranks_whenever_these_collect_garbage():
    first, second = ranks.run(2, slots_after_garbage)
    assert first == second
    assert set(first.pop("head")) == {"input", "weight"}
    assert all(set(slots) == {"input", "weight", "grad_output"} for slots in first.values())


def dropped(keep, sizes):
    """Whether a model that trained and is dropped is freed."""
    model, ids = start(keep, sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    with fp8_autocast(fp8_recipe=RECIPE):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    there = [weakref.ref(model), weakref.ref(model.layers[0]), *(weakref.ref(p) for p in model.layers[0].parameters())]
    del model, loss, optimizer
    gc.collect()
    return [reference() is None for reference in there]


@pytest.mark.long(lambda keep, sizes: keep == (sizes is SIZES["llama"]))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("keep", [False, True])
def test_a_model_that_is_dropped_is_freed(keep, sizes):
    for found in ranks.run(2, dropped, keep, sizes):
        assert len(found) > 5
        assert all(found)


def with_shards_replaced(how):
    """Losses before and after the shards' tensors are replaced by others of the same values, twice the first block's."""
    model, ids = start()
    block, losses = model.layers[0], []

    def step():
        model.zero_grad()
        with fp8_autocast(fp8_recipe=CurrentScaling()):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())

    step()
    doubled = {name: value * 2 if value.is_floating_point() else value for name, value in block.state_dict().items()}
    block.load_state_dict(doubled, assign=how == "assign")
    if how == "to":
        model.cpu().float()
    with torch.no_grad(), fp8_autocast(fp8_recipe=CurrentScaling()):
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    step()
    return losses, gradients(model)


@pytest.mark.parametrize("how", ["assign", "to"])
def test_weights_whose_shards_are_replaced_are_gathered_in_fp8_by_their_values(how):
    """`load_state_dict(assign=True)` of a block, and `Module.to` of the model."""
    replaced, loaded = (ranks.run(2, with_shards_replaced, which) for which in (how, None))
    for (losses, found), (wanted, those) in zip(replaced, loaded, strict=True):
        assert losses == wanted
        assert wanted[0] != wanted[1]
        assert found.keys() == those.keys()
        assert all(torch.equal(found[name], those[name]) for name in those)


def with_another_dtype():
    """The answer to a change of dtype after a forward."""
    model, ids = start()
    with torch.no_grad(), fp8_autocast(fp8_recipe=CurrentScaling()):
        model(input_ids=ids)
    with pytest.raises(InputError) as error:
        model.to(torch.bfloat16)
    return str(error.value)


def test_another_dtype_is_refused_once_the_model_has_run():
    for message in ranks.run(2, with_another_dtype):
        assert "was torch.float32 and is torch.bfloat16" in message
        assert "params_dtype = torch.bfloat16 to octavo.transform" in message


def read_by_itself():
    """What code sees that reads the weight of an FP8 layer instead of calling the layer."""
    model, ids = start()
    seen = []
    model.layers[1].register_forward_pre_hook(lambda layer, *_: seen.append(layer.layernorm_mlp.fc1_weight.detach().clone()))
    with fp8_autocast(fp8_recipe=RECIPE):
        model(input_ids=ids, labels=ids).loss.backward()
    return seen[0]


def test_a_weight_that_is_read_past_its_layer_is_nan_and_not_anything():
    assert all(bool(seen.isnan().all()) for seen in ranks.run(2, read_by_itself))
