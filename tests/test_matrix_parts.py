"""Optimizers that treat a parameter as one: they train as on Hugging Face's model by `octavo.matrices`, or are refused."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.optim import AdamW, Muon

import octavo
import ranks
from octavo.errors import InputError
from octavo.models.convert import conversion_of
from octavo.process import process

sys.path.insert(0, str(Path(__file__).parent / "models"))
from llamas import SHAPES, hugging_face, llama, tokens

from matrix_ranks import adafactor, muon, refused, trained

QKV = "layers.0.self_attention.qkv.weight"


def transformed(**changes):
    return octavo.transform(llama(**changes), dtype=torch.float32)


def matrices_of(reference):
    """Hugging Face's matrices outside of embedding and head: a parameter, or of stacked experts a function of each expert's."""
    return {name: p for name, p in reference.named_parameters() if ".layers." in name and p.ndim > 1}


def set_gradients(model, reference):
    """The same random gradients on both models."""
    draw = torch.Generator().manual_seed(3)
    for p in reference.parameters():
        p.grad = torch.randn(p.shape, generator=draw)
    way = conversion_of(model)
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        p.grad = way.join(name, tuple(theirs[source].grad for source in way.names(name))).clone()


@pytest.mark.parametrize("make", [muon, adafactor])
@pytest.mark.parametrize(
    "shape", ["plain", "tied", "one-group", "intermediate-odd", "qwen3", "phi3", "neox", "mixtral", "qwen3-moe-mixed"]
)
def test_a_step_is_that_of_the_same_optimizer_on_hugging_faces_matrices(shape, make):
    reference = llama(**SHAPES[shape])
    model = transformed(**SHAPES[shape])
    stacked = {}  # slices of experts, which a reference of its own takes one by one
    theirs = []
    for name, p in matrices_of(reference).items():
        if p.ndim == 2:
            theirs.append(p)
            continue
        for expert, matrix in enumerate(p):
            halves = matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,)
            stacked[name, expert] = [nn.Parameter(half.detach().clone()) for half in halves]
            theirs += stacked[name, expert]
    parts = octavo.matrices(model, "*.layers.*")
    assert sum(p.numel() for p in parts.values()) == sum(p.numel() for p in matrices_of(reference).values())
    ours, wanted = make(parts.values()), make(theirs)
    parts.attach(ours)
    for _ in range(2):
        set_gradients(model, reference)
        for (name, expert), halves in stacked.items():
            grads = reference.get_parameter(name).grad[expert].chunk(len(halves))
            for half, grad in zip(halves, grads, strict=True):
                half.grad = grad.clone()
        ours.step()
        wanted.step()
    with torch.no_grad():
        for (name, expert), halves in stacked.items():
            reference.get_parameter(name)[expert] = torch.cat(halves)
    found = hugging_face(dict(model.named_parameters()), model.spec)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(found[name], p, rtol=2e-3, atol=2e-4, msg=name)
    joined = [p for name, p in model.named_parameters() if name.endswith(("qkv.weight", "fc1_weight", "fc1.weight"))]
    assert all(p.grad is None for p in joined) or shape.startswith("neox")
    untouched = [p for p in parts.others() if p.grad is None]
    assert untouched == []


def test_the_joined_parameters_by_themselves_train_otherwise():
    """What the refusal is for: Muon of the joined matrix is far from that of its parts."""
    model, separate = transformed(), transformed()
    process.models_of_matrices.discard(model)
    parts = octavo.matrices(separate, "model.layers.*")
    both = muon([p for name, p in model.named_parameters() if ".layers." in f".{name}" and p.ndim == 2]), muon(parts.values())
    parts.attach(both[1])
    for one in (model, separate):
        set_gradients(one, llama())
    for optimizer in both:
        optimizer.step()
    difference = (model.get_parameter(QKV) - separate.get_parameter(QKV)).norm()
    update = (separate.get_parameter(QKV) - transformed().get_parameter(QKV)).norm()
    assert difference > 0.1 * update


def test_names_are_hugging_faces():
    reference = llama()
    parts = octavo.matrices(octavo.transform(llama(), dtype=torch.float32))
    wanted = {name: p for name, p in reference.named_parameters() if p.ndim == 2}
    assert parts.keys() == wanted.keys()
    for name, p in parts.items():
        assert torch.equal(p, wanted[name])
    own = llama()
    assert all(octavo.matrices(own)[name] is p for name, p in own.named_parameters() if p.ndim == 2)
    experts = octavo.matrices(transformed(**SHAPES["mixtral"]), "*.experts.*")
    assert len(experts) == 2 * 4 * 3
    assert experts["model.layers.1.mlp.experts.gate_up_proj.3.up"].shape == (48, 48)


class Lamb(torch.optim.Optimizer):
    """Of another library, by its name."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self):
        raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Muon([one for one in p if one.ndim == 2]),
        lambda p: torch.optim.Adafactor(p),
        lambda p: transformers.Adafactor(p, scale_parameter=False, relative_step=False, lr=0.1),
        Lamb,
    ],
)
def test_known_classes_are_refused_at_their_first_step_and_nothing_changes(make):
    model = transformed()
    optimizer = make(list(model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_gradients(model, llama())
    for _ in range(2):  # not once alone
        with pytest.raises(InputError) as raised:
            optimizer.step()
    assert "layers.0.self_attention.qkv.weight joins 3, with interleaved rows" in str(raised.value)
    assert "model.layers.0.self_attn.q_proj.weight" in str(raised.value)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_joined_bias_is_refused_and_single_matrices_are_not():
    model = transformed(**SHAPES["all-biases"])
    bias = dict(model.named_parameters())["layers.0.self_attention.qkv.bias"]
    bias.grad = torch.ones_like(bias)
    with pytest.raises(InputError, match=r"qkv\.bias joins 3"):
        torch.optim.Adafactor([bias]).step()
    set_gradients(model, llama(**SHAPES["all-biases"]))
    muon([p for name, p in model.named_parameters() if name.endswith("proj.weight")]).step()
    AdamW(model.parameters()).step()
    own = octavo.transform(llama(), dtype=torch.float32, blocks="own")
    for p in own.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.Adafactor(own.parameters()).step()


def test_an_optimizer_that_is_not_attached_is_refused_at_its_first_step():
    """It holds copies without gradients: a step would do nothing."""
    model = transformed()
    matrices = octavo.matrices(model, "model.layers.*")
    optimizer = Muon(matrices.values())
    with pytest.raises(InputError, match=r"Muon holds copies of octavo\.matrices without being attached"):
        optimizer.step()
    matrices.attach(optimizer)
    ids = tokens(2, 16)
    model(ids, labels=ids).loss.backward()
    before = model.layers[0].self_attention.qkv.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.layers[0].self_attention.qkv.weight, before)


def test_faults_of_a_loop_are_refused(tmp_path):
    model = transformed()
    for patterns, message in (
        (["*.q_proj.weight"], "select model.layers.0.self_attn.q_proj.weight without model.layers.0.self_attn.k_proj.weight"),
        (["model.layers.*", "head"], "no matrix matches 'head'"),
    ):
        with pytest.raises(InputError, match=message):
            octavo.matrices(model, *patterns)
    with pytest.raises(InputError, match=r"has a model of octavo\.transform in 'inner'"):
        octavo.matrices(nn.ModuleDict({"inner": model}))
    parts = octavo.matrices(model, "model.layers.*")
    with pytest.raises(InputError, match="1 of its parameters are others"):
        parts.attach(muon([*parts.values(), model.embedding.weight]))
    with pytest.raises(InputError, match=r"does not hold model\.layers\.0"):
        parts.attach(muon(list(parts.values())[1:]))
    optimizer = muon(parts.values())
    parts.attach(optimizer)
    with pytest.raises(InputError, match="attached already"):
        parts.attach(muon(parts.values()))
    with pytest.raises(InputError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))
    for call in (octavo.save, octavo.load):
        octavo.save(tmp_path / "saved", model)
        with pytest.raises(InputError, match=r"states of Muon belong to octavo\.matrices"):
            call(tmp_path / "saved", model, optimizer)


def test_weights_that_are_loaded_later_are_those_of_the_next_step(tmp_path):
    other = transformed(seed=5)
    octavo.save(tmp_path / "other", other)
    fresh, model = transformed(seed=5), transformed()
    results = []
    for one, load in ((fresh, False), (model, True)):
        parts = octavo.matrices(one, "model.layers.*")
        optimizer = muon(parts.values())
        parts.attach(optimizer)
        if load:
            octavo.load(tmp_path / "other", one)
        set_gradients(one, llama())
        optimizer.step()
        results.append(one.get_parameter(QKV).detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", ["plain", "qwen3"])
@pytest.mark.parametrize("make", [muon, adafactor])
def test_training_follows_hugging_faces(shape, make):
    reference = llama(**SHAPES[shape])
    matrix = list(matrices_of(reference).values())
    taken = {id(p) for p in matrix}
    both = make(matrix), AdamW([p for p in reference.parameters() if id(p) not in taken], lr=1e-3)
    ids, losses = tokens(4, 16), []
    for _ in range(3):
        loss = reference(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert trained(SHAPES[shape], make)[0] == pytest.approx(losses, rel=1e-3)


@pytest.mark.long(lambda degrees: degrees in ({}, {"hybrid_shard_degree": 1}))
@pytest.mark.parametrize(
    ("shape", "degrees"),
    [
        ("plain", {}),
        ("plain", {"hybrid_shard_degree": 1}),
        ("plain", {"hybrid_shard_degree": 2, "context_parallel_degree": 2}),
        ("mixtral", {"expert_parallel_degree": 2}),
    ],
)
def test_ranks_share_the_matrices_and_train_as_one(shape, degrees):
    alone = trained(SHAPES[shape], muon)
    found = ranks.run(2, trained, SHAPES[shape], muon, degrees)
    names = [name for _, _, states in found for name in states]
    assert sorted(names) == alone[2]
    assert all(states for _, _, states in found)
    for losses, weights, _ in found:
        assert losses == pytest.approx(alone[0], rel=1e-3)
        for name, whole in weights.items():
            torch.testing.assert_close(whole, alone[1][name], rtol=5e-3, atol=5e-3, msg=name)


@pytest.mark.parametrize("degrees", [{}, {"hybrid_shard_degree": 1}])
def test_the_parameters_of_a_sharded_model_are_refused_on_every_rank(degrees):
    for messages in ranks.run(2, refused, degrees):
        assert len(messages) == 2
        assert all("layers.0.self_attention.qkv.weight joins 3, with interleaved rows" in text for text in messages)
