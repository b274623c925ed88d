"""The image under test, with the checks and machines it is judged by.

In: STACK|IMAGE as the user typed it, or a built stack. Out: a `Subject`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackcheck import vendors
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.imaging.image import Image, load_image
from stackcheck.matrix import resolve
from stackcheck.matrix.matrix import TestTarget
from stackcheck.matrix.stack import STACK_LABEL, Stack
from stackcheck.oci.tags import label
from stackcheck.policy import Policy
from stackcheck.vendors import Vendor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """An image under test.

    Attributes:
        stack: The stack that the image was built from, or that its label names; None for any other image.
        machines: The machines (device model and count) that the stack names: the run must be on one of them.
            None, also for an image without a stack: any machine with a complete set of bounds.
        accepted_python: Digests of the files that may be the image's Python although no package owns them.
    """

    name: str  # stack id, or the reference in a form that is valid as a tag; also the folder under `build/`
    image: Image
    vendor: Vendor
    policy: Policy  # what a certificate requires
    stack: Stack | None
    machines: tuple[TestTarget, ...] | None
    provenance: Provenance  # how the image was built
    experimental: bool = False  # whether the matrix marks the combination as experimental
    accepted_python: tuple[str, ...] = ()

    @property
    def as_tested(self) -> dict[str, str | None]:
        """The image as run.json and a result name it.

        An image from elsewhere is run by its id, or by a name that only one engine has. People and the
        history know it by the name under which it was tested.
        """
        return {
            "reference": self.image.reference if self.image.stack_id else self.name,
            "config_digest": self.image.config_digest,
            "manifest_digest": self.image.manifest_digest,
        }


def of_stack(stack: Stack, image: Image, policy: Policy, *, vendor: Vendor | None = None) -> Subject:
    """The subject of a stack that was built here; `vendor` overrides the stack's own."""
    return Subject(
        name=stack.id,
        image=image,
        vendor=vendor or stack.vendor,
        policy=policy,
        stack=stack,
        machines=stack.tested_on,
        provenance=of_build(stack, image),
        experimental=stack.experimental,
    )


def of_image(
    image: Image,
    policy: Policy,
    stack: Stack | None,
    *,
    name: str,
    vendor: Vendor | None,
    accepted_python: tuple[str, ...] = (),
) -> Subject:
    """The subject of an image that was not built in this checkout, so that its provenance is not known.

    `stack` is the one that the image's label names: its machines and declaration apply. Without one any
    machine is accepted, and the image declares nothing. The vendor is that of the stack, else of this host.
    """
    chosen = vendor or (stack.vendor if stack else vendors.detect())
    return Subject(
        name=name,
        image=image,
        vendor=chosen,
        policy=policy,
        stack=stack,
        machines=stack.tested_on if stack else None,
        provenance=Provenance(
            parameters={
                "origin": "not built in this checkout" if stack else "not built by this project",
                "reference": image.reference,
            }
        ),
        experimental=stack.experimental if stack else False,
        accepted_python=accepted_python,
    )


def labelled_stack(labels: Mapping[str, str], root: Path, reference: str) -> Stack | None:
    """The stack that an image's label names; None if it has no such label.

    Raises:
        ConfigurationError: The matrix has no such stack, or a rule refuses it.
    """
    name = labels.get(STACK_LABEL)
    if not name:
        return None
    try:
        (found,) = _stacks(root, glob.escape(name))  # a label is a name, not a pattern
    except NothingSelectedError as error:
        raise ConfigurationError(
            "the image's stack is not in matrix.yaml",
            where=f"{reference}, label {STACK_LABEL}",
            got=name,
            expected="a stack id that `stackcheck list` shows",
            next_step="add the stack to matrix.yaml, or test an image without this label",
        ) from error
    except ConfigurationError as error:
        error.where = ", ".join(filter(None, (f"{reference}, label {STACK_LABEL}: {name}", error.where)))
        raise
    return found


def _stacks(root: Path, pattern: str) -> tuple[Stack, ...]:
    return resolve.load_stacks(root, (pattern,))


# https://pkg.go.dev/github.com/distribution/reference: an engine knows an image by such a name, or by its id.
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@[a-z0-9]+:[0-9a-fA-F]{{32,}})?",
    re.ASCII,
)


def is_reference(name: str) -> bool:
    """Whether a name is an image reference: stack ids contain neither `/`, `:` nor `@`."""
    return re.search(r"[/:@]", name) is not None


def _require_reference(name: str) -> None:
    if _REFERENCE.fullmatch(name):
        return
    raise ConfigurationError(
        "an engine has no image of such a name",
        got=name,
        expected="a stack id, or NAME:TAG or HOST/NAME:TAG in small letters, with or without @sha256:…",
        next_step=f"stackcheck pull {name}; then take the name that it prints"
        if name.startswith("oci:")
        else "docker images lists those that the engine has",
    )


def find_stack(name: str, root: Path) -> Stack | None:
    """The one stack that a name selects; None for an image reference.

    Raises:
        NothingSelectedError: The name matches no stack, or several.
        ConfigurationError: No engine can have an image of this name.
    """
    if is_reference(name):
        _require_reference(name)
        return None
    try:
        found = _stacks(root, name)
    except NothingSelectedError as error:
        error.next_step = f"stackcheck list; or, if it is an image, add its tag: {name}:latest"
        raise
    if len(found) > 1:
        raise NothingSelectedError(
            f"{name} matches {len(found)} stacks; this command takes one",
            got=", ".join(stack.id for stack in found),
            expected="one stack id, or an image reference",
            next_step=f"repeat the command with one of them, for example {found[0].id}",
        )
    return found[0]


def find_image(name: str, root: Path) -> Image:
    """The image that `stackcheck build` or `stackcheck test` exported under `build/`.

    Raises:
        NothingSelectedError: The name matches no stack, or several.
        ConfigurationError: The image was not built or tested in this checkout.
    """
    folder = root / "build" / label(name)
    # The folder comes first: an image may be older than a change that removed its stack from the matrix.
    if not (folder / "image.json").exists():
        found = find_stack(name, root)
        if found is None:
            raise ConfigurationError(
                "this image has not been tested in this checkout",
                where=str(folder / "image.json"),
                got=f"no such file for {name}",
                expected="the file that `stackcheck test` writes",
                next_step=f"stackcheck test {name}",
            )
        folder = root / "build" / found.id
    return load_image(folder / "image.json")


# Parameters that say what a site put in place of a registry (base) and of the indexes (wheels).
SITE_SOURCES = ("baseFrom", "wheelsFrom")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How an image was built.

    Attributes:
        dependencies: URI -> digest (`sha256:…`) of each input: Dockerfile, lock, base image, matrix.
        builder: URI of the builder; the default means "a stackcheck on some machine".
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)  # the cell of the matrix that was built
    dependencies: Mapping[str, str] = field(default_factory=dict)
    builder: str = "urn:stackcheck:builder:v1"
    started: dt.datetime | None = None  # when the build began; None when it is not known
    finished: dt.datetime | None = None


def of_build(stack: Stack, image: Image) -> Provenance:
    """The provenance of an image that was built from a stack.

    It names the matrix that the stack was resolved from. A build refuses a Dockerfile that does not follow
    from that matrix, so the two belong together, even if somebody edits matrix.yaml during the build.
    """
    dependencies = dict(image.inputs)
    if stack.matrix_digest:
        dependencies["file:matrix.yaml"] = stack.matrix_digest
    finished = dt.datetime.fromisoformat(image.built) if image.built else None
    named = {"stack": stack.id, "torch": stack.torch, "python": stack.python, "os": stack.os}
    if image.base_from:
        named["basePackagesFrom"] = image.base_from
    handed_over = {use.name: use.key for use in image.stages if use.how == "handed over"}
    return Provenance(
        parameters={
            **named,
            **site_sources(stack),
            **({"stagesFromWheelCache": handed_over} if handed_over else {}),
        },
        dependencies=dependencies,
        started=finished - dt.timedelta(seconds=image.seconds) if finished else None,
        finished=finished,
    )


def site_sources(stack: Stack) -> Mapping[str, str]:
    """What a site put in place of a registry and the indexes; empty for a stack that came from those."""
    found = {}
    if stack.base.kind == "host":
        found["baseFrom"] = f"the packages of a host ({stack.os}), each file with the MD5 sum that dpkg keeps"
    if stack.wheels_from:
        found["wheelsFrom"] = stack.wheels_from
    return found
