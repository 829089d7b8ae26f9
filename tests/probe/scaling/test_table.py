"""Tables of runs: what is read, and one error that names the rows for what can't be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.run_tables import full_rows, full_table, rows_of

from visitlens.errors import InputError, UnavailableError
from visitlens.probe.model.bundled import LADDER
from visitlens.probe.scaling.paper import synthetic_runs
from visitlens.probe.scaling.table import LAW, RunTable, read_table, table_of, to_csv

ROW = {"arch": "A", "scale": "s", "level": "85%", "F": 1e9, "S": 0.85, "D": 1e10, "loss": 2.0}


def test_csv_json_and_parquet_hold_the_same_table(tmp_path: Path) -> None:
    table = full_table()
    (tmp_path / "t.csv").write_text("\ufeff" + to_csv(table), encoding="utf-8")
    rows = [{k: v for k, v in row.items() if v == v} for row in rows_of(table)]
    (tmp_path / "t.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is the extra visitlens[data]")
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = [{column: row.get(column) for column in table.columns} for row in full_rows()]
    parquet.write_table(pyarrow.Table.from_pylist(whole), tmp_path / "t.parquet")
    for name in ("t.csv", "t.json", "list.json", "t.parquet"):
        read = read_table(tmp_path / name)
        assert set(read.columns) == set(table.columns)
        for column, values in table.columns.items():
            np.testing.assert_array_equal(read[column], values, err_msg=f"{name} {column}")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([{k: v for k, v in ROW.items() if k != "F"}], "no column F; it has arch.*F is the training FLOPs per token"),
        ([ROW, ROW | {"D": 2e10, "loss": "two"}], "column loss must hold finite numbers, got 'two' in row 2"),
        ([ROW | {"loss": float("nan")}], "finite numbers, got nan in row 1"),
        ([ROW | {"F": float("inf")}], "column F must hold finite numbers"),
        ([ROW | {"S": 85}], r"S must be a share from 0 to below 1 \(0.85, not 85\), got 85 in row 1"),
        ([ROW | {"D": -1}], "D must be greater than 0"),
        ([ROW, ROW | {"loss": 2.1}], "rows 1, 2 are of the same endpoint and part; repeats need a column seed"),
        ([ROW | {"scale": ""}], "column scale is empty in every row"),
        ([ROW, ROW | {"arch": "", "D": 3e10}], "column arch is empty in row 2"),
        ([ROW, ROW | {"D": 3e10, "F": None}], "column F is empty in row 2"),
        ([ROW, 3], "rows with named columns, got something else in row 2"),
        ([ROW | {"k": 1.5}], "k must be a whole number of shots"),
    ],
)
def test_a_bad_table_is_one_error_that_names_the_rows(rows: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        table_of(rows, "runs")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.txt", "", "expected a table as .csv, .json, .parquet, or a folder"),
        ("t.csv", "arch,scale\nA\n", "row 1: another number of cells than the header"),
        ("t.json", "{", "can't be read as a table"),
        ("t.json", "3", "expected a list of rows"),
        ("t.parquet", "no", "can't be read as a table"),
    ],
)
def test_a_file_that_is_no_table_says_so(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((InputError, UnavailableError), match=message):
        read_table(tmp_path / name)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read as a table"):
        read_table(tmp_path / "none.csv")


def test_the_loss_of_an_endpoint_is_its_own_row_or_the_mean_over_its_sources() -> None:
    rows = [ROW | {"source": s, "loss": loss} for s, loss in (("a", 1.0), ("b", 2.5))]
    assert table_of(rows, "t").endpoints()["loss"].tolist() == [1.75]
    assert table_of([ROW, *rows], "t").endpoints()["loss"].tolist() == [2.0]
    with pytest.raises(InputError, match=r"A s 85% at 2e\+10 tokens has no source 'b'"):
        table_of([*rows, ROW | {"source": "a", "D": 2e10}], "t").endpoints()
    with pytest.raises(InputError, match="no row is of all validation text"):
        table_of([ROW | {"bucket": 32}], "t").endpoints()


def test_a_category_has_its_own_rows_or_the_mean_over_its_sources() -> None:
    sources = [ROW | {"source": s, "category": "Code", "loss": v} for s, v in (("a", 1.0), ("b", 2.0))]
    assert table_of(sources, "t").by_part("category").losses.tolist() == [[1.5]]
    own = [*sources, ROW | {"category": "Code", "loss": 1.2}]
    assert table_of(own, "t").by_part("category").losses.tolist() == [[1.2]]


def test_repeats_with_seeds_are_endpoints_of_their_own() -> None:
    table = table_of([ROW | {"seed": 0}, ROW | {"seed": 1, "loss": 2.1}], "t")
    assert len(table.endpoints()) == 2


def test_the_bundled_ladder_is_a_table_of_both_sides_of_seven_cells() -> None:
    table = read_table(LADDER)
    ends = table.endpoints()
    assert len(ends) == 14 and set(ends.archs) == {"looped", "Baseline"}
    assert ends.ordered("scale", "F") == ["44K", "136K", "263K", "1.1M"]
    assert table.has("category", "bucket", "task", "k", "score", "tokens")
    parts = table.by_part("category")
    whole = dict(zip(zip(ends["arch"], ends["scale"], ends["level"], strict=True), ends["loss"], strict=True))
    for i, losses in enumerate(parts.losses):
        key = tuple(parts.ends[c][i] for c in ("arch", "scale", "level"))
        assert losses.mean() == pytest.approx(whole[key], rel=1e-12)


def test_names_are_ordered_by_what_they_stand_for() -> None:
    table = synthetic_runs()
    assert table.ordered("scale", "F") == ["100M", "200M", "600M", "1.6B"]
    assert table.ordered("level", "S") == ["85%", "95%", "97%"]


def test_a_selection_still_names_the_rows_of_the_file() -> None:
    table = table_of([ROW, ROW | {"D": 2e10}, ROW | {"D": 3e10}], "t")
    assert table.where(table["D"] > 1.5e10).rows.tolist() == [2, 3]
    assert isinstance(table, RunTable) and set(LAW) <= set(table.columns)
    with pytest.raises(InputError, match="no column 'task'; it has"):
        table["task"]
