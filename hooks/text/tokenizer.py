"""A tokenizer as visitlens uses it: what it must offer, how one is read, and a copy without stored truncation and padding. No torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from visitlens.errors import CheckpointError, InputError

MOST_SECONDS = 60.0
"""For up to some thousand texts at once, which take a tokenizer less than a second."""


class Encoding(Protocol):
    """One text's token ids, and the characters [start, stop) that each token stands for."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def offsets(self) -> list[tuple[int, int]]: ...


@runtime_checkable
class Tokenizer(Protocol):
    """What visitlens needs of a tokenizer; `tokenizers.Tokenizer` is one. Ids are without special tokens where
    `add_special_tokens` is False."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding: ...
    def encode_batch(self, input: list[str], *, add_special_tokens: bool = True) -> Sequence[Encoding]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def get_vocab_size(self) -> int: ...


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, without the truncation and padding that it may have been saved with.

    Raises:
        CheckpointError: no file there, or not one that the package tokenizers reads.
    """
    from tokenizers import Tokenizer as OfTokenizers

    if not file.is_file():
        raise CheckpointError(
            f"{file}: no such file; expected a tokenizer.json, as tokenizers.Tokenizer's save writes it"
        )
    try:
        return _unbounded(OfTokenizers.from_file(str(file)))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and PanicException, which isn't even one
        raise CheckpointError(f"{file}: not a readable tokenizer file ({error})") from error


def encoded(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = False) -> list[Encoding]:
    """The encodings of texts by a tokenizer that nobody vouches for: its regular expressions may take ages, or end in a panic.

    Args:
        special: with the special tokens that the tokenizer itself adds.

    Raises:
        InputError: it fails, or takes longer than `MOST_SECONDS`.
    """
    texts = list(texts)
    what = f"{len(texts):,} texts" if len(texts) != 1 else f"a text of {len(texts[0]):,} characters"
    answer: list[Any] = []

    def work() -> None:
        try:  # `encode` would keep every other thread waiting
            answer.append(list(tokenizer.encode_batch(texts, add_special_tokens=special)))
        except BaseException as error:  # PanicException, which the package tokenizers raises, is no Exception
            answer.append(error)

    thread = threading.Thread(target=work, name="visitlens-tokenizer", daemon=True)
    thread.start()
    thread.join(MOST_SECONDS)
    if not answer:
        raise InputError(
            f"the tokenizer hasn't read {what} in {MOST_SECONDS:.0f} s: a pattern in its tokenizer.json takes ever longer on such text; "
            "shorten the text, or try another tokenizer"
        )
    if isinstance(answer[0], BaseException):
        raise InputError(
            f"the tokenizer can't read {what} ({type(answer[0]).__name__}: {answer[0]!s:.200}): "
            "change the text, or try another tokenizer"
        ) from answer[0]
    return answer[0]


def own_tokenizer(given: Any) -> Tokenizer:
    """A tokenizer of the caller's as visitlens uses it: a copy, without the truncation and padding that the caller's may carry
    (one of transformers keeps those of its last call). The caller's object stays as it is.

    Raises:
        InputError: no tokenizer, or one that carries truncation or padding and can't be copied.
    """
    inside = getattr(given, "backend_tokenizer", given)  # what lies inside a fast one of transformers
    if not isinstance(inside, Tokenizer):
        raise InputError(
            f"expected the model's tokenizer (of tokenizers, or a fast one of transformers), got {given!r:.200}"
        )
    if not hasattr(inside, "to_str"):
        return inside  # a class of the caller's own, which has no such settings
    try:
        copy = type(inside).from_str(inside.to_str())  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:  # tokenizers raises bare Exception: parts written in Python can't be copied
        if getattr(inside, "truncation", None) is None and getattr(inside, "padding", None) is None:
            return inside
        raise InputError(
            f"the tokenizer truncates or pads every text and can't be copied ({error}): call its no_truncation() and no_padding()"
        ) from error
    return _unbounded(copy)


def _unbounded(tokenizer: Any) -> Any:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
