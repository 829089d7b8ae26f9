"""`visitlens inspect`: the ledger, ties, reasons and guards of every family, by the command and as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from visitlens.app.cli import main
from visitlens.app.commands.inspect import _text
from visitlens.errors import InputError
from visitlens.hooks.loading.inspect_model import describe, inspect_model
from visitlens.hooks.models.checkpoint import save_model

LEAKS = {"gpt_oss", "inkling2_loop_text", "albert", "zamba", "zamba2"}
"""Families whose packed documents leak even by position ids alone, without a cache or a mask."""


def test_every_family_passes_its_guards_and_its_ledger_is_the_plan(
    family: str, make_hf: Callable[..., Any], expected_steps: dict[str, list[tuple[int, int]]]
) -> None:
    found = describe(make_hf(family), 16)
    assert [(s["layer"], s["visit"]) for s in found["steps"]] == expected_steps[family]
    assert [s["index"] for s in found["steps"]] == list(range(len(found["steps"])))
    guards = {guard["name"]: guard for guard in found["guards"]}
    assert not [guard for guard in guards.values() if guard["ok"] is False]
    assert all(guards[name]["ok"] for name in ("observation", "plan", "attention rows", "documents", "padding"))
    own = guards["own packing: position ids, no cache, no mask"]["detail"]
    assert own.startswith("leaks" if family in LEAKS else "doesn't leak"), own
    assert guards["own packing: position ids, all-ones mask"]["detail"].startswith("leaks")
    looped = {s["layer"] for s in found["steps"] if s["visit"] > 1}
    assert {tie["layer"] for tie in found["ties"]} == looped
    ties = {tie["component"]: tie for tie in found["ties"]}
    if family == "inkling2_loop_text":
        assert ties["q_message_gate"]["status"] == "per-visit" and "visit 2, 3 only" in ties["q_message_gate"]["detail"]
    if family == "zamba2":
        assert ties["self_attn"]["status"] == "partly tied" and ties["input_layernorm"]["status"] == "tied"
    json.dumps(found)
    assert "guards" in _text({"model": family, **found})


def test_a_family_without_an_adapter_is_discovered(tmp_path: Path) -> None:
    """Funnel: blocks of layers, each layer several times in a row, then a decoder."""
    import transformers

    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "vocab_size": 30}
    config = transformers.FunnelConfig(block_sizes=[2, 1], block_repeats=[3, 2], num_decoder_layers=1, **sizes)
    found = describe(transformers.FunnelForMaskedLM(config).eval(), 16)
    assert [(s["layer"], s["visit"]) for s in found["steps"]] == [
        *[(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]
    ]
    assert found["steps"][3]["module"] == "funnel.encoder.blocks.0.1" and "none for this family" in found["adapter"]
    assert {tie["status"] for tie in found["ties"]} == {"tied"}
    assert "pools the sequence between blocks" in found["adapter"]
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"funnel has no adapter, so it takes no option 'steps'; --family"):
        inspect_model(tmp_path, steps=2)


def test_the_adapter_of_the_documentation_keeps_its_contract() -> None:
    import transformers

    from visitlens.hooks.adapters.adapt import adapt
    from visitlens.hooks.audit.guards import check

    page = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class GPT2" in block)
    names: dict[str, Any] = {}
    exec(code, names)  # the page's own example
    config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=61, n_positions=40)
    model = adapt(transformers.GPT2LMHeadModel(config), names["GPT2"]())
    guards = check(model, torch.randint(0, 61, (1, 16)))
    kept = [guard.name for guard in guards if guard.ok]
    expected = [
        "observation",
        "plan",
        "writes",
        "attention rows",
        "documents",
        "layout",
        "padding",
        "cached generation",
    ]
    assert kept == expected


def test_the_command_inspects_folders(
    make_hf: Callable[..., Any],
    make_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import transformers

    make_hf("dory").save_pretrained(tmp_path / "dory")
    save_model(make_model(2), tmp_path / "native")
    sizes = {"hidden_size": 4, "word_embed_proj_dim": 4, "ffn_dim": 8, "num_attention_heads": 1, "vocab_size": 9}
    config = transformers.OPTConfig(num_hidden_layers=3, max_position_embeddings=40, **sizes)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")

    def run(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["visitlens", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return (exit_.value.code or 0, *capsys.readouterr())

    code, out, _ = run("inspect", tmp_path / "dory", "--json", "--no-checks")
    steps = json.loads(out)["steps"]
    assert code == 0 and steps[3] == {"index": 3, "module": "layers.1", "layer": 1, "visit": 2} and len(steps) == 8
    code, out, _ = run("inspect", tmp_path / "dory")
    assert (
        code == 0 and "layer 1 runs 3 times" in out and "nGPT" in out and "ok   documents" in out and "FAIL" not in out
    )
    code, out, _ = run("inspect", tmp_path / "native", "--json")
    assert [(s["layer"], s["visit"]) for s in json.loads(out)["steps"]] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (1, 2),
        (2, 2),
        (3, 1),
    ]
    code, out, _ = run("inspect", tmp_path / "opt", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["steps"]) == 3 and "none for this family" in found["adapter"]
    code, _, err = run("inspect", tmp_path / "nowhere")
    assert code == 1 and "error:" in err
