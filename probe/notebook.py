"""A model in a notebook: `vl.load(...)`, `model.run(text)`, `run.site("V", layer=5, visit=2)`, `run.with_(...)`, `run.diff(...)`."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.hooks.capture import capture
from visitlens.hooks.intervene import Intervention, intervene, with_loop_count
from visitlens.hooks.interventions.intervention import flatten
from visitlens.hooks.loop_plan import ExecutionPlan
from visitlens.hooks.models.checkpoint import load_model, load_tokenizer
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.kernels.errors import InputError
from visitlens.probe.bundled import PAIR, SAMPLE
from visitlens.probe.experiment import Results
from visitlens.probe.experiment import experiment as run_experiment
from visitlens.probe.pictures import LinkedMaps, loop_svg, show
from visitlens.probe.samples import Sample

if TYPE_CHECKING:
    import plotly.graph_objects as go

BUNDLED = {"smelt": PAIR["looped"], "baseline": PAIR["baseline"]}
Text = str | Sequence[str] | Sequence[int] | np.ndarray | Tensor


def load(source: str | Path = "smelt", dtype: str = "float32", device: str = "cpu") -> Model:
    """A model to probe: a checkpoint folder, or `smelt` or `baseline`, the two that ship with visitlens.

    Raises:
        CheckpointError: the folder is no checkpoint.
        InputError: a recording; those are opened with `visitlens.open`.
    """
    folder = Path(BUNDLED.get(str(source), source))
    if (folder / "manifest.json").is_file():
        raise InputError(f"{folder} is a recording: open it with visitlens.open(...)")
    return Model(load_model(folder, dtype, device), load_tokenizer(folder), folder.name)


@dataclass(frozen=True, eq=False)
class Model:
    """A model and its tokenizer. `native` is the LoopedMoE itself, for `run_with_hooks` and the like."""

    native: LoopedMoE = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str = "model"

    @property
    def plan(self) -> ExecutionPlan:
        return self.native.plan

    @property
    def config(self) -> LoopedMoEConfig:
        return self.native.config

    def run(self, text: Text, *interventions: Intervention | Sequence[Intervention]) -> Run:
        """A text, several, or token ids, run with the interventions given. What it computes is computed when asked for.

        Raises:
            InputError: no token, ids outside the vocabulary, a text longer than the context.
        """
        tokens, segments = self._tokens(text)
        run = Run(self, tokens, segments, tuple(flatten(interventions)))
        _ = run.logits  # a wrong place or token is an error here, not later
        return run

    def with_loops(self, visits: int, residual_scale: str = "rescaled") -> Model:
        """The same weights with the loop span run `visits` times (`hooks.intervene.with_loop_count`)."""
        view = with_loop_count(self.native, visits, residual_scale)
        return Model(view, self.tokenizer, f"{self.name}, {visits} visits, scale {residual_scale}")

    def sample(self, text: str | Path | Iterable[str] = SAMPLE, max_tokens: int | None = 4096) -> Sample:
        """Documents to experiment on; by default the first tokens of the bundled held-out text."""
        return Sample.of_text(text, self.tokenizer, self.config, max_tokens=max_tokens)

    def dyck(self, prompts: int = 8, shots: Sequence[int] = (0, 1, 2, 4, 8), seed: int = 0) -> Sample:
        """Few-shot bracket prompts to experiment on, so many for each number of shots."""
        return Sample.of_dyck(self.tokenizer, self.config, prompts=prompts, shots=shots, seed=seed)

    def experiment(self, name: str, sample: Sample | None = None, **options: Any) -> Results:
        """One of `visitlens.probe.experiment.registered()` on a sample, by default `model.sample()`."""
        with _progress(name) as tick:
            return run_experiment(name, self.native, sample or self.sample(), on_progress=tick, **options)

    def _tokens(self, text: Text) -> tuple[Tensor, Tensor]:
        bos = self.config.bos_token_id
        if isinstance(text, str):
            texts: list[list[int]] = [[bos, *self._ids(text)]]
        elif isinstance(text, (np.ndarray, Tensor)):
            texts = torch.as_tensor(text).long().reshape(-1, text.shape[-1] if text.ndim else 1).tolist()
        elif len(text) and all(isinstance(part, str) for part in text):
            texts = [[bos, *self._ids(str(part))] for part in text]
        else:
            texts = [[int(token) for token in text]]  # type: ignore[arg-type]  # checked by the model
        longest = max(map(len, texts), default=0)
        tokens = torch.full((len(texts), longest), self.config.pad_token_id)
        segments = torch.full((len(texts), longest), -1)
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)] = torch.tensor(ids)
            segments[row, : len(ids)] = row
        device = self.native.embed.W_E.device
        return tokens.to(device), segments.to(device)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def __repr__(self) -> str:
        looped = self.plan.looped_layers
        loop = (
            f"layers {min(looped)}-{max(looped)} run {max(self.plan.visits.values())} times" if looped else "unlooped"
        )
        c = self.config
        size = sum(p.numel() for p in self.native.parameters())
        return (
            f"Model({self.name}: {c.num_layers} layers, {loop}; hidden size {c.hidden_size}, {c.num_heads} heads, "
            f"{c.experts_per_token} of {c.num_experts} experts, {size:,} parameters)"
        )

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(repr(self))}</div>{loop_svg(self.plan)}"


@dataclass(frozen=True, eq=False)
class Run:
    """Tokens through a model, with what was changed. Axes are [position, ...] for one text, [text, position, ...] for several.

    It keeps no hook on the model: each new site is one more forward, and its values are kept.
    """

    model: Model = field(repr=False)
    token_ids: Tensor = field(repr=False)
    segment_ids: Tensor = field(repr=False)
    interventions: tuple[Intervention, ...] = ()
    _sites: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def logits(self) -> Tensor:
        with torch.no_grad(), intervene(self.model.native, *self.interventions):
            return self._one(self.model.native(self.token_ids, self.segment_ids))

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
        return [self.model.tokenizer.decode([i], skip_special_tokens=False) for i in ids]

    def site(self, name: str, layer: int, visit: int = 1) -> Tensor:
        """The values at a site (`visitlens.hooks.sites.SITES`) at one visit of one layer, after the interventions.

        Raises:
            InputError: no such site, layer or visit.
        """
        return self._one(self.at(name, self.model.plan.step(layer, visit).index))

    def at(self, site: str, step: int) -> Tensor:
        """[text, position, ...] by step: what `replace(site, run)` takes from this run."""
        if site not in self._sites:
            model = self.model.native
            if "forward" in model.__dict__:
                raise InputError(f"ask this run for {site!r} before `intervene` begins: it would run inside it")
            with torch.no_grad(), intervene(model, *self.interventions), capture(model, [site]) as captured:
                model(self.token_ids, self.segment_ids, return_type="none")
            self._sites[site] = captured
        return self._sites[site].at(site, step)

    def with_(self, *interventions: Intervention | Sequence[Intervention]) -> Run:
        """The same tokens with more interventions, after those that there are."""
        return self.model.run(self.token_ids, *self.interventions, *interventions)._masked(self.segment_ids)

    def diff(self, other: Run) -> Difference:
        """What `other` (the intervened run, say) changes against this one.

        Raises:
            InputError: a run of other tokens.
        """
        return Difference(self, other)

    def top(self, most: int = 5, position: int = -1) -> list[tuple[str, float]]:
        """The most likely next tokens after a position of the first text, with their probabilities."""
        row = self.logits if self.logits.ndim == 2 else self.logits[0]
        found = row[position].float().softmax(-1).topk(most)
        decode = self.model.tokenizer.decode
        return [(decode([int(i)]), float(p)) for p, i in zip(found.values, found.indices, strict=True)]

    def attention(self, layer: int, head: int, visits: tuple[int, int] | None = None) -> LinkedMaps:
        """Attention of one head at two visits and the later less the earlier (at one visit for a layer that runs once)."""
        rows = self._labels()
        maps = {v: self.at("P", self.model.plan.step(layer, v).index)[0] for v in self._visits(layer, visits)}
        heads = next(iter(maps.values())).shape[0]
        if not 0 <= head < heads:
            raise InputError(f"expected a head in 0..{heads - 1}, got {head}")
        n = len(rows)
        seen = np.tril(np.ones((n, n), bool))
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

    def _masked(self, segments: Tensor) -> Run:
        """With the padding of another run of the same tokens."""
        if torch.equal(segments, self.segment_ids):
            return self
        run = Run(self.model, self.token_ids, segments, self.interventions)
        _ = run.logits
        return run

    def _visits(self, layer: int, visits: tuple[int, int] | None) -> tuple[int, ...]:
        last = self.model.plan.step(layer, 1) and self.model.plan.visits[layer]
        return visits if visits is not None else (1, last) if last > 1 else (1,)

    def _labels(self) -> list[str]:
        return [f"{i} {token!r}" for i, token in enumerate(self.tokens)]

    def _one(self, value: Tensor) -> Tensor:
        return value[0] if len(self.token_ids) == 1 else value

    def _first(self, value: Tensor) -> np.ndarray:
        row = value if value.ndim == 1 else value[0]
        return row[: len(self.tokens) - 1].double().cpu().numpy()

    def __repr__(self) -> str:
        mean = float(self.loss.nanmean()) if self.loss.numel() else float("nan")
        texts = "" if len(self.token_ids) == 1 else f"{len(self.token_ids)} texts, "
        changed = "".join(f", {i!r}" for i in self.interventions)
        return f"Run({texts}{int((self.segment_ids >= 0).sum())} tokens, {mean:.4f} nats a token{changed})"

    def _repr_html_(self) -> str:
        values = np.concatenate([[np.nan], self._first(self.loss)])
        return f"<div>{html.escape(repr(self))}</div>{_token_strip(self.tokens, values, 'nats')}"


@dataclass(frozen=True, eq=False)
class Difference:
    """`after` against `before`, token by token (of the first text where there are several)."""

    before: Run
    after: Run

    def __post_init__(self) -> None:
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
        changed = ", ".join(map(repr, self.after.interventions[len(self.before.interventions) :])) or "nothing"
        return f"Difference({changed}: {float(self.loss.nanmean()):+.4f} nats a token, KL {float(self.divergence.nanmean()):.4f})"

    def _repr_html_(self) -> str:
        values = np.concatenate([[np.nan], self.before._first(self.loss)])
        return f"<div>{html.escape(repr(self))}</div>{_token_strip(self.before.tokens, values, 'nats')}"


def _compared(shown: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
    panels = {f"visit {visit}": values for visit, values in shown.items()}
    if len(shown) == 2:
        (a, first), (b, second) = shown.items()
        panels[f"visit {b} - visit {a}"] = second - first
    return panels


def _token_strip(tokens: Sequence[str], values: np.ndarray, unit: str) -> str:
    """The text, each token shaded by its value: red for positive, blue for negative."""
    reach = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    spans = []
    for token, value in zip(tokens, values, strict=True):
        red, green, blue = (178, 24, 43) if value > 0 else (33, 102, 172)
        shade = 0.0 if np.isnan(value) else 0.6 * abs(value) / reach
        title = "no prediction" if np.isnan(value) else f"{value:+.4f} {unit}"
        text = html.escape(token).replace("\n", "↵<br>") or "&nbsp;"
        spans.append(f"<span title='{title}' style='background:rgba({red},{green},{blue},{shade:.2f})'>{text}</span>")
    return f"<div style='font-family:monospace;white-space:pre-wrap;max-width:100ch'>{''.join(spans)}</div>"


def _token_figure(labels: Sequence[str], series: dict[str, np.ndarray], title: str, unit: str) -> go.Figure:
    import plotly.graph_objects as go

    from visitlens.probe.figures.generic import NotebookFigure
    from visitlens.probe.figures.theme import LIGHT, escape

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


class _progress:
    """A bar while an experiment runs: a `<progress>` in a notebook, gone at the end; rich's on a terminal; else nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.shown, self.last = name, None, 0.0
        self.update: Callable[[int, int], None] = lambda done, total: None

    def __enter__(self) -> Callable[[int, int], None]:
        shell = None
        if "IPython" in sys.modules:
            from IPython.core.getipython import get_ipython

            shell = get_ipython()
        if shell is not None and hasattr(shell, "kernel"):
            from IPython.display import HTML, display

            self.shown = display(HTML(""), display_id=True)
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            task = bar.add_task(self.name, total=None)
            bar.start()
            self.shown, self.update = bar, lambda done, total: bar.update(task, completed=done, total=total)
        return self._tick

    def _tick(self, done: int, total: int) -> None:
        if time.monotonic() - self.last < 0.2:
            return
        self.last = time.monotonic()
        self.update(done, total)
        if hasattr(self.shown, "display_id"):
            from IPython.display import HTML

            self.shown.update(HTML(f"{html.escape(self.name)} <progress value='{done}' max='{total}'></progress>"))

    def __exit__(self, *_: object) -> None:
        if hasattr(self.shown, "display_id"):
            from IPython.display import HTML

            self.shown.update(HTML(""))
        elif self.shown is not None:
            self.shown.stop()
