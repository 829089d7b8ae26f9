"""TokenTexts: how each token of a text is written, for notebooks, live probe, dashboard and figures alike. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from typing import Any

CONTINUED = "⋯"
"""Stands before (or for) a token whose bytes finish a character that an earlier token began."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenTexts:
    """Token ids -> their texts, spaces as the piece itself has them: `▁the` is " the" and `the` is "the".

    Called with one id, it gives that token alone; bytes that are no whole character show as `⟨E6 97⟩`. `sequence` gives the
    tokens of a text: a character whose bytes lie in several tokens stands at the first of them, `⋯` at the others.

    Examples:
        >>> import visitlens as vl
        >>> from visitlens.hooks.text.token_texts import TokenTexts
        >>> model = vl.load("smelt")
        >>> texts = TokenTexts(model.tokenizer)
        >>> texts.sequence(model.tokenizer.encode("a 🙂").ids)
        ['a', ' ', '🙂', '⋯', '⋯', '⋯']
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes | str] = {}

    def __call__(self, token: int) -> str:
        return next(iter(self.sequence([token])))

    def sequence(self, ids: Iterable[int]) -> list[str]:
        """The text of each token, of tokens that follow one another."""
        tokens = [int(i) for i in ids]
        pieces = [self._piece(i) for i in tokens]
        texts = ["" if isinstance(piece, bytes) else piece for piece in pieces]
        at = 0
        while at < len(pieces):
            stop = at
            while stop < len(pieces) and isinstance(pieces[stop], bytes):
                stop += 1
            run: list[bytes] = [piece for piece in pieces[at:stop] if isinstance(piece, bytes)]
            texts[at:stop] = _joined(run)
            at = stop + 1
        return [text or f"⟨{token}⟩" for token, text in zip(tokens, texts, strict=True)]

    def _piece(self, token: int) -> bytes | str:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes | str:
        """The token's bytes; a text, of special tokens and where the tokenizer doesn't say its pieces."""
        written = self._tokenizer.id_to_token(token) if hasattr(self._tokenizer, "id_to_token") else None
        if written is None:  # an id that the model has and the tokenizer hasn't, or a tokenizer without pieces
            try:
                return self._tokenizer.decode([token], skip_special_tokens=False)
            except Exception:  # of a class of the caller's own; tokenizers raises bare Exception too
                return f"⟨{token}⟩"
        if token in self._added:
            return written
        if "ByteLevel" in self._parts and set(written) <= set(byte_alphabet()):
            return bytes(byte_alphabet()[character] for character in written)
        if "ByteFallback" in self._parts and (found := _BYTE_PIECE.match(written)):
            return bytes([int(found[1], 16)])
        for mark, text in self._marks.items():
            written = written.replace(mark, text)
        return written.encode("utf-8", "surrogatepass")

    @cached_property
    def _added(self) -> frozenset[int]:
        reads = hasattr(self._tokenizer, "get_added_tokens_decoder")
        return frozenset(self._tokenizer.get_added_tokens_decoder()) if reads else frozenset()

    @cached_property
    def _states(self) -> list[dict[str, Any]]:
        """What the tokenizer's decoder is made of, as `tokenizer.json` says it; without one, its pre-tokenizer."""
        for part in ("decoder", "pre_tokenizer"):
            found = getattr(self._tokenizer, part, None)
            if found is not None and hasattr(found, "__getstate__"):
                try:
                    state = json.loads(found.__getstate__())
                except Exception:  # a part written in Python has no such state; tokenizers raises bare Exception
                    continue
                return list(_flat(state))
        return []

    @cached_property
    def _parts(self) -> set[str]:
        return {str(state.get("type")) for state in self._states}

    @cached_property
    def _marks(self) -> dict[str, str]:
        """What pieces write in place of a space."""
        marks: dict[str, str] = {}
        for state in self._states:
            if state.get("type") == "Metaspace":
                marks[state.get("replacement", "▁")] = " "
            elif state.get("type") == "Replace" and isinstance(state.get("pattern"), dict):
                if pattern := state["pattern"].get("String"):
                    marks[pattern] = state.get("content", "")
            elif state.get("type") == "BPEDecoder" and state.get("suffix"):
                marks[state["suffix"]] = " "
        return marks


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield state
    for name in ("decoders", "pretokenizers"):
        for part in state.get(name) or ():
            yield from _flat(part)


def _joined(pieces: list[bytes]) -> list[str]:
    """The text of each piece: a character at the piece that holds its first byte."""
    data = b"".join(pieces)
    owner = [number for number, piece in enumerate(pieces) for _ in piece]
    texts = [""] * len(pieces)
    bad: list[bytes] = [b""] * len(pieces)
    at = 0
    while at < len(data):
        width = _width(data, at)
        first = owner[at]
        if width == 0:
            bad[first] += data[at : at + 1]
            at += 1
            if at == len(data) or owner[at] != first or _width(data, at):
                texts[first] += f"⟨{bad[first].hex(' ').upper()}⟩"
                bad[first] = b""
            continue
        texts[first] += data[at : at + width].decode("utf-8")
        for later in dict.fromkeys(owner[at + 1 : at + width]):
            if later != first:
                texts[later] = CONTINUED
        at += width
    return texts


def _width(data: bytes, at: int) -> int:
    """Bytes of the character that begins here; 0 where none does."""
    lead = data[at]
    width = (
        1
        if lead < 0x80
        else 2
        if 0xC2 <= lead < 0xE0
        else 3
        if 0xE0 <= lead < 0xF0
        else 4
        if 0xF0 <= lead < 0xF5
        else 0
    )
    try:
        return width if width and len(data[at : at + width].decode("utf-8")) == 1 else 0
    except UnicodeDecodeError:
        return 0


@cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest is moved to 256 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(moved)}
