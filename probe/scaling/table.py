"""RunTable, finished training runs as one table: read from CSV, JSON, Parquet or a ladder's folder, checked whole. Torch-free.

One row is one number measured: a validation loss at an endpoint (`loss`), of all text or of a `source`, `category` or length
`bucket`; or a `score` of a `task`. An endpoint is one model after its last step: `arch, scale, level, D` and, with repeats, `seed`.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.errors import InputError, UnavailableError

NUMBERS = ("F", "S", "D", "loss", "bucket", "tokens", "k", "seed", "score", "chance", "layers", "looped", "visits")
TEXTS = ("arch", "scale", "level", "source", "category", "task", "axis")
ENDPOINT = ("arch", "scale", "level", "D", "seed", "axis", "layers", "looped", "visits")
"""What tells one trained model from another, where a table has it; the last four are of a sweep over loop designs."""
PARTS = ("source", "category", "bucket", "task", "k")
"""What a number is of, where it isn't of all validation text."""
_FINER = {"category": ("source",), "bucket": ("source", "category")}
LAW = ("arch", "scale", "level", "F", "S", "D", "loss")
_SHOWN = 5
_MEANING = {
    "arch": "architecture, such as Baseline",
    "scale": "name of the model size",
    "level": "name of the sparsity level",
    "F": "training FLOPs per token",
    "S": "compute-equivalent sparsity, 0 to 1",
    "D": "training tokens",
    "loss": "validation loss in nats per token",
    "score": "a task's result",
}


@dataclass(frozen=True)
class RunTable:
    """Columns by name, all of one length: float64 (NaN where a cell is empty) or str ("" likewise).

    `rows` numbers the rows as the file does, from 1 below the header, so that a selection still names them.
    """

    columns: Mapping[str, np.ndarray]
    rows: np.ndarray
    name: str = "table"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> np.ndarray:
        """Raises InputError: the table has no such column."""
        if column not in self.columns:
            raise InputError(f"{self.name} has no column {column!r}; it has {', '.join(self.columns)}")
        return self.columns[column]

    def has(self, *columns: str) -> bool:
        """Whether each of these columns is there and not empty."""
        return all(c in self.columns and bool(_filled(self.columns[c]).any()) for c in columns)

    def where(self, keep: np.ndarray) -> RunTable:
        """The rows of a mask [row]."""
        return RunTable({name: column[keep] for name, column in self.columns.items()}, self.rows[keep], self.name)

    @cached_property
    def archs(self) -> tuple[str, ...]:
        """Architectures in order of appearance."""
        return tuple(dict.fromkeys(self["arch"].tolist()))

    def ordered(self, column: str, by: str) -> list[str]:
        """Names in a text column, by the median of a numeric one: scales by F, levels by S."""
        names = list(dict.fromkeys(self[column].tolist()))
        return sorted(names, key=lambda name: float(np.median(self[by][self[column] == name])))

    @property
    def whole(self) -> np.ndarray:
        """[row] of all validation text, not of a part of it or a task."""
        mask = np.ones(len(self), dtype=bool)
        for part in PARTS:
            if part in self.columns:
                mask &= ~_filled(self.columns[part])
        return mask

    def endpoints(self) -> RunTable:
        """One row an endpoint with its validation loss: the table's own, or the mean over its sources where it has none.

        Raises:
            InputError: no losses, or endpoints with different sources.
        """
        need(self, LAW)
        whole = self.whole
        if whole.any():
            chosen = self.where(whole)
            _finite(chosen, ("loss",))
            return chosen
        if not self.has("source"):
            raise InputError(f"{self.name}: no row is of all validation text, and no sources to average")
        return self.by_part("source").mean_over_parts()

    def by_part(self, column: str) -> PartLosses:
        """Losses by source, category or bucket: [endpoint, part], aligned.

        Raises:
            InputError: an endpoint lacks a part that another has (names the rows' endpoints).
        """
        return PartLosses.of(self, column)


@dataclass(frozen=True)
class PartLosses:
    """`losses [endpoint, part]` in nats; `ends` has one row an endpoint, in the table's order."""

    ends: RunTable
    parts: tuple[str, ...]
    losses: np.ndarray

    @classmethod
    def of(cls, table: RunTable, column: str) -> PartLosses:
        need(table, (*LAW, column))
        mine = _filled(table[column]) & ~np.isnan(table["loss"])
        for other in (c for c in ("bucket", "task") if c != column and c in table.columns):
            mine &= ~_filled(table[other])
        for finer in (
            c for c in _FINER.get(column, ()) if c in table.columns
        ):  # averaged only where the part has no row of its own
            own = mine & ~_filled(table[finer])
            mine = own if own.any() else mine
        chosen = table.where(mine)
        keys = keys_of(chosen, ENDPOINT)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        names = chosen[column]
        parts = tuple(dict.fromkeys(_label(name) for name in names.tolist()))
        ends = chosen.where(np.array(sorted(first.values()), dtype=int))
        order = {key: i for i, key in enumerate(keys_of(ends, ENDPOINT))}
        sums, counts = np.zeros((len(ends), len(parts))), np.zeros((len(ends), len(parts)))
        at = [order[key] for key in keys], [parts.index(_label(name)) for name in names.tolist()]
        np.add.at(sums, at, chosen["loss"])
        np.add.at(counts, at, 1)
        if not counts.all():
            end, part = np.argwhere(counts == 0)[0]
            raise InputError(
                f"{table.name}: endpoint {describe(ends, end)} has no {column} {parts[part]!r}, which others have; "
                "every endpoint needs the same ones"
            )
        return cls(ends, parts, sums / counts)

    def mean_over_parts(self) -> RunTable:
        """Each endpoint with the mean loss of its parts."""
        columns = {name: column for name, column in self.ends.columns.items() if name not in PARTS}
        return RunTable({**columns, "loss": self.losses.mean(1)}, self.ends.rows, self.ends.name)


def read_table(source: Path | str | Iterable[Mapping[str, Any]], columns: Sequence[str] = LAW) -> RunTable:
    """Reads and checks a whole table; nothing is dropped.

    Args:
        source: a .csv, .json or .parquet file; a folder with a ladder's grid.json; or rows as mappings. JSON is a list of rows,
            or an object with `rows`.
        columns: those that must be there, without empty cells where they identify a row.

    Raises:
        InputError: no such file or format; a missing column; numbers that aren't or are out of range; rows twice. Names the rows.
        UnavailableError: Parquet without pyarrow.
    """
    if not isinstance(source, Path | str):
        return table_of(list(source), "rows", columns)
    path = Path(source)
    if path.is_dir():
        from visitlens.probe.scaling.ladder_table import ladder_rows

        return table_of(ladder_rows(path), str(path), columns)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: expected a table as {', '.join(_READERS)}, or a folder with a ladder's grid.json")
    try:
        rows = reader(path)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: can't be read as a table ({error})") from error
    return table_of(rows, str(path), columns)


def table_of(rows: Sequence[Mapping[str, Any]], name: str, columns: Sequence[str] = LAW) -> RunTable:
    """As `read_table`, of rows in memory."""
    if not rows:
        raise InputError(f"{name} has no rows; it needs the columns {', '.join(columns)}")
    bad = [i for i, row in enumerate(rows, 1) if not isinstance(row, Mapping)]
    if bad:
        raise InputError(f"{name}: expected rows with named columns, got something else in {_rows(bad)}")
    present = list(dict.fromkeys(key for row in rows for key in row))
    if missing := [c for c in columns if c not in present]:
        meaning = "; ".join(f"{c} is the {_MEANING[c]}" for c in missing if c in _MEANING)
        raise InputError(
            f"{name} has no column {', '.join(missing)}; it has {', '.join(map(str, present))}"
            + (f" ({meaning})" if meaning else "")
        )
    found: dict[str, np.ndarray] = {}
    for column in (*TEXTS, *NUMBERS):
        if column in present:
            values = [row.get(column) for row in rows]
            found[column] = _numbers(values, column, name) if column in NUMBERS else _texts(values)
    table = RunTable(found, np.arange(1, len(rows) + 1), name)
    _check(table)
    need(table, columns)
    return table


def to_csv(table: RunTable) -> str:
    """The table as `read_table` reads it; numbers with all their digits, empty cells empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(zip(*(["" if v is None else v for v in _keys(c)] for c in table.columns.values()), strict=True))
    return buffer.getvalue()


def need(table: RunTable, columns: Sequence[str]) -> None:
    """Raises InputError where a column is missing, or empty in all rows; or an identifying one in any row."""
    for column in columns:
        filled = _filled(table[column])
        whole = column in (*ENDPOINT[:4], "F", "S")
        if not filled.any() or (whole and not filled.all()):
            where = "every row" if not filled.any() else _rows(table.rows[~filled])
            raise InputError(f"{table.name}: column {column} is empty in {where}")


def keys_of(table: RunTable, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """[row] the values of those columns that the table has; an empty number is None."""
    parts = [_keys(table.columns[c]) for c in columns if c in table.columns]
    return list(zip(*parts, strict=True)) if parts else [()] * len(table)


def describe(table: RunTable, index: int) -> str:
    """`Baseline 200M 85% at 2.05e+10 tokens`."""
    arch, scale, level = (table[c][index] for c in ("arch", "scale", "level"))
    return f"{arch} {scale} {level} at {table['D'][index]:.4g} tokens"


def _keys(column: np.ndarray) -> list[Any]:
    return [None if isinstance(v, float) and np.isnan(v) else v for v in column.tolist()]


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _filled(column: np.ndarray) -> np.ndarray:
    return ~np.isnan(column) if column.dtype.kind == "f" else column != ""


def _numbers(values: Sequence[Any], column: str, name: str) -> np.ndarray:
    """Empty cells are NaN; what is no finite number is an error."""
    found, bad = np.full(len(values), np.nan), []
    for i, value in enumerate(values):
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        try:
            found[i] = float(value)
        except (TypeError, ValueError):
            bad.append(i + 1)
            continue
        if not np.isfinite(found[i]):
            bad.append(i + 1)
    if bad:
        raise InputError(
            f"{name}: column {column} must hold finite numbers, got {values[bad[0] - 1]!r} in {_rows(bad)}"
        )
    return found


def _texts(values: Sequence[Any]) -> np.ndarray:
    return np.array(["" if v is None else str(v).strip() for v in values], dtype=object).astype(str)


_RANGES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "F": (lambda v: v > 0, "greater than 0"),
    "D": (lambda v: v > 0, "greater than 0"),
    "S": (lambda v: (v >= 0) & (v < 1), "a share from 0 to below 1 (0.85, not 85)"),
    "loss": (lambda v: v > 0, "greater than 0"),
    "k": (lambda v: (v >= 0) & (v == np.floor(v)), "a whole number of shots"),
    "chance": (lambda v: (v >= 0) & (v < 1), "a share from 0 to below 1"),
}


def _check(table: RunTable) -> None:
    for column, (allowed, words) in _RANGES.items():
        if column in table.columns:
            values = table.columns[column]
            wrong = ~np.isnan(values) & ~allowed(values)
            if wrong.any():
                raise InputError(
                    f"{table.name}: {column} must be {words}, got {values[wrong][0]:g} in {_rows(table.rows[wrong])}"
                )
    seen: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    values = [c for c in ("loss", "score") if c in table.columns]
    kinds = np.stack([~np.isnan(table.columns[c]) for c in values], 1).tolist() if values else [[]] * len(table)
    for key, kind, row in zip(keys_of(table, (*ENDPOINT, *PARTS)), kinds, table.rows.tolist(), strict=True):
        seen[(*key, *kind)].append(row)
    if twice := [rows for rows in seen.values() if len(rows) > 1]:
        raise InputError(
            f"{table.name}: {_rows(twice[0])} are of the same endpoint and part"
            + (f", and {len(twice) - 1} more such groups" if len(twice) > 1 else "")
            + "; repeats need a column seed"
        )


def _finite(table: RunTable, columns: Sequence[str]) -> None:
    for column in columns:
        if (empty := np.isnan(table[column])).any():
            raise InputError(f"{table.name}: column {column} is empty in {_rows(table.rows[empty])}")


def _rows(numbers: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(str(int(n)) for n in list(numbers)[:_SHOWN])
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _csv(path: Path) -> list[Any]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if ragged := [i for i, row in enumerate(rows, 1) if None in row or None in row.values()]:
        raise ValueError(f"{_rows(ragged)}: another number of cells than the header")
    return rows


def _json(path: Path) -> list[Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = found.get("rows") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise ValueError("expected a list of rows, or an object with rows")
    return rows


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table as read
    except ImportError as error:
        raise UnavailableError("Parquet needs pyarrow: pip install 'visitlens[data]'") from error
    try:
        return read(path).to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error


_READERS: dict[str, Callable[[Path], list[Any]]] = {".csv": _csv, ".json": _json, ".parquet": _parquet}
