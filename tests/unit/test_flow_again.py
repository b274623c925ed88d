"""What the main job does a second time: it repeats only what changed, keeps the rest, and says why."""

import datetime as dt
from types import SimpleNamespace

import pytest

from small_checkout import CPU_STACK
from small_flow import Job
from stackcheck.certificate import keys, policy, signing
from stackcheck.certificate.revoke import revoke
from stackcheck.errors import CertificateError
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

GEMM = "test_kernels.py::test_gemm"
DAY = dt.timedelta(days=1)


def days_ago(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Let the flow sign as if it were some days earlier."""
    then = dt.datetime.now(dt.UTC) - days * DAY
    fake = SimpleNamespace(UTC=dt.UTC, datetime=SimpleNamespace(now=lambda _zone: then))
    monkeypatch.setattr(signing, "dt", fake)


def test_unchanged_inputs_keep_the_certificate_and_say_why(job: Job) -> None:
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
def test_a_changed_input_repeats_the_run_and_only_the_run(job: Job, name: str) -> None:
    job.outcome()
    path = job.root / name
    path.write_text(path.read_text() + "# changed\n")
    assert job.outcome().state == "certified"
    assert (len(job.engine.builds), len(job.engine.runs)) == (1, 2)


@pytest.mark.parametrize(("days", "state"), [(6, "unchanged"), (8, "certified")])
def test_only_a_stale_certificate_is_renewed_and_without_a_new_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, days: float, state: str
) -> None:
    with monkeypatch.context() as earlier:
        days_ago(earlier, days)
        job.outcome()
    before = job.verify().verified_at
    assert job.outcome().state == state
    assert len(job.engine.runs) == 1
    assert (job.verify().verified_at > before) == (state == "certified")


def test_damage_to_what_was_signed_is_never_passed_over_and_says_how_to_go_on(job: Job) -> None:
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


def test_a_run_that_was_not_published_is_published_by_the_next_try(job: Job) -> None:
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


def test_another_set_of_waivers_is_another_certificate(job: Job) -> None:
    job.outcome()
    job.waive(GEMM)
    assert job.outcome().state == "certified"
    assert len(job.verify().facts["waivers"]) == 1


def test_a_known_issue_that_was_added_is_another_certificate_of_the_same_run(job: Job) -> None:
    job.outcome()
    assert job.verify().facts["knownIssues"] == []
    path = job.root / "images" / "known-issues.yaml"
    row = (
        "  - id: K-planted\n    when: {vendor: cpu}\n    symptom: A planted fault is on every processor.\n"
        "    issue: OWNER/REPO#1\n    source: planted by a test\n    severity: warn\n"
    )
    path.write_text(path.read_text() + row)
    assert job.outcome().state == "certified"
    assert [issue["id"] for issue in job.verify().facts["knownIssues"]] == ["K-planted"]
    assert len(job.engine.runs) == 1
    assert job.outcome().state == "unchanged"


def test_a_revoked_image_needs_a_new_run_that_began_after_it_by_any_clock(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_damaged_image_in_dist_is_published_again(job: Job) -> None:
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
