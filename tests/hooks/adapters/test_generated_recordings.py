"""Recordings of what a model writes: (generated token, visit) labels, prompts and generated tokens told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import visitlens as vl
from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.generation import generate
from visitlens.hooks.loading.load_model import load_model
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.probe.jobs.continue_prompts import continue_prompts
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry
from visitlens.probe.reading.recorded_run import RecordedRun

Run = Callable[..., tuple[int, str, str]]
PROMPTS = [
    np.array([0, 5, 9, 14, 7], np.int32),
    np.array([0, 8, 4], np.int32),
    np.array([0, 30, 11, 40, 22, 6, 9], np.int32),
]


def recorded(model: Any, text: Any, out: Path, **options: Any) -> RecordedRun:
    geometry = Geometry.of(model.plan, model.config.to_dict())
    collector = StatisticsCollector(geometry, 3, written=text.generated is not None)
    chosen = RecordingOptions(**{"level": "tokens", "batch": 2, **options})
    record(model, text, out, collector, chosen, provenance={}, attention_implementation="torch")
    return vl.open(out)


@pytest.mark.parametrize("name", ["native", "dory", "gpt_oss", "inkling2_loop_text", "zamba"])
def test_what_is_recorded_of_a_cached_generation_is_one_forward_over_the_text(
    name: str, make_model: Callable[..., Any], adapted: Callable[..., Any], tmp_path: Path
) -> None:
    """Every per-token value, expert and sum, at every (token, visit)."""
    model = make_model(2, dtype=torch.float64) if name == "native" else adapted(name)
    text = continue_prompts(model, PROMPTS, 6, 64)
    assert text.generated is not None and int(text.generated.max()) == 6
    cached = recorded(model, text, tmp_path / "cached.vlens")
    whole = recorded(model, replace(text, generated=None), tmp_path / "whole.vlens")
    table = cached.recording.token_table()
    for segment, prompt in enumerate(PROMPTS):  # one may end early, with EOS
        labels = table["generated"][table["segment"] == segment].tolist()
        assert labels == [*[0] * len(prompt), *range(1, len(labels) - len(prompt) + 1)] and len(labels) > len(prompt)
    assert set(table) == {"id", "segment", "pos", "generated"} and set(whole.recording.token_table()) == {
        "id",
        "segment",
        "pos",
    }
    near = {"atol": 2e-4, "rtol": 2e-3}
    for measure in cached.measures:
        np.testing.assert_allclose(cached.stat(measure).values, whole.stat(measure).values, **near, err_msg=measure)
        written, read = cached.phase("decode").stat(measure), cached.phase("prefill").stat(measure)
        counts = [x.counts for x in (cached.stat(measure), written, read)]
        assert all(c is not None for c in counts)
        np.testing.assert_array_equal(counts[0], counts[1] + counts[2])  # type: ignore[operator]  # as said
    shards = cached.recording.contents()
    for measure in (n.removeprefix("stats/") for n in shards if n.startswith("stats/")):
        values = [run.recording.token_stat(measure) for run in (cached, whole)]
        np.testing.assert_allclose(*values, **near, err_msg=measure)
        # A phase's mean is that of its tokens.
        decode = values[0][:, table["generated"] > 0]
        np.testing.assert_allclose(
            cached.phase("decode").stat(measure).values, _mean(decode), atol=1e-5, rtol=1e-4, err_msg=measure
        )
        prefill = values[0][:, table["generated"] == 0]
        np.testing.assert_allclose(
            cached.phase("prefill").stat(measure).values, _mean(prefill), atol=1e-5, rtol=1e-4, err_msg=measure
        )
    assert (cached.phase("decode").tokens, cached.phase("prefill").tokens) == (int((table["generated"] > 0).sum()), 15)
    if "expert_load" in cached.measures:
        layer = model.plan.looped_layers[0] if model.plan.looped_layers else 1
        np.testing.assert_array_equal(cached.recording.experts(layer, 1)[0], whole.recording.experts(layer, 1)[0])


def _mean(values: np.ndarray) -> np.ndarray:
    """Over tokens, [step or pair, token, ...], of those that aren't left out."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0).sum(1, dtype=np.float64) / known.sum(1)


def test_the_command_records_what_a_model_writes(make_model: Callable[..., Any], tmp_path: Path, run: Run) -> None:
    model = make_model(2)
    save_model(model, tmp_path / "model")
    vocabulary = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 61)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]  # as the library wants it
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "prompts.jsonl").write_text('{"text": "w5 w9 w14 w7"}\n{"text": "w8 w4"}\n')
    arguments = (tmp_path / "model", tmp_path / "prompts.jsonl", "--generate", 5)
    out = tmp_path / "g.vlens"
    code, _, err = run("record", *arguments, "--out", out, "--level", "activations", "--sites", "Q", "--batch", 2)
    assert code == 0, err
    rec = vl.open(out)
    expected = [generate(model, torch.tensor([p]), 5, stop=1)[0].tolist() for p in ([0, 5, 9, 14, 7], [0, 8, 4])]
    written = [token for text in expected for token in text]
    assert rec.recording.token_table()["id"].tolist() == written
    assert rec.recording.activation("Q", 1, 2).shape == (len(written), 4, 4)
    assert rec.phase("decode").sink_mass().counts is not None and "decode alone" in repr(rec.phase("decode"))
    assert run("validate", out)[0] == 0 and run("repair", out)[0] == 0 and run("validate", out)[0] == 0
    code, _, _ = run("export", out, "tokens", "-o", tmp_path / "t.csv")
    assert code == 0 and (tmp_path / "t.csv").read_text().splitlines()[0] == "token,id,segment,pos,generated"
    code, _, err = run("record", *arguments, "--out", out, "--level", "activations", "--sites", "Q", "--batch", 2)
    assert code == 0, "a finished recording is left alone"
    code, _, err = run("record", *arguments, "--out", tmp_path / "m.vlens", "--level", "maps")
    assert code == 0, err
    saved = load_model(tmp_path / "model")  # in half precision
    with capture(saved, ["P"]) as captured:
        saved(torch.tensor([expected[0]]), return_type="none")
    kept = vl.open(tmp_path / "m.vlens").recording.attention_maps(1, 2, context=0)
    n = len(expected[0])
    np.testing.assert_allclose(kept[:, :n, :n], captured.get("P", 1, 2)[0].numpy(), atol=2e-3)
    code, _, err = run(
        "record", tmp_path / "model", tmp_path / "prompts.jsonl", "--generate", 100, "-o", tmp_path / "n"
    )
    assert code == 1 and "a prompt of 5 tokens and 100 more exceed the context of 64" in err


def test_the_command_draws_tokens_and_keeps_how(
    make_hf: Callable[..., Any], save_tokenizer: Callable[[Path], None], tmp_path: Path, run: Run
) -> None:
    make_hf("dory").save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"text": "w5 w9 w14 w7"}\n{"text": "w8 w4"}\n')
    (tmp_path / "one.jsonl").write_text('{"text": "w5 w9 w14 w7"}\n')
    drawn = ("--generate", 8, "--temperature", 2, "--top-p", 0.9, "--level", "tokens", "--no-checks")

    def ids(name: str, text: str, *arguments: object) -> list[int]:
        code, _, err = run("record", tmp_path / "model", tmp_path / text, *arguments, "--out", tmp_path / name)
        assert code == 0, err
        return vl.open(tmp_path / name).recording.token_table()["id"].tolist()

    first, again, other = (ids(f"{n}.vlens", "prompts.jsonl", *drawn, "--seed", s) for n, s in enumerate((3, 3, 4)))
    assert first == again != other
    alone = ids("alone.vlens", "one.jsonl", *drawn, "--seed", 3)
    assert first[: len(alone)] == alone, "a prompt's tokens don't depend on the other prompts"
    provenance = vl.open(tmp_path / "0.vlens").recording.provenance
    assert provenance["generation"] == {"new_tokens": 8, "temperature": 2.0, "top_p": 0.9, "seed": 3}
    assert provenance["seed"] == 3
    code, out, _ = run("info", tmp_path / "0.vlens")
    assert code == 0 and "up to 8 tokens a prompt, drawn at temperature 2.0, top_p 0.9, seed 3" in out
    rec = vl.record(
        tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "n.vlens", level="tokens", generate=8, seed=3, checks=False,
        temperature=2.0, top_p=0.9,
    )  # fmt: skip
    assert rec.recording.token_table()["id"].tolist() == first
    for arguments, said in (
        (("--generate", 8, "--top-p", 0.9), "top_p 0.9 is of sampling"),
        (("--temperature", 1), "say how many tokens to generate"),
        (("--generate", 8, "--seed", 1), "give a temperature above 0"),
        (("--generate", 8, "--temperature", 1, "--top-p", 0), "expected top_p in"),
    ):
        code, _, err = run("record", tmp_path / "model", tmp_path / "one.jsonl", *arguments, "-o", tmp_path / "x")
        assert code == 1 and said in err.replace("\n", " ")


def test_what_cannot_be_generated_is_refused(
    make_model: Callable[..., Any], make_hf: Callable[..., Any], looped_recording: RecordedRun
) -> None:
    with pytest.raises(InputError, match="albert returns no cache"):
        continue_prompts(adapt(make_hf("albert")), PROMPTS, 2, 64)
    with pytest.raises(PlanError, match=r"cached generation isn't the full forward: .* may share keys between visits"):
        continue_prompts(adapt(make_hf("dory", recurrent_kv_cache_mode="last_loop")), PROMPTS, 6, 64)
    with pytest.raises(InputError, match="no prompt has a token"):
        continue_prompts(make_model(2), [], 2, 64)
    with pytest.raises(InputError, match=r"expected a phase among prefill, decode .*, whose texts weren't generated"):
        looped_recording.phase("decode")
