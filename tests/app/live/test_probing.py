"""The Live probe as a person uses it: run, look, silence, cancel, two tabs, hostile prompts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.support.tiny_live import HOSTILE, LONG, TYPED, Held, ran

from visitlens.app.live.service import LiveService
from visitlens.app.pages import live as page


def type_and_run(visitor: Any, prompt: str) -> None:
    visitor.page.fill("#live-prompt", prompt)
    visitor.page.get_by_role("button", name="Run", exact=True).click()


def status(visitor: Any) -> Any:
    return visitor.page.locator("#live-status")


def test_type_run_choose_a_token_a_head_and_come_back(person: Any, meet: Any, live_site: Any) -> None:
    person.open("live")
    assert person.page.title().startswith("Live probe")
    person.page.fill("#live-prompt", TYPED)
    person.page.keyboard.press("Control+Enter")
    tokens = person.page.locator(".live-text .token")
    expect(tokens).to_have_count(len(TYPED) + 1)
    expect(status(person)).to_contain_text("22 tokens in")
    assert "".join(tokens.all_inner_texts()) == "<bos>" + TYPED.replace(" ", "␣").replace("\n", "↵")
    tokens.nth(5).click()
    expect(person.page.locator("#title-experts")).to_have_text("Experts of token 5 “v”")
    person.choose("head", "3")
    expect(person.page.locator("#title-map")).to_have_text("Attention of layer 1, head 3")
    person.charted("map")
    person.click_cell("map", 2, 9, 4)  # a cell of the difference: its query is chosen
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
    assert person.page.input_value("#live-prompt") == TYPED
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
    person.click_cell("scan", 0, 1, 2)  # layer 1 at visit 1
    assert (person.query["layer"], person.query["head"]) == ("1", "2")
    expect(result).to_contain_text("layer 2, visit 2")  # what was silenced stays
    person.page.fill("#live-prompt", "Anew")
    person.page.get_by_role("button", name="Run", exact=True).click()
    expect(person.page.locator(".live-text .token")).to_have_count(5)
    assert not {"silence", "scan", "at", "target"} & set(person.query)


def test_progress_and_cancel(person: Any, held: Held) -> None:
    person.open("live")
    type_and_run(person, TYPED)
    expect(status(person)).to_have_text("Running …")
    bar = person.page.get_by_role("progressbar")
    expect(bar).to_have_attribute("value", "40")
    expect(bar).to_have_attribute("max", "100")
    person.page.get_by_role("button", name="Cancel").click()
    expect(status(person)).to_have_text("Cancelled.")
    expect(bar).to_be_hidden()
    expect(person.page.get_by_role("button", name="Cancel")).to_be_hidden()
    assert "job" not in person.query and person.page.input_value("#live-prompt") == TYPED
    held.gate.set()
    person.page.get_by_role("button", name="Run", exact=True).click()
    expect(person.page.locator(".live-text .token")).to_have_count(22)


def test_a_run_survives_a_reload_of_its_tab(person: Any, held: Held) -> None:
    person.open("live")
    type_and_run(person, TYPED)
    expect(status(person)).to_have_text("Running …")
    person.page.reload()
    person.settled()
    expect(status(person)).to_have_text("Running …")
    held.gate.set()
    expect(person.page.locator(".live-text .token")).to_have_count(22)


def test_run_pressed_again_before_the_answer_is_one_run(person: Any, live: LiveService, live_site: Any) -> None:
    person.open("live")
    before, answer = set(live.jobs._over), "live-prompt.value"
    live_site.answers.keep(answer)
    try:
        person.page.fill("#live-prompt", "Anew")
        for number in (1, 2, 3):
            person.page.get_by_role("button", name="Run", exact=True).click()
            live_site.answers.come(answer, number)
    finally:
        live_site.answers.pass_on()
    expect(person.page.locator(".live-text .token")).to_have_count(5)
    assert len({live.jobs._over[id_].owner for id_ in set(live.jobs._over) - before}) == 1, (
        "nothing of it runs on unseen"
    )


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


def test_axe_finds_nothing_serious_light_and_dark(meet: Any, live_site: Any, live: LiveService) -> None:
    job = ran(live)
    run = live.find(job, page.LiveRun)
    others = {
        "silence": live.ablate("test", run, 1, 2, (1, 2), "zero"),
        "scan": live.scan("test", run, 3, None, "zero"),
    }
    assert {live.jobs.wait(id_, LONG).status for id_ in others.values()} == {"done"}
    visitor = meet(live_site)
    for path in ("live", f"live?job={job}&at=3&silence={others['silence']}&scan={others['scan']}", "ablation"):
        visitor.open(path)
        if "job" in path:
            visitor.charted("scan")
            visitor.charted("lens")
        assert not (grave := visitor.grave_violations()), (path, grave)


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
