"""PyTorch's autograd and activation checkpoints: what tells a forward from its recomputation, and the end of a backward."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.utils.checkpoint
from private_names import Name, check

from octavo.fp8.threads import OfThread

NAMES = (
    Name(
        "torch._C._current_graph_task_id",
        ("fp8/checkpoints.py",),
        "whether a backward runs on this thread; the public `torch.is_grad_enabled` is true in a recomputation too",
    ),
    *(
        Name(
            f"torch._C.{name}",
            ("fp8/threads.py",),
            "a thread's object that autograd passes on to its backward threads; public `contextvars` do so from torch 2.14 on",
        )
        for name in ("_stash_obj_in_tls", "_is_key_in_tls", "_get_obj_in_tls", "_remove_obj_from_tls")
    ),
    Name(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        ("nn/head.py",),
        "whether this backward retains its graph: otherwise the gradient of the logits may overwrite them",
    ),
    Name(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        ("fp8/checkpoints.py",),
        "the saved-tensor hook of the innermost checkpoint, which identifies forward and recomputation",
    ),
    Name(
        "torch.utils.checkpoint._checkpoint_impl",
        ("fp8/checkpoints.py",),
        "the frame of a checkpoint on the stack; before torch 2.14 it is that of the public `checkpoint`",
        ("function",),
        "2.14",
    ),
    Name(
        "torch.autograd.Variable._execution_engine",
        ("fp8/buffers.py",),
        "`queue_callback`: updates scales at the end of a backward, as FSDP2 and DDP end theirs",
    ),
    Name(
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        ("parallel/fsdp2/direct_gather.py", "parallel/fsdp2/fp8_gather.py"),
        "a saved weight is freed and regathered with the same values; FSDP2 does the same",
        ("tensors",),
    ),
    Name(
        "torch._C._are_functorch_transforms_active",
        ("kernels/autograd.py",),
        "`torch.func` is refused by name: its transforms would see through custom autograd functions",
    ),
    Name(
        "torch._C._storage_Use_Count",
        ("parallel/storages.py",),
        "whether a gradient is a view of memory that the rest of the backward writes",
    ),
    Name(
        "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
        ("kernels/algorithms.py",),
        "no timing of products under a mode that intercepts every operation",
        (),
    ),
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_name(name):
    if name.since and tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, name.since.split("."))):
        pytest.skip(f"of torch {name.since}")
    check(name)


class Seen(torch.autograd.Function):
    """Notes the number of the backward, whether it keeps its graph, and its end."""

    notes: list = []  # noqa: RUF012 - of one test

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        Seen.notes += [torch._C._current_graph_task_id(), keeps]
        torch.autograd.Variable._execution_engine.queue_callback(lambda: Seen.notes.append("end"))
        return grad


@pytest.mark.parametrize("keeps", [False, True])
def test_a_backward_has_a_number_and_ends_behind_its_last_function(keeps):
    assert torch._C._current_graph_task_id() == -1
    Seen.notes = []
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    first.register_hook(lambda grad: Seen.notes.append("a later function"))
    Seen.apply(first).sum().backward(retain_graph=keeps)
    number, *rest = Seen.notes
    assert number >= 0
    assert rest == [keeps, "a later function", "end"]
    assert torch._C._current_graph_task_id() == -1


def checkpoint_frames():
    """What the hooks of a checkpoint hold: free variables of the first pass, and of its recomputation."""
    found = []

    def block(x):
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack = getattr(pack, "_torchdynamo_orig_callable", pack)
        found.append((pack.__code__.co_freevars, dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    return found


def test_a_checkpoint_shares_a_frame_with_its_recomputation():
    """`octavo.fp8.checkpoints.innermost` finds the same object in both."""
    (names, cells), (again_names, again_cells) = checkpoint_frames()
    assert "frame" in names
    assert "target_frame_ref" in again_names
    assert again_cells["target_frame_ref"].cell_contents() is cells["frame"].cell_contents


def test_the_stack_of_a_checkpoint_holds_its_generator():
    from octavo.fp8 import checkpoints

    assert "gen" in checkpoints._CHECKPOINT.co_varnames
    inside = []
    x = torch.ones(2, requires_grad=True)
    for enabled in (True, False):  # `enclosing` reads the stack where the hook alone says nothing
        with contextlib.nullcontext() if enabled else torch.no_grad():
            torch.utils.checkpoint.checkpoint(
                lambda y: inside.append(len(checkpoints.enclosing())) or y * 1, x, use_reentrant=False
            )
    assert inside == [1, 1]


def test_uses_of_a_storage_are_counted():
    alone = torch.empty(3)
    one = torch._C._storage_Use_Count(alone.untyped_storage()._cdata)
    view = alone[1:]
    assert torch._C._storage_Use_Count(alone.untyped_storage()._cdata) == one + 1
    del view
    assert torch._C._storage_Use_Count(alone.untyped_storage()._cdata) == one


def test_saved_values_that_are_written_again_under_the_counter_are_no_error():
    weight = torch.ones(2, requires_grad=True)
    values = torch.ones(2)
    product = weight * values
    with torch.autograd.grad_mode._unsafe_preserve_version_counter((values,)):
        values.zero_().add_(1)
    product.sum().backward()
    assert torch.equal(weight.grad, torch.ones(2))


class Nested(torch.autograd.Function):
    """Its backward runs another one, so deep that autograd takes a thread of its own for it."""

    @staticmethod
    def forward(ctx, x, depth, note):
        ctx.depth, ctx.note = depth, note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.note).backward()
        return grad, None, None


def test_a_backward_on_a_thread_of_autograd_has_the_state_of_its_caller():
    """Below 60 nested backwards a CPU's run on another thread, as a GPU's always do."""
    states = OfThread("contract", object)
    own, found = states.here(), []

    def note():
        found.append((threading.get_ident(), states.here()))

    Nested.apply(torch.ones(1, requires_grad=True), 70, note).backward()
    assert len({thread for thread, _ in found}) > 1
    assert all(state is own for _, state in found)
    others = []
    thread = threading.Thread(target=lambda: others.append(states.here()))
    thread.start()
    thread.join()
    assert others[0] is not own
