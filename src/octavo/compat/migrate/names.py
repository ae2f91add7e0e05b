"""Table of the names of SMP, Transformer Engine, FSDP1, Accelerate and SageMaker's SDK: effect in Octavo, and replacement.

`octavo migrate` reads this table, and docs/migrating.md is compared with it. A name is written as it is imported; one with
`(argument=)` is an argument of a call. The row of a class holds for its attributes. Whether Octavo has a name of SMP or
Transformer Engine follows from the tables of `octavo.compat`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import octavo.launch
from octavo.compat.migrate.sources import (
    Signature,
    constructor,
    fields_of,
    forward_of,
    has_attribute,
    has_name,
    members,
    method_of,
    signature_of,
    tables,
)
from octavo.compat.missing import TABLE, way_of
from octavo.compat.sdk import SHIM as SDK
from octavo.compat.smp.shim import SHIM as SMP
from octavo.compat.te.shim import SHIM as TE
from octavo.config.section import Section

Status = Literal["same", "accepted", "differs", "absent"]
"""same: as in the library. accepted: no effect. differs: see `here`. absent: an error with the replacement."""

LIBRARIES = {
    "torch.sagemaker": "SMP",
    "transformer_engine": "Transformer Engine",
    "transformer_engine_torch": "Transformer Engine",
    "torch.distributed.fsdp": "FSDP1",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "FSDP1",
    "accelerate": "Accelerate",
    "sagemaker": "SageMaker SDK",
    "smdistributed": "SageMaker SDK",
}
"""Module → the library of its names."""

_ATTENTION = "transformers.models.{0}.modeling_{0}.{1}"
_NO_ATTENTION = "one class a model, and attn_implementation= of from_pretrained or from_config"
_GONE = {
    "datasets.load_metric": "evaluate.load(name), or leave the import out where nothing uses it",
    "transformers.AdamW": "torch.optim.AdamW",
    "transformers.optimization.AdamW": "torch.optim.AdamW",
    **{
        _ATTENTION.format(module, f"{model}{kind}"): _NO_ATTENTION
        for module, model in {"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "gpt_neox": "GPTNeoX"}.items()
        for kind in ("SdpaAttention", "FlashAttention2")
    },
}
"""Names that scripts of SMP's container import, and newer packages lack → what to write."""
OTHERS = "other packages"
LIBRARIES |= dict.fromkeys(_GONE, OTHERS)
_OF_LIGHTNING = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
_PLUGINS = tuple(f"{module}.plugins.TransformerEnginePrecision" for module in _OF_LIGHTNING)
_TEXTS = ("transformer-engine", "transformer-engine-float16")
PRECISIONS = {"lightning.Fabric": _TEXTS, "lightning.Trainer": _TEXTS, "composer.Trainer": ("amp_fp8",)}
"""Class → its values of `precision` that use Transformer Engine; other uses of the class have no rows."""
_HOMES_OF_PRECISIONS = {
    "lightning.Fabric": ("lightning.fabric", "lightning.fabric.fabric", "lightning_fabric", "lightning_fabric.fabric"),
    "lightning.Trainer": tuple(
        f"{root}{module}"
        for root in ("lightning.pytorch", "pytorch_lightning")
        for module in ("", ".trainer", ".trainer.trainer")
    ),
    "composer.Trainer": ("composer.trainer", "composer.trainer.trainer"),
}
_SAME = {
    "torch.sagemaker.state_handler.state": "torch.sagemaker.state",
    "composer.core.precision.Precision.AMP_FP8": "composer.core.Precision.AMP_FP8",
    **{
        f"{module}.{name.partition('.')[2]}": name for name, modules in _HOMES_OF_PRECISIONS.items() for module in modules
    },
    **{
        f"{plugin.removesuffix('.TransformerEnginePrecision')}.{module}.TransformerEnginePrecision": plugin
        for plugin in _PLUGINS
        for module in ("precision", "precision.transformer_engine")
    },
}  # fmt: skip
"""Other names of an object → the one in the table."""
LIBRARIES |= {
    each: "Composer" if each.startswith("composer") else "Lightning"
    for pair in _SAME.items()
    for each in pair
    if each.startswith(("lightning", "pytorch_lightning", "composer"))
}
LIBRARIES |= dict.fromkeys(_PLUGINS, "Lightning")


@dataclass(frozen=True)
class Name:
    """A row.

    Attributes:
        name: dotted, as a script imports it.
        status: its effect compared with the library's.
        here: its effect under `python -m octavo.compat`, or with Octavo imported in its place.
        change: the replacement by Octavo's names; empty if there is none.
    """

    name: str
    status: Status
    here: str
    change: str = ""


_SMP = (
    Name("torch.sagemaker", "same", "Octavo under SMP's names", "import octavo"),
    Name(
        "torch.sagemaker.init",
        "same",
        "starts the process groups; configuration from a dictionary, a JSON file or SM_HP_MP_PARAMETERS",
        'octavo.init({"hybrid_shard_degree": …, "tensor_parallel_degree": …}), with the degrees by the same names',
    ),
    Name("torch.sagemaker.is_initialized", "same", "True after init", "octavo.state.mesh is not None"),
    Name("torch.sagemaker.transform", "same", "a known model becomes Octavo's decoder, sharded", "octavo.transform(model)"),
    Name(
        "torch.sagemaker.transform(cp_comm_type=)",
        "same",
        'exchange of keys and values; "p2p" by default, as in SMP',
        'octavo.transform(model, cp_comm_type="all_gather"), Octavo\'s default',
    ),
    Name(
        "torch.sagemaker.transform(config=)",
        "differs",
        "a MoEConfig: losses of routers are means over layers; global_token_shuffle is refused",
        'octavo.transform(model, moe={"moe_load_balancing": "aux_loss", …})',
    ),
    Name(
        "torch.sagemaker.transform(load_state_dict_from_rank0=)",
        "same",
        "rank 0 sends its weights",
        "octavo.transform(model, load_state_dict_from_rank0=True)",
    ),
    Name("torch.sagemaker.state", "same", "ranks, sizes and process groups", "octavo.state"),
    Name(
        "torch.sagemaker.delayed_param.DelayedParamIniter",
        "same",
        "parameters of the meta device get Octavo's initial values",
        "with octavo.delayed_init(): around the model",
    ),
    Name("torch.sagemaker.grad_norm.clip_grad_norm_", "same", "clips over all shards", "octavo.clip_grad_norm_(model, 1.0)"),
    Name(
        "torch.sagemaker.distributed.checkpoint",
        "same",
        "saves, in a thread too, and loads; in PyTorch's format, whose reading unpickles",
        "octavo.save(path, model, optimizer), octavo.load(path, model, optimizer)",
    ),
    Name("torch.sagemaker.checkpoint.utils", "same", "keeps the newest folders", "checkpoint.keep of a run file"),
    Name(
        "torch.sagemaker.moe.moe_config.MoEConfig",
        "differs",
        'losses are means over layers; "balanced" is round robin; transform refuses global_token_shuffle',
        'octavo.transform(model, moe={"moe_load_balancing": "aux_loss", …}), [moe] of a run file',
    ),
    Name(
        "torch.sagemaker.moe.moe_config.MoEConfig(global_token_shuffle=true)",
        "absent",
        "refused by transform: no token is dropped, whatever its rank",
        "global_token_shuffle=False",
    ),
    Name(
        "torch.sagemaker.moe.moe_layer.MoELayer",
        "differs",
        "a name for auto-wrap policies and isinstance",
        "octavo.nn.LayerNormMoE",
    ),
    Name(
        "torch.sagemaker.tensor_parallel.transformer",
        "same",
        "classes for auto-wrap policies: the blocks of a transformed model",
        "leave the policy out: octavo.transform shards block by block",
    ),
    Name("torch.sagemaker.nn", "same", "attention by Octavo's kernels", "octavo.nn.DotProductAttention"),
    Name("torch.sagemaker.utils", "same", "helpers of SMP's example scripts"),
    Name("torch.sagemaker.logger.get_logger", "same", "a logger of Python's logging"),
)

_LAYERS = (
    "Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm", "DotProductAttention", "MultiheadAttention",
    "TransformerLayer", "GroupedLinear",
)  # fmt: skip
_TE = (
    Name("transformer_engine", "same", "Octavo under Transformer Engine's names", "import octavo"),
    Name(
        "transformer_engine_torch",
        "absent",
        "Transformer Engine's compiled extension",
        "the layers of transformer_engine.pytorch",
    ),
    Name("transformer_engine.pytorch", "same", "layers of octavo.nn with Transformer Engine's defaults", "octavo.nn"),
    *(
        Name(f"transformer_engine.pytorch.{layer}", "same", f"octavo.nn.{layer}, with its defaults", f"octavo.nn.{layer}")
        for layer in _LAYERS
    ),
    *(
        Name(
            f"transformer_engine.pytorch.{name}",
            "same",
            "FP8 within it; scales and amaxes as there",
            "octavo.fp8_autocast(enabled=True, fp8_recipe=recipe)",
        )
        for name in ("fp8_autocast", "autocast")
    ),
    Name("transformer_engine.pytorch.fp8_model_init", "differs", "weights stay in high precision, and are cast once a step"),
    Name(
        "transformer_engine.pytorch.checkpoint",
        "same",
        "recomputes in backward with the scales of the forward",
        "octavo.transform(model, recompute=True)",
    ),
    Name("transformer_engine.pytorch.distributed", "same", "checkpoint, and the generators of split layers"),
    Name("transformer_engine.pytorch.attention", "same", "attention, and RotaryPositionEmbedding", "octavo.nn"),
    Name("transformer_engine.common.recipe.Format", "same", "HYBRID, E4M3 and E5M2", "octavo.recipe.Format"),
    Name(
        "transformer_engine.common.recipe.DelayedScaling",
        "same",
        "the same scales to the bit; precise gradients and a head in bf16, as there",
        "octavo.recipe.DelayedScaling",
    ),
    Name(
        "transformer_engine.common.recipe.Float8CurrentScaling", "same", "scales of each tensor", "octavo.recipe.CurrentScaling"
    ),
    Name("transformer_engine.common.recipe.Float8BlockScaling", "same", "scales of blocks", "octavo.recipe.BlockScaling"),
    Name(
        "transformer_engine.common.recipe.MXFP8BlockScaling",
        "differs",
        "refused in an autocast: a format of Blackwell GPUs",
        "octavo.recipe.BlockScaling",
    ),
    Name(
        "transformer_engine.common.recipe.NVFP4BlockScaling",
        "differs",
        "refused in an autocast: a format of Blackwell GPUs",
        "octavo.recipe.BlockScaling",
    ),
)

_FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
_HOMES = {
    "torch.distributed.fsdp": ("torch.distributed.fsdp.api", "torch.distributed.fsdp.fully_sharded_data_parallel"),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": (),
    "accelerate": ("accelerate.accelerator", "accelerate.utils.dataclasses", "accelerate.big_modeling"),
}
"""Module → further modules that define its names."""
_FSDP_ARGUMENTS = (
    "module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy", "backward_prefetch", "mixed_precision",
    "ignored_modules", "param_init_fn", "device_id", "sync_module_states", "forward_prefetch", "limit_all_gathers",
    "use_orig_params", "ignored_states", "device_mesh", "post_param_init_fn",
)  # fmt: skip
"""PyTorch's arguments in their order, and SMP's."""
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_FSDP1 = (
    Name(_WRAPPER, "same", "PyTorch's own"),
    Name(f"{_WRAPPER}.OffloadWrapper", "same", "activations in host memory", "octavo.transform(model, offload=True)"),
    Name(f"{_WRAPPER}.CheckpointWrapper", "same", "recomputed in backward", "octavo.transform(model, recompute=True)"),
    Name("torch.distributed.fsdp", "same", "PyTorch's own, around a model that was never transformed"),
    Name(
        _FSDP,
        "same",
        "a transformed model gets Octavo's sharding; any other keeps PyTorch's",
        "leave it out: octavo.transform shards the model after octavo.init",
    ),
    Name(f"{_FSDP}(auto_wrap_policy=)", "accepted", "shards are gathered block by block", "leave it out"),
    Name(f"{_FSDP}(mixed_precision=)", "same", "its dtypes", "parallel.param_dtype and parallel.reduce_dtype"),
    Name(
        f"{_FSDP}(sharding_strategy=)",
        "same",
        "with hybrid_shard_degree as SMP combines them",
        "parallel.hybrid_shard_degree; parallel.reshard_after_forward = false for SHARD_GRAD_OP, true for FULL_SHARD",
    ),
    Name(f"{_FSDP}(backward_prefetch=)", "accepted", "the next block is always gathered ahead", "leave it out"),
    Name(f"{_FSDP}(forward_prefetch=)", "accepted", "the next block is always gathered ahead", "leave it out"),
    Name(f"{_FSDP}(limit_all_gathers=)", "accepted", "one block is gathered ahead", "leave it out"),
    Name(f"{_FSDP}(use_orig_params=)", "accepted", "parameters keep their names and shapes", "leave it out"),
    Name(f"{_FSDP}(param_init_fn=)", "same", "DelayedParamIniter's", "with octavo.delayed_init():"),
    Name(f"{_FSDP}(post_param_init_fn=)", "accepted", "values are there at once", "with octavo.delayed_init():"),
    Name(f"{_FSDP}(sync_module_states=)", "same", "rank 0 sends its weights", "load_state_dict_from_rank0=True"),
    Name(f"{_FSDP}(device_id=)", "same", "the device of the parameters; by default the rank's own", "leave it out"),
    Name(
        f"{_FSDP}(process_group=)",
        "absent",
        "refused beside a transformed model",
        "hybrid_shard_degree of torch.sagemaker.init",
    ),
    Name(f"{_FSDP}(cpu_offload=)", "absent", "refused beside a transformed model", "offload_wrapper, for activations"),
    *(
        Name(f"{_FSDP}({name}=)", "absent", "refused beside a transformed model", "leave it out")
        for name in ("ignored_modules", "ignored_states", "device_mesh")
    ),
    Name(
        "torch.distributed.fsdp.MixedPrecision",
        "differs",
        "dtypes of parameters and of sums; rotary tables stay float32 whatever buffer_dtype says",
        "parallel.param_dtype, parallel.reduce_dtype",
    ),
    Name("torch.distributed.fsdp.ShardingStrategy", "same", "see sharding_strategy", "parallel.hybrid_shard_degree"),
    Name("torch.distributed.fsdp.BackwardPrefetch", "accepted", "the next block is always gathered ahead", "leave it out"),
    Name("torch.distributed.fsdp.wrap", "accepted", "shards are gathered block by block", "leave it out"),
    Name(
        f"{_WRAPPER}.apply_activation_checkpointing",
        "same",
        "blocks are recomputed in backward",
        "octavo.transform(model, recompute=True)",
    ),
    Name(f"{_WRAPPER}.checkpoint_wrapper", "same", "recomputed in backward", "octavo.transform(model, recompute=True)"),
    Name(f"{_WRAPPER}.offload_wrapper", "same", "activations in host memory", "octavo.transform(model, offload=True)"),
    Name(f"{_WRAPPER}.CheckpointImpl", "accepted", "recomputation is never reentrant", "leave it out"),
)

_CONVERTS = "Accelerate converts nn.Linear and nn.LayerNorm to Octavo's layers, under python -m octavo.compat"
_ACCELERATE = (
    Name("accelerate", "same", "Accelerate's own, with a transformed model in it"),
    Name(
        "accelerate.Accelerator",
        "same",
        "takes a model of octavo.transform; its own fp8 settings do not reach Octavo's layers",
        "model = octavo.transform(model) before prepare",
    ),
    Name(
        'accelerate.Accelerator(mixed_precision="fp8")',
        "differs",
        "by its recipe: Transformer Engine's layers are Octavo's under python -m octavo.compat; torchao's and MS-AMP's are not",
        'mixed_precision="bf16", and octavo.fp8_autocast() around the forward',
    ),
    Name("accelerate.Accelerator.prepare", "same", "a transformed model stays as it is"),
    Name("accelerate.Accelerator.backward", "same", "backward outside of the autocast"),
    Name("accelerate.Accelerator.autocast", "differs", "bf16 alone", "octavo.fp8_autocast() inside of it"),
    Name(
        "accelerate.Accelerator.clip_grad_norm_",
        "same",
        "of a model that is not in shards",
        "octavo.clip_grad_norm_(model, 1.0)",
    ),
    Name("accelerate.init_empty_weights", "same", "parameters on the meta device", "octavo.delayed_init()"),
    Name(
        "accelerate.FullyShardedDataParallelPlugin",
        "same",
        "FSDP1 around a model that was transformed before octavo.init",
        "octavo.init shards by itself",
    ),
    Name("accelerate.utils.TERecipeKwargs", "same", _CONVERTS, "octavo.recipe.DelayedScaling"),
    Name(
        "accelerate.utils.TERecipeKwargs(use_mxfp8_block_scaling=true)", "absent", "refused: of Blackwell GPUs", "leave it out"
    ),
    Name(
        "accelerate.utils.FP8RecipeKwargs",
        "differs",
        "with the backend TE or none as TERecipeKwargs; any other asks for its own library",
        "octavo.recipe.DelayedScaling",
    ),
    Name(
        "accelerate.utils.AORecipeKwargs",
        "differs",
        "torchao's layers, not Octavo's: torchao has to be installed",
        "octavo.fp8_autocast() around the forward of a model of octavo.transform",
    ),
    Name(
        "accelerate.utils.MSAMPRecipeKwargs",
        "differs",
        "MS-AMP's layers, not Octavo's: MS-AMP has to be installed",
        "octavo.fp8_autocast() around the forward of a model of octavo.transform",
    ),
    Name("accelerate.DeepSpeedPlugin", "absent", "DeepSpeed shards another way", "octavo.init"),
    *(
        Name(f"accelerate.Accelerator({name}=)", "absent", "another library shards another way", "octavo.init")
        for name in ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
    ),
)

_SDK = (
    Name("sagemaker.pytorch.PyTorch", "same", "a job of this machine", "from octavo.launch import PyTorch"),
    Name("sagemaker.inputs.TrainingInput", "same", "a channel", "from octavo.launch import TrainingInput"),
    Name("sagemaker.get_execution_role", "accepted", "jobs need no role", "leave it out"),
    Name("sagemaker.Session", "accepted", "jobs need no session", "leave it out"),
    Name("sagemaker", "same", "the estimator's names, where the SDK is not installed", "octavo.launch"),
    Name(
        "smdistributed.dataparallel.torch.torch_smddp",
        "differs",
        'the backend "smddp" is NCCL, or gloo without GPUs',
        'backend "nccl"',
    ),
    Name("smdistributed.dataparallel", "absent", "SageMaker's own collectives", 'backend "nccl"'),
    Name("smdistributed", "absent", "SMP v1, another library", "import octavo"),
)

_BY_CALLS = "Composer's fp8_autocast is Octavo's under python -m octavo.compat; only its calls of these names are tested"
_ELSEWHERE = (
    *(
        Name(name, "absent", f"not in the versions of {name.partition('.')[0]} that Octavo needs", way)
        for name, way in _GONE.items()
    ),
    *(
        Name(name, "same", "its layers are Octavo's under python -m octavo.compat", "octavo.fp8_autocast() around the forward")
        for name in _PLUGINS
    ),
    *(
        Name(
            f'{name}(precision="{text}")',
            "differs" if name.startswith("composer.") else "same",
            _BY_CALLS if name.startswith("composer.") else "its layers are Octavo's under python -m octavo.compat",
            "octavo.fp8_autocast() around the forward",
        )
        for name, texts in PRECISIONS.items()
        for text in texts
    ),
    *(Name(name, "same", "its own") for name in PRECISIONS),
    Name("composer.core.Precision.AMP_FP8", "differs", _BY_CALLS, "octavo.fp8_autocast() around the forward"),
)

NAMES: dict[str, Name] = {row.name: row for row in (*_SMP, *_TE, *_FSDP1, *_ACCELERATE, *_SDK, *_ELSEWHERE)}
"""Every row by its name."""

METHODS = (
    "torch.sagemaker.delayed_param.DelayedParamIniter", "accelerate.Accelerator", "sagemaker.pytorch.PyTorch",
    "sagemaker.Session", "octavo.launch.PyTorch", "transformer_engine.pytorch.CudaRNGStatesTracker",
    "transformer_engine.pytorch.distributed.CudaRNGStatesTracker",
    "torch.sagemaker.distributed.checkpoint.async_utils.AsyncCallsQueue",
    "sagemaker.train.ModelTrainer", "sagemaker.train.model_trainer.ModelTrainer", "sagemaker.modules.train.ModelTrainer",
    "sagemaker.modules.train.model_trainer.ModelTrainer",
)  # fmt: skip
"""Classes with methods in the table: their instances are followed through the names that a script assigns them to."""


def library_of(dotted: str) -> str | None:
    """The library of a dotted name; None for others."""
    around = dotted.partition("(")[0]
    while around:
        if around in LIBRARIES:
            return LIBRARIES[around]
        around = around.rpartition(".")[0]
    return None


_STATE, _NOT_THERE = "torch.sagemaker.state.", "not in Octavo's compatibility layer"
_ROOTS = {"torch.sagemaker": SMP, "transformer_engine": TE, "sagemaker": SDK}
_PARTS = {
    "cfg": lambda name: name in (fields_of("octavo.compat.smp.configs", "SmpConfig") or ()) or hasattr(Section, name),
    "ranker": lambda name: has_attribute("octavo.compat.smp.init", "Ranker", name),
}
"""Part of `torch.sagemaker.state` → True for a name that it has."""
_WHOLE = (
    "torch.sagemaker.state",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.wrap",
    _WRAPPER,
    "accelerate",
    "smdistributed",
    "transformer_engine_torch",
)
"""Modules and objects whose row holds for all of their names."""


_OF_SESSIONS = ("boto_region_name", "boto_session", "default_bucket_prefix")
"""Attributes of the SDK's session in Octavo, besides `default_bucket`."""
STATE = (
    "activation_loading_horizon", "cfg", "context_parallel_degree", "cp_process_group", "cp_rank", "cp_size", "device",
    "dp_process_group", "dp_rank", "dp_size", "ep_process_group", "ep_rank", "ep_size", "expert_parallel_degree",
    "get_rng_state_tracker", "hybrid_shard_degree", "local_rank", "mesh", "rank", "ranker", "rep_rank_process_group",
    "sm_activation_offloading", "tensor_parallel_degree", "tp_process_group", "tp_rank", "tp_size", "world_process_group",
    "world_size",
)  # fmt: skip
"""Names of `torch.sagemaker.state`."""


def find(dotted: str) -> Name | None:
    """The row of a dotted name, or that of its class or module; for an absent name a row with the replacement.

    A name of SMP or Transformer Engine is absent if the tables of the compatibility layer lack it.
    """
    if dotted in NAMES:
        return NAMES[dotted]
    if dotted.startswith(f"{_FSDP}."):
        instead = tables("octavo.compat.smp.patches", ("_INSTEAD",)).get("_INSTEAD", {})
        if dotted.rpartition(".")[2] in instead:
            return Name(dotted, "absent", "refused beside a transformed model", instead[dotted.rpartition(".")[2]])
    if LIBRARIES["torch.distributed.fsdp"] == library_of(dotted) or dotted.startswith("accelerate."):
        module, _, last = dotted.partition("(")[0].rpartition(".")
        if has_name(module, last) is False:
            return Name(dotted, "absent", f"not in the installed {module}")
        home = _installed(module) if module.rpartition(".")[2][:1].isupper() and "(" not in dotted else None
        if home is not None and has_attribute(home, module.rpartition(".")[2], last) is False:
            return Name(dotted, "absent", f"not in the installed {module}")
    for part, there in _PARTS.items():
        last = dotted.removeprefix(f"{_STATE}{part}.").partition(".")[0]
        if dotted.startswith(f"{_STATE}{part}.") and not there(last):
            return Name(dotted, "absent", f"torch.sagemaker.state.{part} has no {last} here")
    if dotted.startswith(_STATE) and dotted.removeprefix(_STATE).partition(".")[0] not in STATE:
        return Name(
            dotted, "absent", _NOT_THERE, way_of(dotted, SMP.ways, STATE).partition("layer.")[2].removesuffix(TABLE).strip()
        )
    if dotted == "sagemaker.Session.default_bucket":
        return Name(dotted, "differs", "asks the boto3 session for its account; makes no bucket", "a folder")
    if dotted.startswith("sagemaker.Session.boto_session."):
        return Name(dotted, "differs", "of the boto3 session that it is given; without one there is none", "boto3's session")
    if dotted.startswith("sagemaker.Session.") and dotted.split(".")[2] in _OF_SESSIONS:
        return Name(dotted, "accepted", "as it is given", "leave it out")
    if dotted.startswith("sagemaker.Session."):
        return Name(dotted, "absent", "of an account of AWS: refused", "a folder for inputs and output_path, and no session")
    shim = next((shim for root, shim in _ROOTS.items() if dotted == root or dotted.startswith(f"{root}.")), None)
    owner, _, last = dotted.rpartition(".")
    if (
        shim is not None
        and owner.rpartition(".")[2][:1].isupper()
        and _has(shim.modules, owner)
        and _attribute(owner, last) is False
    ):
        return Name(dotted, "absent", f"{owner} has no {last} here")
    around = list(_around(dotted))
    row = next((NAMES[name] for name in around if name in NAMES and name not in _ROOTS), None)
    whole = any(name in NAMES and (name in _WHOLE or name.rpartition(".")[2][:1].isupper()) for name in around)
    if shim is None or whole:
        return row if whole else None
    if any(_has(shim.modules, name) for name in (dotted, *(name for name in around if name.rpartition(".")[2][:1].isupper()))):
        if shim is SDK and row is None:
            return _of_sdk(dotted)
        return Name(dotted, "same", row.here if row else f"as in {LIBRARIES[shim.root]}", row.change if row else "")
    module = dotted.rpartition(".")[0]
    names = " ".join(shim.modules.get(module, {}).values()).split()
    return _absent(dotted, shim.ways, names)


def _of_sdk(dotted: str) -> Name:
    """The row of a name of SageMaker's SDK, which has each name in several modules."""
    last = dotted.rpartition(".")[2]
    if f"sagemaker.{last}" in NAMES:
        row = NAMES[f"sagemaker.{last}"]
        return Name(dotted, row.status, row.here, row.change)
    if last in ("image_uris", "retrieve"):
        return Name(dotted, "accepted", "a job runs in this Python", "leave it out")
    if last == "MPI":
        return Name(dotted, "differs", "ModelTrainer refuses it", "Torchrun()")
    change = f"from octavo.launch import {last}" if last in octavo.launch.__all__ else ""
    return Name(dotted, "same", "for jobs of this machine", change)


def signature_of_name(dotted: str) -> Signature | None:
    """The signature of a name of the compatibility layer, or of a call of a layer (`….forward`); None if it is unknown."""
    if dotted == _FSDP:
        return Signature(_FSDP_ARGUMENTS, len(_FSDP_ARGUMENTS) - 1, ("module",))
    owner, _, method = dotted.rpartition(".")
    if method == "forward" and is_layer(owner):
        return forward_of(owner.rpartition(".")[2])
    if owner.rpartition(".")[2][:1].isupper() and owner != "sagemaker.pytorch.PyTorch":
        home = _home(owner)
        return None if home is None else method_of(home, owner.rpartition(".")[2], method)
    shim = next((shim for root, shim in _ROOTS.items() if dotted.startswith(f"{root}.")), None)
    module, _, last = dotted.rpartition(".")
    if shim is None:
        home = _installed(dotted)
        return None if home is None else signature_of(home, last)
    if owner in ("sagemaker.pytorch.PyTorch",):
        return method_of("octavo.compat.sagemaker.estimator", "PyTorch", method)
    if is_layer(dotted):
        return constructor(last)
    return next((signature_of(m, last) for m, names in shim.modules.get(module, {}).items() if last in names.split()), None)


def _home(dotted: str) -> str | None:
    """The module that defines a class: of the compatibility layer, or of an installed library."""
    shim = next((shim for root, shim in _ROOTS.items() if dotted.startswith(f"{root}.")), None)
    module, _, last = dotted.rpartition(".")
    if shim is None:
        return _installed(dotted)
    return next((home for home, names in shim.modules.get(module, {}).items() if last in names.split()), None)


def _installed(dotted: str) -> str | None:
    """The module in which an installed library defines a class or function; None for others."""
    module, _, last = dotted.rpartition(".")
    for root, homes in _HOMES.items():
        if module == root or module.startswith(f"{root}."):
            return next((home for home in (module, *homes) if signature_of(home, last) or members(home, last)), None)
    return None


def unknown_argument(dotted: str, argument: str) -> bool:
    """True for an argument that a name of the compatibility layer does not have."""
    known = signature_of_name(dotted)
    return known is not None and argument not in known.names


def is_layer(dotted: str) -> bool:
    """True for one of Transformer Engine's layers, by its name in `transformer_engine.pytorch`."""
    module, _, last = dotted.rpartition(".")
    return module == "transformer_engine.pytorch" and last in _LAYERS


CALLED = (
    "transformer_engine.pytorch.RotaryPositionEmbedding", "transformer_engine.pytorch.attention.RotaryPositionEmbedding",
    "transformer_engine.pytorch.attention.rope.RotaryPositionEmbedding", "torch.sagemaker.nn.attn.FlashSelfAttention",
    "torch.sagemaker.nn.attn.FlashGroupedQueryAttention",
    "torch.sagemaker.nn.huggingface.llama_flashattn.LlamaFlashAttention",
)  # fmt: skip
"""Further modules that a script calls."""


def is_called(dotted: str) -> bool:
    """True for the class of a layer or of another module that scripts call."""
    return is_layer(dotted) or dotted in CALLED


def unchecked(dotted: str) -> str | None:
    """The last part of an attribute whose class does not show it in its source; None for an attribute that exists."""
    owner, _, last = dotted.partition("(")[0].rpartition(".")
    if (
        "(" in dotted
        or not owner.rpartition(".")[2][:1].isupper()
        or library_of(owner)
        not in (
            "Transformer Engine",
            "SMP",
            "SageMaker SDK",
        )
    ):
        return None
    return None if _attribute(owner, last) else last


def _attribute(owner: str, name: str) -> bool | None:
    """True if a class of the compatibility layer has an attribute, False if not, None if the source does not show it."""
    shim = next((shim for root, shim in _ROOTS.items() if owner.startswith(f"{root}.")), None)
    module, _, last = owner.rpartition(".")
    for home, names in (shim.modules.get(module, {}) if shim is not None else {}).items():
        if last in names.split():
            return has_attribute(home, last, name)
    return None


def absent_attribute(layer: str, name: str) -> str | None:
    """The remedy for an attribute of Transformer Engine's layers that Octavo's lack; None for others."""
    ways = tables("octavo.compat.te.state", ("WAYS",)).get("WAYS", {})
    return ways.get(name) if is_layer(layer) and _attribute(layer, name) is not True else None


def is_below_absent(dotted: str) -> bool:
    """True for a name of an absent module that has a remedy."""
    shim = next((shim for root, shim in _ROOTS.items() if dotted.startswith(f"{root}.")), None)
    return shim is not None and any(
        name in shim.ways and name not in shim.modules and name.rpartition(".")[2].islower() for name in _around(dotted)
    )


def is_module(dotted: str) -> bool:
    """True for a module of SMP, Transformer Engine or the SDK."""
    return any(dotted in shim.modules for shim in _ROOTS.values())


def names_of(module: str) -> list[str]:
    """The names in a module of the table that Octavo has."""
    shim = next((shim for root, shim in _ROOTS.items() if module == root or module.startswith(f"{root}.")), None)
    if shim is not None:
        inner = [name.rpartition(".")[2] for name in shim.modules if name.rpartition(".")[0] == module]
        return [*" ".join(shim.modules.get(module, {}).values()).split(), *inner]
    return [name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == module and "(" not in name]


def _absent(dotted: str, ways: Mapping[str, str], known: Iterable[str]) -> Name:
    """A row for an absent name, with the remedy in the message of its import."""
    way = way_of(dotted, ways, known).removeprefix(f"{dotted} is {_NOT_THERE}.")
    return Name(dotted, "absent", _NOT_THERE, way.removesuffix(TABLE).strip())


def _has(modules: Mapping[str, Mapping[str, str]], dotted: str) -> bool:
    """True for a module of the table, and for a name in one."""
    module, _, last = dotted.rpartition(".")
    return dotted in modules or any(last in names.split() for names in modules.get(module, {}).values())


def _around(dotted: str) -> Iterator[str]:
    """The enclosing names of a dotted name, the longest first."""
    while dotted := dotted.rpartition(".")[0]:
        yield dotted


def canonical(dotted: str) -> str:
    """The name in the table for an object that a library has in several modules."""
    for other, name in _SAME.items():
        if dotted == other or dotted.startswith(f"{other}."):
            return name + dotted.removeprefix(other)
    if dotted in NAMES or is_below_absent(dotted):
        return dotted
    last = dotted.rpartition(".")[2]
    if library_of(dotted) is None:
        return dotted
    root = next(root for root in LIBRARIES if dotted == root or dotted.startswith(f"{root}."))
    same = [name for name in NAMES if name.startswith(f"{root}.") and name.rpartition(".")[2] == last and last[:1].isupper()]
    return same[0] if len(same) == 1 else dotted
