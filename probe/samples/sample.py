"""EvalSet: documents to experiment on, which of their predictions count, and what kind each document is. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.text.documents import Document, pack, read_documents
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.hooks.text.tokenizer import encoded
from visitlens.probe.measures.estimate import mean_of
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.dyck_prompts import PAIRS, SHOTS, DyckPrompt, dyck_prompt
from visitlens.probe.samples.prompts import Prompt, pack_prompts, role_names, tokenise
from visitlens.probe.tasks.task_file import Example, read_task

ROLES = ("start", "demonstration inputs", "demonstration answers", "last input", "last answer")
"""Parts of a Dyck prompt; an input runs up to and with the marker of its answer."""
LENGTHS = {"up to 128 tokens": 128, "129 to 512 tokens": 512, "over 512 tokens": 1 << 62}
"""Buckets of document length, BOS and EOS included."""
GROUPS = 128

LONGEST = 2048
"""Tokens of a context where none is asked for: models of transformers claim 100,000 and more."""

Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """No progress shown."""


@dataclass(frozen=True, eq=False)
class EvalSet:
    """Packed documents. `counted [context, position]`: whether the prediction *of* that token counts.

    `facets` name -> a label for each document ("" for none): kind, category, length, shots. `prompts` are the Dyck prompts,
    in document order, where the documents are such; `corrupted` the same tokens with each prompt's twin in its place (of a
    Dyck prompt: every bracket of the last input of another kind; the answers stay), `roles [context, position]` the part of
    the prompt as an index into `role_names`, -1 for padding.

    Examples:
        >>> model = vl.load("smelt")
        >>> sample = model.sample(max_tokens=512)
        >>> isinstance(sample, vl.EvalSet), sample.counted.shape == sample.contexts.segments.shape
        (True, True)
    """

    contexts: PackedTokens
    counted: np.ndarray
    facets: Mapping[str, Sequence[str]]
    prompts: tuple[DyckPrompt, ...] = ()
    corrupted: np.ndarray | None = None
    roles: np.ndarray | None = None
    role_names: tuple[str, ...] = ROLES
    empty: int = 0
    """Documents left out because they have no token."""

    @classmethod
    def of_text(
        cls,
        text: str | Path | Iterable[str | Document],
        tokenizer: Any,
        config: Any,
        *,
        max_tokens: int | None = None,
        context_length: int | None = None,
    ) -> EvalSet:
        """From a file, a folder or documents; every token but a segment's first counts.

        Raises:
            InputError: nothing readable, no token.
        """
        encoder = TextEncoder.of(tokenizer, config)
        try:
            found: list[Any] = list(read_documents(Path(text)) if isinstance(text, (str, Path)) else text)
        except TypeError:
            found = [text]
        if strange := [d for d in found if not isinstance(d, (Document, str))]:
            raise InputError(f"expected a file, a folder or several texts, got {strange[0]!r:.80}")
        documents = [d if isinstance(d, Document) else Document(d) for d in found]
        encoded = encoder.documents([d.text for d in documents])
        tokens, kept = encoded.ids, [documents[i] for i in encoded.kept]
        length = min(config.context_length, LONGEST) if context_length is None else context_length
        packed = pack(tokens, length, encoder.bos.id, encoder.pad, near_copies=True)
        packed = packed if max_tokens is None else packed.first_contexts(max_tokens)
        number = len(packed.document_hash)
        facets = {
            "kind": ["text"] * number,
            "category": [d.category for d in kept[:number]],
            "length": [next(name for name, most in LENGTHS.items() if len(t) <= most) for t in tokens[:number]],
        }
        return replace(cls.of_contexts(packed, facets), empty=encoded.empty)

    @classmethod
    def of_contexts(cls, contexts: PackedTokens, facets: Mapping[str, Sequence[str]] | None = None) -> EvalSet:
        """From packed tokens; every token but a segment's first counts."""
        segments = contexts.segments
        counted = np.zeros(segments.shape, dtype=bool)
        counted[:, 1:] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
        return cls(contexts, counted, facets or {"kind": ["text"] * len(contexts.document_hash)})

    @classmethod
    def of_dyck(
        cls,
        tokenizer: Any,
        config: Any,
        *,
        prompts: int = 24,
        shots: Sequence[int] = SHOTS,
        seed: int = 0,
        context_length: int | None = None,
    ) -> EvalSet:
        """`prompts` Dyck prompts for each number of shots, whole; only the answer's closing brackets count.

        Raises:
            InputError: a prompt longer than a context.
        """
        encoder = TextEncoder.of(tokenizer, config)
        drawn = [dyck_prompt((seed, k, i), encoder.tokenizer, shots=k) for k in shots for i in range(prompts)]
        if not drawn:
            raise InputError(f"expected at least one prompt and one number of shots, got {prompts} and {tuple(shots)}")
        other = _other_brackets(encoder.tokenizer)
        length = config.context_length if context_length is None else context_length
        packed = pack_prompts([_as_prompt(prompt, other) for prompt in drawn], encoder, length)
        facets = {
            "kind": ["dyck"] * len(drawn),
            "shots": [f"{p.shots} shot{'' if p.shots == 1 else 's'}" for p in drawn],
        }
        return cls(packed.contexts, packed.counted, facets, tuple(drawn), packed.corrupted, packed.roles)

    @classmethod
    def of_task(
        cls,
        task: str | Path | Sequence[Example],
        tokenizer: Any,
        config: Any,
        *,
        name: str = "task",
        limit: int | None = None,
        context_length: int | None = None,
    ) -> EvalSet:
        """The examples of a task file (or of `read_task`), whole; only their scored tokens count, and facets cut every result.

        Args:
            name: the slice that holds all examples.
            limit: take so many of them, spread evenly over the file.

        Raises:
            InputError: no readable task file, an example that the tokenizer can't spell, one longer than a context.
        """
        examples = read_task(task) if isinstance(task, (str, Path)) else list(task)
        if not examples or (limit is not None and limit < 1):
            raise InputError(f"expected at least one example, got {len(examples)} and a limit of {limit}")
        if limit is not None and limit < len(examples):
            examples = [examples[i] for i in np.linspace(0, len(examples) - 1, limit).round().astype(int)]
        parts = role_names(examples)
        encoder = TextEncoder.of(tokenizer, config)
        length = config.context_length if context_length is None else context_length
        packed = pack_prompts([tokenise(e, encoder.tokenizer, parts) for e in examples], encoder, length)
        facets = {"kind": [name] * len(examples)}
        for facet in dict.fromkeys(key for example in examples for key in example.facets):
            facets[facet] = [example.facets.get(facet, "") for example in examples]
        return cls(packed.contexts, packed.counted, facets, (), packed.corrupted, packed.roles, parts)

    @property
    def documents(self) -> int:
        return len(self.contexts.document_hash)

    @cached_property
    def document_of(self) -> np.ndarray:
        """[context, position] document of each token, -1 for padding."""
        segments = self.contexts.segments
        return np.where(segments >= 0, self.contexts.segment_document[np.maximum(segments, 0)], -1)

    @cached_property
    def counts(self) -> np.ndarray:
        """[document] predictions that count."""
        return np.bincount(self.document_of[self.counted], minlength=self.documents).astype(np.float64)

    @cached_property
    def slices(self) -> dict[str, np.ndarray]:
        """Label -> [document] whether it belongs: every kind, category, length bucket and number of shots there is."""
        found: dict[str, np.ndarray] = {}
        for labels in self.facets.values():
            for label in _in_order(labels):
                found[label] = np.array([other == label for other in labels])
        return found

    @cached_property
    def groups(self) -> np.ndarray:
        """[document] the group it counts in: documents by hash, each its own where there are at most 128."""
        return self.contexts.document_groups(GROUPS)

    def stat(
        self,
        measure: Measure,
        total: np.ndarray,
        count: np.ndarray,
        labels: Mapping[str, Sequence[Any]],
        aggregation: str = "mean over tokens",
    ) -> StatArray:
        """From `total` and `count` [document, *axes] to means with intervals over documents."""
        number = int(self.groups.max()) + 1
        count = np.broadcast_to(count, total.shape)
        totals, counts = (np.zeros((number, *total.shape[1:])) for _ in range(2))
        np.add.at(totals, self.groups, total)
        np.add.at(counts, self.groups, count)
        return mean_of(
            measure,
            (totals, counts),
            labels,
            groups=self.contexts.sha256,
            documents=self.documents,
            tokens=int(self.counts.sum()),
            aggregation=aggregation,
            provenance={"data_sha256": self.contexts.sha256},
        )

    def by_slice(self, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`total [document, *axes]` of counted predictions, and their counts, each [document, *axes, slice]."""
        belongs = np.stack(list(self.slices.values()), axis=1).astype(np.float64)  # [document, slice]
        belongs = belongs.reshape(len(belongs), *[1] * (total.ndim - 1), belongs.shape[1])
        counts = self.counts.reshape(-1, *[1] * total.ndim)
        return total[..., None] * belongs, np.broadcast_to(counts * belongs, (*total.shape, belongs.shape[-1]))

    def __repr__(self) -> str:
        kinds = ", ".join(f"{name} {int(chosen.sum())}" for name, chosen in self.slices.items())
        empty = f"; {self.empty} without a token left out" if self.empty else ""
        return f"EvalSet({self.documents} documents, {self.contexts.num_tokens:,} tokens, {int(self.counts.sum()):,} predictions: {kinds}{empty})"


def _as_prompt(prompt: DyckPrompt, other: Mapping[int, int]) -> Prompt:
    """Its closers count; the twin has every bracket of the last input of another kind."""
    counted = np.zeros(len(prompt.tokens), dtype=bool)
    counted[list(prompt.closers)] = True
    roles = _roles(prompt)
    twin = [
        other.get(token, token) if last else token
        for token, last in zip(prompt.tokens.tolist(), roles == ROLES.index("last input"), strict=True)
    ]
    return Prompt(prompt.tokens, counted, roles, np.array(twin, dtype=np.int32))


def _roles(prompt: DyckPrompt) -> np.ndarray:
    """[position] of the prompt's tokens, without BOS."""
    roles = np.full(len(prompt.tokens), ROLES.index("demonstration inputs"))
    roles[max((stop for _, stop in prompt.demonstrations), default=0) :] = ROLES.index("last input")
    for start, stop in prompt.demonstrations:
        roles[start:stop] = ROLES.index("demonstration answers")
    roles[slice(*prompt.answer)] = ROLES.index("last answer")
    return roles


def _other_brackets(tokenizer: Any) -> dict[int, int]:
    """Token id of each bracket -> that of the same bracket of the next kind."""
    swaps = {}
    for brackets in (list(PAIRS), list(PAIRS.values())):
        for bracket, following in zip(brackets, [*brackets[1:], brackets[0]], strict=True):
            for before in ("", " "):
                ids = [e.ids for e in encoded(tokenizer, [before + b for b in (bracket, following)])]
                swaps[ids[0][-1]] = ids[1][-1]
    return swaps


def _in_order(labels: Sequence[str]) -> list[str]:
    """The labels there are: lengths and shots by size, others by name."""
    known = [label for label in dict.fromkeys(labels) if label]
    lengths = list(LENGTHS)
    if all(label in lengths for label in known):
        return sorted(known, key=lengths.index)
    if all(label.split()[-1].startswith("shot") for label in known):
        return sorted(known, key=lambda label: int(label.split()[0]))
    return sorted(known)
