"""What the consumer's verbs print, and refuse."""

import datetime as dt
import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import result_files
from small_checkout import call
from small_dist import KEY, release, verified
from small_images import STACK_ID, SmallImage
from stackcheck.certificate import keys
from stackcheck.cli import consumer, published
from stackcheck.errors import ConfigurationError
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


@pytest.fixture
def public(tmp_path: Path) -> str:
    path = tmp_path / "publisher.pub"
    path.write_bytes(keys.public_pem(KEY.public_key()))
    return str(path)


# Every key of `verify --json`, and its type: scripts read them.
FACTS: dict[str, type | tuple[type, ...]] = {
    "stack": (str, type(None)),
    "run": str,
    "digest": str,
    "device_model": str,
    "driver": (str, type(None)),
    "verified_at": str,
    "valid_until": str,
    "signed_by": list,
    "tier": str,
    "devices": int,
    "checks": dict,
    "bounds": dict,
    "static_only": list,
    "against": (dict, type(None)),
    "derived_from": (dict, type(None)),
    "next": str,
    "notes": list,
    "certificate": dict,
}


@pytest.mark.parametrize("model", ["CPU", "H200"])
def test_each_fact_of_verify_as_json_has_its_type(
    tmp_path: Path, image: SmallImage, public: str, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """A count is a number, several things are a list, a time has a zone, and what is not there is null."""
    gpu = model != "CPU"
    host = result_files.host("nvidia", model, driver="580.1") if gpu else result_files.host()
    release(image, tmp_path / "typed", host=host)
    command = ("verify", f"oci:{tmp_path}/typed:{STACK_ID}", "--key", public, "--max-age", "36500d", "--json")
    done = call(capsys, *command, "--device-model", model, "--driver", "580.1" if gpu else "none")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document.keys() == FACTS.keys()
    for name, wanted in FACTS.items():
        assert isinstance(document[name], wanted), name
        assert not isinstance(document[name], bool), name
    for name in ("verified_at", "valid_until"):
        assert dt.datetime.fromisoformat(document[name]).tzinfo is not None
    for name in ("signed_by", "static_only", "notes"):
        assert all(isinstance(item, str) for item in document[name]), name
    for name in ("checks", "bounds"):
        assert all(isinstance(count, int) for count in document[name].values()), name
    assert document["driver"] == ("580.1" if gpu else None)


@pytest.mark.parametrize("age", ["", "30", "d", "-1d", "1.5d", "99999999999999d"])
def test_an_invalid_duration_is_a_usage_error(dist: Path, public: str, age: str) -> None:
    command = ["verify", f"oci:{dist}:{STACK_ID}", "--key", public, f"--max-age={age}"]
    done = CliRunner().invoke(consumer.app, [*command, "--device-model", "CPU", "--driver", "none"])
    assert isinstance(done.exception, ConfigurationError)
    assert done.exception.what == "invalid duration"


def test_a_dry_run_of_gc_removes_nothing_and_gc_says_how_many_bytes(
    dist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = b"a layer of nothing"
    path = dist / "blobs" / "sha256" / hashlib.sha256(body).hexdigest()
    path.write_bytes(body)
    wanted = {"digest": f"sha256:{path.name}", "size_bytes": len(body)}
    for dry, words in ((True, ["--dry-run"]), (False, [])):
        document = json.loads(call(capsys, "gc", f"oci:{dist}", "--json", *words).out)
        assert (document["removed"], document["bytes"], document["blobs"]) == (not dry, len(body), [wanted])
        assert path.exists() == dry
    assert verified(dist)


def test_a_dry_run_revokes_nothing(dist: Path, tmp_path: Path) -> None:
    keys.load_or_create(tmp_path / "k.key")
    digest = OciLayout(dist).read_manifest(STACK_ID).digest
    command = ["revoke", f"oci:{dist}@{digest}", "--reason", "NaN", "--dry-run"]
    done = CliRunner().invoke(published.app, [*command, "--key", str(tmp_path / "k.key")])
    assert done.exit_code == 0, done.output
    assert verified(dist)


@pytest.mark.parametrize(
    "target", ["oci:other:tag", "registry.example.org:99999/a", "https://registry.example.org/a"]
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_refuses_the_target_that_promoting_refuses(
    dist: Path, public: str, target: str, *, dry_run: bool
) -> None:
    command = ["promote", f"oci:{dist}:{STACK_ID}", "--key", public, "--to", target]
    done = CliRunner().invoke(published.app, [*command, *["--dry-run"] * dry_run])
    assert isinstance(done.exception, ConfigurationError)
