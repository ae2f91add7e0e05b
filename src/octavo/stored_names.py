"""The names of parameters in files: those that the layers had when they held norm and product in one module.

A decoder's parameters are named as Hugging Face's are (`octavo.nn.plain_names`), so that everyone's rules of names hold for
them. Checkpoints, state dicts by SMP's names and the counters of initial weights have the names from before: older files load,
older versions load newer files, and a seed gives the same weights. No torch here, as in the tables of families.
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
"""Plain name inside of a layer → the stored one; the first that is found."""


def stored_name(name: str) -> str:
    """The stored name of a parameter, or of a module, in a model all of whose layers have plain names."""
    for pattern, stored in _STORED:
        found, count = pattern.subn(stored, name, count=1)
        if count:
            return found
    return name


def record_name(record: str, names: Mapping[str, str]) -> str:
    """An FP8 record `<module>.<operand>.<kind>` with its module renamed."""
    module, *rest = record.rsplit(".", 2)
    return ".".join((names.get(module, module), *rest))
