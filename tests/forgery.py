"""Writes what it likes into the header of a segment, with a checksum that vouches for it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from shmcollect.header import Header, checksum
from shmcollect.layout import HEADER


def path_of(name: str) -> Path:
    return Path(f"/dev/shm/shmcollect.{name}")


def forge(name: str, *, description: bytes | None = None, **words: int) -> dict[str, int]:
    """Changes words of the header, and the description where it lies; returns all words as they are now."""
    fd = os.open(path_of(name), os.O_RDWR)
    try:
        found: dict[str, Any] = {**Header.read(fd, name).words, **words}
        if description is not None:
            os.pwrite(fd, description, found["description_offset"])
            found |= {"description_bytes": len(description), "description_crc": zlib.crc32(description)} | words
        found["header_crc"] = words.get("header_crc", checksum(found))
        for word, value in found.items():
            os.pwrite(fd, value.to_bytes(8, "little", signed=True), HEADER[word])
        return found
    finally:
        os.close(fd)
