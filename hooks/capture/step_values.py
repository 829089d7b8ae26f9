"""StepValues: captured sites of a forward as statistics read them, flat over real tokens."""

from __future__ import annotations

from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from visitlens.hooks.capture.attention_rule import AttentionRule, map_overlaps
from visitlens.hooks.capture.capture import VISITED, Captured
from visitlens.hooks.core.sites import token_shape
from visitlens.kernels.attention.results import OverlapStatistics, RowStatistics, VisitOverlaps
from visitlens.kernels.attention.rows import row_statistics, visit_overlaps
from visitlens.kernels.segments import Segments
from visitlens.kernels.vector_geometry import norms, pairwise_products


class StepValues:
    """Site values of one batch over its real tokens, flat: `site(name, step)` is [token, ...]; padding is left out.

    What several statistics need is computed here, once: attention rows from Q and K, norms, products of the updates.
    """

    def __init__(self, captured: Captured, segment_ids: Tensor, attention_implementation: str = "auto") -> None:
        self.plan = captured.plan
        self._captured, self._implementation = captured, attention_implementation
        real = (segment_ids >= 0).flatten()
        self._keep = None if bool(real.all()) else real.nonzero().squeeze(1)
        with_padding = Segments.from_ids(segment_ids)
        if self._keep is None:
            self.segments = with_padding
        else:
            lengths = [end - start for start, end in with_padding.spans if bool(real[start])]
            self.segments = Segments((0, *torch.tensor(lengths).cumsum(0).tolist()))
        self.written: Tensor | None = None
        """[token] which ones the model generated, where it did."""
        self.counted: Tensor | None = None
        """[token] which ones are to be counted at work; None: all."""
        self._flat: dict[tuple[str, int], Tensor] = {}
        self._norms: dict[tuple[str, int], Tensor] = {}

    def site(self, name: str, step: int) -> Tensor:
        """NaN (expert 0) at a step that lacks the site, or before which the loop ended."""
        if (name, step) not in self._flat:
            lacking = step in self._captured.absent.get(name, {}) or self._halted(step)
            self._flat[name, step] = self._nothing_at(name) if lacking else self._real(self._captured.at(name, step))
        return self._flat[name, step]

    def visited(self, step: int) -> Tensor | None:
        """[token] on the CPU: whether it is really at the step. None where every token is."""
        there = self._captured.held(VISITED, step)
        return None if there is None else self._real(there).cpu()

    def _halted(self, step: int) -> bool:
        there = self._captured.held(VISITED, step)
        return there is not None and self._captured.held(self._captured.sites[0], step) is None and not there.any()

    def _real(self, value: Tensor) -> Tensor:
        """[token, ...] of [context, position, ...], padding left out."""
        value = value.flatten(0, 1)
        return value if self._keep is None else value[self._keep.to(value.device)]

    def _nothing_at(self, name: str) -> Tensor:
        absent = self._captured.absent.get(name, {})
        having = [s.index for s in self.plan.steps if s.index not in absent and not self._halted(s.index)]
        if not having:
            assert self._captured.sizes is not None
            width = token_shape(name, self._captured.sizes)
            return torch.full((self.segments.num_tokens, *width), float("nan"))
        like = self.site(name, having[0])
        return torch.full_like(like, float("nan") if like.is_floating_point() else 0)

    def norm(self, name: str, step: int) -> Tensor:
        """Norms of a site's vectors: [token], or [token, head] where a site has heads."""
        if (name, step) not in self._norms:
            self._norms[name, step] = norms(self.site(name, step))
        return self._norms[name, step]

    @cached_property
    def update_products(self) -> Tensor:
        """[token, step, step] inner products of every two steps' updates, attention write + MoE write."""
        steps = range(len(self.plan))
        return pairwise_products([(self.site("attn_write", s), self.site("moe_write", s)) for s in steps])

    @cached_property
    def keys_seen(self) -> Tensor:
        """[token, step] how many keys a query sees: its position in the segment, plus 1, or the step's sliding window.

        Of a step that has only some tokens as keys, those of them. Where attention goes both ways, every token of the segment.
        """
        positions = self.segments.positions()
        keys = (positions + 1).unsqueeze(1).repeat(1, len(self.plan))
        for step, rule in self._captured.rules.items():
            if rule.among_visited:
                there = self.visited(step)
                assert there is not None
                before = there.cumsum(0) - there.long()
                keys[:, step] = before + there - before[torch.arange(len(keys)) - positions]
            if not rule.causal:
                lengths = torch.tensor(self.segments.bounds).diff()
                keys[:, step] = lengths.repeat_interleave(lengths)
            if rule.window is not None:
                keys[:, step].clamp_(max=rule.window)
            if rule.masked:
                for start, end in self.segments.spans:
                    keys[start:end, step] = (self._document_map(step, start, end) > 0).sum(-1).amax(0).cpu()
        return keys

    @cached_property
    def attention_rows(self) -> list[RowStatistics]:
        """One a step."""
        rows = {}
        for layer, overlaps in self.attention_overlaps.items():
            visits = [s.index for s in self.plan.steps if s.layer == layer]
            rows.update(zip(visits, overlaps.rows, strict=True))
        for step in self.plan.steps:
            if step.index not in rows:
                rows[step.index] = self._compare([step.index], overlaps=False).rows[0]
        return [rows[i] for i in range(len(self.plan))]

    @cached_property
    def attention_overlaps(self) -> dict[int, VisitOverlaps]:
        """Looped layer -> overlaps of its visits."""
        return {
            layer: self._compare([s.index for s in self.plan.steps if s.layer == layer], overlaps=True)
            for layer in self.plan.looped_layers
        }

    def _compare(self, steps: list[int], overlaps: bool) -> VisitOverlaps:
        """Rows of the visits of one layer, and what they share."""
        if steps[0] in self._captured.absent.get("Q", {}):
            return self._no_rows(len(steps))
        rules = [self._captured.rules.get(step, self._captured.rules.get(steps[0])) for step in steps]
        visits = [self._queries_and_keys(step) for step in steps]
        plain = AttentionRule(visits[0][0].shape[-1] ** -0.5)
        rules = [rule or plain for rule in rules]
        first, alike = rules[0], len({(rule.window, rule.soft_cap, rule.scale) for rule in rules}) == 1
        if alike and all(rule.in_kernels for rule in rules):
            fixed = {"window": first.window, "soft_cap": first.soft_cap, "sinks": first.sinks}
            if overlaps:
                return visit_overlaps(visits, self.segments, first.scale, self._implementation, **fixed)
            rows = [row_statistics(q, k, self.segments, first.scale, self._implementation, **fixed) for q, k in visits]
            return VisitOverlaps(rows, {}, None)

        def pattern(visit: int, start: int, end: int) -> Tensor:
            rule, there = rules[visit], self.visited(steps[visit])
            if rule.from_map:
                return self._document_map(steps[visit], start, end)
            q, k = (x[start:end] for x in visits[visit])
            if there is None or not rule.among_visited:
                return rule.pattern(q, k)
            at = there[start:end].nonzero().squeeze(1)
            p = q.new_zeros(q.shape[1], len(q), len(q), dtype=torch.promote_types(q.dtype, torch.float32))
            p[:, at[:, None], at] = rule.pattern(q[at], k[at])
            return p

        return map_overlaps(rules, pattern, self.segments, overlaps)

    def _document_map(self, step: int, start: int, end: int) -> Tensor:
        """[head, query, key] of one document, from the captured map [context, head, query, key]."""
        maps = self._captured.at("P", step)
        first = start if self._keep is None else int(self._keep[start])
        context, at = divmod(first, maps.shape[-1])
        return maps[context, :, at : at + end - start, at : at + end - start]

    def _no_rows(self, visits: int) -> VisitOverlaps:
        """Of a layer without attention: NaN."""
        nan = self._nothing_at("Q")[..., 0]
        none = OverlapStatistics(torch.zeros_like(nan, dtype=torch.bool), torch.zeros_like(nan, dtype=torch.int64), nan)
        rows = [RowStatistics(nan, nan, nan, nan)] * visits
        return VisitOverlaps(rows, dict.fromkeys(combinations(range(visits), 2), none), [none] * visits)

    def _queries_and_keys(self, step: int) -> tuple[Tensor, Tensor]:
        """With NaN for infinities: a score of -inf would leave its row a number, as if the key weren't there."""
        q, k = self.site("Q", step), self.site("K", step)
        if bool(q.isfinite().all()) and bool(k.isfinite().all()):
            return q, k
        return q.masked_fill(q.isinf(), float("nan")), k.masked_fill(k.isinf(), float("nan"))
