"""Packing the records of a store: one by one, against a dictionary of typical records, each with a checksum.

zlib with a dictionary packs real records to 760 bytes on average (41%) and unpacks one in 13 microseconds. zstandard at
its default level with a trained dictionary takes 700 to 730 bytes and 4 microseconds: too little to add a dependency.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from spear_envs.core.errors import SpearError

DICTIONARY_BYTES = 1 << 15
"""The longest distance that the format can refer back."""
LEVEL = 4
"""4% more bytes than level 6, in half the time."""
CHECKSUM_BYTES = 4
RAW = -15
"""No zlib header, which would cost a checksum of the dictionary for every record."""


def make_dictionary(records: Sequence[bytes]) -> bytes:
    """Make a dictionary of typical records; of too many, the last ones are used."""
    return b"".join(records)[-DICTIONARY_BYTES:]


class Packer:
    """Packs and unpacks records."""

    def __init__(self, dictionary: bytes) -> None:
        self._dictionary = dictionary
        self._fresh = zlib.compressobj(LEVEL, zlib.DEFLATED, RAW, zdict=dictionary)

    def pack(self, record: bytes) -> bytes:
        """Pack a record, preceded by its CRC-32."""
        compressor = self._fresh.copy()  # the dictionary is read once
        packed = compressor.compress(record) + compressor.flush()
        return zlib.crc32(record).to_bytes(CHECKSUM_BYTES, "little") + packed

    def unpack(self, packed: bytes) -> bytes:
        """Unpack a record.

        Raises:
            SpearError: the bytes are damaged.
        """
        try:
            record = zlib.decompressobj(RAW, zdict=self._dictionary).decompress(packed[CHECKSUM_BYTES:])
        except zlib.error as error:
            raise SpearError(f"a packed record is damaged ({error})") from None
        if zlib.crc32(record).to_bytes(CHECKSUM_BYTES, "little") != packed[:CHECKSUM_BYTES]:
            raise SpearError("a packed record is damaged (its checksum differs)")
        return record
