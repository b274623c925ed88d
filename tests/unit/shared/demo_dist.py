"""The images of the demonstration history, published: with a waiver, a revoked and an expired certificate.

In: a folder. Out: a layout with certified images in it.
"""

import dataclasses
import datetime as dt
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from demo_history import RESUME, ROCM_NEW, ROCM_REVOKED, ROOT, Simulated, certified
from small_images import make_image, quiet, sbom_of
from stackcheck.certificate import predicates, publish, revoke
from stackcheck.policy import Waiver
from stackcheck.suite import results
from stackcheck.suite.subject import Provenance


def publish_all(folder: Path, key: EllipticCurvePrivateKey, now: dt.datetime) -> str:
    """Publish small images of the simulated stacks, and return the target."""
    target = f"oci:{folder / 'dist'}"
    ages = [dt.timedelta(hours=5), dt.timedelta(hours=4), dt.timedelta(hours=3), dt.timedelta(days=1)]
    ages += [dt.timedelta(days=38), dt.timedelta(days=2)]
    for run, age in zip(certified(now), ages, strict=True):
        waived = RESUME if run.result["stack_id"] == ROCM_NEW else None
        _publish(folder, key, target, run, now - age, waived=waived)
    revoke.revoke(
        f"{target}:{ROCM_REVOKED}",
        reason="all-reduce returned NaN on two nodes",
        key=key,
        now=now,
        report=quiet,
    )
    return target


def _publish(
    folder: Path,
    key: EllipticCurvePrivateKey,
    target: str,
    run: Simulated,
    now: dt.datetime,
    *,
    waived: str | None = None,
) -> None:
    stack = run.result["stack_id"]
    image = make_image(folder / "images" / stack, stack.encode(), stack)
    document = run.result | {
        "image": {
            "reference": stack,
            "config_digest": image.config_digest,
            "manifest_digest": image.manifest_digest,
        }
    }
    waiver = Waiver(
        check="test_training.py::test_resume_with_uneven_shards[2]",
        stacks=("rocm7*",),
        reason="The state dict is cached upstream; jobs of this cluster do not resume with other ranks.",
        issue="pytorch/torchtitan#1136",
        by="cluster operations",
        until=(now + dt.timedelta(days=40)).date(),
    )
    verdict = run.verdict
    if waived:
        verdict = dataclasses.replace(verdict, warned=(waived,), waivers=(waiver,))
    envelopes = predicates.certify(
        image,
        results.parse(json.dumps(document).encode()),
        dataclasses.replace(verdict, status="PASSED", reasons=()),
        Provenance(parameters={"stack": stack}, dependencies={}, started=now),
        sbom_of(image),
        key=key,
        terms=predicates.Terms(now=now, known_issues=known_issues(stack)),
    )
    publish.publish(
        image.layout, tag=stack, envelopes=envelopes, target=target, public_key=key.public_key(), report=quiet
    )


def known_issues(stack: str) -> tuple[dict[str, Any], ...]:
    """What the checkout knows of a stack."""
    from stackcheck.matrix import resolve

    return tuple(issue.as_json() for issue in resolve.load_stacks(ROOT, (stack,))[0].known_issues)[:2]
