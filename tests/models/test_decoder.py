"""Octavo's decoder computes what Hugging Face's models compute: logits, loss and every gradient, with masks and documents."""

import pytest
import torch
from llamas import SHAPES, VOCABULARY, assert_same_gradients, gradients, llama, tokens

from octavo.build import describe, transform
from octavo.errors import InputError

FAMILIES = ["plain", "qwen3", "phi3-partial", "neox", "neox-serial", "mixtral", "qwen3-moe-mixed"]
"""Of `SHAPES`, one of each kind of block."""


def pair(seed=0, **changes):
    """A Hugging Face model and its transformation in float32."""
    reference = llama(seed, **changes)
    return reference, transform(reference, dtype=torch.float32)


def assert_close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.long(lambda shape, length: length < 33 and list(SHAPES).index(shape) % 2 == (length == 1))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 33])
def test_logits_and_every_gradient_are_hugging_faces(shape, length):
    reference, model = pair(length, **SHAPES[shape])
    ids = tokens(3, length)
    theirs, ours = reference(input_ids=ids).logits, model(input_ids=ids).logits
    assert_close(ours, theirs)
    cotangent = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(length))
    theirs.backward(cotangent)
    ours.backward(cotangent)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_every_gradient_are_hugging_faces(shape):
    reference, model = pair(5, **SHAPES[shape])
    ids = tokens(3, 33)
    theirs, ours = reference(input_ids=ids, labels=ids), model(input_ids=ids, labels=ids)
    assert_close(ours.loss, theirs.loss)
    theirs.loss.backward()
    ours.loss.backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("items", [None, 7, 100, torch.tensor(31)])
def test_labels_of_minus_100_do_not_count(items):
    reference, model = pair()
    ids = tokens(4, 17)
    labels = ids.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(9)) < 0.6, -100)
    labels[2] = -100
    labels[0, -1] = -100
    options = {} if items is None else {"num_items_in_batch": items}
    theirs, ours = (m(input_ids=ids, labels=labels, **options).loss for m in (reference, model))
    assert_close(ours, theirs)
    (theirs * 3).backward()
    (ours * 3).backward()
    assert_same_gradients(model, reference)


def test_the_row_of_the_pad_token_is_not_trained_and_others_are():
    reference, model = pair(5, pad_token_id=5)
    ids = tokens(3, 33)
    ids[:, ::4] = 5
    for m in (reference, model):
        m(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients(model, reference)
    rows = model.embedding.weight.grad.abs().sum(1)
    assert rows[5] == 0
    assert (rows[ids[ids != 5]] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_without_targets_has_a_loss_and_gradients_of_zero(dtype):
    model = transform(llama(), dtype=dtype)
    ids = tokens(2, 9)
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_labels_give_the_loss_alone_and_no_labels_the_logits_alone():
    model = transform(llama(), dtype=torch.float32)
    ids = tokens(2, 9)
    with_labels, without = model(input_ids=ids, labels=ids), model(input_ids=ids)
    assert with_labels.logits is None
    assert with_labels.loss.shape == ()
    assert with_labels.loss.dtype == torch.float32
    assert without.loss is None
    assert without.logits.shape == (2, 9, VOCABULARY)
    wanted = torch.nn.functional.cross_entropy(without.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(with_labels.loss, wanted)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, labels=ids).loss, with_labels.loss)


@pytest.mark.parametrize(
    ("side", "shape"), [(side, "plain") for side in ("right", "left", "between")] + [("both", shape) for shape in FAMILIES]
)
def test_padding_is_ignored_as_hugging_face_ignores_it(side, shape):
    reference, model = pair(3, **SHAPES[shape])
    ids = tokens(3, 12)
    mask = torch.ones_like(ids)
    if side != "left":
        mask[1, 7:] = 0
    if side != "right":
        mask[2, :4] = 0
    if side == "between":
        mask[0, 3:5], mask[0, 9], mask[2, 7] = 0, 0, 0
    theirs = reference(input_ids=ids, attention_mask=mask).logits
    ours = model(input_ids=ids, attention_mask=mask).logits
    assert ours.isfinite().all()
    assert_close(ours[mask.bool()], theirs[mask.bool()])
    # What stands in the padding changes nothing.
    other = ids.where(mask.bool(), (ids + 5) % VOCABULARY)
    assert_close(model(input_ids=other, attention_mask=mask).logits[mask.bool()], ours[mask.bool()])
    first = torch.nn.functional.pad(mask[:, :-1], (1, 0)) == 0  # predicted from padding, which each model fills as it likes
    labels = ids.where(mask.bool() & ~first, -100)
    for m in (reference, model):
        m(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    assert_same_gradients(model, reference)


def test_a_mask_of_ones_is_no_mask():
    _, model = pair()
    ids = tokens(2, 10)
    for mask in (torch.ones_like(ids), torch.ones_like(ids).bool(), torch.ones(2, 10)):
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, model(input_ids=ids).logits)


LENGTHS = [(5, 1, 11), (1, 1, 15), (17,), (16, 1), (8, 9)]


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


@pytest.mark.parametrize("shape", FAMILIES)
def test_documents_of_restarting_positions_are_computed_alone(shape):
    model = transform(llama(4, **SHAPES[shape]), dtype=torch.float32)
    ids = tokens(len(LENGTHS), 17)
    together = model(input_ids=ids, position_ids=torch.stack([positions(row) for row in LENGTHS])).logits
    for row, lengths in enumerate(LENGTHS):
        for part, logits in zip(ids[row].split(lengths), together[row].split(lengths), strict=True):
            assert_close(logits[None], model(input_ids=part[None]).logits)


@pytest.mark.parametrize("shape", FAMILIES)
def test_documents_have_the_loss_and_the_gradients_of_each_alone(shape):
    packed, alone = (transform(llama(4, **SHAPES[shape]), dtype=torch.float32) for _ in range(2))
    ids = tokens(2, 17)
    lengths = (5, 1, 11)
    labels = ids.clone()
    labels[:, [0, 5, 6]] = -100  # a document's first token is not predicted from the document before
    loss = packed(input_ids=ids, position_ids=positions(lengths)[None], labels=labels).loss
    loss.backward()
    parts = [part for part in ids.split(lengths, 1) if part.shape[1] > 1]
    total = sum(alone(input_ids=part, labels=part, num_items_in_batch=2 * 14).loss for part in parts)
    total.backward()
    assert_close(loss, total)
    wanted = gradients(alone)
    for name, found in gradients(packed).items():
        assert (found - wanted[name]).abs().max() <= 1e-4 * wanted[name].abs().max(), name


def test_documents_and_padding_together():
    model = transform(llama(6), dtype=torch.float32)
    ids = tokens(1, 14)
    mask = torch.ones_like(ids)
    mask[:, 11:] = 0
    together = model(input_ids=ids, attention_mask=mask, position_ids=positions((6, 8))[None]).logits[0]
    assert_close(together[:6], model(input_ids=ids[:, :6]).logits[0])
    assert_close(together[6:11], model(input_ids=ids[:, 6:11]).logits[0])


@pytest.mark.parametrize("shape", ["llama3-rope", *FAMILIES])
def test_positions_that_go_on_from_elsewhere_are_hugging_faces(shape):
    reference, model = pair(8, **SHAPES[shape])
    ids = tokens(2, 9)
    later = torch.arange(40, 49)[None]
    assert_close(model(input_ids=ids, position_ids=later).logits, reference(input_ids=ids, position_ids=later).logits)


def relative_error(found, wanted):
    return ((found.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("shape", ["all-biases", "llama3-rope", "neox-tanh-tied", *FAMILIES])
def test_bf16_is_as_close_to_float32_as_hugging_faces_bf16(shape):
    half = llama(2, torch.bfloat16, **SHAPES[shape])
    exact = llama(2, **SHAPES[shape])
    exact.load_state_dict(half.state_dict())
    model = transform(half, dtype=torch.bfloat16)
    ids = tokens(4, 33)
    logits = model(input_ids=ids).logits
    assert logits.dtype == torch.bfloat16
    wanted = exact(input_ids=ids).logits
    assert relative_error(logits, wanted) <= 1.2 * relative_error(half(input_ids=ids).logits, wanted)
    losses = [m(input_ids=ids, labels=ids).loss for m in (model, half, exact)]
    assert losses[0].item() == pytest.approx(losses[2].item(), rel=2e-3)
    for loss in losses:
        loss.backward()
    theirs, best = ({n: p.grad for n, p in m.named_parameters()} for m in (half, exact))
    for name, found in gradients(model).items():
        assert found.dtype == torch.bfloat16
        assert relative_error(found, best[name]) <= 1.5 * relative_error(theirs[name], best[name]) + 2e-3, name


@pytest.mark.parametrize(
    "dropout",
    [
        {"model_type": "gpt_neox", "hidden_dropout": 0.2},
        {"model_type": "gpt_neox", "hidden_dropout": 0.2, "use_parallel_residual": False},
        {"model_type": "phi3", "resid_pdrop": 0.2},
        {"model_type": "phi3", "embd_pdrop": 0.2},
    ],
    ids=str,
)
def test_dropout_of_hidden_states_draws_where_hugging_face_draws(dropout):
    reference, model = pair(2, **dropout)
    ids = tokens(3, 17)
    found = []
    for m in (reference, model):
        torch.manual_seed(5)
        found.append(m(input_ids=ids, labels=ids).loss)
        found[-1].backward()
    assert_close(found[1], found[0])
    assert_same_gradients(model, reference)
    assert_close(model.eval()(input_ids=ids).logits, reference.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt_neox", "hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' is not one of relu2, gelu, "),
        ({"model_type": "qwen2", "hidden_act": "relu2"}, "hidden_act = 'relu2' is not one of silu"),
        (
            {"rope_parameters": SHAPES["linear-rope"]["rope_parameters"] | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5: this family rotates whole heads",
        ),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_keeps_its_own_code(changes, reason):
    model = transform(llama(**changes), dtype=torch.float32)
    assert type(model).__module__.startswith("transformers.")
    assert describe(model).own_code.startswith(reason)


@pytest.mark.parametrize("rope", ["plain", "llama3-rope", "linear-rope", "neox", "neox-linear-rope", "phi3-partial"])
def test_angles_stay_float32_in_a_bf16_model(rope):
    reference = llama(**SHAPES[rope])
    model = transform(reference, dtype=torch.bfloat16).to(torch.bfloat16)
    at = torch.arange(0, 100, 7)[None]
    cos, sin, _ = model.rotary(at)
    wanted_cos, wanted_sin = reference.base_model.rotary_emb(torch.zeros(1, 1), at)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos, wanted_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, wanted_sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("label", [-1, -99, VOCABULARY, 2**40])
def test_a_label_outside_the_vocabulary_is_refused_by_name(label):
    model = transform(llama())
    ids = torch.randint(16, (2, 8))
    labels = ids.clone()
    labels[1, 5] = label
    with pytest.raises(InputError, match=rf"labels\[1, 5\] = {label}: .*from 0 to {VOCABULARY - 1}, or -100"):
        model(input_ids=ids, labels=labels)
    labels[1, 5] = -100
    assert model(input_ids=ids, labels=labels).loss.isfinite()


def test_inputs_of_other_shapes_are_refused_by_name():
    model, ids = transform(llama()), torch.randint(VOCABULARY, (2, 8))
    for arguments, words in (
        ({"input_ids": ids[0]}, r"input_ids has shape \[8\]"),
        ({"input_ids": ids[:, :0]}, r"input_ids has shape \[2, 0\]"),
        ({"input_ids": ids.float()}, r"input_ids is torch\.float32"),
        ({"input_ids": ids + VOCABULARY}, r"input_ids\[0, 0\] = "),
        ({"labels": torch.full((2, 9), 3)}, r"labels has shape \[2, 9\], and input_ids \[2, 8\]"),
        ({"labels": torch.full((3, 8), 3)}, r"labels has shape \[3, 8\]"),
        ({"labels": ids[:1]}, r"labels has shape \[1, 8\]"),
        ({"labels": ids.float()}, r"labels is torch\.float32"),
        ({"attention_mask": torch.ones(2, 9)}, r"attention_mask has shape \[2, 9\]"),
        ({"position_ids": torch.arange(9)[None]}, r"position_ids has shape \[1, 9\]"),
    ):
        with pytest.raises(InputError, match=words):
            model(**{"input_ids": ids} | arguments)
    assert model(input_ids=ids, position_ids=torch.arange(8)[None]).logits.shape == (2, 8, VOCABULARY)
