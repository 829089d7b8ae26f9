"""The Live probe and the Ablation page as a person uses them: run, look, silence, cancel, two tabs, hostile prompts."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from visitlens.app.context import Context
from visitlens.app.jobs import JobQueue
from visitlens.app.live_service import LiveService
from visitlens.app.pages import live as page
from visitlens.app.registry import Registry
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.kernels.errors import InputError
from visitlens.probe.live import LiveModel
from visitlens.probe.live_prompts import byte_alphabet

PROMPT = "Two visits.\nOne head!"
HOSTILE = '<img src=x onerror="window.hurt=1"><b>bold</b>&lt;br&gt;\n{{7*7}}</script>'
LONG = 60.0
expect.set_options(timeout=60_000)  # a busy machine is no failure


def save_tokenizer(folder: Path) -> None:
    """One token a byte, after three special ones."""
    vocabulary = {name: at for at, name in enumerate(["<bos>", "<eos>", "<pad>", *sorted(byte_alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def make_checkpoint(
    make_model: Callable[..., LoopedMoE], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Factory: a folder with a model of so many visits (layers 1 and 2 of 4 looped, 8 experts a token)."""

    def build(visits: int) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / f"tiny-{visits}"
        model = make_model(visits, vocab_size=259, context_length=256, num_experts=16, experts_per_token=8)
        save_model(model, folder)
        save_tokenizer(folder)
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


class Held:
    """The model of a service, held at its first layer until let go."""

    def __init__(self, model: LiveModel) -> None:
        self.model, self.gate, self.steps = model, threading.Event(), 0

    def run(self, prompt: str, *, on_progress: Callable[[int, int], None]) -> Any:
        while not self.gate.is_set():
            on_progress(40, 100)
            self.steps += 1
            time.sleep(0.005)
        return self.model.run(prompt, on_progress=on_progress)


@pytest.fixture
def held(live: LiveService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    model = Held(live._loaded())
    monkeypatch.setattr(live, "_model", model)
    yield model
    model.gate.set()


def ran(live: LiveService, prompt: str = PROMPT) -> str:
    """The id of a finished run."""
    id_ = live.probe("test", prompt)
    assert live.jobs.wait(id_, LONG).status == "done"
    return id_


def type_and_run(visitor: Any, prompt: str) -> None:
    visitor.page.fill("#live-prompt", prompt)
    visitor.page.get_by_role("button", name="Run", exact=True).click()


def click_cell(visitor: Any, key: str, *cell: int) -> None:
    """A cell of a map that may lie below the fold."""
    visitor.charted(key).scroll_into_view_if_needed()
    visitor.click_cell(key, *cell)


def status(visitor: Any) -> Any:
    return visitor.page.locator("#live-status")


# A person


def test_type_run_choose_a_token_a_head_and_come_back(person: Any, meet: Any, live_site: Any) -> None:
    person.open("live")
    assert person.page.title().startswith("Live probe")
    person.page.fill("#live-prompt", PROMPT)
    person.page.keyboard.press("Control+Enter")
    tokens = person.page.locator(".live-text .token")
    expect(tokens).to_have_count(len(PROMPT) + 1)
    expect(status(person)).to_contain_text("22 tokens in")
    assert "".join(tokens.all_inner_texts()) == "<bos>" + PROMPT.replace(" ", "␣").replace("\n", "↵")
    tokens.nth(5).click()
    expect(person.page.locator("#title-experts")).to_have_text("Experts of token 5 “v”")
    person.choose("head", "3")
    expect(person.page.locator("#title-map")).to_have_text("Attention of layer 1, head 3")
    person.charted("map")
    click_cell(person, "map", 2, 9, 4)  # a cell of the difference: its query is chosen
    assert person.query["at"] == "9" and person.query["head"] == "3"
    expect(person.page.locator("#title-keys")).to_have_text("Keys of token 9 “t”")
    kept = re.fullmatch(
        r"(\d+) of 8 kept, (\d+) dropped, (\d+) new\.",
        person.page.inner_text("[aria-labelledby=title-experts] .figure-line"),
    )
    assert kept and int(kept[1]) + int(kept[2]) == 8 and kept[2] == kept[3]

    address = person.page.url
    person.page.reload()
    person.settled()
    expect(person.page.locator("#title-keys")).to_have_text("Keys of token 9 “t”")
    assert person.page.input_value("#live-prompt") == PROMPT
    other = meet(live_site, "dark")
    other.page.goto(address)
    other.settled()
    expect(other.page.locator("#title-map")).to_have_text("Attention of layer 1, head 3")
    person.page.go_back()
    person.settled()
    assert person.query["at"] == "5"


def test_a_dyck_prompt_marks_its_demonstrations(person: Any, live: LiveService) -> None:
    person.open("live")
    presets = person.page.get_by_role("group", name="Dyck prompts by number of shots").get_by_role("button")
    assert presets.all_inner_texts() == ["0", "1", "2", "4", "8"]
    presets.nth(1).click()
    marked = person.page.locator(".live-text .live-mark")
    start, stop = live.presets[1].demonstrations[0]
    expect(marked).to_have_count(stop - start)
    assert person.page.input_value("#live-prompt") == live.presets[1].text
    assert "demonstrations' answers" in person.page.inner_text("#panel-map .caption")


def test_silence_a_head_then_every_head(person: Any, live: LiveService) -> None:
    job = ran(live)
    person.open(f"live?job={job}&layer=2&head=1&at=7")
    person.choose("when", "2")
    person.choose("kind", "mean")
    person.page.get_by_role("button", name="Silence layer 2, head 1").click()
    result = person.page.locator("[aria-labelledby=title-silence] .figure-line")
    expect(result).to_contain_text("layer 2, visit 2, head 1, set to its mean over the prompt:")
    run = live.find(job, page.LiveRun)
    ablation = live._loaded().ablate(run, 2, 1, (2,), "mean")
    assert f"KL {ablation.kl(7):.4f} nats after token 7" in result.inner_text()
    change = f"{ablation.log_prob_change(7):+.4f}".replace("-", "−")
    assert f"log P(“{run.text_of(run.target(7))}”) {change} nats" in result.inner_text()
    assert person.page.locator("[aria-labelledby=title-silence] tbody tr").count() == 6

    person.page.get_by_role("button", name="Every head in turn").click()
    person.charted("scan")
    click_cell(person, "scan", 0, 1, 2)  # layer 1 at visit 1
    assert (person.query["layer"], person.query["head"]) == ("1", "2")
    expect(result).to_contain_text("layer 2, visit 2")  # what was silenced stays
    person.page.fill("#live-prompt", "Anew")
    person.page.get_by_role("button", name="Run", exact=True).click()
    expect(person.page.locator(".live-text .token")).to_have_count(5)
    assert not {"silence", "scan", "at", "target"} & set(person.query)


def test_progress_and_cancel(person: Any, held: Held) -> None:
    person.open("live")
    type_and_run(person, PROMPT)
    expect(status(person)).to_have_text("Running …")
    bar = person.page.get_by_role("progressbar")
    assert (bar.get_attribute("value"), bar.get_attribute("max")) == ("40", "100")
    person.page.get_by_role("button", name="Cancel").click()
    expect(status(person)).to_have_text("Cancelled.")
    expect(bar).to_be_hidden()
    expect(person.page.get_by_role("button", name="Cancel")).to_be_hidden()
    assert "job" not in person.query and person.page.input_value("#live-prompt") == PROMPT
    held.gate.set()
    person.page.get_by_role("button", name="Run", exact=True).click()
    expect(person.page.locator(".live-text .token")).to_have_count(22)


def test_a_run_survives_a_reload_of_its_tab(person: Any, held: Held) -> None:
    person.open("live")
    type_and_run(person, PROMPT)
    expect(status(person)).to_have_text("Running …")
    person.page.reload()
    person.settled()
    expect(status(person)).to_have_text("Running …")
    held.gate.set()
    expect(person.page.locator(".live-text .token")).to_have_count(22)


def test_two_tabs_wait_for_each_other_and_cancel_only_their_own(
    person: Any, meet: Any, live_site: Any, held: Held
) -> None:
    other = meet(live_site)
    person.open("live")
    other.open("live")
    type_and_run(person, "first")
    expect(status(person)).to_have_text("Running …")
    type_and_run(other, "the second")
    expect(status(other)).to_have_text("Waiting: 1 job ahead.")
    other.page.get_by_role("button", name="Cancel").click()
    expect(status(other)).to_have_text("Cancelled.")
    type_and_run(other, "the third")
    expect(status(other)).to_have_text("Waiting: 1 job ahead.")
    held.gate.set()
    expect(person.page.locator(".live-text .token")).to_have_count(6)
    expect(other.page.locator(".live-text .token")).to_have_count(10)
    assert person.query["job"] != other.query["job"] and not other.errors


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("x" * 300, "The prompt has 301 tokens with BOS; the limit is 256: shorten it by 45."),
        ("x" * 100_000, "The prompt has more than 32,768 characters; at most 512 tokens are run"),
        ("", "The prompt is empty: type or paste some text."),
    ],
)
def test_prompts_that_are_refused(person: Any, prompt: str, said: str) -> None:
    person.open("live")
    type_and_run(person, prompt)
    expect(status(person)).to_contain_text(said)
    type_and_run(person, "ok")
    expect(person.page.locator(".live-text .token")).to_have_count(3)


def test_markup_in_a_prompt_is_text(person: Any) -> None:
    person.open("live")
    type_and_run(person, HOSTILE)
    expect(person.page.locator(".live-text .token")).to_have_count(len(HOSTILE) + 1)
    person.charted("map")
    person.charted("lens")
    assert person.page.evaluate("window.hurt") is None
    assert person.page.locator("main img, main b b, main script").count() == 0
    assert person.page.input_value("#live-prompt") == HOSTILE
    shown = "".join(person.page.locator(".live-text .token").all_inner_texts())
    assert shown == "<bos>" + HOSTILE.replace(" ", "␣").replace("\n", "↵")
    labels = person.page.evaluate("document.querySelector('#panel-map .js-plotly-plot')._fullData[0].x.slice(0, 3)")
    assert labels == ["0 &lt;bos&gt;", "1 &lt;", "2 i"]


def test_by_keyboard_alone(person: Any, live: LiveService) -> None:
    person.open(f"live?job={ran(live)}")
    person.charted("map")
    assert person.page.evaluate("document.activeElement.title").startswith("token 21:")  # where one left off
    person.page.keyboard.press("Shift+Tab")
    person.page.keyboard.press("Tab")
    person.page.keyboard.press("ArrowLeft")
    at = person.page.evaluate("document.activeElement.title")
    person.page.keyboard.press("Enter")
    person.settled()
    assert at.startswith(f"token {person.query['at']}:")
    chart = person.charted("heads")
    chart.focus()
    person.page.keyboard.press("ArrowDown")
    person.page.keyboard.press("ArrowDown")
    person.page.keyboard.press("ArrowRight")
    assert person.said().startswith("physical layer 2, head 1:")
    person.page.keyboard.press("Enter")
    person.settled()
    assert (person.query["layer"], person.query["head"]) == ("2", "1")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(meet: Any, live_site: Any, live: LiveService, theme: str) -> None:
    job = ran(live)
    run = live.find(job, page.LiveRun)
    others = {
        "silence": live.ablate("test", run, 1, 2, (1, 2), "zero"),
        "scan": live.scan("test", run, 3, None, "zero"),
    }
    assert {live.jobs.wait(id_, LONG).status for id_ in others.values()} == {"done"}
    visitor = meet(live_site, theme)
    for path in ("live", f"live?job={job}&at=3&silence={others['silence']}&scan={others['scan']}", "ablation"):
        visitor.open(path)
        if "job" in path:
            visitor.charted("scan")
            visitor.charted("lens")
        assert not (grave := visitor.grave_violations()), (path, theme, grave)


def test_without_a_model_the_page_says_how(visit: Any) -> None:
    visit.open("live")
    assert "start the dashboard with --model CHECKPOINT" in visit.page.inner_text("main")
    assert visit.page.locator("#live-prompt").count() == 0


@pytest.mark.parametrize("visits", [1, 3])
def test_one_visit_and_three(make_checkpoint: Any, serve: Any, meet: Any, visits: int) -> None:
    site = serve(checkpoint=make_checkpoint(visits))
    job = ran(page.service(site.context))
    visitor = meet(site)
    visitor.open(f"live?job={job}&layer=1")
    visitor.charted("map")
    maps = visitor.page.evaluate("document.querySelector('#panel-map .js-plotly-plot')._fullData.map(t => t.name)")
    if visits == 1:
        assert maps == ["visit 1"] and "has one visit" in visitor.page.inner_text(
            "[aria-labelledby=title-tokens] .caption"
        )
    else:
        assert maps == ["visit 1", "visit 3", "visit 3 − visit 1"]
        visitor.choose("visits", "2-3")
        visitor.charted("map")
        expect(visitor.page.locator("[aria-labelledby=title-keys] thead")).to_contain_text("weight at visit 2")
        assert [o.strip() for o in visitor.page.locator("select[name=when] option").all_inner_texts()] == [
            "visit 1",
            "visit 2",
            "visit 3",
            "all 3 visits",
        ]
    assert not visitor.errors and not visitor.outside


# The service and the callbacks' functions, without a browser


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
        "from visitlens.app.live_service import LiveService\n"
        "service = LiveService(Path(sys.argv[1]))\n"
        "assert len(service.presets) == 5 and 'torch' not in sys.modules\n"
        "id_ = service.probe('tab', 'ab')\nassert service.jobs.wait(id_, 120).status == 'done'\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_that_cant_be_read_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    service = LiveService(tmp_path)
    assert service.presets == ()
    state = service.jobs.wait(service.probe("tab", "ab"), LONG)
    assert state.status == "failed" and "expected config.json with architecture" in state.message
    service.jobs.close()


def test_a_tab_has_one_job_and_a_new_one_takes_its_place(
    service: LiveService, context: Context, monkeypatch: Any
) -> None:
    held = Held(service._loaded())
    monkeypatch.setattr(service, "_model", held)
    active, tab, _, said = page.do(service, context, "run", "one", "", None, "")
    assert tab and said == "Waiting …" and active["as"] == "job"
    later, same, _, _ = page.do(service, context, "run", "two", tab, active, "")
    assert same == tab and service.jobs.wait(active["job"], LONG).status == "cancelled"
    assert page.watch(service, later)[5] is False  # the clock goes on
    cancelled = page.do(service, context, "cancel", "", tab, later, "")
    assert cancelled[3] == "Cancelling …" and service.jobs.wait(later["job"], LONG).status == "cancelled"
    assert page.watch(service, later)[0] == "Cancelled."


def test_a_full_queue_is_a_message(service: LiveService, context: Context, monkeypatch: Any) -> None:
    held = Held(service._loaded())
    monkeypatch.setattr(service, "_model", held)
    for tab in ("a", "b", "c"):
        *_, said = page.do(service, context, "run", tab, tab, None, "")
        time.sleep(0.05)
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
    from visitlens.app.layout import render

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


# The Ablation page


@pytest.fixture(scope="session")
def ablated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The looped recording with a stored ablation of known numbers: layers 1, 2 x 4 heads."""
    import shutil

    import numpy as np

    from visitlens.probe.analyses import Grouped, HeadAblation, store
    from visitlens.probe.measure import Measure

    path = tmp_path_factory.mktemp("ablated") / "looped.vlens"
    shutil.copytree(folder / "looped.vlens", path)
    measure = Measure("change", "Change", ("visits", "layer", "head"), "nats", "With minus without.", "6.4")
    labels = {"visits": ["1", "2", "1+2"], "layer": [1, 2], "head": [0, 1, 2, 3]}
    effect = np.arange(24.0).reshape(3, 2, 4) / 10
    effect[1, 0, 2] = 9.0  # at visit 2: layer 1, head 2
    noise = np.random.default_rng(0).normal(0, 0.01, (40, 3, 2, 4))
    grouped = Grouped(measure, labels, effect + noise, np.ones((40, 3, 2, 4)))
    intact = Grouped(Measure("loss", "Loss", (), "nats", "Loss.", "6.4"), {}, np.ones(40), np.ones(40))
    for name, metric in (("dyck-zero", "Dyck target loss"), ("text-mean", "<b>text</b> loss")):
        store(
            path, HeadAblation(name, metric, name.split("-")[1], intact, grouped, {"documents": 40, "targets": "many"})
        )
    return path


def test_stored_ablations_ranked_by_visit_and_opened(serve: Any, meet: Any, ablated: Path, checkpoint: Path) -> None:
    visitor = meet(serve(ablated, checkpoint=checkpoint))
    visitor.open("ablation")
    expect(visitor.page.locator("[aria-labelledby=title-finding] .figure-line")).to_contain_text(
        "Ablating layer 2, head 3 at every visit"
    )
    assert "8 of 8 heads differ from no effect at 5% after Holm's correction" in visitor.page.inner_text(
        "[aria-labelledby=title-finding]"
    )
    first = visitor.page.locator("[aria-labelledby=title-ranked-table] tbody tr").first
    assert (
        first.inner_text().startswith("layer 2, head 3")
        and "2.30" in first.inner_text()
        and "< 0.001" in first.inner_text()
    )
    visitor.choose("when", "2")
    expect(visitor.page.locator("#title-ranked")).to_contain_text("at visit 2")
    assert first.inner_text().startswith("layer 1, head 2")
    visitor.choose("analysis", "text-mean")
    expect(visitor.page.locator("#title-map")).to_contain_text("<b>text</b> loss")
    assert visitor.page.locator("main h2 b").count() == 0 and visitor.query == {"when": "2", "analysis": "text-mean"}
    click_cell(visitor, "map", 1, 0, 2)
    assert visitor.path == "attention" and (visitor.query["layer"], visitor.query["head"]) == ("1", "2")
    visitor.page.go_back()
    visitor.settled()
    visitor.page.get_by_role("link", name="Probe layer 1, head 2 live").click()
    visitor.settled()
    assert visitor.path == "live" and (visitor.query["layer"], visitor.query["head"]) == ("1", "2")
    assert not visitor.errors and not visitor.outside


def test_no_stored_ablation_says_how_to_make_one(visit: Any) -> None:
    for run in ("baseline", "summary"):
        visit.open(f"ablation?run={run}")
        assert f"visitlens ablate {run}.vlens --model CHECKPOINT" in visit.page.inner_text("main")


def test_a_damaged_analysis_is_named(serve: Any, meet: Any, ablated: Path, tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "looped.vlens"
    shutil.copytree(ablated, path)
    (path / "analyses" / "ablation-dyck-zero.json").write_text("{")
    visitor = meet(serve(path))
    visitor.open("ablation")
    assert "not a readable ablation analysis" in visitor.page.inner_text("main")
