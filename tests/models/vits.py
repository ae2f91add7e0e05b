"""Small vision transformers of timm with weights that matter."""

import inspect

import pytest
import torch

SIZES = {"img_size": 32, "patch_size": 8, "num_classes": 10, "embed_dim": 48, "depth": 2, "num_heads": 3}
SHAPES = {
    "plain": {},
    "no-qkv-bias": {"qkv_bias": False},
    "no-biases": {"qkv_bias": False, "proj_bias": False},
    "wide-mlp": {"mlp_ratio": 2.5},
    "mean-pooling": {"global_pool": "avg", "class_token": False},
    "norm-in-front": {"pre_norm": True},
}


def vit(seed=0, **changes):
    """timm's `VisionTransformer` whose every parameter, biases and norms included, is random."""
    pytest.importorskip("timm", exc_type=ImportError)
    from timm.models.vision_transformer import VisionTransformer

    if missing := changes.keys() - inspect.signature(VisionTransformer).parameters.keys():
        pytest.skip(f"this timm has no {', '.join(missing)}")
    model = VisionTransformer(**SIZES | changes)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2 + ("norm" in name and "weight" in name))
    return model.train()


def images(batch=3, seed=1):
    """Random images [batch, 3, 32, 32] and their classes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 32, 32, generator=draw), torch.randint(10, (batch,), generator=draw)
