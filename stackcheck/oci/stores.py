"""The store of a publish target.

In: `oci:DIR` or `HOST/REPO`. Out: an `OciLayout` or a `Repository`.
"""

from pathlib import Path

from stackcheck.oci.distribution import Repository
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.patience import Patience
from stackcheck.oci.store import Store


def open_store(target: str, *, plain_http: bool = False, total_s: float | None = None) -> Store:
    """The store of a target (`oci:DIR`, `HOST/REPO`), which answers everything within `total_s` seconds."""
    if target.startswith("oci:"):
        return OciLayout(Path(target.removeprefix("oci:")))
    host, _, repository = target.partition("/")
    return Repository(host, repository, plain_http=plain_http, patience=Patience(total_s))
