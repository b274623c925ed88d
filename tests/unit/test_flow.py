"""The main job publishes exactly what passed, says why it did not, and a second time repeats what changed."""

import dataclasses
import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest

from small_checkout import AMD_STACK, CHECKS, CPU_STACK, FOREIGN, answer
from stackcheck import flow
from stackcheck.certificate import keys, policy, signing
from stackcheck.certificate.revoke import revoke
from stackcheck.certificate.statement import PROVENANCE, RUN_FIELD, TEST_RESULT, VSA, facts
from stackcheck.errors import CertificateError
from stackcheck.imaging import build
from stackcheck.matrix import matrix
from stackcheck.oci.documents import is_digest
from stackcheck.oci.layout import OciLayout
from stackcheck.suite import subject as subjects

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

GEMM = "test_kernels.py::test_gemm"


@pytest.mark.parametrize(
    ("found", "stack", "state", "code", "says"),
    [
        (answer((GEMM, "failed")), CPU_STACK, "failed", 6, f"{GEMM} failed: because"),
        (answer((GEMM, "skipped")), CPU_STACK, "failed", 6, GEMM),
        (answer((GEMM, "invalid")), CPU_STACK, "unfit", 9, f"{GEMM} invalid: because"),
        (lambda _told: None, CPU_STACK, "failed", 6, "the suites ended without a result"),
        (answer(), AMD_STACK, "failed", 6, "vendor amd was named and no AMD device is visible"),
    ],
    ids=["failed", "skipped", "unfit", "died", "no device"],
)
def test_what_did_not_pass_is_neither_signed_nor_published(*, job, found, stack, state, code, says):
    job.engine.answer = found
    outcome = job.outcome(job.stack(stack))
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code, outcome.reference) == (state, code, None)
    assert says in str(outcome.error)
    assert job.tags() == {}
    assert not (job.settings.folder(stack) / "statements").exists()


def test_an_image_that_fails_leaves_the_tag_on_the_one_that_passed(job):
    first = job.outcome().image
    assert first is not None
    job.set('env: {EXAMPLE: "1"}')
    job.engine.answer = answer((GEMM, "error"))
    outcome = job.outcome()
    assert outcome.state == "failed"
    assert outcome.image is not None
    assert outcome.image.manifest_digest != first.manifest_digest
    assert job.verify().digest == first.manifest_digest
    assert set(job.tags().values()) == {first.manifest_digest}


@pytest.mark.parametrize("experimental", [False, True])
def test_a_machine_that_the_stack_does_not_name_certifies_nothing(job, experimental):
    job.set(f"experimental: {str(experimental).lower()}")
    job.set("tested_on: [{device: CPU, count: 2}]")
    outcome = job.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("unfit", 9)
    assert "the machine has CPU x1, and the stack names CPU x2" in str(outcome.error)
    assert "name this one under tested_on in matrix.yaml" in str(outcome.error)
    assert f"{CPU_STACK}: this run cannot end PASSED: the machine has CPU x1" in "\n".join(job.lines)
    assert job.tags() == {}
    assert not (job.settings.folder(CPU_STACK) / "statements").exists()


def test_a_stack_that_cannot_be_built_does_not_keep_the_next_one_back(job):
    unlocked = dataclasses.replace(job.stack(), id="unlocked", missing=("torch's index",))
    (job.root / "images" / CPU_STACK).rename(job.root / "images" / "unlocked")
    (job.root / "images" / CPU_STACK).symlink_to(job.root / "images" / "unlocked")
    first, second = job.outcomes(unlocked, job.stack())
    assert first.error is not None
    assert (first.state, first.error.exit_code) == ("not built", 5)
    assert "torch's index" in str(first.error)
    assert second.state == "certified"


def test_waivers_are_in_the_statements(job):
    job.engine.answer = answer((GEMM, "failed"))
    given = job.waive(GEMM)
    assert job.outcome().state == "certified"
    assert facts(job.signed()[VSA])["waivers"] == [given]
    assert job.signed()[TEST_RESULT].document["predicate"]["warnedTests"] == [GEMM]
    assert job.verify().facts["waivers"] == [given]


@pytest.mark.parametrize("changes", [{"until": "2026-01-31"}, {"stacks": ["rocm*"]}])
def test_a_waiver_that_ended_or_is_for_other_stacks_lets_nothing_pass(job, changes):
    job.engine.answer = answer((GEMM, "failed"))
    job.waive(GEMM, **changes)
    outcome = job.outcome()
    assert outcome.error is not None
    assert outcome.state == "failed"
    assert ("its waiver ended on 2026-01-31" in str(outcome.error)) == ("until" in changes)


def test_a_run_of_a_lower_tier_is_tested_and_never_signed(job):
    path = job.root / "matrix.yaml"
    path.write_text(path.read_text().replace("certifies: {cpu: smoke", "certifies: {cpu: standard", 1))
    outcome = job.outcome(tier="smoke")
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("not published", 2)
    assert "its state is `tested`" in str(outcome.error)
    assert "a smoke run does not certify cpu" in "\n".join(job.lines)
    assert not (job.settings.folder(CPU_STACK) / "statements").exists()
    assert job.outcome().state == "certified"
    assert job.verify().facts["run"]["tier"] == "standard"


@pytest.mark.parametrize("moves_at", ["has", "inspect", "save", "step_sizes"])
def test_what_is_certified_of_a_moving_tag_is_what_the_tag_named_once(job, monkeypatch, moves_at):
    """The layout that is signed and the id under which the suites run are of one image."""
    engine: Any = job.engine
    engine.pull(FOREIGN)
    saved: list[str] = []
    save = engine.save
    monkeypatch.setattr(engine, "save", lambda name, layout: [saved.append(name), save(name, layout)])
    real = getattr(engine, moves_at)

    def move(*arguments: Any) -> Any:
        found = real(*arguments)
        engine.ids[FOREIGN] = "sha256:" + "b" * 64
        return found

    monkeypatch.setattr(engine, moves_at, move)
    image = build.adopt(FOREIGN, engine, folder=job.settings.folder("foreign"), report=job.lines.append)
    assert saved == [image.reference]
    assert is_digest(image.reference)


def test_an_image_from_elsewhere_is_held_to_the_vendors_checks(job):
    engine: Any = job.engine
    policy = matrix.load_matrix(job.root / "matrix.yaml").policy
    image = build.adopt(FOREIGN, engine, folder=job.settings.folder("foreign"), report=job.lines.append)
    subject = subjects.of_image(image, policy, None, name="foreign", vendor=None)
    assert (subject.vendor, subject.stack, subject.machines) == ("cpu", None, None)
    judged = flow.test(subject, engine, job.settings, job.lines.append)
    assert judged.verdict.status == "PASSED"
    assert sorted(judged.verdict.required) == sorted(CHECKS)
    flow.sign(subject, judged, job.settings)
    predicate = job.signed("foreign")[PROVENANCE].document["predicate"]
    assert predicate["buildDefinition"]["externalParameters"]["origin"] == "not built by this project"
    assert predicate["buildDefinition"]["resolvedDependencies"] == []
    assert job.signed("foreign")[TEST_RESULT].document["predicate"][RUN_FIELD]["id"] == judged.result.run_id


DAY = dt.timedelta(days=1)


def days_ago(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Let the flow sign as if it were some days earlier."""
    then = dt.datetime.now(dt.UTC) - days * DAY
    fake = SimpleNamespace(UTC=dt.UTC, datetime=SimpleNamespace(now=lambda _zone: then))
    monkeypatch.setattr(signing, "dt", fake)


def test_unchanged_inputs_keep_the_certificate_and_say_why(job):
    job.outcome()
    before = job.verify().verified_at
    outcome = job.outcome()
    assert outcome.state == "unchanged"
    assert outcome.reason == "same image, suites, thresholds and host; certificate still valid"
    assert (len(job.engine.builds), len(job.engine.runs)) == (1, 1)
    assert job.verify().verified_at == before
    assert any("not built again: same Dockerfile" in line for line in job.lines)
    assert any("not run again: same image, suites, thresholds and host" in line for line in job.lines)


@pytest.mark.parametrize("name", ["tests/acceptance/test_some.py", "trainers/train.py", "matrix.yaml"])
def test_a_changed_input_repeats_the_run_and_only_the_run(job, name):
    job.outcome()
    path = job.root / name
    path.write_text(path.read_text() + "# changed\n")
    assert job.outcome().state == "certified"
    assert (len(job.engine.builds), len(job.engine.runs)) == (1, 2)


@pytest.mark.parametrize(("days", "state"), [(6, "unchanged"), (8, "certified")])
def test_only_a_stale_certificate_is_renewed_and_without_a_new_run(job, monkeypatch, days, state):
    with monkeypatch.context() as earlier:
        days_ago(earlier, days)
        job.outcome()
    before = job.verify().verified_at
    assert job.outcome().state == state
    assert len(job.engine.runs) == 1
    assert (job.verify().verified_at > before) == (state == "certified")


def test_damage_to_what_was_signed_is_never_passed_over_and_says_how_to_go_on(job):
    image = job.outcome().image
    assert image is not None
    files = sorted((job.dist / "blobs" / "sha256").iterdir())
    for path in (*files, job.dist / "index.json"):
        if not path.exists():
            continue  # an earlier round published anew, which removes the statements that it replaces
        body = path.read_bytes()
        path.write_bytes(body[:-2] + b"~~")
        outcome = job.outcome()
        if outcome.error is None:  # written again, or of an earlier certificate that no tag names
            assert job.verify().digest == image.manifest_digest
        else:
            assert (outcome.state, outcome.error.exit_code) == ("not published", 8), path
            assert f"move {job.dist} away" in str(outcome.error)
            path.write_bytes(body)


def test_a_run_that_was_not_published_is_published_by_the_next_try(job):
    """An older certificate of the same image is still fresh, but it is about another run."""
    job.outcome()
    away = job.dist.rename(job.dist.with_name("away"))
    job.dist.write_text("a file where a folder should be")
    assert job.outcome(force=True).state == "not published"
    job.dist.unlink()
    away.rename(job.dist)
    outcome = job.outcome()
    assert outcome.state == "certified"
    assert outcome.result is not None
    assert job.verify().facts["run"]["id"] == outcome.result.run_id


def test_another_set_of_waivers_is_another_certificate(job):
    job.outcome()
    job.waive(GEMM)
    assert job.outcome().state == "certified"
    assert len(job.verify().facts["waivers"]) == 1


def test_a_known_issue_that_was_added_is_another_certificate_of_the_same_run(job):
    job.outcome()
    known = [issue["id"] for issue in job.verify().facts["knownIssues"]]
    path = job.root / "images" / "known-issues.yaml"
    row = (
        "  - id: K-planted\n    when: {vendor: cpu}\n    symptom: A planted fault is on every processor.\n"
        "    issue: OWNER/REPO#1\n    source: planted by a test\n    severity: warn\n"
    )
    path.write_text(path.read_text() + row)
    assert job.outcome().state == "certified"
    assert [issue["id"] for issue in job.verify().facts["knownIssues"]] == [*known, "K-planted"]
    assert len(job.engine.runs) == 1
    assert job.outcome().state == "unchanged"


def test_a_revoked_image_needs_a_new_run_that_began_after_it_by_any_clock(job, monkeypatch):
    job.outcome()
    now = dt.datetime.now(dt.UTC)
    revoke(
        f"oci:{job.dist}:{CPU_STACK}",
        reason="NaN",
        key=keys.load_private_key(job.settings.key),
        now=now,
        report=job.lines.append,
    )
    outcome = job.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("not published", 8)
    assert "revoked" in outcome.reason
    assert job.outcome(force=True).state == "not published", "twenty minutes have not gone by"
    monkeypatch.setattr(policy, "CLOCK_SKEW", dt.timedelta(0))
    assert job.outcome(force=True).state == "certified"
    assert job.verify().verified_at > now


def test_a_damaged_image_in_dist_is_published_again(job):
    image = job.outcome().image
    assert image is not None
    store = OciLayout(job.dist)
    manifest = store.read_manifest(image.manifest_digest)
    parts = [blob.digest for blob in (*manifest.descriptors("config"), *manifest.descriptors("layers"))]
    for digest in (*parts, manifest.digest):
        path = store.blob_path(digest)
        path.write_bytes(path.read_bytes()[:-1] + b"~")
        with pytest.raises(CertificateError):
            job.verify()
        assert job.outcome().state == "certified"
        assert job.verify().digest == image.manifest_digest
    assert len(job.engine.runs) == 1
