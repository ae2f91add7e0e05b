"""Compressed files and CSV give the documents of the plain files, as a stream; a fault is named with its line."""

import csv
import gzip
import io
import json
import random
import tracemalloc
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from octavo.data import readers
from octavo.data.corpus import Corpus
from octavo.data.prepared import prepare
from octavo.errors import InputError

TEXTS = ["plain", "with, comma", 'a "quoted" word', "two\nlines", "two\r\nlines", "ü 漢字 😀", " spaces ", "'"]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True)}


def _csv(rows):
    out = io.StringIO(newline="")
    csv.writer(out).writerows(rows)
    return out.getvalue().encode()


def _content(kind, texts):
    if kind == ".txt":
        return "\ufeff".encode() + "\n".join(texts).encode()
    if kind == ".csv":
        return "\ufeff".encode() + _csv([["id", "text"], *([str(i), text] for i, text in enumerate(texts))])
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _read(config, path, **changes):
    return [document.text for document in Corpus(config(path, **changes))]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".json", ".csv"])
def test_a_file_gives_its_documents_compressed_or_not(tmp_path, config, kind, compression):
    path = tmp_path / f"c{kind}{compression}"
    path.write_bytes(COMPRESS[compression](_content(kind, TEXTS)))
    assert _read(config, path) == (["\n".join(TEXTS)] if kind == ".txt" else TEXTS)
    assert Corpus(config(path)).holds_text()
    assert _read(config, tmp_path / f"*{kind}{compression}") == _read(config, path)
    assert _read(config, tmp_path) == _read(config, path)  # a folder


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_archives_joined_end_to_end_are_one_file(tmp_path, config, compression):
    path = tmp_path / f"c.jsonl{compression}"
    path.write_bytes(b"".join(COMPRESS[compression](_content(".jsonl", [text])) for text in TEXTS))
    assert _read(config, path) == TEXTS


def _lines(count):
    draw = random.Random(0)
    return b"".join(b'{"text": "%d %d"}\n' % (i, draw.getrandbits(64)) for i in range(count))


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("fault", ["cut", "last byte", "other", "empty", "junk"])
def test_a_damaged_archive_is_named_with_the_line_before_anything_is_written(tmp_path, config, compression, fault):
    whole = COMPRESS[compression](_lines(20_000))
    content = {
        "cut": whole[: len(whole) // 2],
        "last byte": whole[:-1],
        "other": b"plain text\n" * 20,
        "empty": b"",
        "junk": whole + b"junk that is no archive",
    }[fault]
    path = tmp_path / f"c.jsonl{compression}"
    path.write_bytes(content)
    with pytest.raises(
        InputError, match=rf"c\.jsonl\{compression}, after line (\d+): the \{compression} file is damaged"
    ) as caught:
        prepare(config(path))
    line = int(str(caught.value).split("after line ")[1].split(":")[0])
    assert (line > 1000) == (fault in ("cut", "last byte", "junk"))
    assert "Replace it." in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_wrong_byte_in_a_gzip_file_is_found_by_its_checksum(tmp_path, config):
    whole = bytearray(gzip.compress(_lines(2000), compresslevel=0))
    whole[5000] ^= 1
    (tmp_path / "c.txt.gz").write_bytes(whole)
    with pytest.raises(InputError, match=r"c\.txt\.gz, after line 2000: .*CRC"):
        prepare(config(tmp_path / "c.txt.gz"))


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_faulty_line_of_an_archive_has_its_number(tmp_path, config, compression):
    path = tmp_path / f"c.jsonl{compression}"
    path.write_bytes(COMPRESS[compression](b'{"text": "a"}\n{"text": "\xff"}\n'))
    with pytest.raises(InputError, match=r"line 2: byte 11 of the line, 0xff, is not UTF-8"):
        prepare(config(path))
    path.write_bytes(COMPRESS[compression](b'{"text": "a"}\n\n{"txt": "b"}\n'))
    with pytest.raises(InputError, match=r"line 3: there is no 'text', only 'txt'. Did you mean 'txt'"):
        prepare(config(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".txt"])
def test_a_compressed_file_under_the_name_of_a_plain_one_is_recognised(tmp_path, config, kind, suffix):
    (tmp_path / f"c{kind}").write_bytes(COMPRESS[suffix](_content(kind, TEXTS)))
    with pytest.raises(
        InputError, match=rf"line 1: .* is not UTF-8\. It begins as a \{suffix} file: add \{suffix} to its name"
    ):
        prepare(config(tmp_path / f"c{kind}"))


def test_zstandard_without_a_codec_names_the_installation(tmp_path, config, monkeypatch):
    path = tmp_path / "c.jsonl.zst"
    path.write_bytes(COMPRESS[".zst"](_content(".jsonl", TEXTS)))
    monkeypatch.setattr(pa, "Codec", SimpleNamespace(is_available=lambda codec: codec != "zstd"))
    with pytest.raises(InputError, match=r"c\.jsonl\.zst' needs Zstandard.*pip install --force-reinstall pyarrow.*zstd -d"):
        prepare(config(path))


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_a_file_is_a_stream(tmp_path, config, kind, compression):
    """Documents of 11 MB together are never in memory at once, compressed or not."""
    path = tmp_path / f"c{kind}{compression}"
    content = _content(kind, ["some words " * 5] * 100)
    content += (content.split(b"\n", 1)[1] if kind == ".csv" else content) * 2000
    path.write_bytes(COMPRESS[compression](content))
    corpus = Corpus(config(path))
    next(iter(corpus))  # imports
    tracemalloc.start()
    for number, _ in enumerate(corpus):
        if number == 4000:
            break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(content) > 11e6
    assert peak < 2e6


BAD = {
    "column": ("id,body\n1,a\n", r"line 1: there is no 'text', only 'id', 'body'"),
    "semicolons": ("id;text\n1;a\n", r"line 1: the delimiter seems to be ';', with the columns 'id', 'text'\. Save .* commas"),
    "quoted names": ('"id";"text"\n1;a\n', r"line 1: the delimiter seems to be ';', with the columns 'id', 'text'\. Save"),
    "token ids": (
        'input_ids\n"[1, 2]"\n',
        r"no 'text', and 'input_ids' of CSV would be text\. Write token ids as JSON lines or",
    ),
    "tabs": ("id\tbody, all\t\n1\ta\t\n", r"delimiter seems to be '\\t', .*'id', 'body, all', ''.*, and set data\.text_field"),
    "bar in a name": ("a|b,body\n1,a\n", r"line 1: there is no 'text', only 'a|b', 'body'\. Change data\.text_field"),
    "ids": ("input_ids\n1 2 3\n", r"line 1: there is no 'text'"),
    "twice": ("text,text\na,b\n", r"line 1: 2 columns are named 'text'"),
    "short": ("id,text\n1,a\n2\n", r"line 3: the row has 1 values for 2 columns"),
    "long": ('id,text\n1,"a\nb"\n2,a, b\n', r"line 4: the row has 3 values for 2 columns. Quote values"),
    "open quote": ('id,text\n1,"a"\n2,"b\n3,c\n', r"line 3 is not CSV: unexpected end of data"),
    "quote": ('id,text\n1,"a"b\n', r"line 2 is not CSV: ',' expected after '\"'"),
    "returns": ("id,text\r1,a\r", r"line 1 has a carriage return \(CR\) without a line feed\. Save the file with LF or CRLF"),
    "nothing": ("", r"holds no text"),
    "names alone": ("id,text\n", r"holds no text"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_faulty_csv_file_is_named_with_its_line(tmp_path, config, case):
    content, message = BAD[case]
    (tmp_path / "c.csv").write_text(content, newline="")
    with pytest.raises(InputError, match=message):
        prepare(config(tmp_path / "c.csv"))
    assert len(list(tmp_path.iterdir())) == 1


def test_csv_columns_of_any_name_long_values_and_blank_lines(tmp_path, config):
    long = "word " * 100_000  # longer than Python's own limit of a value
    (tmp_path / "c.csv").write_bytes(b"\n" + _csv([["body", "id"], [long, "1"]]) + b"\r\n" + _csv([["", "2"], ["b", ""]]))
    assert _read(config, tmp_path / "c.csv", text_field="body") == [long, "", "b"]


def _parquet(table, **how):
    out = io.BytesIO()
    pq.write_table(table, out, **how)
    return out.getvalue()


def _spoiled(content):
    """A Parquet file whose second group of rows is damaged."""
    at = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(1).column(0).data_page_offset
    return content[:at] + b"\xff" * 8 + content[at + 8 :]


FINE = b'{"text": "fine"}\n'
NOT_UTF8 = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
ODD = {
    "digits": (".jsonl", FINE + b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 2 has a number that .*4300"),
    "digits of an id": (".jsonl", b'{"input_ids": [' + b"9" * 5000 + b"]}", "line 1 has a number that Python does not read"),
    "large id": (".jsonl", b'{"input_ids": [1, ' + b"9" * 30 + b"]}", "line 1: 'input_ids' must be a list of whole numbers"),
    "deep": (".jsonl", FINE + b'{"n": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "line 2 has lists or objects nested"),
    "deep ids": (".jsonl", b'{"input_ids": ' + b"[" * 500 + b"]" * 500 + b"}", "line 1: 'input_ids' must be a list of whole"),
    "twice inside": (
        ".jsonl",
        FINE + b'{"text": "a", "loss_mask": [{"b": 1, "b": 2}]}',
        "line 2: the key 'b' occurs twice",
    ),
    "twice": (".jsonl", FINE + b'{"text": "a", "text": "b"}', "line 2: the key 'text' occurs twice"),
    "NaN": (".jsonl", FINE + b'{"text": NaN}', "line 2: 'text' is a number, not a string"),
    "NaN id": (".jsonl", b'{"input_ids": [1, NaN]}', "line 1: 'input_ids' must be a list of whole numbers"),
    "infinite id": (".jsonl", b'{"input_ids": [1, 1e999]}', "line 1: 'input_ids' must be a list of whole numbers"),
    "truth as an id": (".jsonl", b'{"input_ids": [1, true, 3]}', "line 1: 'input_ids' must be a list of whole numbers"),
    "no ids": (".jsonl", b'{"input_ids": [[], []]}', "line 1: 'input_ids' must be a list of whole numbers"),
    "zeros": (".jsonl", FINE + b"\0" * 100, "line 2 is not JSON: Expecting value at column 1"),
    "UTF-16": (".jsonl", FINE.decode().encode("utf-16"), "line 1: byte 1 .* The file begins as UTF-16: save it as UTF-8"),
    "UTF-16 text": (".txt", "text".encode("utf-16"), "line 1: byte 1 .* The file begins as UTF-16"),
    "half a pair as a key": (".jsonl", b'{"te\\ud800": "a"}', r"line 1: there is no 'text', only 'te\\ud800'"),
    "not UTF-8": (".parquet", _parquet(pa.table({"text": NOT_UTF8})), "row 2: the text is not UTF-8, at byte 1"),
    "bytes": (".parquet", _parquet(pa.table({"text": pa.array([b"a"], pa.binary())})), "row 1: 'text' is a bytes, not"),
    "null": (".parquet", _parquet(pa.table({"text": ["a", None]})), "row 2: 'text' is null, not a string"),
    "structure": (".parquet", _parquet(pa.table({"text": [{"x": 1}]})), "row 1: 'text' is an object, not a string"),
    "null id": (".parquet", _parquet(pa.table({"input_ids": [[1, None]]})), "row 1: 'input_ids' must be a list of whole"),
    "id of 64 bits": (
        ".parquet",
        _parquet(pa.table({"input_ids": pa.array([[2**64 - 1]], pa.list_(pa.uint64()))})),
        "row 1: 18446744073709551615 in 'input_ids' is outside 0",
    ),
    "two columns": (
        ".parquet",
        _parquet(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])),
        "2 columns are named 'text'. Rename",
    ),
    "no bytes": (".parquet", b"", "is not a readable Parquet file: ArrowInvalid"),
    "cut": (".parquet", _parquet(pa.table({"text": ["a"] * 99}))[:-50], "is not a readable Parquet file: ArrowInvalid"),
    "damage inside": (
        ".parquet",
        _spoiled(
            _parquet(
                pa.table({"text": [f"fine {n}" for n in range(4096)]}),
                row_group_size=2048,
                use_dictionary=False,
            )
        ),
        "is not a readable Parquet file behind row 2048",
    ),
}  # fmt: skip


UNUSED = [
    b'{"text": "a", "meta": {"b": 1, "b": 2}}\n{"meta": 1, "text": "c", "meta": [2]}\n{"text": "d"}\n',
    b'{"other": [{"x": {"text": 1, "text": 2}}], "text": "a"}\n{"text": "c"}\n{"n": 1, "text": "d", "n": 1}',
]


@pytest.mark.parametrize("content", UNUSED)
def test_a_key_that_stands_twice_in_a_column_that_is_not_read_is_no_fault(tmp_path, config, content):
    (tmp_path / "c.jsonl").write_bytes(content)
    assert _read(config, tmp_path / "c.jsonl") == ["a", "c", "d"]
    (tmp_path / "ids.jsonl").write_bytes(b'{"input_ids": [5, 6, 7], "meta": {"b": 1, "b": 2}}\n')
    (document,) = Corpus(config(tmp_path / "ids.jsonl"))
    assert document.input_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("where", ["file", "folder", "pattern"])
@pytest.mark.parametrize("case", ODD)
def test_damaged_or_odd_data_is_named_with_its_row(tmp_path, config, case, where):
    kind, content, message = ODD[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"c{kind}").write_bytes(content)
    with pytest.raises(InputError, match=rf"c\{kind}'?[,:]? {message}"):
        prepare(config({"file": folder / f"c{kind}", "folder": folder, "pattern": folder / "*"}[where]))
    assert not (tmp_path / "prepared").exists()


def test_odd_text_is_text(tmp_path, config):
    rows = [{"text": "a\0b"}, {"text": "\ufeffmark"}, {"text": "\x7f\u2028", "n": float("nan"), "m": {"a": 1}}]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(b"\xef\xbb\xbf" + json.dumps(row).encode() for row in rows))  # joined files
    assert _read(config, tmp_path / "a.jsonl") == [row["text"] for row in rows]
    (tmp_path / "b.csv").write_bytes(b'\xef\xbb\xbftext\n"a\n\xef\xbb\xbfb"\n\xef\xbb\xbfc\n\0\n')
    assert _read(config, tmp_path / "b.csv") == ["a\n\ufeffb", "\ufeffc", "\0"]
    pq.write_table(pa.table({"a.b": ["dotted"], "text": pa.array(["x"]).dictionary_encode()}), tmp_path / "c.parquet")
    assert _read(config, tmp_path / "c.parquet") == ["x"]
    assert _read(config, tmp_path / "c.parquet", text_field="a.b") == ["dotted"]
    (tmp_path / "D.JSONL.GZ").write_bytes(gzip.compress(FINE))
    assert _read(config, tmp_path / "D.JSONL.GZ") == ["fine"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("planted"), r"behind line 1: cannot be read: ZeroDivisionError: planted\. Correct or replace it"),
        (MemoryError(), r"behind line 1: the next document does not fit in memory\. Split it"),
    ],
)
def test_a_fault_that_no_reader_expects_has_its_file_and_line(tmp_path, config, monkeypatch, error, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(FINE * 3)

    def broken(path, text_field):
        yield next(readers.read_json_lines(path, text_field))
        raise error

    monkeypatch.setitem(readers._BY_KIND, ".jsonl", broken)
    for source in (path, tmp_path):
        with pytest.raises(InputError, match=rf"a\.jsonl, {words}"):
            prepare(config(source))
