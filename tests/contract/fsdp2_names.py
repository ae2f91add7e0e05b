"""FSDP2's private names in `parallel/fsdp2/adapter.py`, each with its purpose and the nearest public API.

    python tests/contract/fsdp2_names.py docs/private-parts.md     write the table

Public APIs were read in the sources of torch 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple


class Private(NamedTuple):
    """A private name of FSDP2.

    Attributes:
        name: as the adapter has it.
        why: its purpose in Octavo.
        public: the nearest public API, and why it does not suffice.
    """

    name: str
    why: str
    public: str


PRIVATE = (
    Private("_fsdp_param_group", "the parameters that are gathered together", "none: `FSDPModule` does not expose its groups"),
    Private("_state_ctx", "whether a forward or backward is unfinished, and to reset one after an exception",
            "`reset_iter_state`, after 2.11: it also drops the gradients of earlier micro-batches after a failed forward, and "
            "does not tell whether anything was unfinished"),
    Private("_modules_to_run_forward", "resets a forward of several modules after an exception",
            "`reset_iter_state`, as above"),
    Private("_training_state", "whether an all-gather is for forward or backward",
            "none: `fsdp_pre_all_gather` gets the module, not the pass"),
    Private("_all_gather_result", "whether an all-gather is pending",
            "`unshard(async_op=True)` returns a handle only of the caller's all-gathers"),
    Private("_partial_reduce_output", "gradients that replicas have not summed: detected, and dropped after an exception",
            "`reset_iter_state`, after 2.11, also drops those of earlier micro-batches"),
    Private("_all_reduce_hook", "whether the user has set a hook that needs FSDP2's reduced gradients",
            "`set_all_reduce_hook` sets it; no getter"),
    Private("_unsharded_param", "the parameter into which autograd accumulates, one per form of a gathered weight", "none"),
    Private("_unsharded_inner_tensors", "the tensors by which an extension replaced the gathered bytes, one set per form",
            "none"),
)  # fmt: skip

INNER = {
    "fsdp_params": "the parameters of a group, in FSDP2's order",
    "post_forward_mesh_info": "whether a group is freed after its forward; no public getter",
    "comm_ctx": "the stream of reductions",
    "reduce_grads": "whether this backward reduces gradients: `set_requires_gradient_sync` sets it; no getter",
    "gradient_divide_factor": "the user's divisor, which Octavo's reductions respect; no public getter",
    "force_sum_reduction_for_comms": "the user's choice of sums instead of means; no public getter",
    "wait_for_unshard": "replaced: runs outside inference mode; called to finish an all-gather after an exception",
    "pre_backward": "replaced: FP8 weights of a backward are checked around its all-gather",
    "post_backward": "replaced: the actions of `BEFORE_REDUCTION`; hooks of parameters run too early",
    "finalize_backward": "replaced: the end of a backward, after all reductions",
    "sharded_param": "the parameter that receives the gradient; its DTensor has ranks, size and rows",
    "all_gather_outputs": "the memory of the gathered parameter, for each form",
    "unsharded_accumulated_grad": "gradients of earlier micro-batches: reduced, dropped, and moved between forms",
    "reset_sharded_param": "replaced: the shard gets room for padding, and its tensor is extended whenever it is replaced",
    "reduce_scatter_stream": "of `comm_ctx`: the stream of reductions",
    "iter_forward_root": "of `_state_ctx`: an unfinished forward",
    "post_backward_final_callback_queued": "of `_state_ctx`: an unfinished backward",
}
"""Name without an underscore of FSDP2's inner classes, just as private → its purpose in Octavo. None has a public API."""

PUBLIC = {
    "set_requires_gradient_sync": ("2.11", "micro-batches; used"),
    "set_reshard_after_forward": ("2.11", "the user's; respected"),
    "set_modules_to_forward_prefetch": ("2.11", "order of all-gathers; used"),
    "set_modules_to_backward_prefetch": ("2.11", "order of all-gathers; used"),
    "set_custom_reduce_scatter": ("2.11", "bf16 gradients summed in float32, in the dtypes of each backward; used"),
    "set_custom_all_gather": ("2.11", "the user's, except for matrices gathered in place; changes no copies: does not suffice"),
    "set_all_reduce_hook": ("2.11", "the user's: does not suffice"),
    "set_unshard_in_backward": ("2.11", "the user's; respected"),
    "set_gradient_divide_factor": ("2.11", "the user's; respected"),
    "set_force_sum_reduction_for_comms": ("2.11", "the user's; respected"),
    "set_allocate_memory_from_process_group_for_comm": ("2.11", "excludes custom collectives: does not suffice"),
    "reset_iter_state": ("2.13", "drops earlier micro-batches after a failed forward: does not suffice"),
    "set_symm_mem_for_comm": ("2.13", "excludes custom collectives: does not suffice"),
    "set_separate_reduce_scatter_group": ("2.13", "an additional NCCL communicator for FSDP2's reductions: the user's"),
    "set_reduce_scatter_unused_params": ("2.13", "the user's"),
    "set_reduce_scatter_max_input_buffers": ("2.13", "the user's"),
}
"""Method of `FSDPModule` → the first version of 2.11, 2.13 and 2.14 that has it, and its use in Octavo."""

BEGIN, END = (
    "<!-- FSDP2's names: python tests/contract/fsdp2_names.py docs/private-parts.md -->",
    "<!-- end of FSDP2's names -->",
)


def table() -> str:
    """FSDP2's tables of docs/private-parts.md."""
    lines = [BEGIN, "", "| private name | purpose | nearest public API |", "|---|---|---|"]
    lines += [f"| `{row.name}` | {row.why} | {row.public} |" for row in PRIVATE]
    lines += ["", "| name of an inner class | purpose |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in INNER.items()]
    lines += ["", "| public method of `FSDPModule` | since torch | in Octavo |", "|---|---|---|"]
    lines += [f"| `{name}` | {since} | {use} |" for name, (since, use) in PUBLIC.items()]
    return "\n".join([*lines, "", END])


def written(page: str) -> str:
    """The page with the present tables."""
    before, rest = page.split(BEGIN)
    return before + table() + rest.split(END)[1]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
