"""Translates names in Octavo's error messages for SMP scripts.

Octavo's messages name keys of run files and options of `octavo train`. A script has keys of `torch.sagemaker.init` and options
of torchrun instead, and in a job arguments of the estimator or the trainer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from octavo.compat.sagemaker.keys import of_this_job
from octavo.errors import InputError

_NAMES = (
    (re.compile(r", or start more ranks with --ranks \([^)]*\)"), ""),
    (re.compile(r"\(--ranks (\d+)\)"), r"(torchrun --nproc-per-node=\1)"),
    (re.compile(r"\bparallel\.(?=[a-z])(?<!octavo\.parallel\.)"), ""),
    (re.compile(r'"all_gather" or "a2a"'), '"all_gather"'),  # "a2a" is not an option of SMP's
    (re.compile(r"\boctavo\.init\b"), "torch.sagemaker.init"),
    (re.compile(r"under octavo\.delayed_init\(\)"), "on the meta device, with DelayedParamIniter"),
    (re.compile(r"octavo\.transform(?=\(model, load_state_dict_from_rank0=True\))"), "torch.sagemaker.transform"),
)
_DEGREES = re.compile(r"_degree\b")
_SAID = "Degrees are keys of"


@contextlib.contextmanager
def users_names(where: str = "torch.sagemaker.init") -> Iterator[None]:
    """Context in which errors use the script's names. where: the source of its configuration."""
    try:
        yield
    except InputError as error:
        text = str(error)
        for pattern, name in _NAMES:
            text = pattern.sub(name, text)
        of_degrees = _DEGREES.search(text) and _SAID not in text
        if text == str(error) and not of_degrees:
            raise
        if of_degrees:
            keys = of_this_job()
            count = "torchrun's --nproc-per-node times its --nnodes" if keys is None else f"that of {keys.machines}"
            text += f" {_SAID} {where}; the number of ranks is {count}."
        raise InputError(text) from error
