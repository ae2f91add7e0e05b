"""Weights of embedding and head that are gathered into their place: those that FSDP2 copies there, to the last bit."""

import contextlib
import functools
from unittest import mock

import pytest
import sharded
import torch
from llamas import llama_config
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

import ranks
from building import built_model
from octavo.build import transform
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate, extend_gathers, settle, shard, sharded_modules
from octavo.parallel.fsdp2 import direct_gather

WAYS = (True, False)
"""Gathered in place, and by FSDP2."""


def outside_of_blocks(model):
    """FSDP2's records of the parameters of embedding, norm and head."""
    of_blocks = {sharded.fsdp2_group(module) for module in sharded_modules(model.layers)}
    groups = dict.fromkeys(sharded.fsdp2_group(module) for module in sharded_modules(model))
    return [parameter for group in groups if group and group not in of_blocks for parameter in group.fsdp_params]


@contextlib.contextmanager
def gathered(direct):
    """(names gathered in place, names in each all-gather by FSDP2); direct: models built in here may gather in place."""
    own, copied = [], []
    in_place, by_copies = direct_gather._Matrix.before, _fsdp_param_group.foreach_all_gather

    @functools.wraps(in_place)  # FSDP2 looks at its parameters
    def noted(matrix, *rest):
        own.append(matrix.parameter._raw._param_fqn)
        return in_place(matrix, *rest)

    def noted_too(parameters, *rest):
        copied.append([parameter._param_fqn for parameter in parameters])
        return by_copies(parameters, *rest)

    use = direct_gather.use if direct else lambda root, modules: None
    with (
        mock.patch.object(direct_gather, "use", use),
        mock.patch.object(direct_gather._Matrix, "before", noted),
        mock.patch.object(_fsdp_param_group, "foreach_all_gather", noted_too),
    ):
        yield own, copied


def bytes_of(parameters):
    """Bytes of gathered tensors, but for the element of each rank that FSDP2 gathers beside one in place."""
    wholes = [
        whole for each in parameters for whole in (*each.all_gather_outputs, *getattr(each, "_unsharded_inner_tensors", ()))
    ]
    return sum(whole.untyped_storage().nbytes() for whole in wholes)


class Life:
    """A model, and what it computed: gathered weights, losses and gradients, the same in the other way of gathering."""

    def __init__(self, dtype, params_dtype, recipe, sizes, frozen, *, recompute=False, seed=0):
        self.recipe = None if recipe is None else RECIPES[recipe]()
        self.model = built_model(
            llama_config(**sharded.SIZES | sizes),
            dtype=dtype,
            params_dtype=params_dtype,
            device=world.state.device,
            seed=seed,
            sharding=sharded.sharding(self.recipe, dtype),
            recompute=recompute,
        )
        self.parameters = outside_of_blocks(self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.5)
        self.found = []
        for part in (self.model.embedding, self.model.norm):  # in front of the norm the head is there too
            part.register_forward_pre_hook(lambda *_: self._note_weights())
        self.model.norm.register_forward_hook(self._note_in_backward)
        draw = torch.Generator().manual_seed(world.state.rank)
        self.ids = torch.randint(0, self.model.spec.vocabulary, (2, 2, 12), generator=draw).to(world.state.device)

    def _note_in_backward(self, norm, _, output):
        if output.requires_grad:
            output.register_hook(lambda _: self._note_weights())

    def _note_weights(self):
        for parameter in self.parameters:
            if parameter.sharded_state != ShardedState.UNSHARDED:  # an embedding behind its evaluation
                continue
            module, name = parameter._module_info.module, parameter._module_info.param_name
            whole = getattr(module, name)
            assert whole is parameter.unsharded_param
            wanted = sharded.full(parameter.sharded_param).to(whole.dtype)
            assert torch.equal(whole.detach().cpu(), wanted), parameter._param_fqn
            self.found.append(wanted)

    def loss(self, which=0):
        with fp8_autocast(enabled=self.recipe is not None, fp8_recipe=self.recipe):
            loss = self.model(input_ids=self.ids[which], labels=self.ids[which], num_items_in_batch=100).loss
        self.found.append(loss.detach().cpu())
        return loss

    def step(self):
        """Two micro-batches and the optimizer's step."""
        for index in range(2):
            accumulate(self.model, last=index == 1)
            with microbatch(first=index == 0):
                self.loss(index).backward()
        self.update()

    def update(self):
        """Nothing is gathered; gradients are noted, and the weights changed."""
        assert self.bytes_there() == 0
        self.found += [sharded.full(p.grad) for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes_there(self):
        return bytes_of(self.parameters)

    def evaluations(self):
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode():
                self.loss()
            assert self.bytes_there() == 0

    def abandoned_forwards(self):
        """A loss without a backward, and forwards that end while the head is gathered ahead; weights change behind each."""
        self.loss()
        settle(self.model)
        assert self.bytes_there() == 0
        self.change()
        behind = sharded.fsdp2_group(self.model.norm)
        # An interrupt runs no hooks behind the forward: the next one settles.
        for error, left in ((ZeroDivisionError, False), (KeyboardInterrupt, True)):

            def fail(*_):
                assert behind._all_gather_result is not None
                raise error  # noqa: B023 - in this turn

            hook = self.model.layers[-1].register_forward_pre_hook(fail)
            with pytest.raises(error):
                self.loss()
            hook.remove()
            assert (behind._all_gather_result is not None) == left
            assert behind.is_sharded
            self.change()
            self.loss(1).backward()
            self.update()

    def change(self):
        """Other weights, in place."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().mul_(1.0625) if hasattr(parameter, "to_local") else parameter.mul_(1.0625)

    def reloads(self):
        """A state dict while weights are gathered, loaded behind other steps by copies, and then by assignment."""
        parts = [self.model.embedding, self.model.norm, *([] if self.model.spec.tied else [self.model.head])]
        self.loss()
        saved = [{name: tensor.clone() for name, tensor in part.state_dict().items()} for part in parts]
        self.change()
        self.loss(1).backward()
        self.update()
        for assign in (False, True):
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=assign)
            with torch.no_grad():
                self.loss()
        self.found += [sharded.full(parameter) for parameter in self.model.parameters()]

    def two_forwards(self):
        """Two forwards, then one backward, which gathers the head again; then two, the first of which does so for nothing."""
        (self.loss(0) + self.loss(1)).backward()
        self.update()
        first, second = self.loss(0), self.loss(1)
        first.backward()
        assert self.bytes_there() == 0
        second.backward()
        self.update()


def lives(layout, *setting, recompute):
    """For each way what two models computed, names that were gathered in place and by FSDP2, and names outside of blocks."""
    world.init(layout)
    results = []
    for direct in WAYS:
        with gathered(direct) as (own, copied):
            life, other = Life(*setting, recompute=recompute), Life(*setting, seed=1)
            life.step()
            life.evaluations()
            life.step()
            life.abandoned_forwards()
            life.two_forwards()
            first, second = life.loss(), other.loss()
            second.backward()
            first.backward()
            other.update()
            life.update()
            other.evaluations()
            life.reloads()
        results.append(([*life.found, *other.found], own, copied, [parameter._param_fqn for parameter in life.parameters]))
    return results


BF16, FLOAT32 = torch.bfloat16, torch.float32
CASES = {  # ranks, layout, dtype, parameters' dtype, recipe, sizes, frozen
    "bf16": (2, {}, BF16, FLOAT32, None, {"vocab_size": 18}, ()),
    "float32": (2, {}, FLOAT32, FLOAT32, None, {"vocab_size": 18}, ()),
    "masters in bf16": (2, {}, BF16, BF16, None, {"vocab_size": 18}, ()),
    "blocks in FP8": (2, {}, BF16, FLOAT32, "delayed", {"vocab_size": 18}, ()),
    "rows that the ranks do not divide": (3, {}, BF16, FLOAT32, None, {"vocab_size": 17}, ()),
    "rows of masters in bf16 that the ranks do not divide": (3, {}, BF16, BF16, None, {"vocab_size": 17}, ()),
    "a rank without rows": (4, {}, FLOAT32, FLOAT32, None, {"vocab_size": 9}, ()),
    "tied": (2, {}, BF16, FLOAT32, None, {"vocab_size": 18, "tie_word_embeddings": True}, ()),
    "replicas of shards": (4, {"hybrid_shard_degree": 2}, BF16, FLOAT32, None, {"vocab_size": 18}, ()),
    "ends frozen": (2, {}, BF16, FLOAT32, None, {"vocab_size": 18}, ("embedding", "head", "norm")),
    "embedding frozen": (2, {}, BF16, FLOAT32, "delayed", {"vocab_size": 18}, ("embedding",)),
}


@pytest.mark.long(lambda case: case != "blocks in FP8")
@pytest.mark.parametrize("case", CASES)
def test_gathered_weights_are_those_of_fsdp2(case):
    size, *setting = CASES[case]
    divides = setting[4]["vocab_size"] % setting[0].get("hybrid_shard_degree", size) == 0
    for (found, own, copied, ends), (wanted, none, all_copied, _) in ranks.run(size, lives, *setting, recompute=False):
        compare(found, wanted)
        assert len(found) > 50
        assert none == []
        assert copied == all_copied
        assert set(own) == ({name for name in ends if "norm" not in name} if divides else set())


def compare(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [True, "mlp"])
def test_blocks_that_are_computed_again(recompute):
    size, *setting = CASES["bf16"]
    for (found, own, *_), (wanted, *_) in ranks.run(size, lives, *setting, recompute=recompute):
        assert own
        compare(found, wanted)


class Tagger(nn.Module):
    """A model of its own code, whose embedding is not an end: it is in the group of the root, beside a bias."""

    def __init__(self, tokens=30):
        super().__init__()
        self.embedding = nn.Embedding(tokens, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, ids):
        x = self.embedding(ids) + self.shift
        for layer in self.layers:
            x = layer(x).tanh()
        return x.float().square().mean()


def of_root(summed, ends, tokens):
    """For each way losses and gradients of two steps, the names gathered in place, and those by FSDP2."""
    world.init({})
    results = []
    for direct in WAYS:
        torch.manual_seed(0)
        model = Tagger(tokens).to(world.state.device)
        with gathered(direct) as (own, copied):
            front = [model.embedding] if ends else []
            how = sharded.sharding(None, BF16)
            shard(model, list(model.layers), how, summed=summed, ends=(front, []))
            extend_gathers(model, list(model.layers), how)
            found = []
            for step in range(2):
                ids = torch.arange(6, device=world.state.device) + step + world.state.rank
                loss = model(ids)
                loss.backward()
                found += [loss.detach().cpu(), *(sharded.full(parameter.grad) for parameter in model.parameters())]
        results.append((found, own, copied))
    return results


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_models_of_their_own_code(summed, ends):
    for (found, own, copied), (wanted, none, all_copied) in ranks.run(2, of_root, summed, ends, 30):
        compare(found, wanted)
        assert own == ["embedding.weight"] * 2
        assert none == []
        assert copied == all_copied


class Counter(Tagger):
    """A model with a frozen table of whole numbers, most of the root's group, which bf16 would round."""

    def __init__(self):
        super().__init__(2)
        self.table = nn.Parameter(torch.arange(1000, 1000 + 32 * 16, dtype=torch.int32).view(32, 16), requires_grad=False)

    def forward(self, ids):
        self.seen = self.table.clone()
        return super().forward(ids) * self.table[ids].float().mean()


def of_whole_numbers():
    """For each way (the table as the forward reads it, the loss, the names gathered in place)."""
    world.init({})
    results = []
    for direct in WAYS:
        torch.manual_seed(0)
        model = Counter().to(world.state.device)
        with gathered(direct) as (own, _):
            how = sharded.sharding(None, BF16)
            shard(model, list(model.layers), how, summed=True, ends=([], []))
            extend_gathers(model, list(model.layers), how)
            loss = model(torch.arange(2, device=world.state.device))
            loss.backward()
        results.append((model.seen.cpu(), loss.detach().cpu(), own))
    return results


def test_whole_numbers_are_gathered_unchanged():
    for (table, loss, own), (wanted, its_loss, _) in ranks.run(2, of_whole_numbers):
        assert own == ["table"]
        assert table.dtype == torch.int32
        assert torch.equal(table, torch.arange(1000, 1000 + 32 * 16, dtype=torch.int32).view(32, 16))
        assert torch.equal(wanted, table)
        assert torch.equal(loss, its_loss)


def test_a_group_without_a_large_matrix_is_fsdp2_s():
    for (found, own, copied), (wanted, _, all_copied) in ranks.run(2, of_root, True, False, 8):  # 128 of 144 elements
        compare(found, wanted)
        assert own == []
        assert copied == all_copied


def asked_for(kind):
    """Numbers of all-gathers in place and by FSDP2, the embedding as it is gathered and as it ought to be, and bytes left."""
    world.init({})
    with gathered(True) as (own, copied):
        model = sharded.build(BF16, None, sizes={"vocab_size": 18})
        embedding = model.embedding
        if kind == "by another collective":
            embedding.set_custom_all_gather(type("Other", (DefaultAllGather,), {})())
        wanted = sharded.full(embedding.weight).to(BF16)
        handle = embedding.unshard(async_op=kind == "asynchronous")
        if kind == "asynchronous":
            embedding.unshard()  # is pending
            handle.wait()
        found = embedding.weight.detach().cpu().clone()
        embedding.unshard()  # is there
        embedding.reshard()
    return len(own), len(copied), found, wanted, bytes_of([sharded.fsdp2_group(embedding).fsdp_params[0]])


@pytest.mark.parametrize("kind", ["asynchronous", "by another collective", None])
def test_a_caller_gathers_the_same_matrix(kind):
    for own, copied, found, wanted, left in ranks.run(2, asked_for, kind):
        assert torch.equal(found, wanted)
        assert (own, copied, left) == (1, 1, 0)


def in_backward():
    """What a backward begins to gather, as told not to and as it is; whether the end of a backward frees it unused."""
    world.init({})
    with gathered(True) as (own, _):
        model = sharded.build(BF16, None, sizes={"vocab_size": 18})
        group, begun = sharded.fsdp2_group(model.embedding), []
        ids = torch.zeros(1, 4, dtype=torch.int64, device=world.state.device)
        model(input_ids=ids)
        for wanted in (False, True):
            settle(model)
            model.embedding.set_unshard_in_backward(wanted)
            own.clear()
            with group.use_training_state(TrainingState.PRE_BACKWARD):
                group.unshard()
            begun.append(list(own))
        parameters = group.fsdp_params
        there = bytes_of(parameters)
        group.finalize_backward()  # nothing has waited for it
        begun.append((there > bytes_of(parameters), bytes_of(parameters[:1]) < there))
        settle(model)
        model(input_ids=ids)
    return begun


def test_a_group_that_is_not_to_be_gathered_in_backward():
    assert ranks.run(2, in_backward) == [[[], ["embedding.weight"], (True, True)]] * 2


def evaluated_first(recipe):
    """A loss and gradients behind a first forward with gradients off or in inference mode."""
    world.init({})
    recipe = None if recipe is None else RECIPES[recipe]()
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with gathered(True) as (own, _), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            model = sharded.build(BF16, recipe, sizes={"vocab_size": 18})
            ids = torch.arange(12, device=world.state.device).view(1, 12)
            with mode():
                model(input_ids=ids, labels=ids)
            assert sorted(own) == ["embedding.weight", "head.weight"]
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        found.append([loss.detach().cpu(), *(sharded.full(parameter.grad) for parameter in model.parameters())])
    return found


@pytest.mark.long(lambda recipe: recipe == "rowwise")
@pytest.mark.parametrize("recipe", [None, "delayed", "rowwise"])
def test_weights_that_were_gathered_in_inference_mode_can_be_trained(recipe):
    for (loss, *gradients), (wanted, *wanted_gradients) in ranks.run(2, evaluated_first, recipe):
        assert torch.equal(loss, wanted)
        assert all(gradient.count_nonzero() for gradient in gradients)
        compare(gradients, wanted_gradients)


def in_fp8():
    """Names gathered in place of one matrix and its bias, which is gathered in FP8, and which is cast after its all-gather."""
    world.init({})
    torch.manual_seed(0)
    names = []
    for recipe in (RECIPES["current"](), RECIPES["rowwise"]()):
        with gathered(True) as (own, _):
            model = transform(nn.Sequential(nn.Linear(32, 64)), recipe, dtype=FLOAT32, device=world.state.device)
            x = torch.randn(16, 32, device=world.state.device)
            with fp8_autocast(fp8_recipe=recipe):
                model(x).sum().backward()
        names.append(own)
    return names


def test_a_matrix_that_is_gathered_in_fp8_is_not_gathered_in_place():
    for names in ranks.run(2, in_fp8):
        assert names == [[], ["0.weight"]]


class Stream:
    """A stream that notes what waits for what, in a log that all share."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.log.append(f"event of {self.name}")
        return f"event of {self.name}"


class Device:
    """PyTorch's module of a device with such streams."""

    def __init__(self, log):
        self.compute = self.now = Stream("compute", log)

    def current_stream(self):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        self.now, before = stream, self.now
        yield
        self.now = before


def order_of_streams():
    """What happens in an all-gather and in the wait for it, and whether the collective's input is its place in the output."""
    world.init({})
    model = sharded.build(BF16, None, sizes={"vocab_size": 18})
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model(input_ids=ids)
    settle(model)
    log, in_place, gather, allocate = [], [], direct_gather.all_gather, direct_gather._Matrix._memory
    group = sharded.fsdp2_group(model.norm)
    device = group.octavo_group.device = Device(log)
    (head,) = (each for each in group.fsdp_params if each._param_fqn == "head.weight")
    (matrix,) = head.sharded_param._local_tensor.fsdp_pre_all_gather.args
    matrix.running.stream = device.compute  # as a forward on a GPU notes it

    def noted(whole, own, **options):
        log.append(f"gathered in {device.now.name}")
        in_place.append(own.data_ptr() - whole.data_ptr() == world.state.rank * own.nbytes)
        return gather(whole, own, **options)

    def noted_too(matrix, dtype):
        log.append(f"allocated in {device.now.name}")
        return allocate(matrix, dtype)

    with (
        mock.patch.object(direct_gather, "all_gather", noted),
        mock.patch.object(direct_gather._Matrix, "_memory", noted_too),
        mock.patch.object(torch.Tensor, "record_stream", lambda _, stream: log.append(f"kept for {stream.name}")),
    ):
        for consumer in (device.compute, Stream("another", log)):
            with group.use_training_state(TrainingState.FORWARD), device.stream(Stream("copies", log)):
                group.unshard()
            log.append("other work")
            with device.stream(consumer):
                group.wait_for_unshard()
            model.norm.reshard()
    return log, in_place


@pytest.mark.skipif(torch.cuda.is_available(), reason="streams of a CPU alone can be left out")
def test_the_memory_is_free_before_it_is_written_and_written_before_it_is_read():
    for log, in_place in ranks.run(2, order_of_streams):
        gathering = ["allocated in compute", "copies waits for compute", "gathered in copies", "event of copies", "other work"]
        assert log == [*gathering, *gathering, "kept for another"]
        assert in_place == [True, True]
