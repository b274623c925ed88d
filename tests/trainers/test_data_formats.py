"""Data that users bring, in files of the real packages: every token as it was written, in one order."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mosaic
import numpy as np
import pytest
import torch

import cache
import data
import options
from errors import RefusedError

SEQ, ROWS = 16, 12
PARSED = options.parse([])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def rows_of(dtype: str, *, top: int = 200, length: int = SEQ + 1) -> list[Any]:
    drawn = np.random.default_rng(3)
    return [drawn.integers(0, top, length).astype(dtype) for _ in range(ROWS)]


def opened(path: Path, *, vocab: int = 70_000, **given: Any) -> Any:
    return data.open_source(replace(PARSED, data=str(path), **given), vocab=vocab, seq_len=SEQ)


def epoch(source: Any, count: int = ROWS) -> list[bytes]:
    return sorted(source.sample(number).numpy().tobytes() for number in range(count))


@pytest.mark.parametrize(
    ("encoding", "dtype", "how"),
    [
        ("ndarray:int32", "int32", {}),
        ("ndarray:uint16", "uint16", {"size_limit": 300}),
        (f"ndarray:uint32:{SEQ + 1}", "uint32", {"compression": "zstd:7", "hashes": ["sha1"]}),
        ("ndarray", "int64", {"compression": "gz:5"}),
        ("bytes", "int64", {}),
        ("bytes", "uint16", {"compression": "br:5", "size_limit": 300}),
    ],
)
def test_shards_of_the_real_writer_are_read_as_they_were_written(encoding, dtype, how, tmp_path):
    rows = rows_of(dtype, top=60_000 if dtype != "uint8" else 200)
    folder = mosaic.write(tmp_path / "shards", encoding, rows, **how)
    source = opened(folder, token_type=dtype if encoding == "bytes" else None)
    assert epoch(source) == sorted(row.astype(np.int64).tobytes() for row in rows)
    if "size_limit" in how:
        assert len(list(folder.glob("shard.*"))) > 1
    assert bool(list(tmp_path.glob("cache/*/shard*"))) == ("compression" in how), (
        "unpacked once, in the cache"
    )
    assert not list(folder.glob("*.mds")) or "compression" not in how, "the folder of the data stays as it is"


def test_what_is_not_known_is_refused_with_its_encoding(tmp_path):
    raw = mosaic.write(tmp_path / "raw", "bytes", rows_of("int64"))
    with pytest.raises(RefusedError, match=r"column tokens is encoded as bytes, .*--token-type: uint8, int8"):
        opened(raw)
    with pytest.raises(RefusedError, match=r"row .* has tokens from .* the model knows 0 to 69999"):
        epoch(
            opened(
                mosaic.write(tmp_path / "large", "bytes", [row + 70_000 for row in rows_of("int64")]),
                token_type="int64",
            )
        )
    odd = mosaic.write(tmp_path / "odd", "bytes", [np.zeros(33, np.uint8)] * 3)
    with pytest.raises(RefusedError, match=r"33 bytes, which are not tokens of int64 \(8 bytes each\)"):
        opened(odd, token_type="int64").sample(0)
    floats = mosaic.write(tmp_path / "floats", "ndarray:float32", rows_of("float32"))
    with pytest.raises(RefusedError, match="column tokens is encoded as ndarray:float32; known are ndarray"):
        opened(floats)
    unnamed = mosaic.write(tmp_path / "unnamed", "ndarray", rows_of("float32"))
    with pytest.raises(RefusedError, match=r"\(ndarray\) has type code 34, expected one of whole numbers"):
        opened(unnamed).sample(0)
    pickled = mosaic.write(tmp_path / "pickled", "pkl", rows_of("int64"))
    with pytest.raises(RefusedError, match="column tokens is encoded as pkl"):
        opened(pickled)
    other = mosaic.write(tmp_path / "other", "int", list(range(3)), column="label")
    with pytest.raises(RefusedError, match=r"expected a column tokens, input_ids or text; got label \(int\)"):
        opened(other)
    cut = mosaic.write(tmp_path / "cut", "ndarray:int32", rows_of("int32")) / "shard.00000.mds"
    cut.write_bytes(cut.read_bytes()[:-4])
    with pytest.raises(RefusedError, match=r"index.json says .*; copy it again"):
        opened(cut.parent)
    short = mosaic.write(tmp_path / "short", "ndarray:int32", rows_of("int32", length=5))
    with pytest.raises(
        RefusedError, match=r"has 5 tokens, --seq-len 16 needs 17; lower it, or join rows with --pack"
    ):
        opened(short).sample(0)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other bytes"])
@pytest.mark.parametrize("compression", ["gz", "bz2", "zstd", "br", "snappy"])
def test_a_damaged_compressed_shard_is_refused(compression, damage, tmp_path):
    folder = mosaic.write(tmp_path / "shards", "ndarray:int32", rows_of("int32"), compression=compression)
    assert epoch(opened(folder)), "it is read before it is damaged"
    (packed,) = folder.glob("shard.*")
    whole = packed.read_bytes()
    flipped = bytes([whole[0] ^ 0xFF, *whole[1:]])
    new = {"cut": whole[:-9], "empty": b"", "flipped": flipped, "other bytes": bytes(range(256)) * 9}[damage]
    packed.write_bytes(new)
    with pytest.raises(RefusedError, match=f"{re.escape(str(packed))}: .*; copy it again"):
        epoch(opened(folder))


def test_a_saved_data_set_is_read_by_rows_or_tokenized(tmp_path):
    import datasets

    rows = rows_of("int64")
    mosaic.saved(tmp_path / "ids", [{"input_ids": row.tolist()} for row in rows])
    assert epoch(opened(tmp_path / "ids")) == sorted(row.tobytes() for row in rows)
    texts = [f"document {number}: " + "abc" * 20 for number in range(9)]
    whole = mosaic.saved(tmp_path / "texts", [{"text": text, "url": "x"} for text in texts])
    joined = "".join(text + "\0" for text in texts).encode()
    source = opened(tmp_path / "texts", vocab=256)
    assert bytes(source.tokens.astype(np.uint8)) == joined
    assert all(bytes(source.sample(n).tolist()) in joined for n in range(source.rows))
    datasets.DatasetDict({"train": datasets.load_from_disk(str(whole))}).save_to_disk(tmp_path / "splits")
    with pytest.raises(RefusedError, match=r"several splits; name one: .*/SPLIT \(train\)"):
        opened(tmp_path / "splits")
    mosaic.saved(tmp_path / "labels", [{"label": 1.5}])
    with pytest.raises(
        RefusedError, match="expected a column tokens or input_ids of lists of whole numbers, or text"
    ):
        opened(tmp_path / "labels")


def test_texts_go_through_a_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = [f"w{n} " * 30 for n in range(4)]
    inner.train_from_iterator(texts, tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"]))
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = opened(tmp_path / "lines.jsonl", tokenizer=str(tmp_path / "tokenizer.json"))
    assert len(source.tokens) == 4 * 31
    assert [inner.id_to_token(int(n)) for n in source.tokens[30:32]] == ["</s>", "w1"]
    with pytest.raises(RefusedError, match=r"data has token \d, the model knows 0 to 1; take the tokenizer"):
        opened(tmp_path / "lines.jsonl", vocab=2, tokenizer=str(tmp_path / "tokenizer.json"))
    (tmp_path / "lines.jsonl").write_text('{"txt": "a"}\n')
    with pytest.raises(RefusedError, match=r'lines.jsonl:1: expected \{"text": …\}'):
        opened(tmp_path / "lines.jsonl")
    with pytest.raises(RefusedError, match="does not exist; name synthetic, text, corpus, or a file"):
        opened(tmp_path / "nothing")


def test_packed_samples_say_which_document_each_token_is_of(tmp_path):
    lengths = [3, 40, 1, 9, 21, 30]
    rows = [np.full(length, number, np.uint16) for number, length in enumerate(lengths)]
    folder = mosaic.write(tmp_path / "ragged", "ndarray:uint16", rows)
    source = opened(folder, pack="masked", vocab=6)
    assert source.rows == (sum(lengths) - 1) // SEQ
    for number in range(2 * source.rows):
        tokens, documents = source.sample(number)
        assert torch.equal(documents, torch.unique_consecutive(tokens, return_inverse=True)[1])
    batch = data.batch(source, range(2), CPU)
    assert [tuple(batch[name].shape) for name in ("tokens", "labels")] == [(2, SEQ)] * 2
    begins = batch["documents"].tolist()
    tokens = batch["tokens"].flatten().tolist()
    new = [at for at in range(2 * SEQ) if at in {0, SEQ} or tokens[at] != tokens[at - 1]]
    assert begins == [*new, 2 * SEQ], "documents end with their sample"
    plain = opened(folder, pack="concat", vocab=6)
    assert torch.equal(plain.sample(3), source.sample(3)[0])
    assert set(data.batch(plain, range(2), CPU)) == {"tokens", "labels"}


def test_the_corpus_is_text_of_this_machine_and_keeps_some_back(tmp_path):
    import corpus

    here = [Path(json.__file__).parents[1]]
    facts = corpus.write(tmp_path / "a", here, enough=2_000_000, least=1_000_000)
    kept = [json.loads(line)["text"] for line in (tmp_path / "a/corpus.jsonl").open()]
    held = [json.loads(line)["text"] for line in (tmp_path / "a/heldout.jsonl").open()]
    assert facts["documents"] == len(kept) == len(set(kept))
    assert facts["bytes"] == sum(len(text.encode()) for text in kept) >= 2_000_000
    assert held
    assert not set(held) & set(kept)
    assert corpus.write(tmp_path / "b", here, enough=2_000_000, least=1_000_000)["sha256"] == facts["sha256"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match=r"have 0.0 MB of text, expected at least 50"):
        corpus.write(tmp_path / "c", [tmp_path / "empty"])
