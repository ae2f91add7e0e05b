"""The output head with its loss beside float64 by hand, wide and in FP8, and decoders whose head runs in FP8."""

from __future__ import annotations

import copy
import gc

import plain
import pytest
import torch
from transformers import LlamaConfig

import octavo
from building import built_model
from octavo.errors import InputError
from octavo.fp8.formats import E5M2
from octavo.fp8.linear import LinearGemms
from octavo.fp8.scaling import ModuleState, load_state_records, state_records
from octavo.kernels.cross_entropy import Objective
from octavo.nn import head
from octavo.nn.head import linear_cross_entropy

TOKENS, HIDDEN, WORDS = 37, 24, 101
OBJECTIVES = {
    "plain": Objective(),
    "smoothed": Objective(label_smoothing=0.1),
    "z-loss": Objective(z_loss=0.01),
    "both": Objective(label_smoothing=0.2, z_loss=0.003),
}
RECIPES = {"delayed": octavo.recipe.DelayedScaling(amax_history_len=2), "current": octavo.recipe.CurrentScaling()}


def drawn(dtype=torch.float32, tokens=TOKENS):
    """hidden, weight, targets (some of no account) and their number."""
    hidden, weight = plain.fresh(tokens, HIDDEN, seed=1), plain.fresh(WORDS, HIDDEN, seed=2, size=0.3)
    target = torch.randint(WORDS, (tokens,), generator=torch.Generator().manual_seed(3))
    target[::5] = -100
    count = (target != -100).sum().float()
    return hidden.to(dtype).requires_grad_(), weight.requires_grad_(), target, count


def by_hand(hidden, weight, target, count, objective):
    """Loss and gradients in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight.t()
    total = logits.exp().sum(-1).log()
    real = target != -100
    aimed_at = torch.full_like(logits, objective.label_smoothing / WORDS)
    aimed_at[torch.arange(len(target)), target.clamp(min=0)] += 1 - objective.label_smoothing
    losses = (aimed_at * (total[:, None] - logits)).sum(-1) + objective.z_loss * total**2
    loss = losses[real].sum() / count.double()
    return loss, *torch.autograd.grad(loss, (hidden, weight))


def gemms(weight, recipe, dtype):
    """Those of a head in FP8, which must outlive their use."""
    module = torch.nn.Linear(HIDDEN, WORDS, bias=False)
    module.weight = torch.nn.Parameter(weight.detach())
    return LinearGemms(ModuleState(module), weight, recipe, dtype, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_for_the_gradient_alone_has_the_bytes_of_both(recipe):
    _, weight, _, _ = drawn(torch.bfloat16)
    alone, both = (
        gemms(weight, RECIPES[recipe], torch.bfloat16).weight(weight, rowwise=row, columnwise=True) for row in (False, True)
    )
    assert alone.rowwise_data is None
    assert torch.equal(alone.columnwise_data.view(torch.uint8), both.columnwise_data.view(torch.uint8))
    assert torch.equal(alone.columnwise_scale_inv, both.columnwise_scale_inv)


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def assert_head(loss, hidden, weight, wanted, *, loss_off, off):
    assert abs(loss.double() - wanted[0]) <= loss_off * wanted[0]
    for found, expected, name in ((hidden.grad, wanted[1], "hidden"), (weight.grad, wanted[2], "weight")):
        assert relative(found, expected) <= off, name


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [1, 5 * WORDS * 4, 1 << 30], ids=["a token", "5 tokens", "one chunk"])
def test_loss_and_gradients_are_float64s(objective, chunk, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk)
    hidden, weight, target, count = drawn()
    loss = linear_cross_entropy(hidden, weight, target, count, objective=OBJECTIVES[objective])
    loss.backward()
    wanted = by_hand(hidden, weight, target, count, OBJECTIVES[objective])
    assert_head(loss, hidden, weight, wanted, loss_off=1e-6, off=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_16_bits(dtype, objective):
    hidden, weight, target, count = drawn(dtype)
    factor = 2.0**14 if dtype == torch.float16 else 1.0
    loss = linear_cross_entropy(hidden, weight, target, count, objective=OBJECTIVES[objective])
    (loss * factor).backward()
    wanted = by_hand(hidden, weight, target, count, OBJECTIVES[objective])
    assert_head(loss, hidden, weight, (wanted[0], *(grad * factor for grad in wanted[1:])), loss_off=0.005, off=0.015)


@pytest.mark.parametrize("logits", [True, False], ids=["all", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_fp8_it_is_float64_but_for_its_rounding(recipe, objective, dtype, logits):
    hidden, weight, target, count = drawn(dtype)
    uses, how = gemms(weight, RECIPES[recipe], dtype), {"objective": OBJECTIVES[objective]}
    for _ in range(2):
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, target, count, **how, fp8=uses, fp8_logits=logits)
        loss.backward()
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, target, count, **how)) != logits
    wanted = by_hand(hidden, weight, target, count, OBJECTIVES[objective])
    # Logits are off by two roundings to E4M3; the gradient of the hidden states by one to E5M2 and one to E4M3 more.
    assert_head(loss, hidden, weight, wanted, loss_off=0.01, off=0.08)
    assert relative(hidden.grad, wanted[1]) > 0.005
    assert hidden.grad.dtype == dtype
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("logits", [True, False], ids=["all", "backward"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_fp8_chunks_change_no_token(recipe, logits, monkeypatch):
    found = []
    for chunk in (1 << 30, 7 * WORDS * 4):
        monkeypatch.setattr(head, "CHUNK_BYTES", chunk)
        hidden, weight, target, count = drawn()
        uses = gemms(weight, RECIPES[recipe], torch.float32)
        loss = linear_cross_entropy(hidden, weight, target, count, fp8=uses, fp8_logits=logits)
        loss.backward()
        found.append((loss, hidden.grad, weight.grad))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [TOKENS, 40], ids=["ragged", "in fours"])
def test_in_fp8_a_weights_gradient_in_parts_is_that_of_one_product(tokens, dtype, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * WORDS * dtype.itemsize)
    found = []
    for kept, aligned in ((1 << 30, 128), (1 << 30, 32), (8 * (WORDS + 11), 32), (1, 128)):
        monkeypatch.setattr(head, "BUFFER_BYTES", kept)
        monkeypatch.setattr(head, "TRANSPOSED_BYTES", 1)
        monkeypatch.setattr(head, "_ALIGNED", aligned)  # words of a transposed piece
        hidden, weight, target, count = drawn(dtype, tokens)
        loss = linear_cross_entropy(hidden, weight, target, count, fp8=gemms(weight, RECIPES["current"], dtype))
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for parts in found[1:]:
        torch.testing.assert_close(parts, found[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("logits", [True, False], ids=["all", "backward"])
def test_kept_gradients_are_gone_before_more_are_kept(logits, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * WORDS * 4)
    monkeypatch.setattr(head, "BUFFER_BYTES", 8 * (WORDS + 11))
    multiply, alive = head._Fp8Head._multiply, []

    def multiply_and_look(self):
        address = self.buffer.untyped_storage().data_ptr()
        multiply(self)
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == E5M2.dtype]
        alive.append(sum(x.untyped_storage().data_ptr() == address for x in tensors))

    monkeypatch.setattr(head._Fp8Head, "_multiply", multiply_and_look)
    hidden, weight, target, count = drawn()
    linear_cross_entropy(
        hidden, weight, target, count, fp8=gemms(weight, RECIPES["current"], torch.float32), fp8_logits=logits
    ).backward()
    assert len(alive) == 5
    assert not any(alive)


@pytest.mark.parametrize("logits", [True, False], ids=["all", "backward"])
def test_micro_batches_behind_one_without_tokens_use_the_weight_of_their_step(logits):
    hidden, weight, target, count = drawn()
    recipe, module = RECIPES["current"], torch.nn.Linear(HIDDEN, WORDS, bias=False)
    module.weight = torch.nn.Parameter(weight.detach())
    state = ModuleState(module)

    def gradient(tokens, first):
        hidden.grad = None
        fp8 = LinearGemms(state, module.weight, recipe, torch.float32, first)
        part = slice(0, tokens)
        linear_cross_entropy(hidden[part], module.weight, target[part], count, fp8=fp8, fp8_logits=logits).backward()
        return hidden.grad

    wanted = gradient(TOKENS, True)
    with torch.no_grad():
        module.weight *= 3
    gradient(0, True)
    found = gradient(TOKENS, False)
    assert torch.equal(found, gradient(TOKENS, True))
    assert not torch.equal(found, wanted)


@pytest.mark.parametrize("logits", [True, False], ids=["all", "backward"])
@pytest.mark.parametrize("fp8", [None, *RECIPES])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen, fp8, logits):
    def gradients(hidden_trains, weight_trains):
        hidden, weight, target, count = drawn()
        hidden.requires_grad_(hidden_trains)
        weight.requires_grad_(weight_trains)
        uses = None if fp8 is None else gemms(weight, RECIPES[fp8], torch.float32)
        loss = linear_cross_entropy(hidden, weight, target, count, fp8=uses, fp8_logits=logits)
        if hidden_trains or weight_trains:
            loss.backward()
        else:
            assert not loss.requires_grad
        return loss.detach(), hidden.grad, weight.grad

    wanted, found = gradients(True, True), gradients(frozen == "weight", frozen == "hidden")
    assert torch.equal(found[0], wanted[0])
    assert found[1] is None if frozen != "weight" else torch.equal(found[1], wanted[1])
    assert found[2] is None if frozen != "hidden" else torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("logits", [True, False], ids=["all", "backward"])
@pytest.mark.parametrize("fp8", [None, *RECIPES])
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_predict(tokens, fp8, logits):
    hidden, weight, target, _ = drawn(tokens=tokens)
    target.fill_(-100)
    uses = None if fp8 is None else gemms(weight, RECIPES[fp8], torch.float32)
    loss = linear_cross_entropy(hidden, weight, target, torch.tensor(1.0), fp8=uses, fp8_logits=logits)
    loss.backward()
    assert loss == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("fp8", [None, "current"])
def test_a_kept_graph_gives_its_gradients_twice_and_no_second_derivative(fp8):
    hidden, weight, target, count = drawn()
    uses = None if fp8 is None else gemms(weight, RECIPES[fp8], torch.float32)
    loss = linear_cross_entropy(hidden, weight, target, count, fp8=uses)
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="no second derivative: call backward without create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("fp8", [None, *RECIPES])
def test_an_infinite_or_nan_state_shows_in_the_loss(fp8):
    for value in (torch.nan, torch.inf):
        hidden, weight, target, count = drawn()
        with torch.no_grad():
            hidden[1, 2] = value
        uses = None if fp8 is None else gemms(weight, RECIPES[fp8], torch.float32)
        loss = linear_cross_entropy(hidden, weight, target, count, fp8=uses)
        assert loss.isnan() or (fp8 and value == torch.inf and loss.isfinite())  # the largest number of the format


def config(**changes):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=WORDS, **(shape | {"num_key_value_heads": 1} | changes))


def decoder(fp8_head=True, dtype=torch.bfloat16, **changes):
    return built_model(config(**changes), dtype=dtype, params_dtype=torch.float32, device="cpu", seed=5, fp8_head=fp8_head)


def batch(seed):
    return torch.randint(WORDS, (4, 17), generator=torch.Generator().manual_seed(seed))


def train(model, steps, recipe, start=0, rate=0.3):
    losses = []
    for step in range(start, start + steps):
        ids = batch(step % 2)
        with octavo.fp8_autocast(fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= rate * p.grad
        model.zero_grad()
        losses.append(loss.item())
    return losses


ALL_RECIPES = {**RECIPES, "rowwise": octavo.recipe.RowwiseScaling(), "block": octavo.recipe.BlockScaling()}


@pytest.mark.long(lambda recipe, tied, fp8_head: (list(ALL_RECIPES).index(recipe) + tied) % 2 == (fp8_head is True))
@pytest.mark.parametrize("fp8_head", [True, "backward"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_decoder_with_a_head_in_fp8_learns_as_one_without(recipe, tied, fp8_head):
    found, wanted = (train(decoder(fp8, tie_word_embeddings=tied), 12, ALL_RECIPES[recipe]) for fp8 in (fp8_head, False))
    assert wanted[-1] < 0.8 * wanted[0]
    assert found != wanted
    assert (found[0] == wanted[0]) == (fp8_head == "backward")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0.03, atol=0)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_inspect_shows_the_head_whatever_the_recipe_with_one_scale_an_operand(recipe):
    model = decoder()
    train(model, 2, ALL_RECIPES[recipe])
    report = octavo.fp8.inspect(model)["head"]
    for operand in ("input", "weight"):
        assert report[operand]["format"] == "E4M3"
        assert report[operand]["scale"].shape == ()
        assert report[operand]["scale"] != 1
        assert (report[operand]["amax_history"] is not None) == (recipe == "delayed")
    assert not any(entry["saturated"] for entry in report.values())


def test_describe_names_the_head():
    names = {
        layer.name: layer for fp8 in (True, False) for layer in octavo.describe(decoder(fp8)).layers if layer.name == "head"
    }
    assert not names["head"].fp8
    assert octavo.describe(decoder(True)).fp8_layers == octavo.describe(decoder(False)).fp8_layers + 1
    (found,) = [layer for layer in octavo.describe(decoder(True)).layers if layer.name == "head"]
    assert found.fp8
    assert found.shape == (WORDS, 32)
    assert "logits" not in found.reason
    (found,) = [layer for layer in octavo.describe(decoder("backward")).layers if layer.name == "head"]
    assert found.fp8
    assert "logits in high precision" in found.reason


def test_a_decoder_with_a_head_in_fp8_goes_on_where_it_was():
    recipe = octavo.recipe.DelayedScaling(amax_history_len=4)
    model = decoder()
    train(model, 3, recipe)
    records = state_records(model)
    assert {name.rsplit(".", 2)[1] for name in records if name.startswith("head.")} >= {"input", "weight"}
    twin = decoder()
    twin.load_state_dict(model.state_dict())
    load_state_records(twin, records, recipe)
    copied = copy.deepcopy(model)
    wanted = train(model, 3, recipe, start=3)
    assert train(twin, 3, recipe, start=3) == wanted
    assert train(copied, 3, recipe, start=3) == wanted
    for name, value in state_records(model).items():
        assert torch.equal(state_records(twin)[name], value), name
    forgetful = decoder()
    forgetful.load_state_dict(model.state_dict())
    load_state_records(forgetful, {n: r for n, r in records.items() if not n.startswith("head.")}, recipe)
    assert train(forgetful, 3, recipe, start=3) != wanted


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("frozen", ["head", "all but the head"])
def test_a_frozen_head_or_body(frozen, recipe):
    def gradients(freeze):
        model = decoder()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not freeze or name.startswith("head") != (frozen == "head"))
        ids = batch(0)
        with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]):
            model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    wanted, found = gradients(False), gradients(True)
    for name, grad in found.items():
        if name.startswith("head") == (frozen == "head"):
            assert grad is None, name
        else:
            assert torch.equal(grad, wanted[name]), name


def test_outside_of_an_autocast_and_for_logits_the_head_is_wide():
    ids = batch(0)
    plain_head, *fp8_heads = decoder(False), decoder(True), decoder("backward")
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain_head, *fp8_heads)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    with octavo.fp8_autocast(fp8_recipe=RECIPES["current"]):
        wanted, *found = (model(input_ids=ids).logits for model in (plain_head, *fp8_heads))
    assert all(torch.equal(logits, wanted) for logits in found)


def test_another_kind_of_head_is_refused():
    with pytest.raises(InputError, match="fp8_head = 'backwards' is not supported: use False, True, or \"backward\""):
        decoder("backwards")


def test_an_evaluation_leaves_no_trace_in_the_heads_history():
    model = decoder()
    recipe = octavo.recipe.DelayedScaling(amax_history_len=4)
    train(model, 1, recipe)
    before = state_records(model)
    with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=recipe):
        model(input_ids=batch(1), labels=batch(1))
    for name, value in state_records(model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("fp8_head", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_a_float32_decoder_under_torch_autocast(recipe, fp8_head):
    """The head's products run in autocast's dtype, its sums do not."""
    ids = batch(0)
    found = []
    for autocast in (False, True):
        model = decoder(fp8_head, torch.float32)
        fp8 = octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=RECIPES.get(recipe))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), fp8:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        found.append((loss, model.head.weight.grad, model.embedding.weight.grad))
    for wide, narrow in zip(*found, strict=True):
        assert 0 < (wide - narrow).norm() <= 0.04 * wide.norm()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_heads_weight_is_kept_over_micro_batches(recipe):
    model, ids = decoder(), batch(0)
    losses = []
    for first in (True, False, True):
        with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]):
            losses.append(model(input_ids=ids, labels=ids, is_first_microbatch=first).loss)
        losses[-1].backward()
        with torch.no_grad():
            model.head.weight.zero_()
    assert abs(losses[1] - losses[0]) < 0.05 * losses[0]
    assert losses[2].item() == pytest.approx(torch.tensor(float(WORDS)).log().item(), rel=1e-4)
