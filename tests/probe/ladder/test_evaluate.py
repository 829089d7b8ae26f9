"""What a model has learnt, of models whose answers are known: an oracle, and one that always says the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.ladder.evaluate import dyck_by_shots, text_loss
from visitlens.probe.samples.dyck_prompts import PAIRS

VOCABULARY = 130


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    """One token a character; id 0 is left for BOS."""
    vocabulary = {chr(i): i for i in range(1, 128)} | {"?": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


class Oracle:
    """Says the token that comes next, except one character that it never says."""

    config = SimpleNamespace(bos_token_id=0)

    def __init__(self, mute: str = "") -> None:
        self.mute = ord(mute) if mute else -1

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, VOCABULARY)
        following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        logits.scatter_(2, following.unsqueeze(2), 50.0)
        if self.mute >= 0:
            logits[..., self.mute] = -50.0
        return logits


def test_text_loss_is_the_mean_over_predicted_tokens_whatever_the_batch(
    make_model: Callable[..., LoopedMoE], make_text: Callable[..., PackedTokens]
) -> None:
    model, text = make_model(2), make_text(seed=6)
    loss = model(torch.from_numpy(text.tokens), torch.from_numpy(text.segments), return_type="loss")
    assert loss.dtype == torch.float32
    assert int((~loss.isnan()).sum()) == text.num_tokens - len(text.segment_document)
    for batch in (1, 2, 100):
        assert text_loss(model, text, batch) == pytest.approx(float(loss.nanmean()), rel=1e-5)


def test_an_oracle_completes_every_prompt(characters: Tokenizer) -> None:
    scores = dyck_by_shots(Oracle(), characters, prompts=8, seed=1)
    assert sorted(scores) == [0, 1, 2, 4, 8]
    for score in scores.values():
        assert score["exact_match"] == score["accuracy"] == score["closer_accuracy"] == 1.0
        assert score["nll"] == pytest.approx(0, abs=1e-9)


def test_a_model_that_can_not_end_a_line_misses_every_answer_but_no_closer(characters: Tokenizer) -> None:
    (score,) = dyck_by_shots(Oracle("\n"), characters, prompts=30, seed=1, shots=(1,)).values()
    assert score["exact_match"] == 0.0 and score["closer_accuracy"] == 1.0
    assert 0.5 < score["accuracy"] < 1.0 and score["nll"] > 1.0


def test_a_model_without_one_closer_misses_that_share_of_the_closers(characters: Tokenizer) -> None:
    (score,) = dyck_by_shots(Oracle(")"), characters, prompts=200, seed=1, shots=(0,)).values()
    assert score["closer_accuracy"] == pytest.approx(1 - 1 / len(PAIRS), abs=0.06)
    assert score["exact_match"] == pytest.approx(np.mean([0.75**n for n in (2, 3, 4)]), abs=0.12)
