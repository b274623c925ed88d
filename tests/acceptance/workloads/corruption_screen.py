"""A torchrun program: compare the bits of products on all devices at full power. In: seconds.
Out: a JSON line.

The line is `{"devices": [{"checksum", "inputs", "repeats", "differences": []}]}` by rank.
"""

import argparse
import json

from workloads import repeatability
from workloads.ranks import joined


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    seconds = parser.parse_args().seconds
    with joined(timeout_s=seconds + 60) as ranks:
        everyone = ranks.collect(repeatability.screen(seconds))
        if everyone is not None:
            print(json.dumps({"devices": everyone}), flush=True)


if __name__ == "__main__":
    main()
