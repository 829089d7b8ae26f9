"""Budgets against the real module, torch's own FLOP counter and every number that the paper prints."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from visitlens.hooks.models.checkpoint import load_config
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.ladder.budget import Budget, Ratios, dense_control, sparsity
from visitlens.probe.ladder.paper_grid import PRINTED, budget_row, paper_cell, paper_grid, prints_as
from visitlens.probe.model.bundled import PAIR

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 4, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}


def part_of(name: str) -> str:
    """`blocks.2.mlp.W_in` -> `experts`."""
    owner, _, leaf = name.rpartition(".")
    if "embed" in name:
        return "embeddings"
    if "ln" in owner or "norm" in leaf or "norm" in owner:
        return "norms"
    if ".attn" in owner:
        return "attention"
    return "router" if leaf == "W_router" else "experts"


def counted(config: LoopedMoEConfig) -> dict[str, int]:
    with torch.device("meta"):
        model = LoopedMoE(config)
    parts = dict.fromkeys(("attention", "router", "experts", "norms", "embeddings"), 0)
    for name, p in model.named_parameters():
        parts[part_of(name)] += p.numel()
    return parts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loop_start": 1, "loop_stop": 3, "visits": 3},
        {"qk_norm": True, "shared_expert_dim": 12},
        {"tie_embeddings": False},
    ],
)
def test_parameters_by_part_are_the_modules(options: dict) -> None:
    config = LoopedMoEConfig(**SIZES, num_experts=10, expert_dim=8, **options)
    budget, parts = Budget.of(config, 100), counted(config)
    assert {name: getattr(budget, name) for name in parts} == parts
    assert budget.total == sum(parts.values()) - parts["embeddings"]


@pytest.mark.parametrize("arch", ["baseline", "smelt"])
@pytest.mark.parametrize("scale", ["100M", "1.6B"])
@pytest.mark.parametrize("level", ["0%", "97%"])
def test_published_cells_build_as_modules_of_the_budgets_size(arch: str, scale: str, level: str) -> None:
    cell = paper_cell(arch, scale, level)
    parts = counted(cell.config)
    assert cell.budget.total == sum(parts.values()) - parts["embeddings"]


def test_looping_runs_the_span_again_and_stores_nothing_more() -> None:
    plain = LoopedMoEConfig(**SIZES, num_experts=10, expert_dim=8)
    looped = LoopedMoEConfig(**SIZES, num_experts=10, expert_dim=8, loop_start=1, loop_stop=3, visits=2)
    a, b = Budget.of(plain, 0), Budget.of(looped, 0)
    assert (a.total, a.active) == (b.total, b.active)
    assert b.executed - 16 == (a.executed - 16) * 6 // 4
    assert b.kv_values_per_token * 4 == a.kv_values_per_token * 6
    assert b.kv_bytes_per_token(4) == 4 * b.kv_values_per_token


@pytest.mark.parametrize("span", [(0, 0), (1, 3)])
def test_flops_are_those_torch_counts_save_what_it_cannot_see(span: tuple[int, int]) -> None:
    """torch sees neither norms nor grouped products; fused attention on a CPU is hidden too, so it is made explicit here.

    With E = k every expert runs on every token as plain products (the dense path), so all products are visible. Left to
    account for: norms (in our parameters, not in torch's count), the output head (in torch's, not in ours), and attention,
    of which explicit products compute the full square where ours has the causal half.
    """
    config = LoopedMoEConfig(
        **SIZES,
        num_experts=4,
        experts_per_token=4,
        expert_dim=8,
        loop_start=span[0],
        loop_stop=span[1],
        visits=2 if span[1] else 1,
    )
    model = LoopedMoE(config)
    model.init_weights(0)
    tokens, length = torch.randint(3, 50, (1, 24), generator=torch.Generator().manual_seed(0)), 24
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    seen = counter.get_total_flops() / length
    ours = Budget.of(config, 0)
    steps, norms = len(config.loop_spec.plan()), 2 * 16
    products = 2 * (ours.executed - steps * norms - 16)  # forward: 2 per parameter
    head = 2 * 16 * 50
    square = 4 * length * 6 * 4 * steps  # QK^T and PV over all keys; the causal half is 2 x length x width
    assert seen == pytest.approx(products + head + square, rel=1e-12)
    with_attention = Budget.of(config, length)
    assert with_attention.flops_per_token - ours.flops_per_token == 3 * square / 2


def test_sparsity_by_hand() -> None:
    """10 times the parameters at 1.2 times the FLOPs: S = 1 - 1.2 / 10."""
    dense = LoopedMoEConfig(**SIZES, num_experts=8, expert_dim=8)
    control = Budget.of(dense, 0)
    sparse = Budget(
        attention=10 * control.total, router=0, experts=0, norms=0, embeddings=0, active=0, executed=0,
        flops_per_token=1.2 * control.flops_per_token, kv_values_per_token=0,
    )  # fmt: skip
    assert sparsity(sparse, control) == pytest.approx(0.88)
    assert sparsity(control, control) == 0
    assert dense_control(LoopedMoEConfig(**SIZES, num_experts=64, expert_dim=8)) == dense


# The paper's tables


def printed_numbers() -> list:
    return [
        pytest.param(cell, name, id=f"{cell.arch}-{cell.scale}-{cell.level}-{name}")
        for cell in paper_grid()
        for name in PRINTED
        if cell.printed[name] is not None and cell.printed[name] != "4."
    ]


MISSED = {("smelt", "600M", "0%", "flops_ratio"): 1.0472, ("smelt", "1.6B", "0%", "flops_ratio"): 1.0234}


def test_the_grid_has_the_papers_shape_and_127_numbers_to_check() -> None:
    cells = paper_grid()
    assert len(cells) == 32 == len({(c.arch, c.scale, c.level) for c in cells})
    assert len(printed_numbers()) == 127
    for cell in cells:
        steps = len(cell.config.loop_spec.plan())
        assert steps * 2 == cell.config.num_layers * (3 if cell.arch == "smelt" else 2)
    assert prints_as(budget_row(paper_cell("baseline", "600M", "85%"))["total_params"], "4.")  # the cut-off one


@pytest.mark.parametrize(("cell", "name"), printed_numbers())
def test_every_published_number_prints_as_published_save_two(cell, name: str) -> None:
    row, key = budget_row(cell), (cell.arch, cell.scale, cell.level, name)
    assert prints_as(row[name], cell.printed[name]) == (key not in MISSED)
    if key in MISSED:
        assert row[name] == pytest.approx(MISSED[key], abs=5e-5)


def test_the_printed_sparsity_of_looped_rows_needs_their_own_control() -> None:
    rows = [budget_row(c) for c in paper_grid() if c.arch == "smelt" and c.level != "0%"]
    assert sum(prints_as(r["S_percent"], r["printed"]["S_percent"]) for r in rows) == 12
    assert sum(prints_as(r["S_percent_baseline_control"], r["printed"]["S_percent"]) for r in rows) == 0


def test_absolute_flops_of_the_worked_example() -> None:
    """SMELT 3.2, 200M at S = 95 %: 1.33e9 and 1.37e9 FLOPs per token."""
    flops = [paper_cell(arch, "200M", "95%").budget.flops_per_token / 1e9 for arch in ("baseline", "smelt")]
    assert [round(f, 2) for f in flops] == [1.33, 1.37]


@pytest.mark.parametrize(
    ("value", "printed", "expected"),
    [(714e6, "0.71B", True), (716e6, "0.71B", False), (86.04, "86.0%", True), (86.06, "86.0%", False), (1.0245, "1.024", True), (4.9e9, "4.", True), (5.1e9, "4.", False)],
)  # fmt: skip
def test_what_prints_as_what(value: float, printed: str, expected: bool) -> None:
    assert prints_as(value, printed) is expected


def test_the_bundled_pair_is_matched_within_the_papers_tolerances() -> None:
    a, b = (Budget.of(load_config(PAIR[name]), 330) for name in ("baseline", "looped"))
    ratios = Ratios.of(b, a)
    assert ratios.flops == pytest.approx(1, abs=0.039)
    assert ratios.total == pytest.approx(1, abs=0.01)
    assert ratios.kv == 1
