"""[train]: steps, batches, memory and validation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from octavo.config.recompute import Recompute
from octavo.config.section import OnDisk, Section, several

LM_EVAL = "lm-eval:"
"""Prefix of a task of lm-eval in `train.eval`."""
LARGEST_SCALE = 2.0**60
"""Largest loss scale, within float32: with zero gradients a dynamic scale would double forever."""


class TrainConfig(Section):
    """Steps, batches, memory and validation."""

    output: Annotated[str | None, OnDisk] = Field(None, description="The run's folder; by default runs/<name of the run file>.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps; alternatives are `tokens` and `epochs`.")
    tokens: int | None = Field(None, ge=1, description="Tokens to train on, instead of `steps`; rounded up to whole steps.")
    epochs: float | None = Field(
        None, gt=0, description="Passes over the training data, instead of `steps`; rounded up to whole steps."
    )
    extended: list[int] = several("Previous last steps of an extended run: the schedule of each part ends at its last step.")
    global_batch: int = Field(ge=1, description="Sequences per optimizer step, over all ranks.")
    micro_batch: int | None = Field(
        None, ge=1, description="Sequences per forward of one rank; by default its whole share of the global batch."
    )
    recompute: Recompute = Field(
        False,
        description='true: save only each block\'s input and recompute the rest in backward. "selective": also save '
        'attention\'s result, and never recompute it. "mlp": recompute only the first product of each MLP, the '
        'largest activation ("selective" and "mlp": Octavo\'s decoder only).',
    )
    mlp_chunks: int = Field(
        1,
        ge=1,
        description="Chunks of a rank's tokens that each MLP computes one after the other, to reduce its temporaries; "
        "above 1 backward recomputes the first product, and under current and rowwise scaling each chunk has "
        "separate scales (Octavo's blocks only).",
    )
    offload: bool = Field(False, description="Offload activations saved for backward to host memory (Octavo's decoder only).")
    graph: bool | Literal["auto"] = Field(
        "auto",
        description="Record forward and backward as CUDA graphs after 3 eager steps, for steps that wait for the host: the "
        'same numbers (one GPU, Octavo\'s decoder; a CPU runs eagerly). "auto": in runs with adapters, without '
        "packed documents, if a graph can replay them.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description='Only false and "auto" are accepted: the fused kernels of a block are faster than a compiled one.'
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of initial weights and dropout.")
    deterministic: bool = Field(False, description="Use only deterministic kernels on GPUs (a CPU is always deterministic).")
    loss_scale: Literal["dynamic"] | float = Field(
        "dynamic",
        description='Factor of the loss before backward, with model.dtype = "float16". "dynamic": halved after an overflow, '
        "doubled after 2,000 steps without one. A number: fixed.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Probability of each target that is spread evenly over the vocabulary (Octavo's decoder only; not in "
        "validation).",
    )
    z_loss: float = Field(
        0.0,
        ge=0.0,
        description="Coefficient of the squared log-sum-exp of the logits in the loss, which keeps it near 0 (Octavo's "
        "decoder only; not in validation).",
    )
    freeze: list[str] = several("Patterns (`fnmatch`) for names of parameters, or of their modules, that are not trained.")
    verify: bool | str = Field(
        False,
        description="Start a run on several ranks only with a result of `octavo verify` for its layout. true: in "
        "verify.json, the command's default. A text: in the file of this name.",
    )
    compare_bf16: bool = Field(False, description="Afterwards train the same steps without FP8, and report the gap in loss.")
    validate_every: int = Field(0, ge=0, description="Steps between validations; 0: only at the end.")
    early_stopping: int = Field(
        0, ge=0, description="End the run after this many consecutive validations without a new lowest loss; 0: never."
    )
    validate_batches: int = Field(
        16,
        ge=1,
        description="Batches per validation over all ranks, of `micro_batch` sequences each, or without it of "
        "`global_batch`: the same sequences on any number of ranks; fewer if the split is smaller.",
    )
    eval: str | list[str] = several(
        'Evaluations during training: "FILE.py:FUNCTION" is called with model and step and returns a dict of '
        'numbers; "lm-eval:TASK" runs a task of lm-eval (extra octavo[eval]).'
    )
    eval_every: int = Field(0, ge=0, description="Steps between evaluations; 0: with each validation and at the end.")
    eval_reduce: Literal["same", "mean", "sum"] = Field(
        "same",
        description='Figures of a function over ranks. "same": they have to be equal; "mean" or "sum": over the '
        "data-parallel ranks.",
    )
    eval_tasks: Annotated[str | None, OnDisk] = Field(
        None, description="Folder of your lm-eval tasks, in YAML; tasks are searched only there."
    )
    eval_limit: int | None = Field(None, ge=1, description="Documents of each lm-eval task, from the first; by default all.")
    eval_shots: int | None = Field(None, ge=0, description="Few-shot examples of lm-eval tasks; by default the task's.")
    eval_batch: int = Field(8, ge=1, description="Texts per forward of an lm-eval task on each rank.")
    sample_every: int = Field(
        0, ge=0, description="Steps between samples of generated text on the screen; 0: only at the end of the run."
    )
    sample_prompt: str | None = Field(None, description="Prompt of the generated text; by default none.")
    sample_tokens: int = Field(48, ge=0, description="Number of generated tokens; 0: no samples.")

    @property
    def validation_sequences(self) -> int:
        """Sequences in a validation; independent of the ranks, so that its loss is comparable."""
        return self.validate_batches * (self.micro_batch or self.global_batch)

    @property
    def evaluations(self) -> list[str]:
        """`eval` as a list."""
        return [self.eval] if isinstance(self.eval, str) else self.eval

    @property
    def eval_functions(self) -> list[str]:
        """The functions of `eval`."""
        return [each for each in self.evaluations if not each.startswith(LM_EVAL)]

    @property
    def lm_eval_names(self) -> list[str]:
        """The tasks of `eval`."""
        return [each.removeprefix(LM_EVAL) for each in self.evaluations if each.startswith(LM_EVAL)]

    @field_validator("eval")
    @classmethod
    def _check_eval(cls, value: str | list[str]) -> str | list[str]:
        functions = [value] if isinstance(value, str) else value
        for each in functions:
            if each.startswith(LM_EVAL):
                if not each.removeprefix(LM_EVAL).strip():
                    raise ValueError(f'{each!r} names no task: write one such as "lm-eval:arc_easy"')
                continue
            file, _, function = each.rpartition(":")
            if not file.endswith(".py") or not function.isidentifier():
                raise ValueError(f'{each!r} is neither a function nor a task: write "FILE.py:FUNCTION", or "lm-eval:TASK"')
        if twice := next((each for each in functions if functions.count(each) > 1), None):
            raise ValueError(f"{twice!r} is listed twice: remove one")
        return value

    @field_validator("extended")
    @classmethod
    def _check_extended(cls, value: list[int]) -> list[int]:
        if any(end < 1 for end in value) or sorted(set(value)) != value:
            raise ValueError("give former last steps from 1 in ascending order, such as [1000, 2000]")
        return value

    @model_validator(mode="after")
    def _check_length(self) -> TrainConfig:
        if self.steps is None and self.tokens is None and self.epochs is None:
            raise ValueError("train.steps is missing: give train.steps, train.tokens or train.epochs")
        in_steps = self.tokens is None and self.epochs is None  # others are checked when they are converted to steps
        if self.extended and in_steps and self.steps is not None and self.extended[-1] >= self.steps:
            raise ValueError(
                f"train.extended = {self.extended} reaches train.steps = {self.steps}: the former last steps lie below it"
            )
        return self
