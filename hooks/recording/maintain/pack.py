"""One file of a recording, for sharing: a tar archive, compressed by zstd or gzip; unpacked with the same distrust. No torch."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from visitlens.errors import InputError, RecordingError, StorageError, UnavailableError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.untrusted import held
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.commit import check_room, storage_error, sync_folder
from visitlens.hooks.recording.write.ledger import check_hashes, check_whole

SUFFIXES = (".tar.zst", ".tar.gz", ".tar")
_MEMBER = re.compile(
    r"manifest\.json|summary\.h5|shards/w[0-9]{2,4}-[0-9]{6,12}\.h5|analyses/[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}\.json"
)
_MAX_EXPANSION, _MAX_SMALL = 32, 2**26  # an archive unpacks to at most the larger of 32 times its size and 64 MB
_MAX_MEMBERS = 16_384
_BLOCK = 2**20


def pack(place: str | Path, out: Path) -> Path:
    """Writes a recording, a folder or at a URL, into one file; `out` ends in .tar.zst, .tar.gz or .tar.

    Raises:
        RecordingError: not a recording, or damaged: it couldn't be unpacked.
        InputError: another suffix, or `out` exists.
        UnavailableError: .tar.zst without the zstandard package.
        StorageError: no room.
    """
    _refuse_existing(out)
    recording = Recording(place)
    if recording.damaged:
        raise RecordingError(
            f"{place}: {recording.damaged[0]}; a damaged recording isn't packed. `visitlens validate` says more"
        )
    _ = recording.totals
    path = recording.bring()
    check_whole(path, recording.shards)
    names = [schema.MANIFEST, schema.SUMMARY]
    names += [f"{schema.SHARDS}/{shard['name']}" for shard in recording.shards]
    names += [f"{schema.ANALYSES}/{name}" for name in recording.analyses]
    check_room(out.absolute().parent, sum((path / name).stat().st_size for name in names if (path / name).exists()))
    partial = out.with_name(out.name + ".tmp")
    try:
        with _compressed(partial, out.name, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
            for name in names:
                with held(path / name) as descriptor, open(descriptor, "rb", closefd=False) as file:
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = os.fstat(descriptor).st_size, 0o644
                    archive.addfile(member, file)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise storage_error(error, out) from error
    return out


def unpack(file: Path, out: Path) -> Path:
    """The recording in a packed file, checked; nothing appears at `out` unless all of it is right.

    Raises:
        RecordingError: not a packed recording, damaged, or its contents don't pass the gate.
        InputError: another suffix, or `out` exists.
        StorageError: no room or no permission.
    """
    _refuse_existing(out)
    partial = out.with_name(out.name + ".unpacking")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with held(file) as descriptor:
            limit = max(_MAX_SMALL, _MAX_EXPANSION * os.fstat(descriptor).st_size)
        with (
            _compressed(file, file.name, "rb") as stream,
            tarfile.open(fileobj=_Bounded(stream, limit), mode="r|") as archive,
        ):
            names = _extracted(archive, partial, limit, file)
        recording = Recording(partial)
        listed = {f"{schema.SHARDS}/{shard['name']}" for shard in recording.shards}
        if strange := sorted(name for name in names - listed if name.startswith(f"{schema.SHARDS}/")):
            raise RecordingError(f"{file}: refused: holds {strange[0]}, which its manifest doesn't list")
        _ = recording.totals
        recording.each_shard(lambda gated, shard: None)
        check_hashes(partial, recording.shards)
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"{file}: not a packed recording, or damaged ({error})") from error
    except OSError as error:
        raise error if isinstance(error, StorageError) else storage_error(error, out) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _extracted(archive: tarfile.TarFile, folder: Path, limit: int, file: Path) -> set[str]:
    """The names of the members, now files below the folder.

    Raises:
        RecordingError: one that is no plain file of a recording; too many, or too many bytes.
    """
    seen: set[str] = set()
    for member in archive:
        # A sparse member writes its holes too: a few bytes of archive would become any number of bytes.
        plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
        if not plain or not _MEMBER.fullmatch(member.name) or member.name in seen:
            raise RecordingError(f"{file}: refused: holds {member.name[:80]!r}, which is no file of a recording")
        seen.add(member.name)
        if len(seen) > _MAX_MEMBERS:
            raise RecordingError(f"{file}: refused: holds more than {_MAX_MEMBERS:,} files")
        check_room(folder, member.size)
        target = folder / member.name
        target.parent.mkdir(exist_ok=True)
        with target.open("xb") as copy:
            content = archive.extractfile(member) or io.BytesIO()
            while data := content.read(_BLOCK):
                limit -= len(data)
                if limit < 0:
                    raise RecordingError(f"{file}: refused: unpacks to far more than its size")
                copy.write(data)
            os.fsync(copy.fileno())
    return seen


class _Bounded(io.RawIOBase):
    """What a decompressor yields, up to a limit."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.stream, self.left = stream, limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(_BLOCK if size < 0 else min(size, _BLOCK))
        self.left -= len(data)
        if self.left < 0:
            raise RecordingError("refused: a packed file that unpacks to far more than its size")
        return data


@contextmanager
def _compressed(path: Path, name: str, mode: str) -> Iterator[Any]:
    if name.endswith(".tar"):
        with path.open(mode) as stream:
            yield stream
    elif name.endswith(".tar.gz"):
        with path.open(mode) as raw, gzip.GzipFile("", mode, 6, raw, mtime=0) as stream:
            yield stream
    elif name.endswith(".tar.zst"):
        try:
            import zstandard
        except ImportError as error:
            raise UnavailableError(
                f"{name}: .tar.zst needs zstandard: pip install zstandard, or use .tar.gz"
            ) from error
        try:
            with path.open(mode) as raw:
                tool = (
                    zstandard.ZstdCompressor(level=1)
                    if mode == "wb"
                    else zstandard.ZstdDecompressor(max_window_size=2**27)
                )
                with tool.stream_writer(raw) if mode == "wb" else tool.stream_reader(raw) as stream:
                    yield stream
        except zstandard.ZstdError as error:
            raise RecordingError(f"{path}: not a packed recording, or damaged ({error})") from error
    else:
        raise InputError(f"{name}: expected a name that ends in {', '.join(SUFFIXES)}")


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise InputError(f"{out}: exists; choose another path")
