"""Writes docs/recording.md from the schema and the gate themselves.

python -m visitlens.hooks.recording.format.format_page > docs/recording.md
"""

from __future__ import annotations

from visitlens.hooks.recording.format import gate, schema
from visitlens.hooks.recording.format.untrusted import MAX_JSON_BYTES, MAX_JSON_NODES

_HEAD = """# The recording format, version {version}

Generated from the code by `python -m visitlens.hooks.recording.format.format_page`.

    run.vlens/
      manifest.json        a cache over the shards: name, bytes, sha256, token and context range of each; the run's description
      summary.h5           per-measure sums over all shards: the only file that statistics read
      shards/wNN-SSSSSS.h5 immutable, self-contained, at most about 256 MB; NN the writer, SSSSSS its count
      analyses/NAME.json   results that other tools keep beside the recording (optional)
      writer.lock, wNN.lock  held while a driver, or a worker process, writes

The shards are the truth: manifest and summary can be rebuilt from them (`visitlens repair`). Shards are ordered by their tokens, not by name.

## Every HDF5 file

Format of HDF5 1.10 (superblock 3). Root attributes, fixed-length text and numbers only: `format` (`{format}`), `schema_version`, `run_uuid`,
`config_sha256`, `run` (JSON: model configuration, hashes, options, plan, provenance, warnings), and counts:

{numbers}

`summary.h5` has {summary} instead.

**Versions.** `schema_version` is MAJOR.MINOR.PATCH. A reader refuses an unknown major version by name. A minor version may add datasets, attributes and
fields; readers of any minor version of the same major read what they know. Version 1 is frozen: a recording of it lies in the tests.

## Datasets of a shard

E executed steps, T tokens (padding not counted), k experts per token, H hidden size, heads, kv heads, d head size, S positions of a context. "All"
levels have the sums; each further level has what the one before it has, except that `maps` has no activations.

| dataset | shape | type | level | what |
|---|---|---|---|---|
"""

_TAIL = """
`/summary/MEASURE` has the definition (title, axes, unit, definition, place in the paper) as attributes, so that an old recording describes itself, and `total` and
`count` [group, ...] f8, `left_out` and `non_finite` [...] i8. Groups are those of documents, the unit of intervals.

Activations of a token range carry the attribute `token_start`. Models of bfloat16 keep its bits as u2 with `logical_dtype` = `bfloat16`:
`torch.from_numpy(a).view(torch.bfloat16)` reads them without loss. `O` is the attention write times the loop count, and is not stored twice.

Chunks: vectors [1, 256, ...] with Fletcher32 and no compression; routing and statistics [1, 16384, ...] and sums shuffle, gzip-1, Fletcher32. No plugin is needed to read a
recording.

## Writing

1. A shard is written to a `.tmp` of its own, synced and renamed; the folder is synced. **The rename is the commit.** HDF5 writes through an object that keeps a disk's
   refusal from it, since that can crash the process: the first error ends the shard, and nothing of it stays. One process writes a shard in a thread while the next one is computed.
2. Summary, then manifest, are replaced in the same way. They are caches.
3. The same command goes on at what is missing; shards that are there are never touched. Another configuration is refused. More of the same text (a larger `--max-tokens`) goes on
   too: the run's description then lists the shorter runs' configurations under `extends`. Where documents are groups of their own, more of them make other groups; the sums in
   the shards of a shorter run stay as they are, and `regrouped` has the group here of each of its groups (since 1.2; `groups` is their number, `ungrouped` names the measures
   that have one sum for all documents). With `--batch` the shorter run must end with a full one.
4. One lock a recording: a second writer is refused and nothing is harmed. With `--workers`, each process has a lock of its own beside it; the driver alone
   writes summary and manifest, and commits what a killed worker had renamed but not reported. A task whose workers die three times is an error. A driver that
   starts again first waits for workers of the one that died: they end at their next context and commit nothing.
5. `--engine ray`: the same tasks on a cluster, for a folder that all nodes see, or an object store (docs/scale.md). Ray retries lost tasks; a shard's
   name is fixed by its task, so two attempts write one shard.
6. Room is checked before the run, and before each file. A full disk is one error, and every shard before it is intact.

## Reading a recording that anybody may have made

All of these checks run before a byte of data is read, on one held descriptor, however a recording is opened. `trusted=True` (`vl.open(path, trusted=True)`) leaves out the
walk over every chunk, and HDF5 decodes; the rest stays.

- Files: regular, not reached by a symbolic link inside the recording; the HDF5 signature at the first byte, no user block; HDF5's plugins are never loaded (neither filters
  nor, when a file can't be opened, connectors).
- Structure: hard links only, each object once, at most {depth} groups deep, {objects} objects, {attributes} attributes of one value each and at most {attribute} bytes; names of letters,
  digits, `_`, `.`, `-`; little-endian integers and floats, and fixed-length text in attributes. No external storage, no virtual datasets, no other layout than contiguous and chunked.
- Filters: shuffle, gzip, Fletcher32 in this order, each at most once; none skipped (filter_mask 0).
- Chunks: at most {chunk} bytes each, all stored, each once, inside the file, none overlapping; stored in exactly their bytes (4 more with Fletcher32), or, compressed, in
  what deflate can make of them. All arrays together at most {unpacked} bytes or {expansion} times the file.
- Compressed chunks are decoded by visitlens, not by HDF5: checksum first, then to their exact length or refused.
- Types, ranks and lengths of the datasets above must fit the file's counts; the file's run and place must be those of the manifest.
- JSON: at most {json_bytes} bytes and {json_nodes} values, no NaN, bounded depth.
- Text from a file is escaped before a page or a terminal shows it. Nothing is unpickled.

What the gate can't know: a shard whose contents are well-formed lies. Hashes in the manifest find accidents, not forgery. HDF5's own parser reads the file's metadata, and a flaw
in it is not caught by these checks.

## Commands

| command | what | exit code |
|---|---|---|
| `visitlens validate PATH [--quick]` | a recording, a folder or at a URL, or one `.h5`: gate, every chunk, hashes, counts, gaps, overlaps, sums, provenance | 0 whole, 1 damaged or refused, 2 wrong command line, 3 sound but unfinished |
| `visitlens repair PATH [--set-aside]` | manifest and summary from the shards; damaged shards aside, for recording again | 0, 1 |
| `visitlens pack PATH`, `unpack FILE` | one file for sharing: `.tar.zst`, `.tar.gz` or `.tar`; unpacking passes the gate or leaves nothing | 0, 1 |
| `visitlens merge A B ... -o OUT` | parts of one run, or runs of one configuration over different text; a document in two of them is refused (`--allow-duplicates`) | 0, 1 |
| `visitlens pull URL` | a recording in an object store, checked, as a folder | 0, 1 |
| `visitlens info PATH` | what is inside, with sizes and warnings | 0, 1 (also where shards are missing or cut) |
| `visitlens export PATH WHAT -o FILE` | a statistic, per-token values, tokens, experts or activations as `.parquet`, `.csv`, `.npz`, `.safetensors` | 0, 1 |
| `visitlens record ... --workers N [--engine ray]` | shards side by side | 0, 1, 130 after Ctrl-C |
| `visitlens fetched [ADDRESS ...] [--older-than DAYS] [--clear]` | copies of what was read at a URL: listed, or deleted where nobody reads them | 0, 1 |

`PATH` of `validate`, `info`, `export`, `compare`, `figures`, `pack`, `merge`, `app` and `vl.open` may be the URL of a recording in an object store (docs/scale.md).
"""

_SYMBOLS = {
    "step": "E",
    "token": "T",
    "range": "T",
    "hidden": "H",
    "head": "heads",
    "kv_head": "kv heads",
    "query": "S",
}


def format_page() -> str:
    """The page, as Markdown."""
    numbers = "\n".join(f"- `{name}`: {text}" for name, text in schema.SHARD_NUMBERS.items())
    summary = " and ".join(f"`{name}` ({text})" for name, text in schema.SUMMARY_NUMBERS.items())
    head = _HEAD.format(version=schema.SCHEMA_VERSION, format=schema.FORMAT, numbers=numbers, summary=summary)
    rows = []
    for layout in schema.LAYOUTS:
        axes = (
            ["E or pairs", "T", "(heads)"] if "*" in layout.axes else [_SYMBOLS.get(axis, axis) for axis in layout.axes]
        )
        kinds = "the model's" if layout.level == "activations" else ", ".join(layout.kinds)
        rows.append(f"| `/{layout.name}` | [{', '.join(axes)}] | {kinds} | {layout.level} | {layout.text} |")
    tail = _TAIL.format(
        depth=gate.MAX_DEPTH,
        objects=gate.MAX_OBJECTS,
        attributes=gate.MAX_ATTRIBUTES,
        attribute=gate.MAX_ATTRIBUTE_BYTES,
        chunk=gate.MAX_CHUNK_BYTES,
        unpacked=gate.MAX_UNPACKED,
        expansion=gate.MAX_EXPANSION,
        json_bytes=MAX_JSON_BYTES,
        json_nodes=MAX_JSON_NODES,
    )
    return head + "\n".join(rows) + "\n" + tail


if __name__ == "__main__":
    print(format_page(), end="")
