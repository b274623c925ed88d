"""What tokens cost: records of train.py, at the prices of Spheron's guide or at yours.

    python benchmarks/training/cost.py RECORD [RECORD …] [--price-per-hour 2.05]

Out: a Markdown table: each record's rate, and the dollars for 1e6 and 1e12 tokens on demand and as spot. A
price is one GPU's. The number of GPUs does not change the cost of a token, except through the rate of each.
Exit code 2: a record without a speed, or no price of its device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "trainers"))
    from errors import require_torch

    require_torch(__file__)

import metrics
import rows
from errors import RefusedError
from tools.curve import read_record

PRICES = {"dollars_per_hour": "on demand", "spot_dollars_per_hour": "spot"}


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    try:
        lines = [line for path in options.records for line in costs(path, options.price_per_hour)]
    except RefusedError as error:
        print(f"cost.py: {error}", file=sys.stderr)
        return 2
    print("| job | tokens/s/GPU | device | $/h/GPU | $ per 1M tokens | $ per 1T tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    return 0


def costs(path: Path, price: float | None) -> list[str]:
    """One line for each price of the record's device."""
    record = read_record(path)
    speed = record["performance"]
    if speed is None or speed["unit"] != "tokens" or record["problems"]:
        raise RefusedError(f"{path}: no sound speed in tokens: {record['problems'] or 'nothing was timed'}")
    rate, device = float(speed["tokens_per_s_per_gpu"]), record["device"]["model"]
    prices = [("yours", price)] if price else published(device)
    if not prices:
        raise RefusedError(f"{path}: the guide has no price of {device}; give --price-per-hour")
    return [_line(record, rate, device, said, one) for said, one in prices]


def published(device: str) -> list[tuple[str, float]]:
    """The guide's prices of a device model; both ends where it gives a range."""
    found = []
    for row in rows.document("spheron").rows:
        if row.metric in PRICES and row.device == device:
            values = row.value if isinstance(row.value, tuple) else (row.value,)
            found += [(PRICES[row.metric], value) for value in values if value is not None]
    return found


def _line(record: dict[str, Any], rate: float, device: str, said: str, price: float) -> str:
    made = metrics.cost(rate, price)
    job = f"{record['model']} {record['size']} {record['options']['precision']}"
    cells = (job, f"{rate:,.0f}", device, f"{price:.2f} {said}", f"{made['dollars_per_1m_tokens']:.3f}")
    return f"| {' | '.join(cells)} | {made['dollars_per_1t_tokens']:,.0f} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="what train.py wrote")
    parser.add_argument(
        "--price-per-hour", type=float, help="price of one GPU in dollars [the guide's prices]"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
