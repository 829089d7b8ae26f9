"""A training corpus as token files that are read in place: documents of named categories, split in train and validation.

`prepare` reads any text once and writes a folder:

    corpus.json               counts, what was skipped and why, special tokens, the tokenizer's hash
    tokenizer.json
    train.tokens.npy          int32, all documents one after another, BOS and EOS included
    train.documents.npy       [document] (start, length, category)
    train.sources.npy         [document] index of its source, where documents name one
    validation.*              the same

Files named `*.train.*` and `*.validation.*` keep their split; otherwise a document goes to validation when the hash of its
tokens says so, which depends on nothing else. Documents are streamed: the corpus may exceed memory. No torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from visitlens.errors import InputError
from visitlens.hooks.text.documents import Document, read_documents
from visitlens.hooks.text.encoder import EndToken, TextEncoder

FORMAT = "visitlens-corpus"
SPLITS = ("train", "validation")
ROW = np.dtype([("start", "<i8"), ("length", "<i4"), ("category", "<i2")])
_NAMES = {
    "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|bos|>", "[BOS]", "<|startoftext|>", "<|endoftext|>", "[CLS]"),
    "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|eos|>", "[EOS]", "<|endoftext|>", "[SEP]"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
}


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that mark a document's start and end, and padding."""

    bos: int
    eos: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Any, bos: str | None = None, eos: str | None = None) -> SpecialTokens:
        """By the names given, or the usual ones; padding falls back to EOS (padding is never read).

        Raises:
            InputError: the tokenizer has no such token.
        """

        def find(kind: str, name: str | None) -> int:
            for candidate in (name,) if name else _NAMES[kind]:
                if (found := tokenizer.token_to_id(candidate)) is not None:
                    return found
            what = f"token {name!r}" if name else f"{kind.upper()} token among {', '.join(_NAMES[kind])}"
            raise InputError(f"the tokenizer has no {what}; name the one that {_ROLE[kind]} with --{kind}")

        start, end = find("bos", bos), find("eos", eos)
        return cls(start, end, next((i for n in _NAMES["pad"] if (i := tokenizer.token_to_id(n)) is not None), end))


_ROLE = {"bos": "starts a document", "eos": "ends a document"}


class TokenizedDocuments:
    """Documents as token ids, read from disk when asked for: `documents[i]` is [position] int32, BOS first."""

    def __init__(self, tokens: np.ndarray, rows: np.ndarray, sources: np.ndarray | None = None) -> None:
        """`sources` [document]: indices of the corpus's sources; None where it names none."""
        self._tokens, self.rows, self.sources = tokens, rows, sources

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        row = self.rows[index]
        return self._tokens[row["start"] : row["start"] + row["length"]]

    @property
    def lengths(self) -> np.ndarray:
        """[document] tokens."""
        return self.rows["length"]

    def set_apart(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the documents to train on, and of about `share` of all, set apart by a hash of their own tokens: copies of a
        document are on one side together.

        Raises:
            InputError: all fell on one side.
        """
        aside = np.array([_fraction(np.asarray(self[i]), b"decay") < share for i in range(len(self))])
        if aside.all() or not aside.any():
            raise InputError(
                f"{share:.3g} of {len(self)} documents leaves none on one side; add text or choose another share for decay branches"
            )
        return np.flatnonzero(~aside), np.flatnonzero(aside)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, opened."""

    folder: Path
    categories: tuple[str, ...]
    special: SpecialTokens
    train: TokenizedDocuments
    validation: TokenizedDocuments
    report: dict[str, Any]
    sources: tuple[str, ...] = ()

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Raises InputError where no prepared corpus is."""
        try:
            report = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
            if report["format"] != FORMAT:
                raise ValueError(f"format is {report['format']!r}")
            train, validation = (
                TokenizedDocuments(
                    np.load(folder / f"{split}.tokens.npy", mmap_mode="r"),
                    np.load(folder / f"{split}.documents.npy"),
                    np.load(folder / f"{split}.sources.npy") if report.get("sources") else None,
                )
                for split in SPLITS
            )
            special = SpecialTokens(**report["special"])
            return cls(
                folder,
                tuple(report["categories"]),
                special,
                train,
                validation,
                report,
                tuple(report.get("sources", ())),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"expected a prepared corpus in {folder}; {error}. Prepare it again.") from error


def prepare(
    source: Path | str | Iterable[Document],
    tokenizer_file: Path,
    out: Path,
    *,
    field: str = "text",
    bos: str | None = None,
    eos: str | None = None,
    validation_share: float = 0.05,
    max_tokens: int | None = None,
) -> Corpus:
    """Tokenises text into `out` (a folder), or opens it where that was done from the same source before.

    What is no document (bad lines, invalid UTF-8, text without a token) is left out and counted in `report["skipped"]`.

    Args:
        source: what `read_documents` takes, with the text in `field`; or documents.
        bos: the token that leads each document, where it hasn't one of the usual names; `eos` likewise.
        validation_share: of documents, where files don't say which split they are.
        max_tokens: reading stops after so many tokens a file.

    Raises:
        InputError: no document has a token, all of them fell into one split, or the tokenizer lacks BOS or EOS.
    """
    from visitlens.hooks.models.checkpoint import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_file)
    special = SpecialTokens.of(tokenizer, bos, eos)
    encoder = TextEncoder(tokenizer, EndToken(special.bos, "of the corpus"), EndToken(special.eos, "of the corpus"))
    asked = {
        "source": str(source) if isinstance(source, Path | str) else "documents",
        "tokenizer_sha256": hashlib.sha256(tokenizer_file.read_bytes()).hexdigest(),
        "field": field,
        "special": vars(special),
        "validation_share": validation_share,
        "max_tokens": max_tokens,
    }
    if (out / "corpus.json").is_file():
        corpus = Corpus.open(out)
        differs = [name for name, value in asked.items() if corpus.report.get(name) != value]
        if differs:
            raise InputError(f"{out} holds a corpus with another {', '.join(differs)}; choose another folder")
        return corpus
    out.mkdir(parents=True, exist_ok=True)
    skipped: Counter[str] = Counter()
    writers = {split: _Writer(out, split) for split in SPLITS}
    for split, documents in _sources(source, field, skipped):
        taken = 0
        while texts := list(islice(documents, 256)):
            encoded = encoder.documents([d.text for d in texts])
            if encoded.empty:
                skipped["without a token"] += encoded.empty
            for at, ids in zip(encoded.kept, encoded.ids, strict=True):
                document = texts[at]
                chosen = split or ("validation" if _fraction(ids) < validation_share else "train")
                writers[chosen].add(ids, document.category or "text", document.source)
                taken += len(ids)
            if max_tokens is not None and taken >= max_tokens:
                break
    empty = [split for split, writer in writers.items() if not writer.lengths]
    if empty:
        raise InputError(
            f"no document for {' or '.join(empty)}: {sum(len(w.lengths) for w in writers.values())} documents have a token in all; add text or change validation_share"
        )
    categories = sorted({c for writer in writers.values() for c in writer.categories})
    sources = sorted({s for writer in writers.values() for s in writer.sources if s})
    counts = {split: writer.finish(categories, sources) for split, writer in writers.items()}
    shutil.copyfile(tokenizer_file, out / "tokenizer.json")
    report = {
        "format": FORMAT,
        "categories": categories,
        "sources": sources,
        **asked,
        "documents": counts,
        "skipped": dict(skipped),
    }
    (out / "corpus.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return Corpus.open(out)


def _sources(
    source: Path | str | Iterable[Document], field: str, skipped: Counter[str]
) -> Iterator[tuple[str | None, Iterator[Document]]]:
    """(split or None, documents) of each file."""
    if not isinstance(source, Path | str):
        yield None, iter(source)
        return
    folder = Path(source)
    named = sorted(f for split in SPLITS for f in folder.glob(f"*.{split}.*")) if folder.is_dir() else []
    for file in named or [source]:
        split = next((s for s in SPLITS if f".{s}." in Path(file).name), None)
        yield split, read_documents(file, field=field, skipped=skipped)


def _fraction(ids: np.ndarray, purpose: bytes = b"") -> float:
    """In [0, 1), by the document's tokens alone, for each purpose its own."""
    return int.from_bytes(hashlib.sha256(purpose + ids.tobytes()).digest()[:8], "little") / 2**64


class _Writer:
    def __init__(self, folder: Path, split: str) -> None:
        self._folder, self._split = folder, split
        self._raw = (folder / f"{split}.tokens.raw").open("wb")
        self.lengths: list[int] = []
        self.categories: list[str] = []
        self.sources: list[str] = []

    def add(self, ids: np.ndarray, category: str, source: str) -> None:
        self._raw.write(ids.tobytes())
        self.lengths.append(len(ids))
        self.categories.append(category)
        self.sources.append(source)

    def finish(self, categories: list[str], sources: list[str]) -> dict[str, dict[str, int]]:
        """Writes the arrays; documents and tokens by category."""
        self._raw.close()
        raw = self._folder / f"{self._split}.tokens.raw"
        lengths = np.array(self.lengths, dtype=np.int64)
        tokens = open_memmap(self._folder / f"{self._split}.tokens.npy", "w+", np.int32, (int(lengths.sum()),))
        tokens[:] = np.memmap(raw, np.int32, "r")
        tokens.flush()
        raw.unlink()
        rows = np.zeros(len(lengths), dtype=ROW)
        rows["length"], rows["start"] = lengths, np.cumsum(lengths) - lengths
        rows["category"] = [categories.index(c) for c in self.categories]
        np.save(self._folder / f"{self._split}.documents.npy", rows)
        if sources:  # a document without one has -1
            index = {name: i for i, name in enumerate(sources)}
            np.save(
                self._folder / f"{self._split}.sources.npy",
                np.array([index.get(s, -1) for s in self.sources], np.int32),
            )
        return {
            name: {"documents": int(mine.sum()), "tokens": int(lengths[mine].sum())}
            for i, name in enumerate(categories)
            if (mine := rows["category"] == i).any()
        }
