"""Document boundaries along the flat token axis."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from visitlens.kernels.segments import Segments


def test_a_segment_begins_where_the_id_changes_or_a_context_begins() -> None:
    ids = torch.tensor([[0, 0, 1, 2], [2, 2, 3, -1]])  # document 2 goes on in the second context: a new segment
    segments = Segments.from_ids(ids)
    assert segments.spans == ((0, 2), (2, 3), (3, 4), (4, 6), (6, 7), (7, 8))
    assert segments.starts().tolist() == [0, 0, 2, 3, 4, 4, 6, 7]
    assert segments.positions().tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert segments.num_tokens == 8


def test_whole_contexts_are_one_segment_each() -> None:
    assert Segments.whole_contexts(3, 5).bounds == (0, 5, 10, 15)
    assert Segments.whole_contexts(1, 1).spans == ((0, 1),)


@given(st.integers(1, 4), st.integers(1, 7), st.data())
def test_segments_agree_with_a_walk_over_the_tokens(contexts: int, length: int, data: st.DataObject) -> None:
    ids = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(-1, 2), min_size=length, max_size=length), min_size=contexts, max_size=contexts
            )
        )
    )
    starts = []
    for row in range(contexts):
        for at in range(length):
            new = at == 0 or ids[row, at] != ids[row, at - 1]
            starts.append(row * length + at if new else starts[-1])
    segments = Segments.from_ids(ids)
    assert segments.starts().tolist() == starts
    assert segments.positions().tolist() == [i - start for i, start in enumerate(starts)]
    assert [*sorted(set(starts)), contexts * length] == list(segments.bounds)
