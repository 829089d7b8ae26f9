"""How tokens are drawn: by hand, and by frequency."""

from __future__ import annotations

import pytest
import torch

from visitlens.errors import InputError
from visitlens.hooks.capture.sampling import GREEDY, Sampling

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def shares(sampling: Sampling, logits: torch.Tensor = LOGITS, draws: int = 4000) -> torch.Tensor:
    choose = sampling.chooser()
    tokens = choose(logits.expand(draws, -1))
    assert tokens.shape == (draws, 1)
    return torch.bincount(tokens.flatten(), minlength=4) / draws


def test_the_fewest_tokens_that_reach_top_p_are_drawn_in_proportion() -> None:
    """At temperature 1 and top_p 0.7, 0.5 falls short and 0.5 + 0.3 reaches it: 5/8 and 3/8. At temperature 1/2, probabilities
    are squared: 0.25, 0.09, 0.0225 and 0.0025 of 0.365."""
    torch.testing.assert_close(shares(Sampling(1.0, 0.7)), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    torch.testing.assert_close(shares(Sampling(1.0, 0.4)), torch.tensor([1.0, 0, 0, 0]), atol=0, rtol=0)
    expected = torch.tensor([0.25, 0.09, 0.0225, 0.0025]) / 0.365
    torch.testing.assert_close(shares(Sampling(0.5)), expected, atol=0.03, rtol=0)
    torch.testing.assert_close(shares(GREEDY), torch.tensor([1.0, 0, 0, 0]), atol=0, rtol=0)


def test_a_token_after_those_that_reach_top_p_exactly_is_left_out() -> None:
    """Four equal logits are four quarters without any rounding: two of them reach 0.5, a third isn't needed."""
    found = shares(Sampling(1.0, 0.5), torch.zeros(1, 4))
    assert int((found > 0).sum()) == 2
    torch.testing.assert_close(found[found > 0], torch.tensor([0.5, 0.5]), atol=0.03, rtol=0)


def test_a_seed_and_a_prompt_have_streams_of_their_own() -> None:
    def drawn(seed: int, text: int) -> list[int]:
        choose = Sampling(1.0, seed=seed).chooser(text)
        return [int(choose(LOGITS)) for _ in range(40)]

    state = torch.get_rng_state()
    streams = [drawn(0, 0), drawn(0, 1), drawn(1, 0)]
    assert drawn(0, 0) == streams[0] and len({tuple(s) for s in streams}) == 3
    assert torch.equal(state, torch.get_rng_state()), "nobody else's random numbers are touched"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-1.0,), "at least 0"),
        ((float("inf"),), "temperature"),
        ((1.0, 0.0), "top_p in"),
        ((1.0, 1.5), "top_p in"),
        ((0.0, 0.5), "of sampling"),
        ((1.0, 1.0, -1), "seed"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Sampling(*arguments)
