"""The cases that train in a loop of their own: `octavo.transform`, `fp8_autocast`, `save`, `load`, and `octavo.nn`.

Each function takes an empty folder and returns what a case records: JSON values, bits as hashes or hexadecimal floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bits import checkpoint_bits, export_bits, tensors_bits
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import octavo

VOCABULARY = 61


def _recipes() -> dict[str, Any]:
    return {
        "delayed": octavo.recipe.DelayedScaling(amax_history_len=3),
        "current": octavo.recipe.CurrentScaling(),
        "rowwise": octavo.recipe.RowwiseScaling(),
        "block": octavo.recipe.BlockScaling(),
    }


def _llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


def _llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(_llama_config())


def _neox() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(_neox_config())


def _neox_config() -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )


class Plain(nn.Module):
    """A module of nobody's family, with sizes that no tile divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(20, 40), nn.LayerNorm(40), nn.Linear(40, 40, bias=False)
        self.last = nn.Linear(40, 7)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 20] → [B, 7]."""
        x = self.norm(torch.nn.functional.gelu(self.first(x)))
        return self.last(x + self.second(x))


def _tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(step))


def _steps(
    model: Any, optimizer: Any, recipe: Any, loss_of: Callable[[int], Tensor], which: range
) -> Iterator[tuple[str, str]]:
    for step in which:
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = loss_of(step)
        loss.backward()
        norm = octavo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item().hex(), norm.item().hex()


def _language_model(make: Callable[[], PreTrainedModel], recipe: str, folder: Path, **how: Any) -> dict[str, Any]:
    """Six steps in FP8; and the last three again in another model that loads what was saved after the first three."""
    chosen = _recipes()[recipe]
    found: list[tuple[str, str]] = []
    again: list[tuple[str, str]] = []
    for number, losses in enumerate((found, again)):
        model = octavo.transform(make(), recipe=chosen, params_dtype=torch.float32, **how).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def loss_of(step: int, model: Any = model) -> Tensor:
            return model(input_ids=_tokens(step), labels=_tokens(step)).loss

        if number == 0:
            losses += _steps(model, optimizer, chosen, loss_of, range(3))
            octavo.save(folder / "half", model, optimizer, step=3)
        else:
            assert octavo.load(folder / "half", model, optimizer) == {"step": 3}
        losses += _steps(model, optimizer, chosen, loss_of, range(3, 6))
    assert again == found[3:], "the steps after octavo.load are not those without it"
    octavo.save(folder / "saved", model, optimizer)
    octavo.export(model, folder / "export")
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=_tokens(9)).logits
    return {
        "losses": [loss for loss, _ in found],
        "grad_norms": [norm for _, norm in found],
        "checkpoint": checkpoint_bits(folder / "saved"),
        "export": export_bits(folder / "export"),
        "logits": tensors_bits({"logits": logits}),
    }


def _plain(recipe: str, folder: Path) -> dict[str, Any]:
    chosen = _recipes()[recipe]
    torch.manual_seed(0)
    model = octavo.transform(Plain(), recipe=chosen, dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_of(step: int) -> Tensor:
        draw = torch.Generator().manual_seed(step)
        return (model(torch.randn(5, 20, generator=draw)) - torch.randn(5, 7, generator=draw)).square().mean()

    found = list(_steps(model, optimizer, chosen, loss_of, range(5)))
    octavo.save(folder / "saved", model, optimizer)
    return {
        "losses": [loss for loss, _ in found],
        "grad_norms": [norm for _, norm in found],
        "checkpoint": checkpoint_bits(folder / "saved"),
    }


def _initial(config: Any, kind: type[PreTrainedModel], folder: Path, **how: Any) -> dict[str, Any]:
    """The weights of a model from the meta device, by octavo.init's seed."""
    octavo.init({"random_seed": 7})
    with octavo.delayed_init():
        model = kind(config)
    octavo.export(octavo.transform(model, params_dtype=torch.float32, **how), folder / "export")
    return {"export": export_bits(folder / "export")}


def _layer(layer: nn.Module, recipe: str, width: int, *arguments: Any) -> dict[str, Any]:
    """Outputs and gradients of a layer of `octavo.nn` in three steps, in bfloat16 under autocast."""
    chosen = _recipes()[recipe]
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    found: dict[str, Tensor] = {}
    for step in range(3):
        x = torch.randn(2, 12, width, generator=draw).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), octavo.fp8_autocast(fp8_recipe=chosen):
            y = layer(x, *arguments)
        y.float().square().mean().backward()
        assert x.grad is not None
        found |= {f"{step}.output": y.detach(), f"{step}.input": x.grad}
        found |= {f"{step}.{name}": p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"bits": tensors_bits(found)}


def _layers(recipe: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    made: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "linear": (octavo.nn.Linear(40, 24), ()),
        "layernorm-linear": (octavo.nn.LayerNormLinear(40, 24), ()),
        "rmsnorm-linear": (octavo.nn.LayerNormLinear(40, 24, normalization="RMSNorm", bias=False), ()),
        "grouped": (octavo.nn.GroupedLinear(3, 40, 24), ([5, 0, 19],)),
        "block": (octavo.nn.TransformerLayer(40, 56, 4), ()),
        "llama-block": (
            octavo.nn.TransformerLayer(40, 56, 4, num_gqa_groups=2, normalization="RMSNorm", bias=False, activation="swiglu"),
            (),
        ),
        "vision-block": (octavo.nn.TransformerLayer(40, 56, 4, self_attn_mask_type="no_mask"), ()),
        "parallel-block": (octavo.nn.TransformerLayer(40, 56, 4, parallel_attention_mlp=True), ()),
    }
    for activation in ("gelu", "gelu_exact", "srelu", "geglu", "geglu_exact", "swiglu"):
        made[f"mlp-{activation}"] = (octavo.nn.LayerNormMLP(40, 56, activation=activation), ())
    return {name: _layer(layer, recipe, 40, *arguments)["bits"] for name, (layer, arguments) in made.items()}


def _cases() -> Iterator[tuple[str, Callable[[Path], dict[str, Any]]]]:
    from functools import partial

    for recipe in ("delayed", "current", "rowwise", "block"):
        yield f"loop-llama-{recipe}", partial(_language_model, _llama, recipe)
        yield f"loop-plain-{recipe}", partial(_plain, recipe)
        yield f"layers-{recipe}", partial(_layers, recipe)
    yield "loop-gpt-neox-delayed", partial(_language_model, _neox, "delayed", blocks="own")
    yield "initial-llama", partial(_initial, _llama_config(), LlamaForCausalLM)
    yield "initial-gpt-neox", partial(_initial, _neox_config(), GPTNeoXForCausalLM, blocks="own")


LOOPS: dict[str, Callable[[Path], dict[str, Any]]] = dict(_cases())
