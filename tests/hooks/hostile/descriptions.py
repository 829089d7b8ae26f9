"""What a shard says of itself: its JSON, version, counts and definitions."""

from __future__ import annotations

import h5py
import numpy as np
from tests.hooks.hostile.making import hostile


def run_text(file: h5py.File, text: bytes) -> None:
    file.attrs.create("run", np.array(text, dtype=h5py.string_dtype("utf-8", len(text))))


@hostile("not readable JSON")
def description_nested_without_end(file: h5py.File) -> None:
    run_text(file, b"[" * 400_000)


@hostile("lacks a field")
def description_of_a_million_lists(file: h5py.File) -> None:
    run_text(file, b"[" + b"[]," * 349_000 + b"[]]")


@hostile("not readable JSON")
def description_with_an_endless_number(file: h5py.File) -> None:
    run_text(file, b'{"tokens": ' + b"9" * 100_000 + b"}")


@hostile("lacks a field")
def description_without_fields(file: h5py.File) -> None:
    run_text(file, b'{"run_uuid": "x"}')


@hostile("isn't text")
def description_that_is_not_text(file: h5py.File) -> None:
    run_text(file, b"\xff\xfe{}")


@hostile("schema version 2.0.0 needs another visitlens")
def another_major_version(file: h5py.File) -> None:
    file.attrs["schema_version"] = np.bytes_("2.0.0")


@hostile("never completed")
def never_completed(file: h5py.File) -> None:
    file.attrs["complete"] = np.int64(0)


@hostile("no count token_count")
def negative_count(file: h5py.File) -> None:
    file.attrs["token_count"] = np.int64(-1)


@hostile("begin at -5")
def vectors_before_the_first_token(file: h5py.File) -> None:
    file["vec/q"].attrs["token_start"] = np.int64(-5)


@hostile("begin at 1000000")
def vectors_behind_the_last_token(file: h5py.File) -> None:
    file["vec/q"].attrs["token_start"] = np.int64(10**6)


@hostile("says which tokens it is of")
def token_ids_of_other_tokens(file: h5py.File) -> None:
    file["tokens/id"].attrs["token_start"] = np.int64(-5)


@hostile("another logical_dtype")
def bits_of_another_kind(file: h5py.File) -> None:
    file["vec/q"].attrs["logical_dtype"] = np.bytes_("float8")


@hostile("not of a visitlens recording")
def another_program_s_file(file: h5py.File) -> None:
    del file.attrs["format"]


@hostile("lacks its definition")
def measure_without_definition(file: h5py.File) -> None:
    del file["summary/resid_rms"].attrs["definition"]
