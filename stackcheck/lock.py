"""Write a stack's lock: every wheel by hash (`requirements.lock`) and everything else by digest (`pins.json`).

In: stacks, the package indexes of this machine's own pip configuration, and registries where they can be reached.
Out: files under images/<stack-id>/. What cannot be learnt here is not invented: pins.json says what is missing, and
`build` refuses the stack until a machine that can reach it has locked it.
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
from stackcheck.resolve import TORCH_INDEX, wheel_tag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stackcheck.resolve import Base, Stack

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
    missing = [reason] if reason else []
    bases = [base for base in (stack.base, stack.builder) if base and base.kind == "registry"]
    missing += [_missing_base(base) for base in bases if base.digest is None]
    if stack.flash_attn:
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


def _missing_base(base: Base) -> str:
    return f"no digest of {base.reference}: its registry was not reached on this machine"


def _sources(stack: Stack) -> Mapping[str, object]:
    """What is compiled, and from what."""
    if stack.flash_attn is None:
        return {}
    return {
        "flash-attn": {"version": stack.flash_attn.version, "form": stack.flash_attn.form, "sha256": None}
    }


def compile_requirements(stack: Stack) -> tuple[str | None, str | None]:
    """The lock's text, or None with the reason why the indexes of this machine do not yield one."""
    with tempfile.TemporaryDirectory() as name:
        wanted, output = Path(name) / "requirements.in", Path(name) / "requirements.lock"
        wanted.write_text("\n".join(stack.requirements) + "\n", encoding="utf-8")
        command = [_uv(), "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--no-config", "--python-version", stack.python, "--python-platform", PLATFORM]
        # pip takes the best match of all indexes; uv would stop at the first that has the name.
        command += ["--index-strategy", "unsafe-best-match"]
        command += [*_pip_places(), "--output-file", str(output), str(wanted)]
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


def _pip_places() -> list[str]:
    """The places that pip is configured to look in, as uv's options: uv reads no pip configuration."""
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
        for place in value.strip("'\"").split() if name else ():
            options[f"{name}={place}"] = None
    return list(options)


def _hashes(path: Path) -> Mapping[str, object]:
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
