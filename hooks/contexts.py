"""Packed text as a model takes it: contexts of equal length that hold whole or split documents. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from visitlens.kernels.errors import InputError


@dataclass(frozen=True)
class PackedTokens:
    """Contexts of equal length.

    `tokens [context, position]` i4, `segments [context, position]` i4 (rising over the whole sample, -1 = padding),
    `segment_document [segment]` i4, `document_hash [document]` u8: the first 8 bytes of the SHA-256 of its token ids.
    """

    tokens: np.ndarray
    segments: np.ndarray
    segment_document: np.ndarray
    document_hash: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments >= 0).sum())

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for array in (self.tokens, self.segments, self.segment_document):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def first_contexts(self, tokens: int) -> PackedTokens:
        """The contexts up to the one in which token number `tokens` falls."""
        if tokens < 1:
            raise InputError(f"expected at least 1 token, got {tokens}")
        rows = int(np.searchsorted(np.cumsum((self.segments >= 0).sum(1)), tokens)) + 1
        segments = self.segments[:rows]
        owners = self.segment_document[: int(segments.max()) + 1]
        return PackedTokens(self.tokens[:rows], segments, owners, self.document_hash[: int(owners.max()) + 1])

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
