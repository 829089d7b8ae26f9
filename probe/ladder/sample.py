"""Draws the bundled held-out sample from a corpus's validation files.

    python -m visitlens.probe.ladder.sample --corpus corpus/ --tokenizer tokenizer.json --out heldout.jsonl.xz

From each category, documents in file order (a hash order, so any prefix is a fair draw) until it has its share of tokens;
documents longer than `--longest` are passed over, so that no single one dominates its category. All are then put in
the order of their SHA-256, so that a prefix of the sample holds every category.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Annotated

import typer

from visitlens.errors import InputError
from visitlens.hooks.models.checkpoint import load_tokenizer


def main(
    corpus: Annotated[Path, typer.Option(help="folder with CATEGORY.validation.jsonl.xz")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, to count tokens")],
    out: Annotated[Path, typer.Option(help="the sample, .jsonl.xz")],
    tokens: Annotated[int, typer.Option(help="tokens per category")] = 12_000,
    longest: Annotated[int, typer.Option(help="tokens of the longest document taken")] = 3000,
) -> None:
    """Writes the sample and prints what it holds."""
    files = sorted(corpus.glob("*.validation.jsonl.xz"))
    if not files:
        raise InputError(f"{corpus}: no CATEGORY.validation.jsonl.xz there")
    tok = load_tokenizer(tokenizer)
    lines = []
    for file in files:
        taken, documents = 0, 0
        with lzma.open(file, "rt", encoding="utf-8") as source:
            for line in source:
                length = len(tok.encode(json.loads(line)["text"]).ids)
                if taken >= tokens:
                    break
                if length <= longest:
                    lines.append(line)
                    taken, documents = taken + length, documents + 1
        typer.echo(f"{file.name}: {documents} documents, {taken:,} tokens")
    lines.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
    with lzma.open(out, "wt", encoding="utf-8", preset=9) as target:
        target.writelines(lines)


if __name__ == "__main__":
    typer.run(main)
