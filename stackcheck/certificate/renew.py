"""Renew the certificate of a published image, or widen it to one more driver, where the image is.

In: a reference by digest, one more run that PASSED, the signing key. Out: one more PASSED summary beside
the image. Each summary names the one driver of its run, and `verify` takes the newest that fits the host that
asks, so the drivers of an image are those of its valid summaries. No image is copied and no tag moves.
"""

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stackcheck.certificate import attachments, predecessor, predicates, signing
from stackcheck.certificate.policy import admit, supersede_revocation
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import (
    PROVENANCE,
    SBOM,
    TEST_RESULT,
    VSA,
    Envelope,
    Statement,
    evidence,
    facts,
    not_before,
    sign,
    status,
    time_verified,
)
from stackcheck.errors import PublishError
from stackcheck.oci.store import parse_reference
from stackcheck.oci.stores import open_store
from stackcheck.policy import is_enough
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject
from stackcheck.suite.verdict import Verdict

SHOWN = 5  # missing checks, in an error


def renew(
    reference: str,
    subject: Subject,
    result: RunResult,
    verdict: Verdict,
    *,
    key: Signer,
    verified: dt.datetime,
    now: dt.datetime | None = None,
    report: Callable[[str], None],
    plain_http: bool = False,
) -> Statement:
    """State one more PASSED run of a published image, with the provenance and the SBOM that it has.

    A second call with the same arguments finds the statements there and changes nothing.

    Raises:
        PublishError: The image's newest verdict is not PASSED any more, the run did not pass, or the store
            failed.
    """
    _require_passed(verdict, reference)
    parsed = parse_reference(reference)
    store = open_store(parsed.target, plain_http=plain_http)
    public_key = key.public_key()
    with store.writing(report), store.tidied():
        manifest = store.read_manifest(parsed.name)
        known = attachments.read_envelopes(store, manifest.digest, public_key)
        before = admit(manifest, known, now=now)
        verdict = _carrying(verdict, result, known)
        kept = facts(before)  # about the same bytes; a pair says when and on which driver
        made = predicates.statements_of_rerun(
            subject.image,
            result,
            verdict,
            _kept(before, known, reference),
            terms=signing.terms(subject, verdict, verified, kept.get("against"), kept.get("files")),
        )
        envelopes: Sequence[Envelope] = tuple(sign(statement, key) for statement in made)
        (summary,) = (item for item in made if item.predicate_type == VSA)
        _require_no_fewer([item.statement for item in known], summary, reference)
        envelopes = supersede_revocation(envelopes, summary, known, store.target, key)
        signed = next(item.statement for item in envelopes if item.statement.predicate_type == VSA)
        covered = functools.partial(obsolete, summary=signed)
        attachments.attach(store, manifest, envelopes, public_key, obsolete=covered)
        admit(manifest, attachments.read_envelopes(store, manifest.digest, public_key), now=now)
    report(f"renewed {reference} for {_driver(summary)}")
    return summary


def obsolete(known: Sequence[Statement], summary: Statement) -> frozenset[str]:
    """Digests of the statements that a new summary makes superfluous: it answers the same, and later.

    Without this an image that is renewed each week would collect hundreds of statements, and each `verify`
    reads them all. The runs stay in the history. Pure.
    """
    summaries = [item for item in known if item.predicate_type == VSA]
    covered = {item.digest: item for item in summaries if _covers(summary, item)}
    kept = [summary, *(item for item in summaries if item.digest not in covered)]
    needed = {name for item in kept for name in evidence(item)}
    results = {item.digest for item in known if item.predicate_type == TEST_RESULT}
    superseded = {name for item in covered.values() for name in evidence(item)} & results
    return frozenset(covered) | (superseded - needed)


def _covers(newer: Statement, older: Statement) -> bool:
    """Whether the newer summary replaces the older one: same configuration, and it demands no less."""
    if status(older) != "PASSED" or not_before(older) or time_verified(older) >= time_verified(newer):
        return False
    new, old = facts(newer), facts(older)
    enough = is_enough(new["run"]["tier"], old["run"]["tier"]) and not _dropped(new, old)
    return enough and machine(new) == machine(old) and set(new["warned"]) <= set(old["warned"])


def _dropped(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """The checks that the older certificate requires and the newer one does not."""
    return sorted(set(old["required"]) - set(new["required"]))


def _require_no_fewer(known: Sequence[Statement], summary: Statement, where: str) -> None:
    """Refuse a renewal that asks for less than a valid certificate of such machines does.

    Suites that dropped or renamed a check are no reason to drop it from a certificate unseen.
    """
    new = facts(summary)
    for item in known:
        if item.predicate_type != VSA or status(item) != "PASSED" or not_before(item):
            continue
        old = facts(item)
        alike = _models(old) == _models(new) and is_enough(new["run"]["tier"], old["run"]["tier"])
        if alike and (dropped := _dropped(new, old)):
            same = old["inputs"]["suites"] == new["inputs"]["suites"]
            raise PublishError(
                "the run asks for fewer checks than the certificate that it would renew",
                where=where,
                got=f"{len(dropped)} are missing, by {'the same' if same else 'other'} suites:"
                f" {', '.join(dropped[:SHOWN])}",
                expected=f"the {len(old['required'])} checks of the certificate",
                next_step="if the suites dropped them on purpose: stackcheck certify and publish by hand",
            )


def _models(certificate: Mapping[str, Any]) -> list[str]:
    return sorted(device["model"] for device in certificate["host"]["devices"])


def machine(certificate: Mapping[str, Any]) -> tuple[object, ...]:
    """What a certificate says of the machine, without which node it was."""
    host = certificate["host"]
    devices = [(device["model"], device["firmware"], device["power_cap_w"]) for device in host["devices"]]
    named = tuple(host[name] for name in ("vendor", "driver", "kernel", "partition", "nvls"))
    return (*named, sorted(devices, key=str))


def _kept(before: Statement, known: Sequence[Envelope], where: str) -> tuple[Statement, ...]:
    """The provenance and the SBOM that the existing certificate names."""
    named = evidence(before)
    kept = {
        item.statement.predicate_type: item.statement
        for item in known
        if item.statement.digest in named and item.statement.predicate_type in {PROVENANCE, SBOM}
    }
    if len(kept) != 2:
        raise PublishError(
            "the certificate names no provenance and SBOM that could be kept",
            where=where,
            got=", ".join(kept) or "neither",
            expected=f"{PROVENANCE} and {SBOM}",
            next_step="certify and publish the image again: stackcheck certify STACK --force",
        )
    return kept[PROVENANCE], kept[SBOM]


def _require_passed(verdict: Verdict, reference: str) -> None:
    if verdict.status != "PASSED":
        raise PublishError(
            "only a run that passed renews a certificate",
            where=reference,
            got=verdict.status,
            expected="PASSED",
            next_step=f"stackcheck revoke {reference} --reason TEXT, if the image is the cause",
        )


def _carrying(verdict: Verdict, result: RunResult, known: Sequence[Envelope]) -> Verdict:
    """The verdict with the stack's best certified figures; a night's own rule judged the run by them."""
    held = predecessor.held(verdict, result, (item.statement for item in known))
    return dataclasses.replace(verdict, baselines=held.baselines)


def _driver(summary: Statement) -> str:
    driver = facts(summary)["host"]["driver"]
    return f"driver {driver}" if driver else "hosts without a driver"
