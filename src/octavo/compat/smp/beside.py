"""Names of other packages that SMP's scripts import, for machines without them. Loads no torch.

Each is found after everything that is installed. Until the script imports SageMaker's and Megatron's names, they are not there
for `importlib.util.find_spec`, by which libraries ask for a whole package.
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
    {"megatron": "Install Megatron-LM for it: of that package the error of asynchronous saves alone is here."},
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
