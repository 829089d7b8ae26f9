"""StatArray: named axes, intervals that stay right through arithmetic, errors that name what exists."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from tests.support.jackknife import T_99, replicates_within

from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray, json_numbers

MEASURE = Measure("mass", "Attention mass", ("layer", "head"), "share", "Sum of P.", "ours")


def stat(seed: int = 0, layers: tuple[int, ...] = (1, 2, 5), heads: int = 2, replicates: int = 400) -> StatArray:
    rng = np.random.default_rng(seed)
    values = rng.random((len(layers), heads))
    return StatArray(
        measure=MEASURE,
        values=values,
        replicates=values + 0.1 / np.sqrt(replicates) * rng.normal(size=(replicates, *values.shape))
        if replicates
        else None,
        labels={"layer": list(layers), "head": list(range(heads))},
        documents=12,
        tokens=3456,
        provenance={"recording": "abc"},
    )


# Selecting and averaging


def test_a_label_selects_and_drops_its_axis() -> None:
    whole = stat()
    one = whole.sel(layer=5)
    assert one.axes == ("head",) and list(one.labels) == ["head"]
    np.testing.assert_array_equal(one.values, whole.values[2])
    np.testing.assert_array_equal(one.replicates, whole.replicates[:, 2])
    cell = whole.sel(layer=2, head=1)
    assert cell.axes == () and cell.values.shape == () and cell.values == whole.values[1, 1]


def test_a_list_or_a_function_selects_and_keeps_its_axis() -> None:
    whole = stat()
    for chosen in ([1, 5], lambda layer: layer != 2):
        kept = whole.sel(layer=chosen)
        assert kept.axes == MEASURE.axes and kept.labels["layer"] == [1, 5]
        np.testing.assert_array_equal(kept.values, whole.values[[0, 2]])
        np.testing.assert_array_equal(kept.replicates, whole.replicates[:, [0, 2]])


@pytest.mark.parametrize("layer", [3, [1, 3], [9]])
def test_an_unknown_label_is_refused_with_those_there_are(layer: object) -> None:
    with pytest.raises(InputError, match=r"mass has no layer (3|\[1, 3\]|\[9\]); it has \[1, 2, 5\]"):
        stat().sel(layer=layer)


def test_an_unknown_axis_is_refused_with_those_there_are() -> None:
    for call in (lambda: stat().sel(step=1), lambda: stat().mean("step")):
        with pytest.raises(InputError, match=r"mass has no axis 'step'; it has \('layer', 'head'\)"):
            call()


def test_a_mean_is_uniform_over_one_axis_in_values_and_replicates() -> None:
    whole = stat()
    for axis, at in (("layer", 0), ("head", 1)):
        mean = whole.mean(axis)
        np.testing.assert_allclose(mean.values, whole.values.mean(at))
        np.testing.assert_allclose(mean.replicates, whole.replicates.mean(at + 1))
        assert mean.aggregation == f"mean over tokens, mean over {axis}s" and axis not in mean.labels
    both = whole.mean("head").mean("layer")
    assert both.axes == () and both.values == pytest.approx(whole.values.mean())


def test_a_mean_leaves_out_what_was_never_measured() -> None:
    whole = stat()
    values, replicates = whole.values.copy(), whole.replicates.copy()
    values[1], replicates[:, 1] = np.nan, np.nan
    mean = replace(whole, values=values, replicates=replicates).mean("layer")
    np.testing.assert_allclose(mean.values, values[[0, 2]].mean(0))
    nothing = replace(whole, values=np.full((3, 2), np.nan), replicates=None).mean("layer")
    assert np.isnan(nothing.values).all()


# Intervals


def test_bounds_are_those_of_the_replicates_and_inside_what_the_values_can_be() -> None:
    values = np.array([[0.9]])
    array = replace(stat(layers=(1,), heads=1), values=values, replicates=replicates_within(values, 0.3))
    np.testing.assert_allclose(array.interval(), [[[0.6]], [[1.2]]])
    _, high = array.interval(0.5)
    np.testing.assert_allclose(high - 0.9, 0.3 * 0.67701 / T_99, rtol=1e-4)  # 75 % of Student's t with 99 degrees
    shares = replace(array, span=(0.0, 1.0))
    np.testing.assert_allclose(shares.interval(), [[[0.6]], [[1.0]]])
    assert shares.combine(1.0, np.subtract, MEASURE).span == (-np.inf, np.inf)  # a change may be negative


def test_the_fewest_documents_behind_a_value_stay_with_it() -> None:
    array = replace(stat(), support=np.stack([np.arange(10.0, 16).reshape(3, 2)] * 2))
    array.support[:, 1, 0] = 0  # never measured: left out of a mean
    assert array.mean("layer").support.tolist() == [[10.0, 11.0]] * 2
    assert array.sel(layer=5).mean("head").support.tolist() == [14.0, 14.0]
    few = replace(stat(), support=np.full((2, 3, 2), 7.0))
    both = array.combine(few, np.subtract, MEASURE)
    assert np.isnan(both.interval()).all() and both.no_interval == "too few documents: 7; an interval takes 8"


def test_arrays_stacked_are_what_they_were() -> None:
    a = stat()
    again = StatArray.stacked([a.sel(layer=layer) for layer in (1, 2, 5)], "layer", [1, 2, 5])
    np.testing.assert_array_equal(again.values, a.values)
    np.testing.assert_array_equal(again.replicates, a.replicates)
    assert again.labels == a.labels and again.axes == a.axes


def test_without_replicates_the_interval_is_nan() -> None:
    for array in (stat(replicates=0), replace(stat(), replicates=np.empty((0, 3, 2)))):
        low, high = array.interval()
        assert low.shape == high.shape == (3, 2) and np.isnan(low).all() and np.isnan(high).all()


def test_replicates_stay_paired_so_that_a_minus_a_has_no_width() -> None:
    a = stat()
    for difference in (a.combine(a, np.subtract, MEASURE), a.combine(stat(), np.subtract, MEASURE)):
        assert not difference.values.any() and not difference.replicates.any()
        low, high = difference.interval()
        assert not low.any() and not high.any()
    ratio = a.combine(a, np.divide, MEASURE).mean("layer").mean("head")
    assert [float(x) for x in ratio.interval()] == [1.0, 1.0]
    unpaired = a.combine(stat(seed=1), np.subtract, MEASURE).interval()
    assert (unpaired[1] - unpaired[0] > 0.1).all()


def test_a_mean_over_cells_is_narrower_than_its_cells() -> None:
    """Replicates of independent cells: 1 / sqrt(6) as wide."""
    a = stat(replicates=4000)
    widths = np.subtract(*a.interval()[::-1])
    low, high = a.mean("head").mean("layer").interval()
    assert float(high - low) == pytest.approx(widths.mean() / np.sqrt(6), rel=0.1)


def test_arithmetic_with_a_number_keeps_the_interval() -> None:
    a = stat()
    half = a.combine(2, np.divide, replace(MEASURE, name="half"))
    np.testing.assert_allclose(half.replicates, a.replicates / 2)
    np.testing.assert_allclose(half.interval(), np.array(a.interval()) / 2)
    assert half.measure.name == "half" and half.documents == 12 and half.provenance == a.provenance


def test_an_operand_without_replicates_leaves_none() -> None:
    assert stat().combine(stat(replicates=0), np.add, MEASURE).replicates is None
    assert stat(replicates=0).combine(stat(), np.add, MEASURE).replicates is None
    assert stat(replicates=0).combine(3.0, np.add, MEASURE).replicates is None


def test_operands_of_different_shape_are_refused() -> None:
    with pytest.raises(InputError, match=r"mass \(3, 2\) and mass \(2, 2\) differ in shape"):
        stat().combine(stat(layers=(1, 2)), np.subtract, MEASURE)


def test_values_that_do_not_fit_the_labels_are_refused() -> None:
    with pytest.raises(InputError, match=r"mass: axes \('layer', 'head'\) want shape \(3, 2\), got \(2, 3\)"):
        replace(stat(), values=np.zeros((2, 3)))


# Tables and JSON


def test_a_frame_has_one_row_an_element() -> None:
    whole = stat()
    frame = whole.to_frame()
    assert frame.index.names == ["layer", "head"] and list(frame.columns) == ["value", "low", "high"]
    assert len(frame) == 6
    low, high = whole.interval()
    assert frame.loc[("5", "1")].tolist() == [whole.values[2, 1], low[2, 1], high[2, 1]]
    assert (frame["low"] <= frame["high"]).all()
    scalar = whole.sel(layer=1, head=0).to_frame()
    assert isinstance(scalar, pd.DataFrame) and scalar["value"].tolist() == [whole.values[0, 0]]


def test_a_dictionary_is_plain_json_whatever_the_numbers() -> None:
    values = np.array([[np.nan, 1.0], [np.inf, -np.inf], [0.5, 2.0]])
    array = replace(stat(replicates=0), values=values)
    data = json.loads(json.dumps(array.to_dict(), allow_nan=False))
    assert data["values"] == [[None, 1.0], [None, None], [0.5, 2.0]]
    assert data["low"] == [[None, None]] * 3
    assert data["labels"] == {"layer": ["1", "2", "5"], "head": ["0", "1"]}
    assert data["measure"] == {
        "name": "mass",
        "title": "Attention mass",
        "axes": "layer,head",
        "unit": "share",
        "definition": "Sum of P.",
        "paper": "ours",
    }
    assert (data["documents"], data["tokens"], data["provenance"]) == (12, 3456, {"recording": "abc"})
    assert json_numbers(np.array(3.5)) == 3.5


def test_a_measure_survives_its_attributes() -> None:
    scalar = replace(MEASURE, axes=(), grouped=False)
    for measure in (MEASURE, scalar):
        assert Measure.from_attributes(measure.name, measure.to_attributes(), measure.grouped) == measure


def test_the_text_form_says_what_it_is_and_its_interval() -> None:
    whole = stat()
    assert "Attention mass [share], mean over tokens, n = 12 documents, 3,456 tokens" in repr(whole)
    assert "3 layer x 2 head" in repr(whole)
    line = repr(whole.sel(head=0)).splitlines()
    low, high = whole.sel(head=0).interval()
    assert line[1].strip() == f"1: {whole.values[0, 0]:.4f}  [{low[0]:.4f}, {high[0]:.4f}]"
    assert f"{whole.values[0, 1]:.4f}" in repr(whole.sel(layer=1, head=1))


def test_renaming_changes_the_measure_only() -> None:
    renamed = stat().rename(title="Mass", unit="percent")
    assert (renamed.measure.title, renamed.measure.unit, renamed.measure.name) == ("Mass", "percent", "mass")
    np.testing.assert_array_equal(renamed.values, stat().values)
