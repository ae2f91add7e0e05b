"""What the tests of delayed initialisation run on every rank: small models, sharded on meta, filled, gathered and hashed."""

import hashlib
import resource

import torch
import torch.distributed as dist
from llamas import hugging_face, llama_config
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPTNeoConfig

from octavo.errors import InputError
from octavo.models.decoder import Decoder
from octavo.models.families import spec_of
from octavo.models.replace import replace_linears
from octavo.models.weight_files import InMemoryWeights, WeightFiles
from octavo.models.weight_loader import WeightLoader
from octavo.parallel import world
from octavo.parallel.coordination import all_ranks
from octavo.parallel.deferred_init import CounterInit, FromRank0, Loaded, delayed_init, materialise
from octavo.parallel.module_init import OwnInit
from octavo.parallel.shards import local_shard

SIZES = {"vocab_size": 17, "hidden_size": 40, "intermediate_size": 72, "attention_bias": True}
"""No size divides by 4 ranks, nor by the 16 elements of FP8 products."""


def decoder(tied=False, dtype=torch.float32, **changes):
    config = llama_config(**SIZES | {"tie_word_embeddings": tied} | changes)
    return Decoder(config, spec_of(config), dtype=dtype, params_dtype=dtype, device="meta")


def neo_config(**changes):
    values = {"vocab_size": 17, "hidden_size": 36, "num_layers": 2, "num_heads": 3, "max_position_embeddings": 16}
    values |= {"attention_types": [[["global", "local"], 1]], "window_size": 4, "bos_token_id": 1, "eos_token_id": 2}
    config = GPTNeoConfig(**values | changes)
    config.use_cache = False
    return config


def neo(tied=True, dtype=torch.float32):
    with delayed_init():
        model = AutoModelForCausalLM.from_config(neo_config(tie_word_embeddings=tied), dtype=dtype)
    replace_linears(model)
    return model


class Plain(nn.Module):
    """Modules of PyTorch, one of which initialises its child, an odd number of rows, and parameters shorter than the ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 13, batch_first=True, dropout=0.0)])
        self.norm = nn.BatchNorm1d(3)
        self.short = nn.Linear(8, 3)

    def forward(self, ids):
        return self.norm(self.short(self.layers[0](self.embed(ids))).flatten(0, 1)).square().mean()


def plain(tied=False, dtype=torch.float32):
    with delayed_init():
        return Plain().to(dtype)


MODELS = {"decoder": decoder, "neo": neo, "plain": plain}


def blocks_of(model):
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def shard(model):
    """By FSDP2, each block and the rest, when there are several ranks."""
    if world.state.world_size > 1:
        for block in blocks_of(model):
            fully_shard(block, mesh=world.state.shard_mesh)
        fully_shard(model, mesh=world.state.shard_mesh)
    return model


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def digest(model):
    """A hash for each parameter and buffer, whole."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    tensors = [(name, full(tensor).contiguous().view(-1).view(torch.uint8)) for name, tensor in tensors]
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors}


def loss_of(model):
    ids = torch.arange(3 * 8).view(3, 8) % 17
    return model(ids) if isinstance(model, Plain) else model(input_ids=ids, labels=ids).loss


def build(kind, degrees, *, folder=None, tied=False, dtype=torch.float32, frozen=False, seed=5):
    """(hashes, loss, first gradient's norm) of a model with initial values, or with those of a folder."""
    if dist.is_initialized():
        world.init(degrees)
    model = MODELS[kind](tied, dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not ("layers.0" in name or "h.0" in name))
    wanted = [(name, p.requires_grad) for name, p in model.named_parameters()]
    shard(model)
    values = CounterInit(seed, 0.02) if kind == "decoder" else OwnInit(seed)
    if folder is not None:
        values = Loaded(WeightLoader(model, WeightFiles(folder)))
    state = torch.get_rng_state()
    materialise(model, "cpu", values)
    assert torch.equal(torch.get_rng_state(), state)
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == wanted
    assert {p.dtype for p in model.parameters()} == {dtype}
    hashes = digest(model)
    loss = loss_of(model)
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    norm = sum(full(p.grad).double().square().sum() for p in model.parameters() if p.grad is not None).sqrt()
    return hashes, loss.item(), norm.item()


def rows_of(part):
    """The one range of rows of a part that FSDP2 has made; none is held: empty."""
    assert part.part.is_consecutive
    (rows,) = part.part.indices[0].ranges or (range(0),)
    return rows


def parts(kind, degrees):
    """(name, start, stop, whole shape) of this rank's part of every parameter."""
    world.init(degrees)
    model = shard(MODELS[kind](True))
    materialise(model, "cpu", OwnInit(0) if kind == "plain" else CounterInit(0, 1.0))
    found = []
    for name, parameter in model.named_parameters():
        part, whole = local_shard(parameter), full(parameter)
        assert part.local.data_ptr() == parameter.to_local().data_ptr()
        rows = rows_of(part)
        assert torch.equal(part.local, whole[rows.start : rows.stop])
        assert torch.equal(part.local.flatten(), whole.flatten()[part.numbers(0, part.local.numel())])
        found.append((name, rows.start, rows.stop, part.shape))
    return found


def from_rank0(kind, degrees, folder):
    """Hashes of a model whose weights rank 0 alone has, and of what else the ranks' models were before."""
    world.init(degrees)
    first = world.state.rank == 0
    held = None
    if first:
        held = InMemoryWeights(
            {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        )
    if kind == "decoder":
        model = decoder()
    elif first:
        model = AutoModelForCausalLM.from_config(neo_config())
        replace_linears(model)
    else:
        with torch.device("meta"):  # buffers without a value too: they come from rank 0
            model = AutoModelForCausalLM.from_config(neo_config())
        replace_linears(model)
    shard(model)
    materialise(model, "cpu", FromRank0(WeightLoader(model, held) if first else None, all_ranks()))
    return digest(model), loss_of(model).item()


def refused_by_all(case):
    """What each rank says when rank 0 has another model, or no weights."""
    world.init({})
    rank = world.state.rank
    model = shard(decoder(hidden_size=40 if case == "no weights" or rank == 0 else 48))
    load = None if rank or case == "no weights" else WeightLoader(model, InMemoryWeights(weights(model)))
    try:
        materialise(model, "cpu", FromRank0(load, all_ranks()))
    except InputError as error:
        return str(error), all(p.is_meta for p in model.parameters())
    return None


def beyond_float16():
    """What each rank says when a weight of rank 0 does not fit into the model's dtype."""
    world.init({})
    model = shard(decoder(dtype=torch.float16))
    held = InMemoryWeights({name: tensor + 1e6 for name, tensor in weights(model).items()})
    try:
        materialise(model, "cpu", FromRank0(None if world.state.rank else WeightLoader(model, held), all_ranks()))
    except InputError as error:
        return str(error)
    return None


def weights(model):
    """Zeros under Hugging Face's names, for a decoder."""
    shapes = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    return hugging_face(shapes, model.spec)


def marked(degrees):
    """Attributes of local tensors, by which FSDP2 finds extensions, after storage was given and after a forward."""
    world.init(degrees)
    model = shard(decoder())
    for name, parameter in model.named_parameters():
        parameter._local_tensor.mark = name
    materialise(model, "cpu", CounterInit(0, 0.02))
    before = [name for name, p in model.named_parameters() if p._local_tensor.mark != name]
    loss_of(model).backward()
    return before + [name for name, p in model.named_parameters() if p._local_tensor.mark != name]


LARGE = {
    "vocab_size": 16_400,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def large(source, folder):
    """(peak memory that filling took, bytes of this rank's part, bytes of the whole), after a warm-up on a small model."""
    world.init({})

    def fill(model, values):
        shard(model)
        materialise(model, "cpu", values(model))
        return model

    def values(folder):
        if source == "files":
            return lambda model: Loaded(WeightLoader(model, WeightFiles(folder)))
        if source == "own":
            return lambda model: OwnInit(0)
        return lambda model: CounterInit(0, 0.02)

    def make(**changes):
        return decoder(dtype=torch.bfloat16, attention_bias=False, **changes) if source != "own" else own(**changes)

    fill(make(), values(folder / "small"))
    before = peak()
    model = fill(make(**LARGE), values(folder / "large"))
    grown = peak() - before
    if source == "files":
        check_against(model, folder / "large")
    whole = sum(p.numel() for p in model.parameters()) * 2
    return grown, sum(p.to_local().nbytes for p in model.parameters()), whole


def own(**changes):
    from transformers import LlamaForCausalLM

    with delayed_init():
        return LlamaForCausalLM._from_config(llama_config(**SIZES | changes), dtype=torch.bfloat16)


def check_against(model, folder):
    part = local_shard(model.layers[5].layernorm_mlp.fc2_weight)
    with safe_open(folder / "model.safetensors", "pt") as file:
        held = rows_of(part)
        rows = file.get_slice("model.layers.5.mlp.down_proj.weight")[held.start : held.stop]
    assert torch.equal(part.local, rows)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
