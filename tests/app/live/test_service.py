"""The Live probe without a browser: the service, the functions behind the callbacks, links and exports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dash import no_update
from tests.support.tiny_live import HOSTILE, LONG, Held, ran

from visitlens.app.live.cards import prompt_card
from visitlens.app.live.job_queue import JobQueue
from visitlens.app.live.service import LiveService
from visitlens.app.pages import live as page
from visitlens.app.server.notebook import dashboard
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context
from visitlens.errors import InputError


@pytest.fixture
def service(checkpoint: Path, live: LiveService) -> Iterator[LiveService]:
    """Of its own queue, with the model that is loaded already."""
    own = LiveService(checkpoint, JobQueue(waiting=1))
    own._model = live._loaded()
    yield own
    own.jobs.close()


@pytest.fixture
def context(checkpoint: Path, folder: Path) -> Context:
    return Context(Registry([folder / "looped.vlens"]), checkpoint)


def test_the_model_is_loaded_by_the_first_run_and_torch_with_it(checkpoint: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom pathlib import Path\nfrom visitlens.app.pages import live\n"
        "from visitlens.app.live.service import LiveService\n"
        "service = LiveService(Path(sys.argv[1]))\n"
        "assert len(service.presets) == 5 and 'torch' not in sys.modules\n"
        "id_ = service.probe('tab', 'ab')\nassert service.jobs.wait(id_, 300).status == 'done'\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_that_cant_be_read_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    service = LiveService(tmp_path)
    assert service.presets == ()
    state = service.jobs.wait(service.probe("tab", "ab"), LONG)
    assert state.status == "failed" and "a checkpoint folder holds config.json" in state.message
    service.jobs.close()


def test_no_dyck_prompt_is_offered_where_nothing_follows_one(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(checkpoint / "tokenizer.json")
    for architecture, offered in (("AlbertForMaskedLM", 0), ("LlamaForCausalLM", 5)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "albert", "architectures": [architecture]}))
        service = LiveService(tmp_path)
        card = str(prompt_card(service, None))
        assert len(service.presets) == card.count("Run the Dyck prompt") == offered
        assert ("No Dyck prompts: it fills in masked tokens" in card) is (not offered)


def test_a_tab_has_one_job_and_a_new_one_takes_its_place(
    service: LiveService, context: Context, monkeypatch: Any
) -> None:
    held = Held(service._loaded())
    monkeypatch.setattr(service, "_model", held)
    active, _, said = page.do(service, context, "run", "one", "tab", None, "")
    assert said == "Waiting …" and active["as"] == "job"
    unheard, *_ = page.do(service, context, "run", "two", "tab", active, "")
    assert service.jobs.wait(active["job"], LONG).status == "cancelled"
    later, *_ = page.do(service, context, "run", "three", "tab", active, "")  # pressed before the answer came
    assert service.jobs.wait(unheard["job"], LONG).status == "cancelled"
    assert page.watch(service, later)[5] is False  # the clock goes on
    assert page.do(service, context, "cancel", "", "another", later, "")[0] is no_update
    stopped, *_ = page.do(service, context, "cancel", "", "tab", later, "")
    assert service.jobs.wait(later["job"], LONG).status == "cancelled"
    assert page.watch(service, stopped)[0] == page.watch(service, later)[0] == "Cancelled."
    assert page.do(service, context, "cancel", "", "tab", stopped, "")[0] is no_update


def test_a_full_queue_is_a_message(service: LiveService, context: Context, monkeypatch: Any) -> None:
    held = Held(service._loaded())
    monkeypatch.setattr(service, "_model", held)
    for tab in ("a", "b", "c"):
        *_, said = page.do(service, context, "run", tab, tab, None, "")
        while not held.steps:  # the first one runs, the second waits
            time.sleep(0.005)
    assert said == "1 jobs wait already: try again in a moment."
    held.gate.set()


@pytest.mark.parametrize(
    "active", [None, 7, "x", {}, {"job": "no such", "as": "job"}, {"job": 1, "as": "../x"}, {"as": "job"}]
)
def test_what_a_browser_keeps_is_not_believed(service: LiveService, active: Any) -> None:
    said, *_, going = page.watch(service, active)
    assert not isinstance(going, dict)
    assert not isinstance(said, str) or "no longer kept" in said


@pytest.mark.parametrize("what", ["dyck-99", "dyck-x", "silence", "scan", "<b>", ""])
def test_buttons_without_a_run_or_that_arent_there(service: LiveService, context: Context, what: str) -> None:
    for href in ("", "http://x/live?job=nothing", "http://x/live?job=" + "y" * 5000):
        active, *_, said = page.do(service, context, what, "ab", "tab", None, href)
        assert active is None and said.endswith(".")


def test_an_id_of_another_kind_is_refused(service: LiveService) -> None:
    run = service.find(ran(service), page.LiveRun)
    scan = service.scan("test", run, 2, None, "zero")
    assert service.jobs.wait(scan, LONG).status == "done"
    with pytest.raises(InputError, match="the link's job is no run of a prompt"):
        service.find(scan, page.LiveRun)


@pytest.mark.parametrize(
    "query",
    [
        "&layer=99&head=99&visits=3-9&at=999&when=7&kind=none&target=99999999&lens=x",
        "&layer=0&visits=1-2&at=-1&when=1-2&target=-5",
        "&at=1e9&target=٣&silence=gone&scan=gone",
    ],
)
def test_a_stale_link_falls_back(live_site: Any, live: LiveService, query: str) -> None:
    from visitlens.app.server.layout import render

    drawn = render(live_site.context, f"{live_site.url}live?job={ran(live)}{query}")
    text = str(drawn.content)
    assert "After token 21" in text and "no layer" not in text
    gone = render(live_site.context, f"{live_site.url}live?job=gone{query}")
    assert "This run isn't here" in str(gone.content)


def test_exports_of_every_panel(live_site: Any, live: LiveService) -> None:
    from urllib.request import urlopen

    job = ran(live, HOSTILE)
    for key in ("map", "heads", "norms", "lens"):
        for format_ in ("csv", "json", "rows"):
            with urlopen(f"{live_site.url}export/live/{key}.{format_}?job={job}&at=4") as answer:
                assert len(answer.read()) > 100, (key, format_)


def test_how_a_model_is_read_is_asked_with_the_model_alone(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("app", "--no-browser", "--state-seed", 0)
    assert code == 1 and "--state-seed says how a model is read: give --model too" in err and err.count("error:") == 1
    code, _, err = run("app", "--no-browser", "--model", "nowhere")
    assert code == 1 and "nowhere: no such checkpoint folder; bundled models are" in err
    with pytest.raises(InputError, match=r"steps: say which model is read so \(model=\.\.\.\)"):
        dashboard(steps=8)
