"""FSDP2's private names in `parallel/fsdp2/adapter.py`, each with its reason and the public means beside it.

    python tests/contract/fsdp2_names.py docs/parallelism.md     write the table

Public means were read in the sources of torch 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple


class Private(NamedTuple):
    """A private name of FSDP2.

    Attributes:
        name: as the adapter has it.
        why: what Octavo does by it.
        public: the nearest public means, and why it does not serve.
    """

    name: str
    why: str
    public: str


PRIVATE = (
    Private("_fsdp_param_group", "the parameters that are gathered together", "none: `FSDPModule` hands out no group"),
    Private("_state_ctx", "whether a forward or backward is open, and to end one that an exception left",
            "`reset_iter_state`, after 2.11: it drops the gradients of earlier micro-batches after a failed forward too, and "
            "says not whether anything was open"),
    Private("_modules_to_run_forward", "to end a forward of several modules in the middle", "`reset_iter_state`, as above"),
    Private("_training_state", "whether a gathering is for a forward or a backward",
            "none: `fsdp_pre_all_gather` is told the module, not the pass"),
    Private("_module_fqn", "the name of a group in messages and profiles, as FSDP2's own events have it", "none"),
    Private("_all_gather_result", "whether a gathering is under way, and one in place",
            "`unshard(async_op=True)` gives a handle of the caller's own gatherings alone"),
    Private("_all_gather_comm", "whether the user has set another exchange",
            "`set_custom_all_gather` sets it, and nothing reads it"),
    Private("_to_unsharded", "modules get the parameters that were gathered in place",
            "`set_custom_all_gather` (2.11): FSDP2 still copies out of one buffer, the pass that is saved here"),
    Private("_wait_all_gather_streams_on_event", "the buffer of the part before is freed when FSDP2 would", "none"),
    Private("_reshard_after_forward_event", "whether FSDP2 has ordered a gathering behind a freeing", "none"),
    Private("_reduce_scatter_comm", "whether the user has set another reduction",
            "`set_custom_reduce_scatter` sets it, and is used for that; nothing reads it"),
    Private("_reduce_scatter_process_group", "the ranks that sum gradients",
            "`set_separate_reduce_scatter_group`, after 2.11, sets it, and nothing reads it"),
    Private("_partial_reduce_output", "gradients that replicas have not summed: found, and dropped after an exception",
            "`reset_iter_state`, after 2.11, drops those of earlier micro-batches too"),
    Private("_all_reduce_hook", "whether the user's hook needs what FSDP2 reduces",
            "`set_all_reduce_hook` sets it, and nothing reads it"),
    Private("_reduce_dtype", "the dtype in which gradients are reduced, chosen in each backward",
            "`MixedPrecisionPolicy(reduce_dtype=…)` is read once, before the first forward"),
    Private("_module_info", "the module and name of a parameter", "none for the sharded one: two modules may have it"),
    Private("_orig_size", "the size of what is gathered",
            "`DTensor.shape`: of experts over ranks that is the size of all experts"),
    Private("_sharded_param_data", "this rank's rows with room for padding, which are cast and gathered",
            "`DTensor.to_local()` is the rows without padding"),
    Private("_sharded_local_tensor", "the tensor that gets the extension",
            "a tensor subclass with `fsdp_pre_all_gather` before `fully_shard` (2.11): every optimizer and state dict would "
            "see the subclass"),
    Private("_init_extensions", "FSDP2 sees an extension that came after `fully_shard`", "the same subclass"),
    Private("_unsharded_param", "the parameter that autograd accumulates into, of each form of a gathered weight", "none"),
    Private("_unsharded_inner_tensors", "what an extension has put in place of the gathered bytes, of each form", "none"),
)  # fmt: skip

INNER = {
    "fsdp_params": "the parameters of a group, in FSDP2's order",
    "mesh_info": "this rank's place, the number of shards, their ranks, and whether there are replicas",
    "post_forward_mesh_info": "whether a group is freed behind its forward, by the present setting, which nothing public reads",
    "device": "where a group is gathered; a shard on the meta device, or offloaded, is elsewhere",
    "comm_ctx": "the streams of gatherings and reductions, and the buffer of the part before",
    "reduce_grads": "whether this backward sums: `set_requires_gradient_sync` sets it, and nothing reads it",
    "gradient_divide_factor": "the user's divisor, which reductions of Octavo's own respect; nothing public reads it",
    "force_sum_reduction_for_comms": "the same of the user's choice of sums",
    "unshard_in_backward": "the same of the user's choice not to gather for a backward",
    "is_unsharded": "whether the modules have their whole parameters",
    "unshard": "replaced: gatherings in place",
    "wait_for_unshard": "replaced: gatherings in place; called to end one that an exception left",
    "reshard": "called to free what an exception left",
    "pre_backward": "replaced: FP8 weights of a backward are checked around its gathering",
    "post_backward": "replaced: the actions of `BEFORE_REDUCTION`; hooks of parameters run too early",
    "finalize_backward": "replaced: the end of a backward, behind all reductions",
    "sharded_state": "whether the whole is more than the shards, cast",
    "sharded_param": "the parameter that gets the gradient",
    "param_dtype": "the dtype in which a parameter outside FP8 is gathered",
    "all_gather_outputs": "the memory of the whole, of each form",
    "unsharded_accumulated_grad": "gradients of earlier micro-batches: reduced, dropped and kept between forms",
    "init_all_gather_outputs": "replaced: outside of inference mode; called for gatherings in place",
    "alloc_all_gather_outputs": "called for gatherings in place",
    "init_unsharded_param": "the same",
    "free_unsharded_param": "called for what a gathering in place has left",
    "reset_sharded_param": "the shard gets room for padding before its tensor is extended",
    "accumulate_unsharded_grad_if_needed": "the gradient of all micro-batches, to reduce it from where it is",
    "to_sharded_dtensor": "the gradient as a part of a DTensor",
}
"""Name without an underscore of FSDP2's inner classes, as private → what Octavo does by it. None has a public means."""

PUBLIC = {
    "set_requires_gradient_sync": ("2.11", "micro-batches; used"),
    "set_reshard_after_forward": ("2.11", "the user's; respected"),
    "set_modules_to_forward_prefetch": ("2.11", "order of gatherings; used"),
    "set_modules_to_backward_prefetch": ("2.11", "order of gatherings; used"),
    "set_custom_reduce_scatter": ("2.11", "bf16 gradients summed in float32; used"),
    "set_custom_all_gather": ("2.11", "changes the exchange, not the copies around it: does not serve"),
    "set_all_reduce_hook": ("2.11", "the user's: does not serve"),
    "set_unshard_in_backward": ("2.11", "the user's; respected"),
    "set_gradient_divide_factor": ("2.11", "the user's; respected"),
    "set_force_sum_reduction_for_comms": ("2.11", "the user's; respected"),
    "set_allocate_memory_from_process_group_for_comm": ("2.11", "refuses custom exchanges beside it: does not serve"),
    "reset_iter_state": ("2.13", "drops earlier micro-batches after a failed forward: does not serve"),
    "set_symm_mem_for_comm": ("2.13", "refuses custom exchanges beside it: does not serve"),
    "set_separate_reduce_scatter_group": ("2.13", "a communicator more, for NCCL: the user's, respected"),
    "set_reduce_scatter_unused_params": ("2.13", "the user's"),
    "set_reduce_scatter_max_input_buffers": ("2.13", "the user's"),
}
"""Method of `FSDPModule` → the first version of 2.11, 2.13 and 2.14 that has it, and what it is to Octavo."""

BEGIN, END = "<!-- FSDP2's names: python tests/contract/fsdp2_names.py docs/parallelism.md -->", "<!-- end of FSDP2's names -->"


def table() -> str:
    """The tables of docs/parallelism.md."""
    lines = [BEGIN, "", "| private name | what it is for | public means |", "|---|---|---|"]
    lines += [f"| `{row.name}` | {row.why} | {row.public} |" for row in PRIVATE]
    lines += ["", "| public means of `FSDPModule` | since torch | in Octavo |", "|---|---|---|"]
    lines += [f"| `{name}` | {since} | {use} |" for name, (since, use) in PUBLIC.items()]
    return "\n".join([*lines, "", END])


def written(page: str) -> str:
    """The page with the present tables."""
    before, rest = page.split(BEGIN)
    return before + table() + rest.split(END)[1]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
