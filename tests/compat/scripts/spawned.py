"""A vision transformer of Transformer Engine's layers under DDP: mp.spawn starts the ranks, data loaders start workers."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformer_engine.pytorch as te
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from transformer_engine.common import recipe


class Images(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        import transformer_engine.pytorch  # a worker finds the name too

        image = torch.linspace(-1, 1, 3 * 16 * 16).view(3, 16, 16) * (index % 4 + 1)
        return image, index % 4, transformer_engine.__version__


class TEBlock(te.TransformerLayer):
    def __init__(self, dim, num_heads, mlp_ratio=4.0, **kwargs):
        super().__init__(
            hidden_size=dim,
            ffn_hidden_size=int(dim * mlp_ratio),
            num_attention_heads=num_heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="no_mask",
            attn_input_format="bshd",
        )


class ViT(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(*[TEBlock(dim, heads) for _ in range(depth)])
        self.norm, self.head = te.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def train(rank, world_size, fp8_recipe):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ["PORT"]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(ViT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Images(), batch_size=8, num_workers=1 - rank, multiprocessing_context=None if rank else "spawn")
    for images, labels, versions in loader:
        assert "octavo" in versions[0]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print("loss", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    fp8_recipe = recipe.DelayedScaling(margin=0, interval=1, fp8_format=recipe.Format.HYBRID, amax_history_len=16)
    mp.spawn(train, nprocs=2, args=(2, fp8_recipe))
