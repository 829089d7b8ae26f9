"""Tasks cover exactly what is left, whatever is there already and however many workers there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visitlens.errors import RecordingError
from visitlens.hooks.recording.write.ledger import Ledger, Shard


def shard(ledger: Ledger, worker: int, seq: int, start: int, stop: int) -> Shard:
    first = ledger.first_token
    numbers = {"worker": worker, "seq": seq, "context_start": start, "context_count": stop - start}
    numbers |= {"token_start": int(first[start]), "token_count": int(first[stop] - first[start])}
    return Shard({"name": f"w{worker:02d}-{seq:06d}.h5", "bytes": 1, "sha256": "", **numbers}, {}, {})


@given(
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    batch=st.integers(1, 4),
    shard_tokens=st.integers(1, 40),
    workers=st.integers(1, 4),
    done=st.sets(st.integers(0, 9)),
)
def test_tasks_cover_every_context_once(tokens, batch, shard_tokens, workers, done) -> None:
    ledger = Ledger(Path("unused"), {}, np.array(tokens), batch)
    for seq, part in enumerate(sorted(done)):
        start, stop = part * batch, min((part + 1) * batch, len(tokens))
        if start < len(tokens):
            ledger.take(shard(ledger, 1, seq, start, stop))
    held = [c for s in ledger.shards for c in range(s["context_start"], s["context_start"] + s["context_count"])]
    tasks = list(ledger.tasks(shard_tokens, workers))
    made = [context for task in tasks for context in range(task.start, task.stop)]
    assert sorted(made + held) == list(range(len(tokens)))
    assert made == sorted(made)
    assert len({task.name for task in tasks} | {s["name"] for s in ledger.shards}) == len(tasks) + len(ledger.shards)
    assert {task.worker for task in tasks} <= set(range(workers))
    for task in tasks:
        assert task.start % batch == 0 and task.token_start == sum(tokens[: task.start])
        spans = [sum(tokens[task.start : end]) for end in range(task.start + batch, task.stop, batch)]
        assert all(span < shard_tokens for span in spans)  # no task goes on beyond what was asked for
    for task in tasks:
        ledger.take(shard(ledger, task.worker, task.seq, task.start, task.stop))
    assert ledger.tokens == sum(tokens) and not list(ledger.gaps())


def test_a_shard_out_of_place_or_twice_is_refused() -> None:
    ledger = Ledger(Path("r"), {}, np.array([5, 5, 5, 5]), 2)
    ledger.take(shard(ledger, 0, 0, 0, 2))
    with pytest.raises(RecordingError, match="hold the same tokens"):
        Ledger.take(ledger, shard(ledger, 1, 0, 0, 2))
    with pytest.raises(RecordingError, match="other tokens than its contexts have"):
        Ledger(Path("r"), {}, np.array([5, 5, 5, 5]), 2).take(shard(ledger, 0, 0, 1, 3))
    with pytest.raises(RecordingError, match="other tokens than its contexts have"):
        Ledger(Path("r"), {}, np.array([5, 5, 6, 5]), 2).take(shard(ledger, 0, 0, 2, 4))
