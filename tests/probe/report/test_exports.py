"""Exports hold what the recording says, in each format, and come back by the readers that people use."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from visitlens.errors import InputError, RecordingError
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.report.export import choose, write


@pytest.fixture(scope="module")
def vectors(make_model, make_text, make_recording, tmp_path_factory) -> RecordedRun:
    """bfloat16, with activations of tokens 30 to 95."""
    options = {
        "level": "activations",
        "sites": ("Q", "resid"),
        "activation_tokens": (30, 95),
        "measures": ("sink_mass",),
    }
    path = tmp_path_factory.mktemp("vectors") / "r.vlens"
    return make_recording(make_model(2, dtype=torch.bfloat16), make_text(seed=6), path, shard_tokens=60, **options)


def test_a_statistic_in_every_format(looped_recording: RecordedRun, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet is optional")
    stat = looped_recording.sink_mass()
    low, _ = stat.interval()
    exported = choose(looped_recording, "sink_mass")
    files = {
        suffix: write(exported, tmp_path / f"s{suffix}") for suffix in (".parquet", ".csv", ".npz", ".safetensors")
    }
    table = pq.read_table(files[".parquet"])
    assert table.column_names == ["step", "head", "value", "low", "high", "n"]
    np.testing.assert_array_equal(table["value"].to_numpy().reshape(stat.values.shape), stat.values)
    about = json.loads(table.schema.metadata[b"visitlens"])
    assert (
        about["measure"]["unit"] == "share of mass" and about["recording"] == looped_recording.provenance["recording"]
    )
    with files[".csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert (rows[5]["step"], rows[5]["head"]) == ("1·1", "1") and len(rows) == stat.values.size
    np.testing.assert_array_equal([float(row["low"]) for row in rows], low.ravel())
    with np.load(files[".npz"]) as arrays:
        np.testing.assert_array_equal(arrays["value"], stat.values)
        assert arrays["axes"].tolist() == ["step", "head"] and arrays["axis_step"][3] == "1·2"
    np.testing.assert_array_equal(load_file(files[".safetensors"])["value"].numpy(), stat.values)


def test_activations_of_a_head_and_tokens_keep_their_bits(vectors: RecordedRun, tmp_path: Path) -> None:
    whole = vectors.recording.activation("Q", 2, 2)
    exported = choose(vectors, "Q", layer=2, visit=2, head=1, tokens=(40, 80))
    file = write(exported, tmp_path / "q.safetensors")
    tensor = load_file(file)["Q"]
    assert tensor.dtype == torch.bfloat16 and tensor.shape == (40, 4)
    np.testing.assert_array_equal(tensor.float().numpy(), whole[10:50, 1])
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["axes"] == "token,d"
        assert json.loads(opened.metadata()["labels"])["token"][0] == "40"
    with write(exported, tmp_path / "q.csv").open() as lines:
        first = next(csv.DictReader(lines))
    assert first["token"] == "40" and float(first["Q_2"]) == whole[10, 1, 2]
    everything = choose(vectors, "resid", layer=0, visit=1)
    assert everything.labels["token"][0] == "30" and everything.arrays["resid"].shape == (65, 16)


def test_tokens_experts_and_per_token_values(looped_recording: RecordedRun, tmp_path: Path) -> None:
    recording = looped_recording.recording
    with np.load(write(choose(looped_recording, "tokens", tokens=(5, 9)), tmp_path / "t.npz")) as arrays:
        np.testing.assert_array_equal(arrays["id"], recording.token_table()["id"][5:9])
    ids, gates = recording.experts(1, 2)
    exported = choose(looped_recording, "experts", layer=1, visit=2, tokens=(3, 8))
    np.testing.assert_array_equal(exported.arrays["experts"], ids[3:8])
    np.testing.assert_array_equal(exported.arrays["gates"], gates[3:8])
    per_token = choose(looped_recording, "sink_mass", per_token=True, tokens=(3, 8))
    assert per_token.axes == ("step", "token", "head") and per_token.labels["token"] == list("34567")
    np.testing.assert_array_equal(per_token.arrays["sink_mass"], recording.token_stat("sink_mass")[:, 3:8])
    with write(per_token, tmp_path / "p.csv").open() as lines:
        assert len(list(lines)) == 1 + 6 * 5 * 4


@pytest.mark.parametrize("name", ["expert_overlap", "load_imbalance", "norm_ratio", "update_cosine_other_layers"])
def test_derived_statistics_too(name: str, looped_recording: RecordedRun, tmp_path: Path) -> None:
    stat = getattr(looped_recording, name)()
    exported = choose(looped_recording, name)
    np.testing.assert_array_equal(exported.arrays["value"], stat.values)
    write(exported, tmp_path / "d.csv")


def test_what_is_not_there_is_refused(vectors: RecordedRun, looped_recording: RecordedRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing of the name 'sink'; there are tokens, experts"):
        choose(looped_recording, "sink")
    with pytest.raises(InputError, match="name a layer and a visit"):
        choose(vectors, "Q")
    with pytest.raises(RecordingError, match="wasn't recorded"):
        choose(vectors, "K", layer=1, visit=1)
    with pytest.raises(InputError, match=r"head of Q in 0\.\.3, got 4"):
        choose(vectors, "Q", layer=1, visit=1, head=4)
    with pytest.raises(InputError, match="has no heads"):
        choose(vectors, "resid", layer=1, visit=1, head=0)
    with pytest.raises(InputError, match="for tokens 0:20"):
        choose(vectors, "Q", layer=1, visit=1, tokens=(0, 20))
    with pytest.raises(InputError, match=r"ends in \.parquet"):
        write(choose(looped_recording, "sink_mass"), tmp_path / "s.xlsx")
