"""What torchrun starts for each rank: offer the stacks, then run the program as if it had been started
itself.
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
