"""A dashboard with a tiny model behind it, its service, and a model that waits until it is let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.support.tiny_live import Held, byte_tokenizer

from visitlens.app.live.service import LiveService
from visitlens.app.pages import live as page
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.models.looped_moe import LoopedMoE

expect.set_options(timeout=60_000)  # a busy machine is no failure


@pytest.fixture(scope="session")
def make_checkpoint(
    make_model: Callable[..., LoopedMoE], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Factory: a folder with a model of so many visits (layers 1 and 2 of 4 looped, 8 experts a token)."""

    def build(visits: int) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / f"tiny-{visits}"
        model = make_model(visits, vocab_size=259, context_length=256, num_experts=16, experts_per_token=8)
        save_model(model, folder)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    return build


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[[int], Path]) -> Path:
    return make_checkpoint(2)


@pytest.fixture(scope="session")
def live_site(serve: Callable[..., Any], folder: Path, checkpoint: Path) -> Any:
    return serve(folder / "looped.vlens", checkpoint=checkpoint)


@pytest.fixture
def live(live_site: Any) -> LiveService:
    return page.service(live_site.context)


@pytest.fixture
def person(meet: Callable[..., Any], live_site: Any) -> Iterator[Any]:
    visitor = meet(live_site)
    yield visitor
    assert not visitor.outside and not visitor.errors


@pytest.fixture
def held(live: LiveService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    model = Held(live._loaded())
    monkeypatch.setattr(live, "_model", model)
    yield model
    model.gate.set()
