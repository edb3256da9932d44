"""The zip container of torch.save: where members lie, and how to renew their checksums.

torch stores members uncompressed, so a tensor's bytes can be found and patched in place.  A
zip file keeps a CRC-32 of each member in up to three places; an edited member needs all of
them renewed, else the archive reads as damaged.  Python's zipfile would do for reading but
does not tell where the checksums stand.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
import zlib
from pathlib import Path
from typing import IO

from gatewright.errors import UserError

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _END64_LOCATOR, _DESCRIPTOR = b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_MAX_DIRECTORY_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stored (uncompressed) member of a zip archive that lies inside a file."""

    name: str
    start: int
    """Offset of the member's first byte in the file."""
    size: int
    checksums: tuple[int, ...]
    """Offsets in the file of every copy of the member's CRC-32."""


def read_entries(path: Path, start: int = 0, length: int | None = None) -> dict[str, Entry]:
    """Return the members of a zip archive, by name without the archive's leading folder.

    Args:
        start, length: where the archive lies in the file (a Megatron checkpoint packs many
            into one file); the whole file by default.

    Raises:
        UserError: not a zip archive, damaged, or with compressed members.
    """
    try:
        with open(path, "rb") as f:
            size = path.stat().st_size - start if length is None else length
            return _read_entries(f, start, size)
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from e
    except (struct.error, ValueError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not a file that torch.save wrote whole ({e})") from e


def _read_entries(f: IO[bytes], start: int, size: int) -> dict[str, Entry]:
    f.seek(start + max(0, size - 66_000))
    tail = f.read(min(size, 66_000))
    at = tail.rfind(_END)
    if at < 0:
        raise ValueError("no zip directory at its end: cut short, or in torch's format before 1.6")
    count, directory_size, directory = struct.unpack_from("<HII", tail, at + 10)
    if count == _FULL16 or _FULL32 in (directory_size, directory):
        locator = at - 20
        if locator < 0 or tail[locator : locator + 4] != _END64_LOCATOR:
            raise ValueError("the zip64 locator is missing")
        (end64,) = struct.unpack_from("<Q", tail, locator + 8)
        if end64 + 56 > size:
            raise ValueError("the zip64 directory record is beyond the file's end")
        f.seek(start + end64)
        record = f.read(56)
        if record[:4] != _END64:
            raise ValueError("the zip64 directory record is missing")
        count, directory_size, directory = struct.unpack_from("<QQQ", record, 32)
    if directory_size > _MAX_DIRECTORY_BYTES or directory + directory_size > size:
        raise ValueError("the zip directory does not fit into the file")
    f.seek(start + directory)
    table = f.read(directory_size)
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    at = 0
    for _ in range(count):
        if table[at : at + 4] != _CENTRAL:
            raise ValueError("the zip directory is damaged")
        flags, method = struct.unpack_from("<HH", table, at + 8)
        packed, member_size, name_len, extra_len, comment_len = struct.unpack_from(
            "<IIHHH", table, at + 20
        )
        (local,) = struct.unpack_from("<I", table, at + 42)
        name = table[at + 46 : at + 46 + name_len].decode()
        extra = table[at + 46 + name_len : at + 46 + name_len + extra_len]
        member_size, packed, local = _widen(extra, member_size, packed, local)
        if method != 0 or packed != member_size:
            raise ValueError(f"member {name} is compressed")
        checksums = [start + directory + at + 16]
        if local + 30 > directory:
            raise ValueError(f"member {name} is not where the directory says")
        f.seek(start + local)
        head = f.read(30)
        if head[:4] != _LOCAL:
            raise ValueError(f"member {name} is not where the directory says")
        local_name_len, local_extra_len = struct.unpack_from("<HH", head, 26)
        data = start + local + 30 + local_name_len + local_extra_len
        if data + member_size > start + directory:
            raise ValueError(f"member {name} reaches beyond the zip directory")
        spans.append((start + local, data + member_size, name))
        if flags & 8:  # sizes and checksum follow the data
            f.seek(data + member_size)
            signed = f.read(4) == _DESCRIPTOR
            checksums.append(data + member_size + (4 if signed else 0))
        else:
            checksums.append(start + local + 14)
        short = name.partition("/")[2] or name
        if short in entries:
            raise ValueError(f"member {short} occurs twice")
        entries[short] = Entry(short, data, member_size, tuple(checksums))
        at += 46 + name_len + extra_len + comment_len
    spans.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"members {one} and {other} overlap")
    return entries


def _widen(extra: bytes, *fields: int) -> tuple[int, ...]:
    """Replace 32-bit fields that overflowed by their zip64 values, which stand in order."""
    if _FULL32 not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            try:
                return tuple(next(wide) if n == _FULL32 else n for n in fields)
            except StopIteration as e:
                raise ValueError("a zip64 field is missing") from e
        at += 4 + length
    raise ValueError("a zip64 field is missing")


def renewed_checksum(f: IO[bytes], entry: Entry) -> bytes:
    """Return the CRC-32 of a member as it stands in the file now, as stored bytes."""
    f.seek(entry.start)
    crc, left = 0, entry.size
    while left:
        block = f.read(min(left, 1 << 20))
        if not block:
            raise ValueError(f"member {entry.name} is cut short")
        crc = zlib.crc32(block, crc)
        left -= len(block)
    return struct.pack("<I", crc)
