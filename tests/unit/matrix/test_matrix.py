import copy
import datetime as dt
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import mutations
from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix import expand, matrix

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "matrix.yaml").read_bytes()


def _changed(**block: object) -> dict[str, object]:
    value = copy.deepcopy(yamlfile.parse(TEXT, "matrix.yaml"))
    value["stacks"][0].update(block)
    return value


def test_the_axes_of_a_block_expand_as_a_product():
    found = matrix.parse(_changed(torch=["2.13.0", "2.12.1"], python=["3.11", "3.12"]))
    ids = [cell.id for cell in expand.expand(found) if cell.runtime == "cpu"]
    assert ids == [
        f"cpu-torch{torch}-py{python}-debian12"
        for torch in ("2.13.0", "2.12.1")
        for python in ("3.11", "3.12")
    ]


def test_an_include_is_not_taken_out_by_an_exclusion():
    value = _changed()
    value["exclude"] = [{"when": {"runtime": "rocm"}, "because": "not wanted"}]
    ids = [cell.id for cell in expand.expand(matrix.parse(value)) if cell.runtime == "rocm"]
    assert ids == ["rocm5.7-debian13"]


def test_an_override_changes_what_it_sets_and_nothing_else():
    value = _changed(system_packages=["gcc"], env={"A": "1", "B": "1"}, size_budget_gb="3")
    value["overrides"] = [
        {"select": "cpu*", "set": {"env": {"B": "2"}}},
        {"select": "*", "set": {"env": {"C": "3"}}},
    ]
    found = matrix.parse(value)
    set_ = expand.settings_of(expand.expand(found)[0], found)
    assert (set_.system_packages, set_.size_budget_gb) == (("gcc",), 3)
    assert set_.env == {"A": "1", "B": "2", "C": "3"}


@pytest.mark.parametrize(
    ("section", "entry", "place"),
    [
        ("overrides", {"select": "rocm99*", "set": {"size_budget_gb": "1"}}, r"overrides\[0\].select"),
        ("exclude", {"when": {"torch": "9.9.9"}, "because": "a slip"}, r"exclude\[0\]"),
    ],
)
def test_an_entry_that_is_about_no_stack_is_refused(section, entry, place):
    with pytest.raises(ConfigurationError, match=place):
        expand.expand(matrix.parse({**_changed(), section: [entry]}))


def test_images_from_elsewhere_and_the_age_of_renewal_are_read():
    value = _changed()
    entry = {"reference": "rocm/pytorch:latest", "vendor": "amd", "device": "MI300X", "follow": "true"}
    digest = {
        **entry,
        "reference": f"registry.example.org:5000/team/image@sha256:{'a' * 64}",
        "follow": "false",
    }
    value["foreign"] = [entry, digest]
    assert matrix.parse(value).policy.renew_after == dt.timedelta(days=7)
    value["policy"]["renew_after_days"] = "1"
    found = matrix.parse(value)
    assert [item.device for item in found.foreign] == ["MI300X", "MI300X"]
    assert found.policy.renew_after == dt.timedelta(days=1)


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({"reference": "rocm/pytorch:x; id"}, "foreign[0].reference"),
        ({"reference": "oci:dist:tag"}, "foreign[0].reference"),
        ({"reference": "pytorch"}, "foreign[0].reference"),
        ({"vendor": "intel"}, "foreign[0].vendor"),
        ({"device": None}, "foreign[0].device"),
        ({"count": "8"}, "foreign[0].count"),
        ({"follow": "false"}, "a tag, which can be moved"),
        ({"reference": f"rocm/pytorch@sha256:{'a' * 64}"}, "leave out follow"),
        ({"reference": f"rocm/pytorch:latest@sha256:{'a' * 64}"}, "leave out follow"),
        ({"reference": "rocm/pytorch", "follow": "false"}, "a tag, which can be moved"),
        ({"accept_python": ["a" * 64]}, "foreign[0].accept_python"),
        ({"accept_python": ["sha256:" + "A" * 64]}, "foreign[0].accept_python"),
    ],
)
def test_an_image_from_elsewhere_that_cannot_be_pulled_is_refused(entry, place):
    value = _changed()
    whole = {"reference": "rocm/pytorch:latest", "vendor": "amd", "device": "MI300X", "follow": "true"}
    value["foreign"] = [whole | entry]
    with pytest.raises(ConfigurationError, match=re.escape(place)):
        matrix.parse(value)


@pytest.mark.parametrize("days", ["0", "31", "soon"])
def test_an_age_of_renewal_that_verify_would_not_survive_is_refused(days):
    value = _changed()
    value["policy"]["renew_after_days"] = days
    with pytest.raises(ConfigurationError, match="renew_after_days"):
        matrix.parse(value)


def test_a_file_with_many_problems_says_the_first_and_how_many_follow():
    with pytest.raises(ConfigurationError) as caught:
        matrix.parse(_changed(torch=[f"bad {number}" for number in range(400)]))
    lines = caught.value.what.splitlines()
    assert len(lines) == yamlfile.MAX_PROBLEMS + 1
    assert lines[-1] == "and 350 more"


FLASH = ("flash-attn", "flash-attn-4")
OURS = ("PYTHONOPTIMIZE", "PYTHONPATH", "PYTEST_ADDOPTS", "PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"torhc": "2.13.0"}, "stacks[0].torhc: "),
        ({"torch": {"a": "b"}}, "stacks[0].torch: "),
        ({"torch": "two"}, "stacks[0].torch[0]: "),
        ({"os": "debian99"}, "stacks[0].os: "),
        ({"runtime": "opencl"}, "stacks[0].runtime: "),
        ({"version": "1.0"}, "stacks[0].version: "),
        ({"size_budget_gb": "nan"}, "stacks[0].size_budget_gb: "),
        ({"tested_on": [{"device": "CPU", "count": "-1"}]}, "stacks[0].tested_on[0].count: "),
        # Lists that are too long to be judged, and what the tool or another axis sets.
        ({"archs": ["gfx942"] * 51}, "stacks[0].archs: "),
        ({"tested_on": [{"device": "CPU", "count": "1"}] * 51}, "stacks[0].tested_on: "),
        ({"env": {f"A{n}": "" for n in range(101)}}, "stacks[0].env: "),
        *(({"packages": {name: "2.8.3"}}, f"packages: {name} is chosen by `flash_attn`") for name in FLASH),
        *(({"env": {name: "1"}}, f"{name} is set by the tool itself") for name in OURS),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_problem_is_one_line_with_its_place(block, place):
    with pytest.raises(ConfigurationError) as caught:
        matrix.parse(_changed(**block))
    assert place in caught.value.what
    assert all(line.startswith("matrix.yaml: ") for line in caught.value.what.splitlines())


@pytest.mark.parametrize(
    "value", ["$(id)", 'a"b', "a\nRUN id", "a`id`", "a;id", "a b", "${HOME}", "a\\", "2.13.0\n"]
)
@pytest.mark.parametrize(
    "field", ["torch", "python", "os", "archs", "builder", "wheel_tag", "id", "system_packages"]
)
def test_a_value_that_would_escape_in_a_dockerfile_is_refused(field, value):
    given_value = [value] if field == "system_packages" else value
    with pytest.raises(ConfigurationError):
        matrix.parse(_changed(**{field: given_value}))


@pytest.mark.parametrize("value", ["$(id)", 'a"b', "a\nRUN id", "a\n", "`id`", "a\\"])
def test_a_variable_that_would_escape_in_a_dockerfile_is_refused(value):
    with pytest.raises(ConfigurationError):
        matrix.parse(_changed(env={"NAME": value}))


@pytest.mark.parametrize(
    ("text", "place", "got"),
    [
        ("a: 1\nb: &x 2\n", "line 2, column 4", "an anchor or an alias"),
        ("a: 1\nb: *x\n", "line 2, column 4", "an anchor or an alias"),
        ("a: {b: 1,\n b: 2}\n", "line 2, column 2", "duplicate key 'b'"),
        ("a: 1\n[b]: 2\n", "line 2, column 1", "a key that is not text"),
        ("a: 1\n---\na: 2\n", "line 2, column 1", "a second document begins here"),
        ("a: " + "[" * 20, "line 1, column 23", "nested too deeply"),
    ],
)
def test_what_no_plain_text_file_needs_is_refused_with_its_place(text, place, got):
    with pytest.raises(ConfigurationError) as caught:
        yamlfile.parse(text.encode(), "file.yaml")
    assert caught.value.where == f"file.yaml, {place}"
    assert got in (caught.value.got or "")


@pytest.mark.parametrize("text", ["", "# nothing", "a", "- a", "---\n"])
def test_what_is_no_mapping_is_refused(text):
    with pytest.raises(ConfigurationError, match="is not a mapping"):
        yamlfile.parse(text.encode(), "file.yaml")


@pytest.mark.parametrize("text", [b"a: \xff\xfe\n", b"a: [1, 2\nb: 3\n"], ids=["binary", "open"])
def test_what_is_no_yaml_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"file\.yaml"):
        yamlfile.parse(text, "file.yaml")


def test_every_scalar_stays_text():
    text = b"a: [3.10, no, null, 0x1, !!int 7, ~, 2026-01-01]\nb: {<<: {c: d}}\n'': !x\n"
    found = yamlfile.parse(text, "file.yaml")
    assert found["a"] == ["3.10", "no", "null", "0x1", "7", "~", "2026-01-01"]
    assert (found["b"], found[""]) == ({"<<": {"c": "d"}}, "")


def test_a_product_too_large_to_finish_is_refused():
    many = [f"2.{minor}.{patch}" for minor in range(20) for patch in range(50)]
    with pytest.raises(ConfigurationError, match="more than"):
        expand.expand(matrix.parse(_changed(torch=many, python=[f"3.{minor}" for minor in range(100)])))


@pytest.mark.parametrize("name", mutations.TEXTS)
def test_no_mutation_of_the_files_gives_anything_but_stacks_or_a_configuration_error(name):
    """Few of each here; docs/results/matrix.md has the figures of many."""

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=mutations.mutants(name))
    def answered(text: str) -> None:
        assert mutations.answer(name, text) in {"stacks", "configuration error"}

    answered()
