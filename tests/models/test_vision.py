"""timm's vision transformer with Octavo's blocks is timm's: logits, every gradient, weights in and out bit for bit."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from vits import SHAPES, images, vit

import octavo
import ranks
from octavo.build import describe, transform
from octavo.errors import InputError
from octavo.models.convert import conversion_of
from octavo.models.vision import Blocks
from octavo.nn.block import TransformerLayer


def loss_of(model, seed=1):
    pixels, labels = images(seed=seed)
    return functional.cross_entropy(model(pixels.to(next(model.parameters()).dtype)).float(), labels)


def theirs_of(model, tensors):
    """Tensors by Octavo's names under timm's."""
    way = conversion_of(model)
    return {name: part for ours, tensor in tensors.items() for name, part in way.split(ours, tensor).items()}


def gradients(model):
    return theirs_of(model, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_are_timms(shape):
    reference = vit(**SHAPES[shape])
    model = transform(copy.deepcopy(reference), dtype=torch.float32)
    assert isinstance(model.blocks, Blocks)
    pixels, _ = images()
    torch.testing.assert_close(model(pixels), reference(pixels), rtol=1e-5, atol=1e-5)
    loss_of(model).backward()
    loss_of(reference).backward()
    ours, wanted = gradients(model), {name: p.grad for name, p in reference.named_parameters()}
    assert ours.keys() == wanted.keys()
    floor = 1e-6 * max(grad.abs().max() for grad in wanted.values())
    for name, grad in wanted.items():
        assert (ours[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + floor, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_out_under_timms_names_and_come_back(tmp_path, shape, dtype):
    reference = vit(**SHAPES[shape]).to(dtype)
    octavo.export(transform(copy.deepcopy(reference), dtype=dtype), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = reference.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name
    again = transform(vit(9, **SHAPES[shape]), dtype=dtype, load_from=tmp_path / "out")
    for name, tensor in theirs_of(again, again.state_dict()).items():
        assert torch.equal(tensor, wanted[name]), name


KEPT = {
    "layer scale": ({"init_values": 0.1}, "blocks.0.ls1 is a LayerScale"),
    "normalised queries": ({"qk_norm": True}, "blocks.0.attn.q_norm is a LayerNorm"),
    "stochastic depth": ({"drop_path_rate": 0.1}, "blocks.1.drop_path1 is a DropPath"),
    "attention dropout": ({"attn_drop_rate": 0.1}, "blocks.0.attn.attn_drop drops with probability 0.1"),
    "projection dropout": ({"proj_drop_rate": 0.1}, "blocks.0.attn.proj_drop drops with probability 0.1"),
    "another activation": ({"act_layer": nn.ReLU}, "blocks.0.mlp.act is a ReLU"),
    "an approximation": ({"act_layer": lambda: nn.GELU("tanh")}, "blocks.0: mlp.act approximates"),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_octavos_blocks_do_not_compute_keeps_its_code_and_describe_says_why(case):
    changes, reason = KEPT[case]
    reference = vit(**changes).eval()
    pixels, _ = images()
    wanted = reference(pixels)
    model = transform(reference, dtype=torch.float32)
    assert model is reference
    assert not any(isinstance(module, TransformerLayer) for module in model.modules())
    assert describe(model).own_code == reason
    assert f"original code: {reason}" in str(describe(model))
    torch.testing.assert_close(model(pixels), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="original code"):
        transform(vit(**changes), dtype=torch.float32, recompute="mlp")


def test_a_subclass_and_blocks_that_are_asked_to_stay_keep_their_code():
    reference = vit()
    reference.__class__ = type("Mine", (type(reference),), {})
    assert not isinstance(transform(reference, dtype=torch.float32).blocks, Blocks)
    kept = transform(vit(), dtype=torch.float32, blocks="own")
    assert describe(kept).own_code == 'blocks = "own"'
    assert kept.state_dict().keys() == vit().state_dict().keys()


def train(recipe=None, *, steps=3, dtype=torch.bfloat16, **options):
    model = transform(vit(4), recipe, dtype=dtype, params_dtype=torch.float32, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, model


RECIPES = {
    "none": None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_by_every_recipe_and_recomputes_and_offloads_without_changing_a_bit(recipe):
    losses, model = train(RECIPES[recipe])
    assert losses[-1] < losses[0]
    head = next(layer for layer in describe(model).layers if layer.name == "head")
    assert not head.fp8
    assert describe(model).fp8_layers == 8
    for options in ({"recompute": True}, {"recompute": "mlp"}, {"recompute": True, "offload": True}):
        again, other = train(RECIPES[recipe], **options)
        assert all(torch.equal(a, b) for a, b in zip(losses, again, strict=True)), options
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), (options, name)


def test_frozen_parameters_and_patterns_go_by_timms_names():
    reference = vit()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("blocks.0" not in name and "patch" not in name)
    model = transform(reference, dtype=torch.float32, skip=["blocks.1.attn.qkv"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "blocks.0" in name or "patch" in name}
    skipped = {layer.name for layer in describe(model).layers if "skipped" in layer.reason}
    assert skipped == {"blocks.1.self_attention.qkv"}


def test_the_head_of_a_vision_transformer_is_not_octavos():
    with pytest.raises(InputError, match=r"fp8\.head = true: VisionTransformer runs its original code"):
        transform(vit(), fp8_head=True)


def sharded(way):
    """Losses and gathered gradients of a vision transformer over the ranks; every rank sees the same images."""
    if torch.distributed.is_initialized():
        octavo.init({})
    options = {}
    if way == "rank 0":
        with octavo.delayed_init(octavo.state.rank > 0):
            model = vit(4)
        options = {"load_state_dict_from_rank0": True}
    else:
        model = vit(4)
    model = transform(model, dtype=torch.float32, device="cpu", **options)
    losses = []
    for _ in range(2):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
    return losses, {
        n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad) for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("way", ["every rank", "rank 0"])
def test_ranks_compute_what_one_computes(way):
    vit()
    losses, wanted = sharded("every rank")
    for found, summed in ranks.run(2, sharded, way):
        assert found == pytest.approx(losses, rel=1e-6)
        for name, gradient in wanted.items():
            torch.testing.assert_close(summed[name], gradient, rtol=1e-4, atol=1e-6)


def share_a_block(model):
    model.blocks[1] = model.blocks[0]


def share_a_parameter(model):
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight


def share_with_another_part(model):
    model.norm.weight = model.blocks[0].norm1.weight


def other_heads(model):
    attention = model.blocks[0].attn
    attention.num_heads, attention.head_dim = 2 * attention.num_heads, attention.head_dim // 2
    attention.scale = attention.head_dim**-0.5


def hook(model):
    model.blocks[1].attn.register_forward_hook(lambda module, inputs, output: 2 * output)


def patch_forward(model):
    model.blocks[0].mlp.forward = lambda x: x


def add_a_parameter(model):
    model.blocks[0].gain = nn.Parameter(torch.ones(()))


def patch_another_function(model):
    model.blocks[1].norm1._call_impl = lambda x: 2 * functional.layer_norm(x, x.shape[-1:])


def lose_a_bias(model):
    model.blocks[0].norm2.bias = None


def lose_the_bias_of_one_product(model):
    model.blocks[0].mlp.fc2.bias = None


def widen_the_output(model):
    model.blocks[1].attn.proj = nn.Linear(48, 96)
    model.blocks[1].ls1 = nn.Linear(96, 48)


def scale_otherwise(model):
    model.blocks[0].attn.scale, model.blocks[0].attn.fused_attn = 0.1, False


def change_eps(model):
    model.blocks[1].norm2.eps = 0.1


def drop_by_a_class_of_its_own(model):
    class Doubles(nn.Dropout):
        def forward(self, x):
            return 2 * x

    model.blocks[0].mlp.drop1 = Doubles(0.0)


def add_a_module_in_front(model):
    model.blocks.insert(0, nn.GELU())


CHANGES = {
    share_a_block: "blocks.1.norm1.weight shares the tensor of blocks.0.norm1.weight",
    share_a_parameter: "blocks.1.mlp.fc1.weight shares the tensor of blocks.0.mlp.fc1.weight",
    share_with_another_part: "blocks or parameters are shared",
    other_heads: "blocks have different numbers of heads",
    hook: "blocks.1.attn has hooks",
    patch_forward: "blocks.0.mlp.forward is overridden",
    patch_another_function: "blocks.1.norm1._call_impl is overridden",
    add_a_parameter: "blocks.0.gain is an extra parameter",
    lose_a_bias: "blocks.0.norm2.bias is a missing parameter",
    lose_the_bias_of_one_product: "blocks.0.mlp.fc2.bias is a missing parameter",
    widen_the_output: "blocks.1.ls1 is a Linear",
    scale_otherwise: "blocks.0: attn scales by another factor",
    change_eps: "blocks.1: norm1 and norm2 differ in eps",
    drop_by_a_class_of_its_own: "blocks.0.mlp.drop1 is a Doubles",
    add_a_module_in_front: "blocks.0 is a GELU",
}


@pytest.mark.parametrize("change", CHANGES)
def test_blocks_that_are_not_alike_or_have_more_keep_their_code(change):
    reference = vit()
    change(reference)
    pixels, _ = images()
    wanted = reference(pixels)
    model = transform(reference, dtype=torch.float32)
    assert not isinstance(model.blocks, Blocks)
    assert describe(model).own_code.startswith(CHANGES[change])
    torch.testing.assert_close(model(pixels), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["foreign", "shared", "removed", "extra", "forward", "eps"])
def test_blocks_that_were_changed_are_not_written_under_timms_names(change, tmp_path):
    model = transform(vit())
    blocks = model.blocks
    changes = {
        "foreign": lambda: blocks.__setitem__(0, torch.nn.Identity()),
        "shared": lambda: blocks.__setitem__(1, blocks[0]),
        "removed": lambda: blocks.__delitem__(1),
        "extra": lambda: setattr(blocks[0], "extra", torch.nn.Linear(4, 4)),
        "forward": lambda: setattr(blocks[0], "forward", lambda x: x),
        "eps": lambda: setattr(blocks[0].ffn, "eps", 0.5),
    }
    octavo.export(model, tmp_path / "before")
    changes[change]()
    with pytest.raises(InputError, match=r"blocks: .*octavo\.save\(path, model\)"):
        octavo.export(model, tmp_path / "out")


def test_own_code_cannot_come_back():
    with pytest.raises(InputError, match="has Octavo's blocks already"):
        transform(transform(vit()), blocks="own")
    with pytest.raises(InputError, match="offload = 'yes'"):
        transform(vit(), offload="yes")
