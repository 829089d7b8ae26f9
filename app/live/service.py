"""LiveService: the dashboard's model, loaded at its first run, and the queue in which it runs. Torch comes with the model.

Ids of jobs stand in URLs, so what they lead to is looked up by kind: a probe's run, a head's ablation, a scan of heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from visitlens.app.live.job_queue import JobQueue, OnProgress
from visitlens.errors import InputError
from visitlens.hooks.models.checkpoint_files import read_json
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.tokenizer import read_tokenizer
from visitlens.probe.live.head_scan import HeadScan, SilencedHead
from visitlens.probe.live.live_run import LiveRun
from visitlens.probe.live.prompts import CHARACTERS_PER_TOKEN, TOKEN_LIMIT, DyckPreset, dyck_presets

if TYPE_CHECKING:
    from visitlens.probe.model.model import Model

Result = TypeVar("Result", LiveRun, SilencedHead, HeadScan)
_NAMES = {LiveRun: "run of a prompt", SilencedHead: "silenced head", HeadScan: "scan of heads"}
_MASKED = "it fills in masked tokens, so nothing follows a prompt"
_log = logging.getLogger(__name__)


class LiveService:
    """One a dashboard. `limit` is the most tokens of a prompt, BOS included; `options` says how a checkpoint with these weights
    (their SHA-256) is read, which is asked when it is."""

    def __init__(
        self,
        checkpoint: Path,
        jobs: JobQueue | None = None,
        limit: int = TOKEN_LIMIT,
        options: Callable[[str], Mapping[str, Any]] = lambda weights: {},
    ) -> None:
        self.checkpoint, self.limit, self._options = checkpoint, limit, options
        self.jobs = jobs or JobQueue()
        self._model: Model | None = None

    @property
    def most_characters(self) -> int:
        """Of a prompt that is looked at at all."""
        return self.limit * CHARACTERS_PER_TOKEN

    @property
    def presets(self) -> tuple[DyckPreset, ...]:
        """Dyck prompts, without loading the model; none where its tokenizer isn't there or merges brackets, or `unasked` says why."""
        return () if self.unasked else self._presets

    @property
    def unasked(self) -> str:
        """Why it makes no sense to ask the model what comes next; "" where it does. Before it is loaded, as its configuration says."""
        if self._model is not None:
            return self._model.config.missing.get("next token", "")
        return _MASKED if self._masked else ""

    @cached_property
    def _masked(self) -> bool:
        try:
            config = read_json(self.checkpoint / "config.json")
            return any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ())
        except (OSError, ValueError, AttributeError, TypeError):
            return False  # the first run says what is wrong with the checkpoint

    @cached_property
    def _presets(self) -> tuple[DyckPreset, ...]:
        try:
            config = read_json(self.checkpoint / "config.json")
            encoder = TextEncoder.of(read_tokenizer(self.checkpoint / "tokenizer.json"), SimpleNamespace(**config))
            return dyck_presets(encoder.tokenizer, led=encoder.bos.id is not None)
        except Exception:  # of files that nobody has checked: the first run says what is wrong with the checkpoint
            _log.info("no Dyck presets from %s", self.checkpoint, exc_info=True)
            return ()

    def probe(self, tab: str, prompt: str) -> str:
        """The id of a job that runs a prompt.

        Raises:
            InputError: an empty prompt, or one that is too long to be looked at.
            QueueFullError: too many jobs wait.
        """
        if not prompt:
            raise InputError("the prompt is empty: type or paste some text")
        if len(prompt) > self.most_characters:
            raise InputError(
                f"the prompt has more than {self.most_characters:,} characters; at most {self.limit:,} tokens are run "
                f"(about {4 * self.limit:,} characters of English): paste a part of it"
            )
        return self.jobs.submit(tab, lambda on_progress: self._loaded().trace(prompt, on_progress=on_progress))

    def ablate(self, tab: str, run: LiveRun, layer: int, head: int, visits: tuple[int, ...], kind: str) -> str:
        """The id of a job that silences a head. Raises QueueFullError: too many jobs wait."""

        def work(on_progress: OnProgress) -> SilencedHead:
            return self._loaded().ablate(run, layer, head, visits, kind, on_progress=on_progress)

        return self.jobs.submit(tab, work)

    def scan(self, tab: str, run: LiveRun, position: int, target: int | None, kind: str) -> str:
        """The id of a job that silences every head in turn. Raises QueueFullError: too many jobs wait."""

        def work(on_progress: OnProgress) -> HeadScan:
            return self._loaded().scan(run, position=position, target=target, kind=kind, on_progress=on_progress)

        return self.jobs.submit(tab, work)

    def find(self, id_: str, kind: type[Result]) -> Result:
        """A job's result.

        Raises:
            InputError: it is no longer kept, isn't done, failed, or is of another kind.
        """
        result = self.jobs.result(id_)
        if not isinstance(result, kind):
            raise InputError(f"the link's job is no {_NAMES[kind]}")
        return result

    def _loaded(self) -> Model:
        """Only called by jobs, which run one at a time."""
        if self._model is None:
            from visitlens.hooks.loading.load_model import weights_sha256
            from visitlens.probe.model.load import load

            weights = weights_sha256(self.checkpoint)
            options = self._options(weights)
            self._model = replace(load(self.checkpoint, **options), limit=self.limit, weights=weights)
        return self._model
