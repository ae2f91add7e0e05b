"""A run file for the arguments of SMP's example scripts and the dictionaries of an estimator.

Defaults are those of SMP's example script. Each key has its source in a comment, and is converted where units differ; arguments
without a key are listed at the top of the file.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from octavo.compat.migrate.example import DEFAULTS, NO_KEY, NUMBERS, OPTIONAL, ROPE_SCALING, SHAPES
from octavo.compat.migrate.known import REST, UNKNOWN, entries
from octavo.compat.migrate.script import Script, known
from octavo.compat.migrate.trainers import is_trainer
from octavo.config.degrees import DEGREES, fit_degrees
from octavo.config.effects import idle_keys, settled
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.hardware import find_instance
from octavo.launch.addresses import local_path
from octavo.storage import write_atomic


@dataclass
class _Draft:
    """A run file under construction. keys: section.key → (value, its source)."""

    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, origin: str) -> None:
        self.keys[key] = value, origin


def run_file(scripts: Sequence[Script], *, world_size: int | None = None) -> str:
    """The text of a run file, which `RunConfig` accepts.

    Args:
        scripts: a training script, a script with its estimator, or both.
        world_size: ranks; by default those of the estimator.

    Raises:
        InputError: there are no arguments of SMP's, or their values or the number of ranks are not known.
    """
    values, origins, estimator = _collect(scripts)
    ranks = _ranks(estimator) if world_size is None else world_size
    if ranks < 1:
        raise InputError(f"--world-size {ranks} is not a number of ranks: give 1 or more.")
    draft = _Draft()
    calls = sum(len(script.estimators) for script in scripts)
    if calls > 1:
        draft.notes.append(f"from the last of {calls} calls of an estimator{_differences(scripts)}")
    for script in scripts:
        draft.notes += [f"{script.path.name}: {note}" for note in script.notes if note.startswith("code cell")]
    _unknown_arguments(values, origins, draft)
    arguments = DEFAULTS | dict.fromkeys(OPTIONAL) | values
    for name in ("train_batch_size", "gradient_accumulation_steps", "lr"):
        if not arguments[name] > 0:
            raise InputError(f"{name} = {arguments[name]} trains nothing: give more than 0.")

    def of(*names: str) -> str:
        return ", ".join(
            f"{name} = {_shown(arguments[name])}" + ("" if name in origins else " (SMP's default)") for name in names
        )

    _model(arguments, of, estimator, draft)
    _data(arguments, of, estimator, draft)
    degrees = _parallel(arguments, of, estimator, ranks, draft)
    _moe(arguments, of, draft)
    _fp8(arguments, of, draft)
    _optimizer(arguments, of, draft)
    _train(arguments, of, max(1, ranks // degrees), draft)
    return _text(scripts, draft, ranks)


def _differences(scripts: Sequence[Script]) -> str:
    """Hyperparameters and SMP's parameters in which the calls of an estimator differ, as the end of a sentence."""
    calls = [
        {name: value for table in _tables(call).values() for name, value in table.items()}
        for script in scripts
        for call in script.estimators
    ]
    last = calls[-1]
    names = sorted({str(name) for call in calls for name in {**call, **last} if call.get(name) != last.get(name)})
    return f", which differ in {', '.join(names)}" if names else ""


def write_run_file(path: Path, scripts: Sequence[Script], *, world_size: int | None = None) -> None:
    """Write `run_file` to a new file, and read it back.

    Raises:
        InputError: as `run_file`, or the file exists.
    """
    text = run_file(scripts, world_size=world_size)
    if path.exists():
        raise InputError(f"--run-file {str(path)!r} exists, and nothing is overwritten: give another name.")
    if not path.parent.is_dir():
        raise InputError(f"--run-file {str(path)!r}: there is not a folder {str(path.parent)!r}. Make it first.")
    write_atomic(path, text)
    RunConfig.from_file(path)


def _collect(scripts: Sequence[Script]) -> tuple[dict[str, Any], set[str], dict[str, Any]]:
    """(values of arguments, names of those that the scripts set, the last call of an estimator)."""
    values: dict[str, Any] = {}
    unsure: list[str] = []
    estimator: dict[str, Any] = {}
    for script in scripts:
        values |= {name: value for name, value in known(script.arguments) if value is not None}
        unsure += [name for name, value in script.arguments.items() if value is UNKNOWN and name in DEFAULTS]
    for script in scripts:
        for call in script.estimators[-1:]:
            estimator = call
            for what, table in _tables(call).items():
                if REST in table:
                    stops = "".join(f" In {sentence}: the script ends there." for sentence in script.unbound[:1])
                    raise InputError(
                        f"{script.path}: {what} computed at run time.{stops} Write them as a dictionary of constants."
                    )
                unsure = [name for name in unsure if name not in table]
                unsure += [name for name, value in table.items() if value is UNKNOWN]
                values |= {name: value for name, value in known(table) if value is not None}
    if "max_context_width" not in values and not set(values) & set(DEGREES):
        paths = ", ".join(str(script.path) for script in scripts)
        if any(is_trainer(use.name) for script in scripts for use in script.uses):
            raise InputError(
                f"{paths}: calls of ModelTrainer are not read for a run file. Give the training script with its arguments "
                "(--max_context_width …), or the same values to PyTorch(hyperparameters=…, distribution=…)."
            )
        raise InputError(
            f"{paths}: no arguments of SMP's example scripts (--max_context_width …) and no estimator with its parameters, so "
            "there is nothing to write a run file from. Give the script that has them."
        )
    wanted = [name for name in unsure if (name in DEFAULTS or name in OPTIONAL) and name not in (*_PATHS, _PRETRAINED)]
    if wanted:
        raise InputError(f"not known without running the script: {', '.join(wanted)}. Write their values as constants.")
    values |= dict.fromkeys(name for name in unsure if name in _PATHS)
    if _PRETRAINED in unsure:
        values[_PRETRAINED] = UNKNOWN
    single = {name: value[0] for name, value in values.items() if isinstance(value, list) and len(value) == 1}
    values = {name: _number(name, value) for name, value in (values | single).items()}
    return values, {name for name, value in values.items() if value is not None}, estimator


def _tables(call: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """Subject of a message → entries of an estimator's call: unknown arguments, hyperparameters, SMP's parameters."""
    arguments = {REST: UNKNOWN} if REST in call and not {"hyperparameters", "distribution"} <= set(call) else {}
    hyperparameters, parameters = call.get("hyperparameters"), call.get("distribution")
    for key in ("smdistributed", "modelparallel", "parameters"):
        if isinstance(parameters, dict):
            parameters = parameters.get(key, UNKNOWN if REST in parameters else None)
    return {
        "arguments of the estimator are": arguments,
        "the hyperparameters are": {} if hyperparameters is None else entries(hyperparameters),
        "the parameters of distribution are": {} if parameters is None else entries(parameters),
    }


def _number(name: str, value: Any) -> Any:
    """A numeric argument as a number, also from text, as argparse and SageMaker convert it; others unchanged.

    Raises:
        InputError: text that is not a number.
    """
    counts = isinstance(DEFAULTS.get(name), int | float) or name in NUMBERS
    if isinstance(value, bool) and isinstance(DEFAULTS.get(name), int):
        return int(value)
    if not counts or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value).strip().lower()
    if text in ("true", "false"):
        return int(text == "true")
    for kind in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            if math.isfinite(number := kind(text)):
                return number
    raise InputError(f"{name} = {value!r} is not a number.")


def _ranks(estimator: Mapping[str, Any]) -> int:
    kind, count = estimator.get("instance_type"), estimator.get("instance_count", 1)
    if not isinstance(kind, str) or not isinstance(count, int):
        raise InputError("the number of ranks is not known, and the global batch depends on it: give --world-size.")
    instance = None if kind in ("local", "local_gpu") else find_instance(kind)
    return count * (1 if instance is None else instance.gpus)


def _unknown_arguments(values: Mapping[str, Any], origins: set[str], draft: _Draft) -> None:
    others = sorted(name for name in origins if name not in DEFAULTS and name not in OPTIONAL and name not in NO_KEY)
    if others:
        draft.notes.append(f"no key for: {', '.join(f'{name} = {_shown(values[name])}' for name in others)}")
    needless = sorted(name for name in origins if name in NO_KEY)
    if needless:
        draft.notes.append(f"need no key: {', '.join(needless)}")


def _model(arguments: Mapping[str, Any], of: Any, estimator: Mapping[str, Any], draft: _Draft) -> None:
    source = arguments[_PRETRAINED]
    kind = str(arguments["model_type"])
    if source is UNKNOWN:
        draft.put("model.source", "PRETRAINED-MODEL", f"{_PRETRAINED} is known only at run time: give its name or folder")
        draft.put("model.load", True, "its weights")
    elif source:
        path, where = _of_channel(str(source), estimator)
        draft.put("model.source", path, f"{of(_PRETRAINED)}{where}")
        draft.put("model.load", True, "its weights")
    elif kind in SHAPES:
        draft.put("model.source", SHAPES[kind], f"{of('model_type')}; sizes below")
        draft.put("model.config", _sizes(kind, arguments), "sizes from the arguments")
    else:
        draft.put("model.source", f"FOLDER-OF-{kind.upper()}", f"{of('model_type')}: give a folder with its config.json")
    draft.put("model.dtype", "bfloat16" if arguments["bf16"] else "float32", of("bf16"))


def _sizes(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = arguments["hidden_width"], arguments["num_heads"]
    sizes = {
        "vocab_size": arguments["vocab_size"],
        "hidden_size": hidden,
        "num_hidden_layers": arguments["num_layers"],
        "num_attention_heads": heads,
        "max_position_embeddings": arguments["max_context_width"],
        "initializer_range": arguments["initializer_range"],
    }
    if kind == "gpt_neox":
        rope = {"rope_theta": float(arguments["rotary_emb_base"]), "partial_rotary_factor": arguments["rotary_pct"]}
        return sizes | {"intermediate_size": 4 * hidden, "rope_parameters": {"rope_type": "default"} | rope}
    llama = kind.startswith("llama")
    inner = arguments["llama_intermediate_size" if llama else "intermediate_size"]
    sizes |= {"intermediate_size": inner, "num_key_value_heads": arguments["num_key_value_heads"] or heads}
    if llama:
        return sizes | {"rope_parameters": _llama_rope(kind, arguments)}
    if kind == "mixtral":
        sizes |= {key: arguments[key] for key in ("num_local_experts", "num_experts_per_tok")}
    if kind == "mistral":
        # TOML has no None for "no window": one of all positions is the same, where the shape has 4,096
        sizes |= {"rms_norm_eps": 1e-6, "sliding_window": arguments["max_context_width"]}
    if arguments["sliding_window"] is not None:
        sizes["sliding_window"] = arguments["sliding_window"]
    return sizes


def _llama_rope(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding of the example's Llama; "llama_v3" may have the scaling of Llama 3.1.

    Raises:
        InputError: a scaling that the example does not have.
    """
    theta, scaling = float(arguments["rotary_emb_base"]), arguments["rope_scaling_type"]
    if kind != "llama_v3" or scaling in (None, "None"):
        return {"rope_type": "default", "rope_theta": theta}
    if scaling != "llama3":
        raise InputError(f"rope_scaling_type = {scaling!r} is not in SMP's example: 'llama3' is, or leave it out.")
    numbers = {key: arguments[f"rope_scaling_{key}"] for key in ROPE_SCALING}
    return {"rope_type": "llama3", "rope_theta": theta} | numbers


def _data(arguments: Mapping[str, Any], of: Any, estimator: Mapping[str, Any], draft: _Draft) -> None:
    files, kind = _files(arguments, of)
    if arguments["use_synthetic_data"]:
        draft.notes.append(
            "use_synthetic_data = 1 trains on random tokens, without validation: give data.source a folder of text"
        )
    for key, name, channel in (("source", "training_dir", "train"), ("validation_source", "test_dir", "test")):
        if isinstance(arguments[name], str):
            folder, where = _of_channel(arguments[name], estimator)
            draft.put(f"data.{key}", f"{folder.rstrip('/')}{files}", f"{of(name)}{where}, {kind}")
        elif (path := _channel(channel, estimator)) is not None:
            draft.put(f"data.{key}", f"{path}{files}", f"the channel {channel}, {kind}")
        else:
            draft.put(f"data.{key}", f"{channel}{files}", f"the channel {channel}: give its folder; {kind}")
    draft.put("data.sequence_length", arguments["max_context_width"], of("max_context_width"))
    draft.put("data.packing", "join", "chunks of one length")
    if arguments["data_num_workers"]:
        draft.put("data.workers", arguments["data_num_workers"], of("data_num_workers"))
    draft.put("data.seed", arguments["seed"], of("seed"))


def _channel(name: str, estimator: Mapping[str, Any]) -> Path | None:
    """The folder of a channel, if it is on this machine."""
    inputs = (estimator.get("fit") or {}).get("inputs")
    address = inputs.get(name) if isinstance(inputs, dict) else None
    return local_path(address, name) if isinstance(address, str) else None


def _of_channel(path: str, estimator: Mapping[str, Any]) -> tuple[str, str]:
    """A path below a channel of SageMaker's container as one on this machine, and the end of its comment."""
    name, _, inside = path.removeprefix(_CHANNELS).partition("/")
    if not path.startswith(_CHANNELS) or not name:
        return path, ""
    folder = _channel(name, estimator)
    return str(Path(folder or name) / inside), "" if folder else f"; the channel {name}: give its folder"


def _files(arguments: Mapping[str, Any], of: Any) -> tuple[str, str]:
    """Files that the example reads of a folder, as the end of a path, and the arguments that say so.

    Raises:
        InputError: a kind of data that Octavo does not read.
    """
    if arguments["dataset_type"] == "hf":  # load_from_disk
        return "", str(of("dataset_type"))
    if arguments["dataset_type"] != "gpt_jsonl":
        raise InputError(
            f"dataset_type = {arguments['dataset_type']!r} is data that Octavo does not read: 'gpt_jsonl' and 'hf' are."
        )
    return ("/*.json.gz" if arguments["zipped_data"] > 0 else "/*.json"), str(of("zipped_data"))


def _parallel(arguments: Mapping[str, Any], of: Any, estimator: Mapping[str, Any], ranks: int, draft: _Draft) -> int:
    """Put the degrees into the draft; returns the number of ranks that share a sample.

    Raises:
        InputError: the degrees do not fit the ranks.
    """
    try:
        fit_degrees(**{name: arguments[name] for name in DEGREES if arguments[name] is not None}, world_size=ranks)
    except InputError as error:
        raise InputError(_in_users_names(str(error), estimator, ranks)) from None
    for name in DEGREES:
        if arguments[name] is not None:
            draft.put(f"parallel.{name}", arguments[name], of(name))
    strategy, shard = str(arguments["sharding_strategy"]).lower(), arguments["hybrid_shard_degree"] or 0
    count = estimator.get("instance_count", 1)
    if not shard and "hybrid" in strategy and isinstance(count, int) and count > 1:
        draft.put("parallel.hybrid_shard_degree", ranks // count, f"{of('sharding_strategy')}: within a machine")
    if strategy == "no_shard":
        draft.put("parallel.hybrid_shard_degree", 1, of("sharding_strategy"))
    if strategy in ("full_shard", "shard_grad_op", "_hybrid_shard_zero2"):
        draft.put("parallel.reshard_after_forward", strategy == "full_shard", of("sharding_strategy"))
    if arguments["bf16"]:
        draft.put("parallel.reduce_dtype", "bfloat16", "MixedPrecision of the example; Octavo's default is float32")
    if arguments["sm_activation_offloading"]:
        draft.put("parallel.sm_activation_offloading", True, of("sm_activation_offloading"))
        if arguments["activation_loading_horizon"]:
            draft.put(
                "parallel.activation_loading_horizon", arguments["activation_loading_horizon"], of("activation_loading_horizon")
            )
    elif arguments["sm_activation_offloading"] is None:
        draft.notes.append(
            "SMP offloads activations by default, where the script calls offload_wrapper: then set "
            "parallel.sm_activation_offloading = true"
        )
    return int((arguments["context_parallel_degree"] or 1) * (arguments["tensor_parallel_degree"] or 1))


def _in_users_names(text: str, estimator: Mapping[str, Any], ranks: int) -> str:
    """A message about degrees, with the script's names of keys and ranks instead of a run file's."""
    text = re.sub(r", or start more ranks with --ranks \([^)]*\)| \(--ranks \d+\)", "", text)
    text = re.sub(r"\bparallel\.(?=[a-z])", "", text)
    parameters = _tables(estimator)["the parameters of distribution are"] if estimator else {}
    hyperparameters = _tables(estimator)["the hyperparameters are"] if estimator else {}
    places = {
        'distribution["smdistributed"]["modelparallel"]["parameters"]': parameters,
        "hyperparameters": hyperparameters,
    }
    sentences = [f"{name} is in {place}" for name in DEGREES for place, table in places.items() if name in table]
    where = "; ".join(sentences) or "degrees are its arguments"
    kind, count = estimator.get("instance_type"), estimator.get("instance_count", 1)
    of_estimator = isinstance(kind, str) and isinstance(count, int) and _ranks(estimator) == ranks
    told = f"instance_type = {kind!r} and instance_count = {count}" if of_estimator else "--world-size"
    return f"{text.rstrip('.')}. In the script {where}; the {ranks} ranks are those of {told}."


def _moe(arguments: Mapping[str, Any], of: Any, draft: _Draft) -> None:
    if not arguments["moe"]:
        return
    asked = arguments["moe_load_balancing"]
    draft.put("moe.moe_load_balancing", asked, of("moe_load_balancing"))
    if asked == "aux_loss":
        draft.put("moe.moe_aux_loss_coeff", float(arguments["moe_aux_loss_coeff"]), of("moe_aux_loss_coeff"))
    draft.put("moe.moe_z_loss_coeff", float(arguments["moe_z_loss_coeff"]), of("moe_z_loss_coeff"))
    draft.notes.append("losses of [moe] are means over layers, where Megatron-LM, and SMP by it, adds layers up")


def _fp8(arguments: Mapping[str, Any], of: Any, draft: _Draft) -> None:
    smp = (
        arguments["use_smp_implementation"]
        or max(arguments[degree] or 1 for degree in ("context_parallel_degree", "tensor_parallel_degree")) > 1
    )
    enabled = bool(arguments["fp8"]) and bool(smp)
    origin = of("fp8") if smp else f"{of('fp8')}, without effect as {of('use_smp_implementation')}"
    draft.put("fp8.enabled", enabled, origin)
    if enabled:
        draft.put("fp8.recipe", "delayed", "as in the example")
        draft.put("fp8.amax_history_len", arguments["fp8_amax_history_len"], of("fp8_amax_history_len"))
        draft.put("fp8.amax_compute_algo", arguments["fp8_amax_compute_algo"], of("fp8_amax_compute_algo"))
        draft.put("fp8.head", False, "as Transformer Engine; Octavo's default is faster")
        draft.put("fp8.fast_accumulation", False, "as Transformer Engine; Octavo's default is faster")


def _optimizer(arguments: Mapping[str, Any], of: Any, draft: _Draft) -> None:
    rate, iterations = arguments["lr"], arguments["lr_decay_iters"] or arguments["max_steps"]
    draft.put("optimizer.lr", float(rate), of("lr"))
    draft.put("optimizer.betas", [arguments["beta1"], arguments["beta2"]], of("beta1", "beta2"))
    draft.put("optimizer.weight_decay", float(arguments["weight_decay"]), of("weight_decay"))
    draft.put("optimizer.clip", float(arguments["grad_clip"]), of("grad_clip"))
    warmup = round(arguments["warmup"] * iterations)
    draft.put("optimizer.warmup_steps", warmup, f"{of('warmup')} of {of('lr_decay_iters')}")
    style = arguments["lr_decay_style"]
    if style in ("cosine", "linear", "constant"):
        draft.put("optimizer.schedule", style, of("lr_decay_style"))
    else:
        draft.put("optimizer.schedule", "cosine", f"there is no schedule {style!r}: choose cosine, linear, wsd or constant")
    if style != "constant":
        draft.put("optimizer.min_lr_fraction", min(1.0, arguments["min_lr"] / rate), f"{of('min_lr')} / lr")
    if arguments["plateau"]:
        draft.notes.append(f"no key for plateau = {arguments['plateau']}; the schedule wsd stays at its peak")
    if iterations != arguments["max_steps"]:
        draft.notes.append(
            f"the schedule ends at train.steps; there it ends after {iterations} iterations, whatever max_steps is"
        )


def _train(arguments: Mapping[str, Any], of: Any, samples: int, draft: _Draft) -> None:
    """samples: data-parallel ranks."""
    micro, accumulation = arguments["train_batch_size"], arguments["gradient_accumulation_steps"]
    steps = math.ceil(arguments["max_steps"] / accumulation)
    draft.put("train.steps", steps, of("max_steps") + (f" micro-batches / {accumulation}" if accumulation > 1 else ""))
    origin = f"{of('train_batch_size')} x {samples} data-parallel ranks"
    draft.put("train.global_batch", micro * accumulation * samples, origin + (f" x {accumulation}" if accumulation > 1 else ""))
    draft.put("train.micro_batch", micro, of("train_batch_size"))
    draft.put("train.recompute", bool(arguments["activation_checkpointing"]), of("activation_checkpointing"))
    draft.put("train.seed", arguments["seed"], of("seed"))
    if arguments["use_synthetic_data"]:
        pass
    elif arguments["validation_freq"] and arguments["validation_batches"] < 1:
        draft.notes.append(f"no validation, as there: validation_batches = {arguments['validation_batches']} is no batch")
    elif arguments["validation_freq"]:
        draft.put("train.validate_every", math.ceil(arguments["validation_freq"] / accumulation), of("validation_freq"))
    batches = math.ceil(arguments["validation_batches"] * arguments["val_batch_size"] * samples / micro)
    if batches > 0:
        each = f"{of('validation_batches', 'val_batch_size')} on each of {samples} ranks"
        draft.put("train.validate_batches", batches, each)
    draft.put("checkpoint.every", math.ceil(arguments["checkpoint_freq"] / accumulation), of("checkpoint_freq"))
    draft.put("checkpoint.keep", arguments["num_kept_checkpoints"], of("num_kept_checkpoints"))
    draft.put("log.every", arguments["logging_freq"], of("logging_freq"))
    if arguments["tensorboard_dir"]:
        draft.put("log.trackers", ["tensorboard"], of("tensorboard_dir"))
    for name in ("checkpoint_dir", "resume_from_checkpoint", "model_dir", "random_seed"):
        if arguments[name] is not None:
            draft.notes.append(f"{name} = {_shown(arguments[name])}: {_FOLDERS[name]}")


_CHANNELS = "/opt/ml/input/data/"
_PRETRAINED = "hf_pretrained_model_name_or_dir"
_PATHS = ("checkpoint_dir", "resume_from_checkpoint", "model_dir", "training_dir", "test_dir", "tensorboard_dir")
"""Arguments that are folders of the cloud's machines: a run file does without them."""
_FOLDERS = {
    "checkpoint_dir": "checkpoints are in the run's folder, train.output",
    "resume_from_checkpoint": "the same command continues from the newest checkpoint",
    "model_dir": "octavo export RUN --to FOLDER writes the model",
    "random_seed": "seed is the seed of a run",
}


def _text(scripts: Sequence[Script], draft: _Draft, ranks: int) -> str:
    tables: dict[str, dict[str, Any]] = {}
    for key, (value, _) in draft.keys.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    config = RunConfig.from_dict(tables, where="the run file", context={"idle": "allowed"})
    idle = idle_keys(config)
    for each in idle:
        del draft.keys[each.key]
    settled(config, idle)
    names = ", ".join(script.path.name for script in scripts)
    text = [f"# From {names}, for {ranks} ranks: octavo train RUN.toml --ranks {ranks}"]
    text += [f"# {note}." for note in draft.notes]
    for section in (name for name in RunConfig.model_fields if any(key.startswith(f"{name}.") for key in draft.keys)):
        text += ["", f"[{section}]"]
        nested = []
        for key, (value, origin) in draft.keys.items():
            if key.partition(".")[0] != section:
                continue
            name = key.partition(".")[2]
            if isinstance(value, dict):
                nested += [
                    "",
                    f"[{section}.{name}]  # {origin}",
                    tomli_w.dumps(value).replace("[", f"[{section}.{name}.").rstrip(),
                ]
            else:
                text.append(f"{_line(name, value)}  # {_comment(origin)}")
        text += nested
    return "\n".join(text) + "\n"


def _line(name: str, value: Any) -> str:
    if isinstance(value, list):  # on one line
        return f"{name} = [{', '.join(tomli_w.dumps({'x': each}).strip().removeprefix('x = ') for each in value)}]"
    return tomli_w.dumps({name: value}).strip()


def _comment(text: str) -> str:
    return " ".join(text.split())


def _shown(value: Any) -> str:
    text = repr(value)
    return " ".join((text if len(text) <= 60 else f"{text[:57]}…").split())
