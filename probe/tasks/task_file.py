"""Task files: one example a line as JSON, with the parts that are scored. No torch.

A line is an object with either

    {"prompt": "a c b a c b 2 a", "answer": " b"}            the answer is scored
    {"text": "a c b a c b 2 a b", "scored": [[16, 17]]}      these character spans [start, stop) are scored

and, where there are any,

    "corrupted": "a b b c c a 2 a"         the same prompt (or text) changed, of as many tokens, for patching
    "facets": {"k": "2"}                   labels that cut every result
    "roles": {"edges": [[0, 11]]}          names of parts, as spans of `prompt + answer` or of `text`

An answer follows its prompt as it stands: a space between them belongs to one of the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visitlens.errors import InputError

Span = tuple[int, int]
KEYS = {"prompt", "answer", "text", "scored", "corrupted", "facets", "roles"}


@dataclass(frozen=True)
class Example:
    """One example of a task: spans are characters [start, stop) of `text`; `corrupted` is a whole text, or None."""

    text: str
    scored: tuple[Span, ...]
    corrupted: str | None = None
    facets: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.text:
            raise InputError("an example of a task needs text")
        if not self.scored:
            raise InputError(f"nothing is scored in {self.text[:40]!r}: give an answer, or spans as `scored`")
        for name, spans in {"scored": self.scored, **self.roles}.items():
            for start, stop in spans:
                if not 0 <= start < stop <= len(self.text):
                    raise InputError(
                        f"{name}: expected spans [start, stop) within the {len(self.text)} characters of "
                        f"{self.text[:40]!r}, got [{start}, {stop}]"
                    )

    @classmethod
    def of_answer(cls, prompt: str, answer: str, corrupted: str | None = None, **parts: Any) -> Example:
        """A prompt whose answer is scored; `corrupted` is a changed prompt, which gets the same answer."""
        if not answer:
            raise InputError(f"the answer to {prompt[-40:]!r} is empty: nothing would be scored")
        start = len(prompt) + len(answer) - len(answer.lstrip())
        span = (start, len(prompt) + len(answer)) if answer.strip() else (len(prompt), len(prompt) + len(answer))
        return cls(prompt + answer, (span,), None if corrupted is None else corrupted + answer, **parts)

    @classmethod
    def from_json(cls, data: Any) -> Example:
        """From one line's object.

        Raises:
            InputError: a key that means nothing, both forms or neither, values of another kind.
        """
        if not isinstance(data, dict):
            raise InputError(f"expected a JSON object, got {type(data).__name__}")
        if unknown := sorted(set(data) - KEYS):
            raise InputError(f"unknown keys {', '.join(unknown)}; there are {', '.join(sorted(KEYS))}")
        answered, spanned = {"prompt", "answer"} <= set(data), {"text", "scored"} <= set(data)
        if answered == spanned or len(set(data) & {"prompt", "answer", "text", "scored"}) != 2:
            raise InputError(
                f"expected prompt and answer, or text and scored, got {', '.join(sorted(data)) or 'nothing'}"
            )
        facets = data.get("facets", {})
        if not isinstance(facets, dict) or any(isinstance(v, (dict, list)) or v is None for v in facets.values()):
            raise InputError(f"facets: expected names and their labels, got {facets!r:.80}")
        roles = data.get("roles", {})
        if not isinstance(roles, dict):
            raise InputError(f"roles: expected names and their spans, got {roles!r:.80}")
        parts: dict[str, Any] = {
            "corrupted": _text(data, "corrupted") if data.get("corrupted") is not None else None,
            "facets": {str(name): str(label) for name, label in facets.items()},
            "roles": {str(name): _spans(f"roles.{name}", spans) for name, spans in roles.items()},
        }
        if answered:
            return cls.of_answer(_text(data, "prompt"), _text(data, "answer"), **parts)
        return cls(_text(data, "text"), _spans("scored", data["scored"]), **parts)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes, as text and spans."""
        data: dict[str, Any] = {"text": self.text, "scored": [list(span) for span in self.scored]}
        if self.corrupted is not None:
            data["corrupted"] = self.corrupted
        if self.facets:
            data["facets"] = dict(self.facets)
        if self.roles:
            data["roles"] = {name: [list(span) for span in spans] for name, spans in self.roles.items()}
        return data


def read_task(path: str | Path) -> list[Example]:
    """The examples of a task file, in order; empty lines are passed over.

    Raises:
        InputError: no such file, not UTF-8, no example, or a line that is none (with its number).
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a readable task file ({error}); expected JSON lines") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            examples.append(Example.from_json(json.loads(line)))
        except (ValueError, RecursionError) as error:  # JSON of any damage, and InputError
            raise InputError(f"{path}, line {number}: {error}") from error
    if not examples:
        raise InputError(f"{path} holds no example: expected one JSON object a line, with prompt and answer")
    return examples


def write_task(path: Path, examples: Iterable[Example]) -> None:
    """One example a line."""
    lines = [json.dumps(example.to_json(), ensure_ascii=False) for example in examples]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _text(data: Mapping[str, Any], key: str) -> str:
    if not isinstance(data[key], str):
        raise InputError(f"{key}: expected a text, got {data[key]!r:.80}")
    return data[key]


def _spans(name: str, spans: Any) -> tuple[Span, ...]:
    fits = isinstance(spans, list) and all(
        isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span) for span in spans
    )
    if not fits:
        raise InputError(f"{name}: expected a list of [start, stop], got {spans!r:.80}")
    return tuple((start, stop) for start, stop in spans)
