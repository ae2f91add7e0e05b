"""A run on conversations: its loss is that of the trained tokens, each conversation by itself, on any ranks."""

import itertools
import json

import numpy as np
import pytest
import torch
from llamas import llama
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig

import octavo
import ranks
from chat_templates import STYLES, save_tokenizer
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.data.loader import sequences_of
from octavo.data.prepared import prepare
from octavo.errors import InputError
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.train.setup import build
from octavo.train.step import train_step

EXACT = (
    *("model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.clip=0"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "model.config.vocab_size=512"),
)
LENGTH = 96
HEADER = "<|im_start|>assistant\n"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "hills"]


def conversations(count):
    """Of one to four turns, some longer than a sequence."""
    draw = np.random.default_rng()

    def text():
        return " ".join(draw.choice(WORDS, draw.integers(1, 12)))

    return [
        [{"role": role, "content": text()} for _ in range(draw.integers(1, 5)) for role in ("user", "assistant")]
        for _ in range(count)
    ]


@pytest.fixture
def chat_run(tmp_path, tiny_run_in):
    """A factory of runs on conversations."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", "chatml")
    found = conversations(48)
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text("".join(json.dumps({"messages": each}) + "\n" for each in found))

    def make(name, *overrides):
        run = tiny_run_in(tmp_path / name, corpus=corpus)
        text = run.file.read_text().replace("vocab_size = 300\n", f'tokenizer = "{tokenizer}"\n')
        run.file.write_text(text)
        return run, [*EXACT, f"data.sequence_length={LENGTH}", *overrides]

    return make, found, AutoTokenizer.from_pretrained(str(tokenizer))


def trained(tokenizer, messages):
    """Ids of a conversation's first LENGTH tokens, and which of them are trained, from the texts of its parts."""
    ids, mask = [], []
    for message in messages:
        turn = message["role"] == "assistant"
        header = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False)["input_ids"]
        body = tokenizer(message["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        end = tokenizer("\n", add_special_tokens=False)["input_ids"]
        ids += header + body + end
        mask += [False] * len(header) + [turn] * len(body) + [False] * len(end)
    return ids[:LENGTH], mask[:LENGTH]


def test_loss_and_gradient_are_those_of_each_conversation_by_itself(chat_run):
    make, found, tokenizer = chat_run
    run, given = make("one", "data.validation_fraction=0")
    data = prepare(RunConfig.from_file(run.file, given).data)
    sequences = len(sequences_of(data, "train", sequence_length=LENGTH, packing="documents"))
    for micro in (1, sequences):
        more = [f"train.global_batch={sequences}", f"train.micro_batch={micro}"]
        stepper, _ = build(check(RunConfig.from_file(run.file, [*given, *more])), data)
        theirs = octavo.to_huggingface(stepper.model).double()
        theirs.zero_grad()
        pieces = [trained(tokenizer, each) for each in found]
        count = sum(sum(mask[1:]) for _, mask in pieces)
        assert count < 0.6 * sum(len(ids) for ids, _ in pieces)
        loss = 0.0
        for ids, mask in pieces:
            logits = theirs(input_ids=torch.tensor([ids])).logits[0, :-1]
            each = functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            part = (each * torch.tensor(mask[1:])).sum() / count
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]).item()
        result = train_step(stepper, 1)
        assert result.loss == pytest.approx(loss, rel=2e-6)
        assert result.grad_norm == pytest.approx(norm, rel=2e-5)


def train(file, overrides):
    """`octavo train` in this process, which is one rank of those that the pool has joined."""
    from rich.console import Console

    from octavo.train.trainer import Trainer

    Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()


def test_ranks_and_resumes_train_on_the_same_global_batches(chat_run):
    make, _, _ = chat_run
    more = ("train.global_batch=8", "train.micro_batch=1", "data.validation_fraction=0.2", "train.validate_batches=99")
    found = {}
    for name, parts in (
        ("one", [(1, 5, ())]),
        (
            "moved",
            [(4, 2, ("train.micro_batch=2",)), (2, 3, ("data.workers=2",)), (1, 4, ()), (2, 5, ("train.micro_batch=4",))],
        ),
        ("split", [(2, 5, ("parallel.context_parallel_degree=2",))]),
    ):
        run, given = make(name, *more)
        for count, steps, changes in parts:
            ranks.run(count, train, run.file, [*given, f"train.steps={steps}", *changes])
        found[name] = read_metrics(run.output / "metrics.jsonl")
    assert len(found["moved"]) == 5
    for records in found.values():
        for record, wanted in zip(records, found["one"], strict=True):
            assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert record["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert records[-1]["validation_loss"] == pytest.approx(found["one"][-1]["validation_loss"], rel=1e-5)
    assert all(a["loss"] != b["loss"] for a, b in itertools.pairwise(found["one"]))


@pytest.mark.long
def test_a_run_that_is_cut_on_two_ranks_continues_to_the_last_bit(chat_run):
    make, _, _ = chat_run
    more = ("train.global_batch=8", "train.micro_batch=2", "data.validation_fraction=0", "fp8.enabled=true")
    found = []
    for name, parts in (("whole", (4,)), ("cut", (1, 3, 4))):
        run, given = make(name, *more)
        given = [each for each in given if each != "fp8.enabled=false"]
        for steps in parts:
            ranks.run(2, train, run.file, [*given, f"train.steps={steps}"])
        found.append([record["loss"] for record in read_metrics(run.output / "metrics.jsonl")])
    assert found[0] == found[1]


def test_generation_of_an_export_stops_where_turns_end_though_the_tokenizer_ends_documents_otherwise(tmp_path, chat_run):
    make, _, _ = chat_run
    gemma = save_tokenizer(tmp_path / "tokens", "gemma")
    run, given = make("ended", "train.steps=1", f"data.tokenizer={gemma}")
    train(run.file, given)
    assert main(["export", str(run.output), "--to", str(tmp_path / "tuned")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "tuned"))
    stops = GenerationConfig.from_pretrained(str(tmp_path / "tuned")).eos_token_id
    assert set(stops) >= set(tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"]))
    assert tokenizer.eos_token == "<eos>"
    assert tokenizer.chat_template == STYLES["gemma"][0]


def own_loop(section, size, steps):
    """Sequences with their targets of each step, and the targets that it divides by; loss and gradient of a model."""
    octavo.init({"hybrid_shard_degree": 1})
    model = octavo.transform(llama(vocab_size=size, max_position_embeddings=128), dtype=torch.float32)
    found = octavo.batches(model, section, global_batch=8, micro_batch=2)
    rows, losses = [], []
    for step in found.steps(1, steps):
        total = 0.0
        for arguments in step:
            loss = model(**arguments).loss
            loss.backward()
            total += loss.item()
        rows.append(
            [tuple(row) for arguments in step for row in torch.cat([arguments["input_ids"], arguments["labels"]], 1).tolist()]
        )
        losses.append((total, int(step[0]["num_items_in_batch"]), octavo.clip_grad_norm_(model, 0.0).item()))
        model.zero_grad()
    octavo.shutdown()
    return found.packing, rows, losses, len(list(found.validation(5)))


def test_a_loop_of_ones_own_has_the_batches_of_a_run_on_any_ranks(chat_run):
    make, _, tokenizer = chat_run
    run, given = make("loop", "train.global_batch=8", "train.micro_batch=2")
    config = RunConfig.from_file(run.file, given)
    section = config.data.model_dump(exclude_unset=True)
    data = prepare(config.data)
    context, _ = build(check(config), data)
    packing, rows, losses, _ = own_loop(section, 512, 2)
    assert packing == "documents"
    for step, (mine, (_, targets, _)) in enumerate(zip(rows, losses, strict=True)):
        batches = context.loader.step(step * 8)
        wanted = [tuple(row) for batch in batches for row in torch.cat([batch.input_ids, batch.labels], 1).tolist()]
        assert mine == wanted
        assert targets == sum(int((batch.labels[:, 1:] != -100).sum()) for batch in batches)
    spread = ranks.run(2, own_loop, section, 512, 2)
    for step in range(2):
        assert sorted(row for _, found, _, _ in spread for row in found[step]) == sorted(rows[step])
        assert {found[step][1] for _, _, found, _ in spread} == {losses[step][1]}
        assert sum(found[step][0] for _, _, found, _ in spread) == pytest.approx(losses[step][0], rel=1e-5)
        assert [found[step][2] for _, _, found, _ in spread] == [pytest.approx(losses[step][2], rel=1e-4)] * 2
    assert tokenizer.chat_template


def test_wrong_sections_and_steps_of_a_loop_are_refused(chat_run):
    make, _, _ = chat_run
    run, given = make("wrong")
    section = RunConfig.from_file(run.file, given).data.model_dump(exclude_unset=True)
    model = octavo.transform(llama(vocab_size=512, max_position_embeddings=128), dtype=torch.float32)
    for changes, words in (
        ({"packing": "join"}, 'data.packing = "join" is for text'),
        ({"pakcing": "join"}, "pakcing"),
        ({"overlong": "cut", "format": "text"}, "data.overlong"),
        ({"sequence_length": 129}, "sequence_length = 129 is longer than the model's 128 positions"),
    ):
        with pytest.raises(InputError, match=words):
            octavo.batches(model, section | changes, global_batch=8)
    with pytest.raises(InputError, match="the first step is 1"):
        octavo.batches(model, section, global_batch=8).step(0)
    small = octavo.transform(llama(max_position_embeddings=128), dtype=torch.float32)
    with pytest.raises(InputError, match="vocab_size = 97"):
        octavo.batches(small, section, global_batch=8)


def test_text_is_joined_and_conversations_are_apart_where_packing_is_absent(chat_run, tiny_run):
    make, _, _ = chat_run
    run, given = make("absent", "train.steps=1")
    train(run.file, given)
    assert RunConfig.from_file(run.output / "run.toml").data.packing == "documents"
    train(run.file, [*given, "train.steps=2"])  # continues with the same
    text = tiny_run("text", steps=1)
    train(text.file, [])
    assert RunConfig.from_file(text.output / "run.toml").data.packing == "join"
    with pytest.raises(InputError, match=r'data.overlong = "cut" has no effect: data.source holds text'):
        train(tiny_run("long", steps=1).file, ["data.overlong=cut"])
