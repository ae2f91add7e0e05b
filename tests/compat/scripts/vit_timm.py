"""timm's VisionTransformer with a block of Transformer Engine's under FP8 and DDP, a rank a GPU by mp.spawn.

The published script with a smaller model and fewer steps. Mended: a parenthesis that was not closed. Filled: the block's
arguments that newer versions of timm pass, and how many steps.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformer_engine.pytorch as te
from timm.models.vision_transformer import VisionTransformer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset
from transformer_engine.common import recipe

use_amp, use_fp8, batch_size, steps = True, True, 8, 8


# use random data
class FakeDataset(Dataset):
    def __len__(self):
        return batch_size * steps * 8

    def __getitem__(self, index):
        return torch.randn([3, 224, 224], dtype=torch.float32, generator=torch.Generator().manual_seed(index % 8)), index % 8


class TE_Block(te.transformer.TransformerLayer):
    def __init__(
        self,
        dim,
        num_heads,
        mlp_ratio=4.0,
        qkv_bias=False,
        qk_norm=False,
        proj_drop=0.0,
        attn_drop=0.0,
        init_values=None,
        drop_path=0.0,
        act_layer=None,
        norm_layer=None,
        mlp_layer=None,
        **kwargs,
    ):
        super().__init__(
            hidden_size=dim,
            ffn_hidden_size=int(dim * mlp_ratio),
            num_attention_heads=num_heads,
            hidden_dropout=proj_drop,
            attention_dropout=attn_drop,
            self_attn_mask_type="no_mask",
            attn_input_format="bshd",
        )


def mp_fn(local_rank, *args):
    dist.init_process_group("nccl", rank=local_rank, world_size=torch.cuda.device_count())
    torch.cuda.set_device(local_rank)
    dp_rank = dist.get_rank()
    torch.manual_seed(0)
    train_loader = torch.utils.data.DataLoader(FakeDataset(), batch_size=batch_size, num_workers=2, pin_memory=True)
    model = VisionTransformer(embed_dim=256, depth=4, num_heads=4, block_fn=TE_Block).cuda(torch.cuda.current_device())
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = torch.nn.CrossEntropyLoss().cuda()
    fp8_format = recipe.Format.HYBRID
    fp8_recipe = recipe.DelayedScaling(fp8_format=fp8_format, amax_history_len=16, amax_compute_algo="max")
    model.train()
    t0 = time.perf_counter()
    for step, (inputs, label) in enumerate(train_loader):
        if step == steps:
            break
        inputs, label = inputs.cuda(non_blocking=True), label.cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=use_amp):
            with te.fp8_autocast(enabled=use_fp8, fp8_recipe=fp8_recipe):
                outputs = model(inputs)
            loss = loss_fn(outputs, label)
        loss.backward()
        optimizer.step()
        if dp_rank == 0:
            print("loss", loss.item(), f"step {step}, {time.perf_counter() - t0:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    mp.spawn(mp_fn, args=(), nprocs=torch.cuda.device_count(), join=True)
