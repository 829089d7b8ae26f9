"""Documents in, packed contexts out. No torch.

Documents lie one after another along contexts of fixed length. A document that doesn't fit is split at the end of the
context; the rest begins the next context as a segment of its own, again with BOS, so that every segment starts with
BOS and attends only to itself. EOS closes a document. The last context is filled with padding (segment id -1).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.hooks.contexts import PackedTokens
from visitlens.kernels.errors import InputError

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Document:
    """One document and where it comes from."""

    text: str
    category: str = ""
    source: str = ""


def read_documents(path: Path) -> Iterator[Document]:
    """From a JSONL file (.jsonl, .jsonl.gz, .jsonl.xz; one object with `text` a line), a .txt or .md file (one
    document), or a folder of them.

    Raises:
        InputError: nothing readable there, a line that is no object with `text`, invalid UTF-8.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and _kind(f))
        if not files:
            raise InputError(f"{path}: found no .txt, .md or .jsonl file")
        for file in files:
            yield from read_documents(file)
        return
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder; expected text (.txt, .md) or JSON lines (.jsonl, .gz, .xz)")
    kind = _kind(path)
    if not kind:
        raise InputError(f"{path}: expected .txt, .md, .jsonl, .jsonl.gz or .jsonl.xz")
    try:
        if kind == "text":
            yield Document(path.read_text(encoding="utf-8"), source=path.name)
            return
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _from_json(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise InputError(f"{path}: a damaged or truncated archive ({error}); copy or fetch it again") from error


def _kind(path: Path) -> str:
    if path.suffix in (".txt", ".md"):
        return "text"
    name = path.name.removesuffix(path.suffix) if path.suffix in _OPENERS else path.name
    return "json" if name.endswith((".jsonl", ".ndjson")) else ""


def _from_json(line: str, where: str) -> Document:
    try:
        data = json.loads(line)
        text = data["text"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{where}: expected a JSON object with a 'text' field ({error!r})") from error
    if not isinstance(text, str):
        raise InputError(f"{where}: 'text' must be a string, got {type(text).__name__}")
    return Document(text, str(data.get("category", "")), str(data.get("source", "")))


def encode(texts: Sequence[str], tokenizer: Any, bos: int, eos: int) -> list[np.ndarray]:
    """Token ids of each text with BOS in front and EOS behind; texts without a token are left out."""
    encodings = (
        tokenizer.encode_batch(list(texts[i : i + 1024]), add_special_tokens=False) for i in range(0, len(texts), 1024)
    )
    return [np.array([bos, *e.ids, eos], dtype=np.int32) for batch in encodings for e in batch if e.ids]


class Packer:
    """Fills contexts with documents, splitting at context ends; `remainder` is what the next context begins with."""

    def __init__(self, context_length: int, bos: int) -> None:
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
            self.remainder = [self.bos, *rest] if rest else []
            pieces.append((self.document, piece))
            room -= len(piece)
        return pieces


def pack(documents: Iterable[np.ndarray], context_length: int, bos: int, pad: int) -> PackedTokens:
    """Packs documents (token ids with BOS and EOS) in the order given.

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
    hashes = [int.from_bytes(hashlib.sha256(d.tobytes()).digest()[:8], "little") for d in documents]
    return PackedTokens(tokens, segments, np.array(owners, dtype=np.int32), np.array(hashes, dtype=np.uint64))
