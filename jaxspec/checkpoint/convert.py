"""Converting a checkpoint: what it is, whether the other format can hold it, and a report of what was read and written."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.checkpoint.drafters.content import Lender, lender, read_content
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.formats import FORMATS, find_format
from jaxspec.checkpoint.drafters.load import ORBAX, OpenedDrafter, open_drafter
from jaxspec.checkpoint.drafters.table import CanonicalSource
from jaxspec.checkpoint.export import write_directory, write_orbax_directory
from jaxspec.checkpoint.fill import Place, checked_dtype, flat_parameters, shapes_and_axes
from jaxspec.checkpoint.load import OpenedVerifier, abstract_decoder, load_verifier, open_verifier, resolve
from jaxspec.checkpoint.orbax import OrbaxSource, is_orbax, kind_of, name_of
from jaxspec.checkpoint.safetensors import DTYPES, SafetensorsSource, read_json
from jaxspec.checkpoint.source import StoredTensor
from jaxspec.checkpoint.write import new_directory
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.sharding import mesh_of, put, split, verifier_layout
from jaxspec.verifiers.families import drafter_kind
from jaxspec.verifiers.hf import Fields, architectures

_VERIFIER_TARGETS = ("safetensors", ORBAX)


@dataclass(frozen=True)
class Side:
    """What was read or written: where, what, and its tensors."""

    path: Path
    what: str
    tensors: Mapping[str, StoredTensor]

    def line(self) -> str:
        """ "PATH: WHAT; 24 tensors (22 BF16, 1 I64, 1 BOOL), 3.1 MB"."""
        counts = Counter(tensor.dtype for tensor in self.tensors.values())
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        return f"{self.path}: {self.what}; {len(self.tensors)} tensors ({dtypes}), {_size(size)}"


@dataclass(frozen=True)
class Report:
    """A finished conversion. `notes`: what was borrowed, dropped or left out, in words."""

    read: Side
    written: Side
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"read   {self.read.line()}",
            *(f"       {note}" for note in self.notes),
            f"wrote  {self.written.line()}",
        ]


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    *,
    verifier: str | Path | None = None,
    dtype: str | None = None,
    drop: Sequence[str] = (),
    mesh: str | Mesh | None = None,
) -> Report:
    """Converts the drafter or verifier `src` to the new directory `dst`; arguments as on the command line.

    dtype None keeps every tensor's own dtype of a drafter; a verifier is written in bfloat16 where all of it is, else in float32.
    mesh: the devices that a verifier's weights lie on in between, as "tensor=8"; None: host memory. Raises InputError, one line, for
    everything that is wrong with the arguments or the checkpoint, and for what the format cannot hold.
    """
    source, target = resolve(src), _target(dst)
    _check_target(source, target)
    wanted = None if dtype is None else checked_dtype(dtype)
    devices = mesh_of(mesh)
    if source.is_file() or not _is_drafter(source):
        for flag, given in (("--drop", drop), ("--verifier", verifier)):
            if given:
                raise InputError(f"{flag}: {source} is a verifier; {flag} goes with a drafter")
        with _disk_errors(target):
            return _convert_verifier(source, target, to, wanted, devices)
    if mesh is not None:
        raise InputError(f"--mesh: {source} is a drafter, which host memory holds; --mesh goes with a verifier")
    lending = None if verifier is None else _lender(verifier)
    with _disk_errors(target):
        return _convert_drafter(source, target, to, wanted, drop, lending)


def _target(dst: str | Path) -> Path:
    try:
        return Path(dst).expanduser()
    except RuntimeError as error:  # no such user
        raise InputError(f"{dst}: {error}") from error


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Raises InputError where the disk fails, which is full or its limit reached."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror or error}") from error


def _convert_drafter(
    source: Path, target: Path, to: str, dtype: np.dtype | None, drop: Sequence[str], verifier: Lender | None
) -> Report:
    if to not in (*FORMATS, ORBAX):
        raise InputError(f"--to {to}: {source} is a drafter; {', '.join((*FORMATS, ORBAX))} hold drafters")
    opened = open_drafter(source, None if verifier is None else verifier.facts.num_layers)
    notes = save_drafter(target, read_content(opened), to, dtype=dtype, drop=drop, verifier=verifier)
    written = open_drafter(target, None if verifier is None else verifier.facts.num_layers)
    return Report(_drafter_side(opened), _drafter_side(written), notes)


def _convert_verifier(source: Path, target: Path, to: str, dtype: np.dtype | None, mesh: Mesh | None) -> Report:
    if to not in _VERIFIER_TARGETS:
        raise InputError(f"--to {to}: {source} is a verifier; {' and '.join(_VERIFIER_TARGETS)} hold verifiers")
    opened = open_verifier(source)
    loaded = load_verifier(source, dtype=dtype or _widest(opened), place=_place(opened, mesh))
    with new_directory(target) as work:
        if to == ORBAX:
            write_orbax_directory(work, loaded)
        else:
            write_directory(work, loaded)
        if loaded.tokenizer_source.is_file():
            from jaxspec.checkpoint.gguf_tokenizer import write_tokenizer

            write_tokenizer(loaded.tokenizer_source, work)
    notes = (f"left out {loaded.left_out}",) if loaded.left_out else ()
    return Report(_verifier_side(opened), _verifier_side(open_verifier(target)), notes)


def _place(opened: OpenedVerifier, mesh: Mesh | None) -> Place:
    """Where parameters lie on the way: in host memory, or on the devices of a mesh, each as it is stored: key/value heads of which there
    are too few to split are not repeated, as they are for decoding. Raises InputError where one cannot be split."""
    if mesh is None:
        host = jax.local_devices(backend="cpu")[0]
        return lambda value, path, axes: jax.device_put(value, host)
    parameters = flat_parameters(nnx.state(abstract_decoder(opened.config, np.float32)))
    # Names what does not divide, before anything is read.
    verifier_layout(mesh, opened.config, shapes_and_axes(parameters))
    return lambda value, path, axes: put(value, split(mesh, axes, value.shape, name_of(path)))


def _check_target(source: Path, target: Path) -> None:
    """Raises unless `target` is a new directory outside `source`."""
    if source.resolve() in target.resolve().parents:
        raise InputError(f"{target}: lies inside SRC {source}; choose a directory beside it")
    if target.exists() or target.is_symlink():
        raise InputError(f"{target}: exists already; DST must be a new directory")


def _is_drafter(source: Path) -> bool:
    """By config and tensors."""
    if is_orbax(source):
        return kind_of(source) == "drafter"
    config_file = source / "config.json"
    if not config_file.is_file():
        raise InputError(f"{source}: has no config.json")
    data = read_json(config_file)
    names = CanonicalSource(SafetensorsSource(source)).tensors.keys()
    return drafter_kind(data) is not None or find_format(Fields(data, str(config_file)), names) is not None


def _lender(path_or_id: str | Path) -> Lender:
    opened = open_verifier(path_or_id)
    config_file = opened.path / "config.json"
    given = read_json(config_file) if config_file.is_file() else opened.hf_config
    return lender(opened, str(path_or_id), architectures(given))


def _widest(opened: OpenedVerifier) -> np.dtype:
    """A dtype that holds every stored weight exactly."""
    stored = {tensor.dtype for tensor in opened.source.tensors.values()} & DTYPES.keys()
    return DTYPES["BF16"] if stored == {"BF16"} else DTYPES["F32"]


def _drafter_side(opened: OpenedDrafter) -> Side:
    tensors = dict(opened.source.tensors)
    return Side(opened.path, f"{opened.format} {_describe(opened.config)}", tensors)


def _verifier_side(opened: OpenedVerifier) -> Side:
    kind = ORBAX if isinstance(opened.source, OrbaxSource) else "gguf" if opened.path.is_file() else "safetensors"
    what = f"{kind} {opened.config.family} verifier, {opened.config.num_layers} layers"
    return Side(opened.path, what, opened.source.tensors)


def _describe(config: DrafterConfig) -> str:
    parts = [f"{config.method} drafter", f"{len(config.layers)} layer{'s' if len(config.layers) > 1 else ''}"]
    if config.block is not None:
        parts.append(f"block {config.block.size}")
    parts.append(f"vocabulary {config.draft_vocab_size} of {config.vocab_size}")
    borrowed = [name for name, own in (("embedding", config.own_embed), ("head", config.own_head)) if not own]
    if borrowed:
        parts.append(f"{' and '.join(borrowed)} borrowed from the verifier")
    return ", ".join(parts)


def _size(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
