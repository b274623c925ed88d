"""A plug-in of pytest that plants a fault inside the libraries for each check. In: FAULT_PLAN. Out: counts.

FAULT_PLAN is a JSON file: the shim's path, the folder for tables and counts, and a setting by check id ("" is
of all others). `counts` has, by check, the calls of each library while it ran, and how many were changed.
"""

import json
import os
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
MADE = (
    HERE.parents[1] / "build" / "library_faults"
)  # for where no compiler is: this file, as a program, makes it
LIBRARIES = ("products", "collectives", "halves")
KINDS = ("none", "flip", "short", "last", "slow", "fail", "race")
LAYOUT = struct.Struct("<6I4Q")  # of the shim's `struct setting`


@dataclass(frozen=True)
class Setting:
    """One fault, as the shim's first lines say it."""

    library: str = "products"
    kind: str = "none"
    size: int = 1
    every: int = 1
    seed: int = 0
    step: int = 0

    def packed(self) -> bytes:
        """The shim's table, with no calls yet."""
        library, kind = LIBRARIES.index(self.library), KINDS.index(self.kind)
        return LAYOUT.pack(library, kind, self.size, self.every, self.seed, self.step, *[0] * 4)


def compiled(folder: Path) -> Path:
    """Compile the shim into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shim = folder.resolve() / "shim.so"
    flags = ("-shared", "-fPIC", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *flags, str(HERE / "shim.c"), "-o", str(shim), "-ldl"], check=True)
    return shim


def found(folder: Path) -> Path | None:
    """The shim, compiled into that folder or made before; None without both."""
    if shutil.which("gcc"):
        return compiled(folder)
    return MADE / "shim.so" if (MADE / "shim.so").exists() else None


def counted(table: Path) -> Counter[str]:
    """The calls of each library since the table was written, and how many were `changed`."""
    return Counter(dict(zip((*LIBRARIES, "changed"), LAYOUT.unpack(table.read_bytes())[-4:], strict=True)))


def written(table: Path, setting: Setting) -> None:
    """Put a setting into a table that processes may have mapped."""
    with table.open("r+b" if table.exists() else "wb") as file:
        file.write(setting.packed())


def plan(folder: Path, shim: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """What the plug-in is told: the shim, the folder of the run, and the settings."""
    told = {check: asdict(setting) for check, setting in settings.items()}
    return {"shim": str(shim), "folder": str(folder.resolve()), "settings": told}


def write_plan(folder: Path, plan: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a run with this plan."""
    path = folder.resolve() / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    return {"FAULT_PLAN": str(path)}


def counts(folder: Path) -> dict[str, Counter[str]]:
    """What `counted` said for each check, of all workers of a run."""
    found: dict[str, Counter[str]] = {}
    for path in folder.glob("counts-*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            check, told = json.loads(line)
            found[check] = found.get(check, Counter()) + Counter(told)
    return found


class Planned:
    """Writes the table before each check, and counts after it."""

    def __init__(self, plan: Mapping[str, Any], worker: str) -> None:
        self.settings = {check: Setting(**told) for check, told in plan["settings"].items()}
        self.table = Path(plan["folder"], f"table-{worker}")
        self.counts = Path(plan["folder"], f"counts-{worker}")
        written(self.table, Setting())
        os.environ |= {"FAULT_TABLE": str(self.table), "LD_PRELOAD": plan["shim"]}  # for what pytest starts

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        check = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
        written(self.table, self.settings.get(check) or self.settings.get("", Setting()))
        answer = yield
        with self.counts.open("a", encoding="utf-8") as file:
            file.write(json.dumps([check, counted(self.table)]) + "\n")
        written(self.table, Setting())
        return answer


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", {}).get("workerid", "main")
    plan = json.loads(Path(os.environ["FAULT_PLAN"]).read_text(encoding="utf-8"))
    config.pluginmanager.register(Planned(plan, worker))


if __name__ == "__main__":
    compiled(MADE)
