"""Empty places in object stores: fsspec's memory, and S3 (moto's server) where s3fs and moto are installed; recording into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.store.lease import Lease
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.hooks.text.packed_tokens import PackedTokens


@pytest.fixture(scope="module")
def text(make_text: Callable[..., PackedTokens]) -> PackedTokens:
    return make_text(seed=6)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., LoopedMoE]) -> LoopedMoE:
    return make_model(2)


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


@pytest.fixture
def put(url: str, model: LoopedMoE, text: PackedTokens, make_collector, tmp_path) -> Callable[..., None]:
    """`put(on_progress)`: records into the store, with a scratch folder of its own each time, as another machine would."""
    scratches = iter(range(100))

    def run(
        on_progress: Callable[[int, int], None] = lambda done, total: None, text: PackedTokens = text, **options: Any
    ) -> None:
        collector = make_collector(model, text, ("resid_rms", "sink_mass"))
        chosen = RecordingOptions(level="tokens", **{"shard_tokens": 60, **options})
        scratch = tmp_path / f"scratch{next(scratches)}"
        provenance = {"weights_sha256": "0" * 64}
        record(
            model,
            text,
            scratch,
            collector,
            chosen,
            provenance=provenance,
            on_progress=on_progress,
            url=url,
            attention_implementation="torch",
        )
        assert not list(scratch.glob("shards/*"))

    return run
