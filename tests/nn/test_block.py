"""Forms of a transformer layer in a stack: streams that norms replace, and recomputation of each."""

import copy

import plain
import pytest
import torch

import octavo
from octavo.parallel.recompute import recomputed

FORMS = {
    "post": {"apply_residual_connection_post_layernorm": True},
    "output": {"output_layernorm": True},
    "post output": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "parallel output": {"parallel_attention_mlp": True, "output_layernorm": True},
    "paths": {"drop_path_rate": 0.3, "hidden_dropout": 0.2},
    "zero-centred": {"zero_centered_gamma": True},
}


def layer(form):
    return plain.randomise(octavo.nn.TransformerLayer(16, 32, 4, **FORMS[form]))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "paths"])
def test_a_stack_hands_on_stream_and_delta(form):
    """Two layers through `forward_residual` are the two one behind the other."""
    first, second = layer(form), layer(form)
    x = plain.fresh(2, 5, 16).requires_grad_()
    stream = second.forward_residual(*first.forward_residual(x))
    found = stream[0] if stream[1] is None else stream[0] + stream[1]
    wanted = second(first(x))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    cotangent = plain.fresh(*wanted.shape, seed=4)
    pairs = [torch.autograd.grad(y, [x, *first.parameters()], cotangent) for y in (found, wanted)]
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", [None, octavo.recipe.CurrentScaling()], ids=["wide", "FP8"])
@pytest.mark.parametrize("form", FORMS)
def test_recomputed_layers_have_the_same_gradients(form, recipe):
    plainly, again = layer(form), layer(form)
    again.load_state_dict(copy.deepcopy(plainly.state_dict()))
    gradients = []
    for run in (lambda x: plainly(x), lambda x: recomputed(again, x, None)[0]):
        x = plain.fresh(2, 5, 16).requires_grad_()
        torch.manual_seed(3)
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = run(x)
        y.backward(plain.fresh(2, 5, 16, seed=4))
        gradients.append([x.grad, *(p.grad for p in (plainly if not gradients else again).parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


def test_what_a_layer_with_experts_does_not_take():
    experts = octavo.nn.Experts(4, 2)
    with pytest.raises(octavo.errors.InputError, match="with experts"):
        octavo.nn.TransformerLayer(16, 32, 4, experts=experts, bias=False, apply_residual_connection_post_layernorm=True)
    layer = octavo.nn.TransformerLayer(16, 32, 4, experts=experts, bias=False, output_layernorm=True)
    y, _ = layer(plain.fresh(2, 5, 16))
    torch.testing.assert_close(y, layer.layernorm(y), rtol=1e-3, atol=1e-3)  # normed already
