"""A torchrun program: products and copies on all devices at the same time. In: nothing. Out: a JSON line.

The line is `{"ranks": [{"gemm_tflops": figure, "copy_gb_per_s": figure}]}`, a figure as in `kernel_speed`.
"""

import json

from workloads import kernel_speed
from workloads.collective_timing import HostBarrier
from workloads.ranks import joined


def main() -> None:
    with joined() as ranks:
        everyone = ranks.collect(kernel_speed.beside_others(HostBarrier(ranks)))
        if everyone is not None:
            print(json.dumps({"ranks": everyone}), flush=True)


if __name__ == "__main__":
    main()
