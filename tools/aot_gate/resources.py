"""The registers, stack and shared memory of a compiled program's kernels.

Registers and stack (which is where spilled registers go) stand in the machine code inside the serialised
executable: a Riegeli record file of Snappy-compressed records with ELF files in them. Shared memory stands in XLA's dump of the thunks.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True)
class Kernel:
    """Registers a thread, bytes of stack a thread, and bytes of shared memory a program where known."""

    name: str
    registers: int
    stack: int
    shared_memory: int | None = None


def kernels(compiled: jax.stages.Compiled, dump: Path | None = None) -> list[Kernel]:
    """The kernels of the program; their shared memory from the folder that XLA dumped to while compiling it."""
    shared = {} if dump is None else _shared_memory(dump)
    executable = compiled.runtime_executable()
    assert executable is not None
    found = {}
    for record in _records(executable.serialize()):
        for start in _elf_files(record):
            found |= _attributes(record[start:])
    return [Kernel(name, registers, stack, shared.get(name)) for name, (registers, stack) in sorted(found.items())]


def _shared_memory(dump: Path) -> dict[str, int]:
    """Bytes by kernel name, from lines such as `001: kCustomKernel [...] NAME grid: [...] threads: [...]  shared_memory: 512 bytes`."""
    found = {}
    for file in dump.glob("*.thunk_sequence.txt"):
        for name, size in re.findall(r"\] (\S+) grid: .* shared_memory: (\d+) bytes", file.read_text()):
            found[name] = max(int(size), found.get(name, 0))
    return found


RECORD_FILE = bytes.fromhex("83af70d10d884a3f")  # hash of the first block header, the same in every file


def _records(executable: bytes) -> Iterator[bytes]:
    """The decompressed chunks of records (https://github.com/google/riegeli, doc/riegeli_records_file_format.md), and those of a file
    within the file."""
    start = executable.find(RECORD_FILE)
    if start < 0:
        raise ValueError("the serialised executable holds no record file")
    file = executable[start:]
    block, block_header, chunk_header = 1 << 16, 24, 40
    data = b"".join(file[i + block_header : i + block] for i in range(0, len(file), block))
    at = 0
    while at + chunk_header <= len(data):
        _, size, _, kind, _ = struct.unpack_from("<5Q", data, at)
        at += chunk_header
        chunk = data[at : at + size]
        at += size
        if kind & 0xFF == ord("r"):  # simple records: compression, size of the sizes, the sizes, the records
            sizes, start = _varint(chunk, 1)
            records = chunk[start + sizes :]
            if chunk[0] == ord("s"):
                _, start = _varint(records, 0)
                records = _unsnappy(records[start:])
            elif chunk[0]:
                raise ValueError(f"records are compressed by {chr(chunk[0])!r}, not by Snappy")
            if RECORD_FILE in records:
                yield from _records(records)
            else:
                yield records


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in base 128, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at


def _unsnappy(data: bytes) -> bytes:
    """https://github.com/google/snappy, format_description.txt."""
    size, at = _varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3 == 0:  # a literal
            length, extra = tag >> 2, max(0, (tag >> 2) - 59)
            if extra:
                length = int.from_bytes(data[at : at + extra], "little")
                at += extra
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if tag & 3 == 1:
            length, offset, extra = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at], 1
        else:
            extra = 2 if tag & 3 == 2 else 4
            length, offset = (tag >> 2) + 1, int.from_bytes(data[at : at + extra], "little")
        at += extra
        repeated = out[len(out) - offset :]  # may be shorter than the copy, which then repeats it
        out += (repeated * -(-length // offset))[:length]
    if len(out) != size:
        raise ValueError(f"a Snappy stream gave {len(out)} bytes instead of {size}")
    return bytes(out)


CUDA = 190  # ELF machine type
REGISTERS, STACK = 0x2F, 0x12  # attributes of .nv.info: EIATTR_REGCOUNT, EIATTR_MIN_STACK_SIZE


def _elf_files(data: bytes) -> Iterator[int]:
    """Where machine code for CUDA begins."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        if data[at + 4] == 2 and struct.unpack_from("<H", data, at + 18)[0] == CUDA:
            yield at
        at = data.find(b"\x7fELF", at + 4)


def _attributes(elf: bytes) -> dict[str, tuple[int, int]]:
    """Registers and stack of each kernel in a 64-bit ELF file."""
    table = struct.unpack_from("<Q", elf, 40)[0]
    entry, number, names = struct.unpack_from("<3H", elf, 58)
    # name, type, flags, address, offset, size, link, ...
    sections = [struct.unpack_from("<IIQQQQI", elf, table + i * entry) for i in range(number)]

    def text(section: int, at: int) -> str:
        start = sections[section][4] + at
        return elf[start : elf.index(b"\0", start)].decode()

    [symbol_table] = [section for section in sections if section[1] == 2]
    symbols = [
        text(symbol_table[6], struct.unpack_from("<I", elf, symbol_table[4] + i)[0])
        for i in range(0, symbol_table[5], 24)
    ]
    found: dict[str, dict[int, int]] = {}
    for section in sections:
        if text(names, section[0]) != ".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at < end:
            form, attribute, size = struct.unpack_from("<BBH", elf, at)
            at += 4
            if form != 4:  # the value stands in the two bytes of the size
                continue
            if attribute in (REGISTERS, STACK):
                symbol, value = struct.unpack_from("<II", elf, at)
                found.setdefault(symbols[symbol], {})[attribute] = value
            at += size
    return {
        name: (values.get(REGISTERS, 0), values.get(STACK, 0)) for name, values in found.items() if REGISTERS in values
    }
