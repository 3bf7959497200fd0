"""Files as people have them: a table of kinds, each with its content and what the training recipe says of it."""

import codecs
import gzip
import importlib
import io
import json
import zipfile

import pytest

WORDS = "words and words and words"
HALF = '{"text": "cut off emoji \\ud83d"}'


def lines(*odd: str, count: int = 30) -> str:
    """JSONL of which the fourth row on are ``odd``."""
    rows = [json.dumps({"text": WORDS})] * count
    rows[3 : 3 + len(odd)] = odd
    return "\n".join(rows) + "\n"


def parquet(column: str, values: list[object]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    buffer = io.BytesIO()
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table({column: values}), buffer)
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a.txt", WORDS)
    return buffer.getvalue()


TEXT = (WORDS + "\n") * 40
UTF_16 = "text in UTF-16 or UTF-32; convert it to UTF-8"
REFUSED: dict[str, tuple[str, object, str]] = {
    # kind: file, its content, the message
    "half a surrogate": (
        "a.jsonl",
        lines(HALF),
        "data: row 4 (line 4) of 'a.jsonl': 'text' has half a surrogate pair, \\ud83d, at character 14",
    ),
    "half a surrogate in an array": (
        "a.json",
        f'[{{"text": "a"}}, {HALF}]',
        "data: row 2 of 'a.json': 'text' has half a surrogate",
    ),
    "5,000 digits": (
        "a.jsonl",
        lines('{"text": ' + "9" * 5000 + "}"),
        "data: row 4 (line 4) of 'a.jsonl': Exceeds the limit (4300 digits)",
    ),
    "5,000 digits in an array": (
        "a.json",
        '[{"text": ' + "9" * 5000 + "}]",
        "data: row 1 of 'a.json': Exceeds the limit (4300 digits)",
    ),
    "100,000 brackets": (
        "a.jsonl",
        lines('{"text": ' + "[" * 100_000),
        "data: row 4 (line 4) of 'a.jsonl': brackets are nested too deeply",
    ),
    "brackets in an array": (
        "a.json",
        '[{"text": ' + "[" * 100_000,
        "data: row 1 of 'a.json': brackets are nested too deeply",
    ),
    "no JSON": (
        "a.jsonl",
        lines('{"text": '),
        "data: row 4 (line 4) of 'a.jsonl': no JSON: Expecting value at column 10",
    ),
    "no JSON after blank lines": (
        "a.jsonl",
        "\n\n" + lines("{'text': 1}"),
        "data: row 4 (line 6) of 'a.jsonl': no JSON",
    ),
    "a zero byte in JSON": (
        "a.jsonl",
        '{"text": "' + WORDS * 400 + '\0"}',
        "data: row 1 (line 1) of 'a.jsonl': no JSON: Invalid control character",
    ),
    "an array that ends early": (
        "a.json",
        '[{"text": "a"},\n {"text": "b"}',
        "data: row 2 of 'a.json': no JSON: Expecting ',' or ']' at line 2, column 15",
    ),
    "no object": (
        "a.jsonl",
        lines("[1, 2]"),
        "data: row 4 (line 4) of 'a.jsonl': no object; allowed: a JSON object in every row",
    ),
    "no object in an array": ("a.json", '[{"text": "a"}, 1]', "data: row 2 of 'a.json': no object"),
    "null": (
        "a.jsonl",
        lines('{"text": null}'),
        "text_field: 'text' given, which is null or missing in row 4 (line 4) of 'a.jsonl'",
    ),
    "a list for a text": (
        "a.jsonl",
        lines('{"text": ["a"]}'),
        "text_field: 'text' given, which is no text in row 4 (line 4) of 'a.jsonl'",
    ),
    "another field": (
        "a.jsonl",
        lines('{"body": "a"}'),
        "text_field: 'text' given, which row 4 (line 4) of 'a.jsonl' has not; allowed: 'body'",
    ),
    "mixed encodings": (
        "a.jsonl",
        lines().encode() + b'{"text": "caf\xe9"}',
        "data: row 31 (line 31) of 'a.jsonl': byte 0xe9 is no UTF-8 text",
    ),
    "Latin-1 in CSV": (
        "a.csv",
        b"text\nwords\ncaf\xe9\n",
        "data: row 2 (line 3) of 'a.csv': byte 0xe9 is no UTF-8 text",
    ),
    "an unclosed quote": (
        "a.csv",
        "text,id\n" + "words,1\n" * 4 + '"words,2\n' + "words,3\n" * 20,
        "data: row 5 (line 6) of 'a.csv': a quote (\") is opened and not closed",
    ),
    "a quote closed rows later": (
        "a.csv",
        'text,id\nwords,1\n"words,2\n"words",3\n',
        "data: row 2 (line 3) of 'a.csv': ',' expected after '\"'",
    ),
    "more fields than names": (
        "a.csv",
        "text,id\nwords,1\none, two,2\n",
        "data: row 2 (line 3) of 'a.csv': 3 fields, where the first line has 2 names",
    ),
    "fewer fields": (
        "a.csv",
        "id,text\n1,words\n2\n",
        "text_field: 'text' given, which is null or missing in row 2 (line 3) of 'a.csv'",
    ),
    "a name twice": ("a.csv", "text,text\na,b\n", "data: the first line of 'a.csv': a name is there twice"),
    "semicolons": (
        "a.csv",
        "id;text\n1;words\n",
        "text_field: 'text' given, which row 1 (line 2) of 'a.csv' has not; allowed: 'id;text'",
    ),
    "nine rows": (
        "a.jsonl",
        lines(count=9),
        "data: 'a.jsonl' given, which holds no text for validation (every tenth row",
    ),
    "nine rows of CSV": (
        "a.csv",
        "text\n" + "words\n" * 9,
        "data: 'a.csv' given, which holds no text for validation",
    ),
    "nine bytes": ("a.txt", "nine byte", "data: 'a.txt' given, which holds no text for validation"),
    "empty text": ("a.txt", "", "data: 'a.txt' given, which holds no text"),
    "empty table": ("a.csv", "", "data: 'a.csv' given, which holds no text"),
    "names alone": ("a.csv", "text,id\n", "data: 'a.csv' given, which holds no text"),
    "blank lines": ("a.jsonl", "\n \r\n", "data: 'a.jsonl' given, which holds no text"),
    "UTF-16": ("a.txt", TEXT.encode("utf-16"), f"data: 'a.txt' given, {UTF_16}"),
    "UTF-16 of Chinese": (
        "a.txt",
        codecs.BOM_UTF16_LE + "\u6587\u5b57".encode("utf-16-le") * 99,
        f"data: 'a.txt' given, {UTF_16}",
    ),
    "UTF-16 without a mark": ("a.txt", TEXT.encode("utf-16-be"), f"data: 'a.txt' given, {UTF_16}"),
    "UTF-32": ("a.txt", TEXT.encode("utf-32"), f"data: 'a.txt' given, {UTF_16}"),
    "UTF-16 in CSV": ("a.csv", "text\nwords\n".encode("utf-16"), f"data: 'a.csv' given, {UTF_16}"),
    "UTF-16 in JSONL": ("a.jsonl", lines().encode("utf-16-le"), f"data: 'a.jsonl' given, {UTF_16}"),
    "gzip": (
        "a.txt.gz",
        gzip.compress(TEXT.encode()),
        "data: 'a.txt.gz' given, compressed by gzip; allowed: text",
    ),
    "gzip called JSONL": (
        "a.jsonl",
        gzip.compress(lines().encode()),
        "data: 'a.jsonl' given, compressed by gzip",
    ),
    "zip": ("a.docx", zipped(), "data: 'a.docx' given, a zip archive"),
    "PDF": ("a.pdf", "%PDF-1.7\n" + TEXT, "data: 'a.pdf' given, a PDF"),
    "binary": ("a.bin", bytes(range(256)) * 40, "data: 'a.bin' given, a binary file"),
    "zeros in text": ("a.txt", TEXT + "\0", "data: 'a.txt' given, a binary file"),
    "Parquet without the field": (
        "a.parquet",
        lambda: parquet("body", [WORDS] * 30),
        "text_field: 'text' given, which 'a.parquet' has not; allowed: 'body'",
    ),
    "Parquet with null": (
        "a.parquet",
        lambda: parquet("text", [WORDS] * 7 + [None] * 20),
        "text_field: 'text' given, which is null or missing in row 8 of 'a.parquet'",
    ),
    "Parquet of bytes": (
        "a.parquet",
        lambda: parquet("text", [b"words"] * 30),
        "text_field: 'text' given, which is no text in row 1 of 'a.parquet'",
    ),
    "Parquet cut off": (
        "a.parquet",
        lambda: parquet("text", [WORDS] * 30)[:-9],
        "data: 'a.parquet' is no Parquet file, after row 0: Parquet",
    ),
    "Parquet under another name": (
        "a.data",
        lambda: parquet("text", [WORDS] * 30),
        "data: 'a.data' given, a Parquet file without the ending .parquet",
    ),
    "absent": ("", "", "data: 'absent' given, which is neither a file nor a folder"),
}
TAKEN: dict[str, tuple[str, object]] = {
    "a byte order mark": ("a.jsonl", "\ufeff" + lines()),
    "a byte order mark in CSV": ("a.csv", "\ufefftext,id\n" + "words,1\n" * 40),
    "CRLF": ("a.jsonl", lines().replace("\n", "\r\n")),
    "CRLF in CSV": ("a.csv", "text,id\r\n" + '"two\r\nlines",1\r\n' * 40),
    "a line of 3 MB": ("a.jsonl", lines(json.dumps({"text": "x" * 3_000_000}))),
    "a field of 3 MB": ("a.csv", "text\n" + "words\n" * 80 + "x" * 3_000_000),
    "a whole emoji": ("a.jsonl", lines('{"text": "\\ud83d\\ude00"}')),
    "a JSON array": ("a.json", json.dumps([{"text": WORDS}] * 30)),
    "Parquet": ("a.PARQUET", lambda: parquet("text", [WORDS] * 30)),
}
