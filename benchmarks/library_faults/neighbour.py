"""A process that works on device 0 for a share of the time, until it is ended. In: the share, 0 to 1.
Out: a line when it begins.
"""

import sys
import time

import torch

PERIOD_S = 0.1


def main() -> None:
    share = float(sys.argv[1])
    left = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
    print("works", flush=True)
    while True:
        begun = time.monotonic()
        while time.monotonic() < begun + share * PERIOD_S:
            left @ left
            torch.cuda.synchronize()
        time.sleep(max(0.0, begun + PERIOD_S - time.monotonic()))


if __name__ == "__main__":
    main()
