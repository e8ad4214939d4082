"""TensorBoard's event files: scalars, written as they come.

A file is a sequence of TFRecords, each an `Event` message (tensorflow/core/util/event.proto); of both formats only what scalars need. No
library is used: the small ones write from a thread of their own, where a full disk is nobody's to catch.
"""

import os
import socket
import struct
import time
from pathlib import Path

_VERSION = b"brain.Event:2"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types
_CRC32C = 0x82F63B78  # Castagnoli's polynomial, reversed
_MASK = 0xA282EAD8  # of TFRecord's checksums


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


class EventFile:
    """A new event file in `directory`; `step` 0 for a new run, else what the run goes on from: what was logged past it is dropped."""

    def __init__(self, directory: Path, step: int):
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        self._stream = (directory / name).open("ab", buffering=0)
        self._write(_double(1, now) + _bytes(3, _VERSION))
        if step:
            start = _number(1, 1)  # SessionLog.START, which tells TensorBoard that this file goes on at `step`
            self._write(_double(1, now) + _number(2, step + 1) + _bytes(7, start))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """One point of the curve `tag`."""
        point = _bytes(1, tag.encode()) + _key(2, _FIXED32) + struct.pack("<f", value)
        self._write(_double(1, time.time()) + _number(2, step) + _bytes(5, _bytes(1, point)))

    def close(self) -> None:
        """Nothing is buffered."""
        self._stream.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._stream.write(length + _checksum(length) + event + _checksum(event))


def _checksum(data: bytes) -> bytes:
    """TFRecord's masked CRC-32C."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + _MASK) & 0xFFFFFFFF)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value
