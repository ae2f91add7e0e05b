"""The model in training as a model of lm-eval: its questions become token ids, and the model's answers text.

Imports lm-eval (extra `octavo[eval]`), so only an evaluation with tasks imports this module. Requests whose answers the
harness would take for others are refused: sampled answers, answers without a separate token, answers longer than the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from octavo.data.special_tokens import SpecialTokens
from octavo.data.tokenizer import transformers_tokenizer
from octavo.errors import InputError, first_line, unknown, warn
from octavo.parallel.world import state
from octavo.train.lm_answers import Answerer, Scored, Scoring


class LanguageModel(TemplateLM):
    """lm-eval's interface to `Answerer`: methods and properties are the harness's."""

    def __init__(self, settings: Scoring) -> None:
        super().__init__()
        self._settings = settings
        self._answerer = Answerer(settings)
        self._tokenizer = transformers_tokenizer(str(settings.tokenizer))
        self._special = SpecialTokens.of(settings.tokenizer)
        self._said: set[str] = set()

    def _say_once(self, message: str) -> None:
        if message not in self._said and state.rank == 0:
            warn(message)
        self._said.add(message)

    def _adds_special_tokens(self, text: str) -> bool:
        """True if the tokenizer should add its special tokens: False after a BOS in the text."""
        return self._special.bos is None or not text.startswith(self._tokenizer.decode([self._special.bos]))

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @property
    def eot_token_id(self) -> int:
        """The end token, else the begin token; an InputError if the tokenizer has neither."""
        token = self._special.eos if self._special.eos is not None else self._special.bos
        if token is None:
            raise InputError("lm-eval: the tokenizer has no token that begins or ends a text.")
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the begin token, else the end token."""
        return self._special.bos if self._special.bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's folder."""
        return str(self._settings.tokenizer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; without its system message if the template refuses one."""

        def written(messages: list[dict[str, str]]) -> str:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **(self._settings.chat or {}),
            )
            return text

        try:
            return written(chat_history)
        except Exception as error:  # of Jinja, and of Python within expressions
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise InputError(f"lm-eval: the chat template refuses a question: {first_line(error)}.") from None
            self._say_once(
                "lm-eval: the chat template refuses the system message with a task's description "
                f"({first_line(error)}): questions are asked without it, as lm-eval does."
            )
            return written(others)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; a chat template writes all special tokens of a conversation, so none are added to it."""
        if add_special_tokens is None:
            add_special_tokens = self._settings.chat is None and self._adds_special_tokens(string)
        ids: list[int] = self._tokenizer.encode(string, add_special_tokens=add_special_tokens)
        if ids and max(ids) >= self._settings.vocabulary:
            raise InputError(
                f"lm-eval: a question has the token {max(ids)}, but the model has {self._settings.vocabulary} tokens."
            )
        return ids

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        texts, cut = [], 0
        longest = self._settings.longest
        for (_context, continuation), before, after in requests:
            if not after:
                raise InputError(f"lm-eval: the answer {continuation!r} has no separate token after its question.")
            if len(after) > longest:
                raise InputError(
                    f"lm-eval: an answer has {len(after)} tokens, but the model has {longest} positions. Leave the task out."
                )
            cut += len(before) + len(after) > longest + 1
            texts.append(Scored([*before, *after][-(longest + 1) :], len(after)))
        _say_cut(cut, len(requests), longest)
        return self._answerer.score(texts)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, from disjoint windows of at most the model's positions."""
        texts, owners = [], []
        for number, request in enumerate(requests):
            (string,) = request.args
            ids = self.tok_encode(string, add_special_tokens=self._adds_special_tokens(string))
            windows = get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self._settings.longest, context_len=1
            )
            for before, after in map(make_disjoint_window, windows):
                texts.append(Scored([*before, *after], len(after)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._answerer.score(texts), strict=True):
            sums[number] += value
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, up to a stop string, an end token or the task's limit."""
        prompts, limits, stops, cut = [], [], [], 0
        longest = self._settings.longest
        for request in requests:
            context, options = request.args
            _refuse_sampling(options)
            limit = int(options.get("max_gen_toks", 256))
            until = options.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))
            if limit >= longest:
                raise InputError(
                    f"lm-eval: a task asks for answers of {limit} tokens (max_gen_toks), but the model has "
                    f"{longest} positions. Set max_gen_toks in a task of your own (train.eval_tasks)."
                )
            ids = self.tok_encode(context)
            cut += len(ids) > longest - limit
            prompts.append(ids[-(longest - limit) :] or [self.prefix_token_id])
            limits.append(limit)
        _say_cut(cut, len(requests), longest)
        ends = {token for token in (self._special.eos, *self._settings.turn_ends) if token is not None}

        def ended(number: int, ids: list[int]) -> bool:
            return ids[-1] in ends or any(stop in self._text(ids) for stop in stops[number])

        answers = self._answerer.continued(prompts, limits, ended)
        return [_until(self._text(ids), stop) for ids, stop in zip(answers, stops, strict=True)]


def _say_cut(cut: int, total: int, longest: int) -> None:
    if cut and state.rank == 0:
        warn(f"lm-eval: {cut} of {total} questions are longer than the model's {longest} positions, and lose their beginning.")


def _refuse_sampling(options: Mapping[str, Any]) -> None:
    """Refuse options of sampling: answers are the most probable tokens."""
    sampled = {
        "do_sample": options.get("do_sample", False),
        "temperature": options.get("temperature", 0.0),
        "num_beams": options.get("num_beams", 1) != 1,
    }
    for key, value in sampled.items():
        if value:
            raise InputError(
                f"lm-eval: a task sets {key} = {options[key]!r}, but answers are the most probable tokens here. "
                "Set do_sample = false in a task of your own (train.eval_tasks)."
            )
    known = {"do_sample", "temperature", "num_beams", "until", "max_gen_toks", "top_p", "top_k"}
    for key in options:
        if key not in known:
            raise unknown("key of generation_kwargs", key, sorted(known), key="the task")


def _until(text: str, stops: Iterable[str]) -> str:
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text
