"""HDF5's structures for links and attributes, read by us before HDF5 reads them: it trusts what they say of themselves. No torch.

HDF5 allocates and walks by the counts in the header of a b-tree and of a fractal heap, and ends the process where they are
wrong. A recording's are made in one way, by h5py: here every object header is followed to its b-trees and heaps, all their
fields are compared with what that writer makes, and what the trees really hold is counted. Sizes and offsets are those of the
HDF5 File Format Specification, version 3.0; checksums are left to HDF5, which refuses wrong ones itself.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

from visitlens.errors import RecordingError

UNDEFINED = 2**64 - 1
MAX_ENTRIES = 4096
"""Links of a group, or attributes of an object."""
_HEADER_BYTES = 544  # of an object: one read takes in nearly all of them whole
_MAX_BLOCK, _MAX_MESSAGES = 2**20 + 2**16, 256
_NODE, _MAX_DEPTH, _SMALL = 512, 4, 2**22
_LINK_INFO, _LAYOUT, _CONTINUATION, _LINK, _ATTRIBUTE, _ATTRIBUTE_INFO = 0x02, 0x08, 0x10, 0x06, 0x0C, 0x15
_SYMBOL_TABLE = 0x11  # of old-style groups
_READ = frozenset((_SYMBOL_TABLE, _LINK_INFO, _LAYOUT, _CONTINUATION, _LINK, _ATTRIBUTE, _ATTRIBUTE_INFO))
_CHUNK_INDEXES = {1: "one chunk", 2: "implicit", 3: "fixed array"}
_TREE = struct.Struct("<4sBBIHHBBQHQ")
_HEAP = struct.Struct("<4sBHHBIQQQQQQQQQQQQHQQHHQH")
_KINDS = {"links": (5, 11, 7, 32, 512, 4), "attributes": (8, 17, 8, 40, 1024, 0)}
"""Type of the b-tree, its record's bytes, a heap id's bytes, bits of the heap, its first block's bytes, where in a record the id is."""


@dataclass
class Held:
    """What an object header says: how many links and attributes the object has, wherever they are kept."""

    links: int = 0
    attributes: int = 0


@dataclass
class Structures:
    """The metadata of one open file. `check` an object before HDF5 opens it."""

    descriptor: int
    size: int
    where: str
    _seen: set[int] = field(default_factory=set)
    _whole: bytes = b""

    def __post_init__(self) -> None:
        if self.size <= _SMALL:  # one read instead of hundreds
            self._whole = os.pread(self.descriptor, self.size, 0)

    def root(self) -> int:
        """The root group's address, of a superblock without an extension.

        Raises:
            RecordingError: another superblock than h5py's.
        """
        block = self._read(0, 48, "superblock")
        if block[8] == 3 and lookup3(block[:44]) != int.from_bytes(block[44:], "little"):
            raise RecordingError(f"{self.where}: not a readable HDF5 file (wrong checksum at its start); it is damaged")
        version, offsets, lengths = block[8:11]
        base, extension, end, root = struct.unpack("<4Q", block[12:44])
        if version != 3 or base or extension != UNDEFINED or (offsets, lengths) != (8, 8):
            raise RecordingError(
                f"{self.where}: an HDF5 file, but not of a visitlens recording (another HDF5 version, or extended)"
            )
        if end > self.size:
            raise RecordingError(
                f"{self.where}: not a readable HDF5 file (truncated: {self.size} of {end} bytes); it is damaged"
            )
        return root

    def check(self, address: int, name: bytes) -> Held:
        """Follows the object header at an address to all that its links and attributes are kept in.

        Raises:
            RecordingError: something is otherwise than a recording's writer makes it.
        """
        held = Held()
        for kind, data in self._messages(address, name):
            if kind == _SYMBOL_TABLE:
                raise self._refuse(name, "is an old-style group")
            if kind == _LINK:
                held.links += 1
            elif kind == _ATTRIBUTE:
                held.attributes += 1
            elif kind == _LINK_INFO:
                held.links += self._indexed(data, 8, "links", name)
            elif kind == _ATTRIBUTE_INFO:
                held.attributes += self._indexed(data, 2, "attributes", name)
            elif kind == _LAYOUT:
                self._chunk_index(data, name)
        return held

    def _refuse(self, name: bytes, why: str) -> RecordingError:
        shown = repr((name or b"/").decode("utf-8", "backslashreplace")[:80])
        return RecordingError(
            f"{self.where}: refused: {shown} {why}: no recording's writer makes that; the file is damaged or forged"
        )

    def _read(self, address: int, count: int, what: str) -> bytes:
        if address > self.size or count > _MAX_BLOCK or len(data := self._bytes(address, count)) < count:
            raise RecordingError(
                f"{self.where}: unreadable structure ({what} lies outside the file); the file is damaged"
            )
        return data

    def _bytes(self, address: int, count: int) -> bytes:
        """As many as there are."""
        return self._whole[address : address + count] if self._whole else os.pread(self.descriptor, count, address)

    def _once(self, address: int, name: bytes) -> None:
        if address in self._seen:
            raise self._refuse(name, "uses a block twice, or in a cycle")
        self._seen.add(address)

    def _messages(self, address: int, name: bytes) -> list[tuple[int, bytes]]:
        """(type, data) of each message of an object header and its continuations."""
        self._once(address, name)
        if address > self.size:
            raise self._refuse(name, "has a header outside the file")
        block = self._bytes(address, _HEADER_BYTES)
        if block[:5] != b"OHDR\x02" or len(block) < 16:
            raise self._refuse(name, "has no object header, or one of an old version")
        flags = block[5]
        start = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        length = int.from_bytes(block[start : start + width], "little")
        start += width
        if start + length > len(block):
            block = self._read(address, start + length, "an object header")
        step = 6 if flags & 4 else 4
        found: list[tuple[int, bytes]] = []
        waiting = [block[start : start + length]]
        while waiting:
            for kind, data in self._in_block(waiting.pop(), step, name):
                if kind != _CONTINUATION:
                    found.append((kind, data))
                    continue
                at, size = struct.unpack("<QQ", data[:16]) if len(data) >= 16 else (0, 0)
                self._once(at, name)
                more = self._read(at, size, "an object header's continuation")
                if more[:4] != b"OCHK" or size < 8:
                    raise self._refuse(name, "has a header that goes on where nothing is")
                waiting.append(more[4:-4])
            if len(found) > _MAX_MESSAGES:
                raise self._refuse(name, f"has a header of more than {_MAX_MESSAGES} messages")
        return found

    def _in_block(self, block: bytes, step: int, name: bytes) -> list[tuple[int, bytes]]:
        """Those of a block that lead on or count as a link or an attribute."""
        found, at, end = [], 0, len(block)
        while (start := at + step) <= end:
            kind, size = block[at], block[at + 1] | block[at + 2] << 8
            if block[at + 3] & 0x02:
                raise self._refuse(name, "shares a message of its header")
            at = start + size
            if at > end:
                raise self._refuse(name, "has a message that is longer than its header")
            if kind in _READ:
                found.append((kind, block[start:at]))
        return found

    def _chunk_index(self, data: bytes, name: bytes) -> None:
        """The index of a chunked dataset, in its layout message; the gate itself refuses layouts of other classes."""
        if data[1:2] != b"\x02":
            return
        if data[0] != 4:
            raise self._refuse(name, "keeps its chunks as older versions of HDF5 do")
        place = 5 + data[3] * data[4] if len(data) > 4 else len(data)
        if place >= len(data) or data[place] not in _CHUNK_INDEXES:
            raise self._refuse(name, f"finds its chunks otherwise than by {', '.join(_CHUNK_INDEXES.values())}")

    def _indexed(self, data: bytes, width: int, kind: str, name: bytes) -> int:
        """How many entries a link or attribute info message leads to; `width`: bytes of the creation index that it may have."""
        if len(data) < 18 or data[0]:
            raise self._refuse(name, f"has a damaged note of its {kind}")
        start = 2 + (width if data[1] & 1 else 0)
        if data[1] > 3 or len(data) < start + 16 + (8 if data[1] & 2 else 0):
            raise self._refuse(name, f"has a damaged note of its {kind}")
        heap, tree = struct.unpack_from("<QQ", data, start)
        if data[1] & 2 and struct.unpack_from("<Q", data, start + 16)[0] != UNDEFINED:
            raise self._refuse(name, f"has a second index of its {kind}")
        if heap == tree == UNDEFINED:
            return 0
        tree_type, width, *_, place = _KINDS[kind]
        records = self._tree(tree, tree_type, width, name)
        self._heap(heap, kind, [record[place : place + _KINDS[kind][2]] for record in records], records, name)
        return len(records)

    def _tree(self, address: int, kind: int, width: int, name: bytes) -> list[bytes]:
        """All records of a version 2 b-tree, whose header says how many they are."""
        self._once(address, name)
        header = _TREE.unpack(self._read(address, _TREE.size, "a b-tree's header"))
        depth, root, in_root, total = header[5], *header[8:]
        if header[:5] != (b"BTHD", 0, kind, _NODE, width) or header[6:8] != (100, 40):
            raise self._refuse(name, "has a b-tree of another kind")
        if total > MAX_ENTRIES:
            raise self._refuse(name, f"has a b-tree that counts {total} entries: more than {MAX_ENTRIES} objects")
        if depth > _MAX_DEPTH:
            raise self._refuse(name, f"has a b-tree of depth {depth}")
        if not total:
            if in_root or depth or root != UNDEFINED:
                raise self._refuse(name, "has a b-tree that says it is empty and isn't")
            return []
        levels = _levels(width, depth)
        records: list[bytes] = []
        self._node((root, in_root, total), depth, kind, width, levels, records, name)
        if len(records) != total:
            raise self._refuse(name, f"has a b-tree that counts {total} entries and holds {len(records)}")
        return records

    def _node(
        self,
        at: tuple[int, int, int],
        depth: int,
        kind: int,
        width: int,
        levels: list[tuple[int, int, int]],
        records: list[bytes],
        name: bytes,
    ) -> None:
        """Appends a node's records and those below it; `at`: its address, its records, those of all of its branch."""
        address, count, total = at
        most, count_bytes, total_bytes = levels[depth]
        self._once(address, name)
        block = self._read(address, _NODE, "a b-tree's node")
        if block[:6] != (b"BTIN" if depth else b"BTLF") + bytes((0, kind)) or not 0 < count <= most:
            raise self._refuse(name, f"has a node of {count} entries in its b-tree, of at most {most}")
        before = len(records)
        records += [block[6 + n * width : 6 + (n + 1) * width] for n in range(count)]
        if depth:
            step = 8 + count_bytes + total_bytes
            for n in range(count + 1):
                start = 6 + count * width + n * step
                child = int.from_bytes(block[start : start + 8], "little")
                inside = int.from_bytes(block[start + 8 : start + 8 + count_bytes], "little")
                below = int.from_bytes(block[start + 8 + count_bytes : start + step], "little") if depth > 1 else inside
                self._node((child, inside, below), depth - 1, kind, width, levels, records, name)
                if len(records) > MAX_ENTRIES:
                    raise self._refuse(name, f"has a b-tree of more than {MAX_ENTRIES} entries")
        if len(records) - before != total:
            raise self._refuse(
                name, f"has a branch of a b-tree that counts {total} entries and holds {len(records) - before}"
            )

    def _heap(self, address: int, kind: str, ids: list[bytes], records: list[bytes], name: bytes) -> None:
        """A fractal heap's header and blocks, and that every id leads to the entry that its record is of."""
        _, _, id_bytes, bits, first, _ = _KINDS[kind]
        self._once(address, name)
        header = _HEAP.unpack(self._read(address, _HEAP.size, "a fractal heap's header"))
        next_huge, huge_tree, free, _, space, allocated, iterator, managed, huge_bytes, huge = header[6:16]
        fixed = (b"FRHP", 0, id_bytes, 0), header[5], header[16:18], header[18:20], header[20:23]
        right = (header[:4], 4096, (0, 0), (4, first), (65_536, bits, 1))
        root, rows = header[23:]
        direct_rows = 16 - first.bit_length() + 1 + 2
        of_rows = 4 * first << (rows - 1) if rows else first
        if fixed != right or header[4] & ~3 or not header[4] & 2 or rows > direct_rows:
            raise self._refuse(name, f"keeps its {kind} in a heap of another kind")
        extents = self._blocks(root, rows, address, first, bits, name)
        if (
            space != of_rows
            or allocated != sum(size for _, size, _ in extents)
            or iterator > space
            or free > space
            or managed + huge != len(ids)
        ):
            raise self._refuse(name, f"keeps its {kind} in a heap whose header doesn't fit its blocks")
        if huge_tree == UNDEFINED and (huge or huge_bytes):
            raise self._refuse(name, f"keeps its {kind} in a heap without the large ones that it counts")
        large = {} if huge_tree == UNDEFINED else self._large(huge_tree, (huge, huge_bytes, next_huge), name)
        offset_bytes = bits // 8
        for id_, record in zip(ids, records, strict=True):
            if id_[0] == 0x10 and (found := large.pop(int.from_bytes(id_[1:], "little"), None)):
                at, length = found
            else:
                start = int.from_bytes(id_[1 : 1 + offset_bytes], "little")
                length = int.from_bytes(id_[1 + offset_bytes :], "little")
                block = next(((o, at) for o, size, at in extents if o <= start and start + length <= o + size), None)
                if id_[0] or block is None:
                    raise self._refuse(name, f"keeps one of its {kind} outside its heap")
                at = block[1] + start - block[0]
            # The record's hash is that of the name: an id that leads elsewhere is found out.
            hashed = record[:4] if kind == "links" else record[-4:]
            if (kind == "attributes" and record[8]) or lookup3(self._name_at(at, length, kind, name)) != int.from_bytes(
                hashed, "little"
            ):
                raise self._refuse(name, f"finds one of its {kind} where another thing is")
        if large:
            raise self._refuse(name, f"has large {kind} that nothing leads to")

    def _name_at(self, at: int, length: int, kind: str, name: bytes) -> bytes:
        """The name in a link's or an attribute's message."""
        data = self._read(at, min(length, 512), "a heap's entry")
        if kind == "links" and length >= 4 and data[0] == 1 and data[1] < 0x20:
            start = 2 + (1 if data[1] & 8 else 0) + (8 if data[1] & 4 else 0) + (1 if data[1] & 16 else 0)
            width = 1 << (data[1] & 3)
            size = int.from_bytes(data[start : start + width], "little")
            if start + width + size < length:
                return data[start + width : start + width + size]
        if kind == "attributes" and length >= 9 and data[:2] == b"\x03\0":
            of_name, of_type, of_space = struct.unpack_from("<HHH", data, 2)
            if of_name and 9 + of_name + of_type + of_space <= length:
                return data[9 : 8 + of_name]
        raise self._refuse(name, f"has an entry among its {kind} that is none")

    def _large(self, tree: int, counted: tuple[int, int, int], name: bytes) -> dict[int, tuple[int, int]]:
        """Attributes of more than 4 kB each: number -> (address, length), by a b-tree."""
        count, total, last = counted
        records = [struct.unpack("<QQQ", record) for record in self._tree(tree, 1, 24, name)]
        right = all(0 < n <= last for _, _, n in records) and len(records) == count
        inside = all(at >= 48 and size > 0 and at + size <= self.size for at, size, _ in records)
        if not right or not inside or sum(size for _, size, _ in records) != total:
            raise self._refuse(name, "has large attributes that its heap doesn't count")
        return {n: (at, size) for at, size, n in records}

    def _blocks(
        self, root: int, rows: int, heap: int, first: int, bits: int, name: bytes
    ) -> list[tuple[int, int, int]]:
        """(offset in the heap, size, address) of its direct blocks."""
        owner = struct.pack("<Q", heap)
        if not rows:
            places = [(root, 0, first)]
        else:
            self._once(root, name)
            start = 13 + bits // 8
            table = self._read(root, start + 32 * rows, "a heap's table")
            if table[:5] != b"FHIB\0" or table[5:13] != owner or any(table[13:start]):
                raise self._refuse(name, "has a heap without its table")
            places, offset = [], 0
            for row in range(rows):
                size = first << max(row - 1, 0)
                for column in range(4):
                    (address,) = struct.unpack_from("<Q", table, start + 8 * (4 * row + column))
                    if address != UNDEFINED:
                        places.append((address, offset, size))
                    offset += size
        for address, offset, size in places:
            self._once(address, name)
            block = self._read(address, size, "a heap's block")
            if block[:5] != b"FHDB\0" or block[5:13] != owner:
                raise self._refuse(name, "has a heap without one of its blocks")
            if int.from_bytes(block[13 : 13 + bits // 8], "little") != offset:
                raise self._refuse(name, "has a heap with a block at another place")
        return [(offset, size, address) for address, offset, size in places]


def _levels(width: int, depth: int) -> list[tuple[int, int, int]]:
    """For each level of a b-tree, leaves first: most records in a node; bytes of the counts that a pointer to the level below has."""
    most = (_NODE - 10) // width
    count_bytes = _bytes_of(most)
    levels, whole, whole_bytes = [(most, count_bytes, 0)], most, 0
    for _ in range(depth):
        pointer = 8 + count_bytes + whole_bytes
        most = (_NODE - 10 - pointer) // (width + pointer)
        levels.append((most, count_bytes, whole_bytes))
        whole = (most + 1) * whole + most
        whole_bytes = _bytes_of(whole)
    return levels


def _bytes_of(limit: int) -> int:
    return (limit.bit_length() - 1) // 8 + 1


def lookup3(key: bytes) -> int:
    """HDF5's checksum of metadata.

    Source: Bob Jenkins, lookup3.c (2006), hashlittle with an initial value of 0.

    >>> hex(lookup3(b"Four score and seven years ago"))
    '0x17770551'
    """
    mask = 0xFFFFFFFF

    def rotate(value: int, by: int) -> int:
        return (value << by | value >> (32 - by)) & mask

    a = b = c = (0xDEADBEEF + len(key)) & mask
    while len(key) > 12:
        x, y, z = struct.unpack("<III", key[:12])
        a, b, c, key = (a + x) & mask, (b + y) & mask, (c + z) & mask, key[12:]
        for by in (4, 6, 8, 16, 19, 4):
            a, c = ((a - c) & mask) ^ rotate(c, by), (c + b) & mask
            a, b, c = b, c, a  # each takes its turn as the first
    if key:
        x, y, z = struct.unpack("<III", key.ljust(12, b"\0"))
        a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
        for by in (14, 11, 25, 16, 4, 14, 24):
            c = ((c ^ b) - rotate(b, by)) & mask
            a, b, c = b, c, a
        return b
    return c
