"""What a builder sees has the same modes on every host: a layer that copies a file keeps its mode."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stackcheck.imaging import bakefile

NAMES = st.from_regex(r"[a-z]{1,8}\.(json|lock|diff)", fullmatch=True)


@given(
    umask=st.integers(0, 0o077), files=st.dictionaries(NAMES, st.binary(max_size=20)), closed=st.booleans()
)
def test_no_umask_reaches_a_layer(umask: int, files: dict[str, bytes], *, closed: bool) -> None:
    before = os.umask(umask)
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = {**files, "Dockerfile": b"FROM scratch\n"}
            plan: Any = SimpleNamespace(folder=Path(folder), files=files, rootfs=None)
            context = bakefile._context(plan, closed=closed)
            assert context.stat().st_mode & 0o777 == 0o755
            modes = {path.name: path.stat().st_mode & 0o777 for path in context.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(files, 0o644)
