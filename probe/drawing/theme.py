"""Colours, markers and dashes of every figure, and the escaping of text that Plotly would take for markup."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from visitlens.errors import InputError

ORANGE = "#E69F00"
SEQUENTIAL, DIVERGING = "Viridis", "RdBu_r"
FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"

# Visits 1 and 2 are alike in lightness, so marker and dash differ too. The two cycles have different lengths: colour and
# marker together repeat only after 42 visits.
_SYMBOLS = ("square-open", "diamond", "triangle-up", "x", "star", "hexagon-open", "cross")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True)
class Style:
    """How one series of points looks."""

    colour: str
    symbol: str
    dash: str


@dataclass(frozen=True)
class Theme:
    """The paper draws the Baseline blue like visit 1: only the themes `paper` and `paper-dark` follow it in that.

    `profile`: the looped model's one colour in sink profiles (None: each visit keeps its own)."""

    name: str
    background: str
    ink: str
    muted: str
    grid: str
    visits: tuple[str, ...]
    baseline_colour: str
    same_head: str
    chance: str
    profile: str | None = None

    def visit(self, number: int) -> Style:
        """Style of a visit, 1-based."""
        at = number - 1
        return Style(self.visits[at % len(self.visits)], _SYMBOLS[at % len(_SYMBOLS)], _DASHES[at % len(_DASHES)])

    def part(self, number: int) -> Style:
        """Style of a series that is no visit (one of several quantities or runs), 1-based: none looks like visit 1 or 2."""
        at = number - 1
        colour = (self.visits[4], self.visits[3], self.visits[5], self.ink, self.visits[2], self.muted)[at % 6]
        symbol = ("circle", "triangle-up", "x", "star", "hexagon-open", "cross")[at % 6]
        return Style(colour, symbol, _DASHES[at % len(_DASHES)])

    def profile_visit(self, number: int) -> Style:
        """Style of a visit among the looped model's steps in a profile over depth."""
        style = self.visit(number)
        return Style(self.profile or style.colour, style.symbol, style.dash)

    def paler(self, colour: str) -> str:
        """A colour for areas, on which points and bars still show: mixed with the background, so that nothing shines through."""
        pairs = zip(*(bytes.fromhex(hex_[1:]) for hex_ in (colour, self.background)), strict=True)
        return "#" + "".join(f"{round(0.6 * a + 0.4 * b):02x}" for a, b in pairs)

    @property
    def scheme(self) -> str:
        """What kind of page it fits: light or dark."""
        return "dark" if self.name.endswith("dark") else "light"

    @property
    def by_scheme(self) -> dict[str, Theme]:
        """The same colours for a light and for a dark page."""
        themes = (PAPER, PAPER_DARK) if self.name.startswith("paper") else (LIGHT, DARK)
        return {theme.scheme: theme for theme in themes}

    @property
    def baseline(self) -> Style:
        return Style(self.baseline_colour, "circle", "dot")

    def template(self) -> go.layout.Template:
        """Plotly's defaults for this theme; small, because every written figure carries it."""
        axis = {
            "gridcolor": self.grid,
            "linecolor": self.muted,
            "showline": True,
            "ticks": "outside",
            "tickcolor": self.muted,
            "zeroline": False,
            "title": {"standoff": 12, "font": {"size": 13}},
            "automargin": True,
        }
        return go.layout.Template(
            layout={
                "font": {"family": FONT, "size": 13, "color": self.ink},
                "paper_bgcolor": self.background,
                "plot_bgcolor": self.background,
                "xaxis": axis,
                "yaxis": axis,
                "hoverlabel": {"font": {"family": FONT}},
                "legend": {"bgcolor": "rgba(0,0,0,0)"},
            }
        )


_LIGHT_VISITS = ("#2166AC", "#B2182B", "#1B7837", "#8C510A", "#01665E", "#C51B7D")
_DARK_VISITS = ("#67A9CF", "#EF8A62", "#7FBF7B", "#D8B365", "#5AB4AC", "#F1B6DA")

LIGHT = Theme("light", "#FFFFFF", "#1F2933", "#5B6770", "#E4E7EB", _LIGHT_VISITS, "#6B7280", "#2166AC", "#7B3294")
DARK = Theme("dark", "#14181D", "#E6E9ED", "#9AA5B1", "#2A313A", _DARK_VISITS, "#9CA3AF", "#67A9CF", "#C2A5CF")
PAPER = Theme(
    "paper",
    "#FFFFFF",
    "#1F2933",
    "#5B6770",
    "#E4E7EB",
    _LIGHT_VISITS,
    "#2166AC",
    "#2166AC",
    "#7B3294",
    profile="#B2182B",
)
PAPER_DARK = replace(DARK, name="paper-dark", baseline_colour="#67A9CF", profile="#EF8A62")
THEMES = {theme.name: theme for theme in (LIGHT, DARK, PAPER, PAPER_DARK)}


def find_theme(name: str) -> Theme:
    """Raises InputError: no theme of that name."""
    if name not in THEMES:
        raise InputError(f"expected a theme among {', '.join(THEMES)}, got {name!r}")
    return THEMES[name]


def escape(text: object) -> str:
    """Plotly reads labels as pseudo-HTML: `<b>`, `<br>` and `&lt;` would change or vanish."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def token_text(text: str) -> str:
    """A token as a label: escaped, with space and newline visible; right-to-left text apart, so that it turns nothing beside it."""
    shown = escape(text).replace(" ", "␣").replace("\n", "↵")
    return isolated(shown)


def isolated(text: str) -> str:
    """Right-to-left text between Unicode's isolates (U+2068, U+2069): numbers and signs beside it keep their places."""
    turned = any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text)
    return f"\u2068{text}\u2069" if turned else text
