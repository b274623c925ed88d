"""Which published images a night runs, and that each other one is listed with its reason."""

import datetime as dt
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import result_files
import small_images
from small_checkout import FOREIGN, answer, call, verify
from small_images import NOW, STACK_ID, make_image, new_key, quiet
from stackcheck.certificate import revoke
from stackcheck.nightly import fingerprint, planning
from stackcheck.nightly.fingerprint import Fingerprint
from stackcheck.nightly.planning import Tonight
from stackcheck.nightly.state import Item, LastNight, NotRun
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.tags import label

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

KEY = new_key()
DAY = dt.timedelta(days=1)
GEMM = "test_kernels.py::test_gemm"
Capsys = pytest.CaptureFixture[str]


def here(**changes: Any) -> Fingerprint:
    """A host like the one of `result_files.host`."""
    fields = result_files.host() | {"srcversion": None} | changes
    del fields["cpu"], fields["memory_bytes"]
    fields["devices"] = [
        {name: device[name] for name in ("model", "id", "firmware", "power_cap_w")}
        for device in fields["devices"]
    ]
    return fingerprint.Fingerprint.model_validate(fields)


def release(folder: Path, **changes: Any) -> str:
    image = make_image(folder / "first")
    small_images.release(image, folder / "dist", KEY, **changes)
    return image.manifest_digest


def assessed(folder: Path, key: Any = KEY, **changes: Any) -> Item | NotRun:
    (image,) = planning.published(f"oci:{folder / 'dist'}", key.public_key())
    fields: dict[str, Any] = {
        "here": here(),
        "last": LastNight(ended=NOW, fingerprint=here()),
        "changes": (),
        "renew_after": 7 * DAY,
        "now": NOW + DAY,
    }
    return planning.assess(image, Tonight(**(fields | changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"last": None}, "the first night on this host"),
        ({"changes": ("kernel 6.1 -> 6.2",)}, "kernel 6.1 -> 6.2"),
        ({"now": NOW + 8 * DAY}, "its certificate is 8 days, 0:00:00 old"),
        ({"force": True}, "forced"),
        ({"here": here(driver="6.16")}, "not certified for this driver: driver none -> 6.16"),
    ],
)
def test_what_makes_an_image_due(tmp_path, changes, reason):
    release(tmp_path)
    found = assessed(tmp_path, **changes)
    assert isinstance(found, Item)
    assert found.reasons == (reason,)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"here": here(devices=[])}, "certified for CPU x1, not for this host"),
        ({"here": here(**result_files.host("nvidia", "H200"))}, "certified for CPU x1, not for this host"),
        ({"key": new_key()}, "the pinned key signed no certificate for it"),
    ],
)
def test_images_that_are_not_for_this_host_are_listed(tmp_path, changes, why):
    release(tmp_path)
    found = assessed(tmp_path, **changes)
    assert isinstance(found, NotRun)
    assert (found.why, found.for_here) == (why, False)


def test_a_revoked_image_is_not_brought_back_by_a_night(tmp_path):
    digest = release(tmp_path)
    target = f"oci:{tmp_path / 'dist'}"
    revoke.revoke(f"{target}@{digest}", reason="NaN", key=KEY, now=NOW + DAY / 2, report=quiet)
    layout = OciLayout(tmp_path / "dist")
    with layout.writing(quiet):
        layout.write_manifest(
            layout.read_manifest(digest), STACK_ID
        )  # as in a registry that cannot delete tags
    found = assessed(tmp_path, force=True)
    assert isinstance(found, NotRun)
    assert found.why == "revoked: NaN"


def test_a_tag_on_the_image_of_another_stack_is_not_believed(tmp_path):
    digest = release(tmp_path)
    layout = OciLayout(tmp_path / "dist")
    with layout.writing(quiet):
        layout.write_manifest(layout.read_manifest(digest), "rocm7-of-somebody")
        layout.delete_tag(STACK_ID)
    found = assessed(tmp_path, force=True)
    assert isinstance(found, NotRun)
    assert "the tag names an image of cpu-" in found.why


# -- images that were not built here, and what the file of the last night keeps, by the command line


def night(capsys: Capsys, *options: str) -> tuple[int, Any]:
    done = call(capsys, "nightly", "--json", *options)
    return done.code, json.loads(done.out) if done.out else done.err


def actions(plan: Any) -> list[str]:
    return [image["outcome"]["action"] for image in plan["images"]]


def add_foreign(root: Path, **entry: str | list[str] | bool) -> None:
    path = root / "matrix.yaml"
    chosen = {"reference": FOREIGN, "vendor": "cpu", "device": "CPU", "follow": True} | entry
    path.write_text(path.read_text() + f"foreign: [{json.dumps(chosen)}]\n")


@pytest.mark.usefixtures("own_home")
def test_an_image_from_elsewhere_is_certified_then_renewed_and_certified_again_when_it_moves(
    small_checkout, fake_engine, capsys
):
    assert call(capsys, "images").code == 0
    add_foreign(small_checkout)
    code, plan = night(capsys)
    assert (code, sorted(actions(plan))) == (0, ["certify", "renew"])
    tag = label(FOREIGN)
    assert tag in OciLayout(small_checkout / "dist").tags()
    code, plan = night(capsys)
    assert (code, plan["images"]) == (0, [])
    code, plan = night(capsys, "--force")
    assert (code, actions(plan)) == (0, ["renew", "renew"])
    fake_engine.ids[FOREIGN] = "sha256:" + "f" * 64  # somebody pushed another image under the tag
    fake_engine.answer = answer((GEMM, "failed"))
    code, plan = night(capsys)
    assert (code, actions(plan)) == (6, ["hold"])
    assert plan["images"][0]["reasons"] == ["its tag names a new image"]
    fake_engine.answer = answer()
    done = call(capsys, "nightly", "--json")
    assert (done.code, actions(json.loads(done.out))) == (0, ["certify"])
    assert f"{tag}: 0 packages changed since the last certificate" in done.err


@pytest.mark.usefixtures("own_home")
def test_a_python_of_no_package_is_accepted_in_the_matrix(small_checkout, fake_engine, capsys):
    assert call(capsys, "images").code == 0
    fake_engine.image = {"/usr/local/bin/python3": b"\x7fELF a Python of no package"}
    digest = "sha256:" + hashlib.sha256(fake_engine.image["/usr/local/bin/python3"]).hexdigest()
    without = (small_checkout / "matrix.yaml").read_text()
    add_foreign(small_checkout)
    pattern = ("--stack", label(FOREIGN))
    code, plan = night(capsys, *pattern)
    assert (code, actions(plan)) == (6, ["error"])
    because = plan["images"][0]["outcome"]["because"]
    assert f"add accept_python: [{digest}] under foreign: in matrix.yaml" in because
    assert not (small_checkout / "build" / label(FOREIGN) / "oci").exists()

    (small_checkout / "matrix.yaml").write_text(without)
    add_foreign(small_checkout, accept_python=[digest])
    code, plan = night(capsys, *pattern)
    assert (code, actions(plan)) == (0, ["certify"])
    shown = verify(capsys, f"oci:dist:{label(FOREIGN)}")
    assert (shown.code, digest in shown.err) == (0, True)
    fake_engine.ids[FOREIGN] = "sha256:" + "f" * 64  # another image, with another Python
    fake_engine.image = {"/usr/local/bin/python3": b"\x7fELF exchanged"}
    assert night(capsys, *pattern)[0] == 6


@pytest.mark.usefixtures("own_home", "fake_engine")
def test_a_stack_that_left_the_matrix_is_an_error_and_not_silence(small_checkout, capsys):
    assert call(capsys, "images").code == 0
    path = small_checkout / "matrix.yaml"
    path.write_text(
        path.read_text().replace(
            "torch: 2.13.0\n    python: 3.11\n    os: debian12\n    wheels: upstream",
            "torch: 2.12.0\n    python: 3.11\n    os: debian12\n    wheels: upstream",
            1,
        )
    )
    code, plan = night(capsys)
    assert (code, actions(plan)) == (2, ["error"])
    assert "the matrix does not have the stack of a published image" in plan["line"]


@pytest.mark.usefixtures("own_home", "fake_engine")
def test_a_damaged_file_of_the_last_night_is_refused(small_checkout, capsys):
    assert call(capsys, "images").code == 0
    assert night(capsys)[0] == 0
    (small_checkout / "build/nightly/validated.json").write_text("{")
    code, error = night(capsys)
    assert code == 2
    assert "rm " in error["error"]["next"]
