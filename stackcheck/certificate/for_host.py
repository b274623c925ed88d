"""Which of an image's valid verdicts is enough for a host and its reader. Pure.

In: verdicts of a pinned key, and what is wanted: device model, driver, how many devices, tier, waivers. Out:
the newest that is enough, or a `CertificateError` that says what the newest lacks and what would do.
"""

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stackcheck.certificate.statement import Statement, facts, newest
from stackcheck.errors import CertificateError
from stackcheck.policy import Tier, is_enough, signed_names

# What a certificate needs unless its reader asks for a different tier.
CERTIFYING_TIER: dict[str, Tier] = {"cpu": "smoke", "amd": "standard", "nvidia": "standard"}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a certificate has to satisfy for a host and its reader."""

    device_model: str  # as in devices.json: H200, MI300X, CPU
    driver: str | None  # the host's driver; None for a host without one
    devices: int = 1  # how many devices the host has: more than were tested together are refused
    tier: Tier | None = None  # the lowest tier that is accepted; None: `CERTIFYING_TIER` of the vendor
    waivers: bool = True  # whether checks that a waiver accepts are accepted here too
    packaged_python: bool = False  # whether a package must own the image's Python

    def fits(self, host: dict[str, Any]) -> bool:
        """Whether a run was on this device model and driver."""
        models = {device["model"] for device in host["devices"]}
        return self.device_model in models and host["driver"] == self.driver


def verdict_for(reference: str, verdicts: Sequence[Statement], wanted: Wanted, today: dt.date) -> Statement:
    """The newest verdict that satisfies this host and its reader; a waiver must hold on this day.

    A newer certificate of fewer devices or of a lower tier does not hide an older one that is enough.
    """
    fit = [item for item in verdicts if wanted.fits(facts(item)["host"])]
    newest_fit = newest(fit)
    if newest_fit is None:
        hosts = [facts(item)["host"] for item in verdicts]
        raise CertificateError(
            "the image is not certified for this host",
            where=reference,
            got=_machine(wanted.device_model, wanted.driver),
            expected=" or ".join(sorted({_certified_for(host) for host in hosts})),
            next_step="certify it here: stackcheck certify; or ask for that host: --device-model, --driver",
        )
    chosen = newest(item for item in fit if not _refusal(reference, item, wanted, today))
    if chosen is None:
        refusal = _refusal(reference, newest_fit, wanted, today)
        assert refusal is not None
        raise refusal
    return chosen


def _refusal(reference: str, chosen: Statement, wanted: Wanted, today: dt.date) -> CertificateError | None:
    """Why a certificate for this device model is not enough: tier, device count, Python or waivers."""
    certified, tier = facts(chosen)["host"], facts(chosen)["run"]["tier"]
    needed = wanted.tier or CERTIFYING_TIER[certified["vendor"]]
    if not is_enough(tier, needed):
        return CertificateError(
            "the certificate is of a lower tier: the image's state is `tested`",
            where=reference,
            got=tier,
            expected=f"{needed}, or a more thorough tier",
            next_step=f"certify the image with it; or accept a lower tier: --tier {tier}",
        )
    tested = len(certified["devices"])
    if wanted.devices > tested:
        return CertificateError(
            "this host has more devices than were tested together",
            where=reference,
            got=f"{wanted.devices} devices on this host, {tested} in the certificate",
            expected=f"at most {tested} devices",
            next_step=f"certify it on such a host; or use fewer devices here: --devices {tested}",
        )
    return _python_refusal(reference, chosen, wanted) or _waiver_refusal(reference, chosen, wanted, today)


def _python_refusal(reference: str, chosen: Statement, wanted: Wanted) -> CertificateError | None:
    """Why the image's Python is not accepted: no package owns it, and the reader wants one that does."""
    python = facts(chosen).get("python")  # older certificates have none, and a package owned each Python
    if not wanted.packaged_python or not python or python["package"]:
        return None
    return CertificateError(
        "the Python of the image belongs to no package of it",
        where=reference,
        got=f"{python['file']} ({python['sha256']}), which the one who certified it accepted",
        expected="a Python that a package owns (--packaged-python)",
        next_step="compare the digest with an image that you trust, then drop --packaged-python",
    )


def _waiver_refusal(
    reference: str, chosen: Statement, wanted: Wanted, today: dt.date
) -> CertificateError | None:
    """Why the waived checks of a certificate are not accepted: by its reader, or because a waiver ended."""
    warned, waivers = facts(chosen).get("warned", []), facts(chosen).get("waivers", [])
    if warned and not wanted.waivers:
        return CertificateError(
            "the certificate accepts failed checks by waivers",
            where=reference,
            got=", ".join(warned),
            expected="no waived check (--no-waivers)",
            next_step="use a different image of this stack; or accept the waivers: drop --no-waivers",
        )
    for name in warned:
        dates = [item["until"] for item in waivers if signed_names(item["check"], name)]
        if max(dates, default="") < today.isoformat():
            return CertificateError(
                "a waiver in the certificate has ended",
                where=reference,
                got=f"{name} was waived until {max(dates, default='no date')}",
                expected=f"a waiver that holds on {today}, or a run in which the check passes",
                next_step="certify the image again: stackcheck certify STACK --force",
            )
    return None


def _certified_for(host: dict[str, Any]) -> str:
    counts = Counter(device["model"] for device in host["devices"])
    models = " and ".join(f"{model} x{count}" for model, count in sorted(counts.items()))
    return _machine(models, host["driver"])


def _machine(device_model: str, driver: str | None) -> str:
    return f"{device_model} with {f'driver {driver}' if driver else 'no driver'}"
