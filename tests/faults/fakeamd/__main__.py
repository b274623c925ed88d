"""`python -m fakeamd [STATE|FILE [--library RELEASE] -- COMMAND…]`: a command on a fabricated host.

Example, from tests/faults as root: `python -m fakeamd mi300x -- amd-smi topology`. FILE is one that
`stackcheck first-host` wrote. Without arguments: the names of all states.
"""

import argparse
import sys

from fakeamd import host, rootfs
from fakeamd.states import STATES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fakeamd", description=__doc__)
    parser.add_argument("state", nargs="?", metavar="STATE|FILE")
    parser.add_argument("--library", default=rootfs.LIBRARIES[-1].release, help="AMD's release number")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if arguments.state is None:
        sys.stdout.write("\n".join(STATES) + "\n")
        return 0
    try:
        done = host.run(
            host.state(arguments.state), rootfs.library(arguments.library), command or ["amd-smi"]
        )
    except rootfs.FakeAmdError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
