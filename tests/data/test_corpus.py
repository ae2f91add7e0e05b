"""Every kind of source gives its documents, and every bad one a message that mends it."""

import ast
import csv
import gzip
import itertools
import json
import os
import re

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from octavo.data.corpus import Corpus
from octavo.data.prepared import prepare
from octavo.data.readers import Document
from octavo.errors import InputError


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _texts(config):
    return [document.text for document in Corpus(config)]


def test_text_files_are_one_document_each_in_sorted_order(tmp_path, config):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name, text in (("b.txt", "zwei\r\nü\n"), ("a.txt", "\ufeffeins"), ("deep/er/c.txt", "drei")):
        (tmp_path / name).write_bytes(text.encode())
    assert _texts(config(tmp_path / "*.txt")) == ["eins", "zwei\r\nü\n"]
    assert _texts(config(tmp_path / "**" / "*.txt")) == ["eins", "zwei\r\nü\n", "drei"]
    assert _texts(config([str(tmp_path / "b.txt"), str(tmp_path / "deep/er/c.txt")])) == ["zwei\r\nü\n", "drei"]


def test_json_lines_and_parquet_hold_the_named_column(tmp_path, config):
    rows = [{"body": text, "other": 1} for text in map(str, range(2500))]
    write_lines(tmp_path / "x.jsonl", rows)
    pq.write_table(pa.table({"other": [1] * 2500, "body": [row["body"] for row in rows]}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        assert _texts(config(tmp_path / name, text_field="body")) == [row["body"] for row in rows]


def test_tokenised_lines_as_written_by_a_data_set(tmp_path, config):
    rows = [[1, 2, 3], [70000, 5]]
    path = write_lines(
        tmp_path / "training.json", [{"input_ids": r, "attention_mask": [1] * len(r), "labels": r} for r in rows]
    )
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "training.parquet")
    for source in (path, tmp_path / "training.parquet"):
        found = list(Corpus(config(source)))
        assert [(d.text, d.input_ids.tolist(), d.input_ids.dtype) for d in found] == [(None, row, np.uint32) for row in rows]


def test_docstrings_are_those_that_ast_finds(config):
    from octavo.data.python_source import docstrings

    corpus = Corpus(config("python:docstrings"))
    assert corpus.files == sorted(corpus.files)
    assert not any({"test", "site-packages"} & set(path.parts) for path in corpus.files)
    path = next(path for path in corpus.files if path.name == "textwrap.py")
    # All files take seconds; those of the corpus come in their order.
    assert list(itertools.islice(corpus, 200)) == list(itertools.islice(docstrings(corpus.files), 200))
    found = {document.text for document in docstrings([path])}
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    assert found == {text for node in nodes if (text := ast.get_docstring(node))}
    assert len(found) > 10


def test_docstrings_skip_files_that_do_not_parse(tmp_path):
    from octavo.data.python_source import docstrings

    (tmp_path / "bad.py").write_text("print 'old'\n")
    (tmp_path / "null.py").write_bytes(b'"""doc"""\0')
    (tmp_path / "good.py").write_text('"""Doc."""\ndef f():\n    "\\w"\n')
    assert list(docstrings(sorted(tmp_path.iterdir()))) == [
        Document("Doc.", None, f"{tmp_path / 'good.py'}, line 1"),
        Document("\\w", None, f"{tmp_path / 'good.py'}, line 3"),
    ]


def test_packages_are_source_files_with_undecodable_ones_skipped(tmp_path, config):
    from octavo.data.python_source import packages

    corpus = Corpus(config("python:packages"))
    assert {"textwrap.py", "pytest"} <= {path.name for path in corpus.files} | {path.parent.name for path in corpus.files}
    assert len(set(corpus.files)) == len(corpus.files)
    (tmp_path / "a.py").write_bytes(b"# \xff")
    (tmp_path / "b.py").write_text("x = 1\n")
    assert [d.text for d in packages(sorted(tmp_path.iterdir()))] == ["x = 1\n"]


def _notices(config):
    corpus = Corpus(config)
    list(corpus)
    return corpus.notices


def test_every_file_of_a_folder_is_read_whatever_its_name(tmp_path, config, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", None)
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.jsonl", "deep/d.jsonl", "train letters.jsonl", "z.jsonl")):
        write_lines(folder / name, [{"text": f"document {number}"}])
    whole = [f"document {number}" for number in range(4)]
    assert _texts(config(folder)) == _texts(config(folder / "**" / "*.jsonl")) == whole
    assert _notices(config(folder)) == []
    (folder / "README.md").write_text("# Letters\n")
    (folder / ".hidden.jsonl").write_text("no text")
    (folder / "poem.txt").write_bytes(b"one\r\n\r\n two\n")
    assert sorted(_texts(config(folder))) == [*whole, "one\r\n\r\n two\n"]
    (notice,) = _notices(config(folder))
    assert "data.source = " in notice
    assert notice.endswith("5 files are read; 1 file left out: README.md.")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.md").write_text("a")
    with pytest.raises(InputError, match=r"holds no file of a known kind, only \.md\. Known: \.txt"):
        Corpus(config(tmp_path / "other"))


@pytest.mark.parametrize("kind", [".txt", ".csv", ".jsonl", ".parquet"])
def test_a_text_has_the_same_tokens_as_a_file_in_a_folder_and_by_a_pattern(tmp_path, config, kind):
    texts = ["null", "NA", "007", "2020-01-01", "nan", "1e5", "True", "", "N/A", "  x ", "3.10", "\ufeffx", "a\r\nb\n"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\ntext, no data set card\n")
    path = folder / f"train{kind}"
    if kind == ".txt":
        path.write_bytes("\r\n".join(texts).encode())
        texts = ["\r\n".join(texts)]
    elif kind == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["text"], *([text] for text in texts)])
    elif kind == ".jsonl":
        write_lines(path, [{"text": text} for text in texts])
    else:
        pq.write_table(pa.table({"text": texts}), path)
    found = [_texts(config(source)) for source in (path, folder, folder / f"*{kind}", folder / "**" / f"*{kind}")]
    assert found == [texts] * 4
    tokens = [prepare(config(source, validation_fraction=0.0)).tokens("train").tolist() for source in (path, folder)]
    assert tokens[0] == tokens[1]


def test_prepared_data_within_a_folder_is_no_text_of_it(tmp_path, config):
    write_lines(tmp_path / "a.jsonl", [{"text": f"some words {n}"} for n in range(9)])
    first = prepare(config(tmp_path))
    assert (tmp_path / "prepared") in first.folder.parents
    assert prepare(config(tmp_path), on_change="error") == first
    with pytest.raises(InputError, match=r"is also data\.folder, which prepared data is written to\. Set data\.folder"):
        prepare(config(tmp_path, folder=str(tmp_path)))


def test_a_split_of_a_folder_is_read_where_it_is_asked_for_and_what_is_left_out_is_named(tmp_path, config):
    folder = tmp_path / "f"
    for name in ("train.jsonl", "validation-00000-of-00001.jsonl", "more.jsonl", "test/part.jsonl", "en-2020.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(folder / name, [{"text": name}])
    assert len(_texts(config(folder))) == 5
    (notice,) = _notices(config(folder))
    assert "all 5 files are read, but some are named like splits (train, validation, test). Set data.split" in notice
    assert _texts(config(folder, split="train")) == ["train.jsonl"]
    (notice,) = _notices(config(folder, split="train"))
    assert "1 file of the split 'train' is read; 4 files left out: en-2020.jsonl, more.jsonl, test/part.jsonl, val" in notice
    for split, name in (("validation", "validation-00000-of-00001.jsonl"), ("test", "test/part.jsonl"), ("en-2020",) * 2):
        assert [text.removesuffix(".jsonl") for text in _texts(config(folder, split=split))] == [name.removesuffix(".jsonl")]
    with pytest.raises(
        InputError, match=r"has the name of the split 'nosplit'; there is 'train', 'validation', 'test'\. Change data"
    ):
        Corpus(config(folder, split="nosplit"))
    (folder / "train").mkdir()
    write_lines(folder / "train" / "test_of_time.jsonl", [{"text": "a test"}])
    assert "a test" not in _texts(config(folder, split="train"))
    assert "a test" in _texts(config(folder, split="test"))


def test_keys_of_data_sets_that_a_pattern_or_a_folder_would_ignore_are_refused(tmp_path, config):
    folder = tmp_path / "f"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"text": "a"}])
    for source, changes in (
        (folder / "*", {"split": "train"}),
        (folder / "*", {"subset": "small"}),
        (folder, {"subset": "small"}),
    ):
        ((key, value),) = changes.items()
        with pytest.raises(InputError, match=rf"data\.{key} = '{value}' has no effect: no source is a data set.*Remove data"):
            Corpus(config(source, **changes))
    (tmp_path / "g").mkdir()
    write_lines(tmp_path / "g" / "test.jsonl", [{"text": "b"}])
    with pytest.raises(InputError, match=r"data\.validation_split = 'test' has no effect"):
        Corpus(config(folder, validation_source=str(tmp_path / "g" / "*"), validation_split="test"))


def test_links_of_a_folder_are_followed_and_dead_ones_refused(tmp_path, config):
    folder, elsewhere = tmp_path / "f", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_lines(elsewhere / "a.jsonl", [{"text": "behind a link"}])
    (folder / "linked").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    assert _texts(config(folder)) == ["behind a link"]
    (folder / "b.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    for source in (folder, folder / "*.jsonl"):
        with pytest.raises(InputError, match=r"b\.jsonl' is a broken symbolic link\. Remove it"):
            Corpus(config(source))
    (folder / "b.jsonl").unlink()
    os.mkfifo(folder / "pipe.jsonl")
    for source in (folder, folder / "*.jsonl"):
        with pytest.raises(InputError, match=r"pipe\.jsonl' is not a regular file"):
            Corpus(config(source))
    (folder / "pipe.jsonl").unlink()
    (elsewhere / "again.jsonl").symlink_to(elsewhere / "a.jsonl")
    with pytest.raises(InputError, match=r"data\.source has .*a\.jsonl' twice"):
        Corpus(config(folder))
    (elsewhere / "again.jsonl").unlink()
    (elsewhere / os.fsdecode(b"\xff.txt")).write_text("a")
    with pytest.raises(InputError, match=r"the name .*udcff\.txt' is not UTF-8\. Rename the file"):
        Corpus(config(elsewhere))


def test_a_folder_with_a_card_is_a_data_set_whose_files_are_read_as_any_others(tmp_path, config, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    card = "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n{}---\n# A set\n"
    (folder / "t.csv").write_text("text\nnull\nNA\n007\n2020-01-01\n")
    write_lines(folder / "stray.jsonl", [{"text": "of no split"}])
    (folder / "README.md").write_text(card.format("  - split: train\n    path: t.csv\n  - split: test\n    path: u.csv\n"))
    (folder / "u.csv").write_text("text\nheld out\n")
    assert _texts(config(folder)) == ["null", "NA", "007", "2020-01-01"]
    (notice,) = _notices(config(folder))
    assert "by its card the split 'train' is 1 file; 2 files left out: stray.jsonl, u.csv." in notice
    assert _texts(config(folder, split="test")) == ["held out"]
    with pytest.raises(InputError, match=r"set' has no split 'nosplit', only train, test\. Change data\.split"):
        _texts(config(folder, split="nosplit"))
    semicolons = "  sep: ';'\n"  # the card says how its files are read
    (folder / "README.md").write_text(
        card.format("  - split: train\n    path: s.csv\n  - split: test\n    path: u.csv\n" + semicolons)
    )
    (folder / "s.csv").write_text("id;text\n1;007\n2;2020-01-01\n")
    (folder / "u.csv").write_text("id;text\n1;held out\n")
    assert _texts(config(folder)) == ["007", "2020-01-01"]
    assert _notices(config(folder))[0].endswith("is 1 file; 3 files left out: stray.jsonl, t.csv, u.csv.")
    (folder / "s.csv").write_text("id;text\n1;a\n2;NA\n")
    assert _texts(config(folder)) == ["a", "NA"]
    settings = "  sep: ';'\n  na_values: ['x']\n"  # for which `datasets` reads them
    (folder / "README.md").write_text(card.format("  - split: train\n    path: s.csv\n" + settings))
    with pytest.raises(InputError, match=r"set, row 2: 'text' is null, not a string"):
        _texts(config(folder))


CARDS = {
    "array": ("a.json", '[\n{"text": "2020-01-01 10:00:00"},\n{"text": "NA", "n": 1%s}]\n' % ("0" * 40), ""),
    "array behind a mark": ("a.json", '\ufeff \n[{"text": "2020-01-01 10:00:00"},{"text": "NA"}]', ""),
    "tabs": ("a.tsv", "id\ttext\n007\t2020-01-01 10:00:00\n1\tNA\n", ""),
    "bars": ("a.csv", "text|id\n2020-01-01 10:00:00|007\nNA|1\n", "  delimiter: '|'\n"),
}


@pytest.mark.parametrize("case", CARDS)
def test_arrays_and_delimiters_of_a_card_are_read_to_the_letter(tmp_path, config, case):
    """`datasets` takes such dates for dates, NA for nothing, and half of a surrogate pair for another character."""
    file, content, settings = CARDS[case]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {file}\n{settings}---\n")
    (tmp_path / "set" / file).write_text(content, encoding="utf-8")
    assert _texts(config(tmp_path / "set")) == ["2020-01-01 10:00:00", "NA"]


BAD_CARDS = {
    "half of a pair": ("a.json", r'[{"text": "a \ud83d b"}]', "", r"a\.json, row 1: character 2 is half of a surrogate pair"),
    "key twice": ("a.json", '[{"text": "a"},\n{"text": "b", "text": "c"}]', "", r"row 2: the key 'text' occurs twice"),
    "two arrays": ("a.json", '[{"text": "a"}]\n[{"text": "b"}]', "", r"a\.json is not JSON: Extra data at column 1 of line 2"),
    "no objects": ("a.json", '["a", "b"]', "", r"a\.json, row 1 is a string, not an object"),
    "cut": ("a.json", '[{"text": "a"},\n{"text":', "", r"a\.json is not JSON: Expecting value .* of line 2"),
    "long row": ("a.csv", "id;text\n1;a;x\n2;b;x\n", "  sep: ';'\n", r"a\.csv, line 2: the row has 3 values for 2"),
    "names twice": ("a.csv", "text;text\na;b\n", "  sep: ';'\n", r"a\.csv, line 1: 2 columns are named 'text'"),
    "open quote": ("a.tsv", 'id\ttext\n1\t"a\n2\t"b\n', "", r"a\.tsv, line 2 is not CSV"),
    "long rows of datasets": (
        "a.csv",
        "id,text\n1,a,x\n2,b,x\n",
        "  na_values: [q]\n",
        r"Length of header or names does not match",
    ),
    "names twice of datasets": (
        "a.csv",
        "text,text\na,b\n",
        "  na_values: [q]\n",
        r"two columns are named 'text', or one 'text\.1'",
    ),
}


@pytest.mark.parametrize("case", BAD_CARDS)
def test_faults_of_files_that_a_card_names_are_named(tmp_path, config, case):
    file, content, settings, message = BAD_CARDS[case]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {file}\n{settings}---\n")
    (tmp_path / "set" / file).write_text(content)
    with pytest.raises(InputError, match=message):
        prepare(config(tmp_path / "set"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "a.txt.zst"])
def test_a_pointer_of_git_lfs_is_no_text(tmp_path, config, name):
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(InputError, match=rf"{re.escape(name)} is a Git LFS pointer.*Run git lfs pull"):
        prepare(config(tmp_path / name))
    page = POINTER + "is the text of a pointer. " * 99
    (tmp_path / "b.txt").write_text(page)
    assert _texts(config(tmp_path / "b.txt")) == [page]


def test_another_number_of_rows_than_a_card_says_is_said(tmp_path, config):
    infos = "dataset_info:\n  features:\n  - name: text\n    dtype: string\n"
    splits = "  splits:\n  - name: train\n    num_examples: {}\n    num_bytes: 9\n"
    card = f"---\n{infos}{splits}configs:\n- config_name: default\n  data_files: {{}}\n{{}}---\n"
    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"text": "x"}] * 3)
    for rows, said in ((3, 0), (99, 1)):
        (folder / "README.md").write_text(card.format(rows, "a.jsonl", ""))
        notices = _notices(config(folder))
        assert len(notices) == said
    assert "its card (dataset_info) gives the split 'train' 99 rows, but its files have 3." in notices[0]
    (folder / "a.csv").write_text("text\nx\n")
    (folder / "README.md").write_text(card.format(99, "a.csv", "  na_values: [q]\n"))
    with pytest.raises(InputError, match="the number of rows or bytes in its files differs from the card's"):
        _texts(config(folder))
    other = "  na_values: [q]\n"
    (folder / "a.csv").write_text("text,kind\nx,1\n")
    (folder / "README.md").write_text(card.replace(splits, "").format("a.csv", other))
    with pytest.raises(InputError, match=r"its columns differ from those of the card, .* 1 new columns \(\{'kind'\}\)"):
        _texts(config(folder))
    (folder / "b.csv").write_text("text\nx\n")
    (folder / "README.md").write_text(card.replace(infos + splits, "").format("'*.csv'", other))
    with pytest.raises(InputError, match=r"Schema at index 1 was different: .*kind"):
        _texts(config(folder))


def test_files_of_one_name_in_two_forms_are_said(tmp_path, config):
    folder = tmp_path / "set"
    (folder / "b").mkdir(parents=True)
    for name in ("a.jsonl", "b/a.jsonl", "a.1.jsonl", "c.txt"):
        write_lines(folder / name, [{"text": "x"}])
    assert _notices(config(folder)) == []
    (folder / "a.JSONL.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))
    (folder / "c.csv").write_text("text\ny\n")
    (notice,) = _notices(config(folder))
    assert "trained twice: a.JSONL.gz and a.jsonl, c.csv and c.txt. Give the files to read" in notice


def test_a_data_set_saved_to_disk(tmp_path, config):
    of_split = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in (("train", ["x", "y"]), ("dev", ["z"]))}
    datasets.DatasetDict(of_split).save_to_disk(str(tmp_path / "saved"))
    assert _texts(config(tmp_path / "saved")) == ["x", "y"]
    assert _notices(config(tmp_path / "saved"))[0].endswith("the split 'train' is read; left out: dev (1 row).")
    with pytest.raises(InputError, match=r"no split 'test', only train, dev\. Change data\.split"):
        _texts(config(tmp_path / "saved", split="test"))
    of_split["dev"].save_to_disk(str(tmp_path / "single"))
    assert _texts(config(tmp_path / "single")) == ["z"]
    with pytest.raises(InputError, match=r"saved without splits.* no split 'test'\. Remove data\.split"):
        _texts(config(tmp_path / "single", split="test"))
    with pytest.raises(InputError, match=r"no 'body', only 'text'"):
        _texts(config(tmp_path / "saved", text_field="body"))


def test_a_name_of_the_hub_goes_to_datasets_and_its_failure_is_explained(config, monkeypatch):
    asked = []

    def load(name, subset, **options):
        asked.append((name, subset, options))
        if name == "imdb":
            return datasets.Dataset.from_dict({"text": ["good film"], "label": [1]})
        if name == "no/net":
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub (offline)\nmore")
        raise FileNotFoundError(f"Dataset '{name}' doesn't exist\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert _texts(config("imdb")) == ["good film"]
    assert asked == [("imdb", None, {"split": "train"})]
    with pytest.raises(InputError) as caught:
        _texts(config("no/such"))
    for part in ("'no/such'", "doesn't exist", "data.split", "python:docstrings"):
        assert part in str(caught.value)
    with pytest.raises(InputError) as caught:
        list(Corpus(config("imdb", validation_source="no/net")).validation[0].documents())
    for part in (
        "data.validation_source = 'no/net'",
        "cannot be reached",
        "hf download --repo-type dataset no/net",
        "local file",
    ):
        assert part in str(caught.value)


def test_damaged_files_of_a_data_set_are_named(tmp_path, config):
    for name, file in (("a", "data-00000-of-00001.arrow"), ("b", "state.json"), ("c", "dataset_info.json")):
        datasets.Dataset.from_dict({"text": ["some words"] * 99}).save_to_disk(str(tmp_path / name))
        (tmp_path / name / file).write_bytes((tmp_path / name / file).read_bytes()[:200].replace(b"}", b""))
        with pytest.raises(InputError, match=rf"{name}': the data set cannot be loaded, '{file}' is damaged: .*Save it again"):
            prepare(config(tmp_path / name))
    for name, content, message in (
        ("README.md", b"---\nconfigs: [\n---\n", r"ParserError: .* in README\.md, line 2\. Check data\.subset"),
        ("README.md", b"---\nconfigs:\n- \xff\n---\n", r"README\.md, line 3: byte 3 of the line, 0xff, is not UTF-8"),
        ("dataset_infos.json", b"{", r"dataset_infos\.json is not JSON: .*line 1 column 2"),
        ("README.md", b"---\nconfigs:\n- config_name: a\n  data_files: no.jsonl\n---\n", r"Unable to find .*no\.jsonl"),
    ):
        folder = tmp_path / "card"
        folder.mkdir(exist_ok=True)
        write_lines(folder / "a.jsonl", [{"text": "a"}])
        (folder / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            prepare(config(folder))
        (folder / name).unlink()


def test_a_changed_file_of_a_data_set_is_read_again(tmp_path, config, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ';'\n---\n")
    for texts in (["first"], ["second"], ["a", "b"], ["other"]):
        (folder / "a.csv").write_text("id;text\n" + "".join(f"1;{text}\n" for text in texts))
        assert _texts(config(folder)) == texts
    other = tmp_path / "elsewhere" / "set"  # a folder of the same name
    other.mkdir(parents=True)
    (other / "README.md").write_text((folder / "README.md").read_text())
    (other / "a.csv").write_text("text;kind\nx;1\ny;2\nz;3\n")
    assert _texts(config(other)) == ["x", "y", "z"]
    assert not [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]


def test_a_data_set_of_several_configurations(tmp_path, config):
    folder = tmp_path / "several"
    folder.mkdir()
    for name in ("small", "large"):
        write_lines(folder / f"{name}.jsonl", [{"text": f"the {name} one"}])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("small", "large"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert _texts(config(folder, subset="large")) == ["the large one"]
    with pytest.raises(InputError, match=r"Check data\.subset"):
        _texts(config(folder, subset="huge"))


def _bad_json(path):
    path.write_text('{"text": "fine"}\n\n{"text": "torn\n')


def _bad_utf8(path):
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')


def _bad_text(path):
    path.write_bytes(b"one\ntwo \xe9t\xe9\n")


def _row(*rows):
    return lambda path: write_lines(path, rows)


BAD = {
    "torn": ("c.jsonl", _bad_json, ["c.jsonl, line 3 is not JSON", "column 15"]),
    "utf8": ("c.jsonl", _bad_utf8, ["c.jsonl, line 2: byte 11 of the line, 0xff, is not UTF-8"]),
    "latin1": ("c.txt", _bad_text, ["c.txt, line 2: byte 5 of the line, 0xe9, is not UTF-8"]),
    "array": ("c.json", _row([1]), ["line 1 is a list, not an object", "JSON lines"]),
    "field": ("c.jsonl", _row({"text": ""}, {"txt": "", "id": 1}),
        ["line 2: there is no 'text', only 'txt', 'id'. Did you mean 'txt'? Change data"]),
    "type": ("c.jsonl", _row({"text": 5}), ["line 1: 'text' is a number, not a string"]),
    "null": ("c.jsonl", _row({"text": None}), ["line 1: 'text' is null, not a string"]),
    "surrogate": ("c.jsonl", _row({"text": "ab\ud800"}), ["line 1: character 2 is half of a surrogate pair, 0xd800"]),
    "ids": ("c.jsonl", _row({"input_ids": [1, 2.5]}), ["line 1: 'input_ids' must be a list of whole numbers"]),
    "ragged": ("c.jsonl", _row({"input_ids": [[1], [2, 3]]}), ["line 1: 'input_ids' must be a list of whole numbers"]),
    "negative": ("c.jsonl", _row({"input_ids": [1, -2]}), ["line 1: token id -2", "outside 0"]),
    "mixed": ("c.jsonl", _row({"text": "a"}, {"input_ids": [1]}), ["mixes text (", "line 1) with token ids (", "line 2)"]),
    "empty": ("c.jsonl", _row(), ["holds no text", "data.source"]),
    "blank": ("c.jsonl", _row({"text": ""}), ["holds no text"]),
    "parquet": ("c.parquet", _bad_text, ["c.parquet' is not a readable Parquet file"]),
    "kind": ("c.tsv", _bad_text, ["c.tsv', a .tsv file", ".txt, .jsonl, .json, .csv, .parquet", ".gz or .zst"]),
    "kind gz": ("c.parquet.gz", _bad_text, ["c.parquet.gz', a .parquet.gz file", "all but .parquet also as .gz"]),
    "kind tar": ("c.tar.gz", _bad_text, ["c.tar.gz', a .tar.gz file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_its_line_and_nothing_is_written(tmp_path, config, case):
    name, write, parts = BAD[case]
    write(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as caught:
        prepare(config(tmp_path / name))
    for part in parts:
        assert part in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path, config):
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c\.parquet: there is no 'text', only 'body', 'id'\. Change data\.text_field"):
        prepare(config(tmp_path / "c.parquet"))


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("corpsu.jsonl", ["there is no such file", "Did you mean '{0}/corpus.jsonl'?", "data.source"]),
        ("dta/corpus.jsonl", ["There is no folder '{0}/dta'", "Did you mean '{0}/data'?"]),
        ("*.txt", ["matches no file", "holds .jsonl files", "Did you mean '{0}/**/*.jsonl'?"]),
        ("dta/*.txt", ["matches no file", "Did you mean '{0}/data'?"]),
        ("data", ["is an empty folder"]),
        ("python:docstring", ["unknown data source 'python:docstring'. Did you mean 'python:docstrings'?"]),
        ([], ["give at least one source"]),
    ],
)
def test_a_name_that_leads_nowhere_is_answered_with_the_nearest(tmp_path, lines, config, source, parts):
    (tmp_path / "data").mkdir()
    before = sorted(tmp_path.rglob("*"))
    if isinstance(source, str) and not source.startswith("python:"):
        source = tmp_path / source
    with pytest.raises(InputError) as caught:
        prepare(config(source))
    for part in parts:
        assert part.format(tmp_path) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["file/x", "loop", "loop/x"])
def test_a_name_through_a_file_or_a_loop_of_links_is_refused_before_the_hub_is_asked(tmp_path, config, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(datasets, "load_dataset", None)
    fault = "is a file" if name == "file/x" else "is a broken symbolic link"
    with pytest.raises(
        InputError, match=rf"data\.source = '{name}': there is no such file \('\w+' {fault}\)\. Change data\.source"
    ):
        Corpus(config(name))


def test_too_long_paths_are_named_with_their_key(tmp_path, lines, config):
    for long in ("x" * 300, f"{tmp_path}/{'x' * 300}", "./" + "x/" * 3000):
        for key, section in (
            ("data.source", config(long)),
            ("data.source", config([str(lines), long])),
            ("data.validation_source", config(lines, validation_source=long)),
            ("data.tokenizer", config(lines, tokenizer=long)),
            ("data.folder", config(lines, folder=long)),
            ("data.folder", config(lines.parent, folder=long)),
        ):
            with pytest.raises(InputError, match=rf"^{key} = '.*…' cannot be used: File name too long"):
                prepare(section)


def test_a_file_that_may_not_be_read(tmp_path, config, monkeypatch):
    path = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    corpus = Corpus(config(path))
    monkeypatch.setattr(type(path), "open", refuse)
    for read in (lambda: list(corpus), lambda: prepare(config(path))):
        with pytest.raises(InputError, match=r"data: cannot read .*c\.jsonl.*Permission denied"):
            read()


def test_values_are_read_as_json_writes_them(tmp_path, config):
    values = ["tab\t", "\u2028", "emoji 😀", '"quoted"\n']
    write_lines(tmp_path / "c.jsonl", [{"text": value} for value in values])
    assert _texts(config(tmp_path / "c.jsonl")) == values
    assert json.loads((tmp_path / "c.jsonl").read_text().splitlines()[2])["text"] == values[2]


def test_a_source_that_is_named_twice_is_refused(tmp_path, lines, config):
    link = tmp_path / "link.jsonl"
    link.symlink_to(lines)
    cases = (
        [str(lines), str(lines)],
        [str(tmp_path / "c*.jsonl"), str(lines)],
        [str(lines), str(link)],
        ["owner/texts", "owner/texts"],
        ["python:docstrings", "python:docstrings"],
    )
    for names in cases:
        with pytest.raises(InputError, match=r"data\.source has .* twice, by .*Give it once in data\.source"):
            Corpus(config(names))
    (tmp_path / "other").mkdir()
    same_name = tmp_path / "other" / lines.name
    same_name.write_text(lines.read_text())
    assert len(_texts(config([str(lines), str(same_name)]))) == 120
