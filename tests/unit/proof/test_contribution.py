"""A bundle says what is on a list, and nothing else: identities are drawn, planted and searched."""

import base64
import json
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from small_checkout import call
from stackcheck.certificate import keys, statement
from stackcheck.errors import CertificateError, ChecksFailedError
from stackcheck.proof import contribution

pytestmark = pytest.mark.usefixtures("frozen_once", "suites_asked_here")
ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
COMMITTED = RESULTS / "contributed"
SMALL = RESULTS / "suites-h200-x1-speed.json"


def drawn(seed: int) -> Iterator[str]:
    """Identities of every kind: names, serial numbers, addresses, UUIDs, paths."""
    chance = random.Random(seed)
    letters = lambda count: "".join(chance.choices(string.ascii_lowercase, k=count))  # noqa: E731
    digits = lambda count: "".join(chance.choices(string.digits, k=count))  # noqa: E731
    hexed = lambda count: "".join(chance.choices("0123456789abcdef", k=count))  # noqa: E731
    yield f"{letters(5)}-gpu{digits(3)}.{letters(6)}.example"
    yield f"{letters(7)}"
    yield digits(13)
    yield f"{letters(2).upper()}{digits(10)}"
    yield ".".join(str(chance.randrange(1, 255)) for _ in range(4))
    yield ":".join(hexed(2) for _ in range(6))
    yield f"fe80::{hexed(4)}:{hexed(4)}"
    yield f"GPU-{hexed(8)}-{hexed(4)}-{hexed(4)}-{hexed(4)}-{hexed(12)}"
    yield f"/home/{letters(6)}/work"
    yield f"0000:{hexed(2)}:00.0"
    yield f"{digits(5)}.{digits(5)}.{digits(5)}"


def planted(value: Any, word: str, keep: Callable[[str], bool]) -> Any:
    """The value with a word in place of every string, and as one more member of each open object."""
    if isinstance(value, dict):
        return {name: one if keep(name) else planted(one, word, keep) for name, one in value.items()}
    if isinstance(value, list):
        return [planted(one, word, keep) for one in value]
    return word if isinstance(value, str) else value


@pytest.mark.parametrize("seed", range(3))
def test_no_drawn_identity_leaves_the_host(seed, tmp_path):
    document = json.loads(SMALL.read_bytes())
    names = {"outcome", "verdict", "direction", "cause", "state", "tier", "started", "finished", "run_id"}
    forms = {"suites", "trainers", "thresholds", "matrix", "runner", "vendor", "nvls", "model", "sha256"}
    forms |= {"config_digest", "manifest_digest", "skip", "machine", "selection"}
    for word in drawn(seed):
        changed = planted(document, word, (names | forms).__contains__)
        for check, own in zip(changed["checks"], document["checks"], strict=True):
            check["id"] = own["id"] if seed else f"{word}::{own['id']}"  # also as the name of a check
            for metric, real in zip(check["metrics"], own["metrics"], strict=True):
                metric["name"], metric["unit"] = real["name"], real["unit"]
                metric["conditions"] = dict.fromkeys(real["conditions"], word) if seed else real["conditions"]
                metric["conditions"] |= {word: word}
        changed["software"] |= {word: "1.0", "torch": word}
        changed["environment"] = {"HOSTNAME": word}
        (tmp_path / "result.json").write_text(json.dumps(changed))
        told = contribution.of_result(tmp_path / "result.json", ROOT)
        assert word not in told.model_dump_json(), word
        assert told.driver is None
        assert "torch" not in told.versions
        assert bool(told.figures) != bool(seed), "figures stay where their conditions are known words"


def test_the_committed_bundles_are_those_of_the_committed_results():
    found = {bundle.told.model: bundle.told for bundle in contribution.folder(COMMITTED, ROOT)}
    for model in ("H100", "H200"):
        made = contribution.of_result(RESULTS / f"suites-{model.lower()}-x1-standard.json", ROOT)
        told, day = found[model].model_dump(), made.model_dump()
        assert told["figures"] == day["figures"]
        assert (told["driver"], told["versions"], told["day"]) == (day["driver"], day["versions"], day["day"])
    page = (RESULTS / "contributed.md").read_text("utf-8")
    for told in found.values():
        for figure in told.figures:
            assert f"{figure.value:g} {figure.unit}" in page, figure


def signed(document: dict[str, Any], key: Any) -> bytes:
    payload = json.dumps(document, separators=(",", ":")).encode()
    return statement.sign(statement.Statement(predicate_type=contribution.TYPE, payload=payload), key).body


FIGURE = {"metric": "gemm_tflops", "conditions": {"host": "node17"}, "value": 1.0, "unit": "TFLOP/s"}


@pytest.mark.parametrize(
    "fields",
    [
        {"node": "node17"},
        {"driver": "10.1.2.3"},
        {"versions": {"torch": "2.11.0+node17"}},
        {"figures": [FIGURE]},
        {"figures": [{"metric": "node17", "conditions": {}, "value": 1.0, "unit": "s"}]},
        {"verdict": "node17"},
        {"day": "yesterday"},
    ],
)
def test_a_bundle_that_says_more_is_refused(fields, tmp_path):
    key = keys.load_or_create(tmp_path / "own.key")
    (source,) = COMMITTED.glob(f"h100*{contribution.END}")
    told = json.loads(base64.b64decode(json.loads(source.read_bytes())["payload"]))
    path, trusted = tmp_path / source.name, contribution.Contributors(keys=key.public_key())
    path.write_bytes(signed(told, key))
    assert contribution.read(path, ROOT, trusted).told.model == "H100", "unchanged it is taken"
    path.write_bytes(signed(told | {"predicate": told["predicate"] | fields}, key))
    with pytest.raises((CertificateError, ChecksFailedError)):
        contribution.read(path, ROOT, trusted)


def test_a_folder_is_checked_and_an_unknown_key_refused(tmp_path, capsys):
    arguments = ("contribute", "--check", str(COMMITTED), "--root", str(ROOT), "--key")
    done = call(capsys, *arguments, str(COMMITTED / contribution.KEYS))
    assert done.code == 0, done.err
    assert "H100 x1" in done.out
    assert "H200 x1" in done.out
    keys.load_or_create(tmp_path / "other.key")
    refused = call(capsys, *arguments, str(tmp_path / "other.pub"))
    assert refused.code != 0
    assert "not signed with the expected key" in refused.err


def test_a_run_of_a_processor_is_not_contributed(tmp_path):
    document = json.loads(SMALL.read_bytes())
    document["host"] |= {"vendor": "cpu", "devices": []}
    (tmp_path / "result.json").write_text(json.dumps(document))
    with pytest.raises(contribution.ConfigurationError, match="only a run on GPUs"):
        contribution.of_result(tmp_path / "result.json", ROOT)


def test_baseline_shows_what_others_measured(capsys):
    result = RESULTS / "suites-h200-x1-standard.json"
    arguments = ("baseline", str(result), "--one-run", "--others", str(COMMITTED), "--root", str(ROOT))
    done = call(capsys, *arguments)
    assert "What others measured on H200" in done.out, done.err
    assert "+0.0%" in done.out.partition("What others")[2]
