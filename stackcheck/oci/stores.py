"""The store of a publish target.

In: `oci:DIR` or `HOST/REPO`. Out: an `OciLayout` or a `Repository`.
"""

from pathlib import Path

from stackcheck.oci.distribution import Repository
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.patience import Patience
from stackcheck.oci.store import Store


def open_store(target: str, *, plain_http: bool = False, total_s: float | None = None) -> Store:
    """The store of a target.

    Args:
        target: `oci:DIR` or `HOST/REPO`.
        plain_http: Talk http to a registry that is not on a loopback address.
        total_s: All that is asked of a registry must be answered within this many seconds; None: any time.
    """
    if target.startswith("oci:"):
        return OciLayout(Path(target.removeprefix("oci:")))
    host, _, repository = target.partition("/")
    return Repository(host, repository, plain_http=plain_http, patience=Patience(total_s))
