"""Open the path of --data as a source of samples. In: options. Out: samples, or a refusal.

Apart from data.py because it needs numpy, which synthetic data does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import arrow
import cache
import corpus
import shards
import streams
from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from options import Options


def open_path(options: Options, *, vocab: int, seq_len: int) -> streams.Stream | streams.Rowwise:
    """The source that --data names: a path, or this machine's corpus."""
    path = corpus.made() / "corpus.jsonl" if options.data == "corpus" else Path(options.data)
    if not path.exists():
        raise RefusedError(
            f"--data {path}: does not exist; name synthetic, text, corpus, or a file or folder of data"
        )
    common = {"vocab": vocab, "seq_len": seq_len, "seed": options.seed}
    rows = opened(path, options)
    if isinstance(rows, streams.TextFiles) or rows.is_text or options.pack:
        return _joined(path, rows, options, common)
    labels_of = rows.labels if isinstance(rows, arrow.Arrow) and options.labels else None
    return streams.Rowwise(rows_of=rows, name=str(path), labels_of=labels_of, **common)


def opened(path: Path, options: Options) -> streams.TextFiles | shards.Shards | arrow.Arrow:
    """What lies at this path: MDS shards, a data set of Hugging Face, or texts."""
    if options.labels is not None and not arrow.is_arrow(path):
        raise RefusedError(f"--labels names a column of a data set of Hugging Face; {path} is none")
    if shards.is_shards(path):
        return shards.Shards(path, token_type=options.token_type)
    if options.token_type is not None:
        raise RefusedError(f"--token-type is for MosaicML streaming shards only; {path} has none")
    return arrow.Arrow(path, options.labels) if arrow.is_arrow(path) else streams.TextFiles(path)


def _joined(path: Path, rows: Any, options: Options, common: dict[str, int]) -> streams.Stream:
    """All documents in one stream; texts go through the tokenizer on the way."""
    by = streams.tokenizer(options.tokenizer)
    inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    identity = cache.key([cache.seen(one) for one in inside], by.identity, options.token_type)
    documents = streams.tokenized(_texts(rows), by) if rows.is_text else _token_rows(path, rows)
    return streams.stream(documents, identity, masked=options.pack == "masked", **common)


def _texts(rows: Any) -> Iterator[str]:
    if isinstance(rows, streams.TextFiles):
        yield from rows
    else:
        yield from (rows.text(number) for number in range(len(rows)))


def _token_rows(path: Path, rows: shards.Shards | arrow.Arrow) -> Iterator[Any]:
    for number in range(len(rows)):
        yield streams.in_vocabulary(rows.tokens(number), 2**32, f"{path}: row {number}")
