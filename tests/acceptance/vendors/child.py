"""The child in which a vendor's library runs: one pickled request in, one pickled answer out, until the
pipe closes.

Requests are ("read",) and ("sample", indices). Pickle, because both ends are this file's own and typed
readings with their absences survive it; nothing else ever writes to these pipes.
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
    # A process boundary: the parent raises what it is told, and the child lives on.
    except Exception as error:  # noqa: BLE001
        return RuntimeError(f"{vendor.NAME} {call}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
