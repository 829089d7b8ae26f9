"""Run, tokens through a model with what was changed; Difference, what a change did. Made by `model.run` in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.generation import generate
from visitlens.hooks.capture.sampling import Sampling
from visitlens.hooks.core.model_interface import is_intervened
from visitlens.hooks.interventions.forward import Generated, numbers
from visitlens.hooks.interventions.intervene import Intervention, intervene
from visitlens.hooks.interventions.intervention import flatten
from visitlens.probe.drawing.notebook_html import LinkedMaps, show, token_strip

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from visitlens.probe.live.live_run import LiveRun
    from visitlens.probe.model.model import Model


@dataclass(frozen=True, eq=False)
class Run:
    """Tokens through a model, with what was changed. Axes are [position, ...] for one text, [text, position, ...] for several.

    It keeps no hook on the model: each new site is one more forward, and its values are kept.
    """

    model: Model = field(repr=False)
    token_ids: Tensor = field(repr=False)
    segment_ids: Tensor = field(repr=False)
    interventions: tuple[Intervention, ...] = ()
    prompt_length: int | None = None
    """How many tokens were given, where the model wrote the rest (`generate`)."""
    _sites: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def logits(self) -> Tensor:
        with torch.no_grad(), self._intervened():
            logits = self.model.native(self.token_ids, self.segment_ids)
            assert logits is not None
            return self._one(logits)

    @cached_property
    def loss(self) -> Tensor:
        """[position - 1] nats: entry i is for token i + 1; NaN for padding."""
        log_p = self.logits.float().log_softmax(-1)[..., :-1, :]
        truth = self._one(self.token_ids)[..., 1:]
        loss = -log_p.gather(-1, truth.unsqueeze(-1)).squeeze(-1)
        return loss.masked_fill(self._one(self.segment_ids)[..., 1:] < 0, float("nan"))

    @property
    def tokens(self) -> list[str]:
        """The text of each token (of the first text)."""
        ids = self.token_ids[0][self.segment_ids[0] >= 0].tolist()
        return self.model.text_of.sequence(ids)

    def site(self, name: str, layer: int, visit: int = 1) -> Tensor:
        """The values at a site (`visitlens.hooks.core.sites.SITES`) at one visit of one layer, after the interventions.

        Raises:
            InputError: no such site, layer or visit.
        """
        return self._one(self.at(name, self.model.plan.step(layer, visit).index))

    def at(self, site: str, step: int) -> Tensor:
        """[text, position, ...] by step: what `replace(site, run)` takes from this run."""
        if site not in self._sites:
            model = self.model.native
            if is_intervened(model):
                raise InputError(f"ask this run for {site!r} before `intervene` begins: it would run inside it")
            with torch.no_grad(), self._intervened(), capture(model, [site]) as captured:
                model(self.token_ids, self.segment_ids, return_type="none")
            self._sites[site] = captured
        return self._sites[site].at(site, step)

    def held(self, site: str, step: int) -> Tensor | None:
        """What a run of any site has kept there: which tokens were at a step."""
        return next((captured.held(site, step) for captured in self._sites.values()), None)

    def with_(self, *interventions: Intervention | Sequence[Intervention]) -> Run:
        """The same tokens with more interventions, after those that there are."""
        chain = tuple(flatten([*self.interventions, *interventions]))
        run = Run(self.model, self.token_ids, self.segment_ids, chain, self.prompt_length)
        awaited = self.prompt_length is None and any(isinstance(i.place.token, Generated) for i in chain)
        return run if awaited else self._checked(run)  # what isn't written yet is chosen by `generate`

    def generate(self, max_new_tokens: int = 32, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> Run:
        """The text continued under this run's interventions, to the end-of-text token at most: a run of all of it. Greedily at
        temperature 0; else drawn as `visitlens record --generate` draws the first prompt's tokens (`hooks.capture.sampling.Sampling`).

        `token=do.generated(0)` is the first token written; `generated` is the text written. A later visit of each new token takes
        from that token's own earlier visit.

        Raises:
            InputError: texts of different lengths, a model that keeps no cache, what can't be done token by token, or a
                temperature, top_p or seed that greedy generation wouldn't use.
        """
        sampling = Sampling(temperature, top_p, seed)
        if seed and not temperature:
            raise InputError(f"seed {seed} is of sampling: give a temperature above 0 too")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"expected at least 1 new token, got {max_new_tokens!r}")
        if bool((self.segment_ids < 0).any()):
            raise InputError("texts of different lengths can't be continued side by side: run each alone")
        # The last token is written and not run here: what acts on it shows in the run of the whole text.
        with self._intervened(must_match=False):
            stop = self.model.encoder.eos.id if len(self.token_ids) == 1 else None
            tokens = generate(self.model.native, self.token_ids, max_new_tokens, stop, sampling.chooser())
        segments = self.segment_ids[:, :1].expand_as(tokens).contiguous()
        prompt = self.token_ids.shape[1] if self.prompt_length is None else self.prompt_length
        run = Run(self.model, tokens, segments, self.interventions, prompt)
        return self._checked(run)

    @property
    def generated(self) -> str:
        """The text that the model wrote (in the first text).

        Raises:
            InputError: a run of given tokens.
        """
        if self.prompt_length is None:
            raise InputError("every token of this run was given: run.generate(32) continues it")
        return self.model.tokenizer.decode(self.token_ids[0, self.prompt_length :].tolist(), skip_special_tokens=False)

    @cached_property
    def trace(self) -> LiveRun:
        """The first text with everything about it as plain arrays, and the tables and maps of the live probe (`Model.trace`).

        Raises:
            InputError: a run with interventions: a trace is of the model as it is.
        """
        if self.interventions:
            raise InputError(
                "a trace is of the model as it is: trace the run without interventions, model.run(text).trace"
            )
        ids = self.token_ids[0][self.segment_ids[0] >= 0]
        return self.model.trace(ids.tolist())

    @property
    def texts(self) -> list[str]:
        """The text of each token (of the first text)."""
        return self.tokens

    def next_tokens(self, position: int = -1, n: int = 8) -> list[tuple[int, str, float]]:
        """The n most likely tokens after a position of the first text: id, text, probability."""
        return [(token, self.model.text_of(token), p) for token, p in self._top(n, position)]

    def diff(self, other: Run) -> Difference:
        """What `other` (the intervened run, say) changes against this one.

        Raises:
            InputError: a run of other tokens.
        """
        return Difference(self, other)

    def top(self, most: int = 5, position: int = -1) -> list[tuple[str, float]]:
        """The most likely next tokens after a position of the first text, with their probabilities."""
        return [(self.model.text_of(token), p) for token, p in self._top(most, position)]

    def _top(self, most: int, position: int) -> list[tuple[int, float]]:
        row = self.logits if self.logits.ndim == 2 else self.logits[0]
        if not 1 <= most <= row.shape[-1] or not -len(row) <= position < len(row):
            raise InputError(
                f"expected 1 to {row.shape[-1]} next tokens after a position among {len(row)}, got {most} after {position}"
            )
        found = row[position].float().softmax(-1).topk(most)
        return [(int(i), float(p)) for p, i in zip(found.values, found.indices, strict=True)]

    def attention(self, layer: int, head: int, visits: tuple[int, int] | None = None) -> LinkedMaps:
        """Attention of one head at two visits and the later less the earlier (at one visit for a layer that runs once)."""
        rows = self._labels()
        maps = {v: self.at("P", self.model.plan.step(layer, v).index)[0] for v in self._visits(layer, visits)}
        heads = next(iter(maps.values())).shape[0]
        if not isinstance(head, (int, np.integer)) or not 0 <= head < heads:
            raise InputError(f"expected a head in 0..{heads - 1}, got {head!r}")
        n = len(rows)
        both_ways = "next token" in self.model.config.missing
        seen = np.ones((n, n), bool) if both_ways else np.tril(np.ones((n, n), bool))
        shown = {v: np.where(seen, p[head, :n, :n].float().cpu().numpy(), np.nan) for v, p in maps.items()}
        return LinkedMaps(f"Attention of layer {layer}, head {head}", _compared(shown), rows, rows, ("query", "key"))

    def experts(self, layer: int, visits: tuple[int, int] | None = None) -> LinkedMaps:
        """The gate of every expert for every token at two visits and the later less the earlier; 0 where it isn't used."""
        rows, shown = self._labels(), {}
        for visit in self._visits(layer, visits):
            step = self.model.plan.step(layer, visit).index
            ids, gates = (self.at(site, step)[0, : len(rows)] for site in ("experts", "gates"))
            table = torch.zeros(len(rows), self.model.config.num_experts).scatter_(1, ids.cpu(), gates.float().cpu())
            shown[visit] = table.numpy()
        columns = [str(e) for e in range(self.model.config.num_experts)]
        return LinkedMaps(f"Experts of layer {layer}", _compared(shown), rows, columns, ("token", "expert"))

    def plot(self) -> go.Figure:
        """The loss of each token."""
        return _token_figure(self._labels()[1:], {"loss": self._first(self.loss)}, "Loss by token", "nats")

    def show(self) -> None:
        """Displays the tokens with their losses; prints in a terminal."""
        show(self)

    def _intervened(self, must_match: bool = True) -> AbstractContextManager[None]:
        return intervene(self.model.native, *self.interventions, prompt=self.prompt_length, must_match=must_match)

    @staticmethod
    def _checked(run: Run) -> Run:
        _ = run.logits  # a wrong place or token is an error here, not later
        return run

    def _visits(self, layer: int, visits: tuple[int, int] | None) -> tuple[int, ...]:
        last = self.model.plan.step(layer, 1) and self.model.plan.visits[layer]
        chosen = numbers(visits) or ((1, last) if last > 1 else (1,))
        if len(chosen) > 2:
            raise InputError(f"expected one visit or two to compare, got {visits}")
        return chosen

    @property
    def _predicted(self) -> int:
        """How many tokens have one before them."""
        return int((self.segment_ids[:, 1:] >= 0).sum())

    def _labels(self) -> list[str]:
        return [f"{i} {token!r}" for i, token in enumerate(self.tokens)]

    def _one(self, value: Tensor) -> Tensor:
        return value[0] if len(self.token_ids) == 1 else value

    def _first(self, value: Tensor) -> np.ndarray:
        row = value if value.ndim == 1 else value[0]
        return row[: len(self.tokens) - 1].double().cpu().numpy()

    def __repr__(self) -> str:
        texts = "" if len(self.token_ids) == 1 else f"{len(self.token_ids)} texts, "
        changed = "".join(f", {i!r}" for i in self.interventions)
        loss = _mean_of(self.loss, self._predicted)
        tokens = int((self.segment_ids >= 0).sum())
        written = "" if self.prompt_length is None else f" ({len(self.token_ids[0]) - self.prompt_length} generated)"
        return f"Run({texts}{tokens} token{'s' if tokens != 1 else ''}{written}, {loss}{changed})"

    def _repr_html_(self) -> str:
        values = np.concatenate([[np.nan], self._first(self.loss)])
        return f"<div>{html.escape(repr(self))}</div>{token_strip(self.tokens, values, 'nats')}"


@dataclass(frozen=True, eq=False)
class Difference:
    """`after` against `before`, token by token (of the first text where there are several)."""

    before: Run
    after: Run

    def __post_init__(self) -> None:
        if not isinstance(self.after, Run):
            raise InputError(f"expected another run of the same text, got {self.after!r:.80}")
        if not torch.equal(self.before.token_ids, self.after.token_ids):
            raise InputError("the two runs have different tokens: compare runs of one text")

    @cached_property
    def loss(self) -> Tensor:
        """[position - 1] nats that `after` loses."""
        return self.after.loss - self.before.loss

    @cached_property
    def divergence(self) -> Tensor:
        """[position] KL(before || after) of the next token, nats."""
        p, q = (run.logits.float().log_softmax(-1) for run in (self.before, self.after))
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    def site(self, name: str, layer: int, visit: int = 1) -> Tensor:
        """What changed at a site: `after` less `before`."""
        return self.after.site(name, layer, visit) - self.before.site(name, layer, visit)

    def plot(self) -> go.Figure:
        """Change of the loss of each token."""
        series = {"change of loss": self.before._first(self.loss)}
        return _token_figure(self.before._labels()[1:], series, "Change of the loss by token", "nats")

    def show(self) -> None:
        """Displays the tokens with what each lost; prints in a terminal."""
        show(self)

    def __repr__(self) -> str:
        before, after = self.before.interventions, self.after.interventions
        if after[: len(before)] == before:
            changed = ", ".join(map(repr, after[len(before) :])) or "nothing"
        else:
            names = [", ".join(map(repr, chain)) or "nothing" for chain in (after, before)]
            changed = " against ".join(names)
        lost = _mean_of(self.loss, self.before._predicted, "+")
        return f"Difference({changed}: {lost}, KL {float(self.divergence.nanmean()):.4f})"

    def _repr_html_(self) -> str:
        values = np.concatenate([[np.nan], self.before._first(self.loss)])
        return f"<div>{html.escape(repr(self))}</div>{token_strip(self.before.tokens, values, 'nats')}"


def _mean_of(loss: Tensor, predicted: int, sign: str = "") -> str:
    """The mean, and how many tokens it is without because theirs is no number."""
    known = int(loss.isfinite().sum())
    if not predicted:
        return "nothing to predict"
    without = "" if known == predicted else f" over {known} of {predicted}, the others aren't numbers"
    return f"{float(loss[loss.isfinite()].mean()):{sign}.4f} nats a token{without}"


def _compared(shown: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
    panels = {f"visit {visit}": values for visit, values in shown.items()}
    if len(shown) == 2:
        (a, first), (b, second) = shown.items()
        panels[f"visit {b} - visit {a}"] = second - first
    return panels


def _token_figure(labels: Sequence[str], series: dict[str, np.ndarray], title: str, unit: str) -> go.Figure:
    import plotly.graph_objects as go

    from visitlens.probe.drawing.stat_figure import NotebookFigure
    from visitlens.probe.drawing.theme import LIGHT, escape

    places = list(range(1, len(labels) + 1))
    texts = [escape(label) for label in labels]
    traces = [
        go.Bar(x=places, y=values.tolist(), name=name, hovertext=texts, marker={"color": LIGHT.visits[0]})
        for name, values in series.items()
    ]
    figure = go.Figure(
        traces, layout={"template": LIGHT.template(), "width": 820, "height": 320, "title": {"text": title}}
    )
    figure.update_xaxes(title_text="token")
    return NotebookFigure(figure.update_yaxes(title_text=unit))
