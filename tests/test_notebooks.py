"""Every notebook runs from a clean kernel without a network; what is committed was executed and is small."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 500_000
OFFLINE = """
import socket
def _refuse(*_, **__):
    raise OSError("a notebook must not need a network")
socket.create_connection = socket.getaddrinfo = _refuse
"""


def test_there_are_notebooks() -> None:
    wanted = {"first-look", "who-earns-the-loss", "dyck-head", "write-a-statistic"}
    wanted |= {"hops", "record-your-own-model", "any-hugging-face-model", "from-transformer-lens-and-nnsight"}
    assert wanted | {"reproduce-section-6"} <= {n.stem for n in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_was_executed_and_is_small(path: Path) -> None:
    book = nbformat.read(path, 4)
    assert path.stat().st_size < MOST_BYTES
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code and [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    assert any(cell.outputs for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_a_clean_kernel_without_a_network(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for busy cores made one take minutes
    book = nbformat.read(path, 4)
    book.cells.insert(0, nbformat.v4.new_code_cell(OFFLINE))
    options = {"kernel_name": "python3", "timeout": 600, "startup_timeout": 600}
    NotebookClient(book, resources={"metadata": {"path": str(FOLDER)}}, **options).execute()
