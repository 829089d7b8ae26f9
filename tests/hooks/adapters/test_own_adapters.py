"""Adapters of one's own that don't fit their model, and models whose forward fails: what is said, and what is read right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hooks.adapters.own_folders import LOADER

import visitlens as vl
from visitlens.errors import CheckpointError
from visitlens.hooks.audit.guards import conditions
from visitlens.hooks.loading.load_model import load_model

Run = Callable[..., tuple[int, str, str]]
TRUST = "--trust-remote-code"
TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
EXPERTS = """

class Bank(nn.ModuleList):
    def forward(self, x, gates, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]) * gates[rows, slot, None])
        return out


class MoE(nn.Module):
    def __init__(self, hidden: int, experts: int, k: int, width: int) -> None:
        super().__init__()
        self.router = Router(hidden, experts, k)
        self.experts = Bank(nn.Linear(hidden, hidden) for _ in range(experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        _, chosen, gates = self.router(flat)
        return self.experts(flat, gates, chosen).view_as(x)


class Block"""


def with_swapped_bank(own: Path) -> None:
    """Experts are modules of their own, over flat tokens; their bank takes gates before ids."""
    (own / "model.py").write_text((own / "model.py").read_text().replace("\n\nclass Block", EXPERTS, 1))
    loader = (own / LOADER).read_text().replace("pre_norm_reads(**parts", "reads_of(**parts")
    swapped = """
def reads_of(**names):
    swap = {"experts": 2, "gates": 1}
    return tuple(replace(read, item=swap.get(read.site, read.item)) for read in pre_norm_reads(**names))


class MyFamily"""
    loader = loader.replace("\nclass MyFamily", swapped).replace(
        "import json\n", "import json\nfrom dataclasses import replace\n"
    )
    (own / LOADER).write_text(loader.replace("    load_model(model", "    # load_model(model"))


@torch.no_grad()
def test_expert_outputs_follow_the_adapter_s_reads_of_the_bank(folder: Callable[..., Path]) -> None:
    own = folder()
    with_swapped_bank(own)
    model: Any = load_model(own, trust_remote_code=True)
    with vl.capture(model, ["expert_in", "experts", "expert_out"]) as captured:
        model(TOKENS)
    bank = model.model.blocks[1].moe.experts
    at = {site: captured.get(site, layer=1, visit=2).flatten(0, 1) for site in captured.sites}
    by_hand = [
        torch.stack([bank[e](x) for e in es]) for x, es in zip(at["expert_in"], at["experts"].tolist(), strict=True)
    ]
    assert torch.allclose(at["expert_out"], torch.stack(by_hand), atol=1e-6)
    assert next(g for g in conditions(model, TOKENS[:1]) if g.name == "experts").ok

    scaled = (own / "model.py").read_text().replace("        return out\n", "        return 2 * out + gates.sum()\n")
    (own / "model.py").write_text(scaled)
    other: Any = load_model(own, trust_remote_code=True)
    assert next(g for g in conditions(other, TOKENS[:1]) if g.name == "experts").ok is False


def test_what_an_adapter_says_and_the_model_isn_t_is_told_with_what_to_mend(
    folder: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder()
    loader, model = (own / LOADER).read_text(), (own / "model.py").read_text()
    (own / LOADER).write_text(loader.replace('"num_kv_heads": heads', '"num_kv_heads": 2'))
    code, _, err = run("inspect", own, TRUST)
    assert (
        code == 1
        and "gave 'K' of shape (4, 4) a token, and by the sizes of the adapter for MyFamily it is (2, 4)" in err
    )
    assert "num_kv_heads is num_heads" in err

    reads = 'reads = (*pre_norm_reads(**parts, router="router", experts="experts"), Read('
    for wrong, said in {
        '"gates", "moe.experts", "input", 5, "weights"': "keyword 'weights', and it was called with 3 arguments and the keywords (none)",
        '"router", "moe.router", item=3': "'router' is read from output 3 of 'moe.router', which gave 3: mend the Read's `item`",
    }.items():
        changed = loader.replace(
            'reads = pre_norm_reads(**parts, router="router", experts="experts")', f"{reads}{wrong}))"
        )
        (own / LOADER).write_text(changed.replace("import Anatomy", "import Read, Anatomy"))
        code, _, err = run("inspect", own, TRUST)
        assert code == 1 and said in err, err

    (own / LOADER).write_text(loader)
    written = "((q @ k.mT) / q.shape[-1] ** 0.5 + torch.full((q.shape[2],) * 2, -torch.inf).triu(1)).softmax(-1) @ v"
    (own / "model.py").write_text(
        model.replace("F.scaled_dot_product_attention(q, k, v, is_causal=True)", f"({written})")
    )
    code, _, err = run("inspect", own, TRUST)
    assert code == 1 and "its attention doesn't call torch.nn.functional.scaled_dot_product_attention inside" in err
    (own / LOADER).write_text(loader.replace('attention="attn")', "attention=None)"))
    code, text, err = run("inspect", own, TRUST, "--json")
    assert code == 0, err
    guards = {guard["name"]: guard["ok"] for guard in json.loads(text)["guards"]}
    assert guards["attention rows"] is None and guards["writes"] is True

    (own / LOADER).write_text(loader)
    broken = model.replace("return self.out(", "return self.out[0](")
    (own / "model.py").write_text(broken)
    place = (own / "model.py").read_text().splitlines().index(
        next(x for x in (own / "model.py").read_text().splitlines() if "self.out[0](" in x)
    ) + 1
    said = f"{own / 'model.py'}:{place}: the model's forward failed (TypeError: 'Linear' object is not subscriptable)"
    code, _, err = run("inspect", own, TRUST)
    assert code == 1 and said in err and err.count("error:") == 1 and "VISITLENS_TRACEBACK=1 shows the traceback" in err
    with pytest.raises(CheckpointError, match="the model's forward failed") as caught:
        vl.load(own, trust_remote_code=True).run("w3 w4")
    assert isinstance(caught.value.__cause__, TypeError)
    mended = model.replace("is_causal=True", "attn_mask=torch.zeros(3, 5)")
    (own / "model.py").write_text(mended)
    assert "the model's forward failed (RuntimeError: The " in run("inspect", own, TRUST)[2]
    (own / "model.py").write_text(model)

    def stop(done: int, total: int) -> None:
        raise LookupError(done)

    with pytest.raises(LookupError):  # of a progress function, and not the model's
        vl.load(own, trust_remote_code=True).trace("w3 w4", on_progress=stop)
    (own / "model.py").write_text(broken)
    monkeypatch.setenv("VISITLENS_TRACEBACK", "1")
    with pytest.raises(CheckpointError, match="the model's forward failed"):
        run("inspect", own, TRUST)
