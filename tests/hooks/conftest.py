"""Empty places in object stores: fsspec's memory, and S3 (moto's server) where s3fs and moto are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from visitlens.hooks.lease import Lease


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    server = pytest.importorskip("moto.server", reason="S3 itself: pip install s3fs 'moto[server]'")
    pytest.importorskip("s3fs", reason="the extra visitlens[cloud] is optional")
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Of an empty place."""
    monkeypatch.setattr(Lease, "beat", 0.2)
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return f"memory://bucket/{tmp_path.name}.vlens"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = fsspec.filesystem("s3")
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return f"s3://bucket/{tmp_path.name}.vlens"
