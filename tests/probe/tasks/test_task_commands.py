"""Tasks on the command line: `--task`, `--metric`, and what is said where a tokenizer has no brackets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import visitlens as vl
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.reading.recorded_run import open_recording
from visitlens.probe.tasks.hops import Hops
from visitlens.probe.tasks.task_file import write_task

Run = Callable[..., tuple[int, str, str]]
TASK = Hops(hops=2, sizes=(4, 5), symbols=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a task, text in its words and a recording of it."""
    base = tmp_path_factory.mktemp("task")
    config = LoopedMoEConfig(
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
    model = LoopedMoE(config)
    model.init_weights(0)
    save_model(model, base / "model")
    (base / "model" / "tokenizer.json").write_text(json.dumps(TASK.tokenizer_json()))
    examples = TASK.examples(np.random.default_rng(0), 6)
    write_task(base / "mine.jsonl", examples)
    lines = [json.dumps({"text": example.text}) for example in examples]
    (base / "text.jsonl").write_text("".join(f"{line}\n" for line in lines))
    vl.record(base / "model", base / "text.jsonl", base / "r.vlens", context_length=48, checks=False)
    return base


def test_an_experiment_takes_a_task_and_cuts_its_results_by_facet(folder: Path, run: Run) -> None:
    code, out, err = run(
        "experiment",
        "accuracy",
        "--model",
        folder / "model",
        "--task",
        folder / "mine.jsonl",
        "--examples",
        8,
        "--json",
    )
    assert code == 0, err
    labels = json.loads(out)["results"]["accuracy"]["labels"]
    assert labels["slice"] == ["mine", "1 hop", "2 hops", "4 symbols", "5 symbols"]
    assert "visit 2 with Q of visit 1" in labels["intervention"]


def test_heads_are_ablated_on_a_task_or_on_some_of_its_examples_and_kept_by_name(folder: Path, run: Run) -> None:
    task = folder / "mine.jsonl"
    for where, name, title in (
        ((), "mine-zero", "mine loss"),
        (("--where", "2 hops"), "mine-2-hops-zero", "mine loss, 2 hops"),
    ):
        code, out, err = run("ablate", folder / "r.vlens", "-m", folder / "model", "--metric", task, *where)
        assert code == 0 and f"ablation-{name}.json" in out, err
        kept = open_recording(folder / "r.vlens").ablations()[name]
        assert kept.metric == title and kept.about["targets"] == (6 if where else 12)
        assert kept.about["settings"]["where"] == (where[1] if where else "")


def test_without_brackets_in_the_tokenizer_heads_are_judged_on_text_and_the_command_says_so(
    folder: Path, run: Run
) -> None:
    arguments = ("ablate", folder / "r.vlens", "-m", folder / "model", "--text", folder / "text.jsonl")
    code, out, err = run(*arguments)
    assert code == 0 and "ablation-text-zero.json" in out
    assert "no token for ( ) [ ] { } < >: heads are judged by the loss on text" in err
    code, _, err = run(*arguments, "--metric", "dyck")
    assert code == 1 and err.count("error:") == 1 and "can't read Dyck prompts: take text, or a task" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--metric", "jumps"), "no such task; bundled are hops"),
        (
            ("--metric", "{task}", "--where", "3 hops"),
            "no examples labelled '3 hops'; there are 1 hop, 2 hops, 4 symbols",
        ),
        (("--where", "2 hops"), "--where chooses examples of a task"),
    ],
)
def test_a_task_that_is_not_there_is_one_clear_error(
    arguments: tuple[str, ...], said: str, folder: Path, run: Run
) -> None:
    given = [a.format(task=folder / "mine.jsonl") for a in arguments]
    code, _, err = run("ablate", folder / "r.vlens", "-m", folder / "model", *given)
    assert code == 1 and err.count("error:") == 1 and said in err


def test_text_and_a_task_together_are_refused(folder: Path, run: Run) -> None:
    both = ("--task", folder / "mine.jsonl", "--dyck", 1)
    code, _, err = run("experiment", "accuracy", "--model", folder / "model", *both)
    assert code == 1 and "one of --text, --dyck and --task" in err
