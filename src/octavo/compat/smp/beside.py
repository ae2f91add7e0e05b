"""Stand-ins for modules of other packages (smdistributed, megatron, distutils) that SMP's scripts import. Loads no torch.

An installed package has precedence. `importlib.util.find_spec`, by which libraries look for a whole package, finds SageMaker's
and Megatron's names only after the script has imported them.
"""

from __future__ import annotations

from octavo.compat.finder import Names, Shim

_HERE = "octavo.compat.smp"
_MAPPING: Names = {f"{_HERE}.asynchronous": "CheckpointingException"}

SMDDP = Shim(
    "smdistributed",
    "SageMaker's data parallel library",
    {
        "smdistributed": {},
        "smdistributed.dataparallel": {},
        "smdistributed.dataparallel.torch": {},
        "smdistributed.dataparallel.torch.torch_smddp": {},
    },
    {
        "smdistributed.modelparallel": "SMP version 1 became torch.sagemaker.",
        "smdistributed": 'import torch.distributed and use the backend "smddp", which is NCCL here.',
    },
    begin=f"{_HERE}.substitutes",
    absent_only=True,
)

MEGATRON = Shim(
    "megatron",
    "Megatron-LM",
    {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.dist_checkpointing": {},
        "megatron.core.dist_checkpointing.core": _MAPPING,
        "megatron.core.dist_checkpointing.mapping": _MAPPING,
    },
    {"megatron": "Install Megatron-LM for it: Octavo has only that package's error of asynchronous saves."},
    absent_only=True,
)

DISTUTILS = Shim(
    "distutils",
    "distutils, which Python has no more since 3.12",
    {
        "distutils": {},
        "distutils.version": {"octavo.compat.versions": "LooseVersion StrictVersion"},
        "distutils.util": {"octavo.compat.versions": "strtobool"},
    },
    {
        "dir_util": "Use shutil.copytree(…, dirs_exist_ok=True).",
        "copy_tree": "Use shutil.copytree(…, dirs_exist_ok=True).",
        "spawn": "Use shutil.which.",
        "find_executable": "Use shutil.which.",
        "distutils": "pip install setuptools brings all of it.",
    },
    absent_only=True,
    hidden=False,
)

SHIMS = (SMDDP, MEGATRON, DISTUTILS)
