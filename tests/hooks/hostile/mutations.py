"""Random changes of HDF5's own blocks under right checksums, and a process of its own that opens each changed file."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import visitlens
from visitlens.hooks.recording.format.structures import lookup3

TREES_AND_HEAPS = (b"BTHD", b"BTLF", b"BTIN", b"FRHP", b"FHIB", b"FHDB")
HEADERS = (b"OHDR", b"OCHK")
_SPECIAL = (0, 1, -1, 20, 2**7, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)

CHILD = """
import json, re, shutil, sys, zlib
from pathlib import Path
from visitlens.errors import VisitlensError
from visitlens.hooks.recording.format.totals import read_totals
from visitlens.hooks.recording.format.gate import passed
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording

def megabytes():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

def content(path):
    with passed(path) as gated:
        read = {name: zlib.crc32(gated.read(name).tobytes()) for name in gated.arrays}
        totals = read_totals(gated)
    return read, {name: sorted(t.attributes.items()) for name, t in totals.items()}

folder, original, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
expected = content(original)
for path in map(Path, sys.argv[4:]):
    print(json.dumps({"began": path.name}), flush=True)
    try:
        found = content(path)
        outcome, said = ("same", "") if found == expected else ("differs", "")
    except VisitlensError as error:
        outcome, said = "refused", str(error)
    except Exception as error:  # it would reach the user as a traceback
        outcome, said = "died", repr(error)
    if outcome == "differs":
        shutil.copy(path, folder / name)
        if validate(folder).exit_code == 1:
            outcome = "found by validate"
        shutil.copy(original, folder / name)
    print(json.dumps({"path": path.name, "outcome": outcome, "said": said, "megabytes": megabytes()}), flush=True)
"""


@dataclass(frozen=True)
class Block:
    """`[start, sum_at)` of a file and the place of the checksum over it; `whole`: the sum lies inside and counts as zeros."""

    kind: bytes
    start: int
    sum_at: int
    stop: int

    def sealed(self, data: bytearray) -> None:
        """Puts the right checksum there."""
        if self.stop == self.sum_at:
            value = lookup3(bytes(data[self.start : self.sum_at]))
        else:
            data[self.sum_at : self.sum_at + 4] = bytes(4)
            value = lookup3(bytes(data[self.start : self.stop]))
        data[self.sum_at : self.sum_at + 4] = struct.pack("<I", value)


def blocks_of(data: bytes, kinds: tuple[bytes, ...]) -> list[Block]:
    """Those whose checksum is found right where their kind has it."""
    found = []
    for kind in kinds:
        at = data.find(kind)
        while at >= 0:
            found += [block for block in _candidates(data, kind, at) if _right(data, block)][:1]
            at = data.find(kind, at + 1)
    return found


def _candidates(data: bytes, kind: bytes, at: int) -> list[Block]:
    if kind == b"BTHD":
        return [Block(kind, at, at + 34, at + 34)]
    if kind == b"FRHP":
        return [Block(kind, at, at + 142, at + 142)]
    if kind == b"FHDB":
        return [
            Block(kind, at, at + 13 + width, at + size) for width in (4, 5) for size in (512, 1024, 2048, 4096, 8192)
        ]
    return [Block(kind, at, at + length, at + length) for length in _lengths(data, kind, at)]


def _lengths(data: bytes, kind: bytes, at: int) -> list[int]:
    """What a block may have before its checksum."""
    if kind == b"OHDR":
        start = at + 6 + (16 if data[at + 5] & 0x20 else 0) + (4 if data[at + 5] & 0x10 else 0)
        width = 1 << (data[at + 5] & 3)
        return [start - at + width + int.from_bytes(data[start : start + width], "little")]
    if kind == b"OCHK":  # the message that leads there says its length
        place = data.find(struct.pack("<Q", at))
        return [int.from_bytes(data[place + 8 : place + 16], "little") - 4] if place >= 0 else []
    if kind == b"FHIB":
        return [13 + width + 32 * rows for width in (4, 5) for rows in range(1, 10)]
    return [6 + n * width for width in (11, 17) for n in range(1, 46)]


def _right(data: bytes, block: Block) -> bool:
    if block.sum_at > len(data) - 4 or block.stop > len(data):
        return False
    copy = bytearray(data[block.start : max(block.stop, block.sum_at + 4)])
    moved = Block(block.kind, 0, block.sum_at - block.start, block.stop - block.start)
    stored = copy[moved.sum_at : moved.sum_at + 4]
    moved.sealed(copy)
    return copy[moved.sum_at : moved.sum_at + 4] == stored


def mutated(data: bytes, block: Block, seed: int) -> bytes:
    """One field of the block, of 1 to 8 bytes, changed."""
    chance, changed = random.Random(seed), bytearray(data)
    while changed == data:
        width = chance.choice((1, 1, 2, 4, 8))
        at = chance.randrange(block.start + 4, block.stop - width + 1) if block.stop > block.start + 4 + width else 0
        if not at or block.sum_at - width < at < block.sum_at + 4:
            continue
        old = int.from_bytes(changed[at : at + width], "little")
        how = chance.randrange(4)
        new = (
            old + chance.choice(_SPECIAL),
            chance.choice(_SPECIAL),
            chance.getrandbits(64),
            old ^ 1 << chance.randrange(8 * width),
        )[how]
        changed[at : at + width] = (new % 2 ** (8 * width)).to_bytes(width, "little")
        block.sealed(changed)
    return bytes(changed)


def outcomes(folder: Path, name: str, files: list[Path]) -> dict[str, dict]:
    """What becomes of each file in the place of `name` in a copy of a recording: `died` of those that end the process."""
    original = files[0].parent / "original"
    original.write_bytes((folder / name).read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(Path(visitlens.__file__).parents[1])}
    found: dict[str, dict] = {}
    left = files
    while left:
        command = [sys.executable, "-c", CHILD, str(folder), str(original), name, *map(str, left)]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, errors = child.communicate(timeout=30 + 2 * len(left))
        except subprocess.TimeoutExpired:
            child.kill()
            out, errors = child.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
        assert lines, errors
        found |= {line["path"]: line for line in lines if "path" in line}
        if "began" in lines[-1]:
            found[lines[-1]["began"]] = {
                "outcome": "died",
                "said": f"{child.returncode} {errors[-400:]}",
                "megabytes": 0,
            }
        left = [file for file in left if file.name not in found]
    return found
