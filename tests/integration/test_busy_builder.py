"""A builder whose store stands still when a build ends: its own deadline passes, and the build runs again.

In: a daemon of its own, whose containerd is stopped by a signal. Out: the files of the build all the same.
"""

import os
import signal
import threading
from pathlib import Path

import pytest

import waits
from second_daemon import second_daemon
from stackcheck.engine import buildx

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a daemon"),
]

FILES, BYTES = 30, 10 * 2**20  # copied to the client for a second or more: time to stop the store


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(word) for thread in threads for word in (thread / "children").read_text().split()]


def test_a_build_that_was_done_but_not_recorded_in_time_is_run_again(tmp_path):
    context, out = tmp_path / "context", tmp_path / "out"
    context.mkdir()
    for number in range(FILES):
        (context / f"file-{number:02}").write_bytes(os.urandom(BYTES))
    (context / "Dockerfile").write_text("FROM scratch\nCOPY file-* /\n")
    definition = {"target": {"files": {"context": str(context), "output": [f"type=local,dest={out}"]}}}
    lines: list[str] = []
    with second_daemon(containerd_store=True) as daemon:
        (containerd,) = children(daemon.pid)

        def stop_when_files_come() -> None:
            waits.until(lambda: out.exists() and any(out.iterdir()), f"files in {out}")
            os.kill(containerd, signal.SIGSTOP)

        def tell(line: str) -> None:
            lines.append(line)
            if "too busy" in line:
                os.kill(containerd, signal.SIGCONT)

        threading.Thread(target=stop_when_files_come, daemon=True).start()
        try:
            done = buildx.bake(definition, ["files"], report=tell)
        finally:
            os.kill(containerd, signal.SIGCONT)
    assert sum("too busy" in line for line in lines) == 1
    assert (done.steps, done.cached) == (1, 0)
    assert {path.name: path.stat().st_size for path in out.iterdir()} == {
        f"file-{number:02}": BYTES for number in range(FILES)
    }
