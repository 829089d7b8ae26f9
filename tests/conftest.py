"""Tiny seeded models, packed random text, and recordings of three models over the same text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.support import made_up, rounding

from visitlens.app.cli import main
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.hooks.text.documents import pack
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.analyses.results import store as analyses
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: threads that wait for busy cores burn them
settings.register_profile(  # a busy machine is no failure, and every run tries the same examples
    "visitlens", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("visitlens")

VOCABULARY = 61
BOS, EOS, PAD = 0, 1, 2
LENGTHS = (1, 2, 8, 9, 70, 3, 17, 1, 30, 2, 12, 9)
"""Of the documents of `make_text`, BOS and EOS included: alone, at the edges of top-8, and longer than the context."""


LONG = (
    "test_notebooks.py",
    "test_ladder_commands.py",
    "test_train.py",
    "test_workers.py",
    "test_ranks.py",
    "test_cli.py",
)
"""Files with the longest tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torch-threads", type=int, default=1, help="threads of torch in the tests' processes (default 1)"
    )
    parser.addoption(
        "--mutations",
        type=int,
        default=160,
        help="changed HDF5 structures that are opened (default 160; make fuzz: 2000)",
    )
    parser.addoption(
        "--noise-ulp",
        type=float,
        default=0,
        help="noise on every float32 product, in units in the last place: what fails hangs on rounding (default 0)",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--torch-threads"))
    if units := config.getoption("--noise-ulp"):
        library = rounding.disturb_products(units)
        config.add_cleanup(library._destroy)
        config.add_cleanup(rounding.refuse_near_equality(256 * units))  # a forward adds up the noise of many products


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest begin, so that no core is left with one of them at the end."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(autouse=True)
def the_same_chance() -> None:
    """What a test or a model's first weights draw without a generator of their own doesn't depend on the tests before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., LoopedMoE]:
    """Factory: `make_model(visits=2, dtype=torch.float32, seed=1, **config)`; one visit is the Baseline (empty span)."""

    def build(visits: int = 2, *, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> LoopedMoE:
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 4,
        }
        sizes |= {"num_experts": 10, "expert_dim": 8, "experts_per_token": 3, "context_length": 64}
        if visits > 1:
            sizes |= {"loop_start": 1, "loop_stop": 3, "visits": visits}
        model = LoopedMoE(LoopedMoEConfig(**{**sizes, **changes}))
        model.init_weights(seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # gains away from 1, so that a forgotten one shows
                    parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        return model.to(dtype).eval().requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def make_documents() -> Callable[..., list[np.ndarray]]:
    """Factory: random token ids, BOS first, of the given lengths (a mix of the awkward ones by default)."""

    def build(seed: int = 0, lengths: Sequence[int] = LENGTHS, vocabulary: int = VOCABULARY) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [np.array([BOS, *rng.integers(3, vocabulary, n - 1)], dtype=np.int32) for n in lengths]

    return build


@pytest.fixture(scope="session")
def make_text(make_documents: Callable[..., list[np.ndarray]]) -> Callable[..., PackedTokens]:
    """Factory: `make_documents` packed into contexts of `context` tokens."""

    def build(
        seed: int = 0, lengths: Sequence[int] = LENGTHS, context: int = 32, vocabulary: int = VOCABULARY
    ) -> PackedTokens:
        return pack(make_documents(seed, lengths, vocabulary), context, BOS, PAD)

    return build


@pytest.fixture(scope="session")
def make_collector() -> Callable[..., StatisticsCollector]:
    """Factory: a fresh collector that fits a model and a text."""

    def build(
        model: LoopedMoE, text: PackedTokens, measures: Sequence[str] | None = None, groups: int = 128
    ) -> StatisticsCollector:
        # What the native model doesn't have: tests of these measures give it some.
        more = {"learned_sink": "learned_sink_mass" in (measures or ()), "ragged": "visit_share" in (measures or ())}
        geometry = Geometry.of(model.plan, {**model.config.to_dict(), **more})
        return StatisticsCollector(geometry, int(text.document_groups(groups).max()) + 1, measures)

    return build


@pytest.fixture(scope="session")
def make_recording(make_collector: Callable[..., StatisticsCollector]) -> Callable[..., RecordedRun]:
    """Factory: `make_recording(model, text, path, measures=None, **options)` records and opens."""

    def build(
        model: LoopedMoE,
        text: PackedTokens,
        path: Path,
        *,
        level: str = "tokens",
        measures: Sequence[str] | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **options: Any,
    ) -> RecordedRun:
        record(
            model,
            text,
            path,
            make_collector(model, text, measures, groups=options.get("groups", 128)),
            RecordingOptions(level=level, **options),
            provenance={"weights_sha256": "0" * 64, "text": "random", "note": "random weights"},
            attention_implementation="torch",
            on_progress=on_progress,
        )
        return open_recording(path)

    return build


@pytest.fixture(scope="session")
def recordings(
    make_model: Callable[..., LoopedMoE],
    make_text: Callable[..., PackedTokens],
    make_recording: Callable[..., RecordedRun],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, RecordedRun]:
    """Looped (2 visits), Baseline and three-visit models of 4 layers, layers 1-2 looped, 8 experts a token, over one
    text of 60 documents, at level `tokens`; the looped ones with made-up analyses."""
    lengths = [*LENGTHS, *np.random.default_rng(7).integers(2, 60, 60 - len(LENGTHS))]
    text = make_text(seed=3, lengths=lengths, context=64)
    folder = tmp_path_factory.mktemp("recordings")
    sizes = {"hidden_size": 32, "head_dim": 8, "experts_per_token": 8}
    models = {
        "looped": make_model(2, num_experts=16, **sizes),
        "baseline": make_model(1, num_experts=12, **sizes),
        "three": make_model(3, num_experts=16, **sizes),
    }
    runs = {name: make_recording(model, text, folder / f"{name}.vlens", batch=4) for name, model in models.items()}
    for name, visits in (("looped", 2), ("three", 3)):
        for made in (made_up.ablation(visits), made_up.dyck_study(visits)):
            analyses.store(runs[name].recording.path, made)
    return runs


@pytest.fixture(scope="session")
def looped_recording(recordings: dict[str, RecordedRun]) -> RecordedRun:
    """4 layers, layers 1-2 visited twice. Read-only: it's shared."""
    return recordings["looped"]


@pytest.fixture(scope="session")
def baseline_recording(recordings: dict[str, RecordedRun]) -> RecordedRun:
    """4 layers, nothing looped. Read-only: it's shared."""
    return recordings["baseline"]


@pytest.fixture(scope="session")
def three_visit_recording(recordings: dict[str, RecordedRun]) -> RecordedRun:
    """4 layers, layers 1-2 visited three times. Read-only: it's shared."""
    return recordings["three"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run("record", ...)`: the command line -> exit code, stdout, stderr (on one line)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["visitlens", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        code = exit_.value.code
        return (code if isinstance(code, int) else 0), out, " ".join(err.split())

    return call
