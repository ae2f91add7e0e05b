"""Generates text: from a checkpoint or a folder by Hugging Face's generation, or from the live model in training.

Sampling during training changes nothing: no gradient, FP8 state or random generator. The live model has no KV cache, so each
token costs a forward of the whole text, always with the same shape: acceptable for some tens of tokens, and correct for any
causal model and any sharding. Prompts are encoded like training documents: the name of a special token is plain text. Ids that
the tokenizer does not have are never chosen.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from octavo.data import tokenizer as tokenizers
from octavo.data.conversations import conversation
from octavo.data.documents import Faulty
from octavo.data.forms import MESSAGES
from octavo.data.prepared import prepared_or_none
from octavo.data.special_tokens import SpecialTokens
from octavo.dtypes import short_name
from octavo.errors import InputError, OctavoError, first_line, nearest, warn
from octavo.models.convert import load_pretrained, without_progress_bar
from octavo.models.decoder import Decoder
from octavo.models.generation import from_model_config, load_generation_config
from octavo.models.published import causal_lm_on_meta
from octavo.models.sources import load_config
from octavo.models.weight_files import WeightFiles
from octavo.models.weight_loader import folder_weights
from octavo.parallel.coordination import all_ranks
from octavo.run.export import open_run, run_config
from octavo.run.folder import RunFolder
from octavo.storage import local_path

TOKENS = 128
"""Default number of tokens of `octavo sample`, or fewer if the model's positions end."""
TEMPERATURE = 0.8
TOP_P = 0.95
_ANSWER = "answer"
"""Content of a test turn that shows how the template ends a turn."""


@dataclass(frozen=True)
class _Choice:
    """The choice of tokens; temperature 0: the most probable one."""

    temperature: float
    top_p: float
    seed: int

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 0.01 <= self.temperature <= 100:
            raise InputError(f"temperature = {self.temperature}: use 0 for greedy decoding, or 0.01 to 100, such as 0.8.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p = {self.top_p}: use a share of the probability above 0, at most 1.")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed = {self.seed}: use a whole number from 0 to 2^63 - 1.")

    def token(self, logits: Tensor, generator: torch.Generator) -> int:
        """Choose a token from logits [V]."""
        logits = logits.detach().float().cpu()
        if bool(logits.isnan().any()) or not bool(logits.isfinite().any()):
            raise OctavoError("the model's logits are not finite: no token can be chosen. Check the loss of the run.")
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities, order = (logits.double() / self.temperature).softmax(0).sort(descending=True, stable=True)
        before = probabilities.cumsum(0) - probabilities
        return int(order[torch.multinomial(probabilities.where(before < self.top_p, 0), 1, generator=generator)])


def prompt_of_stdin() -> str:
    """All of stdin without a final newline; `sample` refuses bytes that are not UTF-8."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin.read().removesuffix("\n")


@dataclass(frozen=True)
class _Tokenizer:
    """The tokenizer of a folder: the ids of prompts and the text of ids."""

    folder: Path

    @functools.cached_property
    def _theirs(self) -> Any:
        try:
            return AutoTokenizer.from_pretrained(str(self.folder), trust_remote_code=False)
        except Exception as error:  # transformers raises many types
            raise InputError(
                f"{self.folder}: the tokenizer cannot be loaded: {first_line(error).rstrip('.:')}. Save it there again:"
                f" tokenizer.save_pretrained({str(self.folder)!r})."
            ) from None

    @functools.cached_property
    def _encoder(self) -> tokenizers.Encoder:
        _ = self._theirs  # raises the error of a folder without a tokenizer
        return tokenizers.load(str(self.folder))

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a document."""
        return () if self._encoder.end is None else (self._encoder.end,)

    def encode(self, prompt: str | None, vocabulary: int) -> list[int]:
        """The ids of a prompt, after the tokens that the tokenizer puts before a document; None for only these tokens."""
        if prompt is None:
            special = SpecialTokens.of(self.folder)
            first = next(([one] for one in (special.bos, special.eos) if one is not None), [])
            ids = list(self._encoder.prefix) or first
            if not ids:
                raise InputError(f'{self.folder}: the tokenizer has no token to begin a text. Give a prompt: --prompt "…".')
        else:
            try:
                prompt.encode()
            except UnicodeEncodeError as error:  # bytes of a shell or of stdin that are not UTF-8
                raise InputError(f"character {error.start} of the prompt is not UTF-8. Give text in UTF-8.") from None
            encoder = tokenizers.like_transformers(self._encoder, self._theirs, [prompt], lambda _: None)
            ids = encoder.encode_batch([prompt])[0]
            if not ids:
                raise InputError("the prompt is empty: give at least a word, or leave --prompt out to begin a new text.")
            ids = [*encoder.prefix, *ids]
        if max(ids) >= vocabulary:
            raise InputError(
                f"{self.folder}: the prompt has the token {max(ids)}, but the model only {vocabulary} tokens (vocab_size): the"
                " tokenizer belongs to another model."
            )
        return ids

    @functools.cached_property
    def _known(self) -> Tensor:
        """The ids of the tokenizer, in order."""
        return torch.tensor(sorted(set(self._theirs.get_vocab().values())), device="cpu")

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [..., V] with -inf for ids that the tokenizer does not have, as in a padded vocabulary."""
        known = self._known[self._known < logits.shape[-1]].to(logits.device)
        return torch.full_like(logits, -torch.inf).index_copy_(-1, known, logits.index_select(-1, known))

    def chat(self, chat: Chat, variables: Mapping[str, Any], vocabulary: int) -> tuple[list[int], list[int]]:
        """(ids of a conversation up to the assistant's turn, formatted as in training; ids that end the turn).

        Raises:
            InputError: there is no template, or the template refuses the conversation.
        """
        template = self._template(bool(chat.tools))
        text = self._written(template, chat, chat.messages, variables, prompt=True)
        encode = functools.partial(self._theirs.encode, add_special_tokens=False)
        ids = encode(text)
        if not ids or max(ids) >= vocabulary:
            raise InputError(
                f"{self.folder}: the conversation has the token {max(ids, default=None)}, the model only {vocabulary} tokens "
                "(vocab_size): the tokenizer belongs to another model."
            )
        answered = [*chat.messages, {"role": "assistant", "content": _ANSWER}]
        try:
            whole = self._written(template, chat, answered, variables, prompt=False)
        except InputError:  # from a template that refuses a short answer
            return ids, []
        before, _, behind = whole.rpartition(_ANSWER)
        behind = behind.lstrip()
        heading = before.removeprefix(text)
        if before.startswith(text) and any(token in heading for token in self._special):
            raise InputError(
                f"the chat template of {self.folder} begins the assistant's turn with {heading.strip()!r}, but not with "
                "add_generation_prompt: the prompt would differ from training. Correct the template."
            )
        special = {token.content: number for number, token in self._theirs.added_tokens_decoder.items()}
        end = max((token for token in special if behind.startswith(token)), key=len, default=None)
        return ids, [] if end is None else [special[end]]

    @functools.cached_property
    def _special(self) -> list[str]:
        """Texts of the special tokens, without those of reasoning (`<think>`), which may precede an answer."""
        return [token.content for token in self._theirs.added_tokens_decoder.values() if token.special]

    def _template(self, tools: bool) -> str:
        try:
            template: str = self._theirs.get_chat_template(tools=[{}] if tools else None)
        except ValueError:
            raise InputError(
                f"{self.folder}: the tokenizer has no chat template, so a conversation cannot be formatted. Train with "
                "data.chat_template, save a template there as chat_template.jinja, or give --prompt without --chat."
            ) from None
        return template

    def _written(
        self, template: str, chat: Chat, messages: list[dict[str, Any]], variables: Mapping[str, Any], *, prompt: bool
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                tools=chat.tools,
                chat_template=template,
                add_generation_prompt=prompt,
                **{**self._theirs.special_tokens_map, **variables, **chat.variables},
            )
        except Exception as error:  # from Jinja, and from Python in expressions
            raise InputError(f"the chat template of {self.folder} refuses the conversation: {first_line(error)}") from None
        return str(rendered[0])

    def text(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class Chat:
    """A conversation whose next turn is the assistant's.

    Attributes:
        messages: in Hugging Face's form.
        tools: JSON schemas, or None.
        variables: template variables, in addition to those of the run.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> Chat:
        """The conversation of a row in any form that training reads: `messages` or `conversations`, and `tools`.

        Raises:
            InputError: the row is not a conversation, or ends with the assistant's turn.
        """
        column = next((name for name in MESSAGES if name in row), None)
        if column is None:
            raise InputError(
                f"{where} has no {' or '.join(map(repr, MESSAGES))}: give a conversation in the form of training data."
            )
        turns = row[column]
        form = "from" if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "from" in turns[0] else "role"
        answer = {"from": "gpt", "value": _ANSWER} if form == "from" else {"role": "assistant", "content": _ANSWER}
        # Training conversations need an assistant's turn: here it is the one to generate.
        conversation_of_row = conversation({**row, column: [*turns, answer] if isinstance(turns, list) else turns}, column)
        if isinstance(conversation_of_row, Faulty):
            raise InputError(f"{where}: {conversation_of_row.sentence}.")
        messages = [dict(message) for message in conversation_of_row.messages]
        if isinstance(turns, list):
            messages.pop()
        if not messages or messages[-1]["role"] == "assistant":
            raise InputError(f"{where} ends with the assistant's turn, which is to be generated: remove it.")
        return cls(messages, conversation_of_row.tools, dict(conversation_of_row.variables))


def chats_of(path: str | Path) -> list[Chat]:
    """The conversations of a file: a JSON object, a list of messages, or one object a line (JSON lines).

    Raises:
        InputError: the file cannot be read, or a row is not a conversation.
    """
    file = local_path(path, "--messages")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--messages {file}: {error}. Give a JSON or .jsonl file in UTF-8.") from None
    try:
        rows = [json.loads(text)]
    except ValueError:
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InputError(f"--messages {file} is neither JSON nor JSON lines: {error}.") from None
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = (
            rows[0]
            if rows[0] and all(isinstance(row, dict) and MESSAGES & row.keys() for row in rows[0])
            else [{"messages": rows[0]}]
        )
    if not rows:
        raise InputError(f"--messages {file} is empty: give at least one conversation.")
    chats = []
    for number, row in enumerate(rows, start=1):
        where = f"--messages {file}, conversation {number}"
        if not isinstance(row, dict):
            raise InputError(f'{where} is not an object: give {{"messages": [...]}}.')
        chats.append(Chat.of(row, where))
    return chats


@functools.lru_cache(maxsize=4)
def _tokenizer(folder: Path, changed: int) -> _Tokenizer:
    return _Tokenizer(folder)


def _tokenizer_of(folder: Path) -> _Tokenizer:
    """The tokenizer of a folder, loaded once until its file changes."""
    if not tokenizers.tokenizer_files(str(folder)):
        raise InputError(
            f"{folder} has no tokenizer (tokenizer.json), so text cannot be encoded or decoded: save the tokenizer of the"
            f" model there, tokenizer.save_pretrained({str(folder)!r})."
        )
    file = folder / "tokenizer.json"
    return _tokenizer(folder.absolute(), file.stat().st_mtime_ns if file.is_file() else 0)


def _room(config: Any, prompt: int, tokens: int | None) -> int:
    """Tokens to generate: the requested number, by default `TOKENS` or as many as fit after the prompt."""
    if tokens is not None and tokens < 1:
        raise InputError(f"tokens = {tokens}: generate at least 1.")
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):  # a model without positions, such as Mamba
        return tokens or TOKENS
    if prompt >= positions:
        raise InputError(
            f"the prompt has {prompt:,} tokens, the model only {positions:,} positions (max_position_embeddings): give at most"
            f" {positions - 1:,} tokens."
        )
    room = positions - prompt
    if tokens is not None and tokens > room:
        raise InputError(
            f"{prompt:,} tokens of the prompt and {tokens:,} new ones are more than the model's {positions:,} positions"
            f" (max_position_embeddings): set --tokens {room}, or shorten the prompt."
        )
    return tokens or min(TOKENS, room)


def sample(
    source: str | Path,
    prompt: str | None = None,
    *,
    checkpoint: str | None = None,
    tokens: int | None = None,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
    chat: Chat | None = None,
) -> dict[str, Any]:
    """Continue a prompt, or answer a conversation, with the model of a run or a Hugging Face folder, on a GPU if there is one.

    Args:
        source: the folder of a run, an export, or a Hugging Face model.
        prompt: None for a new text.
        checkpoint: "step-N" of a run; None: its newest.
        tokens: most new tokens; None: 128, or fewer if the model's positions end.
        temperature: 0 for greedy decoding.
        top_p: tokens are drawn from the most probable ones whose probabilities add up to this share.
        seed: the same seed gives the same text on the same machine.
        chat: a conversation instead of a prompt; formatted by the tokenizer's chat template with the run's
            `data.chat_template_variables`, and answered up to the token that ends a turn.

    Returns:
        source, checkpoint (None for a folder), prompt, text (including the prompt; for a conversation only the answer),
        prompt_tokens, tokens, ended (by an end token), temperature, top_p and seed; for a conversation also its messages with
        the answer.

    Raises:
        InputError: no run or model, no checkpoint, no tokenizer, an empty or too long prompt, or not a causal language model.
        OctavoError: a checkpoint is damaged.
    """
    prompts = [prompt if chat is None else chat]
    settings: dict[str, Any] = {"checkpoint": checkpoint, "tokens": tokens}
    return samples(source, prompts, temperature=temperature, top_p=top_p, seed=seed, **settings)[0]


def samples(
    source: str | Path,
    inputs: Sequence[str | Chat | None],
    *,
    checkpoint: str | None = None,
    tokens: int | None = None,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """`sample` of several prompts or conversations, each with the same seed; the model is loaded once."""
    choice, source = _Choice(temperature, top_p, seed), local_path(source, "RUN")
    model, folder, step = (
        _of_run(source, checkpoint) if RunFolder(source).run_file.is_file() else _of_folder(source, checkpoint)
    )
    tokenizer = _tokenizer_of(folder)
    config = model.config.get_text_config(decoder=True)
    variables: dict[str, Any] = {}
    if step is not None and any(isinstance(one, Chat) for one in inputs):
        data = run_config(source).data
        variables = data.chat_template_variables
        prepared = prepared_or_none(data)
        examples = None if prepared is None else prepared.manifest.examples
        if prepared is not None and (examples is None or examples.format != "chat"):
            held = "text" if examples is None else "prompts and completions"
            warn(f"{source} was trained on {held}, without the chat template that formats this conversation.")
    ends = _ends(model, tokenizer.ends)  # before generation, which replaces the model's eos ids
    prompts = []
    for one in inputs:
        turn_ends: list[int] = []
        if isinstance(one, Chat):
            ids, turn_ends = tokenizer.chat(one, variables, config.vocab_size)
        else:
            ids = tokenizer.encode(one, config.vocab_size)
        prompts.append((one, ids, _room(config, len(ids), tokens), sorted({*ends, *turn_ends})))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for one, ids, room, stop in prompts:
        new = _generated(model, ids, room, choice, tokenizer, stop)
        text = tokenizer.text(new if isinstance(one, Chat) else [*ids, *new])
        answered = [*one.messages, {"role": "assistant", "content": text}] if isinstance(one, Chat) else None
        results.append(
            {
                "source": str(source),
                "checkpoint": step,
                "prompt": None if isinstance(one, Chat) else one,
                "text": text,
                **({} if answered is None else {"messages": answered}),
                "prompt_tokens": len(ids),
                "tokens": len(new),
                "ended": bool(new) and new[-1] in stop,
                "temperature": temperature,
                "top_p": top_p,
                "seed": seed,
            }
        )
    return results


def _of_run(run: Path, checkpoint: str | None) -> tuple[PreTrainedModel, Path, str]:
    """(the model of a run's checkpoint, its tokenizer's folder, the checkpoint's name)."""
    opened = open_run(run, run_config(run), checkpoint)
    tokenizer = opened.tokenizer or RunFolder(run).tokenizer
    _ = _tokenizer_of(tokenizer).ends  # refused before the weights are read
    model = load_pretrained(opened.shapes, opened.config, read=opened.read)
    model.generation_config.eos_token_id = opened.generation.values.get("eos_token_id")
    return model, tokenizer, opened.checkpoint.name


def _of_folder(folder: Path, checkpoint: str | None) -> tuple[PreTrainedModel, Path, None]:
    """(the model of a Hugging Face folder, the folder of its tokenizer, None)."""
    if not (folder / "config.json").is_file():
        around = folder.parent
        near = nearest(folder.name, [p.name for p in around.iterdir() if p.is_dir()] if around.is_dir() else [])
        weights = any(folder.glob("*.safetensors")) if folder.is_dir() else False
        hint = (
            " Its weights are of a model without a Hugging Face config, such as a vision transformer, which has no text."
            if weights
            else f" Did you mean {str(around / near)!r}?"
            if near and near != folder.name
            else " Give the folder that octavo train printed at its end, or one with a config.json."
        )
        raise InputError(f"{str(folder)!r} is neither the folder of a run (run.toml) nor of a model (config.json).{hint}")
    if checkpoint is not None:
        raise InputError(f"--checkpoint {checkpoint}: {str(folder)!r} is a model's folder, without checkpoints. Leave it out.")
    config = load_config(str(folder))
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise InputError(
            f"{str(folder)!r} has a model of type {config.model_type!r}, which is not a causal language model: it generates no"
            " text from a prompt alone."
        )
    _ = _tokenizer_of(folder).ends  # refused before the weights are read
    files = WeightFiles(folder)  # refuses pickles, damaged weights, and quantised ones other than FP8
    generation = load_generation_config(str(folder)) or from_model_config(config)
    ends = GenerationConfig(
        eos_token_id=generation.values.get("eos_token_id")
    )  # passed, so that transformers does not read a file that it refuses
    model: PreTrainedModel
    if files.matrices:
        return _of_fp8_folder(folder, config, ends), folder, None
    with without_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=False, dtype="auto", generation_config=ends)
    return model, folder, None


def _of_fp8_folder(folder: Path, config: Any, ends: GenerationConfig) -> PreTrainedModel:
    """The model of an FP8 folder with dequantised weights: transformers' readers need a GPU or another package."""
    weights = folder_weights(folder, None, config)
    dtype = config.dtype or torch.bfloat16
    state = {name: weights.read(name).to(dtype) for name, kind in weights.kinds.items() if kind == "float"}
    state |= {name: weights.read(name) for name, kind in weights.kinds.items() if kind != "float"}
    with without_progress_bar():
        model: PreTrainedModel = type(causal_lm_on_meta(config)).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, generation_config=ends
        )
    warn(f"{folder}: FP8 weights are dequantised to {short_name(dtype)}; activations are not cast to FP8.")
    return model


def _ends(model: PreTrainedModel, ends: tuple[int, ...]) -> list[int]:
    """The ids that end a text: those of the generation config, and the tokenizer's."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return sorted({*ids, *ends})


class _KnownIds(LogitsProcessor):
    """Restricts Hugging Face's generation to the tokenizer's ids."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: [B, V], of the next token → the same with unknown ids masked."""
        return self._tokenizer.masked(scores)


def _generated(
    model: PreTrainedModel, ids: list[int], tokens: int, choice: _Choice, tokenizer: _Tokenizer, stop: list[int]
) -> list[int]:
    """New ids by Hugging Face's generation, without effect on this process's random states."""
    drawn = {"do_sample": True, "temperature": float(choice.temperature), "top_p": float(choice.top_p), "top_k": 0}
    config = GenerationConfig(
        max_new_tokens=tokens,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,  # nothing is padded with a single text
        **(drawn if choice.temperature else {"do_sample": False}),
    )
    model.generation_config = config  # otherwise the folder's sampling settings would be merged
    prompt = torch.tensor([ids], device=model.device)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(choice.seed)
        processors = LogitsProcessorList([_KnownIds(tokenizer)])
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), logits_processor=processors)
    return [int(one) for one in generated[0, len(ids) :]]


@torch.no_grad()
def sample_text(
    model: nn.Module,
    tokenizer_folder: str | Path,
    prompt: str | None,
    *,
    tokens: int = 64,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
) -> str:
    """The prompt and its continuation by the live model in training, in `dtype` without FP8; training is not affected.

    Call it between steps, outside `octavo.fp8_autocast`, on all ranks with the same arguments; all get the same text.

    Args:
        model: Octavo's decoder or a causal language model with its original code, sharded or not.
        tokenizer_folder: the run's.
        prompt, tokens, temperature, top_p, seed: as in `sample`.

    Raises:
        InputError: no tokenizer, an empty prompt, or more tokens than the model has positions.
        OctavoError: the model's logits are not finite.
    """
    choice, ranks = _Choice(temperature, top_p, seed), all_ranks()
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "vocab_size"):
        raise InputError(f"{type(model).__name__} has no Hugging Face config with a vocab_size: it is not a language model.")

    def prepared() -> list[int]:
        ids = _tokenizer_of(Path(tokenizer_folder)).encode(prompt, config.vocab_size)
        _room(config, len(ids), tokens)
        return ids

    def choose(logits: Tensor) -> int:
        return choice.token(_tokenizer_of(Path(tokenizer_folder)).masked(logits), generator)

    ids = ranks.on_rank_0(prepared)
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    # Always the same shape, by which kernels are chosen. No token attends to the padding after it.
    text = torch.tensor([ids + ids[-1:] * tokens], device=device)
    end = len(ids)
    ends = ranks.on_rank_0(lambda: _tokenizer_of(Path(tokenizer_folder)).ends)
    with evaluating(model):
        while end < text.shape[1]:
            logits = _logits(model, text, end - 1)
            chosen = ranks.on_rank_0(functools.partial(choose, logits))
            text[0, end] = chosen
            end += 1
            if chosen in ends:
                break
    return ranks.on_rank_0(lambda: _tokenizer_of(Path(tokenizer_folder)).text(text[0, :end].tolist()))


def _logits(model: nn.Module, text: Tensor, position: int) -> Tensor:
    """The logits [V] after the token at a position."""
    if isinstance(model, Decoder):
        logits: Tensor = model(input_ids=text, logits_to_keep=torch.tensor([position], device=text.device)).logits
        return logits[0, 0]
    output = model(input_ids=text)
    logits = getattr(output, "logits", output)
    return logits[0, position]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; restores each module's previous mode, since some may stay in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
