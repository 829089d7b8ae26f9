"""The examples in docstrings of public names run, as pytest's doctest runs them, on the bundled model."""

from __future__ import annotations

import doctest
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

import visitlens as vl
from visitlens import plugins
from visitlens.probe.model.bundled import PAIR

WITHOUT = {
    "from_nnsight": "needs nnsight and a model of its own",
    "from_transformer_lens": "needs a TransformerLens bridge, which is made from a downloaded model",
}
"""Public name -> why its docstring has no example that runs here."""
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where examples run: `run.vlens` is a small recording of the bundled looped model, `text.jsonl` a text."""
    place = tmp_path_factory.mktemp("examples")
    sentence = "The second visit of a looped layer reads what the first one wrote. "
    texts = [json.dumps({"text": f"{number}. {sentence * 4}"}) for number in range(10)]
    (place / "text.jsonl").write_text("\n".join(texts))
    vl.record(PAIR["looped"], place / "text.jsonl", place / "run.vlens", max_tokens=512)
    return place


@pytest.fixture
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    before = set(folder.iterdir())
    yield folder
    for made in set(folder.iterdir()) - before:
        shutil.rmtree(made)
    plugins._registered.clear()
    plugins._forget()


def example_of(name: str) -> doctest.DocTest:
    thing: Any = getattr(vl, name)
    globals_ = {"vl": vl, "torch": torch, "go": go, "__name__": "examples"}
    return doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", globals_, name, thing.__name__, 0)


@pytest.mark.parametrize("name", [name for name in vl._EXPORTS if name not in WITHOUT])
def test_the_example_of_a_public_name_runs(name: str, there: Path) -> None:
    example = example_of(name)
    assert example.examples, f"vl.{name} has no example in its docstring"
    said: list[str] = []
    failed = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=said.append).failed
    assert not failed, "".join(said)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_name_without_an_example_has_none(name: str) -> None:
    assert not example_of(name).examples, f"vl.{name} has an example: take it out of WITHOUT"


@pytest.mark.parametrize("name", vl._EXPORTS)
def test_the_first_line_of_a_public_name_stands_alone(name: str) -> None:
    thing = getattr(vl, name)
    first = (inspect.getdoc(thing) or "").partition("\n")[0]
    assert len(first.split()) >= 3 or isinstance(thing, ModuleType), f"vl.{name}: {first!r}"
    assert first[:1].isupper() or first.startswith(("`", name)), f"vl.{name}: {first!r}"
