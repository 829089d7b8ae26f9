"""A head's maps in the browser: made from Q and K, pooled, zoomed, fetched again; and text that would be markup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

HOSTILE = "<img src=x onerror='window.hurt=1'><b>w</b>&lt;"

ROWS = "document.querySelector('#panel-map .js-plotly-plot')._fullData[0].y.length"


@pytest.fixture(scope="module")
def person_at_long(serve, long: Path):
    return serve(long)


@pytest.mark.parametrize("at", [0, 2])  # of the three maps, which zoom together
def test_zooming_into_a_pooled_map_fetches_that_part(meet, person_at_long, at: int) -> None:
    person = meet(person_at_long)
    person.open("attention?layer=1&head=2&segment=1")
    chart = person.charted("map")
    caption = person.page.locator("#panel-map .caption")
    assert "Document 2 of 3, n = 700 tokens" in caption.inner_text() and "Pooled 2x" in caption.inner_text()
    assert person.page.evaluate(ROWS) == 350
    box = chart.evaluate(
        """(chart, at) => {
            const plot = chart.querySelector('.js-plotly-plot'), trace = plot._fullData[at];
            const x = plot._fullLayout[trace.xaxis.replace('x', 'xaxis')], y = plot._fullLayout[trace.yaxis.replace('y', 'yaxis')];
            const box = plot.getBoundingClientRect();
            return { left: box.left + x._offset, top: box.top + y._offset, width: x._length, height: y._length };
        }""",
        at,
    )
    mouse = person.page.mouse
    mouse.move(box["left"] + 0.2 * box["width"], box["top"] + 0.5 * box["height"])
    mouse.down()
    mouse.move(box["left"] + 0.3 * box["width"], box["top"] + 0.7 * box["height"], steps=4)
    mouse.move(box["left"] + 0.4 * box["width"], box["top"] + 0.9 * box["height"], steps=4)
    mouse.up()
    person.page.wait_for_url("**zoom=**")
    person.settled()
    r0, r1, c0, c1 = map(int, person.query["zoom"].split("-"))
    assert r0 == pytest.approx(350, abs=6) and r1 == pytest.approx(630, abs=6)
    assert c0 == pytest.approx(140, abs=6) and c1 == pytest.approx(280, abs=6)
    person.page.locator("#panel-map .caption", has_not_text="Pooled").wait_for()
    person.charted("map")
    assert person.page.evaluate(ROWS) == r1 - r0  # every query of the part, unpooled
    person.page.reload()
    person.settled()
    person.charted("map")
    assert person.page.evaluate(ROWS) == r1 - r0  # the part is in the address
    person.page.click("text=whole map")
    person.settled()
    assert "zoom" not in person.query and "Pooled 2x" in caption.inner_text()
    assert not person.errors


def test_a_token_of_a_long_document_shows_its_keys_and_parts(meet, person_at_long) -> None:
    person = meet(person_at_long)
    person.open("tokens?layer=1&head=2&segment=1")
    assert person.page.locator("a.token").count() == 600
    person.page.click("text=part after")
    person.settled()
    assert person.page.locator("a.token").count() == 100 and person.query["token"] == "620"
    assert "Keys gained and lost by token 620" in person.page.inner_text("main")
    assert person.page.inner_text("[aria-labelledby=title-keys] .figure-line").startswith(
        "From visit to visit: first token"
    )
    person.choose("segment", "2")
    assert "token" not in person.query and "document 3 of 3" in person.page.inner_text(".pager")


def test_markup_in_token_text_is_text(meet, serve, folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "hostile"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": 61}))
    words = {f"{HOSTILE}{i}": i for i in range(61)}
    Tokenizer(models.WordLevel(words, unk_token=f"{HOSTILE}0")).save(str(checkpoint / "tokenizer.json"))
    person = meet(serve(folder / "maps.vlens", checkpoint=checkpoint))
    for page in ("tokens", "attention"):
        person.open(f"{page}?layer=1&head=1&token=5")
        person.charted("by-token" if page == "tokens" else "map")
        assert HOSTILE in person.page.inner_text("main")
        assert person.page.locator("main :is(img, .token b, td b, th b, p b)").count() == 0
    labels = person.page.evaluate("document.querySelector('#panel-map .js-plotly-plot')._fullData[0].y[3]")
    assert "&lt;img" in labels and "<" not in labels
    assert person.page.evaluate("window.hurt") is None
    assert not person.errors and not person.outside


def test_a_hover_label_has_the_minus_sign_of_the_axes(visit) -> None:
    visit.open("heads?run=looped")
    chart = visit.charted("map")
    value, x, y = chart.evaluate(
        """(chart) => {
            const plot = chart.querySelector('.js-plotly-plot'), at = plot._fullData.length - 1, z = plot.calcdata[at][0].z;
            const row = z.findIndex((r) => Math.min(...r) < -0.001), column = z[row].findIndex((v) => v < -0.001);
            const axis = (letter) => plot._fullLayout[plot._fullData[at][letter + "axis"].replace(letter, letter + "axis")];
            const across = axis("x"), down = axis("y"), box = plot.getBoundingClientRect();
            const left = box.left + across._offset + across.l2p(column);
            return [z[row][column], left, box.top + down._offset + down.l2p(row)];
        }"""
    )
    visit.page.mouse.move(x - 3, y)
    visit.page.mouse.move(x, y)
    label = chart.locator(".hoverlayer .hovertext", has_text=f"{value:.4f}".replace("-", "−"))
    label.wait_for()
    assert "-" not in label.text_content()
