"""Several processes write what one would have written, through a Ctrl-C, a killed worker and a second writer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from visitlens.errors import InputError, StorageError
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.commit import readable_bytes
from visitlens.probe.jobs.prepared_run import PreparedRun, prepare_recording
from visitlens.probe.jobs.processes import context
from visitlens.probe.jobs.request import RunRequest
from visitlens.probe.model.bundled import PAIR, SAMPLE


def request(out: Path, **changes: object) -> RunRequest:
    """About 2,000 tokens of the bundled model in contexts of 64, shards of four contexts."""
    kept = {"level": "tokens", "shard_tokens": 256, "batch": 2}
    fields = {"measures": ("sink_mass", "resid_rms", "expert_load"), "context_length": 64, "max_tokens": 2000}
    return RunRequest.of(PAIR["looped"], SAMPLE, out, threads=1, **{**kept, **fields, **changes})


def assert_same(one: Recording, two: Recording) -> None:
    """To 1e-9, as summed in another order; tokens and experts exactly."""
    assert one.complete and two.complete and one.run["config_sha256"] == two.run["config_sha256"]
    for name, expected in one.totals.items():
        np.testing.assert_allclose(two.totals[name].total, expected.total, rtol=1e-9, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(two.totals[name].count, expected.count, err_msg=name)
    np.testing.assert_array_equal(one.token_table()["id"], two.token_table()["id"])
    np.testing.assert_array_equal(one.experts(3, 2)[0], two.experts(3, 2)[0])
    np.testing.assert_array_equal(one.token_stat("sink_mass"), two.token_stat("sink_mass"))


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Recording:
    out = tmp_path_factory.mktemp("single") / "r.vlens"
    return Recording(PreparedRun(request(out)).record())


def test_a_killed_worker_a_second_writer_and_ctrl_c_lose_nothing(single: Recording, tmp_path: Path) -> None:
    """Two workers, one killed and replaced, then stopped; one process finishes."""
    out = tmp_path / "r.vlens"
    killed: list[int] = []
    pressed: list[int] = []

    def disturb(done: int, total: int) -> None:
        if done and not killed:
            with pytest.raises(StorageError, match="another process is writing this recording"):
                PreparedRun(request(out, workers=2)).record()
            worker = next(child for child in multiprocessing.active_children() if child.name == "visitlens-w00")
            killed.append(worker.pid or 0)
            worker.kill()
        elif done > 1200 and not pressed:
            pressed.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        PreparedRun(request(out, workers=2)).record(disturb)
    assert killed and not multiprocessing.active_children()
    part = Recording(out)
    assert 0 < part.tokens < part.run["tokens"] and validate(out).exit_code == 3
    assert {shard["worker"] for shard in part.shards} == {0, 1}
    kept = {shard["name"]: shard["sha256"] for shard in part.shards}
    whole = Recording(PreparedRun(request(out)).record())
    assert_same(single, whole)
    assert validate(out).exit_code == 0 and not list(out.rglob("*.tmp"))
    assert {shard["name"]: shard["sha256"] for shard in whole.shards}.items() >= kept.items()


def test_a_process_begins_with_torch_loaded_and_computes_with_several_threads() -> None:
    """Also where this one has used its own threads, which don't survive a fork."""
    two = "(t := __import__('torch')).set_num_threads(2) or float((t.ones(600, 600).double() @ t.ones(600, 600).double()).sum())"
    with ProcessPoolExecutor(1, mp_context=context()) as pool:
        assert pool.submit(eval, "'torch' in __import__('sys').modules").result(600) == (sys.platform == "linux")
        assert pool.submit(eval, two).result(600) == 600**3


def test_a_process_has_the_environment_of_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and devices are changed in a notebook while the server, once started, stays."""
    for said in ("before", "after"):
        monkeypatch.setenv("AWS_SESSION_TOKEN", said)
        with ProcessPoolExecutor(1, mp_context=context()) as pool:
            assert pool.submit(os.getenv, "AWS_SESSION_TOKEN").result(600) == said


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    for changes, says in (({"workers": 0}, "at least one worker"), ({"engine": "dask"}, "engine among process, ray")):
        with pytest.raises(InputError, match=says):
            replace(request(tmp_path / "r"), **changes)


def test_where_a_recording_comes_from_and_what_to_be_warned_of(tmp_path: Path) -> None:
    prepared = PreparedRun(request(tmp_path / "r", synthetic="random weights"))
    assert repr(prepared).startswith("PreparedRun(2,0") and "level tokens)" in repr(prepared)
    kept = {"level": "activations", "sites": ("Q",)}
    larger = prepare_recording(PAIR["looped"], SAMPLE, tmp_path / "a", max_tokens=2000, **kept)
    assert f"writes about {readable_bytes(larger.bytes_needed)} and a summary to {tmp_path / 'a'}" in str(larger)
    assert not (tmp_path / "a").exists()
    made = prepared.provenance
    assert len(made["tokenizer_sha256"]) == len(made["weights_sha256"]) == 64
    assert made["versions"]["numpy"] and "transformers" in made["versions"]
    assert made["warnings"][0] == "synthetic: random weights"
    assert made["warnings"][1].startswith("truncated: the first 2,0")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is an optional extra")
def test_a_ray_cluster_of_two_nodes_that_loses_one_writes_the_same(
    single: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.cluster_utils import Cluster

    # What starts has 30 s by Ray's clock, and who stands still for 10 is dead; a busy machine takes longer.
    slow, wait = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / 20}), Cluster._wait_for_node
    monkeypatch.setattr("ray._private.node.time", slow)
    monkeypatch.setattr(Cluster, "_wait_for_node", lambda cluster, node: wait(cluster, node, 600))
    for name in ("gcs_server_port_wait_time_s", "worker_register_timeout_seconds"):
        monkeypatch.setenv(f"RAY_{name}", "600")
    monkeypatch.setenv("RAY_health_check_timeout_ms", "600000")
    monkeypatch.setenv("RAY_health_check_period_ms", "500")  # a killed node is noticed in 3 s, not 15
    out, killed = tmp_path / "r.vlens", []
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    second = cluster.add_node(**node)
    try:
        ray.init(address=cluster.address, log_to_driver=False)

        def kill_a_node(done: int, total: int) -> None:
            if done and not killed:
                killed.append(done)
                cluster.remove_node(second, allow_graceful=False)

        PreparedRun(request(out, workers=2, engine="ray")).record(kill_a_node)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed and killed[0] < single.tokens
    assert_same(single, Recording(out))
    assert validate(out).exit_code == 0
