"""Whether a recording is whole, what lies in a folder, and a crash on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.text.packed_tokens import PackedTokens


def assert_whole(rec: Recording, unbroken: Recording, text: PackedTokens) -> None:
    """Complete, every token once and in order, totals to 1e-12 those of the unbroken recording."""
    assert rec.complete and rec.tokens == text.num_tokens
    np.testing.assert_array_equal(rec.token_table()["id"], text.tokens[text.segments >= 0])
    np.testing.assert_array_equal(rec.token_table()["segment"], text.segments[text.segments >= 0])
    assert rec.totals.keys() == unbroken.totals.keys()
    for name, expected in unbroken.totals.items():
        got = rec.totals[name]
        np.testing.assert_array_equal(got.count, expected.count, err_msg=name)
        np.testing.assert_array_equal(got.left_out, expected.left_out, err_msg=name)
        np.testing.assert_allclose(got.total, expected.total, rtol=1e-12, atol=1e-12, err_msg=name)
    assert not leftovers(rec.path)


def leftovers(path: Path) -> list[Path]:
    return list(path.rglob("*.tmp"))


def contents(path: Path) -> dict[str, str]:
    """Every file but locks, by hash; one that a writer renames meanwhile is left out."""
    found = {}
    for file in sorted(path.rglob("*")):
        with suppress(FileNotFoundError):
            if file.is_file() and file.suffix != ".lock":
                found[str(file.relative_to(path))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


class Crash(Exception):
    pass


def crash_after(contexts: int) -> Callable[[int, int], None]:
    calls = []

    def on_progress(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == contexts:
            raise Crash

    return on_progress
