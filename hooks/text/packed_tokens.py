"""Packed text as a model takes it: contexts of equal length that hold whole or split documents. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visitlens.errors import InputError


def document_hashes(documents: Sequence[np.ndarray]) -> np.ndarray:
    """[document] u8: the first 8 bytes of the SHA-256 of each one's token ids i4."""
    hashes = [int.from_bytes(hashlib.sha256(d.tobytes()).digest()[:8], "little") for d in documents]
    return np.array(hashes, dtype=np.uint64)


@dataclass(frozen=True)
class PackedTokens:
    """Contexts of equal length.

    `tokens [context, position]` i4, `segments [context, position]` i4 (rising over the whole sample, -1 = padding),
    `segment_document [segment]` i4, `document_hash [document]` u8: the first 8 bytes of the SHA-256 of its token ids
    (of a near copy those of the first, see `near_copies`).
    `generated [context, position]` i4, of texts that a model wrote, one a context: 0 in the prompt, n at the n-th token after it.
    """

    tokens: np.ndarray
    segments: np.ndarray
    segment_document: np.ndarray
    document_hash: np.ndarray
    generated: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments >= 0).sum())

    @property
    def longest_segment(self) -> int:
        """Tokens of the longest piece of a document that runs by itself."""
        return int(np.bincount(self.segments[self.segments >= 0]).max(initial=0))

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        written = () if self.generated is None else (self.generated,)
        for array in (self.tokens, self.segments, self.segment_document, *written):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def first_contexts(self, tokens: int) -> PackedTokens:
        """The contexts up to the one in which token number `tokens` falls."""
        if tokens < 1:
            raise InputError(f"expected at least 1 token, got {tokens}")
        rows = int(np.searchsorted(np.cumsum((self.segments >= 0).sum(1)), tokens)) + 1
        segments = self.segments[:rows]
        owners = self.segment_document[: int(segments.max()) + 1]
        generated = None if self.generated is None else self.generated[:rows]
        hashes = self.document_hash[: int(owners.max()) + 1]
        return PackedTokens(self.tokens[:rows], segments, owners, hashes, generated)

    def documents_in(self, rows: slice) -> np.ndarray:
        """Hashes of the documents in some contexts, each once and rising."""
        segments = self.segments[rows]
        return np.unique(self.document_hash[self.segment_document[np.unique(segments[segments >= 0])]])

    def document_groups(self, groups: int) -> np.ndarray:
        """[document] group by token hash; each its own group where there are no more documents than groups."""
        unique, rank = np.unique(self.document_hash, return_inverse=True)
        if len(unique) <= groups:
            return rank.astype(np.int64)
        return (self.document_hash % np.uint64(groups)).astype(np.int64)
