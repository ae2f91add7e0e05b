"""A sharded model computes what one rank computes: losses, gradients, scales and weights."""

import contextlib
import io
from unittest import mock

import pytest
import sharded
import torch
import torch.distributed as dist
from sharded import LAYOUTS
from transformers import LlamaForCausalLM

import ranks
from octavo.errors import InputError
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES, CurrentScaling
from octavo.parallel import fsdp, world
from octavo.parallel.fsdp import accumulate


@pytest.fixture(scope="module")
def on_one_rank():
    """Results of one rank, made once for each setting."""
    made = {}

    def run(*setting):
        if setting not in made:
            made[setting] = sharded.train({}, *setting)
        return made[setting]

    return run


def differences(one, many, *, loss, gradient):
    """What differs in a bit between the ranks, and from one rank by more than the relative errors of loss and gradients."""
    first, found = many[0], []
    for other in many[1:]:
        # Losses, norms and, after every step, all scales and histories: the same bits on all ranks.
        if [(step[0], step[1], step[3]) for step in other[0]] != [(step[0], step[1], step[3]) for step in first[0]]:
            found.append("losses, norms or scales of the ranks")
        for kind in (1, 2):  # records and weights
            found += [
                f"{name} of the ranks" for name, value in first[kind].items() if not torch.equal(other[kind][name], value)
            ]
    for step, (a, b) in enumerate(zip(one[0], first[0], strict=True)):
        assert a[2].keys() == b[2].keys()
        if not abs(a[0] - b[0]) <= loss * abs(a[0]):
            found.append(f"loss of step {step}")
        if not abs(a[1] - b[1]) <= gradient * a[1]:
            found.append(f"norm of step {step}")
        near = {name: (value - b[2][name]).norm() <= gradient * value.norm() + 1e-9 for name, value in a[2].items()}
        found += [f"gradient of {name} in step {step}" for name, is_near in near.items() if not is_near]
    return found


@pytest.mark.long(lambda layout, micro_batches: micro_batches == 1 or layout in ("shard 4", "replicate 2 x shard 2"))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_equals_one_rank(on_one_rank, layout, micro_batches):
    ranks_, degrees = LAYOUTS[layout]
    setting = (torch.float32, None, micro_batches)
    many = ranks.run(ranks_, sharded.train, degrees, *setting)
    assert differences(on_one_rank(*setting), many, loss=1e-6, gradient=1e-5) == []


@pytest.mark.long(lambda layout, recipe: (layout, recipe) != ("shard 2", "current"))
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "rowwise", "block"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_and_fp8_equal_one_rank_within_the_format(on_one_rank, layout, recipe):
    ranks_, degrees = LAYOUTS[layout]
    setting = (torch.bfloat16, recipe, 2)
    # A relative rounding of 2^-8 in bf16, of 2^-4 and 2^-3 in E4M3 and E5M2; ten steps of AdamW let small gradients drift.
    gradient = 0.05 if recipe is None else 0.35
    many = ranks.run(ranks_, sharded.train, degrees, *setting)
    assert differences(on_one_rank(*setting), many, loss=2e-3, gradient=gradient) == []


def test_delayed_scaling_in_float32_is_one_rank_s_to_rounding(on_one_rank):
    """With nothing else rounded, whole tensors scaled alike: a weight cast in parts is the weight cast whole."""
    setting = (torch.float32, "delayed", 1)
    one = on_one_rank(*setting)
    many = ranks.run(2, sharded.train, {}, *setting, steps=4)
    assert differences((one[0][:4], *one[1:]), many, loss=1e-6, gradient=2e-2) == []
    assert many[0][1].keys() == one[1].keys()


@pytest.mark.long(lambda recipe: recipe == "current")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_rows_that_the_ranks_do_not_divide(recipe, on_one_rank):
    """Of three ranks the last has fewer rows, and FSDP2 pads them."""
    setting = (torch.float32, recipe, 1)
    one = on_one_rank(*setting)
    many = ranks.run(3, sharded.train, {}, *setting, steps=3)
    loss, gradient = (1e-6, 0.05) if recipe == "delayed" else (2e-3, 0.35)
    assert differences((one[0][:3], *one[1:]), many, loss=loss, gradient=gradient) == []


@pytest.mark.long(lambda settings, recipe: (recipe is None) != (settings.get("tied") or settings.get("recompute") is True))
@pytest.mark.parametrize(
    "settings",
    [
        *({"reshard_after_forward": False}, {"recompute": True}, {"recompute": "mlp"}, {"tied": True}),
        *({"model_type": "mistral"}, {"model_type": "qwen3"}, {"model_type": "gpt_neox"}),
    ],
)
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_variants_equal_one_rank(settings, recipe):
    options = {"recompute": settings["recompute"]} if "recompute" in settings else {}
    options |= {"sizes": {"tie_word_embeddings": True}} if "tied" in settings else {}
    options |= {"sizes": settings} if "model_type" in settings else {}
    setting = ({}, torch.float32, recipe, 1)
    one = sharded.train(*setting, steps=3, **options)
    if "reshard_after_forward" in settings:
        options["settings"] = settings
    many = ranks.run(2, _train, setting, 3, options)
    # AdamW makes whole steps of the rounding of gradients that are none: of GPT-NeoX's key biases.
    exact = 1e-4 if settings.get("model_type") == "gpt_neox" else 1e-5
    assert differences(one, many, loss=1e-6, gradient=exact if recipe is None else 2e-2) == []


def _train(setting, steps, options):
    return sharded.train(*setting, steps=steps, **options)


def gathered(recipe_name):
    """(cast whole, gathered, amax recorded) of every FP8 weight of a sharded model."""
    from octavo.fp8.autocast import fp8_autocast
    from octavo.fp8.recipe import RECIPES, Operand
    from octavo.fp8.scaling import states_of
    from octavo.kernels import reference
    from octavo.parallel import world

    world.init({})
    recipe = RECIPES[recipe_name]()
    model = sharded.build(torch.float32, recipe, settings={"reshard_after_forward": False})
    whole = {name: sharded.full(p) for name, p in model.named_parameters()}
    ids = torch.randint(0, 17, (2, 8))
    with fp8_autocast(fp8_recipe=recipe):
        loss = model(input_ids=ids, labels=ids).loss
    found = {}
    for name, state in states_of(model):
        if name == "head":  # gathered in high precision
            continue
        weight = whole.get(f"{name}.weight", whole.get(f"{name}_weight"))
        how = recipe.casts[Operand.WEIGHT]
        scale = reference.scale_from_amax(weight.abs().max(), how.format.max)  # of delayed scaling the first
        want = reference.cast(weight, scale, how.format.dtype, how.format.max)
        row, column = (data.float() for data, _ in (state.gathered.rowwise, state.gathered.columnwise))
        amax = state.slots[Operand.WEIGHT].history[-1].item() if state.slots else None
        found[name] = torch.equal(want.float(), row) and torch.equal(row.t(), column), amax, weight.abs().max().item()
    loss.backward()
    return found


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_gathered_weight_is_the_whole_weight_cast(recipe):
    for found in ranks.run(4, gathered, recipe):
        assert len(found) == 12
        for name, (equal, amax, largest) in found.items():
            assert equal, name
            assert amax is None or amax == largest, name


def changes_of_mode():
    """A sharded model in FP8, without, evaluated in both, and in FP8 again; the losses of each."""
    from octavo.fp8.autocast import fp8_autocast
    from octavo.fp8.recipe import CurrentScaling, RowwiseScaling
    from octavo.parallel import world

    if torch.distributed.is_initialized():
        world.init({})
    model = sharded.build(torch.float32, CurrentScaling())
    ids = torch.arange(2 * 12).view(2, 12) % 17
    losses = []
    for recipe in (CurrentScaling(), None, RowwiseScaling(), CurrentScaling()):
        for grads in (True, False):
            with torch.set_grad_enabled(grads), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                loss = model(input_ids=ids, labels=ids).loss
            if grads:
                loss.backward()
            losses.append(loss.item())
    gradients = {name: sharded.full(p.grad) for name, p in model.named_parameters()}
    return losses, gradients


def test_one_sharded_model_in_and_out_of_fp8():
    losses, gradients = changes_of_mode()
    for found, summed in ranks.run(2, changes_of_mode):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, gradient in summed.items():
            assert (gradient - gradients[name]).norm() <= 1e-3 * gradients[name].norm(), name


def reduced_when(tied):
    """(name, shape of its gradient there) of each end's weight when the last block's backward begins."""
    world.init({})
    model = sharded.build(torch.bfloat16, None, sizes={"tie_word_embeddings": tied})
    found = []

    def note(_):
        found.extend(name for name, parameter in model.named_parameters() if parameter.grad is not None)

    model.layers[-1].register_forward_hook(lambda block, args, out: out[0].register_hook(note) and None)
    ids = torch.randint(0, model.spec.vocabulary, (1, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    return found, sorted(name for name, p in model.named_parameters() if p.grad is None)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_head_and_norm_are_reduced_before_those_of_blocks(tied):
    for found, without in ranks.run(2, reduced_when, tied):
        assert found == (["norm.weight"] if tied else ["norm.weight", "head.weight"])
        assert without == []


def mean_loss():
    from octavo.parallel import world

    if torch.distributed.is_initialized():
        world.init({})
    model = sharded.build(torch.float32, None)
    ids = torch.arange(4 * 12).view(4, 12) % 17
    labels = ids.clone()
    labels[0, 3:] = -100  # so that the ranks have different numbers of targets
    part = slice(None) if world.state.world_size == 1 else slice(world.state.rank, world.state.rank + 1)
    loss = model(input_ids=ids[part], labels=labels[part]).loss
    loss.backward()
    return loss.item(), {name: sharded.full(p.grad) for name, p in model.named_parameters()}


def test_without_a_count_the_loss_is_the_mean_over_the_global_batch():
    loss, gradients = mean_loss()
    results = ranks.run(4, mean_loss)
    assert len({found for found, _ in results}) == 1
    for found, summed in results:
        assert found == pytest.approx(loss, rel=1e-6)
        for name, gradient in summed.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-7)


def wrapped_in_fsdp1(first_sharded):
    """Losses of four steps of a transformed model inside FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import octavo

    if first_sharded:
        octavo.init()
    torch.manual_seed(0)
    model = octavo.transform(LlamaForCausalLM(sharded.llama_config(**sharded.SIZES)), dtype=torch.float32, device="cpu")
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    model = FullyShardedDataParallel(
        model,
        mixed_precision=half,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({octavo.nn.TransformerLayer}),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(32).view(2, 16) % 17
    losses = []
    for _ in range(4):
        with octavo.fp8_autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_fsdp1_around_a_transformed_model_trains():
    for losses in ranks.run(2, wrapped_in_fsdp1, False):
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.9 * losses[0]


def test_fsdp1_around_a_sharded_model_is_refused_with_the_replacement():
    with pytest.raises(
        AssertionError, match=r"is sharded already.*leave FullyShardedDataParallel and fully_shard out.*param_dtype"
    ):
        ranks.run(2, wrapped_in_fsdp1, True)


def wrapped_in_ddp(first_sharded):
    """A model of its own code inside DDP, and then one that octavo.transform has given to the ranks."""
    import octavo

    octavo.init({} if first_sharded else {"hybrid_shard_degree": 1})
    for later in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        if later:
            model = octavo.transform(model, dtype=torch.float32, device="cpu")
        torch.nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize("first_sharded", [True, False], ids=["sharded", "replicated"])
def test_ddp_around_a_sharded_model_of_any_code_is_refused(first_sharded):
    with pytest.raises(AssertionError, match=r"Sequential: DistributedDataParallel.*second time.*Leave octavo\.init out"):
        ranks.run(2, wrapped_in_ddp, first_sharded)


def own_weights(kind):
    """Losses of a transformed model whose weights each rank draws after `octavo.init`, or how it is refused."""
    import octavo

    octavo.init()
    config = sharded.llama_config(**sharded.SIZES)
    if kind == "delayed":
        with octavo.delayed_init():
            model = LlamaForCausalLM(config)
    else:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16)) if kind == "own code" else LlamaForCausalLM(config)
    options = {"load_state_dict_from_rank0": True} if kind == "rank 0" else {}
    if kind == "one value":
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.model.norm.weight[3] += octavo.state.rank
    try:
        model = octavo.transform(model, dtype=torch.float32, device="cpu", **options)
    except octavo.errors.InputError as error:
        return str(error)
    ids = torch.arange(32).view(2, 16) % 17
    return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("each its own", "model.embed_tokens.weight"), ("own code", "0.weight"), ("one value", "model.norm.weight")],
)
def test_ranks_with_different_weights_are_refused_with_the_ways_to_one(kind, name):
    for message in ranks.run(2, own_weights, kind):
        assert "hold different weights" in message
        assert f"({name})" in message
        assert "octavo.delayed_init()" in message
        assert "load_state_dict_from_rank0=True" in message


@pytest.mark.parametrize("kind", ["delayed", "rank 0"])
def test_both_ways_to_one_set_of_weights(kind):
    first, second = ranks.run(2, own_weights, kind)
    assert first == second


def test_norm_and_head_are_one_group_if_they_have_one_dtype():
    norm, head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
    assert fsdp._groups_of([norm, head]) == [[norm, head]]
    assert fsdp._groups_of([norm, head.bfloat16()]) == [[norm], [head]]
    assert fsdp._groups_of([]) == []


def after_an_abandoned_forward(abandoned, tied):
    """Losses, norms and gradients of steps that have a forward without a backward before their clipping."""
    import octavo

    if dist.is_initialized():
        world.init({})
    torch.manual_seed(0)
    model = LlamaForCausalLM(sharded.llama_config(**sharded.SIZES, tie_word_embeddings=tied))
    model = octavo.transform(model, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = torch.randint(0, 17, (6, 2, 8), generator=torch.Generator().manual_seed(1))
    if dist.is_initialized():
        batches = batches[:, dist.get_rank(), None]
    found = []
    for ids, other in zip(batches[::2], batches[1::2], strict=True):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if abandoned == "evaluation":
            model.eval()(input_ids=other)
            model.train()
        elif abandoned == "loss":
            model(input_ids=other, labels=other)
        elif abandoned == "exception":
            hook = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(input_ids=other, labels=other)
            hook.remove()
        elif abandoned == "norm":  # between the modules of one group
            hook = model.norm.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(input_ids=other, labels=other)
            hook.remove()
        else:
            with torch.no_grad():
                model.get_input_embeddings()(other)  # a part by itself
        norm = octavo.clip_grad_norm_(model, 0.5)
        gradients = [sharded.full(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.detach(), sharded.full(norm), *gradients])
    return found


@pytest.mark.long(lambda abandoned, tied: tied == (abandoned in ("evaluation", "exception")))
@pytest.mark.parametrize(
    ("abandoned", "tied"),
    [(kind, tied) for kind in ("evaluation", "loss", "exception", "norm") for tied in (False, True)] + [("part", False)],
)
def test_a_forward_without_a_backward_leaves_no_old_weights(abandoned, tied):
    """With gradients enabled FSDP2 keeps embedding, norm and head gathered for a backward, and the optimizer changes shards."""
    one = after_an_abandoned_forward(abandoned, tied)
    for many in ranks.run(2, after_an_abandoned_forward, abandoned, tied):
        for wanted, found in zip(one, many, strict=True):
            assert len(wanted) == len(found)
            for a, b in zip(wanted, found, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def after_an_abandoned_backward(place, keep, dtype, micro_batches):
    """Losses and gradients of a step of three micro-batches behind a backward that an exception ended at `place`, if any.

    micro_batches: backwards before it, that left their gradients to it.
    """
    world.init({})
    model = sharded.build(dtype, RECIPES["current"](), settings={"reshard_after_forward": not keep})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = torch.randint(0, 17, (6, 2, 8), generator=torch.Generator().manual_seed(1))[:, world.state.rank, None]
    found = []

    def run(ids, first):
        with microbatch(first=first), fp8_autocast(fp8_recipe=RECIPES["current"]()):
            return model(input_ids=ids, labels=ids).loss

    if place is not None:
        for index in range(micro_batches + 1):
            accumulate(model, last=micro_batches == 0)
            loss = run(batches[index], index == 0)
            if index < micro_batches:
                loss.backward()
        with broken(model, place):
            loss = run(batches[index], index == 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        optimizer.zero_grad()
    for index in range(3):
        accumulate(model, last=index == 2)
        loss = run(batches[3 + index], index == 0)
        loss.backward()
        found.append(loss.item())
    return found, {name: sharded.full(p.grad) for name, p in model.named_parameters()}


@contextlib.contextmanager
def broken(model, place):
    """A forward inside has a backward that ends in an exception behind that module."""

    def hook(module, args, output):
        (output[0] if isinstance(output, tuple) else output).register_hook(lambda _: 1 / 0)

    handle = model.get_submodule(place).register_forward_hook(hook)
    yield
    handle.remove()


PLACES = "norm", "layers.1", "layers.0", "embedding"


def after_each_abandoned_backward(keep, dtype, micro_batches):
    """Of a step alone, and of one behind each exception."""
    found = [after_an_abandoned_backward(None, keep, dtype, 0)]
    for place in PLACES:
        world.shutdown()
        found.append(after_an_abandoned_backward(place, keep, dtype, micro_batches))
    return found


@pytest.mark.long(lambda micro_batches, keep, dtype: keep == (dtype == torch.float32) or keep == (micro_batches == 0))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("micro_batches", [0, 2])
def test_a_backward_that_an_exception_ended_adds_nothing_to_the_next_step(keep, dtype, micro_batches):
    for (losses, gradients), *found in ranks.run(2, after_each_abandoned_backward, keep, dtype, micro_batches):
        for place, (other, others) in zip(PLACES, found, strict=True):
            assert other == losses
            assert [name for name, value in gradients.items() if not torch.equal(others[name], value)] == [], place


def said_of_an_abandoned_backward(micro_batches):
    """What the model says on stderr when its backward was abandoned behind these micro-batches."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        after_an_abandoned_backward("layers.1", False, torch.float32, micro_batches)
    return said.getvalue()


def test_gradients_of_micro_batches_that_are_dropped_are_named():
    assert ranks.run(2, said_of_an_abandoned_backward, 0) == ["", ""]
    for said in ranks.run(2, said_of_an_abandoned_backward, 2):
        assert said.startswith("octavo: a backward ended in an exception. The gradients of the micro-batches before it")
        assert said.count("\n") == 1


def accumulated_around_an_exception(failing):
    """Gradients of two micro-batches, with a forward between them that ended in an exception."""
    world.init({})
    model = sharded.build(torch.float32, None)
    batches = torch.randint(0, 17, (3, 2, 8), generator=torch.Generator().manual_seed(1))[:, world.state.rank, None]
    for index, ids in enumerate(batches):
        accumulate(model, last=index == 2)
        if index != 1:
            model(input_ids=ids, labels=ids).loss.backward()
        elif failing:
            hook = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(input_ids=ids, labels=ids)
            hook.remove()
    return {name: sharded.full(p.grad) for name, p in model.named_parameters()}


def test_a_forward_that_an_exception_ended_leaves_the_gradients_of_micro_batches():
    wanted, found = (ranks.run(2, accumulated_around_an_exception, failing)[0] for failing in (False, True))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def made_behind_an_exception(place):
    """Weights after a step of an optimizer that was made when a forward had ended in an exception at `place`, if any."""
    world.init({})
    model = sharded.build(torch.float32, None, settings={"reshard_after_forward": False})
    ids = torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(1))[world.state.rank, None]
    if place is not None:
        hook = model.get_submodule(place).register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids, labels=ids)
        hook.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    fsdp.settle(model)
    return {name: sharded.full(p) for name, p in model.named_parameters()}


def test_an_optimizer_made_behind_an_exception_in_a_forward_has_the_shards():
    wanted, _ = ranks.run(2, made_behind_an_exception, None)
    for place in ("embedding", "layers.1", "norm"):
        for weights in ranks.run(2, made_behind_an_exception, place):
            assert weights.keys() == wanted.keys()
            assert [name for name, weight in wanted.items() if not torch.equal(weights[name], weight)] == [], place


def joined_amaxes():
    """Sizes of the maxima that two forwards join over the ranks, the second a later micro-batch."""
    world.init({})
    model = sharded.build(torch.float32, CurrentScaling())
    sizes, reduce = [], dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, **others):
        if op == dist.ReduceOp.MAX:
            sizes[-1].append(tensor.numel())
        return reduce(tensor, op, **others)

    ids = torch.randint(0, 17, (2, 8))
    with mock.patch.object(dist, "all_reduce", counted):
        for first in (True, False):
            sizes.append([])
            with microbatch(first=first), fp8_autocast(fp8_recipe=CurrentScaling()):
                model(input_ids=ids, labels=ids).loss.backward()
    return sizes


def test_current_scaling_joins_the_amaxes_of_all_weights_at_once():
    for first, later in ranks.run(2, joined_amaxes):
        assert first == [3 * 4]  # matrices of the three blocks
        assert later == []


def begun_anew(left, keep):
    """Loss and gradients of a step behind what another left, if anything, and `model.zero_grad()`."""
    world.init({})
    model = sharded.build(torch.float32, RECIPES["current"](), settings={"reshard_after_forward": not keep})
    batches = torch.randint(0, 17, (3, 2, 8), generator=torch.Generator().manual_seed(1))[:, world.state.rank, None]

    def loss(ids):
        with fp8_autocast(fp8_recipe=RECIPES["current"]()):
            return model(input_ids=ids, labels=ids).loss

    if left == "a micro-batch":
        accumulate(model, last=False)
        loss(batches[0]).backward()
    if left == "an exception":
        loss(batches[0]).backward()
        with broken(model, "layers.1"):
            again = loss(batches[1])
        with pytest.raises(ZeroDivisionError):
            again.backward()
    model.zero_grad()
    accumulate(model, last=True)
    found = loss(batches[2])
    if left == "a call behind the forward":
        model.zero_grad()
    found.backward()
    return found.item(), {name: sharded.full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.long(lambda keep: keep)
@pytest.mark.parametrize("keep", [False, True])
def test_zero_grad_of_the_model_drops_all_gradients(keep):
    wanted = ranks.run(2, begun_anew, "nothing", keep)
    assert all(gradient.any() for _, gradients in wanted for gradient in gradients.values())
    for left in ("a micro-batch", "an exception", "a call behind the forward"):
        for (loss, gradients), (other, others) in zip(wanted, ranks.run(2, begun_anew, left, keep), strict=True):
            assert other == loss, left
            assert [name for name, value in gradients.items() if not torch.equal(others[name], value)] == [], left


def backward_of_the_first(second, keep):
    """The words of a backward whose weights a forward under another recipe has gathered since; else its gradients' sum."""
    world.init({})
    model = sharded.build(torch.float32, RECIPES["delayed"](), settings={"reshard_after_forward": not keep})
    ids = torch.randint(0, 17, (1, 8), generator=torch.Generator().manual_seed(1))
    with fp8_autocast(fp8_recipe=RECIPES["delayed"]()):
        loss = model(input_ids=ids, labels=ids).loss
    with fp8_autocast(enabled=second != "plain", fp8_recipe=RECIPES["rowwise" if second == "plain" else second]()):
        model(input_ids=ids, labels=ids)
    try:
        loss.backward()
    except InputError as error:
        return str(error)
    return float(sum(sharded.full(p.grad).abs().sum() for p in model.parameters()))


@pytest.mark.long(lambda second, keep: keep == (second == "rowwise"))
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("second", ["plain", "rowwise", "current"])
def test_a_backward_whose_weights_another_recipe_has_gathered_is_refused(second, keep):
    for said in ranks.run(2, backward_of_the_first, second, keep):
        assert "run each backward before the next forward" in said.lower()
