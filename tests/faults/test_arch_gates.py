"""Gates that follow the architecture, with the Python that has torch: the tests are in arch_gates.py."""

import subprocess
from pathlib import Path

TESTS = Path(__file__).with_name("arch_gates.py")
LEAST = 13  # a smaller count means that a test was lost


def test_gates_follow_the_architecture(suite_python: str) -> None:
    command = (suite_python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=TESTS.parents[2]
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = next(word for word in done.stdout.splitlines()[-1].split() if word.isdigit())
    assert int(passed) >= LEAST, done.stdout[-2000:]
