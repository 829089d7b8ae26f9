"""A recording to break: its model, its text, and the same made without a break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.reading.recorded_run import RecordedRun

MakeRecording = Callable[..., RecordedRun]
SHARD_TOKENS = 60  # two contexts of 32
MEASURES = ("resid_rms", "sink_mass", "expert_transitions")  # writing all of them would be most of the time


@pytest.fixture(scope="module")
def unbroken(model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path_factory) -> Recording:
    folder = tmp_path_factory.mktemp("unbroken")
    return make_recording(model, text, folder / "r.vlens", shard_tokens=SHARD_TOKENS, measures=MEASURES).recording


@pytest.fixture
def resume(model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording) -> Callable[..., Recording]:
    def again(path: Path, **options) -> Recording:
        return make_recording(
            model, options.pop("text", text), path, **{"shard_tokens": SHARD_TOKENS, "measures": MEASURES, **options}
        ).recording

    return again
