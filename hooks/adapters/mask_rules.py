"""MaskRules: which keys a query sees, by the masks that a model gives to its attention, call by call.

A mask that is causal, or causal within a window, leaves a rule that the kernels can form rows by. Any other mask, and one
that adds to scores, makes a step `masked`: its maps are formed with the mask and kept, and statistics are made of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.adapters.attention_calls import AttentionCall
from visitlens.hooks.capture.attention_rule import AttentionRule


class MaskRules:
    """What is known of each step, over all calls of a model so far: documents shorter than a window look causal."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._known: dict[int, AttentionRule] = {}
        self._longest: dict[int, int] = {}  # keys of the longest call at a step that showed no window
        self._everywhere = False  # maps are kept at every step: a mask came up in the middle of a forward
        self._read: dict[int, tuple[Tensor, int, int | None, int | None, bool]] = {}  # by identity: layers share one

    def begin(self) -> None:
        """A forward begins: masks read before may be gone, and others lie where they lay."""
        self._read.clear()

    def joined(self, step: int, rule: AttentionRule, call: AttentionCall, *, first: bool) -> AttentionRule:
        """The step's rule, with what this call's mask and those before it say. `first`: of the documents of a forward.

        Raises:
            InputError: documents before this one, in the same forward, had no such mask, and their maps weren't kept.
        """
        mask, keys = call.options.get("attention_mask"), call.k.shape[2]
        found = rule
        if isinstance(mask, Tensor) and mask.ndim == 4 and not rule.from_map:
            found = self._by_mask(rule, mask, call.q.shape[2], keys)
        before = self._known.get(step, rule)
        longest = self._longest.get(step, 0)
        windows = {r.window for r in (before, found) if r.window is not None}
        window = min(windows, default=None)
        contradicted = window is not None and rule.window is None and max(longest, 0 if found.window else keys) > window
        if found.masked or before.masked or self._everywhere or len(windows) > 1 or contradicted:
            joined = replace(rule, window=None, masked=True, from_map=True)
        else:
            joined = replace(found, window=window)
        self._known[step] = joined
        if found.window is None:
            self._longest[step] = max(longest, keys)
        if joined.masked and not before.masked and not self._everywhere and not first:
            self._everywhere = True
            raise InputError(
                f"{self.family} gives its attention a mask at step {step} that is neither causal nor a window, and gave shorter documents "
                "none: from now on maps are kept. Run the same forward again"
            )
        return joined

    def _by_mask(self, rule: AttentionRule, mask: Tensor, queries: int, keys: int) -> AttentionRule:
        """What one mask [batch or 1, head or 1, query, key] makes of the rule."""
        known = self._read.get(id(mask))
        if known is None or known[0] is not mask or known[1:3] != (keys, rule.window):
            window, masked = self._shown(rule, mask[..., :keys], queries)
            known = self._read[id(mask)] = (mask, keys, rule.window, window, masked)
        _, _, _, window, masked = known
        return replace(rule, window=window, masked=masked, from_map=masked)

    def _shown(self, rule: AttentionRule, mask: Tensor, queries: int) -> tuple[int | None, bool]:
        """The window that a mask shows, and whether it is anything else than causal within a window."""
        keys, boolean = mask.shape[-1], mask.dtype == torch.bool
        allowed = mask if boolean else mask > torch.finfo(mask.dtype).min / 2
        if not boolean and bool((mask.masked_fill(~allowed, 0) != 0).any()):
            return None, True
        if bool((allowed == rule.visible(keys, mask.device, queries)).all()):
            return rule.window, False
        band = replace(rule, window=int(allowed[..., -1, :].sum(-1).max()) or 1)
        if rule.causal and bool((allowed == band.visible(keys, mask.device, queries)).all()):
            return band.window, False
        return None, True
