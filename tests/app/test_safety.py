"""A dashboard on a hostile page or network: forged hosts, paths in the query, markup in names, big bodies, access tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from visitlens.app.server.server import Access, behind_prefix, build
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context
from visitlens.errors import InputError

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>&lt;"


@pytest.fixture(scope="module")
def client(folder: Path) -> FlaskClient:
    return build(Context(Registry([folder]))).server.test_client()


def test_a_forged_host_is_refused(client: FlaskClient) -> None:
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/_dash-layout", headers={"Host": "127.0.0.1.evil.example:8050"}).status_code == 400
    for host in ("127.0.0.1:8050", "localhost"):
        assert client.get("/", headers={"Host": host}).status_code == 200


def test_headers_forbid_what_the_page_does_not_need(client: FlaskClient) -> None:
    headers = client.get("/").headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    script = next(part for part in policy.split(";") if "script-src" in part)
    assert "unsafe-inline" not in script and "sha256-" in script and "http" not in script
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert '<html lang="en">' in client.get("/").text


def test_health_says_how_many_recordings(client: FlaskClient) -> None:
    assert client.get("/health").get_json() == {"status": "ok", "version": "0.1.0", "recordings": 6}


@pytest.mark.parametrize("run", ["/etc/passwd", "../looped", "..%2f..%2fetc", "looped.vlens/../../x", "\x00"])
def test_a_path_in_the_query_names_nothing(client: FlaskClient, run: str) -> None:
    for path in ("/export/layers/by-layer.csv", "/export/layers/by-layer.rows", "/snapshot/layers.html"):
        response = client.get(path, query_string={"run": run})
        assert response.status_code == 200  # falls back to a recording that is there
        assert "root:x:0" not in response.text
    answer = _render(client, f"http://localhost/layers?run={run}")
    assert "There is no recording" in answer or "is left out" in answer


@pytest.mark.parametrize(
    "path",
    [
        "/export/layers/nothing.csv",
        "/export/nowhere/by-layer.csv",
        "/export/layers/by-layer.exe",
        "/snapshot/nowhere.html",
        "/assets/../server.py",
    ],
)
def test_what_is_not_there_is_404(client: FlaskClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_an_oversized_request_is_refused(client: FlaskClient) -> None:
    response = client.post("/_dash-update-component", data=b"x" * 3_000_000, content_type="application/json")
    assert response.status_code == 413


def test_markup_in_names_is_text(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / f"{MARKUP.replace('/', '')}.vlens"
    shutil.copytree(folder / "looped.vlens", target)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["run"]["provenance"] |= {"checkpoint": MARKUP, "text": MARKUP}
    (target / "manifest.json").write_text(json.dumps(manifest))
    client = build(Context(Registry([target]))).server.test_client()
    page = client.get("/snapshot/figures.html").text
    assert "<img src=x" not in page and "&lt;img src=x" in page
    figure = client.get("/export/figures/sink-heads.figure").get_json()["layout"]["title"]
    assert "<img" not in json.dumps(figure) and "<b>bold" not in json.dumps(figure)
    assert client.get("/export/figures/sink-heads.csv").headers["Content-Disposition"].count('"') == 2


def test_names_stay_text_in_the_browser(meet, serve, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / f"{MARKUP.replace('/', '')}.vlens"
    shutil.copytree(folder / "looped.vlens", target)
    person = meet(serve(target, folder / "baseline.vlens"))
    person.open("layers")
    assert MARKUP.replace("/", "") in person.page.inner_text(".breadcrumb")
    assert person.page.locator("img, #main b").count() == 0
    person.page.click("nav[aria-label=Pages] >> text=Compare")
    person.settled()
    person.charted("both")
    assert person.page.locator("#main img").count() == 0
    assert MARKUP.replace("/", "") in person.page.locator("#panel-both .legendtext").first.text_content()
    assert not person.errors and not person.outside


def test_other_machines_need_a_token(folder: Path) -> None:
    with pytest.raises(InputError, match="--token"):
        Access("0.0.0.0")
    server = build(Context(Registry([folder])), Access("0.0.0.0", "open-sesame", ("lens.example",))).server
    client = server.test_client()
    assert client.get("/health").status_code == 200
    for path in ("/", "/_dash-layout", "/export/layers/by-layer.csv", "/assets/frame.js"):
        assert client.get(path).status_code == 401
    assert client.get("/?access=wrong").status_code == 401
    answer = client.get("/?access=open-sesame", headers={"Host": "lens.example"})
    assert answer.status_code == 302
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.post("/", data={"access": "open-sesame"}).status_code == 302
    assert client.get("/").status_code == 200  # by the cookie
    assert client.get("/", headers={"Host": "other.example"}).status_code == 400


def test_a_prefix_works_whether_the_proxy_strips_it_or_not(folder: Path) -> None:
    from werkzeug.test import Client

    app = build(Context(Registry([folder]), None, "/deep/down/"))
    client = Client(behind_prefix(app.server, "/deep/down/"))
    for path in ("/deep/down/health", "/health", "/deep/down/", "/"):
        assert client.get(path, headers={"Host": "localhost"}).status_code == 200
    assert "/deep/down/_dash-component-suites/" in client.get("/", headers={"Host": "localhost"}).text


def _render(client: FlaskClient, href: str) -> str:
    """What the page callback answers."""
    outputs = [
        "page-links.data",
        "bar.children",
        "main.children",
        "palette-entries.data",
        "title.data",
        "watch.disabled",
        "main.data-version",
    ]
    body = {
        "output": f"..{'...'.join(outputs)}..",
        "outputs": [dict(zip(("id", "property"), name.split("."), strict=True)) for name in outputs],
        "inputs": [{"id": "request", "property": "data", "value": {"href": href, "theme": "light"}}],
        "changedPropIds": ["request.data"],
    }
    response = client.post("/_dash-update-component", json=body)
    assert response.status_code == 200
    return response.text
