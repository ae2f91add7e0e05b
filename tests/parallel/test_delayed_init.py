"""Delayed initialisation: built without memory, filled by parts, and the same model on any number of ranks."""

import collections
import gc
import math
import resource
import threading

import delayed
import pytest
import torch
from llamas import SHAPES, hugging_face, llama, llama_config
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import ranks
from octavo.build import transform
from octavo.errors import InputError
from octavo.models.weight_files import InMemoryWeights
from octavo.models.weight_loader import WeightLoader
from octavo.parallel.deferred_init import CounterInit, Loaded, counter_normal_, delayed_init, key_of, materialise
from octavo.parallel.module_init import OwnInit
from octavo.parallel.shards import named_tensors
from octavo.stored_names import stored_name

LAYOUTS = {
    "shard 2": (2, {}),
    "shard 4": (4, {}),
    "replicate 2 x shard 2": (4, {"hybrid_shard_degree": 2}),
}


def names_on_meta(model):
    return [name for name, tensor in named_tensors(model) if tensor.is_meta]


# Building.


class Tagged(nn.Parameter):
    pass


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_parameter("tagged", Tagged(torch.zeros(4)))
        self.register_parameter("none", None)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_parameters_are_on_meta_and_buffers_are_real():
    with delayed_init():
        module = Random()
    assert all(p.is_meta for p in module.parameters())
    assert module.weight.shape == (3, 5)
    assert module.weight.requires_grad
    assert not module.frozen.requires_grad
    assert type(module.tagged) is Tagged
    assert module.none is None
    assert torch.equal(module.table, torch.arange(4.0))
    assert torch.equal(module.scratch, torch.ones(2))
    assert names_on_meta(module) == ["weight", "frozen", "tagged"]


def test_ties_and_attributes_stay():
    shared = nn.Parameter(torch.randn(4, 4))
    shared.note = "kept"
    with delayed_init():
        one, two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        one.weight = shared
        two.weight = shared
        three = nn.Embedding(4, 4)
        three.weight = one.weight
    assert one.weight is two.weight is three.weight
    assert one.weight.is_meta
    assert one.weight.note == "kept"


def test_a_freed_parameter_s_address_means_nothing():
    with delayed_init():
        modules = []
        for size in range(1, 60):
            modules.append(nn.Linear(size, 1, bias=False))
            gc.collect(0)
    assert [m.weight.shape[1] for m in modules] == list(range(1, 60))
    assert len({id(m.weight) for m in modules}) == len(modules)


def test_nested_and_after_an_exception():
    with delayed_init():
        with delayed_init():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
        with delayed_init(enabled=False):  # says that this use delays nothing, and leaves the outer one alone
            assert nn.Linear(2, 2).weight.is_meta
    with pytest.raises(KeyError), delayed_init():
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta
    with delayed_init(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_build_as_usual():
    found = []
    with delayed_init():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert found == [False]


@pytest.mark.parametrize("config", [delayed.neo_config(), llama_config(**SHAPES["llama3-rope"])], ids=["neo", "llama"])
def test_hugging_face_s_buffers_are_those_of_a_real_model(config):
    with delayed_init():
        model = AutoModelForCausalLM.from_config(config)
    assert all(p.is_meta for p in model.parameters())
    real = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == real.keys()
    assert found
    for name, buffer in found.items():
        assert torch.equal(buffer, real[name]), name


def test_70_billion_parameters_take_no_memory():
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with delayed_init():
        model = AutoModelForCausalLM.from_config(config)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert sum(p.numel() for p in model.parameters()) == 70_553_706_496


def test_weights_are_not_read_to_be_lost(tmp_path):
    llama().save_pretrained(tmp_path)
    with delayed_init(), pytest.raises(InputError, match=r"load_from"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(p.is_meta for p in AutoModelForCausalLM.from_pretrained(tmp_path).parameters())


# Values of modules' own initialisation.


def test_values_are_those_of_the_module_under_its_own_random_state():
    with delayed_init():
        model = nn.Sequential(nn.Linear(7, 5), nn.Sequential(nn.Conv1d(3, 4, 2), nn.LayerNorm(6)))
    materialise(model, "cpu", OwnInit(11))
    for name, make in {"0": lambda: nn.Linear(7, 5), "1.0": lambda: nn.Conv1d(3, 4, 2), "1.1": lambda: nn.LayerNorm(6)}.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_of(11, f"{name}.reset_parameters"))
            wanted = make()
        found = model.get_submodule(name)
        for key, value in wanted.named_parameters():
            assert torch.equal(found.get_parameter(key), value), (name, key)


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_gets_its_own_distribution(tied):
    config = GPT2Config(
        n_embd=96, n_layer=3, n_head=4, vocab_size=97, n_positions=32, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied
    )
    with delayed_init():
        model = AutoModelForCausalLM.from_config(config)
    materialise(model, "cpu", OwnInit(3))
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    for name, parameter in model.named_parameters():
        # GPT-2's paper: weights of the residual path are scaled by 1/√(2 · layers), which the parent module does.
        std = 0.02 / math.sqrt(6) if "c_proj.weight" in name else 0.02
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, "ln" in name and "weight" in name)), name
        else:
            assert parameter.std().item() == pytest.approx(std, rel=6 / math.sqrt(2 * parameter.numel())), name
            assert abs(parameter.mean().item()) < 6 * std / math.sqrt(parameter.numel()), name


def test_a_parent_that_initialises_its_children_does_so():
    with delayed_init():
        attention, whole = nn.MultiheadAttention(64, 4), nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    materialise(attention, "cpu", OwnInit(0))
    assert not attention.out_proj.bias.any()
    assert not attention.in_proj_bias.any()
    bound = math.sqrt(6 / (64 + 3 * 64))  # Glorot and Bengio, over the joint matrix
    assert 0.98 * bound < attention.in_proj_weight.abs().max() <= bound
    materialise(whole, "cpu", OwnInit(0))
    bound = math.sqrt(6 / (16 + 32))  # of the whole model, not of nn.Linear: 1/√16
    assert bound * 0.9 < whole.encoder.layers[0].linear1.weight.abs().max() <= bound


class Computes(nn.Module):
    """Looks at values while it initialises, which no meta tensor has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.inner = nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(torch.eye(4))
            if not self.inner.weight.is_meta or self.weight.sum().item() > 0:
                self.inner.weight.div_(self.inner.weight.norm().item())


def test_an_initialisation_that_looks_at_values_runs_on_values():
    real = Computes()
    assert real.inner.weight.norm().item() == pytest.approx(1)
    model = Computes.__new__(Computes)
    nn.Module.__init__(model)
    with delayed_init():
        model.weight, model.inner = nn.Parameter(torch.empty(4, 4)), nn.Linear(4, 4)
    materialise(model, "cpu", OwnInit(0))
    assert torch.equal(model.weight, torch.eye(4))
    assert model.inner.weight.norm().item() == pytest.approx(1)


class Again(nn.Module):
    """Registers a parameter anew where others write it in place, and one that nobody need fill."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.reset_parameters()

    def reset_parameters(self):
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


def test_a_parameter_that_is_made_anew_has_its_value_and_its_place():
    with delayed_init():
        model = Again()
    model.weight.requires_grad_(False)
    before = model.weight
    materialise(model, "cpu", OwnInit(0))
    assert torch.equal(model.weight, torch.tensor([1.0, 2.0, 3.0]))
    assert before.is_meta
    assert not model.weight.requires_grad


def test_names_and_seeds_decide():
    def draw(seed):
        with delayed_init():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return materialise(model, "cpu", OwnInit(seed))

    one, same, other = draw(0), draw(0), draw(1)
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    assert not torch.equal(one[0].weight, one[1].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_is_the_rounding_of_float32(dtype):
    models = [materialise(delayed.neo(dtype=d), "cpu", OwnInit(2)) for d in (torch.float32, dtype)]
    for (name, wide), narrow in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert narrow.dtype == dtype
        assert torch.equal(wide.to(dtype), narrow), name


def test_the_counter_fills_a_decoder_as_its_elements_are_numbered():
    model = materialise(delayed.decoder(True), "cpu", CounterInit(7, 0.02))
    assert model.head.weight is model.embedding.weight
    for name, parameter in model.named_parameters():
        wanted = torch.full_like(parameter, 0 if name.endswith("bias") else 1)
        if parameter.dim() > 1:
            number = {"seed": 7, "name": stored_name(name)}
            wanted = counter_normal_(torch.empty_like(parameter), torch.arange, **number, std=0.02)
        assert torch.equal(parameter, wanted), name


# What stays, and what is refused.


def test_what_has_values_keeps_them():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(5)
    with delayed_init():
        model.append(nn.Linear(3, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if not tensor.is_meta}
    materialise(model, "cpu", OwnInit(0))
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert not names_on_meta(model)
    assert model(torch.randn(4, 3)).shape == (4, 2)


def test_recurrent_layers_run_with_their_new_parameters():
    with delayed_init():
        model = nn.LSTM(3, 4, 2)
    materialise(model, "cpu", OwnInit(0))
    out, _ = model(torch.randn(5, 2, 3))
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_classes_and_attributes_of_parameters_stay():
    with delayed_init():
        module = Random()
        module.tagged.note = "kept"
        module.again = module.tagged
    save = {name: torch.full(p.shape, 3.0) for name, p in module.state_dict().items()}
    materialise(module, "cpu", Loaded(WeightLoader(module, InMemoryWeights(save))))
    assert type(module.tagged) is Tagged
    assert module.tagged is module.again
    assert module.tagged.note == "kept"
    assert not module.frozen.requires_grad
    assert torch.equal(module.table, torch.full((4,), 3.0))
    assert torch.equal(module.scratch, torch.ones(2))


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))


def test_a_parameter_that_nobody_initialises_is_named():
    with delayed_init():
        model = nn.Sequential(nn.Linear(2, 2), Forgetful())
    with pytest.raises(InputError, match=r"parameter 1\.gain .*Forgetful.*reset_parameters"):
        materialise(model, "cpu", OwnInit(0))
    assert all(p.is_meta for p in model.parameters())


class Half(Forgetful):
    def reset_parameters(self):
        nn.init.zeros_(self.gain[:1])


def test_a_parameter_that_is_initialised_in_part_is_named():
    with delayed_init():
        model = Half()
    with pytest.raises(InputError, match=r"parameter gain "):
        materialise(model, "cpu", OwnInit(0))


@pytest.mark.parametrize("values", [OwnInit(0), CounterInit(0, 0.02)])
def test_buffers_on_meta_are_named(values):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(delayed.neo_config())
    with pytest.raises(InputError, match=r"buffers .*attention\.bias.*delayed_init"):
        materialise(model, "cpu", values)
    assert all(p.is_meta for p in model.parameters())


def test_buffers_on_meta_come_from_files_that_have_them(tmp_path):
    real = nn.BatchNorm1d(3)
    real.running_mean.fill_(4)
    with torch.device("meta"):
        model, other = nn.BatchNorm1d(3), Random()
    materialise(model, "cpu", Loaded(WeightLoader(model, InMemoryWeights(real.state_dict()))))
    assert torch.equal(model.running_mean, real.running_mean)
    save = {name: torch.zeros(tensor.shape) for name, tensor in other.state_dict().items()}
    with pytest.raises(InputError, match=r"buffers scratch "):
        materialise(other, "cpu", Loaded(WeightLoader(other, InMemoryWeights(save))))


# Ranks.


@pytest.fixture(scope="module")
def on_one_rank():
    made = {}

    def build(kind, **settings):
        key = kind, *sorted(settings.items(), key=str)
        if key not in made:
            made[key] = delayed.build(kind, {}, **settings)
        return made[key]

    return build


def run_build(kind, degrees, settings):
    return delayed.build(kind, degrees, **settings)


def same(one, many):
    for hashes, loss, norm in many:
        assert hashes == one[0]
        assert loss == pytest.approx(one[1], rel=1e-2)
        assert norm == pytest.approx(one[2], rel=3e-2)


@pytest.mark.long(lambda layout, kind: layout == "shard 4" or (layout == "shard 2") == (kind == "neo"))
@pytest.mark.parametrize("kind", delayed.MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_the_same_on_any_ranks(on_one_rank, kind, layout):
    count, degrees = LAYOUTS[layout]
    same(on_one_rank(kind), ranks.run(count, run_build, kind, degrees, {}))


@pytest.mark.long(lambda kind, settings: (kind == "decoder") == ("dtype" in settings))
@pytest.mark.parametrize("settings", [{"tied": True}, {"frozen": True}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("kind", ["decoder", "neo"])
def test_ties_frozen_parameters_and_bf16_too(on_one_rank, kind, settings):
    same(on_one_rank(kind, **settings), ranks.run(4, run_build, kind, {}, settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights of a kind of model, as Hugging Face saves them: `folder("neo", dtype, tied)`."""
    made = {}

    def make(kind, dtype=torch.float32, tied=False):
        key = kind, dtype, tied
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            if kind == "decoder":
                theirs = llama(3, dtype, **delayed.SIZES, tie_word_embeddings=tied)
            else:
                theirs = AutoModelForCausalLM.from_config(delayed.neo_config(tie_word_embeddings=tied), dtype=dtype)
            theirs.save_pretrained(made[key], max_shard_size=10_000)
        return made[key]

    return make


@pytest.mark.long(lambda kind, stored, tied: (kind == "neo") == tied or tied != (stored == torch.bfloat16))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["decoder", "neo"])
def test_files_are_read_by_rows(on_one_rank, folder, kind, stored, tied):
    """Rows of one rank hold what the whole has; the whole is what Hugging Face loads."""
    settings = {"folder": folder(kind, stored, tied), "tied": tied}
    one = on_one_rank(kind, **settings)
    theirs = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)
    theirs.config.use_cache = False
    wanted = transform(theirs, dtype=torch.float32)
    assert delayed.digest(wanted) == one[0]
    for layout in ("shard 4", "replicate 2 x shard 2") if tied else ("shard 4",):
        count, degrees = LAYOUTS[layout]
        same(one, ranks.run(count, run_build, kind, degrees, settings))


@pytest.mark.long(lambda layout, kind: (layout == "replicate 2 x shard 2") == (kind == "decoder"))
@pytest.mark.parametrize("kind", ["decoder", "neo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_rank_0_has_reaches_all(on_one_rank, folder, kind, layout):
    count, degrees = LAYOUTS[layout]
    settings = {"folder": folder(kind, torch.float32, kind == "neo"), "tied": kind == "neo"}
    hashes, loss, _ = on_one_rank(kind, **settings)
    for found in ranks.run(count, delayed.from_rank0, kind, degrees, settings["folder"]):
        assert found[0] == hashes
        assert found[1] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("case", "message"), [("other model", "another model than rank 0"), ("no weights", "has no value")])
def test_every_rank_hears_that_rank_0_cannot_send(case, message):
    for said, untouched in ranks.run(2, delayed.refused_by_all, case):
        assert message in said
        assert untouched


def test_every_rank_hears_that_rank_0_cannot_convert_a_weight():
    for said in ranks.run(2, delayed.beyond_float16, timeout=60):
        assert "has a value of 1e+06, and the largest of fp16" in said


@pytest.mark.long(lambda layout, kind: (layout == "replicate 2 x shard 2") == (kind == "plain"))
@pytest.mark.parametrize("kind", ["decoder", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_cover_the_whole_once(layout, kind):
    count, degrees = LAYOUTS[layout]
    found = collections.defaultdict(list)
    for rank in ranks.run(count, delayed.parts, kind, degrees):
        for name, start, stop, shape in rank:
            found[name].append((start, stop))
            assert stop <= shape[0]
    replicas = 2 if "replicate" in layout else 1
    some_empty = any(start == stop for ranges in found.values() for start, stop in ranges)
    assert some_empty == (layout == "shard 4" and kind == "plain")  # 3 rows for 4 ranks
    for name, ranges in found.items():
        rows = collections.Counter(row for start, stop in ranges for row in range(start, stop))
        assert set(rows.values()) == {replicas}, name
        assert sorted(rows) == list(range(max(rows) + 1)), name


def test_what_is_attached_to_a_local_tensor_stays():
    assert ranks.run(4, delayed.marked, {}) == [[]] * 4


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """The same model twice: a few kilobytes to warm up on, and 270 MB."""
    folder = tmp_path_factory.mktemp("sizes")
    for name, sizes in (("small", {}), ("large", delayed.LARGE)):
        (folder / name).mkdir()
        model = delayed.decoder(dtype=torch.bfloat16, attention_bias=False, **sizes)
        tensors = {n: torch.empty(p.shape, dtype=p.dtype) for n, p in model.named_parameters()}
        for number, tensor in enumerate(tensors.values()):
            tensor.view(torch.int16).random_(generator=torch.Generator().manual_seed(number))
        theirs = hugging_face(tensors, model.spec)
        theirs = {n: (t.view(torch.int16) & 0x3FFF).view(torch.bfloat16).contiguous() for n, t in theirs.items()}  # finite
        save_file(theirs, folder / name / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.long(lambda source: source == "own")
@pytest.mark.parametrize("source", ["files", "counter", "own"])
def test_no_rank_holds_more_than_its_part(large_folder, source):
    found = ranks.run(4, delayed.large, source, large_folder)
    for grown, mine, whole in found:
        assert whole > 200e6
        assert mine < 0.26 * whole
        # Beside its part: one matrix that is drawn (float32, whole), a chunk of the counter, or rows that are read.
        assert grown - mine < {"files": 40e6, "counter": 60e6, "own": 150e6}[source]


def test_the_hook_of_another_is_left_in_place():
    from torch.nn.modules.module import register_module_parameter_registration_hook

    seen = []
    handle = register_module_parameter_registration_hook(lambda module, name, parameter: seen.append(name))
    try:
        with delayed_init():
            nn.Linear(2, 2)
        nn.Linear(2, 2)
    finally:
        handle.remove()
    assert seen == ["weight", "bias"] * 2
    assert names_on_meta(nn.Linear(2, 2)) == []
