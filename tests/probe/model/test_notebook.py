"""The notebook's objects, as a person uses them: values, views, reprs, and nothing left behind."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import visitlens as vl
from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.core.loop_plan import LoopSpec
from visitlens.hooks.interventions.intervene import intervene
from visitlens.probe.drawing.notebook_html import LinkedMaps, coloured, loop_svg
from visitlens.probe.model.bundled import PAIR
from visitlens.probe.model.model import Model
from visitlens.probe.model.run import Run
from visitlens.probe.reading.recorded_run import RecordedRun

TEXT = "The router picks eight experts for each token, and the second visit keeps most."


@pytest.fixture(scope="module")
def model() -> Model:
    return vl.load()


@pytest.fixture(scope="module")
def run(model: Model) -> Run:
    return model.run(TEXT)


def hooked(model: Model) -> bool:
    return any(point.has_hooks() for point in model.native.hook_dict.values()) or "forward" in model.native.__dict__


def test_a_run_is_continued_under_its_interventions(model: Model, run: Run) -> None:
    changed = run.with_(vl.do.take("V", visit=2), vl.do.scale("K", 1.5, visit=1))
    longer = changed.generate(8)
    ids = run.token_ids
    with torch.no_grad(), intervene(model.native, *changed.interventions):
        for _ in range(8):
            ids = torch.cat([ids, model.native(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(longer.token_ids, ids) and not hooked(model)
    assert not torch.equal(longer.token_ids, run.generate(8).token_ids)
    assert longer.generated == model.tokenizer.decode(ids[0, -8:].tolist())
    assert f"{len(longer.tokens)} tokens (8 generated), " in repr(longer)
    first = run.generate(4).with_(vl.do.zero("attn_write", layer=3, visit=2, token=vl.do.generated(0)))
    assert float(first.site("attn_write", 3, 2)[len(run.tokens)].abs().max()) == 0
    assert float(first.site("attn_write", 3, 2)[len(run.tokens) - 1].abs().max()) > 0
    awaited = run.with_(vl.do.zero("attn_write", layer=3, visit=2, token=vl.do.generated(0)))  # nothing written yet
    assert torch.equal(awaited.generate(4).site("attn_write", 3, 2), first.site("attn_write", 3, 2))
    assert len(awaited.generate(1).tokens) == len(run.tokens) + 1  # the last token is written, not run
    further = awaited.generate(4).generate(2)
    assert (
        further.prompt_length == len(run.tokens)
        and float(further.site("attn_write", 3, 2)[len(run.tokens)].abs().max()) == 0
    )
    assert float(further.site("attn_write", 3, 2)[len(run.tokens) + 4].abs().max()) > 0
    with pytest.raises(InputError, match="every token of this run was given"):
        _ = run.generated
    with pytest.raises(InputError, match="texts of different lengths can't be continued side by side"):
        model.run(["a", "a b c d"]).generate(2)
    with pytest.raises(InputError, match="expected at least 1 new token, got 0"):
        run.generate(0)


def test_load_takes_a_name_or_a_folder_and_no_recording(model: Model, looped_recording: RecordedRun) -> None:
    assert vl.load(PAIR["looped"]).config == model.config and vl.load("baseline").plan.looped_layers == ()
    with pytest.raises(InputError, match=r"visitlens\.open"):
        vl.load(looped_recording.recording.path)
    with pytest.raises(
        CheckpointError, match="nowhere: no such checkpoint folder; bundled models are smelt, baseline, hops"
    ):
        vl.load("nowhere")
    again = vl.load(model.native, tokenizer=model.tokenizer)
    assert again.native is model.native and torch.equal(again.run(TEXT).logits, model.run(TEXT).logits)
    with pytest.raises(InputError, match="expected the model's tokenizer"):
        vl.load(model.native)


def test_a_run_is_the_models_own_forward(model: Model, run: Run) -> None:
    ids = [0, *model.tokenizer.encode(TEXT, add_special_tokens=False).ids]
    logits = model.native(torch.tensor([ids]))[0]
    assert torch.equal(run.logits, logits)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(run.loss, loss)
    with vl.capture(model.native, ["V"]) as captured:
        model.native(torch.tensor([ids]))
    assert torch.equal(run.site("V", layer=5, visit=2), captured.get("V", 5, 2)[0])
    assert torch.equal(model.run(ids).logits, logits) and torch.equal(model.run(np.array(ids)).logits, logits)
    assert "".join(run.tokens) == "<bos>" + TEXT
    (best, share), *_ = run.top(1)
    assert share == pytest.approx(float(logits[-1].softmax(-1).max()))
    assert best == model.tokenizer.decode([int(logits[-1].argmax())])


def test_several_texts_are_documents_of_their_own(model: Model, run: Run) -> None:
    both = model.run(["One two three.", TEXT])
    torch.testing.assert_close(both.logits[1], run.logits, atol=1e-4, rtol=1e-4)
    short = int((both.segment_ids[0] >= 0).sum())
    assert both.loss[0, short - 1 :].isnan().all() and not both.loss[0, : short - 1].isnan().any()
    changed = both.with_(vl.do.resample("attn_write", layer=3))
    assert torch.equal(changed.segment_ids, both.segment_ids) and not torch.equal(changed.logits, both.logits)


def test_interventions_add_up_and_differences_are_after_less_before(model: Model, run: Run) -> None:
    frozen = run.with_(vl.do.take("V"))
    more = frozen.with_(vl.do.zero("PV", layer=6, head=1))
    assert [repr(i) for i in more.interventions] == ["take('V', source=1)", "zero('PV', layer=6, head=1)"]
    assert torch.equal(more.logits, model.run(TEXT, vl.do.take("V"), vl.do.zero("PV", layer=6, head=1)).logits)
    diff = run.diff(frozen)
    torch.testing.assert_close(diff.loss, frozen.loss - run.loss)
    assert float(diff.site("V", 3, 1).abs().max()) == 0 < float(diff.site("V", 3, 2).abs().max())
    assert bool((diff.divergence >= -1e-6).all()) and float(run.diff(run.with_()).divergence.abs().max()) < 1e-6
    with pytest.raises(InputError, match="different tokens"):
        run.diff(model.run("Another text."))


def test_a_run_patches_another(model: Model, run: Run) -> None:
    frozen = model.run(TEXT, vl.do.take("attn_write"), vl.do.take("moe_write"))
    back = frozen.with_(vl.do.replace("resid", run, layer=6))  # the clean stream behind the loop: all is as it was
    torch.testing.assert_close(back.logits, run.logits)
    fresh = model.run(TEXT)
    with pytest.raises(InputError, match="before `intervene` begins"), intervene(model.native, vl.do.zero("V")):
        fresh.site("Q", 3, 1)


def test_another_loop_count(model: Model, run: Run) -> None:
    once = model.with_loops(1, "kept")
    assert torch.equal(once.run(TEXT).logits, run.with_(vl.do.skip(layer=(2, 3, 4, 5), visit=2)).logits)
    assert "1 visit," in repr(once) and torch.equal(model.with_loops(2).run(TEXT).logits, run.logits)


def test_control_c_and_errors_leave_no_hook(model: Model, run: Run) -> None:
    def interrupt(ids: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.with_(vl.do.zero("V", token=interrupt))
    assert not hooked(model)
    with pytest.raises(InputError, match="matched nothing"):
        run.with_(vl.do.zero("V", token=999))
    with pytest.raises(InputError, match="no layer 99"):
        run.with_(vl.do.zero("V", layer=99))
    assert not hooked(model) and torch.equal(model.run(TEXT).logits, run.logits)


def test_what_cannot_be_run_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="token ids must lie"):
        model.run([0, 5_000])
    with pytest.raises(InputError, match="exceed the model's context"):
        model.run("word " * 2000)
    with pytest.raises(InputError, match="at least one"):
        model.run([])
    with pytest.raises(InputError, match="at least one"):
        model.run(torch.zeros(0, dtype=torch.long))
    with pytest.raises(InputError, match="whole token ids"):
        model.run(np.array([1.5]))
    for wrong in (None, 5, b"text", [1.5], [[1, 2]], ["a", 3]):
        with pytest.raises(InputError, match="expected a text, a list of texts or token ids"):
            model.run(wrong)  # type: ignore[arg-type]  # wrong on purpose


# Views


def test_attention_shows_both_visits_and_the_difference(model: Model, run: Run) -> None:
    maps = run.attention(layer=3, head=2)
    assert list(maps.panels) == ["visit 1", "visit 2", "visit 2 - visit 1"]
    first, second, difference = maps.panels.values()
    np.testing.assert_allclose(np.nansum(first, 1), 1, rtol=1e-5)
    np.testing.assert_allclose(second, np.where(np.isnan(second), np.nan, run.site("P", 3, 2)[2].numpy()))
    np.testing.assert_allclose(difference, second - first)
    assert list(run.attention(0, 1).panels) == ["visit 1"]
    for wrong, said in (((3, 9), "head in 0..5"), ((9, 0), "no visit 1 of layer 9")):
        with pytest.raises(InputError, match=said):
            run.attention(*wrong)


def test_experts_show_the_gates_used(model: Model, run: Run) -> None:
    maps = run.experts(layer=4)
    table = maps.panels["visit 2"]
    np.testing.assert_allclose(table.sum(1), 1, rtol=1e-5)
    assert (table > 0).sum(1).tolist() == [8] * len(run.tokens)
    ids = run.site("experts", 4, 2)[5].tolist()
    assert sorted(np.flatnonzero(table[5])) == sorted(ids)


def test_maps_are_html_with_its_data_and_a_picture(run: Run) -> None:
    bundle = run.attention(3, 2)._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    page = bundle["text/html"]
    assert page.count("<img") == 3 and "data:image/png" in page and "http" not in page
    hostile = LinkedMaps("a<b", {"x": np.eye(2)}, ["</script><b>", "1"], ["0", "1"], ("r", "c"))
    assert "</script><b>" not in hostile.to_html() and "a&lt;b" in hostile.to_html()


def test_the_picture_is_a_png_of_the_values() -> None:
    maps = LinkedMaps("m", {"x": np.array([[1.0, -1.0], [0.0, np.nan]])}, ["0", "1"], ["0", "1"], ("r", "c"))
    data = maps.to_png()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20], "big") == 256
    start = data.index(b"IDAT") + 4
    raw = np.frombuffer(zlib.decompress(data[start : data.index(b"IEND") - 8]), np.uint8).reshape(256, 1 + 3 * 256)
    assert (raw[:, 0] == 0).all()
    corners = raw[:, 1:].reshape(256, 256, 3)[[0, 0, -1, -1], [0, -1, 0, -1]].tolist()
    assert corners == [[178, 24, 43], [33, 102, 172], [255, 255, 255], [225, 225, 225]]
    assert coloured(np.array([[0.5]]), 1.0)[0, 0].tolist() == [216, 140, 149]


def test_maps_of_different_shapes_or_too_large_are_refused() -> None:
    with pytest.raises(InputError, match=r"maps of shape \(2, 2\)"):
        LinkedMaps("m", {"x": np.eye(3)}, ["0", "1"], ["0", "1"], ("r", "c"))
    with pytest.raises(InputError, match="to 1024"):
        LinkedMaps("m", {"x": np.zeros((1, 2000))}, ["0"], ["0"] * 2000, ("r", "c"))


# How they read


def test_everything_says_what_it_is(model: Model, run: Run, looped_recording: RecordedRun) -> None:
    assert "layers 2-5 run 2 times" in repr(model) and "unlooped" in repr(vl.load("baseline"))
    assert f"Run({len(run.tokens)} tokens" in repr(run)
    frozen = run.with_(vl.do.take("V"))
    assert "take('V', source=1)" in repr(frozen) and "take('V', source=1): +" in repr(run.diff(frozen))
    assert repr(run.diff(run)).startswith("Difference(nothing: +0.0000")
    assert repr(frozen.diff(run)).startswith("Difference(nothing against take('V', source=1): -")
    assert repr(model.run("")) == "Run(1 token, nothing to predict)"
    assert "<svg" in model._repr_html_() and "2 visits" in model._repr_html_()
    assert run._repr_html_().count("<span") == len(run.tokens)
    assert "nats" in run.diff(frozen)._repr_html_()
    assert "sink_mass" in looped_recording._repr_html_() and "<svg" in looped_recording._repr_html_()
    assert len(run.plot().data[0].y) == len(run.tokens) - 1 and run.diff(frozen).plot().data


def test_a_loop_is_drawn_with_its_visits() -> None:
    assert "3 visits" in loop_svg(LoopSpec(4, range(1, 3), 3).plan()) and "4 layers, 8 steps" in loop_svg(
        LoopSpec(4, range(1, 3), 3).plan()
    )
    assert "visits" not in loop_svg(LoopSpec(4, range(0), 1).plan())


def test_names_complete_on_tab() -> None:
    assert {"run", "experiment", "with_loops", "sample", "dyck"} <= set(dir(Model))
    assert {"site", "diff", "with_", "attention", "experts", "plot", "show", "top"} <= set(dir(Run))
    assert {"take", "zero", "skip", "swap", "replace", "knock_out_sink"} <= set(vl.do.__all__)
    assert {"load", "do", "run_experiment", "intervene", "EvalSet"} <= set(dir(vl))


def test_show_prints_in_a_terminal(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.attention(3, 0).show()
    run.show()
    assert "Attention of layer 3, head 0" in capsys.readouterr().out


def test_an_experiment_from_the_model(model: Model, tmp_path: Path) -> None:
    sample = model.sample(["One document.", "Another document, a bit longer."])
    results = model.experiment("skip_visit", sample)
    assert results.skip_block.documents == 2
    assert "2·1" in results.skip_visit._repr_html_() and "<svg" in results.skip_block.sel(slice="text")._repr_html_()
    assert len(model.dyck(prompts=1, shots=(1,)).prompts) == 1


# Places from the end, and drawn text


def test_minus_1_is_the_last_token_of_each_text(model: Model, run: Run) -> None:
    last = len(run.tokens) - 1
    changed = run.with_(vl.do.zero("attn_write", token=-1))
    assert torch.equal(changed.logits, run.with_(vl.do.zero("attn_write", token=last)).logits)
    moved = (
        (changed.logits - run.logits).abs().amax(-1)
    )  # logits of size 10; experts run in other groups, so others move by rounding
    assert moved[:last].max() < 1e-3 < 0.1 < moved[last]
    several = model.run([TEXT, "Short."])
    short = len(model.run("Short.").tokens) - 1
    there = (
        several.diff(several.with_(vl.do.zero("moe_write", layer=7, token=-1))).site("moe_write", 7).abs().sum(-1) > 0
    )
    assert there.nonzero().tolist() == [[0, last], [1, short]], "padding is no part of a text"
    with pytest.raises(InputError, match="matched nothing"):
        run.with_(vl.do.zero("attn_write", token=-last - 2))


def test_minus_1_is_the_prompts_last_token_of_a_text_that_the_model_writes(model: Model, run: Run) -> None:
    written = run.with_(vl.do.zero("attn_write", token=-1)).generate(3)
    at = vl.do.zero("attn_write", token=len(run.tokens) - 1)
    assert torch.equal(written.logits, model.run(written.token_ids, at).logits)


def test_text_is_drawn_from_a_seed(run: Run) -> None:
    drawn = [run.generate(8, temperature=1.0, top_p=0.95, seed=seed).token_ids for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(run.generate(4, temperature=1.0, top_p=1e-6).token_ids, run.generate(4).token_ids)
    for wrong, message in (
        ({"top_p": 0.5}, "give a temperature above 0"),
        ({"seed": 3}, "give a temperature above 0"),
        ({"temperature": -1.0}, "at least 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p in"),
    ):
        with pytest.raises(InputError, match=message):
            run.generate(2, **wrong)


def test_record_takes_the_options_of_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("A few words to record. " * 20)
    rec = vl.record(PAIR["looped"], tmp_path / "t.txt", tmp_path / "a.vlens", batch=2, groups=4, context_length=32)
    options = rec.recording.run["config"]["options"]
    assert options.get("groups") == 4 and rec.recording.complete
    with pytest.raises(InputError, match="no option 'bacth'; there are activation_tokens, attention, batch, "):
        vl.record(PAIR["looped"], tmp_path / "t.txt", tmp_path / "b.vlens", bacth=2)


# The live probe's trace


def test_a_trace_is_of_the_model_that_the_notebook_holds(model: Model, run: Run) -> None:
    trace = model.trace(TEXT)
    assert trace.token_ids.tolist() == run.token_ids[0].tolist() and trace.texts == run.texts == run.tokens
    np.testing.assert_allclose(
        trace.logits, run.logits.numpy(), rtol=0, atol=1e-3
    )  # logits of size 10, other batches of experts
    assert trace.prompt == TEXT and run.trace.prompt == f"<bos>{TEXT}"
    (token, text, probability), *_ = run.next_tokens(n=3)
    assert (token, text) == trace.next_tokens(n=1)[0][:2] and probability == pytest.approx(
        trace.next_tokens(n=1)[0][2], rel=1e-3
    )
    assert run.top(1) == [(text, probability)]
    ablated = model.ablate(trace, 4, 2, (2,))
    assert ablated.kl() > 0 and trace.model["weights_sha256"] == model.weights_sha256 is not None
    with pytest.raises(InputError, match="not of this model"):
        vl.load("baseline").ablate(trace, 4, 2, (1,))
    with pytest.raises(InputError, match="of the model as it is"):
        _ = run.with_(vl.do.zero("attn_write", layer=4)).trace


def test_the_older_name_of_a_model_to_trace_still_works() -> None:
    from visitlens.probe.live.live_model import LiveModel

    with pytest.warns(DeprecationWarning, match=r"LiveModel is visitlens\.load\(\.\.\.\) now, and its run is trace"):
        live = LiveModel.load(PAIR["looped"], limit=16)
    assert live.run("A few words").texts[0] == "<bos>" and live.limit == 16
