"""Losses of the routers of experts, and their settings: beside Hugging Face's model and the definitions in plain PyTorch."""

import pytest
import torch
from llamas import SHAPES, assert_same_gradients, llama, tokens

import octavo
from octavo.config import MoeConfig
from octavo.errors import InputError
from octavo.models import convert

MODELS = {
    "mixtral": SHAPES["mixtral"],
    "balanced": SHAPES["mixtral-balanced"],
    "qwen3": SHAPES["qwen3-moe"],
    "some layers": SHAPES["qwen3-moe-mixed"],
}
BOTH = {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}


def reference_loss(model, ids, labels, mask, aux, z):
    """(loss, balancing loss, z loss) of Hugging Face's model: its cross entropy and logits, the losses by their definitions."""
    output = model(input_ids=ids, labels=labels, attention_mask=mask, output_router_logits=True)
    plain = model(input_ids=ids, labels=labels, attention_mask=mask, output_router_logits=False).loss
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    layers = [logits.view(*ids.shape, -1)[real].float() for logits in output.router_logits]
    logits = torch.cat(layers)
    probabilities = logits.softmax(-1)
    top_k = model.config.num_experts_per_tok
    visits = torch.zeros_like(logits).scatter_(1, probabilities.topk(top_k).indices, 1.0)
    balance = logits.shape[1] * (visits.mean(0) * probabilities.mean(0)).sum()
    z_loss = torch.stack([layer.exp().sum(-1).log().square().mean() for layer in layers]).mean()
    return plain + aux * balance + z * z_loss, balance, z_loss


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_value_and_every_gradient_are_those_of_the_definitions(name, padded):
    reference = llama(7, **MODELS[name])
    model = octavo.transform(llama(7, **MODELS[name]), dtype=torch.float32, moe=BOTH)
    ids, mask = tokens(3, 21), None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, 13:] = 0
        mask[2, 4:] = 0
    labels = ids if mask is None else ids.where(mask.bool(), -100)
    wanted, balance, z_loss = reference_loss(reference, ids, labels, mask, aux=0.3, z=0.2)
    found = model(input_ids=ids, labels=labels, attention_mask=mask).loss
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    wanted.backward()
    found.backward()
    assert_same_gradients(model, reference)
    torch.testing.assert_close(model.take_routing()[1], torch.stack((balance, z_loss)), rtol=1e-5, atol=1e-5)
    assert model.take_routing() is None


def test_aux_loss_is_hugging_faces_whatever_the_config_says():
    reference = llama(7, **MODELS["mixtral"], output_router_logits=True, router_aux_loss_coef=0.3)
    plain = llama(7, **MODELS["mixtral"])
    ids = tokens(3, 21)
    wanted = reference(input_ids=ids, labels=ids).loss
    by_config = octavo.transform(reference, dtype=torch.float32)
    settings = {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.3}
    by_settings = octavo.transform(plain, dtype=torch.float32, moe=settings)
    assert by_config.spec == by_settings.spec
    for model in (by_config, by_settings):
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "moe", "coefficients"),
    [
        ({}, {}, (0.0, 0.0, 0.0)),
        ({}, {"moe_load_balancing": "aux_loss"}, (0.25, 0.0, 0.0)),
        ({"output_router_logits": True, "router_jitter_noise": 0.1}, {}, (0.25, 0.0, 0.1)),
        ({"output_router_logits": True}, {"moe_load_balancing": "none", "router_jitter_noise": 0.2}, (0.0, 0.0, 0.2)),
        ({"output_router_logits": True}, {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1}, (0.0, 1.0, 0.0)),
        ({"output_router_logits": True}, {"moe_aux_loss_coeff": 2}, (2.0, 0.0, 0.0)),
        ({"router_jitter_noise": 0.1}, {"moe_z_loss_coeff": 0.5, "router_jitter_noise": 0.0}, (0.0, 0.5, 0.0)),
    ],
    ids=str,
)
def test_settings_go_before_the_models_config(config, moe, coefficients):
    model = octavo.transform(llama(**SHAPES["mixtral"], router_aux_loss_coef=0.25, **config), moe=MoeConfig(**moe))
    assert (model.spec.balance, model.spec.router_z_loss, model.spec.jitter) == coefficients
    assert model.layers[0].layernorm_moe.config.jitter == coefficients[2]


def test_micro_batches_count_by_their_share_of_the_targets():
    model = octavo.transform(llama(7, **MODELS["mixtral"]), dtype=torch.float32, moe=BOTH)
    ids = tokens(4, 21)
    labels = ids.clone()
    labels[3, 6:] = -100
    parts, wanted, recorded = [slice(0, 3), slice(3, 4)], 0.0, torch.zeros(2)
    count = int((labels[:, 1:] != -100).sum())
    for part in parts:
        share = int((labels[part, 1:] != -100).sum()) / count
        loss = model(input_ids=ids[part], labels=labels[part]).loss
        wanted += share * loss
        recorded += share * model.take_routing()[1]
    found = sum(model(input_ids=ids[part], labels=labels[part], num_items_in_batch=count).loss for part in parts)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.take_routing()[1], recorded, rtol=1e-6, atol=0)


def test_labels_of_minus_100_alone_leave_the_losses_of_the_routers():
    model = octavo.transform(llama(7, **MODELS["mixtral"]), dtype=torch.float32, moe=BOTH)
    ids = tokens(2, 9)
    nothing = torch.full_like(ids, -100)
    loss = model(input_ids=ids, labels=nothing).loss
    balance, z_loss = model.take_routing()[1]
    torch.testing.assert_close(loss, 0.3 * balance + 0.2 * z_loss)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    beside_others = model(input_ids=ids, labels=nothing, num_items_in_batch=16).loss  # no share of the step
    assert beside_others.item() == 0.0
    assert not model.take_routing()[1].any()


@pytest.mark.parametrize("balancing", ["aux_loss", "sinkhorn", "balanced"])
@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputation_changes_no_bit_and_repeats_the_noise_of_routers(recompute, balancing):
    found = []
    moe = (BOTH if balancing == "aux_loss" else {"moe_load_balancing": balancing, "moe_z_loss_coeff": 0.2}) | {
        "router_jitter_noise": 0.2
    }
    for again in ({}, {"recompute": recompute}, {"recompute": recompute, "offload": True}):
        model = octavo.transform(llama(7, **MODELS["mixtral"]), dtype=torch.float32, moe=moe, **again)
        ids = tokens(3, 21)
        torch.manual_seed(3)
        with octavo.fp8_autocast(enabled=True):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()], model.take_routing()))
    one, gradients, routing = found[0]
    for other, again, routing_again in found[1:]:
        assert torch.equal(one, other)
        assert all(map(torch.equal, gradients, again))
        assert all(map(torch.equal, routing, routing_again))


@pytest.mark.parametrize("balances", [False, True])
def test_a_balancing_that_is_asked_for_or_left_out_after_the_transformation_is_refused(balances):
    model = octavo.transform(llama(7, **MODELS["mixtral"], output_router_logits=balances), dtype=torch.float32)
    ids = tokens(2, 9)
    loss = model(input_ids=ids, labels=ids, output_router_logits=None).loss
    if not balances:
        assert model(input_ids=ids, labels=ids, output_router_logits=False).loss == loss
    with pytest.raises(InputError, match=r"does not take output_router_logits = True|'moe_load_balancing': 'none'"):
        model(input_ids=ids, labels=ids, output_router_logits=not balances)
    model.config.output_router_logits = not balances
    with pytest.raises(InputError, match=f"was {balances} .* is now {not balances}"):
        model(input_ids=ids, labels=ids)


LLAMA = (
    "the model (llama) has no experts. Leave [moe] out, or train a model with experts in Octavo's blocks (mixtral, qwen3_moe)."
)


def test_moe_of_a_model_with_dense_layers_alone_is_refused():
    model = llama(7, **(MODELS["qwen3"] | {"mlp_only_layers": [0, 1, 2, 3]}))
    with pytest.raises(InputError, match=r"the model \(qwen3_moe\) has no experts"):
        octavo.transform(model, moe={"moe_z_loss_coeff": 0.001})


@pytest.mark.parametrize(
    ("shape", "moe", "words"),
    [
        ("plain", {"moe_z_loss_coeff": 0.001}, f"moe.moe_z_loss_coeff = 0.001: {LLAMA}"),
        ("plain", {"moe_load_balancing": "none"}, f'moe.moe_load_balancing = "none": {LLAMA}'),
        ("mixtral", {"moe_aux_loss_coeff": 0.1}, 'output_router_logits = false. Set moe.moe_load_balancing = "aux_loss"'),
        ("mixtral", {"moe_aux_loss_coeff": 0.1, "moe_load_balancing": "none"}, 'no effect: moe.moe_load_balancing = "none"'),
        ("mixtral", {"moe_aux_loss_coeff": 0.1, "moe_load_balancing": "sinkhorn"}, 'moe.moe_load_balancing = "sinkhorn". Set'),
        ("mixtral", {"moe_aux_loss_coeff": 0.1, "moe_load_balancing": "balanced"}, 'moe.moe_load_balancing = "balanced". Set'),
        ("plain", {"moe_load_balancing": "sinkhorn"}, f'moe.moe_load_balancing = "sinkhorn": {LLAMA}'),
        ("mixtral", {"moe_load_balancing": "aux_los"}, "should be 'aux_loss', 'sinkhorn', 'balanced' or 'none'"),
        ("mixtral", {"moe_z_loss_coeff": float("nan")}, "moe_z_loss_coeff = nan: Input should be a finite number"),
        ("mixtral", {"moe_aux_loss_coeff": -1.0}, "moe_aux_loss_coeff = -1.0: Input should be greater than or equal to 0"),
        ("mixtral", {"router_jitter_noise": 1.0}, "should be less than 1"),
        ("mixtral", {"z_loss": 0.1}, "unknown key z_loss"),
        ("mixtral", 0.001, "moe = 0.001 is not a table"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(shape, moe, words):
    with pytest.raises(InputError) as refused:
        octavo.transform(llama(**SHAPES[shape]), moe=moe)
    assert words in str(refused.value)


def test_settings_of_a_model_with_its_own_code_are_refused():
    with pytest.raises(InputError, match=r"the model \(mixtral\) runs its original code"):
        octavo.transform(llama(**SHAPES["mixtral"]), blocks="own", moe=BOTH)


def test_a_config_that_balances_experts_of_which_there_are_none_is_refused():
    model = llama(7, **(MODELS["qwen3"] | {"mlp_only_layers": [0, 1, 2, 3]}))
    assert model.config.output_router_logits
    with pytest.raises(InputError, match=r"no layer has experts \(mlp_only_layers"):
        octavo.transform(model)


@pytest.mark.parametrize(
    ("shape", "sizes", "balancing", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 1}, "sinkhorn", "by the sigmoid of its logit, and Hugging Face's by 1,"),
        ("mixtral", {}, "sinkhorn", "by its probability, and Hugging Face's by that divided by the sum"),
        (
            "qwen3-moe",
            {"norm_topk_prob": False, "num_experts_per_tok": 1},
            "sinkhorn",
            "the sigmoid of its logit, and Hugging Face's by its prob",
        ),
        ("qwen3-moe", {"norm_topk_prob": False, "num_experts_per_tok": 2}, "sinkhorn", None),
        ("mixtral", {"num_experts_per_tok": 4, "num_local_experts": 4}, "sinkhorn", None),
        ("mixtral", {}, "balanced", None),
    ],
    ids=str,
)
def test_hugging_faces_model_computes_the_logits_of_evaluation_or_that_is_said(shape, sizes, balancing, words, capsys):
    convert._warn_once.cache_clear()
    model = octavo.transform(llama(7, **(SHAPES[shape] | sizes)), dtype=torch.float32, moe={"moe_load_balancing": balancing})
    with torch.no_grad():
        for layer in model.layers:
            if layer.experts is not None:
                layer.layernorm_moe.router_weight.mul_(3)
    theirs = octavo.to_huggingface(model)
    said = capsys.readouterr().err
    assert (words in said and "give other logits" in said) if words else not said
    ids = tokens(3, 21)
    with torch.no_grad():
        ours, other = model.eval()(input_ids=ids).logits, theirs(input_ids=ids).logits
    assert torch.allclose(ours, other, rtol=1e-4, atol=1e-5) == (words is None)


def test_a_checkpoint_by_sinkhorn_says_where_its_experts_are_weighted_otherwise(tmp_path):
    models = [
        octavo.transform(llama(7, **SHAPES["mixtral"]), moe={"moe_load_balancing": kind}) for kind in ("sinkhorn", "none")
    ]
    octavo.save(tmp_path / "step-1", models[0])
    with pytest.warns(UserWarning, match="continues in another model: sinkhorn was True and is False"):
        octavo.load(tmp_path / "step-1", models[1])
    octavo.load(tmp_path / "step-1", models[0])
