"""What the wheel carries beside the package: matrix, suites, rules and trainers. In: a checkout."""

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py  # type: ignore[import-untyped]  # it has no types

SHIPPED = ("matrix.yaml", "images", "tests/acceptance", "tests/conftest.py", "tests/pytest.ini", "trainers")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


class WithSuites(build_py):  # type: ignore[misc]  # the same
    """Copies to `stackcheck/checkout/` what a checkout has beside the package."""

    def run(self) -> None:
        """Build the package; an editable installation finds the files where they are."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "stackcheck" / "checkout"
        shutil.rmtree(target, ignore_errors=True)
        for name in SHIPPED:
            source, copy = Path(name), target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=LEFT_OUT)
            else:
                shutil.copy2(source, copy)
