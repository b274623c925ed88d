"""A Dockerfile's stages, each with one key for everything that decides it.

In: the text of a Dockerfile, the digests of the files of its context, the platform. Out: the stages that
the last one is made from, in order. Equal keys mean equal stages, in any stack and on any machine:
comments, the stack's name and unused stages do not count.
"""

import dataclasses
import fnmatch
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping

from stackcheck.errors import BuildError

# Raised when the way of hashing changes what equal keys mean.
KEYS = 1
# The stage that the builder replaces by a folder of wheels. It does not count: pip checks the lock's hashes.
GIVEN = "wheelhouse"
_FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(?P<base>\S+)(?:\s+AS\s+(?P<name>\S+))?\s*$", re.IGNORECASE)
_COPY = re.compile(r"(?:COPY|ADD)\s+(?P<rest>.*)$", re.IGNORECASE | re.DOTALL)
_COPY_FROM = re.compile(r"--from=(\S+)")
_MOUNT = re.compile(r"--mount=(\S+)")
_HEREDOC = re.compile(r"<<-?[\"']?([A-Za-z_]\w*)[\"']?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage."""

    name: str  # its name in the Dockerfile; its number if it has no name
    key: str  # of everything that decides it: base, instructions, files, and the stages it takes from
    parent: str | None  # the stage that it is FROM, if it is one of this Dockerfile's
    needs: tuple[str, ...]  # the stages that it takes from, its parent among them
    instructions: tuple[str, ...]  # its instructions after FROM, one line each, without comments
    files: tuple[str, ...]  # the files of the context that it copies or mounts
    hands_over: bool  # whether it only has files of other stages: a later build can be given them as a folder

    @property
    def takes_wheels(self) -> bool:
        """Whether the builder's folder of wheels is mounted in it."""
        return GIVEN in self.needs


@dataclasses.dataclass(frozen=True)
class _StageText:
    name: str
    base: str
    instructions: tuple[str, ...]


def read_stages(dockerfile: str, files: Mapping[str, str], *, platform: str) -> tuple[Stage, ...]:
    """The stages that the last one is made from, each after those that it needs; the last one last.

    Raises:
        BuildError: There is no stage, or a stage copies a file that is not there.
    """
    head, parts = _parts(dockerfile)
    if not parts:
        raise BuildError("the Dockerfile has no stage", expected="FROM … AS …", next_step="stackcheck render")
    made: dict[str, Stage] = {}
    for part in parts:
        if part.name != GIVEN:
            made[part.name] = _stage(part, made, files, [KEYS, platform, head])
    last = parts[-1].name
    wanted = {last, *_ancestors(made, last)}
    return tuple(stage for name, stage in made.items() if name in wanted)


def without_network(dockerfile: str) -> str:
    """The same Dockerfile without a network, except in a RUN that gets the host's apt sources.

    buildx 0.13 reads no `network` in a bake definition. What a RUN may reach is no part of an image or its
    history; the builder's cache tells the two apart, so the first build without a network runs each step.
    """
    return "".join(
        re.sub(r"RUN\s+", "RUN --network=none ", block, count=1, flags=re.IGNORECASE)
        if re.match(r"\s*RUN\s", block, re.IGNORECASE) and not re.search(r"id=apt_sources|--network=", block)
        else block
        for block in _blocks(dockerfile)
    )


def with_own_secret(dockerfile: str, secret: str) -> str:
    """The same Dockerfile in which each stage asks for a secret under a name of its own (`pip_conf-wheels`).

    A step that several targets need runs for whichever asks first, and BuildKit looks for its secrets in the
    sessions of all of them: under one name, a stage could get the settings that are made for another one.
    """
    stage, blocks, count = "", list[str](), 0
    for block in _blocks(dockerfile):
        if found := _FROM.match(block.strip()):
            stage, count = (found["name"] or str(count)).lower(), count + 1
        blocks.append(re.sub(rf"\bid={secret}\b", f"id={secret_name(secret, stage)}", block))
    return "".join(blocks)


def secret_name(secret: str, stage: str) -> str:
    """What a stage calls a secret of its own."""
    return f"{secret}-{stage}"


def _blocks(dockerfile: str) -> Iterator[str]:
    """The text in pieces: an instruction with its continued lines and here-documents, or a line between."""
    lines = iter(dockerfile.splitlines(keepends=True))
    block: list[str] = []
    for line in lines:
        block.append(line)
        comment = line.strip()[:1] in {"", "#"}
        inside = len(block) > 1  # a comment or an empty line between continued lines belongs to them
        if inside if comment else line.rstrip().endswith("\\"):
            continue
        for end in _HEREDOC.findall("" if comment else "".join(block)):
            for inner in lines:
                block.append(inner)
                if inner.strip() == end:
                    break
        yield "".join(block)
        block = []
    yield "".join(block)


def _stage(
    part: _StageText, made: Mapping[str, Stage], files: Mapping[str, str], common: list[object]
) -> Stage:
    known = [*made, GIVEN]
    sources = [part.base, *(name for line in part.instructions for name in _sources(line))]
    needs = tuple(dict.fromkeys(name for name in map(str.lower, sources) if name in known))
    used = sorted({name for line in part.instructions for name in _context_files(line, files)})
    decided = [
        *common,
        part.name,
        None if part.base.lower() in made else part.base,
        part.instructions,
        [made[name].key for name in needs if name in made],
        [(name, files[name]) for name in used],
    ]
    return Stage(
        name=part.name,
        key=hashlib.sha256(json.dumps(decided).encode()).hexdigest(),
        parent=part.base.lower() if part.base.lower() in made else None,
        needs=needs,
        instructions=part.instructions,
        files=tuple(used),
        hands_over=part.base == "scratch"
        and bool(part.instructions)
        and all(re.match(r"COPY\s+--from=", line, re.IGNORECASE) for line in part.instructions),
    )


def _ancestors(made: Mapping[str, Stage], name: str) -> set[str]:
    direct = {need for need in made[name].needs if need in made}
    return direct.union(*(_ancestors(made, need) for need in direct))


def _parts(dockerfile: str) -> tuple[tuple[str, ...], list[_StageText]]:
    """The instructions before the first FROM, and the stages as they are written."""
    head: list[str] = []
    parts: list[_StageText] = []
    for line in _instructions(dockerfile):
        if found := _FROM.match(line):
            name = (found["name"] or str(len(parts))).lower()
            parts.append(_StageText(name, found["base"], ()))
        elif parts:
            parts[-1] = dataclasses.replace(parts[-1], instructions=(*parts[-1].instructions, line))
        else:
            head.append(line)
    return tuple(head), parts


def _instructions(dockerfile: str) -> Iterator[str]:
    """One line an instruction: continued lines joined, comments left out, here-documents kept whole."""
    for block in _blocks(dockerfile):
        words, lines = [], iter(block.splitlines())
        for text in map(str.strip, lines):
            if text and not text.startswith("#"):
                words.append(text.removesuffix("\\").rstrip())
                if not text.endswith("\\"):
                    yield "\n".join([" ".join(words), *lines])


def _sources(instruction: str) -> Iterator[str]:
    """The stages and images that an instruction copies or mounts from."""
    if _COPY.match(instruction):
        yield from _COPY_FROM.findall(instruction)
    for options in _mounts(instruction):
        if "from" in options:
            yield options["from"]


def _mounts(instruction: str) -> Iterator[dict[str, str]]:
    for found in _MOUNT.findall(instruction):
        yield dict(option.partition("=")[::2] for option in found.split(","))


def _context_files(instruction: str, files: Mapping[str, str]) -> Iterator[str]:
    """The files of the context that an instruction reads."""
    for options in _mounts(instruction):
        if options.get("type", "bind") == "bind" and "from" not in options:
            yield from _matching(options.get("source", options.get("src", ".")), files, instruction)
    found = _COPY.match(instruction)
    if not found or _COPY_FROM.search(instruction):
        return
    text = found["rest"].splitlines()[0]
    words = [word for word in _words(text) if not word.startswith("--")]
    for source in words[:-1]:
        if not re.match(r"https?://|git@|<<", source):
            yield from _matching(source, files, instruction)


def _words(text: str) -> list[str]:
    if text.lstrip().startswith("["):
        return [str(word) for word in json.loads(text)]
    return shlex.split(text)


def _matching(source: str, files: Mapping[str, str], instruction: str) -> tuple[str, ...]:
    """The files that a path or pattern of the context names; a folder names all below it."""
    wanted = source.strip("/").removeprefix("./")
    found = tuple(
        name
        for name in files
        if wanted in {"", "."} or fnmatch.fnmatchcase(name, wanted) or name.startswith(f"{wanted}/")
    )
    if not found:
        raise BuildError(
            "the Dockerfile copies a file that is not in its folder",
            where=instruction[:100],
            got=f"no {source}",
            expected="a file that `stackcheck lock` or `stackcheck render` writes",
            next_step="stackcheck lock, then stackcheck render",
        )
    return found
