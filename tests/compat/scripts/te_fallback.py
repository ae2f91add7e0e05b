"""Layers of Transformer Engine where it imports, PyTorch's otherwise: the text's way to choose them."""

import torch
from torch import nn

try:
    import transformer_engine.pytorch as te

    using_te = True
except ImportError:
    using_te = False

linear_type = te.Linear if using_te else nn.Linear
norm_type = te.LayerNorm if using_te else nn.LayerNorm


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = norm_type(width)
        self.qkv = linear_type(width, 3 * width, bias=False)
        self.out = linear_type(width, width)
        self.heads = heads
        if using_te:
            self.attention = te.DotProductAttention(heads, width // heads, qkv_format="bshd", attn_mask_type="causal")

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if using_te:
            out = self.attention(q, k, v)
        else:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(out)


model = Block(32, 4)
torch.manual_seed(0)
for parameter in model.parameters():  # the same values for both kinds
    if parameter.dim() > 1:
        nn.init.normal_(parameter, std=0.1)
    else:
        nn.init.ones_(parameter)
x = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32)
loss = model(x).square().mean()
loss.backward()
print("te" if using_te else "torch", loss.item(), model.qkv.weight.grad.norm().item())
