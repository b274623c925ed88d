"""The command line as a process of its own on a real engine, with suites that take no minutes.

An image whose python3 is a script that waits, and a checkout whose suites are one prepared answer.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import result_files
import shell_image
import waits
from fake_files import STATUS, dpkg
from small_checkout import CHECKS, write_checks
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.tags import label

ROOT = Path(__file__).resolve().parents[3]
ENDS_S = 1800.0  # a whole night of scripted suites on a busy machine takes a part of it
# A name of its own in each process of pytest-xdist: each loads its image, counts its containers, removes it.
REFERENCE = f"stackcheck-test/suites:bad-days-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
LABEL = label(REFERENCE)
# Stands in for python3. As the agent of a run it waits for its end.
PYTHON = r"""#!/bin/bash
if [ "${*: -1}" = /stackcheck/suite/inventory.py ]; then # what is in the image
    echo '{"kind": "python", "place": "/usr", "head": "Name: torch\nVersion: 2.13.0"}'
    echo '{"kind": "python", "place": "/usr", "head": "Name: numpy\nVersion: 2.4.6"}'
    echo '{"kind": "dpkg", "text": "STATUS"}'
    echo '{"kind": "end", "folders": 1, "unread": []}'
    exit
fi
if [ "$3" = -c ]; then echo '[]'; exit; fi # which of the packages that the suites need are missing
exec sleep 3600
"""
# The suites of the checkout. If they contain a file `slow`, they sleep; otherwise they write the result that
# lies beside them (answer.json), with the run id and inputs of run.json and the present time.
SUITES = """
import datetime, json, pathlib, time
import pytest

def pytest_addoption(parser):
    for name in ("gpu-vendor", "tier", "run-file", "result-dir", "agent", "lease-dir", "case-seed"):
        parser.addoption("--" + name)

def pytest_configure(config):
    suites = pathlib.Path(__file__).parent / "acceptance"
    print("stackcheck: the suites run", flush=True)
    if (suites / "slow").exists():
        time.sleep(3600)
    told = json.loads(pathlib.Path(config.getoption("run_file")).read_text())
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    words = {"RUN_ID": told["run_id"], "RUN_TIME": now, "INPUTS": told["inputs"]}
    answer = json.loads((suites / "answer.json").read_text())
    answer = {name: words.get(str(value), value) for name, value in answer.items()}
    (pathlib.Path(config.getoption("result_dir")) / "result.json").write_text(json.dumps(answer))
    bad = [one for one in answer["checks"] if one["outcome"] in ("failed", "error", "invalid")]
    pytest.exit("that was all", returncode=int(bool(bad)))
"""
PYTHON = PYTHON.replace("STATUS", STATUS.replace("\n", "\\n"))
BALLAST_BYTES = 48 << 20  # enough to be interrupted while it is copied


def make_layout(folder: Path) -> None:
    """The image: a shell, `sleep`, and the script above as python3."""
    programs = ("bash", "sleep")
    owned = dpkg(("/usr/bin/python3", PYTHON.encode()), *shell_image.of_host(programs).items())
    files = {"/usr/bin/python3": PYTHON.encode(), "/ballast": os.urandom(BALLAST_BYTES), **owned}
    shell_image.make_layout(folder, programs=programs, files=files)


def make_checkout(root: Path) -> Path:
    """A checkout whose suites are one prepared result."""
    (root / "tests" / "acceptance").mkdir(parents=True)
    (root / "trainers").mkdir()
    write_checks(root)
    shutil.copy(ROOT / "matrix.yaml", root)
    shutil.copytree(ROOT / "images", root / "images")
    (root / "tests" / "conftest.py").write_text(SUITES)
    (root / "tests" / "pytest.ini").write_text("[pytest]\n")
    return root


def let_pass(checkout: Path, name: str = LABEL) -> None:
    """Prepare a healthy result, with the image and host of the last run."""
    last_run = json.loads((checkout / "build" / name / "run.json").read_text())
    checks = [result_files.check(name, devices=[]) for name in CHECKS]
    same = {name: last_run[name] for name in ("tier", "stack_id", "image", "host", "interpreter")}
    same["seen_devices"] = [device["id"] for device in last_run["host"]["devices"]]
    of_next_run = {"run_id": "RUN_ID", "inputs": "INPUTS", "started": "RUN_TIME", "finished": "RUN_TIME"}
    document = result_files.result(*checks, **same, **of_next_run)
    (checkout / "tests" / "acceptance" / "answer.json").write_text(json.dumps(document))
    (checkout / "tests" / "acceptance" / "slow").unlink(missing_ok=True)


def let_sleep(checkout: Path) -> None:
    (checkout / "tests" / "acceptance" / "slow").touch()


class Command:
    """A `stackcheck` process whose progress is read while it runs."""

    def __init__(self, checkout: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "stackcheck", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=home(checkout),
        )
        self.lines: list[str] = []

    def until(self, words: str, limit_s: float = ENDS_S) -> bool:
        """Read progress up to a line with these words; False if the program ended without one."""
        end = time.monotonic() + limit_s
        while line := self._line(f"a line with {words!r}", max(0.0, end - time.monotonic())):
            self.lines.append(line)
            if words in line:
                return True
        return False

    def _line(self, what: str, limit_s: float) -> str:
        try:
            return waits.line(self.process.stderr, what, said=lambda: self.text, limit_s=limit_s)
        except waits.WaitedTooLongError:
            self.process.kill()
            raise

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=ENDS_S)
        self.lines += [err, out]
        assert "Traceback" not in self.text
        return self.process.returncode

    @property
    def text(self) -> str:
        return "".join(self.lines)


def home(checkout: Path) -> dict[str, str]:
    """The environment, with a separate signing key for the test."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "XDG_CONFIG_HOME": str(checkout.parent / "config"), "PYTHONPATH": path}


def stackcheck(checkout: Path, *arguments: str) -> tuple[int, str]:
    command = Command(checkout, *arguments)
    code = command.end()
    return code, command.text


def verify(checkout: Path) -> int:
    host = ("--device-model", "CPU", "--driver", "none")
    return stackcheck(checkout, "verify", f"oci:dist:{LABEL}", *host)[0]


def tags(checkout: Path) -> list[str]:
    if not (checkout / "dist" / "index.json").exists():
        return []
    return [name for name in OciLayout(checkout / "dist").tags() if name.startswith(LABEL)]
