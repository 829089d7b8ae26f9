"""The two phases of a generated text, told apart: the prompt at once (prefill), then token by token (decode). No torch.

A recording keeps sums over all tokens and, beside them, over those that the model wrote. Sums are additive, so the prompts'
are the difference.
"""

from __future__ import annotations

from collections.abc import Mapping

from visitlens.hooks.recording.format.totals import TOTALS, GroupTotals

PHASES = ("prefill", "decode")
DECODE = "decode."
"""In front of a measure's name: its totals over generated tokens alone."""


def of_phase(totals: Mapping[str, GroupTotals], phase: str | None) -> dict[str, GroupTotals]:
    """Measure -> its totals over all tokens (None) or over those of one phase."""
    if phase is None:
        return {name: total for name, total in totals.items() if not name.startswith(DECODE)}
    written = {name.removeprefix(DECODE): total for name, total in totals.items() if name.startswith(DECODE)}
    if phase == "decode":
        return written
    return {name: _less(totals[name], part) for name, part in written.items()}


def _less(whole: GroupTotals, part: GroupTotals) -> GroupTotals:
    return GroupTotals(whole.attributes, *(getattr(whole, name) - getattr(part, name) for name in TOTALS))
