"""Maps made from recorded Q and K against the maps that the recorder stores of the same model and text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from visitlens.errors import RecordingError
from visitlens.probe.reading.attention_from_qk import attention_from_qk, holds_qk
from visitlens.probe.reading.recorded_run import RecordedRun

LENGTHS = (24, 16, 40, 13, 27)
"""Three contexts of 40 tokens, exactly filled."""
BOUNDS = ((0, 24), (24, 40), (40, 80), (80, 93), (93, 120))


@pytest.fixture(scope="module")
def runs(
    make_model: Callable[..., Any],
    make_text: Callable[..., Any],
    make_recording: Callable[..., RecordedRun],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, RecordedRun]:
    """One model (2 key/value heads for 4 heads) and text at both levels."""
    model, text = make_model(2), make_text(seed=5, lengths=LENGTHS, context=40)
    root = tmp_path_factory.mktemp("levels")
    return {
        "maps": make_recording(model, text, root / "maps.vlens", level="maps"),
        "qk": make_recording(model, text, root / "qk.vlens", level="activations", sites=("Q", "K")),
    }


def test_maps_are_those_that_would_have_been_stored(runs: dict[str, RecordedRun]) -> None:
    stored = runs["maps"].recording.attention_maps(2, 2)
    assert len(stored) == 3
    for start, stop in BOUNDS:
        context, at = divmod(start, 40)
        for head in range(4):
            made = attention_from_qk(runs["qk"], 2, 2, head, (start, stop))
            inside = slice(at, at + stop - start)
            np.testing.assert_allclose(made, stored[context, head, inside, inside], atol=2e-3)
            assert not np.triu(made, 1).any()


def test_some_queries_alone_are_those_rows(runs: dict[str, RecordedRun]) -> None:
    whole = attention_from_qk(runs["qk"], 1, 2, 3, (40, 80))
    for rows in ((0, 1), (9, 12), (39, 40)):
        part = attention_from_qk(runs["qk"], 1, 2, 3, (40, 80), rows)
        np.testing.assert_allclose(part, whole[slice(*rows)], atol=1e-6)


def test_what_is_no_plain_softmax_of_q_and_k_is_refused(
    runs: dict[str, RecordedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs["qk"]
    plain = run.recording.activation
    monkeypatch.setattr(run.recording, "activation", lambda *a, **k: 30 * plain(*a, **k))  # another temperature
    with pytest.raises(RecordingError, match=r"layer 1, head 0 isn't the plain softmax .* --level maps"):
        attention_from_qk(run, 1, 1, 0, (40, 80))


def test_who_holds_q_and_k(runs: dict[str, RecordedRun], looped_recording: RecordedRun, tmp_path: Path) -> None:
    assert holds_qk(runs["qk"]) and not holds_qk(runs["maps"]) and not holds_qk(looped_recording)
    with pytest.raises(RecordingError, match="record again with --level activations --sites Q"):
        attention_from_qk(looped_recording, 1, 1, 0, (0, 4))
