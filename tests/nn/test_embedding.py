"""The embedding as a module, and a head with its weight, against PyTorch's embedding and autograd's sum of both gradients."""

import copy

import plain
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.nn import embedding
from octavo.nn.embedding import Embedding, SharedWeight
from octavo.nn.head import linear_cross_entropy

WORDS, COLUMNS = 31, 12
COUNT = torch.tensor(20.0)


def make(padding=None, dtype=torch.float32, params_dtype=torch.float32):
    module = Embedding(WORDS, COLUMNS, padding=padding, dtype=dtype, params_dtype=params_dtype)
    with torch.no_grad():
        module.weight.copy_(plain.fresh(WORDS, COLUMNS, seed=1))
    return module


def drawn(*shape):
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_pytorchs(params_dtype, dtype, padding):
    module, ids = make(padding, dtype, params_dtype), drawn(3, 40)
    d_out = plain.fresh(3, 40, COLUMNS, seed=3).to(dtype)
    embedded = module(ids)
    assert torch.equal(embedded, functional.embedding(ids, module.weight).to(dtype))
    embedded.backward(d_out)
    weight = module.weight.detach().double().requires_grad_()
    functional.embedding(ids, weight, padding_idx=padding).backward(d_out.double())
    assert module.weight.grad.dtype == params_dtype
    epsilon = torch.finfo(params_dtype).eps
    torch.testing.assert_close(module.weight.grad.double(), weight.grad, rtol=0.51 * epsilon, atol=1e-5)


def test_it_is_a_module_like_pytorchs():
    module, ids = make(4), drawn(5)
    assert isinstance(module, nn.Embedding)
    assert repr(module) == repr(nn.Embedding(WORDS, COLUMNS, padding_idx=4))
    assert (module.weight[4] != 0).any()
    again = copy.deepcopy(module)
    assert torch.equal(again(ids), module(ids))
    hook = module.register_forward_hook(lambda module, inputs, output: output * 2)
    assert torch.equal(module(ids), 2 * again(ids))
    hook.remove()
    module(ids).mul_(3).sum().backward()  # in place, as a hook may write
    assert torch.equal(module.weight.grad.sum(1), 3.0 * COLUMNS * ids.bincount(minlength=WORDS) * (torch.arange(WORDS) != 4))


def test_a_negative_padding_counts_from_the_end():
    module = make(-1)
    module(torch.arange(WORDS)).sum().backward()
    assert module.weight.grad.sum(1).tolist() == [COLUMNS] * (WORDS - 1) + [0]


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse", "max_norm"])
def test_other_options_are_pytorchs(option):
    module, ids = make(), drawn(40)
    options = {option: 0.5 if option == "max_norm" else True}
    vars(module).update(options)
    weight = module.weight.detach().clone().requires_grad_()
    functional.embedding(ids, weight, **options).sum().backward()
    module(ids).sum().backward()
    assert module.weight.grad.is_sparse == weight.grad.is_sparse
    assert torch.equal(module.weight.grad.to_dense(), weight.grad.to_dense())


def changed(module, kind):
    """The embedding's forward as a user may replace it."""
    plain_forward = module.forward
    if kind == "subclass":
        module.__class__ = type("Own", (type(module),), {"forward": lambda self, ids: Embedding.forward(self, ids)})
    elif kind == "without gradients":
        module.forward = torch.no_grad()(plain_forward)
    else:
        module.forward = lambda ids: plain_forward(ids)


@pytest.mark.parametrize("kind", ["subclass", "another forward", "without gradients", "no gradients inside"])
def test_a_changed_embedding_of_a_tied_model(kind):
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config)
    ours, ids = octavo.transform(theirs, dtype=torch.float32), drawn(2, 9)
    theirs = octavo.to_huggingface(ours).train()
    for model in (ours, theirs):
        part = model.get_input_embeddings()
        if kind == "no gradients inside":  # and the class's own forward
            part.register_forward_pre_hook(lambda *given: torch.set_grad_enabled(False) and None)
            part.register_forward_hook(lambda *given: torch.set_grad_enabled(True) and None)
        elif model is ours:
            changed(part, kind)
        elif kind == "without gradients":
            part.forward = torch.no_grad()(part.forward)
        model(input_ids=ids, labels=ids).loss.backward()
    found, wanted = (model.get_input_embeddings().weight.grad for model in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_frozen_weight_has_no_gradient():
    module, shared = make().requires_grad_(False), SharedWeight()
    embedded = module(drawn(5), shared=shared)
    assert not embedded.requires_grad
    assert not shared.of(module.weight).requires_grad
    embedded.requires_grad_()  # as adapters ask for
    with torch.no_grad():
        assert not make()(drawn(5)).requires_grad


def test_second_derivatives_are_refused():
    module = make()
    with pytest.raises(RuntimeError, match="embeddings have no second derivative"):
        torch.autograd.grad(module(drawn(5)).square().sum(), module.weight, create_graph=True)


def test_a_compiled_embedding_is_the_eager_one():
    module, ids = make(4, torch.bfloat16), drawn(3, 7)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ids), module(ids))


def test_a_head_with_another_weight_reads_its_own():
    module, shared, other = make(), SharedWeight(), nn.Parameter(torch.randn(WORDS, COLUMNS))
    assert shared.of(other) is other
    module(drawn(5), shared=shared)
    assert shared.of(other) is other
    assert shared.of(module.weight) is not module.weight
    assert shared.of(module.weight).data_ptr() == module.weight.data_ptr()


@pytest.fixture
def added(monkeypatch):
    """For each backward of an embedding: whether it was added to another gradient."""
    seen, run = [], embedding.embedding_backward

    def backward(*arguments):
        seen.append(arguments[-1] is not None)
        return run(*arguments)

    monkeypatch.setattr(embedding, "embedding_backward", backward)
    return seen


def tied(module, ids, *, shares=True, head=True, rows=True):
    """A loss whose head has the embedding's weight; of both, of the head's part alone, or of the rows alone."""
    shared = SharedWeight()
    hidden = module(ids, shared=shared)
    hidden = hidden if rows else hidden.detach()
    weight = shared.of(module.weight) if shares else module.weight
    # Multiplied as a scale of losses does, so that the head's backward has something to do.
    loss = 3 * linear_cross_entropy(hidden.tanh(), weight, ids.roll(-1), COUNT)
    return loss if head else hidden.square().sum()


def gradient(module, **how):
    module.weight.grad = None
    tied(module, drawn(50), **how).backward()
    return module.weight.grad.clone()


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("part", [{}, {"rows": False}, {"head": False}], ids=["both", "head", "rows"])
def test_both_gradients_are_autograds_sum(added, part, padding):
    module = make(padding)
    assert torch.equal(gradient(module, **part), gradient(module, shares=False, **part))
    assert added == ([] if part == {"rows": False} else [part == {}, False])


@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_gradients_are_those_of_float64(added, params_dtype):
    module, ids = make(params_dtype=params_dtype), drawn(50)
    found = gradient(module)
    assert added == [True]
    weight = module.weight.detach().double().requires_grad_()
    logits = functional.embedding(ids, weight).tanh() @ weight.t()
    (3 * functional.cross_entropy(logits, ids.roll(-1), reduction="sum") / COUNT.double()).backward()
    assert (found.double() - weight.grad).norm() <= (2e-6 if params_dtype == torch.float32 else 8e-3) * weight.grad.norm()


def test_a_graph_that_is_kept_gives_the_same_gradients_again(added):
    module, ids = make(), drawn(50)
    wanted = gradient(module, shares=False)
    loss = tied(module, ids)
    first, second = (torch.autograd.grad(loss, module.weight, retain_graph=True)[0] for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    module.weight.grad = None
    loss.backward()
    for found in (first, second, module.weight.grad):
        assert torch.equal(found, wanted)
    assert added == [False, True, True, True]


def test_micro_batches_accumulate(added):
    grads = []
    for shares in (True, False):
        module = make()
        for ids in (drawn(50), drawn(50).roll(7) // 2, drawn(20)):
            tied(module, ids, shares=shares).backward()
        grads.append(module.weight.grad)
    assert torch.equal(*grads)
    assert added == [True] * 3 + [False] * 3


def test_two_losses_of_one_backward():
    grads = []
    for shares in (True, False):
        module = make()
        sum(tied(module, ids, shares=shares) for ids in (drawn(50), drawn(20))).backward()
        grads.append(module.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


def test_hooks_of_the_parameter_see_one_gradient():
    module = make()
    wanted = gradient(module, shares=False)
    seen, after = [], []
    module.weight.register_hook(lambda grad: seen.append(grad.clone()))
    module.weight.register_post_accumulate_grad_hook(lambda weight: after.append(weight.grad.clone()))
    gradient(module)
    for found in (seen, after):
        assert len(found) == 1
        assert torch.equal(found[0], wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_model_has_the_same_gradient(reentrant):
    module, ids, trained = make(), drawn(50), torch.ones((), requires_grad=True)
    wanted = gradient(module, shares=False)
    module.weight.grad = None
    checkpoint(lambda scale: tied(module, ids) * scale, trained, use_reentrant=reentrant).backward()
    assert torch.equal(module.weight.grad, wanted)


def test_a_recomputed_embedding_alone_has_the_same_gradient():
    module, ids, shared = make(), drawn(50), SharedWeight()
    wanted = gradient(module, shares=False)
    module.weight.grad = None
    hidden = checkpoint(lambda ids: module(ids, shared=shared), ids, use_reentrant=False)
    (3 * linear_cross_entropy(hidden.tanh(), shared.of(module.weight), ids.roll(-1), COUNT)).backward()
    assert torch.equal(module.weight.grad, wanted)


def test_saved_tensors_may_be_packed():
    module = make()
    wanted = gradient(module, shares=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        found = gradient(module)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("labels", [True, False], ids=["loss", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tied_decoder_has_autograds_sum(added, monkeypatch, dtype, labels):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = octavo.transform(LlamaForCausalLM(config), dtype=dtype, params_dtype=dtype, device="cpu")
    ids = torch.randint(64, (2, 20))
    grads = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(SharedWeight, "of", lambda self, weight: weight)
        model.zero_grad()
        output = model(input_ids=ids, labels=ids if labels else None)
        (output.loss if labels else output.logits.float().square().mean()).backward()
        assert model.head.weight.grad is model.embedding.weight.grad
        grads.append(model.embedding.weight.grad)
    assert added == [labels, False]
    one, other = grads
    if dtype == torch.float32 or not labels:
        assert torch.equal(one, other)
    else:  # autograd's sum has been rounded once more
        assert 0 < (one.float() - other.float()).norm() <= 2**-8 * other.float().norm()
