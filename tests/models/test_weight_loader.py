"""A slice of rows of a joined matrix is what the whole matrix has there, read from its own rows of the sources only."""

import pytest
import torch
from llamas import SHAPES, hugging_face, llama, llama_config
from safetensors.torch import save_file
from torch import nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from octavo.build import transform
from octavo.errors import InputError
from octavo.models.convert import conversion
from octavo.models.decoder import Decoder
from octavo.models.families import spec_of
from octavo.models.weight_files import InMemoryWeights, WeightFiles
from octavo.models.weight_loader import WeightLoader, folder_weights
from octavo.nn.attention import merge_qkv
from octavo.nn.mlp import interleave


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


class Recorded(InMemoryWeights):
    """Notes how many rows each read takes."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.reads = []

    def read(self, name, start=0, stop=None):
        rows = super().read(name, start, stop)
        self.reads.append(rows.shape[0])
        return rows


def check_every_range(decoder, name, sources, whole):
    """Each range of rows of a joined matrix, in the numbers of the rows of its sources."""
    weights = {theirs: p.clone() for theirs, p in hugging_face(parameters(decoder), decoder.spec).items()}
    names = conversion(decoder.spec).names(name)
    for theirs, rows in zip(names, sources if len(names) > 1 else [torch.cat(sources)], strict=True):
        weights[theirs] = rows.float()[:, None].expand_as(weights[theirs])
    load = WeightLoader(decoder, InMemoryWeights(weights))
    width = decoder.get_parameter(name).shape[1]
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            out = torch.full((stop - start, width), -1.0)
            load(name, out, start)
            assert torch.equal(out, whole[start:stop].float()[:, None].expand_as(out))


def numbered(lengths):
    """Sources with a number for each row."""
    return torch.arange(sum(lengths)).split(lengths)


def decoder(**changes):
    config = llama_config(hidden_size=24, num_hidden_layers=1, **changes)
    return Decoder(config, spec_of(config), dtype=torch.float32, params_dtype=torch.float32)


JOINED = ["llama", "phi3"]
"""Families whose sources have the parts of a joined matrix apart, and one after the other in one matrix."""


@pytest.mark.parametrize("family", JOINED)
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim"), [(1, 1, 2), (4, 2, 4), (4, 1, 2), (3, 3, 2), (6, 3, 2), (8, 2, 2), (2, 2, 6)]
)
def test_every_range_of_joined_queries_keys_and_values(family, heads, groups, head_dim):
    q, k, v = numbered([heads * head_dim, groups * head_dim, groups * head_dim])
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim}
    model = decoder(model_type=family, **sizes)
    name = "layers.0.self_attention.qkv.weight"
    check_every_range(model, name, (q, k, v), merge_qkv(q, k, v, groups))


@pytest.mark.parametrize("family", JOINED)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 16, 20, 32, 44, 48])
def test_every_range_of_gate_and_up(family, size):
    gate, up = numbered([size, size])
    model = decoder(model_type=family, intermediate_size=size)
    check_every_range(model, "layers.0.ffn.fc1.weight", (gate, up), interleave(gate, up))


@pytest.mark.long(lambda shape, dtype: list(SHAPES).index(shape) % 2 == (dtype == torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_decoder_are_slices_of_the_whole(tmp_path, shape, dtype):
    theirs = llama(2, dtype, **SHAPES[shape])
    theirs.save_pretrained(tmp_path, max_shard_size=20_000)
    decoder = transform(theirs, dtype=torch.float32)
    files, held = folder_weights(tmp_path, None, theirs.config), Recorded(theirs.state_dict())
    for weights in (files, held):
        load = WeightLoader(decoder, weights)
        assert set(load.names) == {name for name, _ in decoder.named_parameters(remove_duplicate=False)}
        for name, parameter in decoder.named_parameters(remove_duplicate=False):
            whole = parameter.detach()
            way = conversion(decoder.spec)
            if name != "head.weight":
                parts = tuple(parameters(theirs)[n].float() for n in way.names(name))
                assert torch.equal(way.join(name, parts), whole)
            for ranks in (1, 3, 7):
                start = 0
                for part in whole.tensor_split(ranks):
                    out = torch.full_like(part, torch.nan)
                    held.reads.clear()
                    load(name, out, start)
                    assert torch.equal(out, part), (name, start)
                    # The source of experts is a stack of matrices, and a read takes whole ones.
                    height = len(whole) // decoder.spec.experts if ".experts." in name else 1
                    stop = start + len(part)
                    assert sum(held.reads) == (0 if weights is files else -(-stop // height) - start // height)
                    start = stop


def gpt_neo(**changes):
    values = {"vocab_size": 31, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "max_position_embeddings": 16}
    config = GPTNeoConfig(**values | changes, attention_types=[[["global", "local"], 1]], bos_token_id=1, eos_token_id=2)
    return GPTNeoForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_parts_of_a_model_with_its_own_code(tmp_path, tied):
    model = gpt_neo(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    load = WeightLoader(model, WeightFiles(tmp_path))
    for name, tensor in model.state_dict().items():
        out = torch.empty(5, *tensor.shape[1:])
        load(name, out, 3)
        assert torch.equal(out, tensor[3:8]), name


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_scalars_and_persistent_buffers_are_read_and_others_are_not(tmp_path):
    model = Odd()
    model.norm.running_mean.copy_(torch.arange(4))
    model.norm.num_batches_tracked.fill_(7)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    load = WeightLoader(Odd(), WeightFiles(tmp_path))
    assert "scratch" not in load.names
    for name in ("scale", "norm.running_mean", "norm.num_batches_tracked"):
        out = torch.zeros_like(model.state_dict()[name])
        load(name, out, 0)
        assert torch.equal(out, model.state_dict()[name]), name


def test_what_does_not_fit_is_refused_before_anything_is_read():
    model = gpt_neo()
    state = dict(model.state_dict())
    gone = {name: tensor for name, tensor in state.items() if name != "transformer.h.1.ln_1.bias"}
    with pytest.raises(InputError, match=r"no weight 'transformer\.h\.1\.ln_1\.bias'"):
        WeightLoader(model, InMemoryWeights(gone))
    with pytest.raises(InputError, match=r"transformer\.wte\.weight: the weights have shape \(30, 24\)"):
        WeightLoader(
            model,
            InMemoryWeights(state | {"transformer.wte.weight": torch.zeros(30, 24), "lm_head.weight": torch.zeros(30, 24)}),
        )
