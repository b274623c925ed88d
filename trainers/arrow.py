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
    """The rows of a data set, memory-mapped."""

    def __init__(self, folder: Path) -> None:
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
        self.rows = found.select_columns([self.name]).with_format("arrow" if self.is_text else "numpy")

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

    def text(self, number: int) -> str:
        """The text of a row."""
        return str(self.rows[number][self.name][0].as_py())


def _column(folder: Path, features: Any) -> str:
    """The column of tokens, or else of text. Raises RefusedError with the types of what is there."""
    kinds = {name: str(feature) for name, feature in features.items()}
    for name in TOKENS:
        inner = getattr(features.get(name), "feature", None)
        if name in features and getattr(inner, "dtype", "").startswith(_WHOLE):
            return name
    if getattr(features.get("text"), "dtype", None) in {"string", "large_string"}:
        return "text"
    raise RefusedError(
        f"{folder}: expected a column {' or '.join(TOKENS)} of lists of whole numbers, or text of "
        f"strings; got {kinds}"
    )
