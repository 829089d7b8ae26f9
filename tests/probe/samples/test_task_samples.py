"""A user's task as a sample: only scored tokens count, facets cut results, twins and parts follow the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from visitlens.errors import InputError
from visitlens.hooks.interventions.intervene import intervene, skip, take
from visitlens.hooks.models.checkpoint import load_tokenizer
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.analyses.ablation.heads import ablate_heads, sample_task
from visitlens.probe.experiments.accuracy import accuracy
from visitlens.probe.experiments.patching import patching
from visitlens.probe.model.bundled import PAIR
from visitlens.probe.model.model import Model
from visitlens.probe.samples.dyck_prompts import dyck_prompt
from visitlens.probe.samples.sample import EvalSet
from visitlens.probe.tasks.brackets import Brackets
from visitlens.probe.tasks.hops import Hops
from visitlens.probe.tasks.task_file import Example, write_task

TASK = Hops(hops=2, sizes=(4, 5), symbols=6)
TOKENIZER = Tokenizer.from_str(json.dumps(TASK.tokenizer_json()))
WORDS = load_tokenizer(PAIR["looped"])
CONFIG = LoopedMoEConfig(
    vocab_size=TASK.vocab_size,
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    expert_dim=8,
    experts_per_token=2,
    loop_start=1,
    loop_stop=2,
    visits=2,
    context_length=48,
)


@pytest.fixture(scope="module")
def model() -> LoopedMoE:
    made = LoopedMoE(CONFIG)
    made.init_weights(0)
    return made.double().eval()


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return TASK.examples(np.random.default_rng(0), 8)


@pytest.fixture(scope="module")
def sample(examples: list[Example]) -> EvalSet:
    return EvalSet.of_task(examples, TOKENIZER, CONFIG, name="hops")


def test_exactly_the_answers_count_and_facets_are_slices(sample: EvalSet, examples: list[Example]) -> None:
    assert sample.documents == 16 and sample.counts.tolist() == [1.0] * 16
    answers = [TOKENIZER.token_to_id(example.text[-1]) for example in examples]
    order = np.argsort(sample.document_of[sample.counted])
    assert sample.contexts.tokens[sample.counted][order].tolist() == answers
    assert list(sample.slices) == ["hops", "1 hop", "2 hops", "4 symbols", "5 symbols"]
    assert sample.slices["2 hops"].tolist() == [False] * 8 + [True] * 8


def test_twins_differ_in_edges_alone_and_parts_are_those_of_the_file(sample: EvalSet, examples: list[Example]) -> None:
    assert sample.corrupted is not None and sample.roles is not None
    assert sample.role_names == ("start", "edge 1", "edge 2", "hops", "other edges", "symbol", "scored", "other")
    names = np.array(sample.role_names)
    changed = sample.corrupted != sample.contexts.tokens
    assert changed.any() and set(names[sample.roles[changed]]) <= {"edge 1", "edge 2", "other edges"}
    for document, example in enumerate(examples):
        here = sample.document_of == document
        parts = names[sample.roles[here]].tolist()
        n = int(example.facets["symbols"][0])
        assert parts[0] == "start" and parts[-3:] == ["hops", "symbol", "scored"]
        assert parts.count("other edges") == 2 * (n - int(example.facets["k"][0]))
    assert not (sample.roles[sample.document_of < 0] != -1).any()


def test_a_limit_takes_examples_from_all_over_the_file(examples: list[Example]) -> None:
    some = EvalSet.of_task(examples, TOKENIZER, CONFIG, limit=4)
    assert [some.slices[k].sum() for k in ("1 hop", "2 hops")] == [2, 2]
    with pytest.raises(InputError, match="limit of 0"):
        EvalSet.of_task(examples, TOKENIZER, CONFIG, limit=0)
    with pytest.raises(InputError, match="at least one example"):
        EvalSet.of_task([], TOKENIZER, CONFIG)


def test_spans_of_ordinary_text_count_every_token_that_holds_a_scored_character() -> None:
    text = "The capital of France is Paris, of Norway Oslo."
    spans = [[text.index("Paris"), text.index("Paris") + 5], [text.index("Oslo"), text.index("Oslo") + 4]]
    one = EvalSet.of_task([Example.from_json({"text": text, "scored": spans})], WORDS, CONFIG)
    scored = WORDS.decode(one.contexts.tokens[one.counted].tolist())
    assert scored.split() == ["Paris", "Oslo"]


def test_text_that_the_tokenizer_cannot_spell_or_keeps_together_is_refused() -> None:
    with pytest.raises(InputError, match=r"no token for 'z', 'Z'.* is this task the model's"):
        EvalSet.of_task([Example.of_answer("a b z Z", " a")], TOKENIZER, CONFIG)
    with pytest.raises(InputError, match=r"merges 'is', which is scored, with the text before it"):
        EvalSet.of_task([Example("This", ((2, 4),))], WORDS, CONFIG)
    with pytest.raises(InputError, match="as many tokens as its text"):
        EvalSet.of_task([Example.of_answer("a b", " c", corrupted="a b b")], TOKENIZER, CONFIG)
    with pytest.raises(InputError, match="must end in the same scored tokens"):
        EvalSet.of_task([Example("a b", ((2, 3),), corrupted="a c")], TOKENIZER, CONFIG)
    with pytest.raises(InputError, match="longer than the context of 48"):
        EvalSet.of_task([Example.of_answer("a b " * 30, "c")], TOKENIZER, CONFIG)


def test_a_dyck_prompt_for_a_tokenizer_without_brackets_says_so() -> None:
    with pytest.raises(InputError, match=r"no token for \( \) \[ \] \{ \} < >.*take text, or a task"):
        dyck_prompt((0,), TOKENIZER, shots=1)
    brackets = Tokenizer.from_str(json.dumps(Brackets().tokenizer_json()))
    with pytest.raises(InputError, match=r"no token for .*: is this task the model's"):
        dyck_prompt((1,), brackets, shots=1)


def naive(model: LoopedMoE, example: Example, *chain: object) -> tuple[bool, float]:
    """Whether the answer is the most likely token, and its loss, in a forward of its own."""
    ids = torch.tensor([[0, *TOKENIZER.encode(example.text, add_special_tokens=False).ids]])
    with torch.no_grad(), intervene(model, *chain):  # type: ignore[arg-type]
        logits = model(ids)
    assert logits is not None
    return bool(logits[0, -2].argmax() == ids[0, -1]), float(-logits[0, -2].log_softmax(-1)[ids[0, -1]])


def test_accuracy_under_interventions_is_that_of_one_forward_an_example(
    model: LoopedMoE, sample: EvalSet, examples: list[Example]
) -> None:
    found = accuracy(model, sample, parts=("Q",))
    chains = {
        "intact": (),
        "visit 2 skipped": skip(layer=1, visit=2),
        "visit 2 with Q of visit 1": (take("Q", 1, layer=1, visit=2),),
    }
    assert list(found["accuracy"].labels["intervention"]) == [
        "intact",
        *(
            f"visit {v} {what}"
            for v in (1, 2)
            for what in ("skipped", "without attention writes", "without MoE writes")
        ),
        "visit 2 with Q of visit 1",
    ]
    two = [example for example in examples if example.facets["k"] == "2 hops"]
    for name, chain in chains.items():
        row = list(found["accuracy"].labels["intervention"]).index(name)
        for label, chosen in (("hops", examples), ("2 hops", two)):
            column = list(found["accuracy"].labels["slice"]).index(label)
            right = [naive(model, example, *chain)[0] for example in chosen]
            plain = [naive(model, example)[0] for example in chosen]
            assert found["accuracy"].values[row, column] == pytest.approx(np.mean(right), abs=1e-12)
            assert found["change"].values[row, column] == pytest.approx(np.mean(right) - np.mean(plain), abs=1e-12)


def test_an_unlooped_model_has_its_plain_accuracy_alone(sample: EvalSet) -> None:
    from dataclasses import replace

    unlooped = LoopedMoE(replace(CONFIG, loop_start=0, loop_stop=0, visits=1))
    unlooped.init_weights(1)
    found = accuracy(unlooped, sample)
    assert list(found["accuracy"].labels["intervention"]) == ["intact"] and not found["change"].values.any()


def test_heads_are_ablated_by_the_loss_on_scored_tokens_alone(
    model: LoopedMoE, sample: EvalSet, examples: list[Example]
) -> None:
    sums = ablate_heads(model, sample_task(sample))
    losses = [naive(model, example)[1] for example in examples]
    assert sums.count.sum() == 16 and sums.intact.sum() == pytest.approx(np.sum(losses), rel=1e-9)


def test_patching_takes_a_task_and_names_its_parts(model: LoopedMoE, sample: EvalSet) -> None:
    recovered = patching(model, sample, by="part")["recovered"]
    assert list(recovered.labels["part"]) == list(sample.role_names)
    at = list(sample.role_names).index
    # Before the first step every part holds its own tokens: the hops and the symbol are the same in both runs.
    assert np.abs(recovered.values[0, [at("hops"), at("symbol"), at("start")]]).max() < 1e-9


def test_a_model_opens_a_task_by_its_file(tmp_path: Path, model: LoopedMoE, examples: list[Example]) -> None:
    write_task(tmp_path / "mine.jsonl", examples)
    opened = Model(model, TOKENIZER)
    assert next(iter(opened.task(tmp_path / "mine.jsonl").slices)) == "mine"
    assert opened.task(examples).documents == 16
    with pytest.raises(InputError, match="no such task; bundled are hops"):
        opened.task("jumps")
