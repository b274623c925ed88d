"""MosaicML streaming's MDS shards. In: a folder with index.json. Out: rows of token ids, or texts.

A shard holds count (uint32), count + 1 offsets (uint32), then the samples; a sample holds the length (uint32)
of each column that has no fixed one, then the values. The format and its encodings are those of
mosaicml/streaming (streaming/base/format/mds). Read here are the columns that LLM Foundry's converters
write: `tokens` as an ndarray or as raw bytes, and `text` as str; any other is refused with its encoding. Raw
bytes do not say what a token is, so `--token-type` has to.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

import cache
from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

INDEX = "index.json"
TOKEN_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
TOKENS = ("tokens", "input_ids")
# Code of a dtype in the first byte of a value whose encoding does not name it; only those of whole numbers.
_CODES = dict(zip((8, 9, 16, 17, 32, 33, 64, 65), TOKEN_TYPES, strict=True))
_SHAPES = ("uint8", "uint16", "uint32", "uint64")
# How each compression's package is named, its module, and what it raises for damaged bytes.
_PACKAGES = {
    "br": ("brotli", "brotli", "error"),
    "snappy": ("python-snappy", "snappy", "UncompressError"),
    "zstd": ("zstandard", "zstandard", "ZstdError"),
}
_COMPRESSIONS = ("gz", "bz2", *_PACKAGES)


@dataclass(frozen=True, kw_only=True)
class Column:
    """The column that is read: its place in a sample, and how its values are encoded."""

    place: int
    name: str
    encoding: str
    sizes: tuple[int | None, ...]

    def value(self, sample: bytes) -> bytes:
        """This column's bytes of a sample."""
        begin, lengths = 0, []
        for fixed in self.sizes:
            if fixed:
                lengths.append(fixed)
                continue
            lengths.append(struct.unpack_from("<I", sample, begin)[0])
            begin += 4
        begin += sum(lengths[: self.place])
        return sample[begin : begin + lengths[self.place]]


class Shards:
    """The rows of a folder, numbered through all of its shards."""

    def __init__(self, folder: Path, *, token_type: str | None = None) -> None:
        self.folder = folder
        shards = _index(folder)
        self.column = _column(folder, shards)
        self.tokens_of = None if self.column.encoding == "str" else decoder(folder, self.column, token_type)
        self.ends = list(accumulate(shard["samples"] for shard in shards))
        self.files = [_raw(folder, shard) for shard in shards]
        self.mapped: dict[int, npt.NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        """How many rows."""
        rows: int = self.ends[-1]
        return rows

    @property
    def is_text(self) -> bool:
        """Whether rows are texts, which still need a tokenizer."""
        return self.tokens_of is None

    def tokens(self, number: int) -> npt.NDArray[Any]:
        """The token ids of a row, in their own type."""
        assert self.tokens_of is not None, "this column holds texts"
        return self.tokens_of(self.raw(number))

    def text(self, number: int) -> str:
        """The text of a row."""
        return self.raw(number).decode()

    def raw(self, number: int) -> bytes:
        """The bytes of the column in this row."""
        shard = int(np.searchsorted(self.ends, number, side="right"))
        local = number - (self.ends[shard - 1] if shard else 0)
        if shard not in self.mapped:
            self.mapped[shard] = np.memmap(self.files[shard], dtype=np.uint8, mode="r")
        data = self.mapped[shard]
        begin, end = struct.unpack_from("<2I", data, 4 + 4 * local)
        return self.column.value(bytes(data[begin:end]))


def is_shards(folder: Path) -> bool:
    """Whether a folder is one of MDS shards."""
    return (folder / INDEX).is_file()


def _index(folder: Path) -> list[dict[str, Any]]:
    """The shards of index.json."""
    try:
        shards = json.loads((folder / INDEX).read_text())["shards"]
        known = {(shard["format"], shard["version"]) for shard in shards}
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(f"{folder / INDEX}: not an index of MosaicML streaming: {error!r}") from error
    if known != {("mds", 2)}:
        raise RefusedError(f"{folder / INDEX}: expected shards of format mds, version 2; got {sorted(known)}")
    found: list[dict[str, Any]] = shards
    return found


def _column(folder: Path, shards: list[dict[str, Any]]) -> Column:
    """The column of tokens or text, the same in every shard."""
    layouts = {
        tuple(zip(s["column_names"], s["column_encodings"], s["column_sizes"], strict=True)) for s in shards
    }
    if len(layouts) != 1:
        raise RefusedError(f"{folder}: its shards have different columns: {sorted(map(str, layouts))}")
    (layout,) = layouts
    names = [name for name, _, _ in layout]
    wanted = next((name for name in (*TOKENS, "text") if name in names), None)
    if wanted is None:
        got = ", ".join(f"{name} ({encoding})" for name, encoding, _ in layout)
        raise RefusedError(f"{folder}: expected a column tokens, input_ids or text; got {got}")
    place = names.index(wanted)
    encoding, sizes = layout[place][1], tuple(size for _, _, size in layout)
    if (wanted == "text") != (encoding == "str"):
        raise _unknown(folder, wanted, encoding)
    return Column(place=place, name=wanted, encoding=encoding, sizes=sizes)


def _unknown(folder: Path, name: str, encoding: str) -> RefusedError:
    types = ", ".join(TOKEN_TYPES)
    return RefusedError(
        f"{folder}: column {name} is encoded as {encoding}; known are ndarray[:TYPE[:LENGTH]] and bytes of "
        f"{types} for tokens, and str for text. Convert it, for example with LLM Foundry's data_prep scripts"
    )


def decoder(folder: Path, column: Column, token_type: str | None) -> Callable[[bytes], npt.NDArray[Any]]:
    """How the bytes of a value become token ids. Raises RefusedError for an encoding that is not known."""
    kind, _, rest = column.encoding.partition(":")
    named, _, shape = rest.partition(":")
    if kind == "bytes":
        return _of_bytes(folder, column, token_type)
    if kind != "ndarray" or (named and named not in TOKEN_TYPES) or "," in shape:
        raise _unknown(folder, column.name, column.encoding)
    if token_type is not None and token_type != (named or token_type):
        raise RefusedError(f"{folder}: column {column.name} is {column.encoding}, --token-type {token_type}")

    def decode(value: bytes) -> npt.NDArray[Any]:
        if named and shape:
            return np.frombuffer(value, named)
        kind_of, begin = (named, 0) if named else (_coded(folder, column, value[0]), 1)
        if not shape:
            begin = _after_shape(folder, column, value, begin)
        return np.frombuffer(value, kind_of, offset=begin)

    return decode


def _of_bytes(folder: Path, column: Column, token_type: str | None) -> Callable[[bytes], npt.NDArray[Any]]:
    if token_type is None:
        raise RefusedError(
            f"{folder}: column {column.name} is encoded as bytes, without the type of a token; name "
            f"it with --token-type: {', '.join(TOKEN_TYPES)} (LLM Foundry's converters wrote int64)"
        )
    size = np.dtype(token_type).itemsize

    def decode(value: bytes) -> npt.NDArray[Any]:
        if len(value) % size:
            raise RefusedError(
                f"{folder}: a row of column {column.name} has {len(value)} bytes, which are not tokens of "
                f"{token_type} ({size} bytes each); give another --token-type"
            )
        return np.frombuffer(value, token_type)

    return decode


def _coded(folder: Path, column: Column, code: int) -> str:
    if code not in _CODES:
        raise RefusedError(
            f"{folder}: a row of column {column.name} ({column.encoding}) has type code {code}, "
            f"expected one of whole numbers: {_CODES}"
        )
    return _CODES[code]


def _after_shape(folder: Path, column: Column, value: bytes, begin: int) -> int:
    """Where the values begin: behind one byte (dimensions x 4 + type of the shape) and the shape."""
    dimensions, kind = divmod(value[begin], 4)
    if dimensions != 1:
        raise RefusedError(
            f"{folder}: a row of column {column.name} ({column.encoding}) has {dimensions} dimensions, "
            "expected 1"
        )
    size: int = np.dtype(_SHAPES[kind]).itemsize
    return begin + 1 + size


def _raw(folder: Path, shard: dict[str, Any]) -> Path:
    """The uncompressed file of a shard; a compressed one is unpacked into the cache, once."""
    raw: Path = folder / shard["raw_data"]["basename"]
    expected = shard["raw_data"]["bytes"]
    if raw.is_file():
        if raw.stat().st_size != expected:
            raise RefusedError(f"{raw}: {raw.stat().st_size} bytes, {INDEX} says {expected}; copy it again")
        return raw
    packed = folder / shard["zip_data"]["basename"] if shard["zip_data"] else None
    if packed is None or not packed.is_file():
        raise RefusedError(f"{raw}: missing{f', and so is {packed.name}' if packed else ''}; copy it again")
    return cache.file(packed, raw.name, lambda: _unpacked(packed, shard["compression"], expected))


def _unpacked(packed: Path, compression: str, expected: int) -> bytes:
    family = compression.partition(":")[0]
    if family not in _COMPRESSIONS:
        raise RefusedError(f"{packed}: unknown compression {compression}; known: {', '.join(_COMPRESSIONS)}")
    unpack, damaged = _reader(packed, family)
    try:
        data: bytes = unpack(packed.read_bytes())
    except damaged as error:
        raise RefusedError(f"{packed}: damaged, {family} says {error}; copy it again") from error
    if len(data) != expected:
        raise RefusedError(
            f"{packed}: {len(data)} bytes when unpacked, {INDEX} says {expected}; copy it again"
        )
    return data


def _reader(packed: Path, family: str) -> tuple[Callable[[bytes], Any], tuple[type[Exception], ...]]:
    """The function that unpacks bytes of this compression, and what it raises for damaged ones."""
    if family in {"gz", "bz2"}:
        return (gzip if family == "gz" else bz2).decompress, (OSError, EOFError, ValueError, zlib.error)
    package, name, error = _PACKAGES[family]
    try:
        module = importlib.import_module(name)
    except ImportError as missing:
        raise RefusedError(f"{packed}: compressed with {family}; pip install {package}") from missing
    if family == "zstd":
        reader = module.ZstdDecompressor().stream_reader
        return lambda data: reader(data, read_across_frames=True).read(), (module.ZstdError,)
    return module.decompress, (getattr(module, error),)
