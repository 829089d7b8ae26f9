"""Figures: the gallery of the paper's figures and whatever else is registered, for this run and its partner."""

from __future__ import annotations

from typing import Any

from visitlens.app.panels.paper_figures import gallery
from visitlens.app.view.view import View

PATH, TITLE, ORDER = "/figures", "Figures", 43
NEEDS = ("recording",)
CONTROLS = ("other",)


def layout(view: View) -> list[Any]:
    return gallery(view)
