"""The notebook's calls, used wrongly: one clear error each, and no hook left behind."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import visitlens as vl
from visitlens.errors import InputError
from visitlens.hooks.adapters.cache import Cache
from visitlens.hooks.loading.load_model import load_model
from visitlens.probe.model.model import Model
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.reading.specialisation import expert_specialisation

do = vl.do
TOKENS = torch.arange(3, 13).unsqueeze(0)


@pytest.fixture(scope="module")
def model() -> Any:
    return vl.load()


@pytest.fixture(scope="module")
def run(model: Any) -> Any:
    return model.run("Input: ( [ {\nOutput: } ] )")


def untouched(model: Any) -> bool:
    native = model.native
    hooked = any(point.has_hooks() for point in native.hook_dict.values()) or any(
        m._forward_hooks for m in native.modules()
    )
    return not hooked and not {"forward", "run_steps"} & set(native.__dict__)


def intervened(model: Any, *chain: Any) -> torch.Tensor:
    with vl.intervene(model.native, *chain):
        return model.native(TOKENS)


CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "layer as text": (lambda m, r: do.zero("PV", layer="3"), "expected an integer, several, or None for all, got '3'"),
    "layer as truth": (lambda m, r: do.zero("PV", layer=True), "expected an integer"),
    "layer as fraction": (lambda m, r: do.zero("PV", layer=[2.5]), "expected an integer"),
    "negative head": (lambda m, r: intervened(m, do.zero("PV", head=-1)), r"expected a head in 0\.\.5, got -1"),
    "token as fraction": (lambda m, r: intervened(m, do.zero("PV", token=2.5)), "expected an integer"),
    "scale by text": (lambda m, r: do.scale("Q", "a"), "scale: expected a number or a tensor, got 'a'"),
    "add nothing": (lambda m, r: do.add("Q", None), "add: expected a number or a tensor, got None"),
    "add complex": (lambda m, r: do.add("Q", 1j), "expected a number or a tensor, got 1j"),
    "add another width": (
        lambda m, r: intervened(m, do.add("attn_write", torch.ones(3))),
        r"expected a value that fits \(1, 10, 88\) at step 0",
    ),
    "replace by text": (lambda m, r: do.replace("Q", "x"), "a capture or a run to replace 'Q' by: expected a number"),
    "expert too far": (
        lambda m, r: intervened(m, do.replace("experts", 999)),
        r"replace\('experts', 999\): expected experts in 0\.\.95, got 999\.\.999",
    ),
    "mean over a number": (
        lambda m, r: do.mean("PV", over=3),
        "expected the means of a sample, from site_means, got 3",
    ),
    "no direction": (lambda m, r: do.project_out("Q", torch.zeros(0, 4)), "expected finite directions"),
    "source as text": (lambda m, r: do.take("V", source="1"), "expected the number of a visit to take from"),
    "source 0": (lambda m, r: do.take("V", source=0), "counted from 1, got 0"),
    "swap one": (lambda m, r: do.swap("V", 2), "expected two different visits to swap, got 2"),
    "intervene on the wrapper": (lambda m, r: vl.intervene(m, do.zero("Q")).__enter__(), "got Model: give its .native"),
    "capture the wrapper": (lambda m, r: vl.capture(m, ["Q"]).__enter__(), "got Model: give its .native"),
    "capture of a layer": (
        lambda m, r: vl.capture(torch.nn.Linear(2, 2), ["Q"]).__enter__(),
        r"got Linear: give visitlens\.adapt\(model\)",
    ),
    "no sites": (
        lambda m, r: vl.capture(m.native, None).__enter__(),
        r"expected names of sites, such as \['Q', 'PV'\]",
    ),
    "no checkpoint": (lambda m, r: load_model(None), "expected a checkpoint folder or a hub name, got None"),
    "no such device": (lambda m, r: vl.load(device="tpu9"), "expected a device of this machine, .* got 'tpu9'"),
    "truths as ids": (lambda m, r: m.run([True]), "expected a text, a list of texts or token ids"),
    "three axes": (lambda m, r: m.run(torch.zeros(2, 2, 2, dtype=torch.long)), r"\[position\] or \[text, position\]"),
    "loops as text": (lambda m, r: m.with_loops("2"), "expected at least 1 visit, a whole number, got '2'"),
    "sample of nothing": (lambda m, r: m.sample(None), "expected a file, a folder or several texts, got None"),
    "sample of numbers": (lambda m, r: m.sample([1]), "expected a file, a folder or several texts, got 1"),
    "experiment on text": (lambda m, r: m.experiment("nulls", "text"), r"expected an EvalSet \(model\.sample\(\), "),
    "experiment on nothing": (
        lambda m, r: vl.run_experiment("nulls", None, m.dyck(1, (1,))),
        "adapted model, got NoneType",
    ),
    "difference to nothing": (lambda m, r: r.diff(None), "expected another run of the same text, got None"),
    "head as text": (lambda m, r: r.attention(3, "a"), r"expected a head in 0\.\.5, got 'a'"),
    "three visits": (lambda m, r: r.attention(3, 0, (1, 2, 1)), "expected one visit or two to compare"),
    "no next token": (
        lambda m, r: r.top(0),
        "expected 1 to 4096 next tokens after a position among 20, got 0 after -1",
    ),
    "no such position": (lambda m, r: r.top(3, 999), "got 3 after 999"),
    "tokens as text": (lambda m, r: r.generate("a"), "expected at least 1 new token, got 'a'"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_a_wrong_argument_is_one_clear_error(
    call: Callable[[Any, Any], Any], message: str, model: Any, run: Any
) -> None:
    with pytest.raises(InputError, match=message):
        call(model, run)
    assert untouched(model)


def test_numbers_and_arrays_of_numpy_do_as_well(model: Any) -> None:
    for ours, theirs in (
        (do.zero("PV", layer=3, head=[1, 2]), do.zero("PV", layer=np.int64(3), head=np.array([1, 2]))),
        (do.zero("PV", token=[1, 2]), do.zero("PV", token=np.array([1, 2]))),
        (do.zero("PV", token=[4]), do.zero("PV", token=np.arange(10)[None] == 4)),
        (do.add("attn_write", torch.ones(88)), do.add("attn_write", np.ones(88))),
        (do.replace("attn_write", 0.5), do.replace("attn_write", np.float32(0.5))),
    ):
        assert torch.equal(intervened(model, ours), intervened(model, theirs))
    with vl.capture(model.native, "PV") as one:  # a name, not its letters
        model.native(TOKENS)
    assert one.sites == ("PV",)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit, InputError])
def test_whatever_ends_it_no_hook_stays(error: type[BaseException], model: Any) -> None:
    plain = model.native(TOKENS)

    def inside(now: bool) -> None:
        with vl.intervene(model.native, do.take("V", visit=2)), vl.capture(model.native, ["Q"]):
            with vl.intervene(model.native, do.zero("P", head=1)):
                model.native(TOKENS)
                if now:
                    raise error("stop")
            raise error("stop")

    def stop(value: torch.Tensor, hook: Any) -> None:
        raise error("stop")

    def in_the_forward() -> None:
        with (
            model.native.hooks([("blocks.3.visit.2.attn.hook_z", stop)]),
            vl.intervene(model.native, do.scale("K", 2.0)),
        ):
            model.native(TOKENS)

    for ended in (lambda: inside(True), lambda: inside(False), in_the_forward):
        with pytest.raises(error, match="stop"):
            ended()
        assert untouched(model) and torch.equal(model.native(TOKENS), plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_run_shown_and_left_alone_by_identities(dtype: str) -> None:
    model = vl.load("smelt", dtype)
    run = model.run("a ( b [ c ] )")
    own = [
        do.take(site, source=1, visit=1) for site in ("resid", "Q", "K", "V", "P", "PV", "router", "experts", "gates")
    ]
    assert torch.equal(run.with_(*own).logits, run.logits)
    assert "nats a token" in repr(run.diff(run.with_(do.take("V", visit=2)))) and run.generate(2).prompt_length
    assert run.attention(3, 0) and run.experts(3) and run.top(1) and "<svg" in model._repr_html_()


def test_weights_that_are_no_numbers_are_said(model: Any) -> None:
    broken: Any = Model(copy.deepcopy(model.native), model.tokenizer)
    with torch.no_grad():
        broken.native.blocks[3].attn.W_V.fill_(float("nan"))
    run = broken.run("a b c d")
    assert repr(run) == "Run(5 tokens, nan nats a token over 0 of 4, the others aren't numbers)"
    assert "over 0 of 4" in repr(run.diff(run)) and run._repr_html_() and run.plot() and run.attention(3, 0)
    assert "others" not in repr(run.with_(do.zero("PV", layer=3)))


def test_a_model_without_weights_is_refused(model: Any) -> None:
    empty: Any = Model(copy.deepcopy(model.native).to("meta"), model.tokenizer)
    assert "7,069,656 parameters" in repr(empty)
    for call in (lambda: empty.run("a"), lambda: vl.capture(empty.native, ["Q"]).__enter__()):
        with pytest.raises(InputError, match="meta device, which holds no weights"):
            call()


def test_gradients_and_training_mode_do_no_harm(model: Any) -> None:
    training: Any = Model(copy.deepcopy(model.native).train().requires_grad_(True), model.tokenizer)
    run = training.run("a b c d")
    assert not run.logits.requires_grad and torch.equal(run.logits, model.run("a b c d").logits)
    assert run.attention(3, 0) and run.experts(3) and training.native.training
    with vl.intervene(training.native, do.scale("PV", 2.0)), vl.capture(training.native, ["PV"]):
        training.native(TOKENS).sum().backward()
    assert float(training.native.blocks[0].attn.W_V.grad.abs().sum()) > 0


def test_what_is_printed_is_short(model: Any, three_visit_recording: RecordedRun) -> None:
    rec = three_visit_recording
    assert repr(rec.plan) == "ExecutionPlan(8 steps: 0·1, 1·1, 2·1, 1·2, 2·2, 1·3, 2·3, 3·1; layer·visit)"
    assert repr(model.native.new_cache()) == "KVCache(0 tokens at 12 steps)" and repr(Cache(3)) == "Cache(length=3)"
    special = expert_specialisation(rec, 1, 2)
    assert "nan" not in repr(special) and special.counts is not None and special.counts.sum() == rec.tokens * 8
    assert re.search(r"  0: \d\.\d{4}\n", repr(special))
