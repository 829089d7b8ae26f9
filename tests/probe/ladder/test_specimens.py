"""The specimens that ship: what their cards say is so of the weights; the list, and building one by its recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import visitlens as vl
from visitlens.errors import InputError
from visitlens.hooks.interventions.intervene import Intervention, intervene, skip, take, with_loop_count, zero
from visitlens.hooks.models.checkpoint import load_config, load_model
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.ladder import specimens
from visitlens.probe.ladder.specimen_card import card, finish
from visitlens.probe.ladder.specimens import SPECIMENS, Specimen, build, held_out_examples
from visitlens.probe.ladder.task_training import train_task
from visitlens.probe.model.bundled import TASKS
from visitlens.probe.tasks.stream import held_out
from visitlens.probe.tasks.task_file import read_task

Run = Callable[..., tuple[int, str, str]]
BUNDLED = [name for name, specimen in SPECIMENS.items() if specimen.folder is not None]
CONTEXTS = 60  # of 12 queries: some 240 answers for each number of hops, so a share of 0.95 has an error of 0.014


@cache
def model_of(name: str) -> LoopedMoE:
    folder = SPECIMENS[name].folder
    assert folder is not None
    return load_model(folder)


def accuracy(name: str, *chain: Intervention | Sequence[Intervention], loops: int = 0) -> list[float]:
    """Of 1, 2 and (where it learnt them) 3 hops, on contexts that neither training nor the task file draws."""
    model = with_loop_count(model_of(name), loops, "kept") if loops else model_of(name)
    drawn = held_out(SPECIMENS[name].task, CONTEXTS, part=77)
    tokens = torch.from_numpy(drawn.tokens)
    with torch.no_grad(), intervene(model, *chain):
        logits = model(tokens)
    assert logits is not None
    right = (logits[:, :-1].argmax(-1) == tokens[:, 1:]).numpy()[drawn.scored[:, 1:]]
    hops = drawn.facets["k"][drawn.scored]
    return [float(right[hops == k].mean()) for k in range(1, SPECIMENS[name].task.hops + 1)]


def solved(shares: Sequence[float]) -> list[bool]:
    """Which hops are answered; a share that is neither nearly all nor hardly more than guessing fails."""
    assert all(share >= 0.9 or share <= 0.5 for share in shares), shares
    return [share >= 0.9 for share in shares]


def test_there_are_specimens_in_the_repository() -> None:
    assert {"hops", "hops-fixed"} <= set(BUNDLED)


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_specimen_answers_its_hops_on_permutations_never_drawn(name: str) -> None:
    assert min(accuracy(name)) >= 0.95


@pytest.mark.parametrize("name", [name for name in BUNDLED if SPECIMENS[name].recipe.loop_counts])
def test_as_many_hops_are_answered_as_the_span_runs(name: str) -> None:
    hops = range(1, SPECIMENS[name].task.hops + 1)
    for loops in (1, 2, 3):
        assert solved(accuracy(name, loops=loops)) == [k <= loops for k in hops]


def test_a_skipped_visit_costs_the_third_hop_whichever_it_is() -> None:
    """The span is one layer: skipping any of its three visits is the layer run twice."""
    shares = [accuracy("hops", skip(layer=1, visit=visit)) for visit in (1, 2, 3)]
    assert shares[0] == shares[1] == shares[2] == accuracy("hops", loops=2)
    assert solved(shares[0]) == [True, True, False]


@pytest.mark.parametrize("name", ["hops", "hops-fixed"])
def test_the_second_visit_hops_by_new_queries_and_by_nothing_else(name: str) -> None:
    for part in ("Q", "PV"):
        assert accuracy(name, take(part, 1, layer=1, visit=2))[2] <= 0.2
    for part in ("K", "V", "experts", "moe_write"):
        assert solved(accuracy(name, take(part, 1, layer=1, visit=2))) == [True, True, True]
    assert solved(accuracy(name, zero("moe_write", layer=1, visit=2))) == [True, True, True]


def test_the_lens_reads_one_symbol_further_after_each_visit() -> None:
    model = vl.load("hops")
    run = model.run("f d a e e b b c d a c f 3 a")  # a -> e -> b -> c
    last = [run.site("resid_out", layer=1, visit=visit)[-1] for visit in (1, 3)]
    read = [model.tokenizer.id_to_token(int(model.native.logits(x).argmax())) for x in last]
    assert read == ["e", "c"]
    assert run.top(1)[0][0] == "c"


def test_the_bundled_examples_are_those_of_the_generator() -> None:
    assert read_task(TASKS["hops"]) == held_out_examples(SPECIMENS["hops"].task)


@pytest.mark.parametrize("name", BUNDLED)
def test_a_card_says_what_was_measured(name: str) -> None:
    specimen = SPECIMENS[name]
    assert specimen.folder is not None and load_config(specimen.folder) == specimen.config
    assert (specimen.folder / "README.md").read_text(encoding="utf-8") == card(specimen, specimen.report())
    intact = specimen.report()["accuracy"]["intact"]
    np.testing.assert_allclose([share for share, *_ in intact.values()], accuracy(name), atol=0.06)


def test_the_list_says_what_is_bundled_and_how_good_it_is(run: Run) -> None:
    code, out, _ = run("specimens")
    assert code == 0
    for name in SPECIMENS:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert line.split()[1] == ("yes" if name in BUNDLED else "no")
    code, out, _ = run("specimens", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["hops"]["accuracy"]["2 hops"] >= 0.95 and rows["hops"]["tokens"] > 0


def small(name: str, **changes: object) -> Specimen:
    """A specimen that is trained in seconds."""
    like = SPECIMENS["hops-fixed"]
    task = replace(like.task, sizes=(4,), symbols=4, queries=4)
    config = replace(like.config, vocab_size=task.vocab_size, hidden_size=16, head_dim=4, num_experts=4, expert_dim=8)
    recipe = replace(
        like.recipe, tokens=200, decay_tokens=200, warmup_tokens=10, batch=2, look_updates=2, held_out=2, pass_at=0.0
    )
    return replace(like, **{"name": name, "task": task, "config": config, "recipe": recipe, **changes})  # type: ignore[arg-type]


def test_a_specimen_that_continues_another_is_built_with_it_and_goes_on_where_it_stopped(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small("first")
    drawn = replace(first.recipe, loop_counts=(1, 2, 3), loop_counts_from=4)
    then = small("then", recipe=drawn, continues="first")
    monkeypatch.setattr(specimens, "SPECIMENS", {"first": first, "then": then})
    monkeypatch.setattr(specimens, "EXAMPLES", 6)
    code, out, err = run("specimens", "then", "--out", tmp_path / "run")
    assert code == 0 and out.strip() == str(tmp_path / "run" / "model"), err
    assert "stage 4" in err
    text = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    before = json.loads((tmp_path / "run" / "first" / "model" / "training.json").read_text())["last_look"]["tokens"]
    assert f"weights of `first` ({before:,} tokens" in text
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    build(then, tmp_path / "run")
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == weights


def test_to_begin_with_another_model_s_weights_is_refused(tmp_path: Path) -> None:
    first, wider = small("first"), small("wider")
    train_task(first.config, first.task, first.recipe, tmp_path / "first")
    config = replace(wider.config, hidden_size=24)
    with pytest.raises(InputError, match="no run of this model to begin with"):
        train_task(config, wider.task, wider.recipe, tmp_path / "wider", start=tmp_path / "first")
    with pytest.raises(InputError, match="no run of this model to begin with"):
        train_task(first.config, first.task, first.recipe, tmp_path / "again", start=tmp_path / "nowhere")


def test_a_card_needs_the_run_that_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small("first")
    then = replace(first, name="then", continues="first")
    monkeypatch.setattr(specimens, "SPECIMENS", {"first": first, "then": then})
    folder = train_task(first.config, first.task, first.recipe, tmp_path / "run")
    with pytest.raises(InputError, match=r"neither in .* nor bundled"):
        finish(then, folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hop", "--out", "x"), "no specimen 'hop'; there are hops"),
        (("hops",), "needs a folder"),
        (("--out", "x"), "name a specimen"),
        (("hops", "--out", "x", "--json"), "--json is for the list"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error(arguments: tuple[str, ...], said: str, run: Run) -> None:
    code, _, err = run("specimens", *arguments)
    assert code == 1 and err.count("error:") == 1 and said in err
