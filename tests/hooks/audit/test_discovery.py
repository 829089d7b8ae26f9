"""Discovery of loops and ties on small modules, each with one trap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from visitlens.errors import InputError
from visitlens.hooks.audit.discovery import discover
from visitlens.hooks.audit.tie_audit import audit_ties

TOKENS = torch.arange(12).view(1, 12)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm = nn.Linear(width, width), nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor, gated: bool = False) -> Tensor:
        x = x + self.attn(self.norm(x)) + self.mlp(x)[..., :4]
        return self.gate(x) if gated else x


class Looped(nn.Module):
    """Layers 1 and 2 of 4 run three times; a gate from the second visit on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.unused = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        for visit in range(3):
            for layer in (self.layers[1], self.layers[2]):
                x = layer(x, gated=visit > 0)
        return self.layers[3](x)


class Expert(nn.Linear):
    pass


class Sparse(nn.Module):
    """Its experts stand in a list, and not all of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(4), nn.ModuleList(Expert(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[1](self.norm(x))


class Prelude(nn.Module):
    """One block of the looped ones' class stands before their list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(16, 4), Sparse()
        self.core = nn.ModuleList([Sparse()])
        self.last = Expert(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        return self.last(self.core[0](self.core[0](x)))


def test_a_block_beside_the_list_is_a_layer_and_its_experts_are_none() -> None:
    model = Prelude()
    ledger = discover(model, model, TOKENS)
    assert ledger.modules == ("first", "core.0", "core.0") and ledger.plan.visits == {0: 1, 1: 2} and not ledger.flags


class Recursive(nn.Module):
    """Four module objects, two physical layers: 0 and 2, 1 and 3. Norms and gates are each visit's own; `break_attention`
    loses the tying of attention, as published code once did, with equal values."""

    def __init__(self, break_attention: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        for a, b in ((self.layers[0], self.layers[2]), (self.layers[1], self.layers[3])):
            b.mlp.weight, b.mlp.bias, b.gate.weight = a.mlp.weight, a.mlp.bias, a.gate.weight
            if break_attention:
                b.attn.load_state_dict(a.attn.state_dict())
            else:
                b.attn.weight, b.attn.bias = a.attn.weight, a.attn.bias

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, gated=True)
        return x


class OverTokens(nn.Module):
    """One cell, called once a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(16, 4), nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, tokens: Tensor) -> Tensor:
        state = torch.zeros(len(tokens), 4)
        for x in self.embed(tokens).unbind(1):
            state = self.cells[0](state + x)
        return state


def pairs(model: nn.Module) -> list[tuple[int, int]]:
    return [(s["layer"], s["visit"]) for s in discover(model, model, TOKENS).steps()]


def statuses(model: nn.Module, layer: int) -> dict[str, str]:
    return {
        tie.component: tie.status for tie in audit_ties(model, discover(model, model, TOKENS)) if tie.layer == layer
    }


def test_a_span_that_runs_three_times_and_a_gate_of_later_visits() -> None:
    model = Looped()
    ledger = discover(model, model, TOKENS)
    assert ledger.steps()[3] == {"index": 3, "module": "layers.1", "layer": 1, "visit": 2}
    assert pairs(model) == [(0, 1), *[(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)], (3, 1)]
    assert statuses(model, 1) == {"attn": "tied", "mlp": "tied", "norm": "tied", "gate": "per-visit"}
    gate = next(tie for tie in audit_ties(model, ledger) if tie.component == "gate")
    assert gate.detail == "at visit 2, 3 only: gate"
    assert ledger.flags == ("unused.0 never ran",)


def test_tied_parameters_of_distinct_modules_are_one_layer() -> None:
    model = Recursive()
    assert pairs(model) == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert statuses(model, 0) == {"attn": "tied", "mlp": "tied", "norm": "untied", "gate": "partly tied"}


def test_an_attention_that_lost_its_tying_shows() -> None:
    model = Recursive(break_attention=True)
    assert pairs(model) == [(0, 1), (1, 1), (0, 2), (1, 2)]
    attention = next(t for t in audit_ties(model, discover(model, model, TOKENS)) if t.component == "attn")
    assert attention.status == "untied" and "attn.weight, attn.bias (equal copies now" in attention.detail


def test_untied_modules_are_layers_of_their_own() -> None:
    model = Recursive()
    for layer in model.layers:
        layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
    model.layers[2] = Block()
    model.layers[3] = Block()
    assert pairs(model) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_call_for_each_token_is_no_visit() -> None:
    model = OverTokens()
    ledger = discover(model, model, TOKENS)
    assert any(
        "cells.0 ran 12 times over 12 tokens and 6 over 6: it recurs over tokens" in flag for flag in ledger.flags
    )


def test_a_model_without_module_lists_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 4))
    with pytest.raises(InputError, match="found no layers"):
        discover(model, model, TOKENS)


# Where layers stand


class Norms(nn.Module):
    """One looped block beside a list of norms, one a visit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(16, 4), Block()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm in self.norms:
            x = self.block(norm(x))
        return x


class Held(nn.Module):
    """Two blocks in a sequence or a dict, the second runs twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, blocks = nn.Embedding(16, 4), (Block(), Block())
        self.layers = (
            nn.Sequential(*blocks) if kind == "sequence" else nn.ModuleDict(dict(zip("ab", blocks, strict=True)))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        first, second = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        return second(second(first(self.embed(tokens))))


def test_a_looped_block_beside_a_list_of_norms_is_the_loop() -> None:
    assert discover(model := Norms(), model, TOKENS).modules == ("block",) * 3
    assert pairs(model) == [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("kind", ["sequence", "dict"])
def test_layers_in_sequences_and_dicts_are_found(kind: str) -> None:
    model = Held(kind)
    assert pairs(model) == [(0, 1), (1, 1), (1, 2)] and not discover(model, model, TOKENS).flags


# False loops


class Passes(nn.Module):
    """Layers that run twice, and the second time not on what the first one gave."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.layers = kind, nn.Embedding(16, 4), nn.ModuleList([Block(), Block()])

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.kind == "halves":
            return torch.cat([self.through(half) for half in x.chunk(2, dim=1)], dim=1)
        if self.kind == "guidance":
            return self.through(x) - 0.5 * self.through(torch.zeros_like(x))
        if self.kind == "draft":
            return self.through(x[:, :2]).mean() + self.through(x)
        return self.through(self.through(x))


@pytest.mark.parametrize("kind", ["halves", "guidance", "draft"])
def test_a_second_call_that_does_not_read_the_first_one_is_flagged(kind: str) -> None:
    flags = discover(model := Passes(kind), model, TOKENS).flags
    assert [f"layers.{i}: the second call doesn't read" in flags[i] for i in range(2)] == [True, True], flags


def test_a_real_loop_is_not_flagged() -> None:
    assert not discover(model := Passes("loop"), model, TOKENS).flags
    model = Looped()
    assert not [flag for flag in discover(model, model, TOKENS).flags if "second call" in flag]


# Weights that are shared in part


def test_a_shared_base_with_adapters_of_its_own_is_said() -> None:
    model = Recursive()
    for layer in model.layers:
        layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
    first, third = Block(), Block()
    third.attn.weight = first.attn.weight
    model.layers[0], model.layers[1], model.layers[2], model.layers[3] = first, Block(), third, Block()
    flags = discover(model, model, TOKENS).flags
    assert [flag for flag in flags if "layers.0 and layers.2 share 16 of 108 weights, fewer than half" in flag], flags


def test_layers_over_the_same_memory_are_told_from_tied_ones() -> None:
    model = Recursive()
    blocks = [Block() for _ in range(4)]
    for mine, theirs in zip(blocks[0].parameters(), blocks[2].parameters(), strict=True):
        theirs.data = mine.data
    model.layers = nn.ModuleList(blocks)
    ledger = discover(model, model, TOKENS)
    assert ledger.plan.visits == {0: 1, 1: 1, 2: 1, 3: 1}
    assert any("layers.0 and layers.2 hold separate Parameters over the same memory" in flag for flag in ledger.flags)
