"""The mechanism ledger names the planted mechanism and no other, and agrees with interventions made by hand.

Two models are built by hand. In `tests.support.planted` the second visit looks elsewhere, by its queries. Here a second one, of one layer, in
which the second visit looks where the first did and finds other values: a token attends to its successor s(t) at both visits; the value
moves that token from block A of the residual stream to B at visit 1, and from B to C at visit 2, so that s(s(t)) arrives in
C, which is what follows. Queries and keys read A alone, experts write nothing, and a large constant in the stream
keeps the scale of what is read nearly the same at both visits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.planted import plant

from visitlens.errors import InputError
from visitlens.hooks.interventions.intervene import skip, take
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.experiments import run_experiment
from visitlens.probe.experiments.mechanism_ledger import ATTENTION, ROUTED, SKIPPED
from visitlens.probe.samples.sample import EvalSet
from visitlens.probe.samples.scores import score

CONTENT = 7
VOCABULARY = 3 + CONTENT
SLOW = 16
"""First head dimension whose rotation is too slow to matter."""


def successor(token: int) -> int:
    return 3 + (token - 3 + 1) % CONTENT if token >= 3 else token


def model_of_values() -> LoopedMoE:
    config = LoopedMoEConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        num_experts=4,
        expert_dim=8,
        experts_per_token=2,
        loop_start=0,
        loop_stop=1,
        visits=2,
        context_length=64,
        rope_theta=1e12,
        tie_embeddings=False,
    )
    model = LoopedMoE(config)
    model.init_weights(0)
    block = model.blocks[0]
    sharp, write = 12.0, 1.8
    a, b, c = (range(start, start + VOCABULARY) for start in (0, VOCABULARY, 2 * VOCABULARY))
    with torch.no_grad():
        for matrix in (model.embed.W_E, model.unembed.W_U, block.attn.W_Q, block.attn.W_K, block.attn.W_V):
            matrix.zero_()
        block.attn.W_O.zero_()
        block.mlp.W_out.zero_()
        for t in range(VOCABULARY):
            model.embed.W_E[t, a[t]], model.embed.W_E[t, -1] = 1, 5
            block.attn.W_K[a[t], SLOW + t] = sharp
            block.attn.W_V[a[t], t] = write
            block.attn.W_Q[a[t], SLOW + successor(t)] = sharp
            block.attn.W_V[b[t], VOCABULARY + t] = write
            block.attn.W_O[t, b[t]] = 1
            block.attn.W_O[VOCABULARY + t, c[t]] = 1
            model.unembed.W_U[c[t], t] = 12
    return model.eval().requires_grad_(False)


def steps_of_two(documents: int = 12) -> EvalSet:
    """Documents that first name every token, each after its successor, and then step by s(s(t)); those steps count."""
    rng = np.random.default_rng(0)
    named, steps = 2 * CONTENT, 12
    length = 1 + named + steps
    tokens = np.zeros((documents, length), dtype=np.int32)
    for row in tokens:
        token = int(rng.integers(3, VOCABULARY))
        for i in range(named):
            row[1 + i] = 3 + (token - 3 - i) % CONTENT
        for i in range(1 + named, length):
            row[i] = successor(successor(int(row[i - 1])))
    segments = np.repeat(np.arange(documents, dtype=np.int32)[:, None], length, axis=1)
    counted = np.zeros(tokens.shape, dtype=bool)
    counted[:, 2 + named :] = True
    hashes = np.arange(documents, dtype=np.uint64)
    packed = PackedTokens(tokens, segments, np.arange(documents, dtype=np.int32), hashes)
    return EvalSet(packed, counted, {"kind": ["text"] * documents})


def planted(mechanism: str) -> tuple[LoopedMoE, EvalSet]:
    if mechanism == "values":
        return model_of_values(), steps_of_two()
    built = plant()
    return built.model, EvalSet.of_dyck(built.tokenizer, built.model.config, prompts=4, shots=(1, 2, 4))


@pytest.mark.parametrize("mechanism", ["queries", "values"])
def test_the_ledger_names_the_planted_mechanism_and_no_other(mechanism: str) -> None:
    """The rest may do a little harm (the second visit's larger stream makes what it reads smaller), never earn anything."""
    model, sample = planted(mechanism)
    ledger = run_experiment("mechanism_ledger", model, sample).mechanism_ledger
    stat = ledger.sel(slice=next(iter(sample.slices)))
    gain = float(stat.sel(form="alone", mechanism="whole update").values)
    assert gain > 1.5
    for form in ("alone", "left in"):
        shares = {name: float(stat.sel(form=form, mechanism=name).values) / gain for name in ATTENTION | ROUTED}
        assert shares.pop(mechanism) > 0.95
        assert max(shares.values()) < 0.01 and min(shares.values()) > -0.06, (form, shares)


def test_each_row_is_the_difference_of_two_losses(
    make_model: Callable[..., LoopedMoE], make_text: Callable[..., PackedTokens]
) -> None:
    model, sample = make_model(3), EvalSet.of_contexts(make_text(lengths=[12, 20, 16, 24] * 4))
    ledger = run_experiment("mechanism_ledger", model, sample, visits=(2, 3)).mechanism_ledger.sel(slice="text")
    every = ("Q", "K", "V", "experts", "gates", "expert_in")

    def mean(chain: list) -> float:
        return float(score(model, sample, [chain])[0].loss.sum() / sample.counts.sum())

    plain, repeated = mean([]), mean([take(site, 2, visit=3) for site in every])
    alone, left_in = ledger.sel(form="alone"), ledger.sel(form="left in")
    assert float(alone.sel(mechanism="values").values) == pytest.approx(mean([take("V", 2, visit=3)]) - plain, abs=1e-9)
    assert float(alone.sel(mechanism=SKIPPED).values) == pytest.approx(mean([*skip(visit=3)]) - plain, abs=1e-9)
    rest = [take(site, 2, visit=3) for site in every if site not in ("experts", "gates")]
    routing = left_in.sel(mechanism="routing (experts and gates)")
    assert float(routing.values) == pytest.approx(repeated - mean(rest), abs=1e-9)
    assert float(left_in.sel(mechanism="whole update").values) == pytest.approx(repeated - plain, abs=1e-9)
    assert np.isnan(left_in.sel(mechanism=SKIPPED).values) and np.isfinite(routing.interval()).all()


def test_a_model_without_a_later_visit_is_refused(
    make_model: Callable[..., LoopedMoE], make_text: Callable[..., PackedTokens]
) -> None:
    sample = EvalSet.of_contexts(make_text())
    with pytest.raises(InputError, match="no later visit"):
        run_experiment("mechanism_ledger", make_model(1), sample)
    with pytest.raises(InputError, match="visits 1 <= a < b <= 2"):
        run_experiment("mechanism_ledger", make_model(2), sample, visits=(1, 3))
