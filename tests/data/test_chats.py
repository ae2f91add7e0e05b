"""Masks of conversations, compared with an independent restatement by places of characters, and what is refused."""

import csv
import io
import itertools
import json
import re

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from chat_templates import CHATML, CHATML_MARKED, STYLES, save_tokenizer
from octavo.cli import main
from octavo.data import show
from octavo.data.builtin_templates import BUILTIN
from octavo.data.chats import ExampleEncoder
from octavo.data.columns import IGNORED
from octavo.data.conversations import conversation
from octavo.data.documents import Document
from octavo.data.loader import BatchLoader, balanced, sequences_of
from octavo.data.packing import Batch, pack_documents
from octavo.data.prepared import prepare
from octavo.data.tokenizer import load
from octavo.errors import InputError

TURNS = {  # what stands before a turn of the assistant, and the token that ends it
    "chatml": (r"<\|im_start\|>assistant\n", "<|im_end|>"),
    "marked": (r"<\|im_start\|>assistant\n", "<|im_end|>"),
    "qwen3": (r"<\|im_start\|>assistant\n", "<|im_end|>"),
    "llama-3": (r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", "<|eot_id|>"),
    "mistral": (r"\[/(?:INST|TOOL_RESULTS)\]", "</s>"),
    "gemma": (r"<start_of_turn>model\n", "<end_of_turn>"),
}
WORDS = ["the", "quick", "brown", "fox:", "jumps!", "over\n", "\n\nlazy", "dog", "ü", "漢字", "42", "don't", "  two  ", "(a)"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizers")
    return {style: save_tokenizer(place / style, style) for style in STYLES}


@pytest.fixture
def chats(tmp_path, config, folders):
    """Prepare rows with the tokenizer of a style."""

    def made(rows, style="chatml", name="chats.jsonl", **changes):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"tokenizer": str(folders.get(style, style)), "packing": "documents", "validation_fraction": 0.0}
        return prepare(config(path, **{**values, **changes}), console=Console(quiet=True))

    return made


def a_text(draw):
    """Words that a border may merge with, without white space at the ends."""
    return " ".join(draw.choice(WORDS, draw.integers(1, 9))).strip()


def a_conversation(draw, turns, system=False):
    messages = [{"role": "system", "content": a_text(draw)}] if system else []
    for _ in range(turns):
        messages += [{"role": "user", "content": a_text(draw)}, {"role": "assistant", "content": a_text(draw)}]
    return messages


def documents(data, split="train"):
    offsets, labels = data.offsets(split).astype(int), data.labels(split)
    ids = data.tokens(split)
    return [
        (ids[a:b].astype(int).tolist(), ids[a:b].astype(int).tolist() if labels is None else labels[a:b].tolist())
        for a, b in itertools.pairwise(offsets)
    ]


def expected(folder, style, messages, last=False, **template):
    """Ids and labels by the places of the trained characters: from a turn's header to its end token."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template)
    before, end = TURNS[style]
    places = [found.span(1) for found in re.finditer(f"{before}(.*?{re.escape(end)})", text, re.DOTALL)]
    trained = np.zeros(len(text), bool)
    for start, stop in places[-1:] if last else places:
        trained[start:stop] = True
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, labels = found["input_ids"], []
    for token, (start, stop) in zip(ids, found["offset_mapping"], strict=True):
        assert trained[start:stop].all() == trained[start:stop].any()  # no token has characters of both
        labels.append(token if trained[start:stop].all() and stop > start else IGNORED)
    return ids, labels


@pytest.mark.parametrize("style", STYLES)
def test_the_trained_tokens_are_those_of_the_turns_with_their_ends(chats, folders, style):
    draw = np.random.default_rng()
    turns = (1,) if style == "qwen3" else (1, 2, 3)
    system = style not in ("gemma", "mistral")
    talks = [a_conversation(draw, count, system and bool(draw.integers(2))) for count in turns for _ in range(8)]
    data = chats([{"messages": talk} for talk in talks], style)
    found = documents(data)
    assert len(found) == len(talks)
    for talk, (ids, labels) in zip(talks, found, strict=True):
        assert (ids, labels) == expected(folders[style], style, talk)
        assert ids == AutoTokenizer.from_pretrained(str(folders[style])).apply_chat_template(talk)["input_ids"]
        ends = [token for token, label in zip(ids, labels, strict=True) if label != IGNORED]
        assert ends.count(AutoTokenizer.from_pretrained(str(folders[style])).convert_tokens_to_ids(TURNS[style][1])) == (
            len(talk) // 2
        )
    assert data.manifest.examples.turns_by == ("marks" if style == "marked" else "prefixes")
    assert data.manifest.examples.read == len(talks)
    starts = {ids[0] for ids, _ in found}
    assert all(ids[0] != ids[1] for ids, _ in found)  # one BOS where the template writes one, though the tokenizer adds one too
    assert len(starts) == 1


def test_generation_marks_give_the_mask_of_transformers(chats, folders):
    draw = np.random.default_rng()
    talks = [a_conversation(draw, 1 + number % 3, True) for number in range(12)]
    tokenizer = AutoTokenizer.from_pretrained(str(folders["marked"]))
    for talk, (ids, labels) in zip(talks, documents(chats([{"messages": talk} for talk in talks], "marked")), strict=True):
        theirs = tokenizer.apply_chat_template(talk, return_assistant_tokens_mask=True, return_dict=True)
        assert ids == theirs["input_ids"]
        assert [int(label != IGNORED) for label in labels] == theirs["assistant_masks"]


@pytest.mark.parametrize("style", ["chatml", "marked", "llama-3", "mistral", "qwen3"])
def test_the_last_turn_alone_is_trained_also_by_a_template_that_strips_earlier_ones(chats, folders, style):
    draw = np.random.default_rng()
    system = style == "mistral"  # whose system text moves with the last user's message
    talks = [a_conversation(draw, 3, system) for _ in range(6)]
    data = chats([{"messages": talk} for talk in talks], style, train_on="last")
    for talk, found in zip(talks, documents(data), strict=True):
        assert found == expected(folders[style], style, talk, last=True)


def test_all_tokens_are_trained_on_request_alone(chats):
    talks = [{"messages": a_conversation(np.random.default_rng(), 2)} for _ in range(3)]
    data = chats(talks, train_on="all")
    assert data.labels("train") is None
    assert show.counts(data, _section(data))["train"].trained == len(data.tokens("train")) - 3


def _section(data, **changes):
    from octavo.config.data import DataConfig

    return DataConfig(**{"source": "python:docstrings", "sequence_length": 32, "packing": "documents", **changes})


def test_turns_of_weight_0_are_not_trained(chats, folders):
    draw = np.random.default_rng()
    talk = a_conversation(draw, 3)
    weighed = [dict(message) for message in talk]
    weighed[1]["weight"], weighed[3]["weight"] = 0, 1
    (ids, labels), (_, marked) = (documents(chats([{"messages": weighed}], style))[0] for style in ("chatml", "marked"))
    whole, everything = expected(folders["chatml"], "chatml", talk)
    end = everything.index(next(label for label in everything if label != IGNORED))
    stop = end + next(at for at, label in enumerate(everything[end:]) if label == IGNORED)
    assert ids == whole
    assert labels == [IGNORED] * stop + everything[stop:]
    assert marked == labels
    weighed[3]["weight"] = weighed[5]["weight"] = 0
    with pytest.raises(InputError, match=r"line 1: the weights of the messages exclude every assistant's turn"):
        chats([{"messages": weighed}], name="none.jsonl")


def test_reasoning_and_tool_calls_are_trained_and_results_are_not(chats, folders):
    tools = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "rain", "arguments": {"where": "hills", "ü": [1, None]}}}
    talk = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [call]},
        {"role": "tool", "content": "42 (a)"},
        {"role": "tool", "content": "43"},
        {"role": "assistant", "content": "the fox", "reasoning_content": "so\nit"},
    ]
    as_text = json.loads(json.dumps(talk))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    rows = [{"messages": talk, "tools": tools}, {"messages": as_text, "tools": json.dumps(tools)}]
    for template in (None, "qwen3"):
        data = chats(rows, "qwen3", chat_template=template, name=f"tools-{template}.jsonl")
        tokenizer = AutoTokenizer.from_pretrained(str(data.tokenizer_folder))
        for ids, labels in documents(data):
            assert ids == tokenizer.apply_chat_template(talk, tools=tools)["input_ids"]
            runs = [
                tokenizer.decode([label for _, label in run])
                for trained, run in itertools.groupby(zip(ids, labels, strict=True), key=lambda each: each[1] != IGNORED)
                if trained
            ]
            assert len(runs) == 2
            assert runs[0].startswith("<think>\nlook\n</think>\n\n")
            assert runs[0].endswith("</tool_call><|im_end|>")
            assert runs[1] == "<think>\nso\nit\n</think>\n\nthe fox<|im_end|>"
        assert data.manifest.examples.turns_by == ("prefixes" if template is None else "marks")


def test_the_forms_of_all_files_give_the_same_tokens(tmp_path, config, folders):
    draw = np.random.default_rng()
    talks = [a_conversation(draw, 1 + number % 3, number % 2 == 0) for number in range(8)]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    forms = {
        "hugging-face.jsonl": [{"messages": talk, "id": 1} for talk in talks],
        "sharegpt.jsonl": [
            {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in talk]} for talk in talks
        ],
        "beside.jsonl": [  # LLaMA-Factory's, with the system's text as a column
            {
                "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in talk if m["role"] != "system"],
                "system": talk[0]["content"] if talk[0]["role"] == "system" else "",
            }
            for talk in talks
        ],
        "openai.jsonl": [
            {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}], "tool_calls": None} for m in talk]}
            for talk in talks
        ],
    }
    paths = []
    for name, rows in forms.items():
        paths.append(tmp_path / name)
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths += [tmp_path / "a.parquet", tmp_path / "strings.parquet", tmp_path / "saved"]
    pq.write_table(pa.Table.from_pylist(forms["hugging-face.jsonl"]), paths[-3])
    pq.write_table(pa.Table.from_pylist([{"messages": json.dumps(talk)} for talk in talks]), paths[-2])
    datasets.Dataset.from_list(forms["beside.jsonl"]).save_to_disk(str(paths[-1]))
    changes = {"tokenizer": str(folders["chatml"]), "packing": "documents"}
    all_data = [prepare(config(path, **changes), console=Console(quiet=True)) for path in paths]
    assert len({data.manifest.fingerprint for data in all_data}) == 1
    assert all_data[0].labels("train") is not None
    assert all_data[0].manifest.splits["validation"].documents == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_of_prompts_the_completion_and_the_end_token_are_trained(tmp_path, config, folders, suffix):
    draw = np.random.default_rng()
    rows = [{"prompt": a_text(draw) + ":", "completion": " " + a_text(draw)} for _ in range(12)]
    path = tmp_path / f"prompts{suffix}"
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, ["prompt", "completion"])
            table.writeheader()
            table.writerows(rows)
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for style in ("chatml", "llama-3"):
        changes = {"tokenizer": str(folders[style]), "packing": "documents", "validation_fraction": 0.0}
        found = documents(prepare(config(path, **changes), console=Console(quiet=True)))
        tokenizer = AutoTokenizer.from_pretrained(str(folders[style]))
        bos = [tokenizer.bos_token_id] if style == "llama-3" else []
        for row, (ids, labels) in zip(rows, found, strict=True):
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            whole = tokenizer(row["prompt"] + row["completion"], add_special_tokens=False)["input_ids"]
            assert whole[: len(prompt)] == prompt
            assert ids == [*bos, *whole, tokenizer.eos_token_id]
            assert labels == [IGNORED] * (len(bos) + len(prompt)) + ids[len(bos) + len(prompt) :]


def test_prompts_and_completions_of_messages_are_conversations_with_trained_completions(chats, folders):
    talk = a_conversation(np.random.default_rng(), 3)
    rows = [{"prompt": talk[:3], "completion": talk[3:]}, {"messages": talk, "prompt": "p", "prompt_id": "1"}]
    found = documents(chats(rows[:1]))
    ids, labels = expected(folders["chatml"], "chatml", talk)
    prompt = AutoTokenizer.from_pretrained(str(folders["chatml"])).apply_chat_template(talk[:3])["input_ids"]
    assert found == [(ids, [IGNORED] * len(prompt) + labels[len(prompt) :])]
    assert documents(chats(rows[1:], name="whole.jsonl")) == [(ids, labels)]  # a prompt alone is no other kind


ASKED = [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "the dog"}]
FAULTS = {
    "no assistant": ([ASKED[0]], {}, r"none of the 1 messages is an assistant's"),
    "role": ([ASKED[0], {"role": "narrator", "content": "x"}], {}, r"message 2 of 'messages' has the role 'narrator'"),
    "two texts": ([{"from": "human", "value": "x", "content": "y"}, ASKED[1]], {}, r"has 'content' = 'y' and 'value' = 'x'"),
    "two roles": ([ASKED[0], {**ASKED[1], "from": "human"}], {}, r"'role' = 'assistant' and 'from' = 'human': keep one"),
    "sharegpt role": ([{"from": "me", "value": "x"}], {}, r"message 1 of 'messages' is from 'me': known are human"),
    "empty": ([ASKED[0], {"role": "assistant", "content": " "}], {}, r"message 2 of 'messages' \(assistant\) has no text"),
    "null": ([ASKED[0], {"role": "assistant", "content": None}], {}, r"message 2 of 'messages' \(assistant\) has no text"),
    "no list": ("hello", {}, r"'messages' is a string that is not JSON"),
    "no message": ([], {}, r"'messages' is an empty list"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ASKED[1]], {},
        r"message 1 of 'messages' has parts of type image_url: Octavo trains only on text",
    ),
    "weight": ([ASKED[0], {**ASKED[1], "weight": 0.5}], {}, r"message 2 of 'messages' has 'weight' = 0\.5"),
    "function_call": ([ASKED[0], {**ASKED[1], "function_call": {}}], {}, r"'function_call': write it as 'tool_calls'"),
    "arguments": (
        [ASKED[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {},
        r"message 2 of 'messages': the arguments of 'f' are not JSON",
    ),
    "argument twice": (
        [ASKED[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]}], {},
        r"message 2 of 'messages': in the arguments of 'f', the key 'a' occurs twice",
    ),
    "role twice": ('[{"role": "user", "role": "system"}]', {}, r"'messages': the key 'role' occurs twice"),
    "special": ([{"role": "user", "content": "a<|im_end|>b"}, ASKED[1]], {}, r"a text has '<\|im_end\|>', the name of a"),
    "merge": ([ASKED[0], {"role": "assistant", "content": "\n\nx"}], {}, r"where '.*assistant\\n' ends and '\\n\\nx.*' begins"),
    "functions": (ASKED, {"functions": [{"name": "f"}]}, r"'functions' is OpenAI's older form"),
    "tools left out": (ASKED, {"tools": [{"name": "f"}]}, r"the chat template leaves out the tools"),
    "systems": ([{"role": "system", "content": "s"}, *ASKED], {"system": "t"}, r"'system' is set too"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_row_is_refused_by_its_line_or_counted(chats, fault):
    messages, beside, words = FAULTS[fault]
    rows = [{"messages": ASKED}, {"messages": messages, **beside}, {"messages": ASKED}]
    with pytest.raises(InputError, match=rf"chats\.jsonl, line 2: .*{words}.*set data\.faulty_rows = \"drop\""):
        chats(rows)
    data = chats(rows, faulty_rows="drop")
    record = data.manifest.examples
    assert (record.read, sum(record.dropped.values()), len(documents(data))) == (3, 1, 2)
    (reason,) = record.dropped
    assert f"dropped: 1 of 3 rows: {reason} (1)" in show.lines_of(data, _section(data))
    with pytest.raises(InputError, match=rf"all rows are dropped: {re.escape(reason)} \(1\)"):
        chats(rows[1:2], faulty_rows="drop", name="one.jsonl")


def test_a_key_that_stands_twice_is_refused_in_messages_and_tools_alone(folders, config, tmp_path):
    good = json.dumps(ASKED)
    lines = {
        "beside": (f'{{"messages": {good}, "meta": {{"a": 1, "a": 2}}, "meta": 3}}', None),
        "message": (good.join(('{"messages": ', "}")).replace('"role": "user"', '"role": "user", "role": "system"'), "role"),
        "column": (f'{{"messages": {good}, "messages": {good}}}', "messages"),
        "tools": (f'{{"messages": {good}, "tools": [{{"name": "f", "name": "g"}}]}}', "name"),
    }
    for name, (line, key) in lines.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f'{{"messages": {good}}}\n{line}\n')
        changes = {"tokenizer": str(folders["chatml"]), "packing": "documents", "validation_fraction": 0.0}
        if key is None:
            found = documents(prepare(config(path, **changes), console=Console(quiet=True)))
            assert found[0] == found[1]
        else:
            with pytest.raises(InputError, match=rf"{name}\.jsonl, line 2: the key '{key}' occurs twice"):
                prepare(config(path, **changes), console=Console(quiet=True))


HEADER = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
MARK = "{% if m['role'] == 'assistant' %}{% generation %}"


def _changed(old, new, template=CHATML):
    assert old in template
    return template.replace(old, new)


def _content(expression):
    return _changed("m['content'] +", f"({expression}) +")


TEMPLATES = {
    "the header is no prompt": (CHATML.split("{% if add")[0], 1, r"begins message 2 with .*assistant\\n\", but does not end"),
    "a header behind the end": (  # as the first one of Llama-3 had it
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ '<|im_start|>assistant<|im_start|>' }}",
        1,
        r"writes .* after the text of message 2, before the last",
    ),
    "the end is text": (_changed("<|im_end|>", "[end]"), 1, r"ends message 2 with .*\[end\]\", which is not a token"),
    "earlier turns": (
        _content("m['content'] if loop.last or m['role'] == 'user' else 'X'"), 2,
        r"renders the messages to message 2 differently once others follow: .*Set data\.train_on = \"last\"",
    ),
    "a user is left out": (
        _content("'' if m['role'] == 'user' else m['content']"), 1, r"leaves out message 1 \(user\), or changes it"
    ),
    "an answer is changed": (
        _content("m['content'] | upper if m['role'] == 'assistant' else m['content']"), 1, r"not render the text of message 2"
    ),
    "two beginnings": ("{{ bos_token + bos_token }}" + CHATML, 1, r"writes '<\|im_start\|>' twice at the beginning"),
    "marks without the end": (
        _changed(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|im_end|>", CHATML_MARKED), 1,
        r"without the end-of-turn token",
    ),
    "marks with the header": (
        _changed(
            HEADER + MARK, MARK + "<|im_start|>assistant\n", CHATML_MARKED.replace("{% else %}", "{% else %}" + HEADER)
        ),
        1, r"the end of the prompt for a turn",
    ),
    "marks of the last alone": (
        _changed("== 'assistant' %}", "== 'assistant' and loop.last %}", CHATML_MARKED), 2,
        r"mark 1 parts, but there are 2 assistant's turns",
    ),
    "an error": ("{{ raise_exception('no such thing') }}", 1, r"the chat template refuses this .*: TemplateError: no such"),
    "beyond the sandbox": ("{{ ''.__class__.__mro__ }}", 1, r"the chat template refuses this conversation: SecurityError"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_an_exact_mask_is_refused_at_its_first_conversation(tmp_path, chats, name):
    template, turns, words = TEMPLATES[name]
    draw = np.random.default_rng()
    changes = {"bos_token": "<|im_start|>"} if name == "two beginnings" else {}
    folder = save_tokenizer(tmp_path / "own", "chatml", template)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**values, **changes}))
    one = [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "the dog"}]
    with pytest.raises(InputError, match=rf"line 1: .*{words}"):
        chats([{"messages": one * turns}, {"messages": a_conversation(draw, turns)}], str(folder))


def test_no_template_is_refused_and_a_file_or_a_built_in_one_is_taken_into_the_run(tmp_path, chats, folders):
    bare = str(save_tokenizer(tmp_path / "bare", "chatml", False))
    rows = [{"messages": a_conversation(np.random.default_rng(), 2)}]
    with pytest.raises(
        InputError, match=r"has no chat template\. .*set data\.chat_template to a Jinja file or one of 'chatml'"
    ):
        chats(rows, bare)
    with pytest.raises(InputError, match=r'"train" has no chat template'):
        chats(rows, "train")
    with pytest.raises(InputError, match=r"'chatlm' is neither a file nor built in\. Did you mean 'chatml'\?"):
        chats(rows, bare, chat_template="chatlm")
    file = tmp_path / "own.jinja"
    file.write_text(CHATML)
    by_name, by_file, own = (
        chats(rows, bare, chat_template="chatml"), chats(rows, bare, chat_template=str(file)), chats(rows)
    )  # fmt: skip
    assert documents(by_name) == documents(by_file) == documents(own)
    assert by_name.folder != by_file.folder
    for data, template in ((by_name, BUILTIN["chatml"]), (by_file, CHATML)):
        assert AutoTokenizer.from_pretrained(str(data.tokenizer_folder)).chat_template == template
    file.write_text(CHATML + "{# changed #}")  # another template: another preparation
    assert chats(rows, bare, chat_template=str(file)).folder != by_file.folder


@pytest.mark.parametrize("faulty_rows", ["refuse", "drop"])
def test_a_fault_of_the_template_is_none_of_a_row(tmp_path, chats, faulty_rows):
    """Whether faulty rows are dropped or not."""
    talk = [{"messages": a_conversation(np.random.default_rng(), 1)}]
    file = tmp_path / "own.jinja"
    file.write_text(CHATML.replace("{% endfor %}", "\n{% endfor %}\n{{ messages[0].content | upcase }}"))
    with pytest.raises(InputError, match=r"^data\.chat_template = '.*own\.jinja': line 3 of the .*: No filter named 'upcase'"):
        chats(talk, chat_template=str(file), faulty_rows=faulty_rows)
    own = save_tokenizer(tmp_path / "broken", "chatml", template="{% for m in messages %}\n{{ m.content }")
    with pytest.raises(InputError, match=r"^data\.tokenizer = '.*broken': line 2 of the .*, or set data\.chat_template\.$"):
        chats(talk, str(own), faulty_rows=faulty_rows)


@pytest.mark.parametrize("name", BUILTIN)
def test_a_built_in_template_without_its_tokens_is_refused_with_one_that_fits(chats, folders, name):
    talk = [{"messages": a_conversation(np.random.default_rng(), 1)}]
    style, fits = ("chatml", '"chatml" or "qwen3"') if name == "llama-3" else ("llama-3", '"llama-3"')
    missing = "<|eot_id|>" if name == "llama-3" else "<|im_end|>"
    with pytest.raises(
        InputError, match=rf"uses .*{re.escape(missing)}.*Set data\.chat_template = {fits}, whose tokens it has"
    ):
        chats(talk, style, chat_template=name, faulty_rows="drop")


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_templates_train_the_turns_of_their_own_prompts(chats, folders, name):
    """Without their marks, by the prompts, they give the same."""
    draw = np.random.default_rng()
    style = {"chatml": "chatml", "llama-3": "llama-3", "qwen3": "qwen3"}[name]
    rows = [{"messages": a_conversation(draw, 1 + number % 3, number % 2 == 0)} for number in range(9)]
    marked = documents(chats(rows, style, chat_template=name))
    assert marked == [expected(folders[style], style, row["messages"], chat_template=BUILTIN[name]) for row in rows]


def test_variables_reach_the_template(chats, folders):
    talk = a_conversation(np.random.default_rng(), 1)
    thinking, given, of_row = (
        documents(data)[0]
        for data in (
            chats([{"messages": talk}], "qwen3"),
            chats([{"messages": talk}], "qwen3", chat_template_variables={"enable_thinking": False}),
            chats([{"messages": talk, "chat_template_kwargs": {"enable_thinking": False}}], "qwen3", name="row.jsonl"),
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folders["qwen3"]))
    thought = tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
    assert given == of_row
    assert given[0] == thinking[0]
    first = next(at for at, label in enumerate(thinking[1]) if label != IGNORED)
    assert thinking[1][first : first + len(thought)] == thought
    assert given[1] == [*thinking[1][:first], *[IGNORED] * len(thought), *thinking[1][first + len(thought) :]]


MIXED = {
    "both kinds": ({"text": "a", "messages": ASKED}, r"columns of several kinds: conversations \('messages'\); text"),
    "three": ({"input_ids": [1], "messages": ASKED, "prompt": "a", "completion": "b"}, r"Set data\.format = \"chat\" or"),
    "pairs": ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"preference pairs .*a loss that compares two answers"),
    "pairs beside": ({"messages": ASKED, "chosen": "b", "rejected": "c"}, r"preference pairs.*data\.format = \"chat\""),
    "two lists": ({"messages": ASKED, "conversations": ASKED}, r"has both 'messages' and 'conversations'"),
    "instructions": ({"instruction": "a", "output": "b"}, r"name the columns 'prompt' and 'completion'"),
    "weights": ({"messages": ASKED, "weight": 0.5}, r"'weight' cannot be used with an example"),
    "mask": ({"prompt": "a", "completion": "b", "loss_mask": [1]}, r"'loss_mask' cannot be used with an example"),
    "images": ({"messages": ASKED, "images": ["a.png"]}, r"'images' cannot be used with an example"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_columns_that_cannot_be_told_or_used_are_refused(chats, name):
    row, words = MIXED[name]
    with pytest.raises(InputError, match=words):
        chats([row])


def test_a_given_format_decides_between_columns_and_two_forms_are_not_mixed(tmp_path, config, chats, folders):
    both = [{"text": "a fox", "messages": ASKED, "prompt": "p:", "completion": " c"}] * 2
    assert documents(chats(both, format="chat")) == documents(chats([{"messages": ASKED}] * 2, name="alone.jsonl"))
    assert chats(both, format="prompt").manifest.examples.format == "prompt"
    assert chats(both, format="text").manifest.examples is None
    assert chats(both, format="chat", text_field="messages").manifest.examples.format == "chat"
    with pytest.raises(InputError, match=r"line 1: there is no 'mesages', only 'text', .* Did you mean 'messages'\?"):
        chats(both, format="chat", text_field="mesages", name="typo.jsonl")
    twice = [{"from": "gpt", "value": "the dog", **ASKED[1]}]
    assert documents(chats([{"messages": [ASKED[0], *twice]}] * 2, name="twice.jsonl")) == documents(
        chats([{"messages": ASKED}] * 2)
    )
    with pytest.raises(InputError, match=r"there is no 'messages' or .* for data\.format = 'chat', only 'text'"):
        chats([{"text": "a"}], format="chat", name="text.jsonl")
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": ASKED}) + "\n")
    (tmp_path / "two.jsonl").write_text(json.dumps({"text": "a fox"}) + "\n")
    sources = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    for names in (sources, sources[::-1]):
        with pytest.raises(InputError, match="Use one form in all sources"):
            prepare(config(names, tokenizer=str(folders["chatml"]), packing="documents"), console=Console(quiet=True))
    with pytest.raises(InputError, match=r"is text, and has no columns for data\.format = 'chat'"):
        prepare(config("python:docstrings", format="chat"), console=Console(quiet=True))


def test_the_format_is_said_and_so_is_an_end_that_is_not_the_tokenizers(tmp_path, config, folders):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": ASKED}) + "\n")
    console = Console(record=True, width=500, file=io.StringIO())
    changes = {"packing": "documents", "validation_fraction": 0.0}
    prepare(config(path, tokenizer=str(folders["gemma"]), **changes), console=console)
    said = console.export_text()
    assert "chats.jsonl: conversations, by the column 'messages' (data.format = \"chat\")." in said
    assert "turns end in '<end_of_turn>', and the end token of data.tokenizer is '<eos>'" in said


def test_joined_conversations_are_refused_when_they_are_prepared_and_later(chats):
    rows = [{"messages": ASKED}]
    for packing in ("join", "documents", "join"):  # the second finds nothing prepared, the third does
        if packing == "join":
            with pytest.raises(InputError, match=r'Set data\.packing = "documents"'):
                chats(rows, packing=packing)
        else:
            chats(rows, packing=packing)


@pytest.mark.parametrize("how", ["truncate", "cut", "drop"])
def test_conversations_longer_than_a_sequence_are_truncated_cut_or_dropped(chats, how):
    draw = np.random.default_rng()
    talks = [a_conversation(draw, 1 + number % 4) for number in range(20)]
    talks[0][0]["content"] = "the quick " * 40
    data = chats([{"messages": talk} for talk in talks])
    length = 40
    options = {"sequence_length": length, "packing": "documents"}
    found = sequences_of(data, "train", **options, overlong=how)
    seen = []
    for number in range(len(found)):
        batch = found.batch([number])
        starts = [at for at, position in enumerate(batch.position_ids[0].tolist()) if position == 0]
        for start, end in itertools.pairwise([*starts, length]):
            if start < batch.lengths[0]:
                ids, labels = (each[0, start:end].tolist() for each in (batch.input_ids, batch.labels))
                seen.append((tuple(ids), tuple(labels)))
    wanted = []
    for ids, labels in documents(data):
        pieces = [(ids[at : at + length], labels[at : at + length]) for at in range(0, len(ids), length)]
        pieces = pieces if how == "cut" or len(pieces) == 1 else pieces[:1] if how == "truncate" else []
        wanted += [(tuple(a), (IGNORED, *b[1:])) for a, b in pieces if len(a) > 1]
    trained = [each for each in wanted if set(each[1]) != {IGNORED}]
    assert {each for each in seen if set(each[1]) != {IGNORED}} == set(trained)
    if how == "truncate":
        assert len(sequences_of(data, "train", **options)) == len(found)  # the default of conversations
    lines = show.lines_of(data, _section(data, sequence_length=length, overlong=how))
    over = sum(len(ids) > length for ids, _ in documents(data))
    assert f"{over} longer than data.sequence_length = 40" in lines[0]
    lost = sum(len(ids) > length and set(labels[1:length]) == {IGNORED} for ids, labels in documents(data))
    assert show.counts(data, _section(data, sequence_length=length))["train"].untrained == lost
    assert (f", {lost} of them dropped, with no trained token in the first sequence" in lines[0]) == (
        how == "truncate" and lost > 0
    )


def test_balanced_ranks_have_the_same_global_batches_and_more_even_work(chats):
    draw = np.random.default_rng()
    data = chats([{"messages": a_conversation(draw, 1 + int(draw.integers(5)))} for _ in range(240)])
    options = {"sequence_length": 128, "packing": "documents", "seed": 3, "global_batch": 16}

    def steps(ranks, micro, step):
        of_ranks = ({"dp_rank": rank, "dp_size": ranks, "micro_batch": micro} for rank in range(ranks))
        return [BatchLoader(data, "train", **options, **each).step(16 * step) for each in of_ranks]

    def contents(batches):
        rows = (np.concatenate([batch.input_ids, batch.labels, batch.position_ids], 1) for batch in batches)
        return sorted(map(tuple, np.concatenate(list(rows)).tolist()))

    def slowest(of_ranks):
        """Work of the rank with the most, summed over micro-batches: the time of a step whose ranks wait for each other."""
        return sum(max(int((batch.position_ids + 1).sum()) for batch in batches) for batches in zip(*of_ranks, strict=True))

    balanced_work = contiguous_work = 0
    for step in range(4):
        (whole,) = steps(1, 16, step)
        for ranks, micro in ((2, 1), (2, 4), (4, 2), (8, 1)):
            found = steps(ranks, micro, step)
            assert contents(batch for batches in found for batch in batches) == contents(whole)
            balanced_work += slowest(found)
            rows = whole[0].position_ids.reshape(ranks, -1, micro, 128)
            contiguous_work += slowest([[Batch(*[each] * 4) for each in of_rank] for of_rank in rows])
    assert balanced_work < contiguous_work


def test_the_work_of_a_micro_batch_is_shared_as_evenly_as_by_any_other_choice():
    draw = np.random.default_rng()
    for _ in range(20):
        work = draw.integers(1, 1000, 8).tolist()
        shares = balanced(range(8), work, 2, 4)
        loads = [sum(work[index] for rows in share for index in rows) for share in shares]
        best = min(
            max(sum(work[i] for i in half), sum(work) - sum(work[i] for i in half))
            for half in itertools.combinations(range(8), 4)
        )
        assert sorted(index for share in shares for rows in share for index in rows) == list(range(8))
        assert max(loads) <= best * 7 / 6  # of greedy assignment in decreasing order: 4/3 − 1/(3 · ranks)


def test_packing_is_best_fit_and_its_work_is_that_of_its_documents():
    draw = np.random.default_rng()
    lengths = draw.integers(2, 100, 300)
    packed = pack_documents(np.cumsum([0, *lengths]), 128)
    assert len(packed) <= 1.05 * lengths.sum() / 128 + 1
    for number, work in enumerate(packed.work(128).tolist()):
        own = packed.length_P[packed.first_S[number] : packed.first_S[number + 1]]
        assert work == (own**2).sum() + (128 - own.sum()) ** 2


def test_prepare_shows_trained_tokens_and_counts(tmp_path, folders, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng()
    rows = [{"messages": a_conversation(draw, 2)} for _ in range(5)] + [{"messages": [ASKED[0]]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        f"""[model]
source = "llama-tiny"
[data]
source = "chats.jsonl"
tokenizer = "{folders["chatml"]}"
packing = "documents"
sequence_length = 64
validation_fraction = 0
[train]
steps = 2
global_batch = 2
"""
    )
    assert main(["prepare", "run.toml", "--show", "2"]) == 2
    assert "chats.jsonl, line 6: none of the 1 messages is an assistant's" in " ".join(capsys.readouterr().err.split())
    assert main(["prepare", "run.toml", "--show", "2", "data.faulty_rows=drop"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("⟦") == 4
    for row in rows[:2]:
        for message in row["messages"]:
            text = message["content"] + "<|im_end|>"
            assert (f"⟦{text}⟧" if message["role"] == "assistant" else text) in shown
    assert "dropped: 1 of 6 rows: no assistant's turn (1)" in shown
    assert re.search(r"train: 5 conversations, \d+ tokens, \d\d\.\d% of them trained", shown)
    assert main(["prepare", "run.toml", "--show", "1", "data.faulty_rows=drop", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["counts"]["train"]["documents"] == 5
    assert 0 < result["counts"]["train"]["trained_share"] < 1
    assert result["rows"] == {"read": 6, "dropped": {"no assistant's turn": 1}}
    whole = "".join(run["text"] for run in result["shown"][0])
    assert whole == AutoTokenizer.from_pretrained(str(folders["chatml"])).apply_chat_template(
        rows[0]["messages"], tokenize=False
    )


ROUGH = [
    *("\n", "\n\n", " ", "  ", "\t", "\r\n", "the", "assistant", "user", "model", ": ", "ü", "漢", "e\u0301", "\u0301", "🎉"),
    *("<", "|", "<|im", "_end|>", "[", "/INST", "<think>", "</think>", "'s", "42"),
]


@pytest.mark.parametrize("style", STYLES)
def test_rough_texts_have_exact_masks_or_are_dropped_whatever_tokens_merge(chats, folders, style):
    draw = np.random.default_rng()

    def text():
        return "".join(draw.choice(ROUGH, draw.integers(1, 7)))

    def talk():
        roles = ["user", "assistant"] * int(draw.integers(1, 4))
        return [{"role": role, "content": text()} for role in roles]

    talks = [talk() for _ in range(60)]
    rows = [{"messages": [{**m, "content": f"{m['content']}{n}"} for m in each]} for n, each in enumerate(talks)]
    for train_on in ("assistant", "last"):
        data = chats(rows, style, name=f"{train_on}.jsonl", train_on=train_on, faulty_rows="drop")
        found = documents(data)
        assert len(found) + sum(data.manifest.examples.dropped.values()) == 60
        assert len(found) >= (10 if style == "qwen3" and train_on == "assistant" else 25)
        tokenizer = AutoTokenizer.from_pretrained(str(folders[style]))
        by_text = {tuple(tokenizer.apply_chat_template(row["messages"])["input_ids"]): row["messages"] for row in rows}
        for ids, labels in found:
            assert (ids, labels) == expected(folders[style], style, by_text[tuple(ids)], last=train_on == "last")


def test_what_stands_before_a_border_is_encoded_alike_from_its_last_special_token_and_from_its_beginning(config, folders):
    draw = np.random.default_rng()
    for style in ("chatml", "mistral", "gemma", "llama-3"):
        section = config("x", tokenizer=str(folders[style]), packing="documents", faulty_rows="drop")
        rows = [a_conversation(draw, 3) for _ in range(40)]
        for row in rows[::4]:
            row[1]["content"] = "\n\n" + row[1]["content"]  # merges with the header of some
        read = [Document(None, None, str(n), example=conversation({"messages": row}, "messages")) for n, row in enumerate(rows)]
        both = []
        for anchored in (True, False):
            encoder = ExampleEncoder(section, load(str(folders[style])))
            if not anchored:
                encoder._labels._use_anchors = False
            both.append([(each.origin, each.input_ids.tolist(), each.labels.tolist()) for each in encoder(read)])
            assert (encoder._labels._use_anchors and bool(encoder._tokenizer.anchors)) == anchored
        assert both[0] == both[1]
        assert len(both[0]) >= 30


@pytest.mark.parametrize("strips", [True, False])
def test_an_end_token_that_takes_the_white_space_behind_it_is_trained(tmp_path, chats, strips):
    """As Phi-3's."""
    folder = save_tokenizer(tmp_path / "own", "chatml")
    values = json.loads((folder / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["rstrip"] = strips
    (folder / "tokenizer.json").write_text(json.dumps(values))
    draw = np.random.default_rng()
    rows = [{"messages": a_conversation(draw, 2)} for _ in range(10)]
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    line_end = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for row, (ids, labels) in zip(rows, documents(chats(rows, str(folder))), strict=True):
        assert ids == tokenizer.apply_chat_template(row["messages"])["input_ids"]
        assert labels.count(end) == 2
        assert ids.count(end) == 4
        runs = [
            tokenizer.decode([one for one, _ in run])
            for trained, run in itertools.groupby(zip(ids, labels, strict=True), key=lambda each: each[1] != IGNORED)
            if trained
        ]
        assert runs == [m["content"] + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert (ids[-1] == end) == strips
        assert strips or ids[-1:] == line_end


def test_further_faults_have_a_message_of_their_own(chats, folders):
    thinking = [ASKED[0], {**ASKED[1], "reasoning_content": "look"}]
    for rows, style, changes, words in (
        (
            [{"messages": thinking}],
            "qwen3",
            {"chat_template_variables": {"enable_thinking": False}},
            "prompt for message 2 ends",
        ),
        ([{"messages": ASKED}], "chatml", {"chat_template_variables": {"messages": []}}, "sets messages, which Octavo sets"),
        ([{"messages": ASKED, "chat_template_kwargs": {"tools": 1}}], "chatml", {}, "has tools, which Octavo sets"),
        ([{"messages": thinking}], "chatml", {}, "does not render 'reasoning_content' of message 2"),
        ([{"messages": thinking}], "marked", {}, "does not render 'reasoning_content' of message 2"),
        (
            [{"messages": [*ASKED, ASKED[0]] * 2}],
            "qwen3",
            {"train_on": "last"},
            "Remove the messages after the assistant's last turn",
        ),
        ([{"messages": [{"role": "user", "content": "\ud83d"}, ASKED[1]]}], "chatml", {}, "half of a surrogate pair, 0xd83d"),
        (
            [{"messages": ASKED}],
            "chatml",
            {"validation_fraction": 0.5},
            "one conversation or completion, which cannot be split",
        ),
        ([{"messages": ASKED[1:]}], "gemma", {}, "the chat template refuses"),
        ([{"prompt": "a ", "completion": "fox"}], "chatml", {}, "where 'a ' ends and 'fox' begins"),
        ([{"prompt": "the la", "completion": "zy dog"}], "chatml", {}, "where 'the la' ends and 'zy dog' begins"),
        ([{"prompt": "a", "completion": ""}], "chatml", {}, "'completion' is empty"),
        ([{"prompt": "a", "completion": [ASKED[1]]}], "chatml", {}, "must both be strings, or both lists of messages"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            chats(rows, style, **changes)


def test_a_turn_of_tool_calls_that_no_special_token_ends_is_refused(tmp_path, chats):
    """Its last token is </tool_call>, behind which a model may call another tool."""
    own, following = STYLES["qwen3"][0], "\n    {%- elif m.role == 'tool'"
    template = own.replace("'<|im_end|>\\n' }}" + following, "'\\n' if m.tool_calls else '<|im_end|>\\n' }}" + following)
    assert template != own
    folder = save_tokenizer(tmp_path / "own", "qwen3", template)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "rain", "arguments": {}}}]}
    assert documents(chats([{"messages": ASKED}], str(folder)))
    with pytest.raises(
        InputError, match=r"ends message 2 with .*</tool_call>\", which is not a token of the tokenizer that ends"
    ):
        chats([{"messages": [ASKED[0], call]}], str(folder), name="calls.jsonl")


def test_a_share_of_all_or_no_trained_tokens_is_refused(tmp_path, chats):
    everything = "{% for m in messages %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endfor %}"
    folder = str(save_tokenizer(tmp_path / "own", "chatml", everything))
    rows = [{"messages": ASKED[1:]}] * 3
    with pytest.raises(InputError, match=r'a trained share of 1.*Set data\.train_on = "all" if that is intended'):
        chats(rows, folder)
    assert len(documents(chats(rows, folder, train_on="all"))) == 3
    data = chats([{"messages": [{"role": "user", "content": "the quick brown fox " * 9}, ASKED[1]]}])
    with pytest.raises(InputError, match=r"no trained token within a sequence: .*Raise data\.sequence_length"):
        BatchLoader(data, "train", sequence_length=16, packing="documents", seed=0, global_batch=1)
    assert len(BatchLoader(data, "train", sequence_length=128, packing="documents", seed=0, global_batch=1).step(0)) == 1


def test_any_prepared_data_with_a_tokenizer_is_shown(chats, config, tmp_path, folders):
    tokenizer = AutoTokenizer.from_pretrained(str(folders["chatml"]))
    ids = tokenizer("the quick brown fox", add_special_tokens=False)["input_ids"]
    mask = [0] * 2 + [1] * (len(ids) - 2)
    masked = chats([{"input_ids": ids, "loss_mask": mask}])
    assert show.documents(masked, 5) == [[(tokenizer.decode(ids[:2]), False), (tokenizer.decode(ids[2:]), True)]]
    text = chats([{"text": "the quick"}], name="text.jsonl")
    (shown,) = show.documents(text, 1)
    assert "".join(run.text for run in shown) == "the quick<|im_end|>"
    assert [run.trained for run in shown] == [False, True]
    assert show.counts(text, _section(text))["train"].share < 1
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    bare = prepare(config(tmp_path / "ids.jsonl", validation_fraction=0.0), console=Console(quiet=True))
    with pytest.raises(InputError, match=r"--show: the data is token ids without a tokenizer"):
        show.documents(bare, 1)


def test_a_template_without_a_prompt_for_a_turn_trains_its_calls_and_answers(chats, folders):
    """Mistral's turns begin behind the user's: nothing asks for them."""
    call = {"type": "function", "function": {"name": "rain", "arguments": {"where": "hills"}}}
    talk = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "the fox"},
    ]
    for rows in ([{"messages": talk}], [{"messages": talk}, {"messages": ASKED}], [{"messages": ASKED}, {"messages": talk}]):
        found = documents(chats(rows, "mistral", name=f"{len(rows)}-{len(rows[0]['messages'])}.jsonl"))
        for row, each in zip(rows, found, strict=True):
            assert each == expected(folders["mistral"], "mistral", row["messages"])


def test_a_header_that_nothing_asks_for_is_refused_before_calls_of_tools_too(tmp_path, chats):
    template = STYLES["qwen3"][0]
    folder = save_tokenizer(tmp_path / "own", "qwen3", template[: template.index("{%- if add_generation_prompt %}")])
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "rain", "arguments": {}}}]}
    thinking = {**ASKED[1], "reasoning_content": "look"}
    for turn in (call, ASKED[1], thinking):
        with pytest.raises(InputError, match=r"begins message 2 with .*does not end the prompt for a turn with it"):
            chats([{"messages": [ASKED[0], turn]}], str(folder))


def test_keys_that_the_columns_leave_without_effect_are_refused(chats):
    text, prompts = [{"text": "a fox"}] * 3, [{"prompt": "a:", "completion": " fox"}] * 3
    for rows, key, value in (
        (text, "train_on", "last"),
        (text, "faulty_rows", "drop"),
        (text, "chat_template", "chatml"),
        (prompts, "chat_template", "chatml"),
        (prompts, "chat_template_variables", {"a": 1}),
    ):
        with pytest.raises(InputError, match=rf"data\.{key} = .* has no effect: data\.source holds .*Remove data\.{key}"):
            chats(rows, **{key: value})
    assert chats(prompts, train_on="all", name="all.jsonl").labels("train") is None


def test_a_header_behind_every_turn_is_refused_for_calls_and_thoughts_too(tmp_path, chats):
    """Dropped rows must not leave those that alone look right."""
    always = STYLES["qwen3"][0].replace("{%- if add_generation_prompt %}", "{%- if true %}")
    always = always.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant<|im_start|>'")
    folder = save_tokenizer(tmp_path / "own", "qwen3", always)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "rain", "arguments": {}}}]}
    thought = {"role": "assistant", "content": "<think>\nlook\n</think>"}
    for turn in (call, thought, ASKED[1]):
        with pytest.raises(InputError, match=r"after the text of message 2, before the last token"):
            chats([{"messages": [ASKED[0], turn]}], str(folder))


def test_a_mark_that_goes_on_behind_its_turn_is_refused(tmp_path, chats):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if loop.index0 == 1 %}{% generation %}"
        "{{ m.content + '<|im_end|>\\n' }}{% for n in messages[2:] %}{{ n.content + '<|im_end|>' }}{% endfor %}"
        "{% endgeneration %}{% elif loop.index0 == 0 %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    folder = str(save_tokenizer(tmp_path / "own", "chatml", template))
    assert documents(chats([{"messages": ASKED}], folder))
    with pytest.raises(InputError, match=r"the generation mark of message 2 extends beyond its turn, with"):
        chats([{"messages": [*ASKED, ASKED[0]]}], folder, name="on.jsonl")
