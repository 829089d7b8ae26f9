"""Training on a task: stages, the loop count drawn for each update, what is scored, and going on exactly where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.ladder import task_training
from visitlens.probe.ladder.task_training import TaskRecipe, accuracy, train_task
from visitlens.probe.tasks.hops import Hops
from visitlens.probe.tasks.stream import held_out

TASK = Hops(hops=2, sizes=(3,), symbols=4, queries=4)
CONFIG = LoopedMoEConfig(
    vocab_size=TASK.vocab_size,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    expert_dim=8,
    experts_per_token=2,
    loop_start=1,
    loop_stop=2,
    visits=2,
    context_length=32,
)
LENGTH = 1 + 2 * 3 + 3 * 4  # tokens of a context of stage 2
RECIPE = TaskRecipe(
    tokens=8 * LENGTH * 6,
    decay_tokens=8 * LENGTH * 4,
    pass_at=0.0,
    batch=8,
    warmup_tokens=8 * LENGTH,
    look_updates=2,
    held_out=4,
)


class Stopped(Exception):
    """Stands for a kill."""


def looks_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loop_counts", [(), (1, 2)], ids=["the configuration's loop count", "a drawn loop count"])
def test_a_run_that_is_stopped_twice_ends_in_the_same_weights(tmp_path: Path, loop_counts: tuple[int, ...]) -> None:
    recipe = replace(RECIPE, loop_counts=loop_counts)
    whole = train_task(CONFIG, TASK, recipe, tmp_path / "whole")
    for stop_after in (1, 3):

        def stop(row: dict[str, Any], at: int = stop_after) -> None:
            if len(looks_of(tmp_path / "parts")) == at:
                raise Stopped

        with pytest.raises(Stopped):
            train_task(CONFIG, TASK, recipe, tmp_path / "parts", stop)
    parts = train_task(CONFIG, TASK, recipe, tmp_path / "parts")
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)
    times = ("seconds",)
    assert [{k: v for k, v in look.items() if k not in times} for look in looks_of(tmp_path / "parts")] == [
        {k: v for k, v in look.items() if k not in times} for look in looks_of(tmp_path / "whole")
    ]


def test_the_rate_falls_from_where_the_task_was_learnt_and_the_report_says_how_many_tokens_were_seen(
    tmp_path: Path,
) -> None:
    folder = train_task(CONFIG, TASK, replace(RECIPE, ready_at=0.0), tmp_path)
    looks = looks_of(tmp_path)
    assert [look["stage"] for look in looks[:3]] == [1, 2, 2]
    learnt = looks[1]["tokens"]
    rates = [look["learning_rate"] for look in looks]
    assert rates[1] == RECIPE.learning_rate and rates[2:] == sorted(rates[2:], reverse=True)
    report = json.loads((folder / "training.json").read_text())
    assert learnt + RECIPE.decay_tokens <= report["tokens"] < learnt + RECIPE.decay_tokens + 8 * LENGTH


def test_a_drawn_loop_count_is_that_of_the_update_and_a_batch_asks_for_no_more_hops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    loss = LoopedMoE.training_loss

    def watched(self: LoopedMoE, tokens: torch.Tensor, *rest: Any, **options: Any) -> Any:
        ran.append((self.plan.visits[1], int(((tokens == 3) | (tokens == 4)).sum(1)[0]), int(tokens.max() >= 0)))
        asked = set(tokens[:, :-2][rest[1][:, 2:]].tolist())
        assert asked <= set(range(3, 3 + self.plan.visits[1]))
        return loss(self, tokens, *rest, **options)

    monkeypatch.setattr(LoopedMoE, "training_loss", watched)
    train_task(CONFIG, TASK, replace(RECIPE, loop_counts=(1, 2)), tmp_path)
    assert {visits for visits, *_ in ran} == {1, 2}


def test_only_scored_tokens_count_in_the_loss() -> None:
    model = LoopedMoE(CONFIG).double()
    model.init_weights(0)
    drawn = held_out(TASK, 3)
    tokens, scored = torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.scored)
    segments = torch.arange(3).unsqueeze(1).expand_as(tokens)
    logits = model(tokens, segments)
    assert logits is not None
    negative = -logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    expected = negative[scored[:, 1:]].mean()
    assert scored.sum() < scored.numel() / 2
    torch.testing.assert_close(model.training_loss(tokens, segments, scored).cross_entropy, expected)


def test_accuracy_by_facet_counts_the_most_likely_token_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drawn = LoopedMoE(CONFIG), held_out(TASK, 6)
    model.init_weights(0)
    right = drawn.facets["k"] == 2  # a model that answers two hops and nothing else
    logits = np.eye(TASK.vocab_size)[np.where(right, drawn.tokens, 0)[:, 1:]]
    logits = np.concatenate([logits, logits[:, :1]], axis=1)
    monkeypatch.setattr(model, "forward", lambda tokens: torch.from_numpy(logits))
    assert accuracy(model, drawn, "k") == {"1": 0.0, "2": 1.0}


def test_another_recipe_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    train_task(CONFIG, TASK, RECIPE, tmp_path)
    with pytest.raises(InputError, match="another model, task or recipe"):
        train_task(CONFIG, TASK, replace(RECIPE, seed=1), tmp_path)
    assert train_task(CONFIG, TASK, RECIPE, tmp_path, on_look=lambda row: pytest.fail("trained again")).name == "model"


def test_the_checkpoint_opens_as_any_other(tmp_path: Path) -> None:
    from visitlens.hooks.models.checkpoint import load_model, load_tokenizer

    folder = train_task(CONFIG, TASK, RECIPE, tmp_path)
    assert load_model(folder).config == CONFIG
    assert load_tokenizer(folder).encode("a b 2 c").ids == [7, 8, 4, 9]
    assert task_training.TaskRecipe(**json.loads((tmp_path / "run.json").read_text())["recipe"]).seed == RECIPE.seed
