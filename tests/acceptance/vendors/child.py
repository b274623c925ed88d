"""The child process in which a vendor's library runs. In: requests, one a line.
Out: an answer to each, one a line.

Requests are ["read"], ["read_devices"] and ["sample", indices], as JSON. The child ends when its pipe closes.
`vendors.wire` keeps the types of readings and absences.
"""

import json
import os
import sys

import vendors
from vendors import wire


def main() -> None:
    vendor = vendors.module(sys.argv[1])
    with os.fdopen(int(sys.argv[2])) as source, os.fdopen(int(sys.argv[3]), "w") as sink:
        for line in source:
            sink.write(json.dumps(wire.encoded(_answer(vendor, *json.loads(line)))) + "\n")
            sink.flush()


def _answer(vendor: vendors.Vendor, call: str, *arguments: object) -> object:
    try:
        return getattr(vendor, call)(*arguments)
    except vendors.VendorAbsentError as absent:
        return absent
    # A process boundary: the parent raises the error, and the child stays alive.
    except Exception as error:  # noqa: BLE001
        return RuntimeError(f"{vendor.NAME} {call}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
