"""The published figures beside which ours stand. In: rows.yaml. Out: one Row each, or RefusedError.

The file is read strictly: an unknown key, a second row of an id, a number that is not finite or a job that
does not exist is refused, with its place. What our trainers measure is never in it.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from errors import RefusedError

FILE = Path(__file__).with_name("rows.yaml")

# metric -> the units that its value may have.
METRICS: dict[str, tuple[str, ...]] = {
    "tflops_noncausal": ("TFLOP/s/GPU",), "tflops_hardware": ("TFLOP/s/GPU",),
    "images_per_s": ("images/s/GPU",), "peak_share_hardware": ("%",), "attention_gain": ("%", "x"),
    "compile_ratio": ("x",), "tensor_parallel_ratio": ("x",), "pipeline_parallel_ratio": ("x",),
    "weak_scaling": ("%",), "strong_scaling": ("%",), "speed_ratio": ("%",), "speed_ratio_one_head": ("%",),
    "stack_ratio": ("x",), "accuracy": ("share",), "mean_accuracy": ("share",), "batches": ("batches",),
    "steps": ("steps",), "tokens": ("tokens",), "seconds": ("s",), "dollars_per_hour": ("$/h/GPU",),
    "spot_dollars_per_hour": ("$/h/GPU",), "dollars_per_1t_tokens": ("$",),
    "estimated_tokens_per_s": ("tokens/s/GPU",), "parameters": ("parameters",),
    "active_parameters": ("parameters",), "tensor_parallel_ranks": ("GPUs",), "peak_tflops": ("TFLOP/s",),
    "memory_gb": ("GB",), "memory_gb_per_s": ("GB/s",), "power_w": ("W",),
}  # fmt: skip
TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "piqa", "winograd", "winogrande")

Value = float | tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure; rows.yaml says what each key means. `flags`: of its job, for train.py."""

    document: str
    id: str
    metric: str
    value: Value
    unit: str
    convention: Literal["noncausal", "causal", "hardware", "none"]
    source: str
    flags: tuple[str, ...] = ()
    job: str | None = None
    precision: Literal["fp16", "bf16", "fp8"] | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    device: str | None = None
    device_unit: Literal["gpu", "card", "gcd"] = "gpu"
    count: int | None = None
    against: str | None = None
    task: str | None = None
    tokens_per_s: float | None = None
    dollars_per_hour: float | None = None

    @property
    def middle(self) -> float | None:
        """The value, or the middle of its range."""
        return sum(self.value) / 2 if isinstance(self.value, tuple) else self.value


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of published figures with its rows, in the order of the file."""

    name: str
    title: str
    rows: tuple[Row, ...]


_GIVEN = {field.name for field in fields(Row)} - {"document", "flags"}
_NEEDED = {field.name for field in fields(Row) if field.default is MISSING} - {"document"}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "convention": ("noncausal", "causal", "hardware", "none"),
    "precision": ("fp16", "bf16", "fp8"),
    "device_unit": ("gpu", "card", "gcd"),
    "task": (*TASKS, "average"),
    "metric": tuple(METRICS),
}
_WHOLE = ("micro_batch", "global_batch", "seq_len", "count")


def load_rows(path: Path = FILE) -> dict[str, Document]:
    """Every document by its name. Raises RefusedError with the place of what is wrong."""
    found = _mapping(_parsed(path), str(path))
    return {name: _document(path, name, content) for name, content in found.items()}


def document(name: str, path: Path = FILE) -> Document:
    """The document of this name."""
    every = load_rows(path)
    if name not in every:
        raise RefusedError(f"no document {name}; {path.name} has {', '.join(every)}")
    return every[name]


def _parsed(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise RefusedError(f"{path} needs PyYAML to be read; pip install PyYAML") from error

    class Strict(yaml.SafeLoader):
        """YAML lets a second key of the same name win silently; here it is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
            twice = sorted({str(key) for key in keys if keys.count(key) > 1})
            if twice:
                line = node.start_mark.line + 1
                raise RefusedError(f"{path}:{line}: {', '.join(twice)} is there twice; keep one")
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    try:
        return yaml.load(path.read_text(), Loader=Strict)  # a SafeLoader
    except yaml.YAMLError as error:
        raise RefusedError(f"{path}: not YAML: {error}") from error


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RefusedError(f"{where}: expected a mapping, got {type(value).__name__}")
    return value


def _document(path: Path, name: str, content: Any) -> Document:
    where = f"{path.name}: {name}"
    facts = _mapping(content, where)
    keys = {"title", "defaults", "jobs", "rows"}
    if set(facts) != keys:
        raise RefusedError(f"{where}: expected the keys {sorted(keys)}, got {sorted(facts)}")
    defaults, jobs = _mapping(facts["defaults"], where), _mapping(facts["jobs"], where)
    rows = tuple(_row(name, {**defaults, **_mapping(row, where)}, jobs, where) for row in facts["rows"])
    ids = [row.id for row in rows]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice or not rows:
        raise RefusedError(f"{where}: expected rows with different ids, got twice: {', '.join(twice)}")
    return Document(name=name, title=str(facts["title"]), rows=rows)


def _row(document: str, given: dict[str, Any], jobs: dict[str, Any], where: str) -> Row:
    where = f"{where}: row {given.get('id', '?')}"
    wrong, absent = sorted(set(given) - _GIVEN), sorted(_NEEDED - set(given))
    if wrong or absent:
        raise RefusedError(f"{where}: unknown keys {wrong}, missing keys {absent}")
    for key, known in _CHOICES.items():
        if key in given and given[key] not in known:
            raise RefusedError(f"{where}: {key} is {given[key]!r}, expected one of {', '.join(known)}")
    for key in _WHOLE:
        if key in given and (type(given[key]) is not int or given[key] < 1):
            raise RefusedError(f"{where}: {key} is {given[key]!r}, expected a whole number above 0")
    if given["unit"] not in METRICS[given["metric"]]:
        expected = " or ".join(METRICS[given["metric"]])
        raise RefusedError(f"{where}: {given['metric']} in {given['unit']!r}, expected {expected}")
    job = given.get("job")
    if job is not None and job not in jobs:
        raise RefusedError(f"{where}: no job {job}; jobs: {', '.join(jobs)}")
    flags = tuple(shlex.split(jobs[job])) if job else ()
    return Row(document=document, flags=flags, **{**given, "value": _value(given["value"], where)})


def _value(given: Any, where: str) -> Value:
    if given is None:
        return None
    numbers = given if isinstance(given, list) else [given]
    sound = all(type(n) in {int, float} and math.isfinite(n) and n > 0 for n in numbers)
    if not sound or len(numbers) > 2 or sorted(numbers) != numbers or not numbers:
        raise RefusedError(f"{where}: value is {given!r}, expected a number above 0, or [low, high], or null")
    return (float(numbers[0]), float(numbers[1])) if len(numbers) == 2 else float(numbers[0])
