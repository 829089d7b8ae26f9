"""Builds a training corpus of real English text and code from Debian, PyPI and npm packages, with the ordinary clients.

    python -m visitlens.probe.ladder.build_corpus --out corpus

`corpus_sources.json` lists the packages: five categories (code, math and STEM, knowledge, finance, web), permissive or
public-domain licences only. Packages are downloaded and unpacked, never installed. It's the same kind of text as the bundled
models were trained on, from most of the same packages, but not byte for byte the same corpus: that one also parsed special formats.

Writes `CATEGORY.train.jsonl.xz` and `CATEGORY.validation.jsonl.xz` (what `visitlens ladder train --corpus` takes), lines
in hash order, and each package's licence notices to `licences/`. A document is a file; it's kept whole, so no part of
one is in both splits, and dropped where it is short, not text, or an exact copy of another.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import typer

from visitlens.errors import InputError, UnavailableError

SOURCES = Path(__file__).with_name("corpus_sources.json")
SHORTEST, LONGEST = 200, 100_000  # characters; longer files are cut at a blank line
SOURCE_BYTES = 2_000_000  # at most, so that no source is its category
VALIDATION = 0.06
_GENERATED = re.compile(r"do not edit|@generated|code generated|automatically generated", re.IGNORECASE)
_NOTICE = re.compile(r"\s*(#!.*\n)?\s*(/\*.*?\*/|(?:[ \t]*(?:#|//|%|--|;)[^\n]*\n)+)", re.DOTALL)
_EMAIL = re.compile(r"[\w.+-]+@(?!example\.)[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")


@dataclass(frozen=True)
class Source:
    """Files of some packages: those whose path matches `pattern` and not `exclude`, read as `kind`."""

    name: str
    category: str
    licence: str
    packages: list[str]
    kind: str
    pattern: str
    exclude: str

    def texts(self, cache: Path) -> Iterator[str]:
        """Cleaned documents, in hash order of their paths: a prefix is a fair sample."""
        wanted, unwanted = re.compile(self.pattern), re.compile(self.exclude or r"(?!)", re.IGNORECASE)
        files = [
            (str(file.relative_to(cache)), file)
            for package in self.packages
            for file in folder_of(package, cache).rglob("*")
            if file.is_file() and not file.is_symlink()
        ]
        files = [(path, file) for path, file in files if wanted.search(path) and not unwanted.search(path)]
        for _, file in sorted(files, key=lambda item: hashlib.sha256(item[0].encode()).digest()):
            for text in read(file, self.kind):
                text = _EMAIL.sub("name@example.org", text).strip()
                if is_text(text):
                    yield shortened(text)


def read(file: Path, kind: str) -> Iterator[str]:
    """The documents of a file: one, but for JSON (each object's `text`) and dictionaries (each entry)."""
    data = file.read_bytes()
    text = (gzip.decompress(data) if file.suffix in (".gz", ".dz") else data).decode("utf-8", errors="ignore")
    if kind == "html":
        yield html_text(text)
    elif kind == "json":
        rows = json.loads(text)
        yield from (row["text"] for row in (rows if isinstance(rows, list) else [rows]) if "text" in row)
    elif kind == "code":
        notice = _NOTICE.match(text)
        has_notice = notice is not None and re.search("copyright|licen[sc]e", notice.group(0), re.IGNORECASE)
        if not _GENERATED.search(text[:1500]):
            yield text[notice.end() :] if notice is not None and has_notice else text
    elif file.suffix == ".dz":
        yield from re.split(r"\n(?=\S)", text)
    else:
        yield text


def is_text(text: str) -> bool:
    """Long enough, mostly letters and spaces, lines that a person could have written."""
    if len(text) < SHORTEST:
        return False
    lines = text.split("\n")
    letters = sum(c.isalpha() or c.isspace() for c in text)
    return letters > 0.6 * len(text) and max(map(len, lines)) < 5000


def shortened(text: str) -> str:
    """Cut at the last blank line within the longest length, if there is one."""
    if len(text) <= LONGEST:
        return text
    blank = text.rfind("\n\n", 0, LONGEST)
    return text[: blank if blank > 0 else LONGEST]


class _Text(HTMLParser):
    SKIPPED = frozenset(
        ["script", "style", "head", "nav", "footer", "header", "form", "button", "svg", "noscript", "select"]
    )
    BLOCKS = frozenset(
        [
            "p",
            "div",
            "section",
            "article",
            "li",
            "dl",
            "dt",
            "dd",
            "table",
            "tr",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "pre",
            "blockquote",
            "br",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipped = self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self._skipped += tag in self.SKIPPED
        self._preformatted += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(self._skipped - (tag in self.SKIPPED), 0)
        self._preformatted = max(self._preformatted - (tag == "pre"), 0)
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))


def html_text(source: str) -> str:
    """The readable part of a page: its main element where it has one, without navigation; blocks on lines of their own."""
    main = re.search(r"<main\b.*?</main>|<div[^>]*role=[\"']main[\"'].*", source, re.DOTALL)
    parser = _Text()
    parser.feed(main.group(0) if main else source)
    lines = (line.rstrip() for line in "".join(parser.parts).replace("¶", "").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def folder_of(package: str, cache: Path) -> Path:
    """Where a package is unpacked."""
    return cache / re.sub(r"[^A-Za-z0-9.+-]+", "-", package)


def fetch(package: str, cache: Path) -> None:
    """Downloads and unpacks `apt:NAME`, `pypi:NAME==VERSION` or `npm:NAME@VERSION`; a package already there is kept.

    Raises:
        UnavailableError: the client isn't installed, or it failed.
    """
    folder = folder_of(package, cache)
    if folder.is_dir():
        return
    manager, _, name = package.partition(":")
    download = cache / "download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    commands = {
        "apt": ["apt-get", "download", name],
        "pypi": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", name],
        "npm": ["npm", "pack", "--silent", "--ignore-scripts", name],
    }
    try:
        subprocess.run(commands[manager], cwd=download, check=True, stdout=subprocess.DEVNULL)
        (archive,) = download.iterdir()
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        if archive.suffix == ".deb":
            subprocess.run(["dpkg", "-x", str(archive), str(partial)], check=True)
        elif archive.suffix in (".whl", ".zip"):
            zipfile.ZipFile(archive).extractall(partial)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
        partial.rename(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError(
            f"{package} could not be fetched ({error}); apt packages need Debian 12, npm ones Node"
        ) from error


def build(sources: list[Source], cache: Path, out: Path) -> dict[str, dict[str, int]]:
    """Writes the corpus from unpacked packages; documents by source and split.

    Raises:
        InputError: a source without a document.
    """
    seen: set[bytes] = set()
    lines: dict[tuple[str, str], list[tuple[bytes, str]]] = defaultdict(list)
    counts: dict[str, dict[str, int]] = {}
    for source in sources:
        counts[source.name], size = {"train": 0, "validation": 0}, 0
        for text in source.texts(cache):
            key = hashlib.sha256(" ".join(text.split()).encode()).digest()
            if key in seen:
                continue
            seen.add(key)
            split = "validation" if int.from_bytes(key[:4], "big") < VALIDATION * 2**32 else "train"
            row = {
                "id": key.hex()[:16],
                "text": text,
                "source": source.name,
                "category": source.category,
                "licence": source.licence,
            }
            lines[source.category, split].append((key, json.dumps(row, ensure_ascii=False)))
            counts[source.name][split] += 1
            size += len(text.encode())
            if size > SOURCE_BYTES:
                break
        if not any(counts[source.name].values()):
            raise InputError(
                f"{source.name}: no document in {', '.join(source.packages)}; did the package's layout change?"
            )
    out.mkdir(parents=True, exist_ok=True)
    for (category, split), rows in lines.items():
        with lzma.open(out / f"{category}.{split}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(line + "\n" for _, line in sorted(rows))
    for package in {p for source in sources for p in source.packages}:
        notices = [
            f
            for f in folder_of(package, cache).rglob("*")
            if f.is_file() and re.match(r"(copyright|licen[sc]e|notice)", f.name, re.IGNORECASE)
        ]
        if notices:
            (out / "licences").mkdir(exist_ok=True)
            shutil.copyfile(
                min(notices, key=lambda f: (len(f.parts), str(f))),
                out / "licences" / f"{folder_of(package, cache).name}.txt",
            )
    return counts


def main(
    out: Annotated[Path, typer.Option(help="folder for the corpus")],
    cache: Annotated[Path, typer.Option(help="packages as downloaded and unpacked, several GB")] = Path("corpus-cache"),
    only: Annotated[str, typer.Option(help="names of sources, comma-separated; all by default")] = "",
) -> None:
    """Downloads the packages that aren't there yet and writes the corpus."""
    sources = [Source(**row) for row in json.loads(SOURCES.read_text(encoding="utf-8"))]
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := set(names) - {s.name for s in sources}:
        raise InputError(f"no source {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in sources)}")
    sources = [s for s in sources if not names or s.name in names]
    for source in sources:
        for package in source.packages:
            typer.echo(package)
            fetch(package, cache)
    for name, splits in build(sources, cache, out).items():
        typer.echo(f"{name:<24} {splits['train']:>6} train {splits['validation']:>5} validation")


if __name__ == "__main__":
    typer.run(main)
