"""What the tests of parameter groups run on every rank."""

import torch
from llamas import llama
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.trainer_pt_utils import get_parameter_names

import octavo
from octavo.errors import InputError

PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def groups(degrees, shape):
    """Names in the groups of a sharded model, and those that transformers' rule would decay."""
    octavo.init(degrees)
    model = octavo.transform(llama(**shape), dtype=torch.float32)
    names = {id(p): name for name, p in model.named_parameters()}
    found = [[names[id(p)] for p in group["params"]] for group in octavo.parameter_groups(model, 0.1)]
    own = set(names.values())
    return found, set(get_parameter_names(model, [nn.LayerNorm], PATTERNS)) & own


def flat():
    """The refusal of a model in PyTorch's first FSDP."""
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), use_orig_params=True, device_id="cpu")
    try:
        octavo.parameter_groups(model, 0.1)
    except InputError as error:
        return str(error)
    return ""
