"""A stack of the matrix, locked to what a site itself has: a base cut from its host, a folder of wheels.

In: a stack, a cut base or a folder of wheels. Out: the stack's files in images/ (pins, lock, Dockerfile,
and base.json or wheelhouse.json, which list what the site has). They differ from the committed ones, and
say so: a hash of a wheel that was made from an environment is not one of an index.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stackcheck.errors import BuildError
from stackcheck.files import origins, requirements
from stackcheck.files.atomic import write_atomically
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.recipe import lock, render

BASE_FILE = "base.json"
REASON = "not locked yet: stackcheck lock"


def take_base(stack: Stack, digest: str, facts: Mapping[str, object], root: Path) -> Stack:
    """Make a stack start from a base that was cut from this host; returns the stack as it is now."""
    folder = root / "images" / stack.id
    pins = _pins(folder) or {"schema": 1, "stack_id": stack.id, "locked": False, "missing": [REASON]}
    name = stack.base.reference
    # The base of the matrix is no longer what is missing.
    pins["missing"] = [
        why for why in pins["missing"] if not (name and why.startswith(f"no digest of {name}:"))
    ]
    pins["bases"] = {key: value for key, value in pins.get("bases", {}).items() if key != name}
    pins["locked"] = not pins["missing"]
    pins["rootfs"] = {"from": "host", "digest": digest}
    write_atomically(folder / BASE_FILE, (_json(facts),))
    write_atomically(folder / "pins.json", (_json(pins),))
    return _rendered(stack, root)


def lock_to(stack: Stack, wheelhouse: Path, root: Path) -> Stack:
    """Lock a stack to one folder of wheels, asking no index; returns the stack as it is now.

    Raises:
        BuildError: The folder lacks a wheel; nothing was written.
    """
    origins.require_folder(wheelhouse)
    listed = origins.load_origins(wheelhouse)
    lock.lock(stack, root / "images", wheelhouse=wheelhouse)
    folder = root / "images" / stack.id
    hashes = _hashes(folder)
    pins = _pins(folder)
    if listed:
        chosen = listed.of(hashes)
        # Every locked file is one of the list: a file that was put there later has no origin.
        strange = hashes - {wheel.sha256 for wheel in chosen.wheels}
        if strange:
            raise BuildError(
                "the folder has wheels that its list does not have, or that were changed since",
                where=str(wheelhouse / origins.NAME),
                got=f"{len(strange)} locked hashes that are not in it, such as {min(strange)}",
                expected="every wheel of the folder with its hash",
                next_step=f"stackcheck wheelhouse {wheelhouse} --from-environment PYTHON, again",
            )
        write_atomically(folder / origins.NAME, (origins.text(chosen),))
        pins["wheels_from"] = chosen.words()
    else:
        (folder / origins.NAME).unlink(missing_ok=True)
        pins["wheels_from"] = f"{len(hashes)} wheels of a folder of the site, as they were given"
    write_atomically(folder / "pins.json", (_json(pins),))
    return _rendered(stack, root)


def ready(stack: Stack, wheelhouse: Path, root: Path, report: Callable[[str], None]) -> Stack:
    """A stack, locked to the folder that `stackcheck wheelhouse` made if it is not yet.

    A folder that was downloaded for the lock of the indexes has no list, and nothing is done.

    Raises:
        BuildError: The folder lacks a wheel; nothing was written.
    """
    listed = origins.load_origins(wheelhouse)
    if listed is None:
        return stack
    folder = root / "images" / stack.id
    held = {wheel.sha256 for wheel in listed.wheels}
    if not stack.missing and (hashes := _hashes(folder)) and hashes <= held:
        return stack
    report(f"{stack.id}: locking to the wheels of {wheelhouse}: {listed.words()}")
    return lock_to(stack, wheelhouse, root)


def _hashes(folder: Path) -> frozenset[str]:
    path = folder / "requirements.lock"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return frozenset(value for one in requirements.read_packages(text) for value in one.hashes)


def _rendered(stack: Stack, root: Path) -> Stack:
    (now,) = resolve.load_stacks(root, (stack.id,))
    render.write((now,), root / "images")
    return now


def _pins(folder: Path) -> dict[str, Any]:
    path = folder / "pins.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, default=str) + "\n").encode()
