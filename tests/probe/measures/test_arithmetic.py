"""`-` and `/` of StatArrays: by hand, with the interval of the result; axes and labels must agree."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray

SINK = Measure("sink_mass", "Attention on the segment start", ("layer",), "share of mass", "P[i, start].", "6.4")
FIRST = Measure("first4_mass", "Attention on the first four", ("layer",), "share of mass", "Sum of P.", "ours")


def stat(measure: Measure, values: list[float], replicates: list[list[float]], layers: tuple[int, ...] = (2, 3)):
    counts = np.array([40.0, 60.0])
    return StatArray(measure, np.array(values), {"layer": layers}, np.array(replicates), 3, 100, counts=counts)


A = stat(SINK, [0.5, 0.8], [[0.4, 0.9], [0.6, 0.7], [0.5, 0.8]])
B = stat(FIRST, [0.25, 0.4], [[0.2, 0.5], [0.3, 0.3], [0.25, 0.4]])


def test_a_difference_is_paired_and_keeps_the_unit() -> None:
    difference = A - B
    np.testing.assert_allclose(difference.values, [0.25, 0.4])
    np.testing.assert_allclose(difference.replicates, [[0.2, 0.4], [0.3, 0.4], [0.25, 0.4]])
    assert difference.measure.unit == "share of mass" and difference.measure.name == "sink_mass_minus_first4_mass"
    assert difference.measure.title == "Attention on the segment start minus Attention on the first four"
    assert difference.measure.definition == "(P[i, start].) minus (Sum of P.)"
    assert difference.labels == {"layer": (2, 3)} and list(difference.counts) == [40, 60]


def test_a_ratio_has_no_unit_but_ratio() -> None:
    ratio = A / B
    np.testing.assert_allclose(ratio.values, [2, 2])
    np.testing.assert_allclose(ratio.replicates, [[2, 1.8], [2, 7 / 3], [2, 2]])
    assert ratio.measure.unit == "ratio" and ratio.measure.name == "sink_mass_over_first4_mass"


def test_an_array_less_itself_has_no_width() -> None:
    assert not np.any((A - A).replicates) and (A - A).measure.name == "sink_mass"


def test_a_number_keeps_the_unit_and_every_replicate() -> None:
    half = A / 2
    np.testing.assert_allclose(half.values, [0.25, 0.4])
    np.testing.assert_allclose(half.replicates, A.replicates / 2)
    assert half.measure.unit == "share of mass" and half.measure.title == "Attention on the segment start over 2"
    np.testing.assert_allclose((A - 0.5).values, [0, 0.3], atol=1e-15)


def test_other_labels_axes_and_things_are_refused() -> None:
    with pytest.raises(InputError, match=r"other labels along layer: \[2, 3\] and \[2, 4\]; choose the same by `sel`"):
        _ = A - stat(FIRST, [0.1, 0.2], [[0.1, 0.2]] * 3, layers=(2, 4))
    with pytest.raises(InputError, match=r"sink_mass has axes \('layer',\), first4_mass has \(\)"):
        _ = A / B.mean("layer")
    with pytest.raises(TypeError):
        _ = A - "b"  # type: ignore[operator]
