"""Samples: what counts, which slice a document is in, what a corrupted prompt is; scores against whole forwards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from visitlens.errors import InputError
from visitlens.hooks.interventions.intervene import intervene, replace, skip, swap, take, zero
from visitlens.hooks.models.checkpoint import load_config, load_tokenizer
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.documents import Document
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.measures.measure import Measure
from visitlens.probe.model.bundled import PAIR, SAMPLE
from visitlens.probe.samples.dyck_prompts import PAIRS
from visitlens.probe.samples.sample import ROLES, EvalSet
from visitlens.probe.samples.scores import score

CONFIG, TOKENIZER = load_config(PAIR["looped"]), load_tokenizer(PAIR["looped"])


def test_text_has_categories_lengths_and_counts_all_but_segment_starts() -> None:
    sample = EvalSet.of_text(SAMPLE, TOKENIZER, CONFIG, max_tokens=3000, context_length=256)
    segments = sample.contexts.segments
    assert sample.counts.sum() == (segments >= 0).sum() - len(sample.contexts.segment_document)
    assert next(iter(sample.slices)) == "text" and {"code", "web", "up to 128 tokens"} <= set(sample.slices)
    total, count = sample.by_slice(np.ones((sample.documents, 2)) * sample.counts[:, None])
    assert total.shape == (sample.documents, 2, len(sample.slices))
    by_category = [list(sample.slices).index(c) for c in ("code", "finance", "knowledge", "math_stem", "web")]
    np.testing.assert_array_equal(total[..., by_category].sum(-1), sample.counts[:, None].repeat(2, 1))
    np.testing.assert_array_equal(total, count)
    assert "documents" in repr(sample) and "code" in repr(sample)


def test_texts_that_hold_no_token_are_left_out_with_their_labels() -> None:
    documents = [Document("", "a"), Document("one two", "b"), "three"]
    sample = EvalSet.of_text(documents, TOKENIZER, CONFIG)
    assert list(sample.facets["category"]) == ["b", ""] and sample.documents == 2
    assert list(sample.slices) == ["text", "b", "up to 128 tokens"]


def test_dyck_prompts_are_whole_and_only_closers_count() -> None:
    sample = EvalSet.of_dyck(TOKENIZER, CONFIG, prompts=5, shots=(0, 2, 8), seed=3)
    tokens, document_of = sample.contexts.tokens, sample.document_of
    assert sample.roles is not None and sample.corrupted is not None
    for number, prompt in enumerate(sample.prompts):
        own = document_of == number
        assert tokens[own].tolist() == [CONFIG.bos_token_id, *prompt.tokens]
        assert tokens[own & sample.counted].tolist() == prompt.tokens[list(prompt.closers)].tolist()
        changed = tokens[own] != sample.corrupted[own]
        roles = sample.roles[own]
        assert set(roles[changed]) == {ROLES.index("last input")}
        before, after = (TOKENIZER.decode(ids[roles == 3].tolist()) for ids in (tokens[own], sample.corrupted[own]))
        kinds = [*PAIRS, *PAIRS.values()]
        assert sum(a != b for a, b in zip(before, after, strict=True)) == sum(c in kinds for c in before)
        assert (roles == 2).sum() == sum(b - a for a, b in prompt.demonstrations)
        assert (roles == 4).sum() == prompt.answer[1] - prompt.answer[0]
    assert list(sample.slices) == ["dyck", "0 shots", "2 shots", "8 shots"]
    again = EvalSet.of_dyck(TOKENIZER, CONFIG, prompts=5, shots=(0, 2, 8), seed=3)
    assert again.contexts.sha256 == sample.contexts.sha256


def test_prompts_longer_than_a_context_or_none_are_refused() -> None:
    with pytest.raises(InputError, match="longer than the context of 40"):
        EvalSet.of_dyck(TOKENIZER, CONFIG, prompts=1, shots=(8,), context_length=40)
    with pytest.raises(InputError, match="at least one prompt"):
        EvalSet.of_dyck(TOKENIZER, CONFIG, prompts=0)


def test_means_and_intervals_are_over_documents(make_text: Callable[..., PackedTokens]) -> None:
    sample = EvalSet.of_contexts(make_text(lengths=[12, 20, 16, 24] * 4))
    values = np.arange(sample.documents, dtype=float)
    measure = Measure("m", "M", (), "nats", "", "ours")
    stat = sample.stat(measure, values * sample.counts, sample.counts, {})
    assert float(stat.values) == pytest.approx(np.average(values, weights=sample.counts))
    low, high = stat.interval()
    assert low < stat.values < high and stat.tokens == sample.counts.sum()


@pytest.mark.parametrize("at", ["take", "skip", "late", "swap", "function", "nothing"])
def test_scores_with_a_shared_prefix_are_those_of_whole_forwards(
    at: str, make_model: Callable[..., LoopedMoE], make_text: Callable[..., PackedTokens]
) -> None:
    model, packed = make_model(3), make_text()
    sample = EvalSet.of_contexts(packed)
    chain = {
        "take": [take("V"), take("experts", visit=3)],
        "skip": [skip(layer=2, visit=3)],
        "late": [zero("PV", layer=3, head=1)],
        "swap": [swap("Q", (2, 3))],
        "function": [zero("V", token=lambda ids: ids > 30)],
        "nothing": [replace("gates", 0.0, expert=77)],
    }[at]
    plain, got = score(model, sample, [(), chain])
    with intervene(model, *chain, must_match=False):
        expected = np.zeros((2, sample.documents))
        for row in range(len(packed.tokens)):
            tokens, segments = (torch.from_numpy(x[row : row + 1]) for x in (packed.tokens, packed.segments))
            logits = model(tokens, segments)[0, :-1].float()
            hits = logits.argmax(-1) == tokens[0, 1:]
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:].long(), reduction="none")
            chosen = sample.counted[row, 1:]
            for i, values in enumerate((loss, hits)):
                np.add.at(expected[i], sample.document_of[row, 1:][chosen], values.double().numpy()[chosen])
    np.testing.assert_allclose(got.loss, expected[0], rtol=1e-6)
    np.testing.assert_array_equal(got.hits, expected[1])
    assert (at == "nothing") == bool((got.loss == plain.loss).all())


def test_a_slice_of_few_documents_has_no_interval_and_a_rare_one_has(make_text: Callable[..., PackedTokens]) -> None:
    packed = make_text(lengths=[6] * 40)
    kinds = ["few"] * 7 + ["rare"] * 8 + ["most"] * 25
    sample = EvalSet.of_contexts(packed, {"category": kinds})
    loss = sample.counts * np.arange(40)
    stat = sample.stat(
        Measure("m", "M", ("slice",), "nats", "", "ours"), *sample.by_slice(loss), {"slice": list(sample.slices)}
    )
    low, high = stat.interval()
    few, rare, most = (list(sample.slices).index(kind) for kind in ("few", "rare", "most"))
    assert np.isnan(low[few]) and stat.values[few] == 3
    half = 2.364624 * np.sqrt(6 / 8)  # of 7 to 14: Student's interval of these eight alone, whatever the others are
    np.testing.assert_allclose([low[rare], stat.values[rare], high[rare]], [10.5 - half, 10.5, 10.5 + half], rtol=1e-5)
    assert low[most] < high[most]


class NoBOS:
    """A configuration without special tokens."""

    bos_token_id = eos_token_id = pad_token_id = None
    vocab_size, context_length = CONFIG.vocab_size, 1024


def test_dyck_prompts_of_a_model_without_bos_begin_with_their_own_first_token() -> None:
    led = EvalSet.of_dyck(TOKENIZER, CONFIG, prompts=2, shots=(1,), seed=3)
    bare = EvalSet.of_dyck(TOKENIZER, NoBOS, prompts=2, shots=(1,), seed=3)
    for number in range(2):
        ours, theirs = (sample.contexts.segments == number for sample in (bare, led))
        assert bare.contexts.tokens[ours].tolist() == led.contexts.tokens[theirs].tolist()[1:]
        assert bare.counted[ours].tolist() == led.counted[theirs].tolist()[1:]
    assert bare.counts.tolist() == led.counts.tolist()


def test_a_context_of_0_is_no_missing_number() -> None:
    with pytest.raises(InputError, match="at least 2 positions, got 0"):
        EvalSet.of_text(["a b c"], TOKENIZER, CONFIG, context_length=0)
