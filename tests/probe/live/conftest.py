"""A tiny live model with a tokenizer of bytes, and one run of it. Read-only: they're shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.tiny_live import PROMPT, byte_tokenizer
from tokenizers import Tokenizer

from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.live.live_run import LiveRun


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def make_live(make_model: Callable[..., LoopedMoE], tokenizer: Tokenizer) -> Callable[..., Tracer]:
    """Factory: `make_live(visits=2, limit=512, **options of make_model)`."""

    def build(visits: int = 2, *, limit: int = 512, **options: Any) -> Tracer:
        return Tracer(make_model(visits, vocab_size=259, **options), tokenizer, name="tiny", limit=limit)

    return build


@pytest.fixture(scope="session")
def live(make_live: Callable[..., Tracer]) -> Tracer:
    return make_live()


@pytest.fixture(scope="session")
def run(live: Tracer) -> LiveRun:
    return live.run(PROMPT)
