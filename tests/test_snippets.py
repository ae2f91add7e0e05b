"""Every snippet of the README and of docs/ runs as it is printed, in one folder a page.

What a GPU or minutes would be needed for is only parsed: `octavo bench`, `python -m benchmarks`. Runs of presets and of several
ranks are planned, and so are those that `octavo verify` compares. Other runs get small sizes on top.
"""

import ast
import importlib.util
import io
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

import octavo
import ranks
from benchmarks.__main__ import app as benchmarks
from benchmarks.published import __main__ as published
from benchmarks.published.measure import chosen
from benchmarks.suites import SUITES
from benchmarks.vision.prices import prices_with
from chat_templates import save_tokenizer
from octavo.bench.run import KNOWN
from octavo.cli import app, main
from octavo.config.run import RunConfig
from octavo.data.tokenizer import train as train_tokenizer

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
ON_TWO_RANKS = ("docs/context-parallelism.md",)
SMALL = ("data.sequence_length=32", "train.global_batch=4", "train.epochs=0.1")
NOT_OCTAVO = ("make", "pip", "python3 -m venv", "bash")
BENCHMARKS = "python -m benchmarks "
PUBLISHED = "python -m benchmarks.published "
WORDS = "a scale for each tensor keeps small values in reach of the format while large ones saturate "
CONFIG = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 4096,
}  # fmt: skip


def snippets(page):
    """(language, text) of each fenced block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)


@pytest.fixture(scope="session")
def furnished(tmp_path_factory):
    """A folder with all that a reader has: a model in Hugging Face's format, texts, a run file, the presets."""
    place = tmp_path_factory.mktemp("snippets")
    (place / "texts").mkdir()
    corpus = place / "texts" / "some.jsonl"
    corpus.write_text("".join(json.dumps({"text": WORDS * (1 + number % 5)}) + "\n" for number in range(60)))
    (place / "presets").symlink_to(ROOT / "presets")
    (place / "src").mkdir()
    (place / "src" / "train.py").write_text("import os\nopen(os.environ['SM_MODEL_DIR'] + '/' + os.environ['RANK'], 'x')\n")
    (place / "data" / "train").mkdir(parents=True)
    (place / "folder").mkdir()
    train_tokenizer(["a few words and more words"] * 20, 300).save(place / "folder")
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(place / "folder")
    save_tokenizer(place / "chat-model", "chatml")
    AutoModelForCausalLM.from_config(LlamaConfig(**{**CONFIG, "vocab_size": 512})).save_pretrained(place / "chat-model")
    turns = [{"role": role, "content": text} for role, text in (("user", "a fox?"), ("assistant", "the lazy dog"))]
    (place / "chats.jsonl").write_text("".join(json.dumps({"messages": turns * (1 + n % 3)}) + "\n" for n in range(60)))
    (place / "prompts.csv").write_text("prompt,completion\n" + "a fox:, the dog\n" * 20)
    (place / "run.toml").write_text(
        f"""[model]
source = "llama-tiny"
config = {{ {", ".join(f"{key} = {value}" for key, value in CONFIG.items())} }}
[data]
source = "{corpus}"
vocab_size = 300
sequence_length = 32
[train]
steps = 2
global_batch = 2
"""
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "run.toml", "train.output=runs/demo", "train.compare_bf16=true"]) == 0
    for name, run in (("bf16", "demo/bf16"), ("llama-1b", "demo")):
        shutil.copytree(place / "runs" / run, place / "runs" / name)
    return place


@pytest.fixture
def place(furnished, tmp_path, monkeypatch):
    shutil.copytree(furnished, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def names_before(page):
    """The names that a page's first snippet may take for granted: none in the README."""
    if page == "README.md":
        return {}
    config = LlamaConfig(**CONFIG)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 256, (2, 16))
    return {
        "octavo": octavo, "torch": torch, "AutoModelForCausalLM": AutoModelForCausalLM, "config": config, "model": model,
        "ids": ids,
    }  # fmt: skip


def arguments_of(line):
    """The arguments after `octavo` of a line of shell; None for a line of another program."""
    line = line.partition("| ")[2] if line.startswith("echo ") else line
    words = shlex.split(line, comments=True)
    if not words or line.startswith(NOT_OCTAVO):
        return None
    if words[0] == "srun":
        start = words.index("octavo")
        hosts, ranks = (int(words[words.index(name) + 1]) for name in ("--nodes", "--ntasks-per-node"))
        return [*words[start + 1 :], "--dry-run", "--world-size", str(hosts * ranks)]
    if words[0] == "torchrun":
        start = words.index("octavo")
        assert words[start - 1] == "-m", line
        hosts, ranks = (int(words[words.index(name) + 1]) for name in ("--nnodes", "--nproc-per-node"))
        words = words[start:]
        return [*words[1:], "--dry-run", "--world-size", str(hosts * ranks)] if words[1] == "train" else words[1:]
    if line.startswith((BENCHMARKS, PUBLISHED)):
        return words[3:]
    assert words[0] == "octavo", line
    return words[1:]


def parse(arguments, single=None):
    """Let the command line accept the arguments, without running them: `octavo`'s, or that of the command `single`."""
    if single is not None:
        return single.make_context("benchmarks", arguments).params
    group = typer.main.get_command(app)
    _, command, rest = group.resolve_command(group.make_context("octavo", ["doctor"]), arguments)
    return command.make_context(arguments[0], rest).params


def run_line(line, monkeypatch):
    arguments = arguments_of(line)
    if arguments is None:
        return
    if line.startswith(BENCHMARKS):
        given = parse(arguments, typer.main.get_command(benchmarks))
        suite = SUITES[given["suite"]]
        for key, known in (("cases", suite.known), ("entries", suite.entries)):
            assert not given[key] or set(given[key].split(",")) <= set(known), line
        return
    if line.startswith(PUBLISHED):
        given = published.parsed(arguments)
        assert chosen(given.cases.split(",") if given.cases else None), line
        return
    if line.startswith("echo "):
        monkeypatch.setattr("sys.stdin", io.StringIO(shlex.split(line)[1]))
    if "--checkpoint" in arguments:  # a step of the reader's own run
        assert parse(arguments)["checkpoint"].startswith("step-")
        return
    if arguments[0] == "verify":  # as `train` on so many ranks, planned; tests/verify runs it
        arguments[0] = "train"
    if arguments[0] == "bench":
        assert parse(arguments)["suite"] in KNOWN, line
        return
    if "--ranks" in arguments:  # the same run, planned
        place = arguments.index("--ranks")
        arguments[place : place + 1] = ["--dry-run", "--world-size"]
    if arguments[:1] == ["train"]:
        preset = arguments[1].startswith("presets/")
        arguments += ["--dry-run"] if preset and "--dry-run" not in arguments else []
        arguments += [] if preset else SMALL
    assert main(arguments) == 0, line


def run_on_two_ranks(page):
    """The Python of a page whose snippets need ranks."""
    names = names_before(page)
    ids, heads = names["ids"], [torch.randn(2, 8, count, 16) for count in (4, 2, 2)]
    names |= {"targets": ids, "positions": torch.arange(16)[None], **dict(zip("qkv", heads, strict=True))}
    for language, text in snippets(page):
        if language == "python":
            exec(compile(text, page, "exec"), names)
    return names["loss"].item(), tuple(names["whole"].shape)


def all_installed(text):
    """False for a snippet of timm where that is not installed."""
    imported = [alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names]
    return all(name != "timm" or importlib.util.find_spec(name) for name in imported)


def run_toml(text):
    """A block with its file's name on the first line becomes that file, of prices or of a run; another is a part of a run's."""
    named = re.match(r"# (\S+\.toml)\n", text)
    if named:
        path = Path(named[1])
        path.write_text(text)
        if path.name == "prices.toml":
            prices_with(path)
        else:
            RunConfig.from_file(path)
        return
    values = tomllib.loads(Path("run.toml").read_text())
    for section, keys in tomllib.loads(text).items():
        values.setdefault(section, {}).update(keys)
    RunConfig.from_dict(values)


@pytest.mark.usefixtures("trials_once")
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run(page, place, monkeypatch, capsys):
    names, shared = names_before(page), page in ON_TWO_RANKS
    if shared:
        (loss, shape), (other, _) = ranks.run(2, run_on_two_ranks, page)
        assert loss == other
        assert shape == (2, 16, 4, 16)
    for language, text in snippets(page):
        if language == "python" and not shared and all_installed(text):
            exec(compile(text, page, "exec"), names)
        elif language == "toml":
            run_toml(text)
        elif re.match(r"octavo (?!\d)|torchrun|make|pip|python3|echo", text):
            for line in text.splitlines():
                run_line(line, monkeypatch)
