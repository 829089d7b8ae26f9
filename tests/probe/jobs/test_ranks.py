"""One model over several processes records what it records in one; a rank that fails ends all of them with one error."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.meeting import meeting_place, of_rank
from torch import distributed
from torch.distributed.tensor import DTensor

from visitlens.errors import InputError, VisitlensError
from visitlens.hooks.models import checkpoint
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.models.expert_parallel import share
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.kernels.grouped_experts import expert_rows, grouped_experts
from visitlens.probe.jobs import torchrun as ranks_module
from visitlens.probe.jobs.prepared_run import PreparedRun
from visitlens.probe.jobs.request import RunRequest
from visitlens.probe.jobs.torchrun import ranks
from visitlens.probe.model.bundled import PAIR

MEASURES = ("sink_mass", "resid_rms", "expert_load")


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., LoopedMoE], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 10 experts, shared by two ranks as 5 and 5, by three as 4, 4 and 2; and a text."""
    tokenizer = Path(PAIR["looped"]) / "tokenizer.json"
    vocabulary = json.loads((Path(PAIR["looped"]) / "config.json").read_text())["vocab_size"]
    path = tmp_path_factory.mktemp("ranks")
    save_model(make_model(2, vocab_size=vocabulary, shared_expert_dim=4), path / "model", torch.float32)
    shutil.copy(tokenizer, path / "model")
    (path / "text.txt").write_text("The quick brown fox (jumps over) the lazy dog. " * 40)
    return path


def request(folder: Path, out: Path, **changes: object) -> RunRequest:
    kept = {"level": "tokens", "shard_tokens": 100}
    fields = {"dtype": "float64", "measures": MEASURES, "threads": 1, **kept, **changes}
    return RunRequest.of(folder / "model", folder / "text.txt", out, **fields)


@pytest.fixture(scope="module")
def single(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(PreparedRun(request(folder, tmp_path_factory.mktemp("one") / "r.vlens")).record())


def assert_same(one: Recording, two: Recording) -> None:
    """To the bit: each row of the experts' output comes from one rank alone."""
    assert one.complete and two.complete and one.run["config_sha256"] == two.run["config_sha256"]
    for name, expected in one.totals.items():
        np.testing.assert_array_equal(two.totals[name].total, expected.total, err_msg=name)
        np.testing.assert_array_equal(two.totals[name].count, expected.count, err_msg=name)
    np.testing.assert_array_equal(one.token_stat("sink_mass"), two.token_stat("sink_mass"))
    for step in one.plan.steps:
        for ours, theirs in zip(one.experts(step.layer, step.visit), two.experts(step.layer, step.visit), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("experts", "parts"), [(10, [5, 5]), (10, [4, 4, 2]), (4, [2, 2, 0]), (504, [63] * 8), (1, [1, 0])]
)
def test_every_expert_has_one_rank(experts: int, parts: list[int]) -> None:
    shares = [share(experts, len(parts), rank) for rank in range(len(parts))]
    assert [len(mine) for mine in shares] == parts
    assert [expert for mine in shares for expert in mine] == list(range(experts))
    assert [len(part) for part in torch.arange(experts).chunk(len(parts))] == [n for n in parts if n]  # as DTensor cuts


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float64, 6), (torch.float32, 16), (torch.bfloat16, 16)])
def test_slices_of_the_experts_add_up_to_the_whole(dtype: torch.dtype, hidden: int) -> None:
    """Bit for bit, by grouped_mm (16) and by one product an expert (6); one slice gets no token at all."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, hidden, generator=random).to(dtype)
    w_in, w_out = (
        torch.randn(10, *shape, generator=random).to(dtype) for shape in ((hidden, 2 * hidden), (hidden, hidden))
    )
    experts = torch.rand(40, 7, generator=random).topk(3).indices  # none of 7, 8, 9
    gates = torch.rand(40, 3, generator=random).to(dtype)
    slices = [(0, 4), (4, 7), (7, 10)]
    rows = [expert_rows(x, experts, gates, w_in[a:b], w_out[a:b], a) for a, b in slices]
    assert not rows[2].any() and [bool((row != 0).any()) for row in rows] == [True, True, False]
    assert torch.equal(sum(rows[1:], rows[0]).sum(1), grouped_experts(x, experts, gates, w_in, w_out))


def test_torchrun_records_what_one_process_does(folder: Path, single: Recording, tmp_path: Path) -> None:
    out = tmp_path / "r.vlens"
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")]
    command += ["-m", "visitlens", "record", str(folder / "model"), str(folder / "text.txt"), "-o", str(out)]
    command += ["--level", "tokens", "--dtype", "float64", "--shard-tokens", "100"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{out}\n" and result.stderr.count("tokens, 1 document;") == 1  # rank 0 alone speaks
    rec = Recording(out)
    assert validate(out).exit_code == 0 and rec.provenance["device"] == "2 x cpu"
    np.testing.assert_array_equal(rec.token_stat("sink_mass"), single.token_stat("sink_mass"))
    np.testing.assert_array_equal(rec.totals["resid_rms"].total, single.totals["resid_rms"].total)
    assert all(np.array_equal(rec.experts(1, v)[0], single.experts(1, v)[0]) for v in (1, 2))


class Fork:
    """Ranks forked from this process (torch is loaded already); each writes what became of it into a file."""

    def __init__(self, folder: Path, work: Callable[[int], object], size: int = 2) -> None:
        self.folder, self.children, self.meeting = folder, [], meeting_place()
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os.environ.update(of_rank(rank, size, self.meeting.port))
                try:
                    ended = repr(work(rank))
                except BaseException as error:
                    ended = f"{type(error).__name__}: {error}"
                (folder / f"rank{rank}").write_text(ended)
                os._exit(0)
            self.children.append(child)

    def ends(self) -> list[str]:
        for child in self.children:
            os.waitpid(child, 0)
        files = [self.folder / f"rank{rank}" for rank in range(len(self.children))]
        return [file.read_text() if file.exists() else "killed" for file in files]


def recorded(asked: RunRequest, on_progress: Callable[[int, int], None] = lambda done, total: None) -> object:
    with ranks(asked) as own:
        if own is None:
            return "served"
        return str(PreparedRun(own).record(on_progress))


def test_three_ranks_hold_their_own_experts_and_nothing_of_the_others(
    folder: Path, single: Recording, tmp_path: Path
) -> None:
    out = tmp_path / "r.vlens"

    def work(rank: int) -> object:
        loaded = checkpoint.load_model
        sizes: list[tuple[int, ...]] = []

        def look(*arguments: object) -> LoopedMoE:
            model = loaded(*arguments)  # pyright: ignore  (a name of the script it is pasted into)
            for name, parameter in model.named_parameters():
                if isinstance(parameter, DTensor):
                    assert name.endswith(("mlp.W_in", "mlp.W_out")) and parameter.shape[0] == 10
                    sizes.append(tuple(parameter.to_local().shape))
                    assert parameter.to_local().untyped_storage().nbytes() == parameter.to_local().nbytes
            return model

        ranks_module.load_model = look
        import visitlens.probe.jobs.prepared_run as run

        run.load_native = look
        return recorded(request(folder, out)), {shape[0] for shape in sizes}, len(sizes)

    ends = Fork(tmp_path, work, size=3).ends()
    assert ends == [f"('{out}', {{4}}, 8)", "('served', {4}, 8)", "('served', {2}, 8)"]
    assert_same(single, Recording(out))


@pytest.mark.parametrize("how", ["killed", "out of memory"])
def test_a_lost_rank_ends_all_with_one_error_and_the_run_goes_on_later(
    how: str, folder: Path, single: Recording, tmp_path: Path
) -> None:
    """The killed one dies while rank 0 is between two contexts."""
    out, contexts = tmp_path / "r.vlens", list[int]()
    reached, go_on = os.pipe(), os.pipe()

    def on_progress(done: int, total: int) -> None:
        contexts.append(done)
        if how == "killed" and len(contexts) == 7:  # of 14: two shards of two are acknowledged
            os.write(reached[1], b"!")
            os.read(go_on[0], 1)

    def work(rank: int) -> object:
        if rank and how == "out of memory":
            calls: list[int] = []
            forward = LoopedMoE.forward

            def fail(*arguments: object, **options: object) -> object:
                calls.append(1)
                if len(calls) == 4:
                    raise MemoryError("no room for the experts' rows")
                return forward(*arguments, **options)  # pyright: ignore  (a name of the script it is pasted into)

            LoopedMoE.forward = fail  # pyright: ignore  (a name of the script it is pasted into)
        return recorded(request(folder, out), on_progress)

    group = Fork(tmp_path, work)
    if how == "killed":
        assert select.select([reached[0]], [], [], 300)[0], "it never came to its seventh context"
        os.kill(group.children[1], signal.SIGKILL)
        os.waitid(os.P_PID, group.children[1], os.WEXITED | os.WNOWAIT)
        os.write(go_on[1], b"!")
    first, second = group.ends()
    assert first.startswith("PeerError: ") and "the same command goes on from there" in first
    if how == "killed":
        assert second == "killed" and "another process of this run has ended" in first
    else:
        assert second == "SystemExit: 1" and "rank 1: no room for the experts' rows" in first
    part = Recording(out)
    assert 0 < part.tokens < part.run["tokens"] and validate(out).exit_code == 3
    for end in (*reached, *go_on):
        os.close(end)
    assert_same(single, Recording(PreparedRun(request(folder, out)).record()))


def test_what_rank_0_refuses_ends_the_others_quietly(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    first, second = Fork(tmp_path, lambda rank: recorded(request(folder, tmp_path))).ends()
    assert "RecordingError" in first and "not an empty folder nor a recording" in first
    assert second == "'served'" or second == "SystemExit: 1"


def test_torchrun_with_other_workers_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError, match="leave out --workers"), ranks(request(folder, tmp_path, workers=2)):
        pass
    assert not distributed.is_initialized() and issubclass(InputError, VisitlensError)
