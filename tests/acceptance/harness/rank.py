"""The program that torchrun starts on each rank. In: a program.
Out: its Python stacks on demand, and what it does.

The program runs as if torchrun had started it directly.
"""

import os
import runpy
import sys
from pathlib import Path

from harness import stacks


def main() -> None:
    stacks.offer(f"rank-{int(os.environ['RANK']):03d}")
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
