"""The package indexes of this machine, through uv: exact versions with the hash of every file.

In: requirements, and the places that pip is configured to use. Out: the text of a lock, names of files. The
text never names a place: another machine uses others.
"""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.version import Version

from stackcheck.errors import ConfigurationError
from stackcheck.files.pip_settings import asks_no_index, for_uv, pip_settings
from stackcheck.files.requirements import split_places
from stackcheck.matrix.explain import kindest_first
from stackcheck.matrix.rules import RuleSet
from stackcheck.matrix.stack import Stack

TIMEOUT_S = 600.0
NO_INDEX = "--no-index"
# The oldest glibc that torch's own wheels ask for.
PLATFORM = "x86_64-manylinux_2_28"
# In uv's output if a place does not answer, and not if it answers and has no such package.
_SILENT = ("error sending request", "Failed to fetch", "Could not connect", "dns error", "timed out")


class UnresolvedError(ConfigurationError):
    """The indexes of this machine do not yield the requirements."""

    def __init__(self, package: str, *, silent: bool) -> None:
        state = "no index of this machine answers for" if silent else "no index of this machine has"
        super().__init__(f"{state} {package}")
        self.package = package


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """What a resolution is held to."""

    constraints: Sequence[str] = ()  # versions that a package has if it is needed at all
    overrides: Sequence[str] = ()  # requirements that replace every other one on their package

    def texts(self) -> dict[str, Sequence[str]]:
        """File -> its lines, as uv reads them."""
        return {"constraints.txt": self.constraints, "overrides.txt": self.overrides}


FREE = Held()


def resolve(
    requirements: Sequence[str],
    *,
    python: str,
    places: Sequence[str],
    held: Held = FREE,
    with_hashes: bool = True,
) -> str:
    """A lock of every package that the requirements ask for, and of what those need, as pip reads it.

    `places` are uv's options that name indexes and folders, `held` constraints and overrides.

    Raises:
        ConfigurationError: uv is missing.
        UnresolvedError: A package is in none of the places, or a place does not answer.
    """
    if not with_hashes:
        options = ["--no-header", "--no-annotate", *places]
        return _compile(requirements, python, options, held.texts())
    options = ["--generate-hashes", "--no-header", "--no-annotate", *places]
    text = _compile(requirements, python, options, held.texts())
    return _with_hashes(text, python=python, places=places)


def _with_hashes(text: str, *, python: str, places: Sequence[str]) -> str:
    """The lock with the hashes of files from a page of links (`--find-links`), which uv leaves out of it.

    AMD's wheels are on such a page. uv states their hashes in a pylock.toml, and reads the whole file where
    the page has none (seen with the uv that requirements pin).
    """
    bare = re.findall(r"^[\w.-]+==\S+$", text, re.MULTILINE)
    if not bare:
        return text
    of = files(bare, python=python, places=places)
    entries = {}
    for pin in bare:
        hashes = sorted(set(of.get(pin.partition("==")[0], {}).values()))
        if not hashes:
            raise UnresolvedError(pin, silent=False)
        entries[pin] = " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in hashes)])
    return "".join(f"{entries.get(line, line)}\n" for line in text.splitlines())


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexFile:
    """A file of a package as an index lists it; not every index tells sizes, and `index` is its address."""

    name: str
    sha256: str
    size_bytes: int | None
    index: str | None


def files(pins: Sequence[str], *, python: str, places: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Package -> file name -> SHA-256, of the wheels that fit this platform and of source archives.

    Raises:
        ConfigurationError: uv is missing.
        UnresolvedError: A package is in none of the places, or a place does not answer.
    """
    found = listed(pins, python=python, places=places)
    return {name: {file.name: file.sha256 for file in of} for name, of in found.items()}


def listed(pins: Sequence[str], *, python: str, places: Sequence[str]) -> Mapping[str, tuple[IndexFile, ...]]:
    """Package -> its files, of the wheels that fit this platform and of source archives.

    Nothing is built to learn what a source archive needs: its set-up may run only where torch is.

    Raises:
        ConfigurationError: uv is missing.
        UnresolvedError: A package is in none of the places, or a place does not answer.
    """
    entries = (pin.split("==", 1) for pin in pins)
    metadata = "".join(
        f'[[dependency-metadata]]\nname = "{name}"\nversion = "{version}"\nrequires-dist = []\n'
        for name, version in entries
    )
    options = ["--no-deps", "--format", "pylock.toml", *places]
    told = tomllib.loads(_compile(pins, python, options, {"uv.toml": [metadata]}))
    return {entry["name"]: _files(entry) for entry in told["packages"]}


@functools.lru_cache(maxsize=1000)
def versions(name: str, *, python: str, pre: bool = False, also: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The versions of a package that the indexes of this machine list, newest first; empty where none has it.

    Versions that do not install beside this Python (`3.12`) do not count; `also` are pip's options that name
    other places to ask.

    Raises:
        ConfigurationError: pip does not run with its settings.
        UnresolvedError: None of them has it, and one did not answer.
    """
    options = ["--python-version", python, *(["--pre"] if pre else [])]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "-vv", "index", "versions", name, *options],
        capture_output=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **_variables([*pip_places(find_links=True), *also])},
    )
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if listed:
        return tuple(listed[1].split(", "))
    said = done.stdout + done.stderr
    if "No matching distribution found" not in said:
        raise ConfigurationError(
            "pip cannot be asked for the versions of a package",
            where=f"pip index versions {name}",
            got=said.strip().rpartition("\n")[2][-300:],
            next_step=f"{sys.executable} -m pip config debug",
        )
    if re.search(r"Could not fetch URL \S+: (?!404 )|is not a trusted or secure host", said):
        raise UnresolvedError(name, silent=True)
    return ()


def read_lock(path: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Package -> version and hashes (`sha256:…`), from a lock; empty if there is no lock."""
    if not path.is_file():
        return {}
    found = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=\S+(?: \\\n|\n))+)", path.read_text("utf-8"), re.MULTILINE
    )
    return {name: (version, tuple(re.findall(r"--hash=(\S+)", hashes))) for name, version, hashes in found}


def pip_places(*, find_links: bool) -> list[str]:
    """The places that pip is configured to look in, as uv's options: uv reads no pip configuration.

    A folder of wheels may hold a torch with a local version (`+cpu`), which counts as newer than the index's
    own: a stack whose torch comes from the index leaves folders out.
    """
    settings = pip_settings()
    names = ("index-url", "extra-index-url", *(("find-links",) if find_links else ()))
    places = [f"--{name}={place}" for name in names for place in settings.get(name, ())]
    return [*([NO_INDEX] if asks_no_index(settings) else []), *places]


def _variables(places: Sequence[str]) -> dict[str, str]:
    """Pip's variables for these places, which replace those of its configuration."""
    named, _ = split_places(places)
    return {f"PIP_{name.replace('-', '_').upper()}": " ".join(values) for name, values in named.items()}


def _uv_settings(places: Mapping[str, Sequence[str]]) -> list[str]:
    """The same places as lines of a uv.toml; JSON's texts are TOML's."""
    absolute = {
        name: [value if "://" in value else str(Path(value).expanduser().absolute()) for value in values]
        for name, values in places.items()
    }
    return [
        f"{name} = {json.dumps(values[-1] if name == 'index-url' else values)}"
        for name, values in absolute.items()
    ]


def _compile(
    requirements: Sequence[str], python: str, options: Sequence[str], texts: Mapping[str, Sequence[str]]
) -> str:
    with tempfile.TemporaryDirectory() as name:  # which no other user can read
        folder = Path(name)
        named, options = split_places(options)
        texts = {**FREE.texts(), **texts, "uv.toml": [*_uv_settings(named), *texts.get("uv.toml", ())]}
        for file, lines in {"wanted.in": requirements, **texts}.items():
            (folder / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        output = folder / (
            "pylock.toml" if "pylock.toml" in options else "locked.txt"
        )  # uv asks for the name
        # Naming an interpreter spares uv the search for one of the version asked for.
        command = [_uv(), "pip", "compile", "--quiet", "--no-python-downloads", "--python", sys.executable]
        command += [
            "--config-file",
            str(folder / "uv.toml"),
            "--constraints",
            str(folder / "constraints.txt"),
            "--overrides",
            str(folder / "overrides.txt"),
        ]
        command += ["--python-version", python, "--python-platform", PLATFORM]
        # pip takes the best match of all indexes; uv would stop at the first that has the name.
        command += ["--index-strategy", "unsafe-best-match", *options, "-o", str(output)]
        command.append(str(folder / "wanted.in"))
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
                env=for_uv(pip_settings()),
            )
        except subprocess.TimeoutExpired as error:
            raise UnresolvedError(requirements[0], silent=True) from error
        if done.returncode != 0:
            raise _unresolved(done.stderr, requirements)
        return output.read_text(encoding="utf-8")


def _unresolved(stderr: str, requirements: Sequence[str]) -> UnresolvedError:
    """Names the package, never an address of this machine."""
    found = re.search(r"no version of ([\w.-]+==[\w.+-]+)|([\w.-]+) was not found", stderr)
    name = next((part for part in found.groups() if part), "") if found else ""
    package = next((pin for pin in requirements if pin.partition("==")[0] == name), name)
    return UnresolvedError(package or requirements[0], silent=any(sign in stderr for sign in _SILENT))


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    if not beside.exists():
        raise ConfigurationError(
            "uv is missing", expected=str(beside), next_step=f"{sys.executable} -m pip install uv"
        )
    return str(beside)


def _files(entry: Mapping[str, Any]) -> tuple[IndexFile, ...]:
    found = [*entry.get("wheels", ()), *([entry["sdist"]] if "sdist" in entry else ())]
    return tuple(
        IndexFile(
            name=_file_name(file),
            sha256=file["hashes"]["sha256"],
            size_bytes=file.get("size"),
            index=entry.get("index"),
        )
        for file in found
    )


def _file_name(file: Mapping[str, Any]) -> str:
    return str(file.get("name") or unquote(urlsplit(file.get("url") or file["path"]).path).rpartition("/")[2])


# Packages whose versions torch decides, by the axis that the rules know them as.
_AXES = {
    **dict.fromkeys(("triton", "pytorch-triton-rocm", "triton-rocm"), "triton"),
    **{name: name for name in ("torch", "torchvision", "torchaudio")},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behind:
    """A pin with something newer, or of which no index has any version: `newest` is `None`."""

    name: str
    pinned: str
    newest: str | None
    stacks: tuple[str, ...]


def behind(
    stacks: Sequence[Stack], rules: RuleSet, versions: Callable[[str, bool, Stack], Sequence[str]]
) -> tuple[Behind, ...]:
    """The pins that are behind, by name and version."""
    found: dict[tuple[str, str, str | None], list[str]] = {}
    for stack in stacks:
        for name, pinned in _pins(stack):
            listed = versions(name, Version(pinned).is_prerelease, stack)
            same = [one for one in map(Version, listed) if one.local == Version(pinned).local]
            fitting = [one for one in same if _fits(stack, name, one, pinned, rules)]
            newest = max(fitting, default=None)
            if newest is None or newest > Version(pinned):
                found.setdefault((name, pinned, str(newest) if newest else None), []).append(stack.id)
    return tuple(
        Behind(name=name, pinned=pinned, newest=newest, stacks=tuple(ids))
        for (name, pinned, newest), ids in sorted(found.items(), key=lambda item: item[0][:2])
    )


def _pins(stack: Stack) -> Iterator[tuple[str, str]]:
    flash = [f"{stack.flash_attn.package}=={stack.flash_attn.version}"] if stack.flash_attn else []
    for requirement in dict.fromkeys((*stack.requirements, *flash)):
        name, _, version = requirement.partition("==")
        yield name, version


def _fits(stack: Stack, name: str, version: Version, pinned: str, rules: RuleSet) -> bool:
    if version <= Version(pinned):
        return True
    if version.is_prerelease and not Version(pinned).is_prerelease:
        return False
    axis = _AXES.get(name)
    if axis is None:
        return True
    runtime: dict[str, str] = {stack.runtime: stack.runtime_version} if stack.runtime_version else {}
    asked = {**runtime, "vendor": stack.vendor, "torch": str(stack.torch), axis: version.public}
    if stack.wheels != "none":
        asked["wheels"] = stack.wheels
    return kindest_first(asked, rules)[0].answer != "refused"
