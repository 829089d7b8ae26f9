"""LiveRun: what a model did with one prompt, visit by visit, as plain arrays; and its tables. No torch."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import ExecutionPlan, VisitPair
from visitlens.hooks.text.token_texts import TokenTexts
from visitlens.probe.drawing.theme import token_text
from visitlens.probe.live.row_rule import RowRule

TOP_KEYS = 8


@dataclass(frozen=True)
class KeyChange:
    """One of a query's highest-weighted keys: its weight at both visits (None: there is one visit)."""

    position: int
    text: str
    earlier: float
    later: float | None
    status: Literal["kept", "lost", "gained"]


@dataclass(frozen=True)
class ExpertChange:
    """One expert that a token used: its gate at both visits (None: not chosen there)."""

    expert: int
    earlier: float | None
    later: float | None
    status: Literal["kept", "dropped", "new"]


@dataclass(frozen=True)
class Lens:
    """The output distribution read from the residual stream after each step, each `[step, token]`; NaN where not read.

    Attributes:
        tokens: int [step, token, n], the most likely tokens, and `probability` theirs.
        entropy: nats.
        kl: of the final distribution from this one, KL(final || lens), nats.
        answer: probability of the token that is most likely in the final distribution.
    """

    tokens: np.ndarray
    probability: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    answer: np.ndarray


@dataclass(frozen=True)
class LensRow:
    """One step of a lens at one token."""

    layer: int
    visit: int
    top: tuple[tuple[str, float], ...]
    entropy: float
    kl: float
    answer: float


@dataclass(frozen=True)
class LiveRun:
    """One forward over one prompt. Arrays are float32 whatever the model's dtype; `tokens[0]` is BOS.

    Attributes:
        queries, keys: [step, token, head, d], [step, token, kv_head, d], after rotary embedding: patterns are made of
            these when asked for, so no [query, key] map is held; `rules [step]` say how (None: the plain causal softmax),
            `maps` holds those P [head, query, key] by step that can't be made so.
        experts, gates: [step, token, k]; k is 0 where nothing is routed.
        resid_rms, update_rms, attn_write_rms, moe_write_rms: [step, token], norm / sqrt(hidden size).
        sink_mass, attention_entropy: [step, token, head]; mass on the first token, and nats.
        mass_overlap: [pair, token, head] in the order of `plan.pairs`.
        mean_context: [step, head, d], mean over the prompt of each head's attended context (PV): for mean ablation.
        logits: [token, vocab]; row i is of what follows token i.
        lens: straight to the output (None: `lacks("lens")` says why); `coda_lens`: through the layers after the loop first
            (None: there are none).
        lacking: site or assumption -> layer (-1: the model) -> why it has none; what lacks is NaN.
    """

    model: Mapping[str, Any]
    plan: ExecutionPlan
    prompt: str
    tokens: np.ndarray
    text_of: TokenTexts = field(repr=False)
    queries: np.ndarray
    keys: np.ndarray
    experts: np.ndarray
    gates: np.ndarray
    resid_rms: np.ndarray
    update_rms: np.ndarray
    attn_write_rms: np.ndarray
    moe_write_rms: np.ndarray
    sink_mass: np.ndarray
    attention_entropy: np.ndarray
    mass_overlap: np.ndarray
    mean_context: np.ndarray
    logits: np.ndarray
    lens: Lens | None
    coda_lens: Lens | None
    seconds: float
    rules: tuple[RowRule | None, ...] = ()
    maps: Mapping[int, np.ndarray] = field(default_factory=dict, repr=False)
    lacking: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def heads(self) -> int:
        return self.queries.shape[2]

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        lenses = [lens for lens in (self.lens, self.coda_lens) if lens is not None]
        arrays = [value for part in (self, *lenses) for value in vars(part).values() if isinstance(value, np.ndarray)]
        return sum(array.nbytes for array in (*arrays, *self.maps.values()))

    def lacks(self, what: str, layer: int = -1) -> str:
        """Why the model, or one of its layers, lacks a site or breaks an assumption; "" where it has it."""
        reasons = self.lacking.get(what, {})
        return reasons.get(layer, "") or reasons.get(-1, "")

    @property
    def predicts_next(self) -> bool:
        """Whether the logits at a token are of what follows it; else of the token itself (a masked language model)."""
        return not self.lacks("next token")

    @property
    def token_ids(self) -> np.ndarray:
        """[token] `tokens`, by the name that a notebook's run has for them."""
        return self.tokens

    @property
    def texts(self) -> list[str]:
        """Each token's text, unescaped."""
        return self.text_of.sequence(self.tokens)

    @property
    def labels(self) -> list[str]:
        """Each token as a label for Plotly or HTML: `12 ␣the`, escaped, unlike every other."""
        return [f"{position} {token_text(text)}" for position, text in enumerate(self.texts)]

    @property
    def feed_forward(self) -> str:
        """What its feed-forward layers are called."""
        return "feed-forward" if self.lacks("experts") else "MoE"

    @property
    def causal(self) -> bool:
        """Whether no query sees later tokens."""
        return all(rule is None or rule.causal for rule in self.rules)

    # Places

    def pair(self, layer: int, visits: tuple[int, int] | None = None) -> VisitPair | None:
        """Two visits of a layer, the first and the last by default; None where it has only one.

        Raises:
            InputError: no such layer or visits.
        """
        self._check(layer=layer)
        if layer not in self.plan.looped_layers:
            return None
        a, b = visits or (1, self.plan.visits[layer])
        if not a < b:
            raise InputError(f"expected an earlier and a later visit, got {(a, b)}")
        return VisitPair(self.plan.step(layer, a), self.plan.step(layer, b))

    def _check(self, **given: int) -> None:
        sizes = {"layer": len(self.plan.visits), "head": self.heads, "token": len(self), "query": len(self)}
        for name, value in given.items():
            if not 0 <= value < sizes[name]:
                raise InputError(f"no {name} {value}: expected 0 to {sizes[name] - 1}")

    def at(self, position: int) -> int:
        """From the end where negative, as in a list."""
        position = position + len(self) if position < 0 else position
        self._check(token=position)
        return position

    # Attention

    def pattern(self, layer: int, visit: int, head: int) -> np.ndarray:
        """P [query, key] of one head, made from Q and K; 0 where a query can't see.

        Raises:
            InputError: no such place, or a layer without attention.
        """
        self._check(head=head)
        step = self.plan.step(layer, visit).index
        if why := self.lacks("Q", layer):
            raise InputError(f"layer {layer} has no attention: {why}")
        if step in self.maps:
            return self.maps[step][head]
        rule = (self.rules[step] if self.rules else None) or RowRule(self.queries.shape[-1] ** -0.5)
        keys = self.keys[step, :, head // (self.heads // self.keys.shape[2])]
        return rule.pattern(self.queries[step, :, head], keys, head)

    def difference(self, layer: int, head: int, visits: tuple[int, int] | None = None) -> np.ndarray:
        """P [query, key] at the later visit minus P at the earlier.

        Raises:
            InputError: the layer has one visit.
        """
        pair = self.pair(layer, visits)
        if pair is None:
            raise InputError(f"layer {layer} has one visit; layers with more are {list(self.plan.looped_layers)}")
        return self.pattern(layer, pair.later.visit, head) - self.pattern(layer, pair.earlier.visit, head)

    def top_keys(
        self, layer: int, head: int, query: int, visits: tuple[int, int] | None = None, n: int = TOP_KEYS
    ) -> list[KeyChange]:
        """The n highest-weighted keys of a query at either visit: kept, lost and gained, each group by weight.

        Ties go to the smaller position. A layer with one visit has only kept ones.
        """
        query = self.at(query)
        pair = self.pair(layer, visits)
        steps = (pair.earlier, pair.later) if pair else (self.plan.step(layer, 1),)
        rows = [self.pattern(layer, step.visit, head)[query] for step in steps]
        seen = query + 1 if self.causal else len(self)
        rows = [row[:seen] for row in rows]
        tops = [np.argsort(-row, kind="stable")[:n].tolist() for row in rows]
        first, last = tops[0], tops[-1]
        found: list[KeyChange] = []
        groups: dict[Literal["kept", "lost", "gained"], list[int]] = {
            "kept": [key for key in last if key in first],
            "lost": [key for key in first if key not in last],
            "gained": [key for key in last if key not in first],
        }
        for status, group in groups.items():
            found += [
                KeyChange(key, self.texts[key], float(rows[0][key]), float(rows[1][key]) if pair else None, status)
                for key in group
            ]
        return found

    # Experts

    def routed(self, layer: int) -> bool:
        """Whether a layer chooses among experts."""
        return self.experts.shape[-1] > 0 and not self.lacks("experts", layer)

    def expert_changes(self, layer: int, token: int, visits: tuple[int, int] | None = None) -> list[ExpertChange]:
        """The experts that a token used at either visit: kept, dropped and new, each group by gate."""
        token = self.at(token)
        pair = self.pair(layer, visits)
        steps = (pair.earlier, pair.later) if pair else (self.plan.step(layer, 1),)
        gates = [
            {int(e): float(g) for e, g in zip(self.experts[s.index, token], self.gates[s.index, token], strict=True)}
            for s in steps
        ]
        first, last = gates[0], gates[-1]
        kept = sorted(set(first) & set(last), key=lambda e: -last[e])
        dropped = sorted(set(first) - set(last), key=lambda e: -first[e])
        new = sorted(set(last) - set(first), key=lambda e: -last[e])
        return [
            *(ExpertChange(e, first[e], last[e] if pair else None, "kept") for e in kept),
            *(ExpertChange(e, first[e], None, "dropped") for e in dropped),
            *(ExpertChange(e, None, last[e], "new") for e in new),
        ]

    def experts_kept(self, layer: int, visits: tuple[int, int] | None = None) -> np.ndarray | None:
        """[token] how many of the k experts are the same at both visits; None where the layer has one visit, or
        no experts."""
        pair = self.pair(layer, visits)
        if pair is None or not self.routed(layer):
            return None
        earlier, later = self.experts[pair.earlier.index], self.experts[pair.later.index]
        return (earlier[:, :, None] == later[:, None, :]).any(-1).sum(-1)

    # Output

    def log_probs(self, position: int = -1) -> np.ndarray:
        """[vocab] log-probabilities of what follows a token, nats."""
        return log_softmax(self.logits[self.at(position)])

    def next_tokens(self, position: int = -1, n: int = 8) -> list[tuple[int, str, float]]:
        """The n most likely tokens after a position: id, text, probability."""
        log_probs = self.log_probs(position)
        order = np.argsort(-log_probs, kind="stable")[:n]
        return [(int(token), self.text_of(token), float(np.exp(log_probs[token]))) for token in order]

    def target(self, position: int = -1) -> int:
        """What ablations are judged by unless told otherwise: the token that follows in the prompt; after the last
        one, the most likely token. Of a masked language model, the token itself."""
        position = self.at(position)
        if not self.predicts_next:
            return int(self.tokens[position])
        return int(self.tokens[position + 1] if position + 1 < len(self) else self.logits[position].argmax())

    def readout(self, position: int = -1, *, coda: bool = False) -> list[LensRow]:
        """The lens at every step for one token; with `coda`, through the layers after the loop first.

        Raises:
            InputError: `coda`, and no layer comes after the loop.
        """
        lens, position = self.coda_lens if coda else self.lens, self.at(position)
        if lens is None:
            raise InputError(self.lacks("lens") or "this model has no layers after a loop, so no coda lens")
        return [
            LensRow(
                step.layer,
                step.visit,
                tuple(
                    (self.text_of(t), float(p))
                    for t, p in zip(
                        lens.tokens[step.index, position], lens.probability[step.index, position], strict=True
                    )
                ),
                float(lens.entropy[step.index, position]),
                float(lens.kl[step.index, position]),
                float(lens.answer[step.index, position]),
            )
            for step in self.plan.steps
            if not np.isnan(lens.entropy[step.index, position])
        ]

    def plot(self, layer: int, head: int, visits: tuple[int, int] | None = None, theme: str = "light") -> Any:
        """Attention maps of one head: earlier visit, later visit, difference (a Plotly figure)."""
        from visitlens.probe.drawing.theme import find_theme
        from visitlens.probe.live.figures import attention_maps

        return attention_maps(self, layer, head, visits, find_theme(theme))

    def __repr__(self) -> str:
        (_, best, probability), *_ = self.next_tokens(n=1)
        return (
            f"LiveRun({self.model['name']!r}, {len(self)} tokens, {len(self.plan)} steps, "
            f"next {best!r} at {probability:.3f})"
        )

    def _repr_html_(self) -> str:
        """What follows the prompt, and which heads change most between visits."""
        rows = "".join(
            f"<tr><td><code>{token_text(t)}</code></td><td>{p:.3f}</td></tr>" for _, t, p in self.next_tokens()
        )
        heads = "".join(
            f"<tr><td>layer {layer}, head {head}</td><td>{overlap:.3f}</td></tr>"
            for layer, head, overlap in self.most_changed_heads(n=8)
        )
        changed = f"<table><tr><th>head</th><th>mass overlap</th></tr>{heads}</table>" if heads else ""
        return (
            f"<p><b>{html.escape(str(self.model['name']))}</b>, {len(self)} tokens, {len(self.plan)} steps</p>"
            f"<div style='display:flex;gap:2em;align-items:flex-start'>"
            f"<table><tr><th>next token</th><th>probability</th></tr>{rows}</table>{changed}</div>"
        )

    def head_overlap(self, visits: tuple[int, int] | None = None) -> tuple[list[int], np.ndarray]:
        """Looped layers, and [layer, head] mean mass overlap between two visits of this prompt's queries but the first
        (which sees one key)."""
        pairs = [self.pair(layer, visits) for layer in self.plan.looped_layers]
        at = [self.plan.pairs.index(pair) for pair in pairs if pair is not None]
        if not at or len(self) < 2:
            return list(self.plan.looped_layers), np.full((len(at), self.heads), np.nan)
        return list(self.plan.looped_layers), self.mass_overlap[at, 1:].mean(1)

    def most_changed_heads(self, visits: tuple[int, int] | None = None, n: int = 8) -> list[tuple[int, int, float]]:
        """(layer, head, mass overlap) of the heads whose attention differs most between two visits, lowest overlap first."""
        layers, overlap = self.head_overlap(visits)
        if not layers or np.isnan(overlap).all():
            return []
        order = np.argsort(overlap, axis=None, kind="stable")[:n]
        return [
            (layers[row], int(head), float(overlap[row, head]))
            for row, head in zip(*np.unravel_index(order, overlap.shape), strict=True)
        ]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def empty_lens(steps: int, tokens: int, n: int) -> Lens:
    """A lens that was read nowhere yet."""
    nothing = np.full((steps, tokens), np.nan, dtype=np.float32)
    top = np.zeros((steps, tokens, n), dtype=np.int64)
    return Lens(top, np.full(top.shape, np.nan, dtype=np.float32), *(nothing.copy() for _ in range(3)))
