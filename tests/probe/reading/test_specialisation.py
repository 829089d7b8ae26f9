"""Specialisation worked out by hand, and its null."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.probe.reading.specialisation import expert_specialisation, expert_specialisation_null, expert_tokens


def _run(ids: np.ndarray, experts: np.ndarray, num_experts: int) -> Any:
    recording = SimpleNamespace(
        token_table=lambda: {"id": ids},
        experts=lambda layer, visit: (experts.astype(np.uint16), np.ones_like(experts, dtype=np.float16)),
        config={"num_experts": num_experts},
        documents=1,
        tokens=len(ids),
    )
    return SimpleNamespace(recording=recording, provenance={})


def test_two_experts_that_split_two_tokens_diverge_by_ln_2_and_an_unused_one_has_none() -> None:
    """Expert 0 takes only token 7, expert 1 only token 9, each half of the text: KL = 1 ln(1 / 0.5) = ln 2."""
    ids = np.array([7, 9, 7, 9])
    stat = expert_specialisation(_run(ids, np.array([[0], [1], [0], [1]]), 3), 0, 1)
    np.testing.assert_allclose(stat.values[:2], np.log(2))
    assert np.isnan(stat.values[2])


def test_an_expert_that_takes_everything_is_not_specialised() -> None:
    stat = expert_specialisation(_run(np.array([3, 4, 5]), np.zeros((3, 1), int), 1), 0, 1)
    np.testing.assert_allclose(stat.values, 0, atol=1e-15)


def test_the_null_is_far_below_a_specialised_expert_and_near_an_indifferent_one() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, 20_000)
    specialised = _run(ids, (ids % 5)[:, None], 5)
    assert np.all(
        expert_specialisation(specialised, 0, 1).values > 10 * expert_specialisation_null(specialised, 0, 1).values
    )
    indifferent = _run(ids, rng.integers(0, 5, (20_000, 1)), 5)
    ratio = expert_specialisation(indifferent, 0, 1).values / expert_specialisation_null(indifferent, 0, 1).values
    assert np.all((ratio > 0.5) & (ratio < 2))


def test_tokens_an_expert_takes_beyond_its_load() -> None:
    """Expert 0 takes half of all tokens: token 7 always (2 of 2, expected 1: lift 2), tokens 8 and 9 never."""
    run = _run(np.array([7, 7, 8, 9]), np.array([[0], [0], [1], [1]]), 2)
    (top,) = expert_tokens(run, 0, 1, 0)
    assert (top.token, top.count, top.lift) == (7, 2, 2.0)
    with pytest.raises(InputError, match=r"0\.\.1"):
        expert_tokens(run, 0, 1, 2)


def test_on_a_real_recording_every_used_expert_has_a_value(looped_recording) -> None:
    layer = looped_recording.plan.looped_layers[0]
    values = [expert_specialisation(looped_recording, layer, visit).values for visit in (1, 2)]
    assert all(np.nanmin(v) >= 0 for v in values)
