"""A data set that Hugging Face `datasets` saved to disk. In: its folder. Out: rows of tokens, or texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from errors import RefusedError
from shards import TOKENS

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

_WHOLE = ("int", "uint")  # how the names of whole types begin in pyarrow


def is_arrow(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


class Arrow:
    """The rows of a data set, memory-mapped. `labels`: the column of its own labels."""

    def __init__(self, folder: Path, labels: str | None = None) -> None:
        try:
            import datasets
        except ImportError as error:
            raise RefusedError(
                f"{folder} was written by Hugging Face datasets; pip install datasets"
            ) from error
        if (folder / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
            raise RefusedError(f"{folder} holds several splits; name one: --data {folder}/SPLIT ({splits})")
        self.folder = folder
        found = datasets.load_from_disk(str(folder), keep_in_memory=False)
        self.name = _column(folder, found.features)
        self.column = labels
        if labels is not None and (self.is_text or not _whole(found.features.get(labels))):
            raise RefusedError(
                f"{folder}: --labels {labels} is no column of lists of whole numbers beside one of tokens; "
                f"got {', '.join(found.features)}"
            )
        names = [self.name] if labels is None else [self.name, labels]
        self.rows = found.select_columns(names).with_format("arrow" if self.is_text else "numpy")

    def __len__(self) -> int:
        """How many rows."""
        return len(self.rows)

    @property
    def is_text(self) -> bool:
        """Whether rows are texts, which still need a tokenizer."""
        return self.name == "text"

    def tokens(self, number: int) -> npt.NDArray[Any]:
        """The token ids of a row."""
        return np.asarray(self.rows[number][self.name])

    def labels(self, number: int) -> npt.NDArray[Any]:
        """Each token of a row as a label, IGNORED where none is learnt."""
        return np.asarray(self.rows[number][self.column])

    def text(self, number: int) -> str:
        """The text of a row."""
        return str(self.rows[number][self.name][0].as_py())


def _whole(feature: Any) -> bool:
    """Whether a column has lists of whole numbers."""
    dtype: str = getattr(getattr(feature, "feature", None), "dtype", "")
    return dtype.startswith(_WHOLE)


def _column(folder: Path, features: Any) -> str:
    """The column of tokens, or else of text. Raises RefusedError with the types of what is there."""
    kinds = {name: str(feature) for name, feature in features.items()}
    for name in TOKENS:
        if _whole(features.get(name)):
            return name
    if getattr(features.get("text"), "dtype", None) in {"string", "large_string"}:
        return "text"
    raise RefusedError(
        f"{folder}: expected a column {' or '.join(TOKENS)} of lists of whole numbers, or text of "
        f"strings; got {kinds}"
    )
