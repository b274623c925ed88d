"""Write a stack's lock: every wheel by hash (`requirements.lock`), the rest by digest (`pins.json`).

In: stacks, and the package indexes of this machine's own pip configuration. Out: files under
images/<stack-id>/. What cannot be learnt here is not invented: pins.json says what is missing, and `build`
refuses the stack until a machine that can reach it has locked it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.errors import ConfigurationError
from stackcheck.stack import TORCH_INDEX, frozen, wheel_tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stackcheck.stack import Base, Stack

TIMEOUT_S = 600.0
# The oldest glibc that torch's own wheels ask for.
PLATFORM = "x86_64-manylinux_2_28"
_HEAD = """\
# Every package of {id} with the hashes of its files: written by `stackcheck lock {id}`. Do not edit.
# torch's own index, where its wheel is not in yours: {index}
"""


def lock(stack: Stack, images: Path) -> tuple[str, ...]:
    """Lock one stack; what is still missing, one reason each.

    Raises:
        ConfigurationError: uv is missing.
    """
    folder = images / stack.id
    folder.mkdir(exist_ok=True)
    path = folder / "requirements.lock"
    text, reason = compile_requirements(stack)
    if text is not None:
        path.write_text(text, encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
    missing = [reason] if reason else []
    missing += _disagreements(stack, path)
    bases = [base for base in (stack.base, stack.builder) if base and base.kind == "registry"]
    missing += [_missing_base(base) for base in bases if base.digest is None]
    if stack.flash_attn and stack.flash_attn.sha256 is None:
        missing.append(f"the checksum of flash-attn {stack.flash_attn.version} was not read on this machine")
    pins = {
        "schema": 1,
        "stack_id": stack.id,
        "locked": not missing,
        "missing": missing,
        "bases": {str(base.reference): base.digest for base in bases},
        "sources": _sources(stack),
        "torch": _hashes(path).get("torch"),
    }
    (folder / "pins.json").write_text(json.dumps(pins, indent=2) + "\n", encoding="utf-8")
    return tuple(missing)


def _disagreements(stack: Stack, path: Path) -> list[str]:
    """What the indexes resolved to that is not what the rules say: the rules are wrong, or the index is."""
    locked = {name: str(entry["version"]) for name, entry in _hashes(path).items()}
    return [
        f"the indexes give {name} {locked[name]}, the rules {version}"
        for name, version in (pin.split("==", 1) for pin in frozen(stack))
        if name in locked and locked[name] != version
    ]


def _missing_base(base: Base) -> str:
    return f"no digest of {base.reference}: its registry was not reached on this machine"


def _sources(stack: Stack) -> Mapping[str, object]:
    """What is compiled, and from what."""
    if stack.flash_attn is None:
        return {}
    return {
        "flash-attn": {
            "version": stack.flash_attn.version,
            "form": stack.flash_attn.form,
            "sha256": stack.flash_attn.sha256,
        }
    }


def compile_requirements(stack: Stack) -> tuple[str | None, str | None]:
    """The lock's text, or None with the reason why the indexes of this machine do not yield one."""
    if stack.wheels == "amd":
        # The index has a torch of the same number, and it is built for CUDA.
        return None, f"{stack.requirements[0]} as AMD builds it: its place (repo.radeon.com) was not reached"
    with tempfile.TemporaryDirectory() as name:
        wanted, output = Path(name) / "requirements.in", Path(name) / "requirements.lock"
        wanted.write_text("\n".join(stack.requirements) + "\n", encoding="utf-8")
        command = [_uv(), "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--no-config", "--python-version", stack.python, "--python-platform", PLATFORM]
        # pip takes the best match of all indexes; uv would stop at the first that has the name.
        command += ["--index-strategy", "unsafe-best-match"]
        command += [
            *_pip_places(find_links=stack.wheels != "index"),
            "--output-file",
            str(output),
            str(wanted),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            return None, _why(stack, done.stderr)
        index = f"{TORCH_INDEX}/{wheel_tag(stack)}" if wheel_tag(stack) else "not needed"
        return _HEAD.format(id=stack.id, index=index) + output.read_text(encoding="utf-8"), None


def _why(stack: Stack, stderr: str) -> str:
    """One line that names the package and the kind of index, never an address of this machine."""
    found = re.search(r"no version of ([\w.-]+==[\w.+-]+)|([\w.-]+) was not found", stderr)
    package = next((part for part in found.groups() if part), "") if found else ""
    place = f"{TORCH_INDEX}/{wheel_tag(stack)}" if wheel_tag(stack) else "the package index"
    return f"{package or stack.requirements[0]} is not in the indexes of this machine ({place} is needed)"


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    if not beside.exists():
        raise ConfigurationError(
            "uv is missing", expected=str(beside), next_step=f"{sys.executable} -m pip install uv"
        )
    return str(beside)


def _pip_places(*, find_links: bool) -> list[str]:
    """The places that pip is configured to look in, as uv's options: uv reads no pip configuration.

    A folder of wheels may hold a torch with a local version (`+cpu`), which counts as newer than the index's
    own: a stack whose torch comes from the index leaves folders out.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    options: dict[str, None] = {}
    names = {"index-url": "--index-url", "extra-index-url": "--extra-index-url", "find-links": "--find-links"}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        name = names.get(key.rpartition(".")[2])
        if name is None or (name == "--find-links" and not find_links):
            continue
        for place in value.strip("'\"").split():
            options[f"{name}={place}"] = None
    return list(options)


def newest(names: Sequence[str]) -> dict[str, str | None]:
    """The newest version of each package in the indexes of this machine; None where they have none."""
    found: dict[str, str | None] = {}
    for name in names:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "index", "versions", name],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        version = re.match(r"\S+ \((\S+)\)", done.stdout)
        found[name] = version[1] if version else None
    return found


def _hashes(path: Path) -> Mapping[str, Mapping[str, object]]:
    """Package -> version and hashes, from a lock; nothing without one."""
    if not path.is_file():
        return {}
    found = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=\S+(?: \\\n|\n))+)", path.read_text("utf-8"), re.MULTILINE
    )
    return {
        name: {"version": version, "hashes": re.findall(r"--hash=(\S+)", hashes)}
        for name, version, hashes in found
    }
