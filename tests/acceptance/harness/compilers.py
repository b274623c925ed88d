"""The vendor's compiler of an image, run without a device. In: an architecture. Out: what came of it."""

import shutil
import subprocess
from pathlib import Path

from vendors.software import Compiler, Software

TIMEOUT_S = 300


def find(compiler: Compiler) -> str | None:
    """The compiler's path, or None where the image has none."""
    return shutil.which(compiler.program) or shutil.which(compiler.program, path=":".join(compiler.folders))


def problem(software: Software, program: str, arch: str, folder: Path) -> str | None:
    """Why one line of device code does not become code for `arch`; None when it does."""
    compiler = software.COMPILER
    assert compiler is not None
    source, output = folder / f"twice-{arch}{compiler.suffix}", folder / f"twice-{arch}.out"
    source.write_text(compiler.source, encoding="utf-8")
    words = [option.format(arch=arch, source=source, output=output) for option in compiler.options]
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=folder
    )
    if done.returncode:
        return f"{arch}: {program} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"
    made = software.architectures(output) if output.exists() else frozenset()
    return None if arch in made else f"{arch}: {program} was content, and made code for {sorted(made)}"
