"""Reading text, encoding it and packing it into contexts."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from visitlens.errors import InputError, UnavailableError
from visitlens.hooks.text.documents import Document, Packer, pack, read_documents
from visitlens.hooks.text.packed_tokens import PackedTokens

BOS, EOS, PAD = 0, 1, 2
LINES = [{"text": "one", "category": "code", "source": "a.py"}, {"text": "zwei äöü"}, {"text": ""}]


def write_lines(path: Path, lines: list) -> Path:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    compress: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }
    path.write_bytes(compress.get(path.suffix, bytes)(data))
    return path


# Reading


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"])
def test_json_lines_are_one_document_each(name: str, tmp_path: Path) -> None:
    assert list(read_documents(write_lines(tmp_path / name, LINES))) == [
        Document("one", "code", "a.py"),
        Document("zwei äöü"),
        Document(""),
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_a_text_file_is_one_document(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("# Title\n\nkör\n", encoding="utf-8")
    assert list(read_documents(tmp_path / name)) == [Document("# Title\n\nkör\n", source=name)]


def test_a_folder_is_its_text_files_in_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("third")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    write_lines(tmp_path / "a.jsonl.xz", [{"text": "zeroth"}])
    assert [d.text for d in read_documents(tmp_path)] == ["zeroth", "first", "third"]


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_a_parquet_row_is_a_document(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", [{"text": "one", "category": "code"}, {"text": "zwei äöü"}] * 1000)
    documents = list(read_documents(file))
    assert len(documents) == 2000
    assert documents[:2] == [Document("one", "code"), Document("zwei äöü")]
    other = write_parquet(tmp_path / "b.parquet", [{"content": "x"}])
    assert list(read_documents(other, field="content")) == [Document("x")]
    with pytest.raises(InputError, match=r"b\.parquet: expected a column 'text' among content"):
        list(read_documents(other))
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match=r"c\.parquet: not a readable Parquet file"):
        list(read_documents(tmp_path / "c.parquet"))


def test_a_hugging_face_dataset_is_streamed_or_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="the extra visitlens[data] is optional")
    texts = ["one", "two", "three"]
    (tmp_path / "hub").mkdir()
    write_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet", [{"text": t} for t in texts])
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", [{"text": "held out"}])
    assert [d.text for d in read_documents(f"hf:{tmp_path / 'hub'}")] == texts
    assert [d.text for d in read_documents(f"hf:{tmp_path / 'hub'}@test")] == ["held out"]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "disk")
    assert [d.text for d in read_documents(tmp_path / "disk")] == texts
    datasets.DatasetDict({"a": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(tmp_path / "dict")
    assert [d.text for d in read_documents(tmp_path / "dict")] == ["x"]
    with pytest.raises(InputError, match=r"hf:.*hub: not a dataset that can be loaded"):
        list(read_documents(f"hf:{tmp_path / 'hub'}@nowhere"))


def test_bad_lines_are_counted_by_reason_when_asked(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b"{",
        b'{"text": null}',
        b'{"text": "caf\xe9"}',
        b'{"content": "x"}',
        b'{"text": "too"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    write_parquet(tmp_path / "c.parquet", [{"text": "three"}, {"text": None}])
    skipped: Counter[str] = Counter()
    assert [d.text for d in read_documents(tmp_path, skipped=skipped)] == ["good", "too", "three"]
    assert skipped == {"no object with text": 2, "text is no string": 2, "not UTF-8": 2}


def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl.zst", LINES)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnavailableError, match=r"this text needs zstandard: pip install 'visitlens\[data\]'"):
        list(read_documents(file))


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "x"}\n   \n{"text": "y"}')
    assert [d.text for d in read_documents(tmp_path / "a.jsonl")] == ["x", "y"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a JSON object with a 'text' field"),
        ("[1]", "expected a JSON object with a 'text' field"),
        ("null", "expected a JSON object with a 'text' field"),
        ('"text"', "expected a JSON object with a 'text' field"),
        ('{"content": "x"}', "expected a JSON object with a 'text' field"),
        ('{"text": 3}', "'text' must be a string, got int"),
        ('{"text": null}', "'text' must be a string, got NoneType"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n\n{line}\n')
    with pytest.raises(InputError, match=rf"a\.jsonl:3: {message}"):
        list(read_documents(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_that_is_not_utf8_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(InputError, match=rf"{name}(:1)?: not UTF-8 text \(.* at byte 13\)"):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_a_damaged_archive_is_refused_by_name(name: str, damage: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / name, LINES * 50)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"garbage" * 20)
    with pytest.raises(InputError, match=name):
        list(read_documents(file))


def test_what_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.txt: no such file or folder; expected text"):
        list(read_documents(tmp_path / "gone.txt"))
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(InputError, match=r"a\.csv: expected \.txt, \.md, \.parquet or \.jsonl"):
        list(read_documents(tmp_path / "a.csv"))
    with pytest.raises(InputError, match=r"found no \.txt, \.md, \.jsonl or \.parquet file"):
        list(read_documents(tmp_path))


def test_an_empty_file_has_no_documents_and_nothing_can_be_packed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    assert list(read_documents(tmp_path / "a.jsonl")) == []
    with pytest.raises(InputError, match="the text is empty: no document has a token"):
        pack([], 8, BOS, PAD)


# Packing


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_document_that_does_not_fit_goes_on_in_the_next_context_with_bos() -> None:
    packed = pack([ids(0, 11, 12, 13, 14, 15, 1), ids(0, 21, 1), ids(0, 31, 32, 1)], 5, BOS, PAD)
    assert packed.tokens.tolist() == [[0, 11, 12, 13, 14], [0, 15, 1, 0, 21], [0, 1, 0, 31, 32], [0, 1, 2, 2, 2]]
    assert packed.segments.tolist() == [[0] * 5, [1, 1, 1, 2, 2], [3, 3, 4, 4, 4], [5, 5, -1, -1, -1]]
    assert packed.segment_document.tolist() == [0, 0, 1, 1, 2, 2]
    assert packed.num_tokens == 17 and packed.document_hash.shape == (3,)


def test_a_document_that_fills_a_context_leaves_no_rest() -> None:
    packed = pack([ids(0, 11, 1), ids(0, 21, 1)], 3, BOS, PAD)
    assert packed.tokens.tolist() == [[0, 11, 1], [0, 21, 1]]
    assert packed.segments.tolist() == [[0] * 3, [1] * 3]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=15), context=st.integers(2, 20), data=st.randoms())
def test_packing_loses_no_token_and_every_segment_starts_with_bos(lengths: list[int], context: int, data) -> None:
    documents = [ids(BOS, *(data.randrange(3, 90) for _ in range(n - 1))) for n in lengths]
    packed = pack(documents, context, BOS, PAD)
    rebuilt: dict[int, list[int]] = {}
    flat_ids, flat_segments = packed.tokens.ravel(), packed.segments.ravel()
    assert (np.diff(flat_segments[flat_segments >= 0]) >= 0).all()
    for segment, document in enumerate(packed.segment_document.tolist()):
        where = np.flatnonzero(flat_segments == segment)
        assert len(set(where // context)) == 1 and (np.diff(where) == 1).all()  # in one context, without a gap
        piece = flat_ids[where].tolist()
        assert piece[0] == BOS
        rebuilt[document] = rebuilt[document] + piece[1:] if document in rebuilt else piece
    assert [rebuilt[i] for i in range(len(documents))] == [d.tolist() for d in documents]
    padding = flat_segments == -1
    assert (flat_ids[padding] == PAD).all()
    assert not padding[:-context].any() and not padding[-context]  # only the last context has any
    assert packed.tokens.shape[1] == context and packed.tokens.dtype == packed.segments.dtype == np.int32


def test_packing_is_deterministic_and_its_hash_sees_every_token(make_documents: Callable) -> None:
    documents = make_documents(3)
    one, two = pack(documents, 16, BOS, PAD), pack(documents, 16, BOS, PAD)
    assert one.sha256 == two.sha256 and np.array_equal(one.tokens, two.tokens)
    changed = [d.copy() for d in documents]
    changed[4][-1] += 1
    assert pack(changed, 16, BOS, PAD).sha256 != one.sha256
    assert pack(documents[::-1], 16, BOS, PAD).sha256 != one.sha256
    assert pack(documents, 17, BOS, PAD).sha256 != one.sha256


def test_document_hashes_are_the_sha256_of_their_tokens() -> None:
    document = ids(0, 5, 6, 1)
    expected = int.from_bytes(hashlib.sha256(document.tobytes()).digest()[:8], "little")
    assert pack([document], 8, BOS, PAD).document_hash.tolist() == [expected]


def test_a_context_of_one_position_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2 positions, got 1"):
        pack([ids(0, 1)], 1, BOS, PAD)


def test_a_packer_hands_out_contexts_until_the_documents_run_out() -> None:
    packer, documents = Packer(4, BOS), iter([ids(0, 11, 12, 13, 14), ids(0, 1)])
    assert packer.fill(documents) == [(0, [0, 11, 12, 13])]
    assert packer.fill(documents) == [(0, [0, 14]), (1, [0, 1])]
    assert packer.fill(documents) == []


# Groups, and the first part of a text


def test_few_documents_are_groups_of_their_own_and_equal_ones_share(make_text: Callable[..., PackedTokens]) -> None:
    text = make_text(lengths=(5, 9, 30, 12))
    assert sorted(text.document_groups(128).tolist()) == [0, 1, 2, 3]
    assert sorted(text.document_groups(4).tolist()) == [0, 1, 2, 3]
    twice = pack([ids(0, 5, 1), ids(0, 6, 1), ids(0, 5, 1)], 8, BOS, PAD).document_groups(128)
    assert twice[0] == twice[2] != twice[1]


def test_many_documents_fall_into_groups_by_their_hash(make_text: Callable[..., PackedTokens]) -> None:
    text = make_text(lengths=(6,) * 400)
    groups = text.document_groups(16)
    assert set(groups.tolist()) == set(range(16))
    np.testing.assert_array_equal(groups, text.document_hash % np.uint64(16))
    assert np.bincount(groups).min() > 8  # 25 expected
    reversed_text = pack([ids(*t) for t in text.tokens.reshape(-1)[: 6 * 5].reshape(5, 6)][::-1], 32, BOS, PAD)
    assert reversed_text.document_groups(3).tolist() == [int(h % 3) for h in reversed_text.document_hash]


def test_the_first_contexts_hold_the_asked_tokens_and_whole_contexts(make_text: Callable[..., PackedTokens]) -> None:
    text = make_text(seed=6)
    for tokens in (1, 32, 33, text.num_tokens, 10**6):
        part = text.first_contexts(tokens)
        rows = min(-(-tokens // 32), len(text.tokens))
        np.testing.assert_array_equal(part.tokens, text.tokens[:rows])
        assert len(part.segment_document) == part.segments.max() + 1
        assert len(part.document_hash) == part.segment_document.max() + 1
        assert part.num_tokens >= min(tokens, text.num_tokens)
    with pytest.raises(InputError, match="at least 1 token, got 0"):
        text.first_contexts(0)


# What files bring along


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_byte_order_mark_is_dropped(tmp_path: Path, name: str) -> None:
    file, text = tmp_path / name, "\ufeffword"
    if name.endswith(".parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"text": [text]}), file)
    elif name.endswith(".jsonl"):
        file.write_text(
            "\ufeff" + json.dumps({"text": text}) + "\n" + json.dumps({"text": text}) + "\n", encoding="utf-8"
        )
    else:
        file.write_text(text, encoding="utf-8")
    assert {document.text for document in read_documents(file)} == {"word"}


def test_half_of_a_surrogate_pair_is_an_error_with_file_and_line_or_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n{"text": "a\\ud83d"}\n', encoding="utf-8")
    with pytest.raises(
        InputError, match=rf"{file}:2: 'text' holds half of a surrogate pair \(\\ud83d at character 1\)"
    ):
        list(read_documents(file))
    skipped: Counter[str] = Counter()
    assert [d.text for d in read_documents(file, skipped=skipped)] == ["good"]
    assert skipped == {"half of a surrogate pair": 1}


def test_half_of_a_surrogate_pair_in_a_category_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good", "category": "x\\ud83d"}\n', encoding="utf-8")
    assert [d.category for d in read_documents(file)] == ["x?"]


def test_a_file_of_utf_16_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word", encoding="utf-16")
    with pytest.raises(InputError, match=r"not UTF-8 text .* it begins as UTF-16 does: save it as UTF-8"):
        list(read_documents(tmp_path / "a.txt"))


def test_a_text_file_is_one_document_or_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two\n", encoding="utf-8")
    assert [d.text for d in read_documents(tmp_path / "a.txt")] == ["one\n\n two\n"]
    assert [d.text for d in read_documents(tmp_path / "a.txt", by_line=True)] == ["one", " two"]
    assert [d.text for d in read_documents(tmp_path, by_line=True)] == ["one", " two"]


def test_the_rest_of_a_split_document_has_no_leading_token_where_there_is_none() -> None:
    packed = pack([ids(11, 12, 13, 14)], 3, None, PAD)
    assert packed.tokens.tolist() == [[11, 12, 13], [14, PAD, PAD]]
