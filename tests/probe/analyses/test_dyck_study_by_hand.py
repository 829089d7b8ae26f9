"""The Dyck study of a random model against masses and scores worked out from the prompt's text, character by character."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tests.support.planted import character_tokenizer

from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.analyses.ablation.dyck_study import DyckSettings, study_head

LAYER, HEAD, SHOTS = 1, 2, 2


def answers(text: str) -> list[tuple[int, int]]:
    """[start, stop) of what stands after each marker, up to and including the line end."""
    spans, at = [], 0
    while (marker := text.find("Output:", at)) >= 0:
        start = marker + len("Output:")
        at = text.index("\n", start) + 1
        spans.append((start, at))
    return spans


def test_masses_scores_and_marked_spans_are_those_of_the_characters(make_model: Callable[..., LoopedMoE]) -> None:
    """The tokenizer has one token a character, so that behind BOS a character's index plus 1 is its token's."""
    tokenizer = character_tokenizer()
    model = make_model(2, vocab_size=tokenizer.get_vocab_size(), context_length=512, dtype=torch.float64)
    settings = DyckSettings(prompts=3, shots=SHOTS)
    study = study_head(model, tokenizer, LAYER, HEAD, settings, name="x", about={}, shots=(0, SHOTS))

    mass: dict[str, list[np.ndarray]] = {"bos": [], "answers": [], "visible": []}
    nats, right, exact, target_nats = [], [], [], []
    for number, prompt in enumerate(settings.draw(tokenizer)):
        *shown, own = answers(prompt.text)
        ids = torch.tensor([[model.config.bos_token_id, *tokenizer.encode(prompt.text, add_special_tokens=False).ids]])
        assert ids.shape[1] == len(prompt.text) + 1
        with torch.no_grad():
            logits, cache = model.run_with_cache(ids)
        closing = [i for i in range(*own) if prompt.text[i] in ")]}>"][:3]
        pattern = torch.stack([cache[f"blocks.{LAYER}.visit.{v}.attn.hook_pattern"][0, HEAD] for v in (1, 2)])
        rows = pattern[:, closing].numpy()  # the position before a target is its index in the text: BOS leads
        held = [i + 1 for start, stop in shown for i in range(start, stop)]
        mass["bos"].append(rows[..., 0])
        mass["answers"].append(rows[..., held].sum(-1))
        mass["visible"].append(np.array([len(held) / (at + 1) for at in closing]))
        example = next((e for e in study.examples if e.pieces[1:] == tuple(prompt.text[: closing[-1] + 1])), None)
        assert number >= len(study.examples) or example is not None
        if example is not None:
            assert ["".join(example.pieces[slice(*span)]) for span in example.demonstrations] == [
                prompt.text[slice(*span)] for span in shown
            ]
            assert [example.pieces[at] for at in example.targets] == [prompt.text[i] for i in closing]
            np.testing.assert_allclose(example.maps, rows[..., : example.maps.shape[-1]], atol=1e-12)
        log_p = logits[0].log_softmax(-1)
        each = {i: float(-log_p[i, ids[0, i + 1]]) for i in range(*own)}
        hits = [bool(log_p[i].argmax() == ids[0, i + 1]) for i in each]
        nats += each.values()
        target_nats += [each[i] for i in closing]
        right += hits
        exact.append(all(hits))

    found = study.mass.sel(shots=SHOTS)
    bound = {
        "rtol": 1e-6,
        "atol": 1e-7,
    }  # `study_head` keeps scores in float32 at least; a span off by one is off by percents
    for part in ("bos", "answers"):
        by_hand = np.concatenate(mass[part], axis=-1).mean(-1)
        np.testing.assert_allclose(found.sel(heads="dyck head", part=part).values, by_hand, **bound)
    uniform = found.sel(heads="uniform", part="answers").values
    np.testing.assert_allclose(uniform, [np.concatenate(mass["visible"]).mean()] * 2, **bound)
    scores = {name: float(stat.sel(shots=SHOTS).values) for name, stat in study.scores.items()}
    by_hand = {"nll": np.mean(nats), "target_nll": np.mean(target_nats), "accuracy": np.mean(right)}
    for name, value in {**by_hand, "exact_match": np.mean(exact)}.items():
        np.testing.assert_allclose(scores[name], value, err_msg=name, **bound)
