"""What the suites need of an image that was not built here. In: its SBOM, its Python. Out: an error, or none.

Without these packages nearly every check would fail, each with a reason of its own, after minutes.
"""

import json
from collections.abc import Sequence
from typing import Any

from stackcheck.engine.client import Engine
from stackcheck.engine.container import USER_ENV, RunSpec
from stackcheck.errors import ChecksFailedError
from stackcheck.suite import answers, interpreter, steering
from stackcheck.suite.results import ReportedInterpreter
from stackcheck.suite.subject import Subject

# A package, by the one name that pip and `import` both use -> why.
NEEDED = {
    "torch": "torch, which is what is tested",
    "numpy": "NumPy, which torch's wheel does not bring: torch.distributed needs it to exchange objects",
}
# It looks where `import` would look, and imports nothing.
ASK = """
import json, sys
from importlib.util import find_spec
print(json.dumps([name for name in sys.argv[1:] if find_spec(name) is None]))
"""
TIMEOUT_S = 120


def require(document: dict[str, Any], subject: Subject, engine: Engine) -> None:
    """Refuse an image whose Python does not find what the suites need.

    The engine asks it as the user who runs the suites, who may not enter every folder.

    Raises:
        ChecksFailedError: A package of `NEEDED` is in no place of the image, or in one that the first Python
            on its PATH does not search, or that Python cannot be started.
    """
    found = [item["name"] for item in document["components"] if "pkg:pypi/" in str(item.get("purl", ""))]
    missing = [package for package in NEEDED if package not in found]
    if missing:
        raise ChecksFailedError(
            f"the image has no {missing[0]}",
            where=subject.name,
            got=f"{len(found)} Python packages, no {' and no '.join(missing)} among them",
            expected=f"{NEEDED[missing[0]]}, in the Python that PATH names first",
            next_step=f"add to its Dockerfile: RUN python3 -m pip install {' '.join(missing)}",
        )
    python = interpreter.find(subject.image.reference, engine, subject.accepted_python)
    _require_found(python, subject, engine)


def _require_found(python: ReportedInterpreter, subject: Subject, engine: Engine) -> None:
    code, lines = answers.ask(
        engine,
        _question(python, subject.image.reference, engine),
        lambda said: _answer(said) is not None,
    )
    missing = None if code else _answer(lines)
    if missing is None:
        raise ChecksFailedError(
            "the image's Python cannot be started by the user who runs the suites",
            where=f"{subject.name}: {python.path}",
            got=f"exit code {code}; last lines:\n    " + "\n    ".join(line[:200] for line in lines[-5:]),
            expected="a Python that every user can start",
            next_step="move it out of a home folder such as /root, or give every user the right to read it",
        )
    if missing:
        raise ChecksFailedError(
            f"the image's Python does not find the installed {' and '.join(missing)}",
            where=f"{subject.name}: {python.path}",
            got="packages in a place that this Python does not search, or that only root can read",
            expected=f"{NEEDED[missing[0]]}, in the Python that PATH names first",
            next_step="put the folder of the right Python first: ENV PATH=/opt/conda/envs/NAME/bin:$PATH",
        )


def _question(python: ReportedInterpreter, reference: str, engine: Engine) -> RunSpec:
    user, env = steering.uid(), engine.inspect(reference).env
    return RunSpec(
        image=reference,
        entrypoint=(python.path,),
        command=("-I", "-B", "-c", ASK, *NEEDED),
        user=f"{user}:{user}",
        env={**dict.fromkeys(filter(steering.is_neutralised, env)), **USER_ENV},
        workdir="/tmp",  # noqa: S108  # the container's own
        timeout_s=TIMEOUT_S,
    )


def _answer(lines: Sequence[str]) -> list[str] | None:
    """The names that are missing, as the last line has them; None for a line of another form, or none."""
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    return [name for name in NEEDED if name in found] if isinstance(found, list) else None
