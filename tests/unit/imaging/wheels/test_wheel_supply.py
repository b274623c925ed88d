"""Where a build's wheels come from: the cache, this host, or one folder; and what is said when one lacks."""

import dataclasses
from pathlib import Path

import pytest

from small_recipe import render_from
from small_wheels import index_of, locked_line, make_wheel, only_index
from stackcheck.errors import BuildError, ConfigurationError
from stackcheck.imaging import plans, platforms
from stackcheck.imaging.wheels import wheel_supply
from stackcheck.imaging.wheels.wheel_cache import WheelCache
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Base
from stackcheck.recipe.upstream import Upstream

ROOT = Path(__file__).resolve().parents[4]
DOCKERFILE = """\
FROM scratch AS wheelhouse
COPY stack.json /
FROM registry.example.org/a@sha256:1 AS base
FROM base AS compile
COPY requirements.lock ./
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=bind,from=wheelhouse,target=/w \\
    pip install --require-hashes -r requirements.lock && pip install ninja
FROM base AS wheels
COPY requirements.lock ./
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=bind,from=wheelhouse,target=/w \\
    pip install --require-hashes -r requirements.lock
FROM base AS final
COPY --from=compile /x /x
COPY --from=wheels /y /y
"""


@pytest.fixture(autouse=True)
def no_other_place(monkeypatch) -> None:
    """Torch's own index does not answer: no test asks a host of another network."""
    monkeypatch.setattr(Upstream, "answers", lambda _self, url: f"{url} is out of reach of this machine")


@pytest.fixture
def wheel(tmp_path) -> Path:
    return make_wheel(tmp_path / "elsewhere")


def plan_of(tmp_path: Path, *wheels: Path, platform: str = "linux/amd64") -> plans.BuildPlan:
    base = Base(kind="registry", reference="registry.example.org/a", digest="sha256:1")
    pattern = resolve.load_stacks(ROOT, ("cpu-*",))[0]
    stack = dataclasses.replace(pattern, id="small", base=base, missing=())
    folder = render_from(DOCKERFILE, stack, tmp_path)
    (folder / "requirements.lock").write_text("".join(map(locked_line, wheels)))
    return plans.make_plan(stack, "engine", tmp_path, platform=platform)


def stage(plan: plans.BuildPlan, name: str) -> object:
    return next(one for one in plan.stages if one.name == name)


def test_a_second_stack_downloads_nothing_that_the_cache_has(tmp_path, wheel, monkeypatch):
    plan, cache, said = plan_of(tmp_path, wheel), WheelCache(tmp_path / "cache"), []
    with index_of(wheel) as (address, fetched):
        only_index(monkeypatch, address)
        for _ in range(2):
            supply = wheel_supply.prepare((plan,), wheelhouse_only=None, cache=cache, report=said.append)
            conf = supply.lay_out(plan, stage(plan, "wheels"), tmp_path / "house")
        assert len(fetched) == 1
    assert [line.split(": ")[1][:20] for line in said] == ["downloading 1 wheels"]
    assert [path.name for path in (tmp_path / "house").iterdir()] == [wheel.name]
    assert conf == "[global]\nno-index = true\nfind-links = /stackcheck-wheelhouse\n"


def test_a_stage_that_asks_for_more_than_the_lock_keeps_the_hosts_index(tmp_path, wheel, monkeypatch):
    only_index(monkeypatch, "https://index.example.org/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    plan = plan_of(tmp_path, wheel)
    supply = wheel_supply.prepare((plan,), wheelhouse_only=None, cache=None, report=print)
    conf = supply.lay_out(plan, stage(plan, "compile"), tmp_path / "house")
    assert "index-url = https://index.example.org/simple" in conf
    assert "no-index" not in conf
    assert "no-index" in supply.lay_out(plan, stage(plan, "wheels"), tmp_path / "house")


def test_what_the_index_lacks_is_left_to_the_build_and_said(tmp_path, wheel, monkeypatch):
    gone = make_wheel(tmp_path / "gone", "gone_package")
    said: list[str] = []
    with index_of(wheel) as (address, _):
        only_index(monkeypatch, address)
        plan = plan_of(tmp_path, wheel, gone)
        cache = WheelCache(tmp_path / "cache")
        supply = wheel_supply.prepare((plan,), wheelhouse_only=None, cache=cache, report=said.append)
        conf = supply.lay_out(plan, stage(plan, "wheels"), tmp_path / "house")
    assert "not cached; pip will fetch these" in said[-1]
    assert "gone-package==1.0" in said[-1]
    assert "no-index" not in conf


def test_one_folder_is_all_there_is(tmp_path, wheel, monkeypatch):
    only_index(monkeypatch, "https://index.example.org/simple")
    plan = plan_of(tmp_path, wheel)
    supply = wheel_supply.prepare((plan,), wheelhouse_only=wheel.parent, cache=None, report=print)
    for name in ("compile", "wheels"):
        conf = supply.lay_out(plan, stage(plan, name), tmp_path / "house")
        assert conf == "[global]\nno-index = true\nfind-links = /stackcheck-wheelhouse\n"
    assert supply.pip_conf() == "[global]\nno-index = true\n"


def test_a_folder_that_lacks_wheels_names_each_and_the_command(tmp_path, wheel):
    other = make_wheel(tmp_path / "other", "other_package", version="2.5")
    with pytest.raises(BuildError, match="lacks 1 of 2 packages for linux/amd64") as caught:
        wheel_supply.check_folder(plan_of(tmp_path, wheel, other), wheel.parent)
    assert caught.value.got == "other-package==2.5"
    assert "--dest" in str(caught.value.next_step)
    assert "--extra-index-url=https://download.pytorch.org/whl/cpu" in str(caught.value.next_step)
    with pytest.raises(ConfigurationError, match="no such folder"):
        wheel_supply.check_folder(plan_of(tmp_path, wheel), tmp_path / "none")


def test_a_platform_without_a_wheel_is_refused_and_the_wheel_named(tmp_path, wheel, monkeypatch):
    foreign = "linux/arm64" if platforms.native() == "linux/amd64" else "linux/amd64"
    machine = platforms.MACHINES[platforms.native()]
    own = make_wheel(tmp_path / "elsewhere", "own_machine", tag=f"py3-none-manylinux_2_17_{machine}")
    plan = plan_of(tmp_path, wheel, own, platform=foreign)
    assert plan.folder.name == f"small-{foreign.split('/')[1]}"
    with index_of(wheel, own) as (address, _):
        only_index(monkeypatch, address)
        with pytest.raises(BuildError, match=f"1 of 2 packages have no wheel for {foreign}") as caught:
            wheel_supply.prepare(
                (plan,), wheelhouse_only=None, cache=WheelCache(tmp_path / "cache"), report=print
            )
    assert caught.value.got == "own-machine==1.0"
    assert caught.value.exit_code == 5


EXTENDED = (
    DOCKERFILE.replace(
        "FROM base AS wheels",
        """FROM compile AS flash-attn-build
COPY flash-attn.lock ./
RUN --mount=type=bind,from=wheelhouse,target=/w \\
    pip wheel --no-binary flash-attn --require-hashes -r flash-attn.lock
FROM scratch AS flash-attn
COPY --from=flash-attn-build /wheels/ /
FROM base AS wheels""",
    )
    + "COPY --from=flash-attn / /z\n"
)


def test_a_stage_is_handed_what_its_own_lock_names_and_no_source_is_looked_for_as_a_wheel(
    tmp_path, wheel, monkeypatch
):
    plan_of(tmp_path, wheel)
    (rocm,) = resolve.load_stacks(ROOT, ("rocm7.2.1-torch2.13.0-*",))
    base = Base(kind="registry", reference="registry.example.org/a", digest="sha256:1")
    stack = dataclasses.replace(rocm, id="small", base=base, missing=(), python="3.11")
    folder = render_from(EXTENDED, stack, tmp_path)
    (folder / "flash-attn.lock").write_text(f"flash-attn==2.8.3 \\\n    --hash=sha256:{'0' * 64}\n")
    plan = plans.make_plan(stack, "engine", tmp_path, platform="linux/amd64")
    named = {one.name: [str(p) for p in wheel_supply.packages(plan, one)] for one in plan.stages}
    assert named["flash-attn-build"] == ["flash-attn==2.8.3"]
    assert named["wheels"] == ["small-package==1.0"]
    said: list[str] = []
    with index_of(wheel) as (address, _):
        only_index(monkeypatch, address)
        wheel_supply.prepare(
            (plan,), wheelhouse_only=None, cache=WheelCache(tmp_path / "cache"), report=said.append
        )
    assert len(said) == 1
    with pytest.raises(BuildError) as caught:
        wheel_supply.check_folder(plan, wheel.parent)
    assert caught.value.got == "flash-attn==2.8.3"
    commands = str(caught.value.next_step).partition(": ")[2].split(" && ")
    assert commands[0].endswith("-r images/small/requirements.lock")
    assert commands[1].endswith(f"--dest {wheel.parent} --no-binary flash-attn flash-attn==2.8.3")
