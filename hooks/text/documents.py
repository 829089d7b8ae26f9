"""Documents in, packed contexts out. No torch.

Documents lie one after another along contexts of fixed length. A document that doesn't fit is split at the end of the
context; the rest begins the next context as a segment of its own, again with the leading token (BOS, where the model has one:
`encoder.TextEncoder`), and attends only to itself. EOS closes a document. The last context is filled with padding (segment id -1).
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.errors import InputError, UnavailableError
from visitlens.hooks.text.encoder import check_characters
from visitlens.hooks.text.near_copies import without_near_copies
from visitlens.hooks.text.packed_tokens import PackedTokens, document_hashes

_COMPRESSED = (".gz", ".xz", ".zst")
MAX_LINE_BYTES = 2**26
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Document:
    """One document and where it comes from."""

    text: str
    category: str = ""
    source: str = ""


def read_documents(
    path: Path | str, *, field: str = "text", skipped: Counter[str] | None = None, by_line: bool = False
) -> Iterator[Document]:
    """From JSON lines (.jsonl, also .gz, .xz, .zst; one object with `text` a line), Parquet (a row each), a .txt or .md
    file (one document), a folder of them, or a Hugging Face dataset: a folder that `save_to_disk` wrote, or streamed by
    the name `hf:NAME[:CONFIG][@SPLIT]` (NAME on the hub or a local folder; split `train` by default).

    A byte order mark at the start of a file or text is dropped.

    Args:
        field: the name of the text's field or column; `category` and `source` are read where they exist.
        skipped: counts what is no document (by reason) and goes on; without it the first such thing is an error.
        by_line: each line of a .txt or .md file is a document of its own; empty lines are none.

    Raises:
        InputError: nothing readable there; a line or row without text, invalid UTF-8, half of a surrogate pair.
        UnavailableError: a package that this format needs isn't installed.
    """
    bad = _Bad(skipped)
    if str(path).startswith("hf:"):
        yield from _from_hub(str(path).removeprefix("hf:"), field, bad)
        return
    path = Path(path)
    if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        yield from _from_disk(path, field, bad)
        return
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and _kind(f))
        if not files:
            raise InputError(f"{path}: found no .txt, .md, .jsonl or .parquet file")
        for file in files:
            yield from read_documents(file, field=field, skipped=skipped, by_line=by_line)
        return
    if not path.is_file():
        raise InputError(
            f"{path}: no such file or folder; expected text (.txt, .md), JSON lines (.jsonl, .gz, .xz, .zst) or .parquet"
        )
    kind = _kind(path)
    if not kind:
        raise InputError(f"{path}: expected .txt, .md, .parquet or .jsonl (also .gz, .xz, .zst)")
    if kind == "parquet":
        yield from _from_parquet(path, field, bad)
    elif kind == "text":
        if (text := _decoded(path.read_bytes(), str(path), bad)) is not None:
            parts = text.splitlines() if by_line else [text]
            yield from (Document(part, source=path.name) for part in parts if part.strip() or not by_line)
    else:
        yield from _from_lines(path, field, bad)


class _Bad:
    """What to do about something that is no document: count it, or raise."""

    def __init__(self, skipped: Counter[str] | None) -> None:
        self._skipped = skipped

    def __call__(self, reason: str, message: str, cause: Exception | None = None) -> None:
        if self._skipped is None:
            raise InputError(message) from cause
        self._skipped[reason] += 1


def _kind(path: Path) -> str:
    if path.suffix in (".txt", ".md"):
        return "text"
    if path.suffix == ".parquet":
        return "parquet"
    name = path.name.removesuffix(path.suffix) if path.suffix in _COMPRESSED else path.name
    return "json" if name.endswith((".jsonl", ".ndjson")) else ""


def _from_lines(path: Path, field: str, bad: _Bad) -> Iterator[Document]:
    damage: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, lzma.LZMAError)
    if path.suffix == ".zst":
        damage += (_needed("zstandard").ZstdError,)
    try:
        with _lines(path) as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}:{number}"
                if line.strip() and (text := _decoded(line, where, bad)) is not None:
                    try:
                        row = json.loads(text)
                    except (
                        ValueError,
                        RecursionError,
                    ) as error:  # also integers of thousands of digits, endless nesting
                        row = error
                    yield from _from_row(row, field, where, bad)
    except damage as error:
        raise InputError(f"{path}: a damaged or truncated archive ({error}); copy or fetch it again") from error


def _lines(path: Path) -> AbstractContextManager[Iterable[bytes]]:
    if path.suffix == ".zst":
        return nullcontext(_bounded(_zstandard_lines(path), path))
    return _read_lines(path)


@contextmanager
def _read_lines(path: Path) -> Iterator[Iterable[bytes]]:
    with {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "rb") as file:
        yield _bounded(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), path)


def _bounded(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise InputError(_too_long(path, number))
        yield line


def _too_long(path: Path, number: int) -> str:
    return f"{path}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes; expected one JSON object a line"


def _zstandard_lines(path: Path) -> Iterator[bytes]:
    """Frame by frame: the package's own stream reader takes a truncated file for a whole one."""
    zstandard = _needed("zstandard")
    frame, open_frame = zstandard.ZstdDecompressor().decompressobj(), False
    pending, length, number = list[bytes](), 0, 1
    with path.open("rb") as file:
        while data := file.read(1 << 12):  # a little at a time: each byte may become tens of thousands
            while data:
                *lines, rest = frame.decompress(data).split(b"\n")
                for line in lines:
                    yield b"".join([*pending, line])
                    pending, length, number = [], 0, number + 1
                pending.append(rest)
                length += len(rest)
                if length > MAX_LINE_BYTES:
                    raise InputError(_too_long(path, number))
                data, open_frame = frame.unused_data, not frame.eof
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
    if open_frame:
        raise EOFError("the last frame has no end")
    yield b"".join(pending)


def _decoded(data: bytes, where: str, bad: _Bad) -> str | None:
    try:
        return data.decode("utf-8").removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        utf16 = ", but it begins as UTF-16 does: save it as UTF-8" * data.startswith((b"\xff\xfe", b"\xfe\xff"))
        bad("not UTF-8", f"{where}: not UTF-8 text ({error.reason} at byte {error.start}){utf16}", error)
        return None


def _from_row(row: Any, field: str, where: str, bad: _Bad) -> Iterator[Document]:
    """The document of a line or row, or none."""
    if not isinstance(row, dict) or field not in row:
        got = (
            f"{row!r:.200}"
            if isinstance(row, Exception)
            else f"{type(row).__name__} {sorted(row) if isinstance(row, dict) else ''}"
        )
        bad("no object with text", f"{where}: expected a JSON object with a {field!r} field, got {got}")
    elif not isinstance(row[field], str):
        bad("text is no string", f"{where}: {field!r} must be a string, got {type(row[field]).__name__}")
    else:
        about = (str(row.get(name) or "").encode("utf-8", "replace").decode() for name in ("category", "source"))
        try:
            check_characters(row[field], f"{where}: {field!r}")
        except InputError as error:
            bad("half of a surrogate pair", str(error))
            return
        yield Document(row[field].removeprefix(_BYTE_ORDER_MARK), *about)


def _from_parquet(path: Path, field: str, bad: _Bad) -> Iterator[Document]:
    parquet, arrow = _needed("pyarrow.parquet"), _needed("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            columns = [c for c in (field, "category", "source") if c in file.schema_arrow.names]
            if field not in columns:
                raise InputError(f"{path}: expected a column {field!r} among {', '.join(file.schema_arrow.names)}")
            number = 0
            for batch in file.iter_batches(1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield from _from_row(row, field, f"{path}, row {number}", bad)
    except arrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a readable Parquet file ({error})") from error


def _from_hub(name: str, field: str, bad: _Bad) -> Iterator[Document]:
    datasets = _needed("datasets")
    name, _, split = name.partition("@")
    name, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:  # not found, not reachable, no such split or configuration
        raise InputError(f"hf:{name}: not a dataset that can be loaded ({error})") from error
    yield from _from_dataset(rows, field, f"hf:{name}", bad)


def _from_disk(path: Path, field: str, bad: _Bad) -> Iterator[Document]:
    stored = _needed("datasets").load_from_disk(str(path))
    for rows in stored.values() if isinstance(stored, dict) else (stored,):
        yield from _from_dataset(rows, field, str(path), bad)


def _from_dataset(rows: Iterable[Any], field: str, where: str, bad: _Bad) -> Iterator[Document]:
    for number, row in enumerate(rows, 1):
        yield from _from_row(row, field, f"{where}, row {number}", bad)


def _needed(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise UnavailableError(f"this text needs {package}: pip install 'visitlens[data]'") from error


class Packer:
    """Fills contexts with documents, splitting at context ends; `remainder` is what the next context begins with."""

    def __init__(self, context_length: int, bos: int | None) -> None:
        if context_length < 2:
            raise InputError(f"a context needs at least 2 positions, got {context_length}")
        self.context_length, self.bos = context_length, bos
        self.remainder: list[int] = []
        self.document = -1

    def fill(self, documents: Iterator[np.ndarray]) -> list[tuple[int, list[int]]]:
        """The pieces (document ordinal, token ids) of the next context; fewer tokens only when documents run out."""
        room, pieces = self.context_length, []
        while room > 0:
            if not self.remainder:
                document = next(documents, None)
                if document is None:
                    break
                self.remainder, self.document = document.tolist(), self.document + 1
            piece, rest = self.remainder[:room], self.remainder[room:]
            self.remainder = [*([] if self.bos is None else [self.bos]), *rest] if rest else []
            pieces.append((self.document, piece))
            room -= len(piece)
        return pieces


def pack(
    documents: Iterable[np.ndarray], context_length: int, bos: int | None, pad: int, *, near_copies: bool = False
) -> PackedTokens:
    """Packs documents (token ids, with the tokens that lead and close them) in the order given; `bos` leads each rest of a
    document that is split, None where nothing does. With `near_copies` these count as one document (`without_near_copies`), where
    documents are counted as independent of each other.

    Raises:
        InputError: no document has a token.
    """
    documents = list(documents)
    if not documents:
        raise InputError("the text is empty: no document has a token")
    packer, source = Packer(context_length, bos), iter(documents)
    contexts = []
    while pieces := packer.fill(source):
        contexts.append(pieces)
    tokens = np.full((len(contexts), context_length), pad, dtype=np.int32)
    segments = np.full((len(contexts), context_length), -1, dtype=np.int32)
    owners: list[int] = []
    for row, pieces in enumerate(contexts):
        at = 0
        for document, piece in pieces:
            tokens[row, at : at + len(piece)] = piece
            segments[row, at : at + len(piece)] = len(owners)
            owners.append(document)
            at += len(piece)
    hashes = document_hashes(documents)
    hashes = without_near_copies(documents, hashes) if near_copies else hashes
    return PackedTokens(tokens, segments, np.array(owners, dtype=np.int32), hashes)
