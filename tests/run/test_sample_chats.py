"""`octavo sample --chat`: a conversation as training writes it, answered up to the token that ends a turn."""

import json

import pytest
import torch
from llamas import llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_templates import CHATML, STYLES, save_tokenizer
from octavo.cli import main
from octavo.errors import InputError
from octavo.run.sample import Chat, _tokenizer_of, chats_of, sample, samples

ENDS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "qwen3": "<|im_end|>"}
ASKED = [
    {"role": "user", "content": "the quick fox"},
    {"role": "assistant", "content": "rain"},
    {"role": "user", "content": "?"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model's folder for each style."""
    found = {}
    for style in ENDS:
        folder = save_tokenizer(tmp_path_factory.mktemp("sample") / style, style)
        size = len(AutoTokenizer.from_pretrained(str(folder)))
        llama(vocab_size=size, max_position_embeddings=512).save_pretrained(folder)
        found[style] = folder
    return found


@pytest.mark.parametrize("style", ENDS)
def test_the_prompt_is_the_templates_and_the_stop_is_the_end_of_a_turn(style, folders):
    tokenizer = AutoTokenizer.from_pretrained(str(folders[style]))
    ids, stop = _tokenizer_of(folders[style]).chat(Chat(ASKED), {}, 10**6)
    assert ids == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert stop == [tokenizer.convert_tokens_to_ids(ENDS[style])]


def test_a_greedy_answer_is_that_of_hugging_faces_generation(folders, capsys):
    folder = folders["chatml"]
    tokenizer, model = AutoTokenizer.from_pretrained(str(folder)), AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    ids = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, eos_token_id=end, pad_token_id=0
    )[0, ids.shape[1] :]
    found = sample(folder, chat=Chat(ASKED), tokens=9, temperature=0)
    assert found["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
    assert found["messages"] == [*ASKED, {"role": "assistant", "content": found["text"]}]
    assert found["prompt_tokens"] == ids.shape[1]
    alone = ["sample", str(folder), "--chat", "--prompt", "hi", "--tokens", "4", "--temperature", "0", "--json"]
    assert main(alone) == 0
    by_command = json.loads(capsys.readouterr().out)
    assert by_command == sample(folder, chat=Chat([{"role": "user", "content": "hi"}]), tokens=4, temperature=0)


def test_an_answer_stops_at_the_end_of_a_turn(folders, tmp_path):
    folder = folders["gemma"]
    tokenizer, model = AutoTokenizer.from_pretrained(str(folder)), AutoModelForCausalLM.from_pretrained(str(folder))
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end != tokenizer.eos_token_id
    with torch.no_grad():  # the largest logit at any text: the head reads a constant
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 0.0
        model.lm_head.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for number in range(8):  # equal logits: draws are of all tokens, and some text ends
        found = sample(tmp_path / "model", chat=Chat(ASKED[:1]), tokens=400, temperature=1.0, top_p=1.0, seed=number)
        assert found["ended"] == (found["tokens"] < 400 or found["ended"])
        if found["tokens"] < 400:
            assert found["ended"]
            return
    pytest.fail("no answer ended")


def test_files_of_conversations_in_the_forms_of_training(folders, tmp_path, capsys):
    sharegpt = {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}, {"from": "human", "value": "on"}]
    }
    lines = tmp_path / "some.jsonl"
    lines.write_text("\n".join(map(json.dumps, [{"messages": ASKED}, sharegpt])))
    assert [len(chat.messages) for chat in chats_of(lines)] == [3, 3]
    alone = tmp_path / "one.json"
    alone.write_text(json.dumps(ASKED, indent=1))
    assert chats_of(alone)[0].messages == ASKED
    assert main(["sample", str(folders["llama-3"]), "--messages", str(lines), "--tokens", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["conversations"]
    assert found == samples(folders["llama-3"], chats_of(lines), tokens=3)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"messages": [*ASKED, {"role": "assistant", "content": "x"}]}, "ends with the assistant's turn"),
        ({"messages": []}, "messages"),
        ({"text": "hi"}, "has no 'messages'"),
        ({"messages": [{"role": "usr", "content": "hi"}]}, "has the role 'usr'"),
        ({"messages": [{"role": "user", "content": " "}]}, "has no text"),
        ([], "is empty|conversation"),
    ],
)
def test_wrong_conversations_are_refused(content, words, tmp_path):
    (tmp_path / "file.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=words):
        chats_of(tmp_path / "file.json")


def test_no_template_a_template_that_refuses_and_wrong_options(folders, tmp_path, capsys):
    bare = save_tokenizer(tmp_path / "bare", "chatml", template=False)
    llama(vocab_size=300).save_pretrained(bare)
    with pytest.raises(InputError, match=r"has no chat template.*data\.chat_template.*without --chat"):
        sample(bare, chat=Chat(ASKED))
    with pytest.raises(InputError, match=r"refuses the conversation: .*System role not supported"):
        sample(folders["gemma"], chat=Chat([{"role": "system", "content": "be"}, *ASKED]))
    unasked = CHATML.partition("{% if add_generation_prompt")[0]  # trains "assistant", and does not ask for it
    other = save_tokenizer(tmp_path / "unasked", "chatml", template=unasked)
    with pytest.raises(InputError, match=r"begins the assistant's turn with '<\|im_start\|>assistant'"):
        _tokenizer_of(other).chat(Chat(ASKED), {}, 10**6)
    for arguments, words in (
        (["--chat"], "--chat needs the text of a user"),
        (["--messages", "x.json", "--prompt", "y"], "leave out --prompt and --chat"),
        (["--messages", str(tmp_path / "none.json")], "Give a JSON"),
    ):
        assert main(["sample", str(bare), *arguments]) == 2
        assert words in capsys.readouterr().err
    assert STYLES.keys() >= ENDS.keys()
