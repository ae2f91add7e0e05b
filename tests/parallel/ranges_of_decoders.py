"""A Llama whose parameters ranks hold by ranges: written, read back, and stepped by an optimizer of matrices."""

import itertools

import torch
import torch.distributed as dist
from llamas import llama_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from block_ranks import same_as
from building import built_model
from octavo.collectives.blocks import declare, indices, local_of, parameters_of, share_out, with_block
from octavo.collectives.whole import whole_tensor
from octavo.models.convert import to_huggingface
from octavo.models.weight_files import WeightFiles
from octavo.models.weight_loader import WeightLoader
from octavo.parallel import world
from octavo.parallel.deferred_init import Loaded
from octavo.parallel.saving import save_whole
from octavo.parallel.shards import like, local_shard, named_tensors


def split(model, tensor):
    """Leave each tensor rank ranges of every parameter of a whole model, in turn rows or columns, the middle one on all."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("shard", "tensor"))
    group = mesh["tensor"].get_group()
    for number, (name, parameter) in enumerate(list(model.named_parameters())):
        shape = tuple(parameter.shape)
        dim = number % parameter.dim()
        edges = [shape[dim] * edge // (2 * tensor + 1) for edge in range(2 * tensor + 2)]
        ranges = list(itertools.pairwise(edges))
        held = []
        for rank in range(tensor):
            own = [*ranges[rank::tensor][:2], ranges[-1]]
            held.append([indices(*own, padding=rank) if d == dim else indices((0, n)) for d, n in enumerate(shape)])
        block = share_out(shape, held, group)
        module, _, own_name = name.rpartition(".")
        part = with_block(torch.empty(block.local.local_shape, dtype=parameter.dtype), block)
        part.copy_(parameter.detach())
        setattr(model.get_submodule(module), own_name, nn.Parameter(part.held))
        declare(model.get_submodule(module), own_name, block)
    if size > tensor:
        fully_shard(model, mesh=mesh["shard"])
    return model


def decoder(**changes):
    """A Llama of ours with values of a seed, whole."""
    return built_model(llama_config(**changes), dtype=torch.float32, params_dtype=torch.float32, seed=3)


def written(folder, tensor):
    """A Llama in ranges: exported, written by `save_pretrained`, and read back from the export into other ranges."""
    world.init({})
    model = split(decoder(), tensor)
    save_whole(model)
    octavo.export(model, folder / "exported")
    model.save_pretrained(folder / "saved")
    wanted = {name: whole_tensor(tensor).detach() for name, tensor in named_tensors(model)}
    other = split(decoder(), tensor)
    with torch.no_grad():
        for parameter in other.parameters():
            local_of(parameter).fill_(torch.nan)
    Loaded(WeightLoader(other, WeightFiles(folder / "exported"))).fill(other, list(wanted))
    state = to_huggingface(model).state_dict()
    return same_as(other, wanted), wanted, {name: tensor.clone() for name, tensor in state.items()}


def stepped(tensor):
    """Whole weights after a step of an optimizer of matrices, each the square of its gradient's norm larger."""
    world.init({})
    model = split(decoder(), tensor) if tensor > 1 else decoder()
    matrices = octavo.matrices(model, "model.layers.*")
    optimizer = torch.optim.Muon(matrices.values(), lr=0.1)
    matrices.attach(optimizer)
    blocks = parameters_of(model)
    for number, parameter in enumerate(model.parameters()):
        whole = with_block(parameter, blocks[parameter])
        gradient = like(whole, torch.zeros_like(local_of(parameter)))
        values = torch.randn(whole.shape, generator=torch.Generator().manual_seed(number))
        local_shard(gradient).copy_from(values)
        parameter.grad = getattr(gradient, "held", gradient)
    optimizer.step()
    return {name: whole_tensor(tensor).detach().clone() for name, tensor in named_tensors(model)}
