"""Runs on the ranks of `test_attention.py`: many cells in one world, each compared with attention written out."""

import gc
import itertools
import time
import weakref
from unittest import mock

import torch
import torch.distributed as dist

from octavo.collectives import attention, causal
from octavo.collectives.attention import context_attention
from octavo.collectives.context import STRATEGIES, ContextGroup
from octavo.kernels.attention.pattern import Pattern

TOKENS, BATCH, HEADS, DIM = 48, 2, 8, 8
PATTERNS = {
    "causal": Pattern(TOKENS),
    "documents": Pattern(TOKENS, documents=((0, 5, 6, 30, 41), (0,))),
    "documents on the borders of chunks": Pattern(TOKENS, documents=((0, 12, 24, 36), (0, 6, 24))),
    "padding": Pattern(TOKENS, documents=((0, 40), (0, 7))),
    "window": Pattern(TOKENS, window=9),
    "window over several chunks": Pattern(TOKENS, window=31),
    "window of 1": Pattern(TOKENS, window=1),
    "window and documents": Pattern(TOKENS, documents=((0, 5, 6, 30, 41), (0, 20)), window=9),
}


def written_out(q, k, v, pattern, scale):
    """In the dtype of q, every logit there."""
    per_group = q.shape[2] // k.shape[2]
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(per_group, 2)) * scale
    logits = logits.masked_fill(~pattern.mask(q.shape[0], q.device), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.repeat_interleave(per_group, 2))


def cells(dtype, device="cpu", groups=(8, 2, 1), dim=DIM, strategies=STRATEGIES):
    """{(strategy, pattern, key-value heads): the largest relative error of output and gradients}, of this rank's tokens."""
    errors = {}
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    for strategy, name, kv in itertools.product(strategies, PATTERNS, groups):
        pattern = PATTERNS[name]
        if strategy == "p2p" and pattern.window is not None:
            continue
        draw = torch.Generator().manual_seed(len(errors))
        context = ContextGroup(dist.group.WORLD, strategy)
        q, k, v, cotangent = (
            torch.randn(BATCH, TOKENS, heads, dim, generator=draw).to(device, dtype) for heads in (HEADS, kv, kv, HEADS)
        )
        exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
        wanted = written_out(*exact, pattern, 0.3)
        wanted.backward(cotangent.double())
        own = [context.split(x.detach()).requires_grad_() for x in (q, k, v)]
        out = context_attention(*own, context, pattern, 0.3)
        out.backward(context.split(cotangent))
        assert out.dtype == dtype
        results = [(out.detach(), wanted.detach()), *((x.grad, y.grad) for x, y in zip(own, exact, strict=True))]
        errors[strategy, name, kv] = max(
            ((found.double() - context.split(whole)).norm() / whole.norm().clamp(min=1)).item() for found, whole in results
        )
    return errors


def one_call(dtype, groups):
    """`cells` of plain causal attention by a kernel that takes more keys than queries, as a GPU's does."""
    with mock.patch.object(causal.pieces, "takes_more_keys", return_value=True):
        return cells(dtype, groups=groups, strategies=("all_gather",))


def ahead():
    """Gradients without and with a gather that begins before attention's backward, and what was begun in which order."""
    context, pattern = ContextGroup(dist.group.WORLD), PATTERNS["causal"]
    draw = torch.Generator().manual_seed(dist.get_rank())
    given = [torch.randn(BATCH, TOKENS // context.size, heads, DIM, generator=draw) for heads in (HEADS, 2, 2)]
    weight = torch.randn(HEADS * DIM, 5, generator=draw)
    begun, gradients = [], []
    gather, differentiate = causal.start_gather, causal.pieces.differentiate

    def noted_gather(*args):
        begun.append("gather")
        return gather(*args)

    def noted(*args, **keywords):
        begun.append("gradients")
        return differentiate(*args, **keywords)

    for early in (False, True):
        leaves = [x.clone().requires_grad_() for x in given]
        with (
            mock.patch.object(causal, "start_gather", noted_gather),
            mock.patch.object(attention, "start_gather", noted_gather),
        ):
            out = context_attention(*leaves, context, pattern, 0.3)
            result = out.flatten(2) @ weight
            if early:
                attention.gather_ahead(result, out.flatten(2))
            result.register_hook(lambda grad: begun.append("result"))
            with mock.patch.object(causal.pieces, "differentiate", noted):
                result.square().sum().backward(retain_graph=True)
                result.square().sum().backward()
        gradients.append([x.grad for x in leaves])
    return all(map(torch.equal, *gradients)), begun


def unfinished():
    """Whether a backward that stops before attention leaves nothing, without the garbage collector; and later gradients."""
    context = ContextGroup(dist.group.WORLD)
    weight = torch.randn(HEADS * DIM, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        freed, gradients = [], []
        for stops in (True, False):
            draw = torch.Generator().manual_seed(2 + dist.get_rank())
            leaves = [
                torch.randn(BATCH, TOKENS // context.size, heads, DIM, generator=draw).requires_grad_()
                for heads in (HEADS, 2, 2)
            ]
            out = context_attention(*leaves, context, PATTERNS["causal"], 0.3)
            result = out.flatten(2) @ weight
            attention.gather_ahead(result, out)
            if stops:
                torch.autograd.grad(result.sum(), [weight], retain_graph=True)
            gradients.append(torch.autograd.grad(result.sum(), leaves, retain_graph=True))
            if stops:
                torch.autograd.grad(result.sum(), [weight])
            node = weakref.ref(out.grad_fn)
            del out, result, leaves
            freed.append(node() is None)
    finally:
        gc.enable()
    return freed, all(map(torch.equal, *gradients))


def kept_at_the_exchange():
    """Of gathers within a backward and ahead of it, whether their result is in memory while gradients travel."""
    context, gather, exchange = ContextGroup(dist.group.WORLD), causal.start_gather, causal._start_exchange
    results, kept = [], []

    def noted_gather(*args):
        gathering = gather(*args)
        results.append(gathering._finish().untyped_storage()._weak_ref())
        return gathering

    def is_there(result):
        return torch.UntypedStorage._new_with_weak_ptr(result) is not None

    def noted(*args):
        end = time.monotonic() + 2
        while is_there(results[-1]) and time.monotonic() < end:  # gloo's thread may let go of it a moment later
            time.sleep(0.01)
        kept.append(is_there(results[-1]))
        return exchange(*args)

    inside, before = (mock.patch.object(module, "start_gather", noted_gather) for module in (causal, attention))
    with inside, before, mock.patch.object(causal, "_start_exchange", noted):
        for early in (False, True):
            leaves = [torch.randn(BATCH, TOKENS // context.size, heads, DIM).requires_grad_() for heads in (HEADS, 2, 2)]
            out = context_attention(*leaves, context, PATTERNS["causal"], 0.3)
            result = out * 2
            if early:
                attention.gather_ahead(result, out)
            result.sum().backward()
    return kept


def traffic():
    """{pattern: (chunks that arrive in forward, in backward, those of other ranks that some query sees, numbers saved)}."""
    context, found = ContextGroup(dist.group.WORLD), {}
    split = context.split_of(TOKENS)
    unit = 2 * BATCH * split.chunk * 2 * DIM  # of a chunk's keys and values
    for name, pattern in PATTERNS.items():
        q, k, v = (torch.randn(BATCH, 2 * split.chunk, heads, DIM, requires_grad=True) for heads in (HEADS, 2, 2))
        saved, arrived = [], []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x)
        fetches = mock.patch.object(attention._Chunks, "fetch", counted(arrived))
        gathers = mock.patch.object(causal, "start_gather", counted_gather(arrived))
        with fetches, gathers:
            with hooks:
                out = context_attention(q, k, v, context, pattern, 0.3)
            out.sum().backward()
        seen = pattern.mask(BATCH, q.device)[:, 0].unflatten(1, (2 * split.size, -1)).unflatten(3, (2 * split.size, -1))
        seen = seen.any(4).any(2).any(0)  # [chunk of queries, chunk of keys]
        wanted = {number for own in split.chunks() for number in seen[own].nonzero().flatten().tolist()}
        forward, backward = (count / unit for count in arrived)
        found[name] = forward, backward, len(wanted - set(split.chunks())), sum(saved)
    return found


def moved(heads, groups):
    """{exchange: numbers that arrive from other ranks in a forward of plain attention}; of "auto" the name of its exchange."""
    found = {}
    for strategy in ("all_gather", "a2a"):
        context, arrived = ContextGroup(dist.group.WORLD, strategy), []
        q, k, v = (torch.randn(BATCH, TOKENS // context.size, count, DIM) for count in (heads, groups, groups))
        exchange, others = dist.all_to_all_single, (context.size - 1) / context.size

        def noted(out, sent, *, exchange=exchange, others=others, arrived=arrived, **options):
            arrived.append(out.numel() * others)
            return exchange(out, sent, **options)

        with (
            mock.patch.object(attention._Chunks, "fetch", counted(arrived)),
            mock.patch.object(causal, "start_gather", counted_gather(arrived)),
            mock.patch.object(dist, "all_to_all_single", noted),
        ):
            context_attention(q, k, v, context, PATTERNS["causal"], 0.3)
        found[strategy] = sum(arrived)
    return found, ContextGroup(dist.group.WORLD, "auto").resolved(heads, groups).strategy


def counted(arrived):
    """`_Chunks.fetch` that notes how many numbers arrive from other ranks."""
    fetch = attention._Chunks.fetch

    def noted(self, kv):
        fetching = fetch(self, kv)
        wait = fetching.wait

        def counting_wait():
            chunks = wait()
            arrived.append(sum(chunk.numel() for chunk in chunks) - kv.numel())
            return chunks

        fetching.wait = counting_wait
        return fetching

    return noted


def counted_gather(arrived):
    """`start_gather` that notes the same."""
    gather = causal.start_gather

    def noted(kv, group):
        gathering = gather(kv, group)
        arrived.append((dist.get_world_size(group) - 1) * kv.numel())
        return gathering

    return noted


def split_and_gather():
    """Whether a split sequence is gathered again, with each rank's own part of the gradient."""
    context = ContextGroup(dist.group.WORLD)
    x = torch.arange(2.0 * 24 * 3).view(2, 24, 3).requires_grad_()
    own = context.split(x)
    whole = context.gather(own)
    weights = torch.linspace(0, 1, x.numel()).view(x.shape)
    (whole * weights).sum().backward()
    summed = x.grad.clone()
    dist.all_reduce(summed)
    loss = context.sum(own.detach().sum())
    return torch.equal(whole, x), own.shape[1], torch.allclose(summed, weights), loss.item() == x.sum().item()
