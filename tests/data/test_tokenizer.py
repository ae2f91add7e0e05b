"""A trained tokenizer loses nothing and is one of Hugging Face's; others encode as transformers does."""

import json
import os
import shutil
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, TokenizersBackend
from transformers.models.auto import tokenization_auto

from octavo.data import pieces, tokenizer
from octavo.data.prepared import prepare
from octavo.errors import InputError

TEXTS = ["the cat sat on the mat, the cat\n", "def f(x):\n    return x + 1\n", "naïve 漢字 😀 the end"] * 20


@pytest.fixture(scope="module")
def trained():
    return tokenizer.train(TEXTS, 300)


def _ids(encoder, texts):
    found, current = [], []
    for ids, ends in encoder.stream(texts):
        assert ids.dtype == np.uint32
        current += ids.tolist()
        if ends:
            found.append(current)
            current = []
    assert not current
    return found


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save(folder)
    return folder


@settings(deadline=None, max_examples=100)
@given(texts=st.lists(st.text(), max_size=5))
def test_decode_gives_back_every_text(trained, saved, texts):
    decoder = Tokenizer.from_file(str(saved / "tokenizer.json"))
    for text, ids in zip(texts, _ids(trained, texts), strict=True):
        assert ids[-1] == trained.end
        assert trained.end not in ids[:-1]
        assert decoder.decode(ids[:-1], skip_special_tokens=False) == text


def test_vocabulary_is_learned_up_to_the_size_asked_for(trained):
    assert (trained.vocab_size, trained.end) == (300, 0)
    assert _ids(trained, ["the"]) == [[*_ids(trained, ["the"])[0][:1], 0]]  # a frequent word is one token
    assert tokenizer.train(["ab"], 10_000).vocab_size == 258  # 256 bytes, the end token and one merge


def test_a_text_cannot_end_its_own_document(trained):
    (ids,) = _ids(trained, ["a<|endoftext|>b"])
    assert ids.count(trained.end) == 1
    assert ids[-1] == trained.end


def test_long_texts_come_in_pieces_that_join_to_the_same_document(trained, saved, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 50)
    monkeypatch.setattr(tokenizer, "_BATCH_CHARACTERS", 120)
    long = "".join(TEXTS) + "x" * 130
    decoder = Tokenizer.from_file(str(saved / "tokenizer.json"))
    found = _ids(trained, [long, "", "short", long])
    assert [decoder.decode(ids[:-1]) for ids in found] == [long, "", "short", long]
    assert all(ids.count(0) == 1 for ids in found)


def test_training_is_the_same_in_another_process(trained, tmp_path):
    program = (
        "import sys; from pathlib import Path; from octavo.data import tokenizer\n"
        f"tokenizer.train({TEXTS!r}, 300).save(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "other")], check=True)
    trained.save(tmp_path / "this")
    assert (tmp_path / "this/tokenizer.json").read_bytes() == (tmp_path / "other/tokenizer.json").read_bytes()


def test_the_saved_folder_is_what_transformers_loads(trained, saved):
    theirs = AutoTokenizer.from_pretrained(saved)
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token) == (300, 0, "<|endoftext|>")
    encoder = tokenizer.load(str(saved))
    assert (encoder.vocab_size, encoder.end, encoder.prefix, encoder.suffix) == (300, 0, (), (0,))
    for text in TEXTS[:3]:
        assert [*theirs(text)["input_ids"], 0] == _ids(trained, [text])[0] == _ids(encoder, [text])[0]
        assert theirs.decode(theirs(text)["input_ids"]) == text


def _word_tokenizer(folder, *, begin=True, **config):
    """A tokenizer that puts a token in front, as Llama's does."""
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<unk>": 4}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    if begin:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(3)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def test_tokens_that_a_tokenizer_adds_are_kept_and_its_truncation_is_not(tmp_path):
    encoder = tokenizer.load(str(_word_tokenizer(tmp_path / "t")))
    assert _ids(encoder, ["a b a b a b", "b"]) == [[0, 2, 3, 2, 3, 2, 3, 1], [0, 3, 1]]


def test_where_the_configuration_adds_tokens_transformers_is_asked(tmp_path):
    folder = _word_tokenizer(tmp_path / "t", begin=False, add_bos_token=True, add_eos_token=True)
    theirs = AutoTokenizer.from_pretrained(folder)
    loaded = tokenizer.load(str(folder))
    assert _ids(loaded, ["a b", "b"]) == [[*theirs(text)["input_ids"], 1] for text in ("a b", "b")]
    loaded.save(tmp_path / "copy")
    assert _ids(tokenizer.load(str(tmp_path / "copy")), ["a b"]) == _ids(loaded, ["a b"])


@pytest.mark.parametrize(
    ("whole", "inner", "end", "expected"),
    [
        ([2, 3], [2, 3], 1, [((), (1,))]),
        ([0, 2, 3], [2, 3], 1, [((0,), (1,))]),
        ([0, 2, 3, 1], [2, 3], 1, [((0,), (1,))]),  # one end token, not two
        ([0, 2, 3, 9], [2, 3], 1, [((0,), (9, 1))]),
        ([0, 2, 3, 9], [2, 3], None, [((0,), (9,))]),
        ([7, 8], [2, 3], 1, []),  # adds more than tokens around
        ([4, 4, 5], [4], 5, [((), (4, 5)), ((4,), (5,))]),  # an unknown token in front of one
    ],
)
def test_what_stands_around_a_document(whole, inner, end, expected):
    assert list(tokenizer._prefixes_and_suffixes(whole, inner, end)) == expected


def test_a_tokenizer_without_an_end_token_adds_none(tmp_path):
    folder = _word_tokenizer(tmp_path / "t", begin=False, eos_token=None)
    loaded = tokenizer.load(str(folder))
    assert (loaded.end, _ids(loaded, ["a b"])) == (None, [[2, 3]])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("{0}/tokeniser", ["is not a folder", "Did you mean '{0}/tokenizer'?", "data.tokenizer"]),
        ("{0}/empty", ["holds no tokenizer.json"]),
        ("{0}/tokenizer/tokenizer.json", ["is not a folder", "Did you mean '{0}/tokenizer'?"]),
        ("{0}/broken", ["cannot be loaded"]),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_explained(tmp_path, name, parts):
    _word_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError) as caught:
        tokenizer.load(name.format(tmp_path))
    for part in parts:
        assert part.format(tmp_path) in str(caught.value)


def test_a_pointer_of_git_lfs_is_no_tokenizer(tmp_path):
    folder = Path(_saved(_byte_level(TEXTS), tmp_path / "t"))
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
    with pytest.raises(InputError, match=r"tokenizer\.json is a Git LFS pointer.*Run git lfs pull"):
        tokenizer.load(str(folder))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "runs/tokenizer.json", "there/none", "./x", "../x", "~/x/y", "a b", "x/y/z"]
)
def test_a_name_that_can_only_be_a_path_is_refused_before_the_hub_is_asked(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    with pytest.raises(InputError, match=r"is not a folder.*Give a tokenizer's folder") as caught:
        tokenizer.load(name)
    assert ("there is a folder 'there'" in str(caught.value)) == (name == "there/none")


def test_a_hub_out_of_reach_is_said_with_both_remedies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ask(name, **options):
        try:
            raise ConnectionError("[Errno -2] Name or service not known")
        except ConnectionError as error:
            raise OSError("Can't load the tokenizer") from error

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", ask)
    with pytest.raises(InputError) as caught:
        tokenizer.load("owner/tok")
    for part in ("data.tokenizer = 'owner/tok'", "cannot be reached", "`hf download owner/tok`", "that folder", '"train"'):
        assert part in str(caught.value)


SPECIALS = ("<unk>", "<s>", "</s>", "<|endoftext|>", "[INST]", "<|im_start|>")


def _byte_level(texts):
    made = Tokenizer(models.BPE(ignore_merges=True))  # as Llama 3's: a word of the vocabulary is found without merges
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIALS], initial_alphabet=alphabet))
    return made


def _sentencepiece_bpe(texts):
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIALS]))
    made.pre_tokenizer = None  # as Llama 2's: no token has a space within, and nothing splits the text
    return made


def _unigram(texts):
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=200, special_tokens=[*SPECIALS], unk_token="<unk>"))
    return made


def _word_level(texts):
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=[*SPECIALS]))
    return made


def _saved(made, folder):
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return str(folder)


def _auto(folder):
    return AutoTokenizer.from_pretrained(str(folder))


def _proven(folder, texts, said=None):
    """The encoder of a run on these texts."""
    encoder = tokenizer.load(str(folder))
    copy = folder.parent / f"{folder.name}-copy"
    encoder.save(copy)
    return tokenizer.proven(encoder, copy, texts, [].append if said is None else said.append)


def _check_like_transformers(folder, texts):
    """Each document is AutoTokenizer's ids, then its end token unless they end in it; the saved tokenizer is the same one."""
    encoder = _proven(folder, texts)
    for theirs in (_auto(folder), _auto(folder.parent / f"{folder.name}-copy")):
        expected = [theirs(text)["input_ids"] for text in texts]
        end = theirs.eos_token_id
        assert _ids(encoder, texts) == [ids if end is None or ids[-1] == end else [*ids, end] for ids in expected]
        assert (encoder.end, encoder.vocab_size) == (end, max(theirs.get_vocab().values()) + 1)


def _dna(folder, post_processor=None, config=(), tokens=("<s>", "</s>"), unknown=False, files=None):
    """A tokenizer of four letters: no "a", and by default no unknown token."""
    words = [*tokens, "A", "C", "G", "T"] + ["<unk>"] * unknown
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, **({"unk_token": "<unk>"} if unknown else {})))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(list(tokens))
    if post_processor is not None:
        made.post_processor = post_processor
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **dict(config)}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    for name, content in (files or {}).items():
        (folder / name).write_text(json.dumps(content))
    return folder


_NAMED = [("<s>", 0), ("</s>", 1)]
AROUND = {
    "nothing": None,
    "before": processors.TemplateProcessing(single="<s> $A", special_tokens=_NAMED[:1]),
    "both": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=_NAMED),
    "several": processors.TemplateProcessing(single="<s> <s> $A </s> <s>", special_tokens=_NAMED),
    "bert": processors.BertProcessing(("</s>", 1), ("<s>", 0)),
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "bytes": processors.ByteLevel(),
    "sequence": processors.Sequence(
        [
            processors.TemplateProcessing(single="$A </s>", special_tokens=_NAMED[1:]),
            processors.ByteLevel(),
            processors.TemplateProcessing(single="<s> $A", special_tokens=_NAMED[:1]),
        ]
    ),
}


@pytest.mark.parametrize("kind", ["words", "words without unknown", "letters"])
@pytest.mark.parametrize("around", AROUND)
def test_what_stands_around_a_document_is_the_post_processors(tmp_path, around, kind):
    """A BPE without an unknown token makes nothing of a text that it does not know."""
    folder = _dna(tmp_path / "dna", AROUND[around], unknown=kind == "words")
    if kind == "letters":
        values = json.loads((folder / "tokenizer.json").read_text())
        model = json.loads(Tokenizer(models.BPE(values["model"]["vocab"], [])).to_str())["model"]
        (folder / "tokenizer.json").write_text(json.dumps(values | {"model": model}))
        assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a", add_special_tokens=False).ids == []
    _check_like_transformers(folder, ["ACGT", "A", "TTAG"])


@pytest.mark.parametrize(
    "named", [{"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": True, "add_eos_token": True}]
)
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_tokens_that_python_code_puts_around_a_document_are_kept(tmp_path, kind, named):
    made = _sentencepiece_bpe(TEXTS)
    folder = Path(_saved(made, tmp_path / "t"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named | {"tokenizer_class": kind}))
    _check_like_transformers(folder, TEXTS[:3])


def test_a_post_processor_that_repeats_the_text_is_refused(tmp_path):
    folder = _dna(tmp_path / "dna", processors.TemplateProcessing(single="$A <s> $A", special_tokens=_NAMED[:1]))
    with pytest.raises(InputError, match="2 copies of a text"):
        tokenizer.load(str(folder))


_STALE = {
    "id beyond the vocabulary": (
        lambda: processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 99999)]),
        r"token id 99999 as '<s>' around a text .*, which its vocabulary does not have \(0 … 5\)",
    ),
    "within a sequence": (
        lambda: processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 70000)]),
            ]
        ),
        r"token id 70000 as '</s>' around",
    ),
    "another word": (
        lambda: processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)]),
        r"token id 3 as '<s>' around a text .*, 'C' in its vocabulary, where '<s>' is 0",
    ),
    "another special token": (
        lambda: processors.RobertaProcessing(("</s>", 0), ("<s>", 1)),
        r"token id 1 as '<s>' around a text .*, '</s>' in its vocabulary, where '<s>' is 0",
    ),
    "a word for an unknown name": (
        lambda: processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 4)]),
        r"token id 4 as '\[CLS\]' around a text .*, 'G' in its vocabulary, where '\[CLS\]' is no token",
    ),
}


@pytest.mark.parametrize("case", _STALE)
def test_a_post_processor_of_another_vocabulary_is_refused(tmp_path, config, case):
    """Ids that `train_new_from_iterator` leaves there: 99999 was stored as 34463 in files of 16 bits."""
    make, message = _STALE[case]
    folder = _dna(tmp_path / "dna", make())
    (tmp_path / "a.jsonl").write_text('{"text": "ACGT"}\n' * 20)
    with pytest.raises(InputError, match=message + r".*Correct the post_processor"):
        prepare(config(tmp_path / "a.jsonl", tokenizer=str(folder)))
    assert not (tmp_path / "prepared").exists()


def test_a_renamed_special_token_may_keep_its_old_name_in_the_post_processor(tmp_path):
    folder = _dna(tmp_path / "dna", processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 0)]))
    assert tokenizer.load(str(folder)).prefix == (0,)


def test_a_tokenizer_that_draws_its_ids_is_refused(tmp_path):
    folder = Path(_saved(_byte_level(TEXTS), tmp_path / "t"))
    values = json.loads((folder / "tokenizer.json").read_text())
    for dropout in (0.1, 0.0):
        values["model"]["dropout"] = dropout
        (folder / "tokenizer.json").write_text(json.dumps(values))
        if dropout:
            with pytest.raises(
                InputError, match=r'different ids in each call \(its model has dropout = 0.1\).*"dropout": null'
            ):
                tokenizer.load(str(folder))
    assert tokenizer.load(str(folder)).vocab_size


OTHER = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TOKENS = ("<s>", "</s>", "<|im_end|>")


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {"special_tokens_map.json": {"eos_token": "<|im_end|>"}}),
        ({}, {"special_tokens_map.json": {"eos_token": OTHER, "pad_token": "<s>"}}),
        ({}, {"added_tokens.json": {"<tool>": 7, "<end>": 8}}),
        ({"eos_token": "<end>"}, {"added_tokens.json": {"<tool>": 7, "<end>": 8}}),
        ({"additional_special_tokens": ["<a>", "<b>"]}, {}),
        ({"extra_special_tokens": ["<a>", "<b>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<a>"}}, {}),
        ({"image_token": "<image>"}, {}),
        ({"pad_token": "<pad>"}, {}),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": OTHER | {"content": "<new>", "special": True}}}, {}),
        ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<a>", "<b>"], "eos_token": "<a>"}}),
        ({"eos_token": None}, {}),
    ],
)
def test_all_files_of_a_tokenizer_are_read_as_transformers_reads_them(tmp_path, config, files):
    folder = _dna(tmp_path / "dna", AROUND["before"], config, TOKENS, files=files)
    _check_like_transformers(folder, ["ACGT", "GATTACA"])
    assert tokenizer.local_vocab_size(str(folder)) == max(_auto(folder).get_vocab().values()) + 1


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "gemma"])
def test_a_class_that_the_models_config_decides_is_saved(tmp_path, kind):
    """transformers reads Qwen2's with its own splitting of words, whatever tokenizer.json says."""
    folder = Path(_saved(_byte_level([*TEXTS, string.printable]), tmp_path / "t"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    _check_like_transformers(folder, [*TEXTS[:3], "in 2026, 12345 words"])


def test_a_text_that_the_tokenizer_refuses_is_named(tmp_path):
    encoder = tokenizer.load(str(_dna(tmp_path / "dna")))
    with pytest.raises(InputError, match=r"dna' cannot encode the text 'ACNT': .*unknown token") as caught:
        _ids(encoder, ["ACGT", "ACNT", "TTT"])
    assert "unk_token" in str(caught.value)


class OwnTokenizer(TokenizersBackend):
    """Python code that changes ids: it reverses each text, and puts its tokens around by itself."""

    def _encode_plus(self, text, *others, **options):
        batch = isinstance(text, list)
        return super()._encode_plus([one[::-1] for one in text] if batch else text[::-1], *others, **options)


def test_python_code_that_changes_ids_is_found_and_called(tmp_path, monkeypatch):
    monkeypatch.setitem(tokenization_auto.REGISTERED_TOKENIZER_CLASSES, "OwnTokenizer", OwnTokenizer)
    folder = _dna(tmp_path / "dna", AROUND["both"], {"tokenizer_class": "OwnTokenizer", "unk_token": "<unk>"}, unknown=True)
    said = []
    encoder = _proven(folder, ["ACGT", "GATTACA"], said)
    assert _ids(encoder, ["ACGT", "GATTACA"]) == [_auto(folder)(text)["input_ids"] for text in ("ACGT", "GATTACA")]
    assert _ids(encoder, ["ACG"]) == [[0, 4, 3, 2, 1]]
    assert len(said) == 1
    assert "slower" in said[0]


class BeyondVocabulary(TokenizersBackend):
    """Python code that gives ids its vocabulary does not have."""

    def _encode_plus(self, text, *others, **options):
        found = super()._encode_plus(text, *others, **options)
        rows = found["input_ids"]
        found["input_ids"] = (
            [[one + 70000 for one in row] for row in rows] if isinstance(text, list) else [i + 70000 for i in rows]
        )
        return found


def test_ids_beyond_the_vocabulary_are_refused_before_they_are_stored(tmp_path, config, monkeypatch):
    monkeypatch.setitem(tokenization_auto.REGISTERED_TOKENIZER_CLASSES, "BeyondVocabulary", BeyondVocabulary)
    folder = _dna(tmp_path / "dna", None, {"tokenizer_class": "BeyondVocabulary", "unk_token": "<unk>"}, unknown=True)
    (tmp_path / "a.jsonl").write_text('{"text": "ACGT"}\n' * 20)
    with pytest.raises(InputError, match=r"produces token id 70005, but its vocabulary has ids 0 … 6\."):
        prepare(config(tmp_path / "a.jsonl", tokenizer=str(folder)))
    assert not list((tmp_path / "prepared").glob("*/manifest.json"))


def test_characters_that_no_token_stands_for_are_said(tmp_path):
    """A BPE without an unknown token leaves them out, in transformers too."""
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate("ACGT")} | {"AC": 4}, [("A", "C")]))
    made.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path / "t"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    for texts, lost in ((["ACGT", "ACGX", "N"], ["'N'", "'X'"]), (["ACGT"], [])):
        said = []
        encoder = _proven(folder, texts, said)
        assert _ids(encoder, texts) == [[*_auto(folder)(text)["input_ids"], encoder.end] for text in texts]
        assert len(said) == bool(lost)
        assert all(one in said[0] for one in lost)
        shutil.rmtree(tmp_path / "t-copy")
    assert not _said_of_bytes(tmp_path / "bytes")


def _said_of_bytes(folder):
    """What is said of a tokenizer that has all bytes, in texts with anything."""
    tokenizer.train(TEXTS, 300).save(folder)
    said = []
    _proven(folder, [*TEXTS, string.printable, "e\u0301 \u200b\x00 漢 😀"], said)
    return said


@pytest.mark.parametrize("make", [_byte_level, _unigram, _word_level])
def test_a_tokenizer_that_changes_its_tokens_with_each_call_is_called(tmp_path, make):
    """SeamlessM4T's puts tokens of languages around, which its post-processor gets in Python."""
    folder = Path(_saved(make([*TEXTS, string.printable]), tmp_path / "t"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "SeamlessM4TTokenizer"}))
    _check_like_transformers(folder, TEXTS[:3])


@pytest.mark.parametrize("kind", ["LayoutLMv2Tokenizer", "RagTokenizer"])
def test_a_tokenizer_of_other_things_than_texts_is_refused(tmp_path, kind):
    folder = Path(_saved(_word_level([*TEXTS, string.printable]), tmp_path / "t"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": kind}))
    with pytest.raises(InputError, match=r"data.tokenizer = .*[Uu]se another"):
        _proven(folder, TEXTS[:3])


def test_a_special_token_of_one_character_is_no_loss_of_that_character(tmp_path):
    made = _byte_level([*TEXTS, string.printable])
    made.add_special_tokens(["!"])  # a pad
    folder = Path(_saved(made, tmp_path / "t"))
    encoder = tokenizer.load(str(folder))
    assert _ids(encoder, ["the! end"]) == [[*_auto(folder)("the! end")["input_ids"], encoder.end]]


def test_an_end_token_that_texts_are_full_of_is_refused(tmp_path):
    folder = _dna(tmp_path / "dna", config={"eos_token": "T"})
    with pytest.raises(InputError, match=r"encodes 'T' in a text as the special token"):
        _proven(folder, ["ACG"])


@pytest.mark.long(lambda light: not light)
@pytest.mark.parametrize("light", [True, False])
def test_a_folder_with_python_code_is_refused_and_its_code_never_runs(tmp_path, light):
    """In a process whose stdin says yes: transformers would ask there whether to run the code."""
    folder, mark = _word_tokenizer(tmp_path / "t") if light else tmp_path / "t", tmp_path / "mark"
    folder.mkdir(exist_ok=True)
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if not light:
        (folder / "tokenizer.json").write_text("{}")
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizer\nclass Own(PreTrainedTokenizer): ...\n"
    )
    program = (
        "import sys; from octavo.data import tokenizer; from octavo.errors import InputError\n"
        "try:\n    tokenizer.load(sys.argv[1])\nexcept InputError as error:\n    print('refused:', error)\n"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, input="y\n" * 3, capture_output=True, text=True, check=True, env=environment)
    assert not mark.exists()
    assert done.stdout.startswith("refused: data.tokenizer = ")
    assert "custom Python code" in done.stdout


@pytest.mark.parametrize("make", [_byte_level, _sentencepiece_bpe, _unigram, _word_level])
def test_names_of_special_tokens_in_a_text_are_text(tmp_path, make):
    """As text they are what a tokenizer of the same model without special tokens makes of them."""
    generator = np.random.default_rng()
    words = ["alpha", "beta", "gamma", "< / > | [ ]", "end of text", "I N S T _ m start", "<", ">s", "/s"]
    made = make([" ".join(generator.choice(words, 40)) for _ in range(50)] + [" ".join(string.printable)])
    encoder = tokenizer.load(_saved(made, tmp_path / "t"))
    special = {made.token_to_id(token) for token in SPECIALS}
    unknown = made.token_to_id("<unk>") if make is _word_level else -1  # a word that is not in the vocabulary
    for token in SPECIALS:
        for text in (token, f"alpha {token} beta", f"alpha{token}{token}beta", f"\n{token}\n"):
            (ids,) = _ids(encoder, [text])
            assert ids[-1] == encoder.end
            assert not special.intersection(ids[:-1]) - {unknown}, text
    plain = " ".join(generator.choice(words, 20))
    assert _ids(encoder, [plain])[0][:-1] == made.encode(plain, add_special_tokens=False).ids


def test_names_of_special_tokens_are_text_for_a_tokenizer_in_python(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=3).save_pretrained(tmp_path)
    encoder = tokenizer.load(str(tmp_path))
    text = "a</s>b<pad><extra_id_0>"
    assert _ids(encoder, [text]) == [[*(byte + 3 for byte in text.encode()), encoder.end]]


def test_tokens_that_are_added_but_not_special_keep_their_ids(tmp_path):
    made = _byte_level(TEXTS)
    made.add_tokens(["<tool>"])
    made.add_special_tokens(["<late>"])
    made.add_tokens(["<later>"])
    encoder = tokenizer.load(_saved(made, tmp_path / "t"))
    expected = [made.token_to_id("<tool>"), made.token_to_id("<later>")]
    assert [i for i in _ids(encoder, ["a <tool> <late> <later>"])[0] if i in expected] == expected
    assert made.token_to_id("<late>") not in _ids(encoder, ["<late>"])[0]


def test_an_end_token_that_the_configuration_alone_names_is_no_text(tmp_path):
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<s>": 2, "<unk>": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = tokenizer.load(_saved(made, tmp_path / "t"))
    assert _ids(encoder, ["a </s> a <s>"]) == [[0, 3, 0, 3, 1]]


@pytest.mark.parametrize("make", [_byte_level, _sentencepiece_bpe, _unigram, _word_level])
def test_a_document_in_pieces_has_the_ids_of_the_whole(tmp_path, monkeypatch, make):
    generator = np.random.default_rng()
    words = ["alpha", "beta,", "gamma\n", "delta.\n\n", "  epsilon", "(zeta", "1234567", "x\ty", "\n    eta()"]
    made = make([" ".join(generator.choice(words, 40)) for _ in range(50)])
    text = " ".join(generator.choice(words, 3000))
    monkeypatch.setattr(pieces, "PIECE", 1500)
    encoder = tokenizer.load(_saved(made, tmp_path / "t"))
    assert len(list(encoder.stream([text]))) > 8
    assert _ids(encoder, [text])[0] == [*made.encode(text, add_special_tokens=False).ids, encoder.end]


def test_a_document_without_separators_in_pieces_has_the_ids_of_the_whole(trained, monkeypatch):
    generator = np.random.default_rng()
    text = "".join(generator.choice(["the", "cat", "漢字", "on", "x"], 20_000))
    (whole,) = _ids(trained, [text])
    monkeypatch.setattr(pieces, "PIECE", 5000)
    assert len(list(trained.stream([text]))) > 8
    assert _ids(trained, [text]) == [whole]


def test_words_without_end_are_cut_for_training_and_others_are_not():
    generator = np.random.default_rng()
    limit = pieces.LONGEST_WORD
    lengths = [*generator.integers(1, limit, 20), limit, limit + 1, 3 * limit, 5 * limit + 7]
    text = "".join(letter * n for letter, n in zip("a \n" * 8, lengths, strict=True)) + " "
    parts = list(pieces.bounded_words(text))
    assert "".join(parts) == text
    ordinary = " ".join("w" * n for n in lengths[:-3])
    assert list(pieces.bounded_words(ordinary)) == [ordinary]
    endless = "漢" * (3 * limit + 1)
    assert [len(part) for part in pieces.bounded_words(f"a {endless} b")] == [2 + limit, limit, limit, 3]
    assert [len(part) for part in pieces.bounded_words("x" + " " * 2 * limit)] == [1 + limit, limit]
