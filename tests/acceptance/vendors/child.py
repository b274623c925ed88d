"""The child process in which a vendor's library runs. In: pickled requests. Out: a pickled answer to each.

Requests are ("read",), ("read_devices",) and ("sample", indices). The child ends when its pipe closes. Pickle
keeps the types of readings and absences, and it is safe: only harness/monitor.py writes to these pipes.
"""

import os
import pickle
import sys

import vendors


def main() -> None:
    vendor = vendors.module(sys.argv[1])
    with os.fdopen(int(sys.argv[2]), "rb") as source, os.fdopen(int(sys.argv[3]), "wb") as sink:
        while True:
            try:
                request = pickle.load(source)
            except EOFError:
                return
            pickle.dump(_answer(vendor, *request), sink)
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
