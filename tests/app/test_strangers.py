"""People that a dashboard doesn't know: cookies, guessed tokens, half-sent requests, callbacks of other types."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from visitlens.app.server import server as module
from visitlens.app.server.server import Access, _Guesses, build, serve
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context

TOKEN = "open-sesame"


@pytest.fixture
def client(folder: Path) -> FlaskClient:
    return build(Context(Registry([folder])), Access(token=TOKEN)).server.test_client()


def test_the_cookie_is_another_value_than_the_token_and_of_one_port(folder: Path, client: FlaskClient) -> None:
    answer = client.get(f"/?access={TOKEN}", headers={"Host": "localhost:8050"})
    cookie = answer.headers["Set-Cookie"]
    name, value = cookie.split(";")[0].split("=")
    assert TOKEN not in cookie and len(value) == 64 and "HttpOnly" in cookie
    other = build(Context(Registry([folder])), Access(token=TOKEN)).server.test_client()
    for who, port, expected in ((client, 8050, 200), (client, 8051, 401), (other, 8050, 401)):
        for kept in (name, f"visitlens_access_{port}"):
            fresh = who.application.test_client()
            fresh.set_cookie(kept, value, domain="localhost")
            status = fresh.get("/", headers={"Host": f"localhost:{port}"}).status_code
            assert status == expected, (port, kept)
    assert client.application.test_client().get(f"/?access={value}").status_code == 401


def test_wrong_tokens_have_to_wait(client: FlaskClient) -> None:
    answers = [client.get(f"/?access=guess{n}").status_code for n in range(7)]
    assert answers == [401] * 5 + [429] * 2
    assert client.get(f"/?access={TOKEN}").status_code == 429, "the right one isn't told apart while it waits"


def test_the_wait_ends_and_is_each_address_s_own() -> None:
    now = [0.0]
    guesses = _Guesses(lambda: now[0])
    for _ in range(5):
        assert guesses.wait("one") == 0
        guesses.wrong("one")
    assert guesses.wait("one") == 2 and guesses.wait("two") == 0
    now[0] = 2.5
    assert guesses.wait("one") == 0


BODIES = [
    [],
    7,
    "text",
    {},
    {"output": 5, "outputs": [], "inputs": [], "changedPropIds": []},
    {"output": "nothing.here", "outputs": {"id": "nothing", "property": "here"}, "inputs": [], "changedPropIds": []},
    {"output": "seen.data", "outputs": {"id": "seen", "property": "data"}, "inputs": "x", "changedPropIds": 3},
]


@pytest.mark.parametrize("value", [5, [], {"href": [1], "theme": {}}, {"href": {"a": 1}}, {}, True, "x", None])
def test_a_callback_with_values_of_other_types_is_no_server_error(
    folder: Path, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    client = build(Context(Registry([folder]))).server.test_client()
    body = {
        "output": "seen.data",
        "outputs": {"id": "seen", "property": "data"},
        "inputs": [{"id": "watch", "property": "n_intervals", "value": value}],
        "state": [
            {"id": "request", "property": "data", "value": value},
            {"id": "main", "property": "data-version", "value": value},
        ],
        "changedPropIds": ["watch.n_intervals"],
    }
    assert client.post("/_dash-update-component", json=body).status_code in (200, 204, 400)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("body", BODIES)
def test_a_callback_that_the_page_does_not_have_is_a_bad_request(
    folder: Path, body: object, caplog: pytest.LogCaptureFixture
) -> None:
    client = build(Context(Registry([folder]))).server.test_client()
    answer = client.post("/_dash-update-component", json=body)
    assert answer.status_code == 400 and "Traceback" not in answer.text + caplog.text


def test_half_sent_requests_do_not_silence_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_IDLE", 3)
    context, port, ready = Context(Registry([folder])), [0], threading.Event()

    def on_ready(value: int) -> None:
        port[0] = value
        ready.set()

    threading.Thread(target=serve, args=(build(context), context, "127.0.0.1", 0, on_ready), daemon=True).start()
    assert ready.wait(60)
    held = [socket.create_connection(("127.0.0.1", port[0]), timeout=30) for _ in range(200)]
    for one in held:
        one.sendall(b"POST /_dash-update-component HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
    with urllib.request.urlopen(f"http://127.0.0.1:{port[0]}/health", timeout=30) as answer:
        assert answer.status == 200
    until = time.monotonic() + 60
    held[0].settimeout(60)
    assert held[0].recv(1000) == b"" and time.monotonic() < until, "who sends nothing more is let go"
    for one in held:
        one.close()
