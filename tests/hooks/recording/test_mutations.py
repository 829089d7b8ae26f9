"""B-trees, heaps and object headers changed at random under right checksums: refused, or read as before."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.hooks.hostile.mutations import HEADERS, TREES_AND_HEAPS, blocks_of, mutated, outcomes

MOST_MEGABYTES = 300


@pytest.fixture(scope="module")
def valid(make_model, make_text, make_recording, tmp_path_factory) -> Path:
    """With all measures: their links are in a b-tree; and more attributes at a shard's root than an object header keeps."""
    path = tmp_path_factory.mktemp("valid") / "r.vlens"
    return make_recording(make_model(2), make_text(seed=6), path, level="tokens", shard_tokens=10_000).recording.path


@pytest.mark.parametrize("name", ["summary.h5", "shards/w00-000000.h5"])
@pytest.mark.parametrize("kinds", [TREES_AND_HEAPS, HEADERS], ids=["trees-and-heaps", "object-headers"])
def test_changed_structures_crash_nobody_and_hide_nothing(
    valid: Path, tmp_path: Path, name: str, kinds: tuple[bytes, ...], request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--mutations") // 4
    folder = tmp_path / "copy.vlens"
    shutil.copytree(valid, folder)
    data = (folder / name).read_bytes()
    blocks = blocks_of(data, kinds)
    by_kind = {kind: [block for block in blocks if block.kind == kind] for kind in kinds}
    assert by_kind[kinds[0]]
    there = [kind for kind in kinds if by_kind[kind]]
    (tmp_path / "m").mkdir()
    files, kind_of = [], {}
    for seed in range(count):
        kind = there[seed % len(there)]
        block = random.Random(seed).choice(by_kind[kind])
        files.append(tmp_path / "m" / f"{seed:05}.h5")
        kind_of[files[-1].name] = kind
        files[-1].write_bytes(mutated(data, block, seed))
    found = outcomes(folder, name, files)
    said = {(kind_of[file].decode(), line["outcome"]): line["said"] for file, line in found.items()}
    counts = Counter((kind_of[file].decode(), line["outcome"]) for file, line in found.items())
    print(f"{name}: {dict(sorted(counts.items()))}; at most {max(line['megabytes'] for line in found.values()):.0f} MB")
    wrong = {f: l for f, l in found.items() if l["outcome"] in ("died", "differs")}
    assert not wrong, wrong
    assert len(found) == count
    assert max(line["megabytes"] for line in found.values()) < MOST_MEGABYTES
    assert any(outcome == "refused" for _, outcome in counts), said
