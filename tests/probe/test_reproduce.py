"""What makes `reproduce` do its work anew."""

from __future__ import annotations

from pathlib import Path

from visitlens.probe.reproduce import _code_of


def test_every_source_file_counts_also_where_two_have_one_name(tmp_path: Path) -> None:
    files = [tmp_path / "hooks/base.py", tmp_path / "probe/a/base.py", tmp_path / "probe/b/base.py"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    parts = {"hooks": tmp_path / "hooks", "probe": tmp_path / "probe"}
    seen = {_code_of(parts)}
    for file in files:
        file.write_text("x = 2\n")
        seen.add(_code_of(parts))
    assert len(seen) == 4
