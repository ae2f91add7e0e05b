"""timm's ViT-Huge in a plain training loop: DistributedDataParallel, bf16 autocast, blocks in FP8; steps 10 to 50 are averaged.

python examples/vit_own_loop.py                                    all GPUs of this host; without one, a tiny model on the CPU
python examples/vit_own_loop.py --blocks transform --recipe current --batch 128 --gpus 1
python examples/vit_own_loop.py --graph                            forward and backward as one CUDA graph on each rank
"""

import argparse
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import octavo
from octavo.errors import install_extra
from octavo.hardware import supports_fp8

try:
    from timm.models.vision_transformer import VisionTransformer
except ModuleNotFoundError as error:
    if error.name != "timm":
        raise
    sys.stderr.write(f"timm is not installed, and the model is timm's. Install it by {install_extra('bench')}.\n")
    sys.exit(2)

HUGE = {"embed_dim": 1280, "depth": 32, "num_heads": 16}
TINY = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 10}
RECIPES = {
    "delayed": octavo.recipe.DelayedScaling,
    "current": octavo.recipe.CurrentScaling,
    "rowwise": octavo.recipe.RowwiseScaling,
    "block": octavo.recipe.BlockScaling,
}


class Block(octavo.nn.TransformerLayer):
    """Octavo's layer with the signature of timm's block; unsupported arguments are refused."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False, qk_norm: bool = False,
        proj_drop: float = 0.0, attn_drop: float = 0.0, init_values: float | None = None, drop_path: float = 0.0,
        act_layer: Any = nn.GELU, norm_layer: Any = nn.LayerNorm, mlp_layer: Any = None, **newer: Any,
    ) -> None:  # fmt: skip
        refused = {"qkv_bias": not qkv_bias, "qk_norm": qk_norm, "init_values": init_values, "drop_path": drop_path}
        refused |= {name: newer.get(name) for name in ("scale_attn_norm", "scale_mlp_norm")}
        if names := [name for name, value in refused.items() if value]:
            raise ValueError(f"{', '.join(names)}: this block does not have it; keep timm's, and use octavo.transform.")
        super().__init__(
            dim, int(dim * mlp_ratio), num_heads, hidden_dropout=proj_drop, attention_dropout=attn_drop,
            layernorm_epsilon=1e-6, self_attn_mask_type="no_mask",
        )  # fmt: skip


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model with float32 weights: timm's with this block, or timm's after `octavo.transform`."""
    sizes: dict[str, Any] = dict(HUGE if device.type == "cuda" else TINY)
    if options.blocks == "block_fn":
        return VisionTransformer(**sizes, block_fn=Block).to(device)
    model: nn.Module = octavo.transform(VisionTransformer(**sizes), device=device)
    return model


def averaged(model: nn.Module, options: argparse.Namespace, device: torch.device, fp8: bool) -> Callable[..., Tensor]:
    """Forward and backward of a batch, with gradients averaged over the ranks: a CUDA graph, or DistributedDataParallel."""
    recipe = RECIPES[options.recipe]()
    called = model
    if not options.graph:
        called = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16), octavo.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            return nn.functional.cross_entropy(called(images).float(), labels)

    def forward_backward(images: Tensor, labels: Tensor) -> Tensor:
        found = loss(images, labels)
        found.backward()
        return found

    return octavo.graphed(loss, model.parameters(), group=dist.group.WORLD) if options.graph else forward_backward


def train(rank: int, options: argparse.Namespace, port: int) -> None:
    """One rank: measures the step time, and checks that replicas are bit-identical."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=options.gpus)
    torch.manual_seed(0)
    fp8 = not options.bf16 and (not on_gpu or supports_fp8(device))  # a CPU emulates FP8
    if rank == 0 and not fp8 and not options.bf16:
        print(f"{torch.cuda.get_device_name(device)} has no FP8 units: bf16", flush=True)
    model = build(options, device)
    gradients = averaged(model, options, device, fp8)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    side, classes = (224, 1000) if on_gpu else (TINY["img_size"], TINY["num_classes"])
    torch.manual_seed(1 + rank)  # different images on every rank
    seconds = []
    for step in range(options.steps):
        images = torch.randn(options.batch, 3, side, side, device=device)
        labels = torch.randint(classes, (options.batch,), device=device)
        begun = time.perf_counter()
        loss = gradients(images, labels)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds += [time.perf_counter() - begun] if step >= options.warmup else []
    digests: list[Any] = [None] * options.gpus
    dist.all_gather_object(digests, digest(model))
    if rank == 0:
        mean = sum(seconds) / len(seconds)
        precision = f"FP8, {options.recipe}" if fp8 else "bf16"
        rate = options.gpus * options.batch / mean
        print(f"{precision}: loss {loss.item():.3f}, {mean:.4f} s a step, {rate:,.0f} images/s on {options.gpus} ranks")
        print("replicas are the same" if len(set(digests)) == 1 else "REPLICAS DIFFER", flush=True)
    del gradients  # destroy the graph or DistributedDataParallel before the process group
    dist.barrier()  # no rank exits while another still communicates with it
    dist.destroy_process_group()


def digest(model: nn.Module) -> str:
    """A hash of all weights, and of delayed scaling's state; scales of other recipes depend on each rank's images."""
    entries = [entry for layer in octavo.fp8.inspect(model).values() for entry in layer.values()]
    delayed = [entry[key] for entry in entries if entry["amax_history"] is not None for key in ("scale", "amax_history")]
    found = hashlib.sha256()
    for value in (*model.state_dict().values(), *delayed):
        found.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", choices=["block_fn", "transform"], default="block_fn")
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument("--bf16", action="store_true", help="no FP8")
    parser.add_argument("--graph", action="store_true", help="octavo.graphed in place of DistributedDataParallel")
    parser.add_argument("--batch", type=int, default=64 if torch.cuda.is_available() else 4, help="images a rank")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="ranks")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps before the measured ones")
    options = parser.parse_args()
    if min(options.gpus, options.batch) < 1 or not 0 <= options.warmup < options.steps:
        parser.error("--gpus and --batch are at least 1, and --steps is above --warmup, which is at least 0")
    if torch.cuda.is_available() and options.gpus > torch.cuda.device_count():
        parser.error(
            f"--gpus {options.gpus}: torch sees {torch.cuda.device_count()} GPUs. Use --gpus {torch.cuda.device_count()}"
        )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (options, port), nprocs=options.gpus)
