"""Contrasts by document length, and the axes of a pair."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.run_tables import BUCKETS, TASKS, full_rows, full_table

from visitlens.errors import InputError
from visitlens.probe.scaling.lengths import FAMILIES, length_contrasts
from visitlens.probe.scaling.radar import radar
from visitlens.probe.scaling.table import table_of

PLACE = {"scale": "s", "level": "85%", "F": 1e9, "S": 0.85, "D": 1e10}


def buckets(arch: str, losses: list[float], **place: object) -> list[dict]:
    return [{"arch": arch, **PLACE, **place, "bucket": b, "loss": v} for b, v in zip(BUCKETS[:4], losses, strict=True)]


def test_a_shape_by_hand() -> None:
    """Improvements 1, 2, 3, 6 of mean 3: shape 1/3, 2/3, 1, 2; long over short (1 + 2) / (1/3 + 2/3) = 3."""
    rows = buckets("Baseline", [10.0, 10.0, 10.0, 10.0]) + buckets("SMELT", [9.0, 8.0, 7.0, 4.0])
    shape, ratio = length_contrasts(table_of(rows, "t"), "SMELT", "Baseline", draws=10)
    assert shape.labels == {"family": ["architecture"], "bucket": ["32", "64", "128", "256"]}
    np.testing.assert_allclose(shape.values, [[1 / 3, 2 / 3, 1, 2]])
    assert ratio.values == pytest.approx([3.0])


def test_more_experts_and_more_parameters_are_consecutive_pairs_of_the_reference() -> None:
    rows = buckets("Baseline", [10.0] * 4) + buckets("SMELT", [9.0] * 4)
    rows += buckets("Baseline", [9.0, 9.0, 9.0, 8.0], level="95%", S=0.95)
    rows += buckets("Baseline", [6.0, 6.0, 8.0, 8.0], scale="t", F=2e9)
    shape, ratio = length_contrasts(table_of(rows, "t"), "SMELT", "Baseline", draws=5)
    assert tuple(shape.labels["family"]) == FAMILIES
    np.testing.assert_allclose(shape.sel(family="more experts").values, np.array([1, 1, 1, 2]) / 1.25)
    np.testing.assert_allclose(shape.sel(family="more parameters").values, np.array([4, 4, 2, 2]) / 3)
    assert ratio.sel(family="architecture").values == pytest.approx(1)
    assert ratio.sel(family="more experts").values == pytest.approx(1.5)


def test_every_shape_has_mean_one() -> None:
    shape, _ = length_contrasts(full_table(), "SMELT", "Baseline", draws=20)
    np.testing.assert_allclose(shape.values.mean(1), 1)
    assert "architecture: 72 pairs; more experts: 48 pairs; more parameters: 54 pairs" in shape.aggregation


def test_a_pair_that_does_not_improve_has_no_shape() -> None:
    rows = buckets("Baseline", [10.0] * 4) + buckets("SMELT", [10.0, 10.0, 11.0, 11.0])
    with pytest.raises(InputError, match=r"SMELT s 85% over Baseline s 85%.*improves the loss by -0.5 nats"):
        length_contrasts(table_of(rows, "t"), "SMELT", "Baseline")


def test_the_axes_of_a_pair_are_unweighted_means_over_tasks() -> None:
    table = full_table()
    found = radar(table, "SMELT", "Baseline", "1.6B", "97%")
    assert found.labels["category"] == [category for _, category in TASKS.values()]
    assert found.labels["arch"] == ["Baseline", "SMELT"]
    assert "at 2.156e+11 tokens, 3 tasks" in found.aggregation
    both = [{**r, "category": "one"} for r in full_rows(1) if r.get("task")]
    one = radar(table_of(both, "t", ("arch",)), "SMELT", "Baseline", "1.6B", "97%")
    np.testing.assert_allclose(one.values[:, 0], found.values.mean(1))


def test_what_a_pair_lacks_is_said() -> None:
    table = full_table()
    with pytest.raises(InputError, match=r"1\.6B 90% has no scores of both"):
        radar(table, "SMELT", "Baseline", "1.6B", "90%")
    gone = table.where(~((table["task"] == "copa") & (table["arch"] == "SMELT")))
    with pytest.raises(InputError, match="only one of the two has copa"):
        radar(gone, "SMELT", "Baseline", "1.6B", "97%")
