"""What the consumer's verbs print, and refuse."""

import datetime as dt
import json
from pathlib import Path

import pytest

import result_files
from small_checkout import call
from small_dist import KEY, release
from small_images import STACK_ID, SmallImage
from stackcheck.certificate import keys

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
