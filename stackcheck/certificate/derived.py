"""An image made from a certified one: which checks its certificate takes over from the one below.

In: the certified image below, what was added to it (`suite.added`), this run's plan. Out: the checks that are
carried over, and what the certificate says of them. Anything that differs, or is not known, runs again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stackcheck.certificate.for_host import Wanted
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.renew import machine
from stackcheck.certificate.verify import Verified, verify
from stackcheck.oci.documents import json_object
from stackcheck.oci.stores import open_store
from stackcheck.policy import is_enough
from stackcheck.suite.run import RunPlan

if TYPE_CHECKING:
    from stackcheck.suite.added import Added

# They read what is installed, or the machine, or have an answer that no image can know before.
ALWAYS = ("test_image.py", "test_packages.py", "test_witness.py", "test_devices")
SAME_INPUTS = ("suites", "trainers", "thresholds", "runner")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Below:
    """A certified image that another was made from, and its config."""

    verified: Verified
    config: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakenOver:
    """What a certificate takes over from the one below."""

    below: Below  # the image below
    added: Added  # what lies on top of it
    carried: frozenset[str] = frozenset()  # ids of the checks that do not run again
    why: str = ""  # why all of them run again; empty if some do not

    def words(self, checks: int) -> str:
        """What runs again and why, as a line of progress."""
        if self.why:
            return f"all {checks} checks run: {self.why}"
        return f"{checks - len(self.carried)} of {checks} checks run, the others are taken over"

    def signed(self, ran: Sequence[str]) -> dict[str, Any]:
        """What the certificate says; `ran`: the checks that ran in the image itself."""
        facts = self.below.verified.facts
        carried = sorted(self.carried.difference(ran))
        return {
            "digest": self.below.verified.digest,
            "name": facts.get("name") or facts["stackId"],
            "statement": self.below.verified.statement,
            "verifiedAt": self.below.verified.verified_at.isoformat(timespec="milliseconds"),
            "layers": self.added.layers,
            "paths": self.added.paths,
            "names": list(self.added.names),
            "why": self.why,
            "ran": sorted(ran),
            "carried": carried,
            "bounds": dict(facts.get("bounds", {})) if carried else {},
        }


def read(reference: str, wanted: Wanted, *, public_key: Pinned, plain_http: bool = False) -> Below:
    """The certified image below, for this host.

    Raises:
        CertificateError: It is not certified for this host.
    """
    verified = verify(reference, wanted, public_key=public_key, plain_http=plain_http)
    store = open_store(verified.reference.target, plain_http=plain_http)
    body = b"".join(store.read_blob(verified.config_digest))
    return Below(verified=verified, config=json_object(body, verified.config_digest))


def take_over(below: Below, added: Added, plan: RunPlan, checks: Sequence[str]) -> TakenOver:
    """Which of the required checks a run of `plan` need not repeat. Pure."""
    facts = below.verified.facts
    if why := added.seen or _other_run(facts, plan):
        return TakenOver(below=below, added=added, why=why)
    passed = set(facts["passed"]) - set(facts["warned"])
    carried = frozenset(name for name in checks if name in passed and not name.startswith(ALWAYS))
    return TakenOver(
        below=below, added=added, carried=carried, why="" if carried else "every check looks at the image"
    )


def _other_run(facts: Mapping[str, Any], plan: RunPlan) -> str:
    """What the run below had otherwise than this one would; empty if nothing."""
    inputs, now = facts["inputs"], plan.inputs.model_dump()
    for name in SAME_INPUTS:
        if inputs.get(name) != now[name]:
            return f"the certificate below is of other {name}"
    if not is_enough(facts["run"]["tier"], plan.tier):
        return f"the certificate below is of the tier {facts['run']['tier']}"
    same = machine(facts) == machine({"host": plan.host.as_json()})
    return "" if same else "the certificate below is of another machine, driver or kernel"
