"""The names of parameters in files: those of layers that hold norm and product in one module.

A decoder's parameters are named like Hugging Face's (`octavo.nn.plain_names`), so that everyone's naming rules work for them.
Checkpoints, state dicts with SMP's names and the counters of initial weights have the stored names: older files load, older
versions load newer files, and a seed gives the same weights. No torch is imported, as in the tables of families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_WRAPPED = r"(?P<wrapped>(?:\._\w+)*)"  # names of wrappers, such as `_checkpoint_wrapped_module`
_STORED = tuple(
    (re.compile(rf"(?P<before>^|\.){plain}"), rf"\g<before>{stored}")
    for plain, stored in (
        (rf"self_attention{_WRAPPED}\.layernorm\.", r"self_attention\g<wrapped>.layernorm_qkv.layer_norm_"),
        (rf"self_attention{_WRAPPED}\.qkv(?=\.|$)", r"self_attention\g<wrapped>.layernorm_qkv"),
        (rf"ffn{_WRAPPED}\.layernorm\.", r"layernorm_mlp\g<wrapped>.layer_norm_"),
        (rf"ffn{_WRAPPED}\.(?P<product>fc[12])\.(?=(?:weight|bias)$)", r"layernorm_mlp\g<wrapped>.\g<product>_"),
        (r"ffn(?=\.|$)", "layernorm_mlp"),
        (rf"moe{_WRAPPED}\.layernorm\.", r"layernorm_moe\g<wrapped>.layer_norm_"),
        (rf"moe{_WRAPPED}\.router\.(?=weight$)", r"layernorm_moe\g<wrapped>.router_"),
        (r"moe(?=\.|$)", "layernorm_moe"),
    )
)
"""Pattern of a plain name in a layer → the stored one; the first match applies."""


def stored_name(name: str) -> str:
    """The stored name of a parameter, or of a module, in a model whose layers all have plain names."""
    for pattern, stored in _STORED:
        renamed, count = pattern.subn(stored, name, count=1)
        if count:
            return renamed
    return name


def record_name(record: str, names: Mapping[str, str]) -> str:
    """An FP8 record `<module>.<operand>.<kind>` with its module renamed."""
    module, *rest = record.rsplit(".", 2)
    return ".".join((names.get(module, module), *rest))
