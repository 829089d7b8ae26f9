"""Text files that exhaust a reader: one error with file and line."""

from __future__ import annotations

import gzip
import lzma
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from visitlens.errors import InputError
from visitlens.hooks.text import documents
from visitlens.hooks.text.documents import read_documents
from visitlens.probe.tasks.task_file import read_task

GOOD = b'{"text": "one"}\n'
LINES = {
    "nested": b"[" * 200_000,
    "nested objects": b'{"text":' * 100_000,
    "huge integer": b'{"text": ' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_json_that_exhausts_a_reader_is_an_error_of_its_line(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(InputError, match=r"t\.jsonl:2: ") as raised:
        list(read_documents(file))
    assert len(str(raised.value)) < 1000
    skipped = Counter[str]()
    assert [d.text for d in read_documents(file, skipped=skipped)] == ["one", "one"] and skipped.total() == 1
    with pytest.raises(InputError, match=r"t\.jsonl, line 2"):
        task = tmp_path / "t.jsonl"
        task.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + line)
        read_task(task)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_a_line_has_a_bound_however_it_is_compressed(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100_000)
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}[suffix]
    file = tmp_path / f"t.jsonl{suffix}"
    file.write_bytes(pack(GOOD + b" " * 5_000_000))
    with pytest.raises(InputError, match=r"t\.jsonl[.a-z]*:2: a line of more than 100,000 bytes"):
        list(read_documents(file))
    file.write_bytes(pack(GOOD * 20_000))
    assert len(list(read_documents(file))) == 20_000
    file.write_bytes(pack(GOOD + GOOD[:-1]))
    assert len(list(read_documents(file))) == 2
