"""The SBOM lists what an image's own file system holds, with the same bytes every time, or it is refused."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.output.json import JsonV1Dot6
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_files import PYTHON, STATUS, HasFiles, dpkg
from small_images import STACK_ID, make_image, new_key, quiet, release
from stackcheck.engine.client import RunSpec
from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.imaging.image import Image
from stackcheck.oci.documents import compact_json
from stackcheck.suite import inventory, sbom, sbom_document
from stackcheck.suite.results import ReportedInterpreter

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

INVENTORY = (Path(__file__).parents[1] / "assets" / "sbom" / "inventory.jsonl").read_text().splitlines()
RECORDS = [json.loads(line) for line in INVENTORY]
KEY = new_key()
# Heads, release files and package databases as broken images have them.
ODD = [
    "Name: \nVersion: 1",
    "Name: a/b@c\nVersion: 1 2",
    "Name: a\nVersion: 1\nLicense: UNKNOWN\nClassifier: License :: ",
    "Name: a\nVersion: 1\nLicense-Expression: MIT AND",
    'ID="debian',
    "ID=\nVERSION_ID=",
    "Package: a\nStatus: install ok installed",
    "Package:\nStatus: install ok installed\nVersion: 1",
    "\n\n\n",
]


BASH = "Package: bash\nStatus: install ok installed\nVersion: 5.2.15-2+b13\n"
OF_BASH = {"/usr/bin/python3": PYTHON, **dpkg(("/usr/bin/python3", PYTHON), status=BASH)}
FOUND = ReportedInterpreter(
    path="/usr/bin/python3", file="/usr/bin/python3", sha256=f"sha256:{0:064x}", package=""
)


class ReaderEngine(HasFiles):
    """What reading an image needs: a Python of a package, and a container that prints lines and ends."""

    image: Mapping[str, bytes | str] = OF_BASH

    def __init__(self, lines: list[str], code: int = 0) -> None:
        self.lines, self.code = lines, code
        self.specs: list[RunSpec] = []

    def inspect(self, _reference: str) -> Any:
        return SimpleNamespace(env={"LD_PRELOAD": "/evil.so", "PATH": "/usr/bin", "PYTHONHOME": "/evil"})

    def run(self, spec: RunSpec) -> int:
        self.specs.append(spec)
        for line in self.lines:
            assert spec.on_line
            spec.on_line(line)
        return self.code


@pytest.fixture
def image(tmp_path) -> Image:
    small = make_image(tmp_path / "oci")
    return Image(
        stack_id=STACK_ID,
        reference="stackcheck/x:1",
        config_digest=small.config_digest,
        manifest_digest=small.manifest_digest,
        layout=small.layout,
        size_bytes=0,
        layers=(),
        reused=False,
        seconds=0,
    )


def component(document: dict[str, Any], purl: str) -> dict[str, Any]:
    (found,) = (item for item in document["components"] if item.get("purl") == purl)
    return dict(found)


def properties(item: dict[str, Any]) -> list[tuple[str, str]]:
    return [(entry["name"], entry["value"]) for entry in item["properties"]]


def test_the_document_is_cyclonedx_about_this_digest(image):
    document = sbom_document.describe(image, RECORDS)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    subject = document["metadata"]["component"]
    assert (subject["type"], subject["version"]) == ("container", image.manifest_digest)
    assert subject["hashes"] == [{"alg": "SHA-256", "content": image.manifest_digest.removeprefix("sha256:")}]
    assert {entry["ref"] for entry in document["dependencies"]} >= {subject["bom-ref"]}


def test_python_distributions_have_version_licence_purl_and_the_hash_that_pip_recorded(image):
    torch = component(sbom_document.describe(image, RECORDS), "pkg:pypi/torch@2.13.0%2Bcpu")
    assert (torch["name"], torch["version"]) == ("torch", "2.13.0+cpu")
    assert torch["licenses"] == [{"expression": "BSD-3-Clause AND MIT", "acknowledgement": "declared"}]
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "b" * 64}]
    assert ("stackcheck:files_sha256", "a" * 64) in properties(torch)


def test_a_distribution_in_two_places_is_one_component_with_both(image):
    found = component(sbom_document.describe(image, RECORDS), "pkg:pypi/typing-extensions@4.16.0")
    assert len(properties(found)) == 2
    assert found["licenses"] == [{"license": {"id": "PSF-2.0", "acknowledgement": "declared"}}]


def test_a_licence_text_is_no_name_and_the_classifier_stands_for_it(image):
    found = component(sbom_document.describe(image, RECORDS), "pkg:pypi/old-thing@0.1")
    assert [item["license"]["name"] for item in found["licenses"]] == ["MIT License"]


def test_installed_debian_packages_are_listed_and_removed_ones_are_not(image):
    document = sbom_document.describe(image, RECORDS)
    names = [item["name"] for item in document["components"] if "pkg:deb" in item.get("purl", "")]
    assert sorted(names) == ["bash", "zlib1g"]
    zlib = component(document, "pkg:deb/debian/zlib1g@1:1.2.13.dfsg-1?arch=amd64&distro=debian-12")
    assert zlib["licenses"] == [{"license": {"id": "Zlib", "acknowledgement": "declared"}}]
    assert properties(zlib) == [("stackcheck:files_sha256", "d" * 64)]


def test_several_licences_are_names_and_never_an_expression_beside_them():
    bash = next(item for item in sbom_document.components(RECORDS) if item.name == "bash")
    stated = {licence.id or licence.name for licence in bash.licenses}
    assert stated == {"GFDL-NIV-1.3", "GPL-3+", "MIT AND BSD-3-Clause"}


def test_what_could_not_be_read_is_said(image):
    assert sbom_document.describe(image, RECORDS)["properties"] == [
        {"name": "stackcheck:unread", "value": "/root"}
    ]


def test_equal_images_give_equal_bytes_and_others_another_serial_number(image):
    first = sbom_document.describe(image, RECORDS)
    assert compact_json(first) == compact_json(sbom_document.describe(image, RECORDS))
    other = dataclasses.replace(image, manifest_digest="sha256:" + "0" * 64)
    assert sbom_document.describe(other, RECORDS)["serialNumber"] != first["serialNumber"]


@given(
    kind=st.sampled_from(["python", "release", "dpkg"]),
    text=st.text(max_size=60) | st.sampled_from(ODD),
    origin=st.none() | st.text(max_size=30) | st.sampled_from(["[]", '{"archive_info": 1}', "{"]),
)
@settings(max_examples=300, deadline=None)
def test_whatever_an_image_holds_makes_a_document_and_no_traceback(kind, text, origin):
    record = {"kind": kind, "text": text, "head": text, "place": "/x", "files": None, "origin": origin}
    bom = Bom(components=sbom_document.components([*RECORDS[:-1], record]))
    assert json.loads(JsonV1Dot6(bom).output_as_string())["bomFormat"] == "CycloneDX"


@pytest.mark.parametrize(
    ("lines", "code"),
    [([], 127), (INVENTORY[:-1], 0), (INVENTORY, 1), (["Traceback", *INVENTORY], 0)],
    ids=["no python", "cut short", "failed", "not records"],
)
def test_an_image_that_cannot_be_listed_is_an_error(lines, code):
    engine: Any = ReaderEngine(lines, code)
    with pytest.raises(ChecksFailedError, match="could not be listed"):
        sbom.list_packages("stackcheck/x:1", FOUND, engine)


def test_the_image_is_read_without_any_right_and_without_its_own_start_up_code(image):
    engine: Any = ReaderEngine(INVENTORY)
    assert sbom.list_packages(image.reference, FOUND, engine) == RECORDS
    (spec,) = engine.specs
    assert (spec.cap_drop, spec.network, spec.read_only) == (("ALL",), "none", True)
    assert spec.entrypoint == ("/usr/bin/python3",)
    assert {"-I", "-S"} <= set(spec.command)
    assert {name for name, value in spec.env.items() if value is None} == {"LD_PRELOAD", "PYTHONHOME"}


def test_a_python_whose_package_the_image_does_not_list_is_refused(image, tmp_path):
    engine: Any = ReaderEngine(INVENTORY)
    engine.image = {"/usr/bin/python3": PYTHON, **dpkg(("/usr/bin/python3", PYTHON), status=STATUS)}
    with pytest.raises(ChecksFailedError, match="does not list the package of the image's Python"):
        sbom.load_or_create(image, engine, tmp_path, quiet)
    assert not (tmp_path / "sbom.json").exists()


def test_it_is_read_once_an_image_and_kept(image, tmp_path):
    engine: Any = ReaderEngine(INVENTORY)
    first = sbom.load_or_create(image, engine, tmp_path, quiet)
    assert sbom.load_or_create(image, engine, tmp_path, quiet) == first == sbom.load_sbom(image, tmp_path)
    assert len(engine.specs) == 1
    (tmp_path / "sbom.json").write_text("{")
    assert sbom.load_or_create(image, engine, tmp_path, quiet) == first
    other = dataclasses.replace(image, manifest_digest="sha256:" + "0" * 64)
    with pytest.raises(ConfigurationError, match="no SBOM of this image"):
        sbom.load_sbom(other, tmp_path)
    sbom.load_or_create(other, engine, tmp_path, quiet)
    assert len(engine.specs) == 3


@pytest.fixture
def dist(image: Image, tmp_path) -> Path:
    release(image, tmp_path / "dist", KEY)  # type: ignore[arg-type]
    return tmp_path / "dist"


def test_the_reader_finds_distributions_wherever_they_lie_and_says_what_it_may_not_read(
    tmp_path, capsys, monkeypatch
):
    place = tmp_path / "opt" / "deep" / "a-1.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_bytes(b"Name: a\r\nVersion: 1\r\n\r\nA long description\r\n")
    (place / "RECORD").write_text("a.py,,\n")
    (tmp_path / "b.egg-info").write_text("Name: b\nVersion: 2\n")
    (tmp_path / "empty.dist-info").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "closed").mkdir()
    scandir = inventory.os.scandir

    def refusing(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(inventory.os, "scandir", refusing)
        count, unread = inventory.python(tmp_path)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["head"].split()[1] for record in records] == ["b", "a"]
    assert records[1]["head"] == "Name: a\nVersion: 1"
    assert len(records[1]["files"]) == 64
    assert (count, unread) == (5, [str(tmp_path / "closed")])


def test_the_reader_takes_debians_database_and_licences(tmp_path, capsys, monkeypatch):
    (tmp_path / "info").mkdir()
    (tmp_path / "status").write_text("Package: bash\n")
    (tmp_path / "info" / "bash.md5sums").write_text("0 bin/bash\n")
    (tmp_path / "doc" / "bash").mkdir(parents=True)
    (tmp_path / "doc" / "bash" / "copyright").write_bytes(
        b"License: GPL-3+\n text\nLicense:\nLicense: X\xff\n"
    )
    monkeypatch.setattr(inventory, "DPKG", tmp_path)
    monkeypatch.setattr(inventory, "DOCUMENTS", tmp_path / "doc")
    inventory.debian()
    dpkg, files, licences = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert dpkg["text"] == "Package: bash\n"
    assert (files["package"], len(files["digest"])) == ("bash", 64)
    assert licences["stated"] == ["GPL-3+", "X�"]


@pytest.mark.parametrize(
    "record",
    [
        "5",
        "{}",
        '{"kind": "python"}',
        '{"kind": "python", "head": 5, "place": "/x"}',
        '{"kind": "licences"}',
        '{"kind": "dpkg", "text": []}',
        '{"kind": "end"}',
    ],
)
def test_records_that_lack_what_they_need_are_an_error(image, tmp_path, record):
    last = record if "end" in record else INVENTORY[-1]
    engine: Any = ReaderEngine([*INVENTORY[:-1], record, last])
    with pytest.raises(ChecksFailedError, match="could not be listed"):
        sbom.load_or_create(image, engine, tmp_path, quiet)
