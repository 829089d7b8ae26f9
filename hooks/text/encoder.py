"""TextEncoder: texts to token ids by one rule, for recordings, samples, notebooks and the live probe alike. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.text.tokenizer import Tokenizer, encoded, own_tokenizer

NO_TOKEN = "none"
"""What `bos` is set to where no token shall lead."""
_BATCH = 1024


@dataclass(frozen=True)
class EndToken:
    """The token that leads or closes every document: its id, or None where there is none, and where that is from."""

    id: int | None
    why: str


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """Texts to token ids. A document is the leading token, the text's own tokens and the closing token; a prompt has no closing
    token. Where neither the model nor its tokenizer knows a leading (closing) token, there is none.

    Attributes:
        bos: the leading token: as asked for, else the configuration's `bos_token_id`, else what the tokenizer itself puts in front.
        eos: the closing token, likewise.
        pad: fills contexts up; segment ids keep it from being read, so any id of the vocabulary does.
    """

    tokenizer: Tokenizer
    bos: EndToken
    eos: EndToken
    pad: int = 0
    special_as_text: bool = False
    """Whether `<eos>` and the like, written out in a text, are text; else they are those tokens."""
    known: frozenset[int] = field(default=frozenset(), repr=False)
    """Special tokens of the tokenizer."""

    @classmethod
    def of(
        cls, tokenizer: Any, config: Any, *, bos: str | int | None = None, special_as_text: bool = False
    ) -> TextEncoder:
        """By a model's configuration (`bos_token_id`, `eos_token_id`, `pad_token_id`) and its tokenizer; an encoder as it is.

        Args:
            bos: the leading token instead: an id, a token by name, or "none".

        Raises:
            InputError: `bos` is no token; the configuration's is none of the tokenizer's; no tokenizer.
        """
        if isinstance(tokenizer, TextEncoder):
            return tokenizer
        used = own_tokenizer(tokenizer)
        if special_as_text:
            callers = getattr(tokenizer, "backend_tokenizer", tokenizer)  # which stays as it is
            if used is callers or not hasattr(used, "encode_special_tokens"):
                raise InputError(f"{type(tokenizer).__name__} can't take special tokens in a text as text")
            used.encode_special_tokens = True  # pyright: ignore[reportAttributeAccessIssue]
        first, last = _own_ends(used)
        leads = _asked(bos, used, config) or _end("bos_token_id", config, first, "in front")
        if leads.id is not None and used.id_to_token(leads.id) is None and bos in (None, ""):
            raise InputError(
                f"{leads.why} {leads.id} is no token of the tokenizer, which has {used.get_vocab_size():,}: is it this model's? "
                f"--bos none, or an id or name (bos=...), says what leads a document"
            )
        return cls(
            used,
            leads,
            _end("eos_token_id", config, last, "behind"),
            getattr(config, "pad_token_id", None) or 0,
            special_as_text,
            _special(used),
        )

    # Texts

    def ids(self, text: str) -> list[int]:
        """The text's own tokens.

        Raises:
            InputError: a lone surrogate, which stands for no character.
        """
        check_characters(text)
        return list(encoded(self.tokenizer, [text])[0].ids)

    def led(self, ids: Sequence[int]) -> list[int]:
        """With the leading token in front, where there is one: once, also where the text begins with it."""
        lead = self.bos.id
        return list(ids) if lead is None or (len(ids) and ids[0] == lead) else [lead, *ids]

    def prompt(self, text: str) -> list[int]:
        """A text to be continued: the leading token and the text's own."""
        return self.led(self.ids(text))

    def documents(self, texts: Sequence[str]) -> Documents:
        """Every text as a document; texts without a token are left out, and counted."""
        found, kept, written = [], [], 0
        for number, ids in enumerate(self._batches(texts)):
            if not ids:
                continue
            written += not self.known.isdisjoint(ids)
            closed = [] if self.eos.id is None else [self.eos.id]
            found.append(np.array([*self.led(ids), *closed], dtype=np.int32))
            kept.append(number)
        return Documents(found, kept, len(texts) - len(kept), 0 if self.special_as_text else written)

    def _batches(self, texts: Sequence[str]) -> Iterator[list[int]]:
        for at in range(0, len(texts), _BATCH):
            some = list(texts[at : at + _BATCH])
            for text in some:
                check_characters(text)
            yield from (e.ids for e in encoded(self.tokenizer, some))

    # What there is to say

    def text_of(self, token: int) -> str:
        """The name of a token, or its number where the tokenizer has none."""
        return self.tokenizer.id_to_token(token) or f"#{token}"

    def __str__(self) -> str:
        """Which tokens stand at a document's ends, and why."""
        return document_ends(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """For provenance, as JSON."""
        ends = {
            name: {"id": end.id, "token": None if end.id is None else self.text_of(end.id), "why": end.why}
            for name, end in (("bos", self.bos), ("eos", self.eos))
        }
        return {**ends, "special_as_text": self.special_as_text}

    @cached_property
    def warnings(self) -> list[str]:
        """What is doubtful about the ends of documents."""
        found = []
        for what, end in (("leading", self.bos), ("closing", self.eos)):
            if end.id is None:
                continue
            name = self.tokenizer.id_to_token(end.id)
            if name is None:
                found.append(
                    f"the {what} token {end.id} ({end.why}) is no token of the tokenizer: is it this model's tokenizer?"
                )
            elif end.id not in self.known and not _marked(name):
                found.append(
                    f"the {what} token is {name!r} ({end.id}; {end.why}), an ordinary token of text"
                    + (
                        ": what is measured at segment starts is this token's; --bos says what leads"
                        * (what == "leading")
                    )
                )
        return found


@dataclass(frozen=True)
class Documents:
    """Texts as token ids i4 [token] each: those that have a token, which texts they are, and how many were left out."""

    ids: list[np.ndarray]
    kept: list[int]
    empty: int
    """Texts without a token."""
    special: int
    """Texts that hold special tokens written out, read as those tokens."""

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        found = []
        if self.empty:
            of = f"{self.empty:,} of {self.empty + len(self.ids):,} documents"
            found.append(
                f"empty: {of} {'have' if self.empty != 1 else 'has'} no token and {'are' if self.empty != 1 else 'is'} left out"
            )
        if self.special:
            what = f"{self.special:,} document{'s hold' if self.special != 1 else ' holds'}"
            found.append(
                f"special tokens: {what} some written out, taken as tokens; --special-as-text takes them as text"
            )
        return found


def document_ends(stored: Any) -> str:
    """Which tokens stand at a document's ends, and why, of a recording's provenance (`special_tokens`); "" where it doesn't say."""
    if not isinstance(stored, dict):
        return ""
    told = []
    for name, what in (("bos", "led by"), ("eos", "closed by")):
        end = stored.get(name)
        if isinstance(end, dict):
            token = "no token" if end.get("id") is None else f"{end.get('token')} ({end.get('id')})"
            told.append(f"{what} {token}: {end.get('why')}")
    return "; ".join(told)


def check_characters(text: str, where: str = "the text") -> None:
    """Raises InputError: half of a surrogate pair, as a JSON escape (`\\ud83d` alone) can give; no tokenizer takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise InputError(
            f"{where} holds half of a surrogate pair ({code} at character {error.start}), which stands for no character: "
            "mend the escape, or leave the text out"
        ) from None


def _asked(bos: str | int | None, tokenizer: Tokenizer, config: Any) -> EndToken | None:
    if bos is None or bos == "":
        return None
    if str(bos).lower() == NO_TOKEN:
        return EndToken(None, "asked for")
    size = getattr(config, "vocab_size", None) or tokenizer.get_vocab_size()
    found = int(bos) if str(bos).isdecimal() else tokenizer.token_to_id(str(bos))
    if found is None or not 0 <= found < size:
        raise InputError(
            f"expected a leading token as an id in 0..{size - 1}, the name of one of the tokenizer's tokens, or {NO_TOKEN}, got {bos!r}"
        )
    return EndToken(found, "asked for")


def _end(name: str, config: Any, own: int | None, place: str) -> EndToken:
    found = getattr(config, name, None)
    itself = f"the tokenizer itself puts {'none' if own is None else f'token {own}'} {place}"
    if found is not None:
        return EndToken(int(found), f"the configuration's {name}" + (f", {itself}" if own not in (None, found) else ""))
    if own is not None:
        return EndToken(own, f"the tokenizer puts it {place}; the configuration has no {name}")
    return EndToken(None, f"the configuration has no {name}, and {itself}")


def _own_ends(tokenizer: Any) -> tuple[int | None, int | None]:
    """The special tokens that the tokenizer's own template puts before and behind a text."""
    if getattr(tokenizer, "post_processor", None) is None:
        return None, None
    for text in ("a", "A", "0", ".", tokenizer.id_to_token(tokenizer.get_vocab_size() - 1) or ""):
        found: Any = encoded(tokenizer, [text], special=True)[0]
        own = [at for at, special in enumerate(found.special_tokens_mask) if not special]
        if own:  # else the text has no token, and what leads can't be told from what closes
            return (found.ids[0] if own[0] > 0 else None), (found.ids[-1] if own[-1] < len(found.ids) - 1 else None)
    return None, None


def _special(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder() if hasattr(tokenizer, "get_added_tokens_decoder") else {}
    return frozenset(id_ for id_, token in added.items() if token.special)


def _marked(name: str) -> bool:
    """Whether a token is written as special tokens are, `<s>` or `[CLS]`, in a tokenizer that doesn't say which are special."""
    return len(name) > 2 and (name[0], name[-1]) in (("<", ">"), ("[", "]"))
