"""Branches that fork at chosen updates, decay on text of their own, and losses by source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.text.documents import Document
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.ladder.corpus import Corpus, prepare
from visitlens.probe.ladder.evaluate import loss_by_part
from visitlens.probe.ladder.stream import TrainingStream
from visitlens.probe.ladder.train import Cadence, train
from visitlens.probe.ladder.trainer import Recipe
from visitlens.probe.model.bundled import PAIR

TOKENIZER = PAIR["looped"] / "tokenizer.json"
CADENCE = Cadence(log_updates=2, checkpoint_updates=3, checkpoint_tokens=200, final_tokens=400, dyck_prompts=2)
CONFIG = LoopedMoEConfig(
    vocab_size=4096, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, num_experts=8, expert_dim=8,
    context_length=384,
)  # fmt: skip
SOURCES = {"forum": "web", "blog": "web", "kernel": "code"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """80 documents, some of them twice, of three sources."""
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(50)]
    texts = [" ".join(rng.choice(words, int(rng.integers(20, 120)))) for _ in range(70)]
    names = list(SOURCES)
    documents = [Document(text, SOURCES[names[i % 3]], names[i % 3]) for i, text in enumerate([*texts, *texts[:10]])]
    return prepare(documents, TOKENIZER, tmp_path_factory.mktemp("corpus"), validation_share=0.3)


def test_branches_fork_at_any_updates() -> None:
    recipe = Recipe.forked([10, 25], 300, context=128, batch=2)
    assert recipe.horizons == (10 * 256 + 300, 25 * 256 + 300) and recipe.decay_tokens == 300
    paper = Recipe.forked([10_000, 196_075], 10**10, context=4096, batch=256)
    assert paper.horizons == (20_485_760_000, 215_599_539_200)
    with pytest.raises(InputError, match="rising numbers of updates"):
        Recipe.forked([20, 10], 300, context=128, batch=2)


def test_text_set_apart_is_disjoint_even_where_documents_are_there_twice(corpus: Corpus) -> None:
    stable, decay = corpus.train.set_apart(0.3)
    assert sorted([*stable, *decay]) == list(range(len(corpus.train)))
    of = [{corpus.train[i].tobytes() for i in side} for side in (stable, decay)]
    assert not of[0] & of[1] and len(of[0]) + len(of[1]) < len(corpus.train), "copies are on one side together"
    with pytest.raises(InputError, match="leaves none on one side"):
        corpus.train.set_apart(1e-9)


def test_the_stable_run_never_reads_what_its_branches_decay_on(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every document that a stream hands out is written down: none is of both phases; branches read the same from their start."""
    read: dict[bool, list[int]] = {False: [], True: []}
    original = TrainingStream._next

    def noted(stream: TrainingStream) -> np.ndarray:
        before = stream._position.piece
        piece = original(stream)
        if stream._position.piece != before:
            document, _ = stream._pieces[stream._order[stream._position.piece - 1]]
            read[stream._prompts == 3].append(int(document))
        return piece

    monkeypatch.setattr(TrainingStream, "_next", noted)
    recipe = Recipe.forked([6, 9], 700, context=384, batch=2, dyck_share=0.1, warmup_tokens=300, decay_text=0.3)
    folders = train(CONFIG, recipe, corpus, tmp_path, cadence=CADENCE, max_epochs=50)
    stable, decay = corpus.train.set_apart(0.3)
    assert set(read[False]) <= set(stable.tolist()) and set(read[True]) <= set(decay.tolist())
    half = len(read[True]) // 2
    assert half > 0 and read[True][:half] == read[True][half:]
    report = json.loads((folders[1] / "training.json").read_text())
    assert report["documents_by_phase"] == {"stable": len(stable), "decay": len(decay)} and report["decay_epochs"] > 0
    with pytest.raises(InputError, match="another recipe"):
        train(CONFIG, replace(recipe, decay_text=0.2), corpus, tmp_path, cadence=CADENCE, max_epochs=50)


def test_a_run_with_text_of_its_own_for_decay_resumes_to_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    recipe = Recipe.forked([6], 2400, context=384, batch=2, dyck_share=0.1, warmup_tokens=300, decay_text=0.3)
    whole = train(CONFIG, recipe, corpus, tmp_path / "whole", cadence=CADENCE, max_epochs=50)

    class Stop(Exception):
        pass

    def stop(done: int, total: int, loss: float) -> None:
        if done >= 7600:  # after the branch's checkpoint
            raise Stop

    with pytest.raises(Stop):
        train(CONFIG, recipe, corpus, tmp_path / "cut", cadence=CADENCE, max_epochs=50, on_progress=stop)
    again = train(CONFIG, recipe, corpus, tmp_path / "cut", cadence=CADENCE, max_epochs=50)
    assert (again[0] / "model.safetensors").read_bytes() == (whole[0] / "model.safetensors").read_bytes()


def test_losses_are_by_source_where_documents_name_one(corpus: Corpus, tmp_path: Path) -> None:
    assert corpus.sources == ("blog", "forum", "kernel")
    recipe = Recipe((1500,), 500, warmup_tokens=300, batch=2, dyck_share=0.1)
    (folder,) = train(CONFIG, recipe, corpus, tmp_path, cadence=CADENCE, max_epochs=50)
    report = json.loads((folder / "training.json").read_text())
    found = report["loss_by_source"]
    assert {name: entry["category"] for name, entry in found.items()} == SOURCES
    web = [found[name] for name in ("forum", "blog")]
    mean = sum(e["loss"] * e["tokens"] for e in web) / sum(e["tokens"] for e in web)
    assert report["validation_loss"]["web"] == pytest.approx(mean, rel=1e-5)  # float32 losses, added in another order


def test_a_mean_by_part_by_hand() -> None:
    """Two documents in one context: losses 1, 2 | 4, and one that begins a segment."""
    packed = PackedTokens(
        np.zeros((1, 5), int), np.array([[0, 0, 0, 1, 1]]), np.array([0, 1]), np.zeros((2, 32), np.uint8)
    )
    losses = np.array([[1.0, 2.0, np.nan, 4.0]], np.float32)
    found = loss_by_part(losses, packed, np.array([1, 0]), ("b", "a", "unused"))
    assert {name: (m.loss, m.tokens, m.documents) for name, m in found.items()} == {"b": (4.0, 1, 1), "a": (1.5, 2, 1)}
    assert loss_by_part(losses, packed, np.array([-1, -1]), ()) == {}
