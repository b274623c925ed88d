"""What an image is: its digests, its layers with their sizes, and the layout that holds it.

In: an OCI image layout. Out: an `Image`; it is saved as `image.json`.
"""

import dataclasses
import datetime as dt
import itertools
import json
from collections.abc import (
    Mapping,  # pydantic reads annotations at run time
    Sequence,
)
from pathlib import Path  # the same
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.oci.image_layout import ImageLayout

How = Literal["built", "cached", "shared", "handed over"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer."""

    digest: str  # of the blob as stored
    size_bytes: int  # unpacked
    created_by: str  # the Dockerfile's step


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageUse:
    """Where one stage of an image came from.

    Attributes:
        how: `built` in this build; `cached`: the engine had every step of it; `shared`: built or found once
            for several images of this build; `handed over` by the wheel cache.
    """

    name: str
    key: str  # equal for equal stages, in any stack
    how: How


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """An image in the engine and, with exactly the same manifest, in a layout.

    Attributes:
        shared_bytes: Size of its layers that images of other stacks here have too: they are stored once.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of image.json
    stack_id: str | None  # the stack it was built from; None for an image from elsewhere
    reference: str  # what `docker run` takes
    config_digest: str  # ties a test run to what is published
    manifest_digest: str  # the one manifest in `layout`
    layout: Path
    size_bytes: int  # unpacked
    layers: tuple[Layer, ...]
    reused: bool  # whether it existed already
    seconds: float
    key: str = ""  # hash of everything that decided it
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # URI -> digest of what went in
    built: str = ""  # when, RFC 3339
    engine: str = ""
    stages: tuple[StageUse, ...] = ()  # where each stage came from when it was built
    shared_bytes: int = 0
    base_from: str = ""  # where the packages of a base that was made here came from


_IMAGE = TypeAdapter(Image)


def describe(
    layout: Path,
    *,
    sizes: Sequence[int],
    stack_id: str | None,
    reference: str,
    seconds: float,
    key: str,
    inputs: Mapping[str, str],
) -> Image:
    """An image's facts: from its layout, and the engine's unpacked size of each step of the history."""
    stored = ImageLayout(layout)
    manifest, config = stored.image(), stored.config()
    entries = manifest.document["layers"]
    layers = _layers(entries, config.get("history") or [], sizes, where=reference)
    return Image(
        stack_id=stack_id,
        reference=reference,
        config_digest=manifest.document["config"]["digest"],
        manifest_digest=manifest.digest,
        layout=layout,
        size_bytes=sum(layer.size_bytes for layer in layers),
        layers=layers,
        reused=False,
        seconds=seconds,
        key=key,
        inputs=dict(inputs),
        built=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    )


def _layers(
    entries: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    *,
    where: str,
) -> tuple[Layer, ...]:
    """Each layer with the step that made it; the engine's sizes are those of the steps."""
    steps = [not step.get("empty_layer") for step in history]
    if len(sizes) != len(history) or len(entries) != sum(steps):
        raise ConfigurationError(
            "the image's history does not match its layers",
            where=where,
            got=f"{len(history)} steps, {len(entries)} layers, {len(sizes)} sizes by the engine",
            expected="an image whose builder records its history",
        )
    made = itertools.compress(zip(sizes, history, strict=True), steps)
    return tuple(
        Layer(digest=entry["digest"], size_bytes=size, created_by=step.get("created_by", ""))
        for entry, (size, step) in zip(entries, made, strict=True)
    )


def save_image(image: Image, path: Path) -> None:
    """Write `image.json`, whole or not at all; the layout is beside it."""
    document = {"schema_version": 1, **dataclasses.asdict(image)}
    del document["layout"], document["reused"]
    write_atomically(path, ((json.dumps(document, indent=1) + "\n").encode(),))


def load_image(path: Path) -> Image:
    """Read `image.json`; the layout is the folder `oci` beside it.

    Raises:
        ConfigurationError: The file does not exist, or was not written by this version of stackcheck.
    """
    here = {"layout": str(path.parent / "oci"), "reused": True}
    try:
        stored = json.loads(path.read_bytes())
        stored.pop("schema_version")
        return _IMAGE.validate_json(json.dumps(stored | here), strict=True)
    except OSError as error:
        raise ConfigurationError(
            "no image has been built here",
            where=str(path),
            got=error.strerror,
            next_step=f"stackcheck build {path.parent.name}",
        ) from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:  # pydantic's error is a ValueError
        raise ConfigurationError(
            "image.json is damaged, or from another version of stackcheck",
            where=str(path),
            got=str(error),
            next_step=f"remove it, then: stackcheck build {path.parent.name}",
        ) from error


def size_report(image: Image, budget_bytes: int | None = None) -> tuple[str, ...]:
    """One line for each layer, the largest first, with a mark at the layer that exceeds the budget."""
    sums = itertools.accumulate(layer.size_bytes for layer in image.layers)
    over = next(
        (n for n, total in enumerate(sums) if budget_bytes is not None and total > budget_bytes), None
    )
    layers = sorted(enumerate(image.layers), key=lambda item: -item[1].size_bytes)
    return tuple(
        f"{layer.size_bytes / 1e6:9.1f} MB  layer {number + 1}: {' '.join(layer.created_by.split())[:80]}"
        + ("  <- exceeds the budget" if number == over else "")
        for number, layer in layers
    )
