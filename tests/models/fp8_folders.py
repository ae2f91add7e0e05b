"""Folders in FP8 as others publish them, from a model in memory: bytes, scales and quantization_config."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import octavo
from octavo.collectives.whole import whole_tensor
from octavo.fp8.recipe import RECIPES
from octavo.fp8.scaling import states_of
from octavo.models.sources import load_config

E4M3_MAX = 448.0
LEFT_OUT = ("lm_head", "embed", "norm", "gate.weight", "router")


def scales_of(weight, kind, block=128):
    """What multiplies the bytes back, as `kind` shares it, and the same for each element; not powers of two."""
    if kind == "tensor":
        scale = (weight.abs().amax() / E4M3_MAX).reshape(1)
        return scale, scale.expand_as(weight)
    if kind == "channel":
        scale = weight.abs().amax(1, keepdim=True) / E4M3_MAX
        return scale, scale.expand_as(weight)
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block, 0, -rows % block))
    scale = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).abs().amax((1, 3)) / E4M3_MAX
    return scale, scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]


def config_of(kind, ignore=()):
    """quantization_config of each kind, as its publishers write it."""
    if kind == "block":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": kind == "channel"}
    activations["strategy"] = "token" if kind == "channel" else "tensor"
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": kind}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "config_groups": {"group_0": group}, "format": "float-quantized", "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def quantise(folder, kind, change=None, *, edit=None, scale_dtype=torch.float32):
    """Make a folder of `save_pretrained` one in FP8; returns float64 of bytes × scales by name, and of the other tensors.

    change: of the tensors in the files, edit: of quantization_config; each gets a dict and changes it.
    """
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors, values = {}, {}
    for name, tensor in load_file(file).items():
        if tensor.dim() != 2 or any(part in name for part in LEFT_OUT):
            tensors[name], values[name] = tensor, tensor.double()
            continue
        scale, each = scales_of(tensor.float(), kind)
        scale, each = scale.to(scale_dtype), each.to(scale_dtype).float()
        data = (tensor.float() / each).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        values[name] = data.double() * each.double()
        tensors[name] = data
        tensors[name.removesuffix("weight") + ("weight_scale_inv" if kind == "block" else "weight_scale")] = scale
        if kind == "tensor":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.02])
    config = config_of(kind)
    if change is not None:
        change(tensors)
    if edit is not None:
        edit(config)
    save_file(tensors, file, metadata={"format": "pt"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return values


def bases(folder, recipe, degrees):
    """On each rank: name → (bytes of the whole matrix, scales) of a base in FP8, and the loss of a step."""
    if degrees is not None:
        octavo.init(degrees)
    recipe = RECIPES[recipe]()
    with octavo.delayed_init():
        empty = AutoModelForCausalLM.from_config(load_config(str(folder)))
    lora, dtypes = octavo.LoRA(4, base="fp8"), {"dtype": torch.bfloat16, "params_dtype": torch.bfloat16}
    model = octavo.transform(empty, recipe, lora=lora, load_from=folder, device="cpu", **dtypes)
    found = {}
    for name, state in states_of(model):
        if state.stored is not None:
            weight = whole_tensor(getattr(state.module, state.weight_name).detach())
            bits = getattr(state.module, f"{state.weight_name}_scale_bits")
            found[name] = weight.view(torch.uint8), bits.view(torch.float32).clone()
    return found
