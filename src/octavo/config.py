"""What a user may say in a run file, and what the defaults are.

A run file is TOML with one table a section; every key is a typed, documented field of a model below, and nothing else is
accepted. The models hold values only: they open no file but the run file itself and import no torch, so that a mistake is
answered in milliseconds, before data or a GPU is touched. `octavo.launch` reads them on machines without torch.

    config = RunConfig.from_file("run.toml", ["optimizer.lr=1e-4"])
    config.to_toml()            # the resolved file that is kept in the run folder
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from octavo.errors import InputError, nearest


class Section(BaseModel):
    """A table of the run file: unknown keys are refused, values are immutable once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), strict=True, allow_inf_nan=False, serialize_by_alias=True
    )


class ModelConfig(Section):
    """Which transformer is trained."""

    source: str = Field(description='A Hugging Face folder or id, or a built-in shape such as "llama-1b".')
    load: bool = Field(False, description="Start from the pretrained weights of `source` instead of random ones.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="Dtype of activations, and of the products that do not run in FP8; float16 goes with train.loss_scale.",
    )
    params_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype in which parameters, gradients and optimizer states are kept: float32 is master weights."
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the Hugging Face config to override, such as hidden_size (random weights only).",
    )

    @model_validator(mode="after")
    def _overrides_need_random_weights(self) -> ModelConfig:
        if self.load and self.config:
            raise ValueError("model.config changes the shape, so model.load must be false")
        return self


class DataConfig(Section):
    """Which text it learns, and how the text becomes sequences."""

    source: str | list[str] = Field(
        description='"python:docstrings", "python:packages", local .txt, .jsonl or .parquet files (globs), or a Hugging Face '
        "data set."
    )
    text_field: str = Field("text", description="Column or JSON key that holds the text.")
    subset: str | None = Field(
        None, description='Configuration of a Hugging Face data set that has several, such as "wikitext-2-raw-v1".'
    )
    split: str = Field("train", description="Split of a Hugging Face data set.")
    tokenizer: str = Field(
        "train", description='A Hugging Face folder or id, or "train": a byte-level BPE trained on the corpus.'
    )
    vocab_size: int = Field(8192, ge=257, description='Vocabulary of a tokenizer = "train".')
    sequence_length: int = Field(description="Tokens in a sequence.")
    packing: Literal["join", "documents"] = Field(
        "join", description='"join": one stream cut in sequences; "documents": attention and loss stay within a document.'
    )
    max_documents: int | None = Field(None, ge=1, description="Take this many documents, chosen by `seed`; all when absent.")
    max_tokens: int | None = Field(None, ge=2, description="Stop tokenising after this many tokens; all when absent.")
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0, description="Share of the documents held out for validation.")
    seed: int = Field(0, ge=0, description="Of the choice of documents, of the split and of the order of samples.")
    workers: int = Field(
        0, ge=0, le=64, description="Threads that read the coming steps' sequences ahead; 0: read when the step begins."
    )
    folder: str = Field(
        "runs/data", description="Where tokenised corpora are kept, one folder for each distinct [data] section."
    )

    @field_validator("sequence_length")
    @classmethod
    def _a_sequence_predicts_something(cls, value: int) -> int:
        if value < 2:
            raise ValueError("a sequence must have at least 2 tokens, since the first is never predicted: use 2 or more")
        return value


class ParallelConfig(Section):
    """How the model is spread over ranks: SMP's names and defaults."""

    hybrid_shard_degree: int = Field(0, ge=0, description="Ranks over which parameters are sharded; 0: all that remain.")
    tensor_parallel_degree: int = Field(1, ge=1, description="Ranks over which each matrix is split.")
    context_parallel_degree: int = Field(1, ge=1, description="Ranks over which a sequence is split; divides the shard degree.")
    expert_parallel_degree: int = Field(1, ge=1, description="Ranks over which experts are spread; divides the shard degree.")
    cp_comm_type: Literal["all_gather", "p2p", "a2a"] = Field(
        "all_gather", description="How keys and values travel within a context group; one rank has none."
    )
    reshard_after_forward: bool = Field(
        True, description="Free a block's gathered parameters after its forward (ZeRO-3); false keeps them (ZeRO-2)."
    )
    param_dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None,
        description="Dtype in which sharded parameters are gathered; model.dtype when absent. Weights of FP8 products with one "
        "scale a tensor travel in FP8.",
    )
    reduce_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "float32", description="Dtype in which gradients are summed over ranks."
    )
    buffer_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "float32", description="Dtype of floating-point buffers, rotary tables among them."
    )
    sm_activation_offloading: bool = Field(
        False, description="Keep what blocks save for backward in host memory, as train.offload does."
    )
    activation_loading_horizon: int = Field(
        2,
        description="Blocks ahead whose offloaded activations are brought back in backward; this version has no choice but 2.",
    )

    @field_validator("activation_loading_horizon")
    @classmethod
    def _one_horizon(cls, value: int) -> int:
        if value != 2:
            raise ValueError(
                "this version brings a block's activations back when its backward begins, and has no horizon: use 2"
            )
        return value


class InitConfig(ParallelConfig):
    """What `octavo.init` takes: the [parallel] section, and a seed."""

    random_seed: int = Field(12345, ge=0, description="Of every generator; data-parallel rank r starts from random_seed + r.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> InitConfig:
        """Validate a flat table; every fault is reported at once in one InputError."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise InputError(f"{where}: {_explain(cls, error)}") from None


class Fp8Config(Section):
    """Which products run in 8-bit floating point, and with which scales."""

    enabled: bool | Literal["auto"] = Field(
        True,
        description="true: FP8 where the device multiplies it (a CPU emulates it, exactly), and none on a GPU that does not, "
        'unless `emulate`. "auto": in the layers that a measurement at the start finds faster in FP8, and none where FP8 would '
        "be emulated, unless `emulate`. false: none.",
    )
    recipe: Literal["delayed", "current", "rowwise", "block"] = Field("delayed", description="How scales are chosen.")
    format: Literal["HYBRID", "E4M3"] = Field(
        "HYBRID", description="HYBRID: E4M3 forward, E5M2 for gradients (delayed and current scaling only)."
    )
    amax_history_len: int = Field(1024, ge=1, description="Steps that a scale looks back on (delayed scaling only).")
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        "max", description="What a scale takes from its history (delayed scaling only)."
    )
    margin: int = Field(
        0, ge=-64, le=64, description="Powers of two that a scale stays below the format's maximum (delayed scaling only)."
    )
    fast_accumulation: bool | Literal["input_gradient"] = Field(
        False,
        description="true: faster, by Hopper's fast accumulation in backward too, not in forward alone, for about 0.15% of "
        'loss after 1,000 steps. "input_gradient": there in input gradients alone, for no more loss than without (delayed and '
        "current scaling only; heads and experts stay precise).",
    )
    use_power_2_scales: bool = Field(
        False, description="Scales are rounded down to powers of two (current scaling only; those of blocks always are)."
    )
    skip: list[str] = Field(default_factory=list, description="Patterns of module names that stay out of FP8 (`fnmatch`).")
    layers: dict[str, Literal["bf16", "delayed", "current", "rowwise", "block"]] = Field(
        default_factory=dict,
        description='Patterns of module names → the recipe of these layers, or "bf16" for none in place of `recipe`; the last '
        "pattern that names a layer holds, and `skip` above all.",
    )
    head: bool | Literal["backward"] = Field(
        False,
        description='true: the output head\'s products are FP8 too. "backward": those of its gradients, which leaves the loss '
        "as it is (Octavo's decoder only).",
    )
    emulate: bool = Field(
        False,
        description='Compute FP8\'s numbers slowly, on a GPU without FP8 products and, with `enabled` = "auto", on a CPU.',
    )


class OptimizerConfig(Section):
    """AdamW, its schedule and clipping."""

    lr: float = Field(3e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled; not applied to norms, biases and other vectors.")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="Decay of the two moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises linearly from zero.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="What the rate does after the warm-up.")
    min_lr_fraction: float = Field(0.1, ge=0, le=1, description="Where cosine and linear end, as a fraction of lr.")
    clip: float = Field(1.0, ge=0, description="Largest global norm of the gradient; 0: no clipping.")

    @field_validator("betas")
    @classmethod
    def _betas_are_decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must lie in [0, 1): the usual pair is [0.9, 0.95]")
        return value


class TrainConfig(Section):
    """How long, how wide, and what is given up for memory or speed."""

    output: str | None = Field(None, description="The run's folder; by default runs/<name of the run file>.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    global_batch: int = Field(ge=1, description="Sequences in an optimizer step, over all ranks.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences in a forward of one rank; all of its share when absent.")
    recompute: bool | Literal["mlp"] = Field(
        False,
        description='true: keep only each block\'s input and compute the rest again in backward. "mlp": keep all but the '
        "largest, the first product of each MLP (Octavo's decoder only; not with compile).",
    )
    offload: bool = Field(False, description="Keep what blocks save for backward in host memory (Octavo's decoder only).")
    compile: bool | Literal["auto"] = Field(
        "auto", description='torch.compile each block, in place of its fused kernels; "auto": no, since those are faster.'
    )
    seed: int = Field(0, ge=0, description="Of the initial weights and of dropout.")
    deterministic: bool = Field(False, description="Only deterministic kernels on GPUs (a CPU always is).")
    loss_scale: Literal["dynamic"] | float = Field(
        "dynamic",
        description='With model.dtype = "float16" the loss is multiplied by this before backward. "dynamic": halved when a '
        "gradient overflows, doubled after 2,000 steps without; a number stays as it is.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Share of each target that is spread evenly over all words (Octavo's decoder only; not in validation).",
    )
    z_loss: float = Field(
        0.0,
        ge=0.0,
        description="Weight of the square of the logits' log-sum-exp in the loss, which keeps logits near 0 (Octavo's decoder "
        "only; not in validation).",
    )
    compare_bf16: bool = Field(False, description="Train the same steps without FP8 afterwards, and report the gap in loss.")
    validate_every: int = Field(0, ge=0, description="Steps between validations; 0: only at the end.")
    validate_batches: int = Field(
        16, ge=1, description="Micro-batches in a validation, over all ranks; fewer where the split is smaller."
    )

    @model_validator(mode="after")
    def _a_compiler_keeps_what_it_likes(self) -> TrainConfig:
        if self.recompute == "mlp" and self.compile is True:
            raise ValueError(
                'train.recompute = "mlp" with train.compile = true: a compiler decides what is kept. '
                "Set train.compile = false, or train.recompute = true"
            )
        return self


class CheckpointConfig(Section):
    """When the run is saved."""

    every: int = Field(100, ge=0, description="Steps between checkpoints; 0: only at the end or when stopped.")
    keep: int = Field(2, ge=1, description="Newest checkpoints that are kept.")
    async_: bool = Field(
        False,
        alias="async",
        description="Write in the background: training waits only for the copy of the state to host memory.",
    )


class LogConfig(Section):
    """What is reported while it runs."""

    every: int = Field(1, ge=1, description="Steps between progress lines; metrics.jsonl has every step.")
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        default_factory=list, description="Experiment trackers that also get the metrics (each an extra to install)."
    )


class LaunchConfig(Section):
    """How several ranks belong together."""

    timeout: float = Field(
        600.0, gt=0, description="Seconds that a rank may be silent, or the others may wait for it, before the job is ended."
    )
    grace: float = Field(
        10.0, ge=0, description="Seconds that ranks have to end by themselves once one has failed, before they are killed."
    )


class RunConfig(Section):
    """A whole run file."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @model_validator(mode="after")
    def _steps_divide(self) -> RunConfig:
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        if warmup > steps:
            raise ValueError(f"optimizer.warmup_steps = {warmup} is more than train.steps = {steps}: use at most {steps}")
        return self

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a run file and apply `section.key=value` overrides.

        Raises:
            InputError: the file is missing, is not TOML, or says something that is not in the schema.
        """
        path = Path(path)
        if path.is_dir():
            inside = sorted(file for file in path.glob("*.toml") if file.name != "pyproject.toml")
            hint = f" Did you mean {inside[0]}?" if inside else ""
            raise InputError(
                f"run file {str(path)!r} is a folder.{hint} Give the path of a TOML file, such as presets/demo.toml."
            )
        if not path.is_file():
            siblings = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
            guess = nearest(path.name, siblings)
            hint = f" Did you mean {path.parent / guess}?" if guess else ""
            raise InputError(
                f"run file {str(path)!r} does not exist.{hint} Give the path of a TOML file, such as presets/demo.toml."
            )
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"run file {str(path)!r} is not valid TOML: {error}.") from None
        for override in overrides:
            _apply_override(values, override)
        train = values.get("train")
        if isinstance(train, dict):
            train.setdefault("output", f"runs/{path.stem}")
        return cls.from_dict(values, where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "configuration") -> RunConfig:
        """Validate nested tables; every fault is reported at once in one InputError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{where}: {_explain(cls, error)}") from None

    def to_toml(self) -> str:
        """The run file with every key written out; reading it back gives an equal RunConfig."""
        return tomli_w.dumps(_without_none(self.model_dump()))

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.train.output or "runs/run")


def known_keys() -> list[str]:
    """Every `section.key` of a run file, in order."""
    return [f"{section}.{key}" for section, field in RunConfig.model_fields.items() for key in _fields(field.annotation)]


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise InputError(f"override {override!r} is not section.key=value, as in optimizer.lr=1e-4.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: train.output=runs/two
    table = values
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InputError(f"override {override!r}: {part} is a value, not a table.")
        table = inner
    table[parts[-1]] = value


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    return "; ".join(_explain_one(cls, fault["loc"], fault["type"], fault["msg"], fault["input"]) for fault in _distinct(error))


def _distinct(error: ValidationError) -> list[Any]:
    """One fault for each key: a union reports one for each of its members, any of which would do."""
    found: dict[tuple[str, ...], Any] = {}
    for fault in error.errors(include_url=False):
        first = found.setdefault(tuple(str(part) for part in fault["loc"][:2]), fault)
        if fault["msg"] not in first["msg"]:
            first["msg"] += f", or {fault['msg'][0].lower()}{fault['msg'][1:]}"
    return list(found.values())


def _explain_one(cls: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    name = ".".join(str(part) for part in loc[:2])
    if kind == "extra_forbidden":
        section = cls.model_fields.get(str(loc[0]))
        keys = list(cls.model_fields) if len(loc) == 1 or section is None else list(_fields(section.annotation))
        elsewhere = next((key for key in known_keys() if len(loc) > 1 and key.endswith(f".{loc[-1]}")), None)
        guess = elsewhere or nearest(str(loc[-1]), keys)
        prefix = f"{loc[0]}." if len(loc) > 1 and guess and "." not in guess else ""
        hint = f" Did you mean {prefix}{guess}?" if guess else ""
        what = "section" if len(loc) == 1 and cls is RunConfig else "key"
        return f"unknown {what} {name}.{hint} Known: {', '.join(keys)}"
    if kind == "missing" and len(loc) <= 2:
        return f"{name} is missing: {_describe(cls, loc)}"
    message = message.removeprefix("Value error, ")
    return f"{name} = {value!r}: {message}" if loc and not isinstance(value, dict) else message


def _describe(cls: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    section = cls.model_fields[str(loc[0])]
    if len(loc) == 1:
        return f"add a [{loc[0]}] section"
    return _fields(section.annotation)[str(loc[1])].description or "give it a value"


def _fields(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {field.alias or name: field for name, field in annotation.model_fields.items()}
    return {}


def _without_none(value: Any) -> Any:
    """TOML has no null: a key without a value is left out."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value
