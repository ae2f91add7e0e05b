"""PyTorch's FSDP2: the names of `octavo/parallel/fsdp2/adapter.py`, their signatures, and the order of PyTorch's calls.

No public means gathers weights as FP8 by the scales of a forward, gathers or reduces where a tensor lies, or ends a forward
that an exception left. Tensor extensions, custom reduce-scatters and lists of prefetches are public, and are used.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect

import fsdp2_names
import pytest
import torch
from private_names import SOURCE, used_in
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import ranks
from octavo.errors import InputError
from octavo.parallel.fsdp2 import adapter

IMPORTED = {"_fully_shard", "_fsdp_common"}
ADAPTER = SOURCE / "parallel" / "fsdp2" / "adapter.py"
RECORDS = {"iter_forward_root", "post_backward_final_callback_queued", "reduce_scatter_stream"}
STATE = {"_fsdp_param_group", "_training_state", "_state_ctx", "_modules_to_run_forward"}
SIGNATURES = {
    (_fsdp_param_group.FSDPParamGroup, "wait_for_unshard"): ("self",),
    (_fsdp_param_group.FSDPParamGroup, "reshard"): ("self",),
    (_fsdp_param_group.FSDPParamGroup, "pre_backward"): ("self", "default_prefetch", "unused"),
    (_fsdp_param_group.FSDPParamGroup, "post_backward"): ("self", "unused"),
    (_fsdp_param_group.FSDPParamGroup, "finalize_backward"): ("self",),
    (_fsdp_param.FSDPParam, "reset_sharded_param"): ("self",),
}  # fmt: skip


def names():
    """All names of FSDP2 in the adapter."""
    return {*adapter.GROUP, *adapter.PARAMETER, *adapter.LATER} | RECORDS | STATE | IMPORTED


def test_every_name_of_the_adapter_is_one_of_these():
    known = names() | {"_post_accumulate_grad_hooks", "_unsafe_preserve_version_counter", "_local_tensor"}
    own = {name for name in used_in(ADAPTER) if name not in known}
    own -= {"_raw", "_before_reduction", "_check", "_state", "_padded"}
    assert own <= {"_held", "_places"}


def test_every_other_attribute_in_the_adapter_is_public():
    tree = ast.parse(ADAPTER.read_text(encoding="utf-8"))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | vars(adapter).keys()
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"}
    own |= {field.name for field in dataclasses.fields(adapter.Form)} | {"octavo_group"}
    owners = (torch, torch.Tensor, torch.UntypedStorage, torch.Stream, torch.cuda, torch.distributed, nn, DTensor, FSDPModule)
    more = ProcessGroup, DeviceMesh, Placement, nn.Module, fully_shard, dict, list, str
    public = {name for owner in (*owners, *more) for name in dir(owner)}
    public |= {"fsdp_pre_all_gather", "fsdp_post_all_gather"}
    assert {node.attr for node in attributes} - names() - own - public == {"IDLE", "FORWARD", "PRE_BACKWARD"}


def test_every_private_name_has_its_reason_beside_the_public_means():
    """The table of docs/private-parts.md is the one of `fsdp2_names.py`, and that has the adapter's names."""
    private = {name for name in names() if name.startswith("_")} - IMPORTED
    assert {row.name for row in fsdp2_names.PRIVATE} == private
    assert len(fsdp2_names.PRIVATE) == len(private)
    page = SOURCE.parents[1].joinpath("docs", "private-parts.md").read_text(encoding="utf-8")
    assert fsdp2_names.written(page) == page, "python tests/contract/fsdp2_names.py docs/private-parts.md"
    assert f"{len(private)} private names" in page


def test_every_other_name_of_an_inner_class_has_its_reason():
    assert {name for name in names() if not name.startswith("_")} == fsdp2_names.INNER.keys()
    page = SOURCE.parents[1].joinpath("docs", "private-parts.md").read_text(encoding="utf-8")
    assert f"{len(fsdp2_names.INNER)} names without an underscore" in page


@pytest.mark.parametrize("name", fsdp2_names.PUBLIC)
def test_public_means_are_there_from_their_version_on(name):
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    since = tuple(map(int, fsdp2_names.PUBLIC[name][0].split(".")))
    if (major, minor) != (2, 12):  # whose source was not read
        assert hasattr(FSDPModule, name) == ((major, minor) >= since)


def test_every_public_setting_is_in_the_table():
    settings = {name for name in vars(FSDPModule) if name.startswith("set_")}
    assert settings - fsdp2_names.PUBLIC.keys() == {
        "set_is_last_backward", "set_requires_all_reduce", "set_reshard_after_backward", "set_post_optim_event",
        "set_reduce_scatter_divide_factor",
    }  # fmt: skip  # each is the user's, and FSDP2's own code follows it


@pytest.mark.parametrize(("owner", "name"), SIGNATURES)
def test_signature(owner, name):
    found = tuple(inspect.signature(inspect.unwrap(getattr(owner, name))).parameters)
    assert found[: len(SIGNATURES[owner, name])] == SIGNATURES[owner, name]  # version 2.11 has more optional ones


def test_states():
    assert {"IDLE", "FORWARD", "PRE_BACKWARD"} <= _fsdp_common.TrainingState.__members__.keys()


def sharded():
    """Two layers that FSDP2 shards, and the root around them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


METHODS = ("unshard", "wait_for_unshard", "reshard", "pre_backward", "post_backward", "finalize_backward")


def note_calls(raw, label, log):
    """Replace methods of a group, on the instance as the adapter does, by ones that note their calls."""

    def noted(name, plain):
        def run(*given):
            log.append(f"{label}.{name}")
            return plain(*given)

        return run

    for name in METHODS:
        setattr(raw, name, noted(name, getattr(raw, name)))


def calls():
    """What FSDP2 calls in a forward, its backward, and what a group and its parameters have behind them."""
    model = sharded()
    log = []
    groups = [adapter.group_of(layer) for layer in model]
    assert adapter.group_of(model) is None
    assert adapter.groups_of([*model, model, *model]) == groups
    for label, group in zip("ab", groups, strict=True):
        note_calls(group._raw, label, log)
    loss = model(torch.ones(1, 4)).sum()
    forward = list(log)
    log.clear()
    assert not adapter.forward_is_open(model)
    loss.backward()
    backward = list(log)
    for group in groups:
        for name in adapter.GROUP:
            assert hasattr(group._raw, name), name
        assert hasattr(group._raw.comm_ctx, "reduce_scatter_stream")
        for parameter in group._raw.fsdp_params:
            for name in (*adapter.PARAMETER, *adapter.LATER):
                assert hasattr(type(parameter), name) or hasattr(parameter, name), name
    state = fully_shard.state(model)
    assert state is model._get_fsdp_state()
    assert isinstance(state, _fsdp_state.FSDPState)
    for name in STATE:
        assert hasattr(state, name), name
    for name in ("iter_forward_root", "post_backward_final_callback_queued"):
        assert hasattr(state._state_ctx, name), name
    return forward, backward


def test_the_order_of_calls():
    for forward, backward in ranks.run(2, calls):
        first = ["a.unshard", "a.wait_for_unshard", "a.reshard"]
        second = [call.replace("a.", "b.") for call in first]
        assert [call for call in forward if call[0] == "a"] == first
        assert [call for call in forward if call[0] == "b"] == second
        own = [call for call in backward if call[0] == "b"]
        assert own[:5] == ["b.pre_backward", "b.unshard", "b.wait_for_unshard", "b.post_backward", "b.reshard"]
        assert own[-1] == "b.finalize_backward"
        assert backward.index("b.pre_backward") < backward.index("a.pre_backward") < backward.index("b.finalize_backward")


def order_of_replacements():
    """What runs when the gradients of a group are complete, and when a backward ends, whatever the order of the calls."""
    model = sharded()
    log = []
    group = adapter.group_of(model[0])
    for kind in ("buffers", "hand over", "same parameters", "direct"):
        group.before_reduction(kind, lambda kind=kind: log.append(kind))
    group.before_end_of_backward(lambda: log.append("end"))
    group.around_pre_backward(lambda: log.append("before"), lambda: log.append(group.is_gathered))
    with pytest.raises(ValueError, match="one action each of same parameters, direct, hand over"):
        group.before_reduction("direct", log.clear)
    model(torch.ones(1, 4)).sum().backward()
    return log


def test_what_is_replaced_runs_in_the_written_order():
    assert ranks.run(2, order_of_replacements) == [["before", True, *adapter.BEFORE_REDUCTION, "end"]] * 2


def facts():
    """Of parameters over shards, replicas and experts: (the adapter's, FSDP2's), and whether shards and gradients are equal."""
    mesh, found = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")), []
    for names, experts in (("b", None), (("a", "b"), None), ("b", "a"), (("a", "b"), "c")):
        layer = nn.Linear(3, 8 if experts else 5, bias=False)  # five rows: the second rank has fewer than the first
        if experts:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh[experts], [Shard(0)]))
        fully_shard(layer, mesh=mesh[names])
        group, raw = adapter.group_of(layer), fully_shard.state(layer)._fsdp_param_group
        (ours,), (theirs,) = group.parameters, raw.fsdp_params
        theirs.reset_sharded_param()
        gradient = torch.randn_like(ours.shard)[: layer.weight.to_local().shape[0]]
        ours.add_to_shard(gradient)
        wanted = theirs.to_sharded_dtensor(gradient)
        same = layer.weight.grad._spec == wanted._spec and torch.equal(layer.weight.grad.to_local(), gradient)
        place = raw.mesh_info
        found.append((
            (ours.module, ours.name, ours.size, ours.device, ours.shard_group, ours.rank, ours.ranks, group.replicated),
            (layer, "weight", theirs._orig_size, theirs.device, place.shard_process_group, place.shard_mesh_rank,
             place.shard_mesh_size, isinstance(place, _fsdp_common.DDPMeshInfo)),
            same and torch.equal(ours.shard.view(-1), theirs._sharded_param_data) and not group.is_gathered,
        ))  # fmt: skip
        layer.unshard()
        found[-1] += (group.is_gathered and group.is_there and raw.is_unsharded,)
        layer.reshard()
    return [(ours == theirs, same, gathered, group.is_gathered) for ours, theirs, same, gathered in found]


def test_dtensors_and_modules_say_what_fsdp2_has():
    assert ranks.run(4, facts) == [[(True, True, True, False)] * 4] * 4


def lacking():
    """The answer to a version whose groups lack a name."""
    model = sharded()
    raw = fully_shard.state(model[0])._fsdp_param_group
    del raw.comm_ctx
    with pytest.raises(InputError) as error:
        adapter.group_of(model[0])
    return str(error.value)


def test_a_broken_contract_is_refused_by_name():
    for message in ranks.run(2, lacking):
        assert (
            "FSDP2's groups of parameters have no comm_ctx, which Octavo needs to shard. pip install 'torch>=2.11,<2.15'"
            in message
        )


def test_frozen_bytes_are_sharded_where_a_parameter_would_require_a_gradient_first():
    """As PyTorch before 2.13 makes the parameters of shards."""
    data = torch.zeros(4, 2, dtype=torch.uint8)

    class Sharded(torch.Tensor):  # a subclass, as DTensor is: `nn.Parameter` asks it for gradients by its method
        pass

    whole = data.as_subclass(Sharded)
    with pytest.raises(RuntimeError, match="floating point"):
        torch.nn.Parameter(whole)
    with adapter.FrozenBytes():
        parameter = torch.nn.Parameter(whole)
        parameter.requires_grad_(False)
        assert torch.nn.Parameter(torch.zeros(2)).requires_grad
    assert not parameter.requires_grad
    assert parameter.dtype == torch.uint8
