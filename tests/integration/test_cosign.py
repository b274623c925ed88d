"""The documented cosign command decides as `stackcheck verify` does, cosign 2.5 and 3.1, case by case."""

import base64
import datetime as dt
import json
import subprocess
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import asked
import result_files
import small_images
from small_images import STACK_ID, SmallImage, certify, make_image, new_key, quiet
from stackcheck.certificate import attachments, cluster_policies, keys, revoke, verify
from stackcheck.certificate.statement import PROVENANCE, SBOM, TEST_RESULT, VSA, Envelope, Statement, sign
from stackcheck.errors import CertificateError
from stackcheck.oci.documents import compact_json
from stackcheck.oci.stores import open_store
from waits import run_program

KEY, OTHER = new_key(), new_key()
NOW = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)  # what is lifted is lifted by a later run
SECOND = dt.timedelta(seconds=1)
H200 = result_files.host("nvidia", "H200", "H200", driver="580.1")


@dataclass
class World:
    """An image in a repository of its own, both programs, and the host for which `verify` is asked."""

    target: str
    image: SmallImage
    folder: Path
    programs: dict[str, Path]
    host: dict[str, Any] = field(default_factory=dict)
    key: Any = KEY

    @property
    def reference(self) -> str:
        return f"{self.target}@{self.image.manifest_digest}"

    def release(self, key: Any = KEY, **changes: Any) -> None:
        small_images.release(self.image, self.target, key, **({"now": NOW} | changes))

    def attach(self, *envelopes: Envelope, key: Any = KEY) -> None:
        """Statements as somebody could write them by hand, in both forms."""
        store = open_store(self.target)
        manifest = store.read_manifest(self.image.manifest_digest)
        attachments.attach(store, manifest, envelopes, key.public_key())

    def copy_image(self) -> None:
        """The image alone, without a statement."""
        self.release(OTHER)  # signed by nobody whom a reader trusts

    def accepts(self, **changes: Any) -> bool:
        told = {"public_key": self.key.public_key(), "now": NOW + dt.timedelta(minutes=35)} | self.host
        try:
            asked.verified(self.reference, **(told | changes))
        except CertificateError:
            return False
        return True

    def cosign(self, version: str, *options: str, kind: str = VSA) -> subprocess.CompletedProcess[str]:
        """The command of docs/guides/certificates.md; options take the place of its policy."""
        public, policy = self.folder / f"{uuid.uuid4().hex}.pub", self.folder / "stackcheck.cue"
        public.write_bytes(keys.public_pem(self.key.public_key()))
        policy.write_text(cluster_policies.policy_text())
        words = ["verify-attestation", "--insecure-ignore-tlog=true", "--key", str(public), "--type", kind]
        given = options or ("--policy", str(policy))
        return run_program([self.programs[version], *words, *given, self.reference], timeout=300)


@pytest.fixture(params=["registry", pytest.param("referring_registry", marks=pytest.mark.slow)])
def world(request, cosigns: dict[str, Path], tmp_path) -> World:
    target = f"{request.getfixturevalue(request.param)}/stacks/{uuid.uuid4().hex}"
    return World(target, make_image(tmp_path / "oci", uuid.uuid4().bytes), tmp_path, cosigns)


def nothing(world: World) -> None:
    world.copy_image()


def passed(world: World) -> None:
    world.release()


def another_key(world: World) -> None:
    world.release()
    world.key = OTHER


def revoked(world: World) -> None:
    world.release()
    revoke.revoke(world.reference, reason="NaN", key=KEY, now=NOW + SECOND, report=quiet)


def lifted(world: World) -> None:
    revoked(world)
    world.release(now=NOW + dt.timedelta(minutes=25))


def failed_by_hand(world: World) -> None:
    world.release()
    world.attach(*certify(world.image, KEY, outcome="failed", now=NOW + SECOND))


def failed_alone(world: World) -> None:
    world.copy_image()
    world.attach(*certify(world.image, KEY, outcome="failed"))


def of_another_image(world: World) -> None:
    """The statements of a certified image under the names of another one."""
    other = make_image(world.folder / "other", uuid.uuid4().bytes)
    plant(world, certify(other, KEY, now=NOW))


def plant(world: World, envelopes: tuple[Envelope, ...]) -> None:
    """Statements in both forms, whatever they say, with all digests right."""
    world.copy_image()
    store = open_store(world.target)
    manifest = store.read_manifest(world.image.manifest_digest)
    layers = [attachments.legacy_layer(store, item) for item in envelopes]
    store.write_manifest(attachments.legacy_manifest(store, layers), attachments.legacy_tag(manifest.digest))
    for item in envelopes:
        bundle = attachments.bundle(store, manifest, item, KEY.public_key(), NOW)
        store.write_manifest(bundle, attachments.bundle_tag(manifest.digest, bundle.digest))


def changed_after_signing(world: World) -> None:
    """FAILED turned into PASSED in both forms."""
    changed = []
    for item in certify(world.image, KEY, outcome="failed"):
        signed = json.loads(item.body)
        text = base64.b64decode(signed["payload"]).replace(b'"FAILED"', b'"PASSED"')
        body = compact_json({**signed, "payload": base64.b64encode(text).decode()})
        changed.append(Envelope(statement=item.statement, body=body))
    plant(world, tuple(changed))


def a_foreign_statement_beside_ours(world: World) -> None:
    world.release()
    world.attach(*certify(world.image, OTHER, outcome="failed", now=NOW + SECOND), key=OTHER)


def smoke_on_gpus(world: World) -> None:
    world.release(host=H200, tier="smoke")
    world.host = {"device_model": "H200", "driver": "580.1", "devices": 2}


def standard_on_gpus(world: World) -> None:
    world.release(host=H200, tier="standard")
    world.host = {"device_model": "H200", "driver": "580.1", "devices": 2}


CASES = {
    nothing: False,
    passed: True,
    another_key: False,
    revoked: False,
    lifted: True,
    failed_by_hand: False,
    failed_alone: False,
    of_another_image: False,
    changed_after_signing: False,
    a_foreign_statement_beside_ours: True,
    smoke_on_gpus: False,
    standard_on_gpus: True,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_cosign_decides_as_verify_does(world, case):
    case(world)
    said = {version: world.cosign(version) for version in world.programs}
    decisions = {version: done.returncode == 0 for version, done in said.items()}
    assert world.accepts() == CASES[case]
    assert decisions == dict.fromkeys(said, CASES[case]), {name: done.stderr for name, done in said.items()}


def test_what_cosign_cannot_express_is_refused_by_verify_alone(world):
    """As docs/guides/certificates.md says: age, driver, device model, count, tier of this reader."""
    world.release(host=H200, tier="standard")
    world.host = {"device_model": "H200", "driver": "580.1", "devices": 2}
    assert world.accepts()
    for change in (
        {"now": NOW + dt.timedelta(days=31)},
        {"driver": "590.1"},
        {"device_model": "MI300X"},
        {"devices": 8},
        {"tier": "soak"},
    ):
        assert not world.accepts(**change), change
    for version in world.programs:
        assert world.cosign(version).returncode == 0


def test_cosign_reads_every_statement_and_the_packages_by_their_own_name(world):
    world.release()
    wanted = verify.attached_sbom(f"{world.target}:{STACK_ID}", public_key=KEY.public_key())
    for version in world.programs:
        for kind in (TEST_RESULT, PROVENANCE, SBOM):
            done = world.cosign(version, "--check-claims=true", kind=kind)
            assert done.returncode == 0, done.stderr
        done = world.cosign(version, "--check-claims=true", kind="cyclonedx")
        assert done.returncode == 0, done.stderr
        found = [
            json.loads(base64.b64decode(json.loads(line)["payload"])) for line in done.stdout.splitlines()
        ]
        assert wanted in [statement["predicate"] for statement in found]


def test_without_the_policy_cosign_checks_the_signature_alone(world):
    revoked(world)
    for version in world.programs:
        assert world.cosign(version, "--check-claims=true").returncode == 0
        done = world.cosign(version)
        assert "verificationResult" in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "accepted"),
    [
        (("H200", None, None), True),
        (("H200", 2, "standard"), True),
        (("H200", 8, None), False),
        (("MI300X", None, None), False),
        (("H200", None, "soak"), False),
    ],
)
def test_levels_in_the_policy_hold_cosign_to_a_machine(world, asked, accepted):
    world.release(host=H200, tier="standard")
    policy = world.folder / "levels.cue"
    policy.write_text(cluster_policies.cue(cluster_policies.demanded_levels(*asked)))
    for version in world.programs:
        done = world.cosign(version, "--policy", str(policy))
        assert (done.returncode == 0) == accepted, done.stderr


@pytest.mark.slow
def test_the_rule_of_policy_controller_refuses_as_soon_as_one_summary_failed(registry, cosigns, tmp_path):
    """Its CUE, evaluated by cosign, over a document as policy-controller makes it."""
    policy = tmp_path / "rule.cue"
    pattern = 'spec: nodeSelector: "nvidia.com/gpu.product": =~#"^NVIDIA-H200.*$"#\n'
    policy.write_text("predicate: {\n" + cluster_policies.none_failed() + pattern + "}\n")
    one, two = ({"predicateType": VSA, "digest": f"sha256:{name * 64}"} for name in "ab")
    node = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}
    for passing, every, spec, accepted in (
        ([one], [one], node, True),
        ([one, two], [one, two], node, True),
        ([one], [one, two], node, False),
        ([], [], node, False),
        ([one], [one], {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100"}}, False),
    ):
        image = make_image(tmp_path / uuid.uuid4().hex, uuid.uuid4().bytes)
        world = World(f"{registry}/stacks/{uuid.uuid4().hex}", image, tmp_path, cosigns)
        world.copy_image()
        found = {"authorityMatches": {"stackcheck": {"attestations": {"passed": passing, "every": every}}}}
        world.attach(custom(world.image, found | {"spec": spec}))
        for version in cosigns:
            done = world.cosign(version, "--policy", str(policy), kind="https://example.org/result")
            assert (done.returncode == 0) == accepted, (passing, every, done.stderr)


def custom(image: SmallImage, predicate: dict[str, Any]) -> Envelope:
    """A signed statement with any predicate."""
    kind = "https://example.org/result"
    subject = [{"name": "image", "digest": {"sha256": image.manifest_digest.removeprefix("sha256:")}}]
    head = {"_type": "https://in-toto.io/Statement/v1", "subject": subject, "predicateType": kind}
    return sign(Statement(predicate_type=kind, payload=compact_json({**head, "predicate": predicate})), KEY)
