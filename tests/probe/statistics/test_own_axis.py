"""A statistic with an axis of its own is one file: its labels are recorded and read, and the writer knows its length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import visitlens as vl
from visitlens import plugins
from visitlens.errors import InputError
from visitlens.probe.measures.axes import AXES, Axis, labels_of
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Statistic, TokenValues


class Halves(Statistic):
    """Sizes of the two halves of the attention write."""

    axes: ClassVar = {"half": Axis(lambda plan, config: ("lower", "upper"))}
    measures = (Measure("half_size", "Size of each half", ("step", "half"), "norm", "|d|.", "ours", symmetric=False),)
    sites = frozenset({"attn_write"})

    def per_token(self, values: Any, geometry: Any) -> dict[str, TokenValues]:
        writes = [values.site("attn_write", s.index) for s in geometry.plan.steps]
        halves = [torch.stack([part.norm(dim=-1) for part in write.chunk(2, -1)], -1) for write in writes]
        return {"half_size": TokenValues(torch.stack(halves, dim=1))}


@pytest.fixture
def registered() -> Iterator[None]:
    vl.register(Halves)
    yield
    plugins._registered.clear()
    plugins._forget()


@pytest.mark.usefixtures("registered")
def test_its_labels_are_kept_in_the_recording(make_model, make_text, make_recording, tmp_path) -> None:
    rec = make_recording(make_model(2), make_text(), tmp_path / "r.vlens", measures=["half_size"])
    stat = vl.open(rec.recording.path).stat("half_size")
    assert stat.labels["half"] == ["lower", "upper"] and stat.values.shape == (6, 2)
    assert not stat.measure.symmetric and stat.measure.package == "tests"
    assert stat.sel(half="lower").values.min() > 0


@pytest.mark.usefixtures("registered")
def test_a_common_axis_or_one_that_nobody_knows_is_refused() -> None:
    for axes, said in (({"head": AXES["head"]}, "the axis head is a common one"), ({}, "has no axis half")):
        wrong = type("Wrong", (Halves,), {"axes": axes, "measures": (Measure("w", "W", ("half",), "", "", ""),)})
        with pytest.raises(InputError, match=said):
            vl.register(wrong)


def test_an_axis_that_neither_recording_nor_version_knows_is_numbered(looped_recording) -> None:
    plan, config = looped_recording.plan, looped_recording.recording.config
    assert labels_of("corner", plan, config, 3) == [0, 1, 2]
    assert labels_of("stage", plan, config, 6) == ["X", "Q", "K", "V", "PV", "O"]
    assert labels_of("stage", plan, config, 7) == list(range(7)), "of a later version"
