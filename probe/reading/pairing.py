"""Two recordings whose sums are over the same groups of documents, as far as they share any. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visitlens.probe.reading.recorded_run import RecordedRun


@dataclass(frozen=True)
class Pairing:
    """Both recordings, with document groups that line up where `paired`, and what that is in words."""

    a: RecordedRun
    b: RecordedRun
    paired: bool
    words: str


def pair(a: RecordedRun, b: RecordedRun) -> Pairing:
    """Documents are matched by the hashes in the summaries (format 1.1); a document that one recording alone holds is
    left out of both and counts in one."""
    if a.provenance["data_sha256"] == b.provenance["data_sha256"] and a.groups == b.groups:
        return Pairing(a, b, True, "paired: both are of the same documents")
    apart = Pairing(a, b, False, "not paired: the two are of different documents, or group them differently")
    ours, theirs = (run.recording.document_hashes for run in (a, b))
    if ours is None or theirs is None:
        return apart
    shared = len(np.intersect1d(ours, theirs))
    groups = [run.recording.run["config"]["options"]["groups"] for run in (a, b)]
    alone = [
        len(hashes) == run.groups <= most for run, hashes, most in zip((a, b), (ours, theirs), groups, strict=True)
    ]
    few, many = sorted(groups)
    if not shared or (not any(alone) and many % few):
        return apart
    union = np.union1d(ours, theirs)
    most = 0 if all(alone) else min(number for number, own in zip(groups, alone, strict=True) if not own)
    lined_up = []
    for run, hashes, each_its_own in zip((a, b), (ours, theirs), alone, strict=True):
        if all(alone):
            places, count = np.searchsorted(union, hashes), len(union)
        else:  # groups by hash, as in the recording of more documents
            places = (hashes % np.uint64(most)).astype(np.int64) if each_its_own else np.arange(run.groups) % most
            count = most
        lined_up.append(run.regrouped(places, count, f"{a.group_names} with {b.group_names}"))
    words = f"paired where the documents are the same: {shared:,} of {len(ours):,} and {len(theirs):,}"
    return Pairing(lined_up[0], lined_up[1], True, words)
