"""Several models of one kind: the interval over models isn't the one over documents."""

from __future__ import annotations

import math

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.probe.measures.estimate import mean_of
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.seeds import over_models

MEASURE = Measure("x", "X", (), "nats", "", "ours")


def model(value: float, seed: int = 0, documents: int = 20) -> StatArray:
    total = value + np.random.default_rng(seed).normal(0, 0.1, documents)
    return mean_of(MEASURE, (total, np.ones(documents)), {}, groups="the text", documents=documents)


def test_the_interval_over_models_is_students_over_their_values() -> None:
    stats = [model(value) for value in (1.0, 2.0, 4.5)]
    found = over_models(stats)
    values = np.array([float(stat.values) for stat in stats])
    half = 4.302653 * values.std(ddof=1) / math.sqrt(3)  # t of 2 degrees
    low, high = found.interval()
    assert float(found.mean.values) == pytest.approx(values.mean())
    assert [float(low), float(high)] == pytest.approx([values.mean() - half, values.mean() + half], rel=1e-5)
    assert found.to_dict()["over_models"]["models"] == 3 and "over models" in repr(found)


def test_the_interval_over_documents_is_for_these_models_and_paired() -> None:
    """Three models that the same documents move alike: the interval over documents is that of one of them."""
    stats = [model(value) for value in (1.0, 2.0, 4.5)]
    width = np.subtract(*over_models(stats).mean.interval()[::-1])
    assert float(width) == pytest.approx(float(np.subtract(*stats[0].interval()[::-1])), rel=1e-9)
    low, high = over_models(stats).interval()
    assert float(high - low) > 20 * float(width)


def test_two_models_have_no_interval_over_models_and_unlike_ones_are_refused() -> None:
    assert np.isnan(over_models([model(1), model(2)]).interval()).all()
    with pytest.raises(InputError, match="two models or more"):
        over_models([model(1)])
    other = StatArray(Measure("x", "X", ("layer",), "nats", "", "ours"), np.zeros(2), {"layer": [0, 1]})
    with pytest.raises(InputError, match="alike in axes"):
        over_models([model(1), other])
