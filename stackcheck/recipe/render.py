"""Stack -> Dockerfile and stack.json, and the check that the committed ones still follow from their sources.

In: stacks, and the templates of images/. Out: file name -> text. Pure, except `write` and reading templates.
A template has no version logic: every choice that depends on a version is a rule of compat.yaml.
"""

import itertools
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.matrix.stack import STACK_LABEL, TORCH_INDEX, Base, Stack
from stackcheck.recipe import lock, rocm
from stackcheck.recipe.extensions import extensions, needs, template_values, toolchain

# The files of a stack's folder that `render` writes.
GENERATED = ("Dockerfile", "stack.json")
_INCLUDE = re.compile(r'^\{% include "([a-z/.0-9-]+)" %\}\n', re.MULTILINE)
_ENVIRONMENT = jinja2.Environment(  # noqa: S701  # Dockerfiles, not HTML; values are held to narrow patterns
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)


def render(stack: Stack, images: Path) -> Mapping[str, str]:
    """The generated files of a stack, file name -> text; `images` holds the templates.

    Raises:
        ConfigurationError: A template is missing or wrong.
    """
    template, wheels = template_name(stack), stack.wheel_tag
    try:
        dockerfile = _compiled(_template(images, template)).render(
            stack=stack,
            template=f"images/{template}",
            base_image=image_name(stack.base),
            builder_image=stack.builder and image_name(stack.builder),
            replaced=[one.name for one in stack.replacements],
            frozen=[pin.partition("==")[0] for pin in stack.frozen],
            site_packages=f"/opt/venv/lib/python{stack.python}/site-packages",
            base_packages=" ".join(stack.base.packages),
            torch_index=f"{TORCH_INDEX}/{wheels}" if wheels else None,
            assignments=lambda values: _assignments(values, " \\\n    "),
            **template_values(stack),
            **rocm.template_values(stack),
            labels=_assignments(labels(stack), " \\\n      "),
            env=_assignments(environment(stack), " \\\n    "),
        )
    except jinja2.TemplateError as error:
        raise ConfigurationError(
            "a template cannot be rendered",
            where=f"images/{template}, for {stack.id}",
            got=str(error),
            next_step="correct the template, then: stackcheck render",
        ) from error
    return {"Dockerfile": dockerfile, "stack.json": _lines(declaration(stack))}


def template_name(stack: Stack) -> str:
    """The template of a stack's Dockerfile: one for both GPU vendors, one for stacks without a GPU."""
    return f"{'cpu' if stack.runtime == 'cpu' else 'gpu'}.Dockerfile.j2"


def _template(images: Path, name: str) -> str:
    """A template's text with its parts in place: one template renders several times faster than eight."""
    try:
        text = (images / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            "a template cannot be read",
            where=str(images / name),
            got=error.strerror or str(error),
            expected="the templates of a stackcheck checkout",
            next_step="restore the file, or name the checkout with --root",
        ) from error
    return _INCLUDE.sub(lambda part: _template(images, part[1]), text)


# By text, not by name: a template that was edited is never confused with the one that was there before.
_compiled = lru_cache(maxsize=30)(_ENVIRONMENT.from_string)


def _assignments(values: Mapping[str, str], separator: str) -> str:
    return separator.join([f'{name}="{value}"' for name, value in values.items()])


def _lines(value: Mapping[str, Any]) -> str:
    """JSON with one line a key."""
    lines = [
        f'  "{key}": {_object(tuple(entry.items())) if isinstance(entry, dict) else _scalar(entry)}'
        for key, entry in value.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


# Stacks share most of their values, so encoded values are cached, by value and type (1 equals True).
@lru_cache(maxsize=10_000, typed=True)
def _scalar(value: Hashable) -> str:
    return json.dumps(value)


@lru_cache(maxsize=10_000)
def _object(entries: tuple[tuple[str, str | None], ...]) -> str:
    return json.dumps(dict(entries))


def image_name(base: Base) -> str:
    """What FROM takes; without a digest only where the stack is not locked, and then it is not built."""
    return f"{base.reference}@{base.digest}" if base.digest else str(base.reference)


def declaration(stack: Stack) -> Mapping[str, Any]:
    """stack.json: what the image declares; its suite compares that with what is loaded."""
    flash = stack.flash_attn
    return {
        "schema": 1,
        "stack_id": stack.id,
        "vendor": stack.vendor,
        "runtime": stack.runtime,
        "runtime_version": stack.runtime_version,
        "python": stack.python,
        "os": stack.os,
        "archs": stack.archs,
        "wheels": stack.wheels,
        "packages": {**_packages(stack.requirements), **{one.name: one.version for one in stack.extensions}},
        "triton": stack.triton and {"name": stack.triton.name, "version": stack.triton.version},
        "collective": stack.collective
        and {"name": stack.collective.name, "version": stack.collective.version},
        "flash_attn": flash and {"version": flash.version, "form": flash.form, "backend": flash.backend},
        "env": dict(stack.env),
    }


@lru_cache(maxsize=1000)
def _packages(requirements: tuple[str, ...]) -> Mapping[str, str]:
    return dict(requirement.split("==", 1) for requirement in requirements)


def labels(stack: Stack) -> Mapping[str, str]:
    """OCI labels of the image: what was asked for. Its SBOM lists what is in it.

    No revision and no date of the build: two builds of one lock are one image. The provenance has the dates,
    and the digests of all inputs.
    """
    version = f"{stack.runtime} {stack.runtime_version or ''}".strip()
    return {
        "org.opencontainers.image.title": stack.id,
        "org.opencontainers.image.description": f"PyTorch {stack.torch or 'absent'}, {version}, {stack.os}",
        "org.opencontainers.image.version": stack.torch or str(stack.runtime_version),
        "org.opencontainers.image.ref.name": stack.id,
        **_base_labels(stack.base),
        STACK_LABEL: stack.id,
        "stackcheck.vendor": stack.vendor,
        "stackcheck.experimental": str(stack.experimental).lower(),
    }


def _base_labels(base: Base) -> Mapping[str, str]:
    if base.kind == "host":
        return {"stackcheck.base": f"{base.suite}, cut from the packages of a host"}
    if base.kind == "bootstrap":
        return {"stackcheck.base": f"Debian {base.suite}, from its packages"}
    name = {"org.opencontainers.image.base.name": str(base.reference)}
    return name | ({"org.opencontainers.image.base.digest": base.digest} if base.digest else {})


def environment(stack: Stack) -> Mapping[str, str]:
    """ENV of the image: the stack's own, the interpreter on PATH, and the constraints for pip and uv."""
    return {
        "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PIP_CONSTRAINT": "/opt/stackcheck/constraints.txt",
        "UV_CONSTRAINT": "/opt/stackcheck/constraints.txt",
        **stack.env,
    }


def write(stacks: Iterable[Stack], images: Path) -> tuple[Path, ...]:
    """Write the files that differ from what is committed; returns the paths written."""
    written = []
    for stack in stacks:
        folder = images / stack.id
        folder.mkdir(exist_ok=True)
        for name, text in render(stack, images).items():
            path = folder / name
            if _bytes(path) != text.encode():
                write_atomically(path, (text.encode(),))
                written.append(path)
    return tuple(written)


def check(stacks: Iterable[Stack], images: Path, *, whole: bool = True) -> tuple[str, ...]:
    """One line for each committed file that differs; for the `whole` matrix, also for what is left over."""
    wanted = {f"{stack.id}/{name}": text for stack in stacks for name, text in render(stack, images).items()}
    drifted = [
        f"images/{name}: {'is missing' if not (images / name).exists() else 'differs from its template'}"
        for name, text in wanted.items()
        if _bytes(images / name) != text.encode()
    ]
    folders = {name.split("/", maxsplit=1)[0] for name in wanted}
    left = [
        f"images/{path.parent.name}: no stack of the matrix has this id"
        for path in sorted(images.glob("*/stack.json"))
        if whole and path.parent.name not in folders
    ]
    return (*drifted, *left)


def require_fresh(stack: Stack, images: Path, committed: Mapping[str, bytes]) -> None:
    """Refuse generated files that are not what `render` would write for this stack now.

    Raises:
        ConfigurationError: A file differs; the message has the first line that does.
    """
    for name, text in render(stack, images).items():
        if committed[name] != text.encode():
            found = committed[name].decode(errors="surrogateescape")
            line, got, expected = _first_difference(found, text)
            raise ConfigurationError(
                f"{name} does not follow from matrix.yaml and its template",
                where=f"images/{stack.id}/{name}, line {line}",
                got=got,
                expected=expected,
                next_step=f"stackcheck render {stack.id}",
            )


def _first_difference(got: str, expected: str) -> tuple[int, str, str]:
    """Number (from 1) of the first line that differs, and that line in both texts."""
    pairs = itertools.zip_longest(got.split("\n"), expected.split("\n"), fillvalue="(end of the file)")
    number, (left, right) = next(found for found in enumerate(pairs, 1) if found[1][0] != found[1][1])
    return number, _shown(left), _shown(right)


def _shown(line: str) -> str:
    """A line for a message; one that a terminal would show as nothing is quoted."""
    return line if line == line.rstrip() != "" and line.isprintable() else repr(line)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def stale(stack: Stack, images: Path) -> tuple[str, ...]:
    """What is wrong with a stack's pins, each as `images/ID/FILE: what`; empty if nothing is."""
    folder = images / stack.id
    path = folder / "pins.json"
    if not path.is_file():
        return (f"images/{stack.id}/pins.json: is missing",)
    pins = json.loads(path.read_text(encoding="utf-8"))
    found = [*_pins(stack, pins), *_locks(stack, folder, pins.get("missing", []))]
    return tuple(f"images/{stack.id}/{line}" for line in found)


def _pins(stack: Stack, pins: Mapping[str, Any]) -> Iterator[str]:
    missing = pins.get("missing", [])
    if pins.get("stack_id") != stack.id:
        yield f"pins.json: is of another stack: {pins.get('stack_id')}"
    if pins.get("locked") is not (not missing):
        yield "pins.json: `locked` contradicts `missing`"
    bases = [str(base.reference) for base in (stack.base, stack.builder) if base and base.reference]
    yield from _differ("bases", dict.fromkeys(bases), pins.get("bases", {}), missing)
    # A release page that is out of reach is named by its host, for several packages at once.
    named = [*missing, *(e.name for e in extensions(stack) if missing)]
    yield from _differ("sources", dict.fromkeys(e.name for e in extensions(stack)), _files(pins), named)
    for extension in extensions(stack):
        version = pins.get("sources", {}).get(extension.name, {}).get("version")
        if version not in {None, extension.version}:
            yield f"pins.json: {extension.name} {version} is pinned, the stack needs {extension.version}"
    debs = pins.get("debs", {})
    wanted = {rocm.SMI: None} if rocm.takes_smi(stack) else {}
    yield from _differ("debs", wanted, debs, missing)
    if wanted and debs.get(rocm.SMI) and debs[rocm.SMI]["archive"] != rocm.archive(stack):
        yield f"pins.json: {rocm.SMI} is of {debs[rocm.SMI]['archive']}, not of {rocm.archive(stack)}"


def _files(pins: Mapping[str, Any]) -> Mapping[str, object]:
    return {name: source.get("file") for name, source in pins.get("sources", {}).items()}


def _differ(
    name: str, wanted: Mapping[str, None], held: Mapping[str, object], missing: Sequence[str]
) -> Iterator[str]:
    """The names that one side alone has, and those without a value that `missing` does not explain."""
    for one in wanted:
        if one not in held:
            yield f"pins.json: `{name}` has no entry of {one}"
        if not held.get(one) and not any(one in reason for reason in missing):
            yield f"pins.json: `missing` does not say why there is no {one}"
    for one in held:
        if one not in wanted:
            yield f"pins.json: `{name}` has {one}, which the stack does not need"


def _locks(stack: Stack, folder: Path, missing: Sequence[str]) -> Iterator[str]:
    """Locks that do not hold what the stack asks for, although nothing is said to be missing."""
    asked = {
        "requirements": (*stack.requirements, *needs(stack)),
        "toolchain": toolchain(stack),
        lock.CHOSEN: tuple(one.pin for one in stack.replacements),
        **{extension.name: (extension.pin,) for extension in extensions(stack)},
    }
    for name, wanted in asked.items():
        path = folder / f"{name}.lock"
        if wanted and not lock.covers(path, wanted) and (path.is_file() or not missing):
            yield f"{name}.lock: does not hold every one of {', '.join(wanted)}"
    for path in sorted(folder.glob("*.lock")):
        if not asked.get(path.stem):
            yield f"{path.name}: the stack does not need it"
