"""Near copies count as one document, whatever comes after them; documents that share a part don't."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.hooks.text.documents import pack
from visitlens.hooks.text.near_copies import without_near_copies
from visitlens.hooks.text.packed_tokens import document_hashes


def text(seed: int, length: int = 600) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 5000, length).astype(np.int32)


def changed(document: np.ndarray, every: int) -> np.ndarray:
    """One token in so many is another."""
    other = document.copy()
    other[::every] += 1
    return other


def test_a_copy_with_a_changed_header_or_a_typo_is_the_first_one() -> None:
    first = text(0)
    documents = [text(1), first, np.concatenate([text(2, 12), first]), changed(first, 300), first.copy()]
    hashes = document_hashes(documents)
    assert without_near_copies(documents, hashes).tolist() == [hashes[0], *[hashes[1]] * 4]


@pytest.mark.parametrize("every", [4, 16])
def test_documents_that_share_less_are_their_own(every: int) -> None:
    documents = [text(0), changed(text(0), every), np.concatenate([text(0)[:300], text(3)])]
    hashes = document_hashes(documents)
    np.testing.assert_array_equal(without_near_copies(documents, hashes), hashes)


def test_short_documents_are_copies_only_if_identical() -> None:
    documents = [text(0, 12), changed(text(0, 12), 12), text(0, 12)]
    hashes = document_hashes(documents)
    assert without_near_copies(documents, hashes).tolist() == [hashes[0], hashes[1], hashes[0]]


def test_more_text_changes_no_earlier_document() -> None:
    documents = [text(seed) for seed in range(20)]
    documents += [changed(documents[n], 200) for n in range(10)]
    hashes = document_hashes(documents)
    whole = without_near_copies(documents, hashes)
    assert len(np.unique(whole)) == 20
    np.testing.assert_array_equal(without_near_copies(documents[:25], hashes[:25]), whole[:25])


def test_near_copies_are_one_group_of_documents() -> None:
    documents = [np.concatenate([[1], text(seed), [2]]).astype(np.int32) for seed in (0, 1)]
    documents.append(np.concatenate([[1], changed(text(0), 250), [2]]).astype(np.int32))
    packed = pack(documents, 128, 1, 0, near_copies=True)
    groups = packed.document_groups(128)
    assert groups[0] == groups[2] != groups[1] and len(packed.document_hash) == 3
    assert len(np.unique(pack(documents, 128, 1, 0).document_groups(128))) == 3
