"""Sixty nights on two nodes, with three planted regressions and two driver changes: what is concluded."""

import datetime as dt
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest

from nights import Nights, Node
from stackcheck.errors import CertificateError
from stackcheck.history.history import open_history
from stackcheck.history.runs import Query
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.nightly import summary
from stackcheck.vendors import amd

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_disk_flushes")]

REAL_AMD = {name: getattr(amd, name) for name in ("devices", "driver", "present")}
OLD, BAD, GOOD = "6.14.5", "6.16.6", "6.16.13"  # drivers
GEMM, COUNT = "test_kernels.py::test_gemm", "test_devices.py::test_device_count"
THROUGHPUT = "test_training.py::test_throughput"
PATTERNS = {
    "A": "rocm7.1.0-torch2.10.0-*",
    "B": "rocm7.14.1-torch2.14.1-*",
    "C": "rocm7.2.4-torch2.9.1-*-amd",
}


class Event(NamedTuple):
    """What one night on one node did with one image."""

    night: int
    node: str
    stack: str
    action: str
    flaky: bool = False


class Story:
    """The sixty nights: what happens, and what was concluded."""

    def __init__(self, nights: Nights, stacks: dict[str, Stack]) -> None:
        self.nights = nights
        self.stacks = stacks
        self.names = {stack.id: name for name, stack in stacks.items()}
        self.main = nights.node("main", first_id=100)
        self.canary = nights.node("canary", first_id=200)
        self.night = 0
        self.node = self.main
        self.digests: dict[str, str] = {}
        self.events: list[Event] = []
        self.codes: dict[tuple[int, str], int] = {}
        self.lines: dict[tuple[int, str], str] = {}
        nights.finds = self.finds

    def finds(self, digest: str, driver: str, run: int) -> dict[str, str]:
        """The planted regressions, an unfit machine, and one failure that does not repeat."""
        if digest == self.digests["A2"] and self.night >= 12:
            return {GEMM: "failed"}  # the first: a new image of A, on the driver that it was certified for
        if digest == self.digests["B1"] and driver == BAD:
            return {THROUGHPUT: "failed"}  # the second: one driver, one stack
        if digest == self.digests["C1"] and self.night >= 50:
            return {COUNT: "failed", GEMM: "error"}  # the third: the only image of C
        if digest == self.digests["C1"] and (self.night, self.node.name) == (40, "main"):
            return {GEMM: "invalid"}
        if digest == self.digests["A1"] and (self.night, run) == (48, 1):
            return {GEMM: "failed"}
        return {}

    def happens(self) -> None:
        """What people do in the daytime before a night."""
        match self.night:
            case 5:
                self.publish("A2", self.stacks["A"])
            case 20:
                self.canary.install(BAD, "BBBB")
            case 21 | 25:
                if self.night == 25:
                    self.canary.install(GOOD, "CCCC")
                self.canary.reboot()
            case 28:
                self.main.install(GOOD, "CCCC")
                self.main.reboot()
            case 40:
                for node in (self.main, self.canary):
                    node.flash("113-M3000100-104")

    def publish(self, name: str, stack: Stack) -> None:
        self.digests[name] = "none yet"
        self.digests[name] = self.nights.publish(self.main, stack, name)

    def play(self, node: Node) -> None:
        self.node = node
        plan = self.nights.play(node)
        place = (self.night, node.name)
        self.codes[place], self.lines[place] = summary.exit_code(plan), summary.line(plan)
        for item in plan.items:
            assert item.ended is not None
            stack = self.names[item.tag]
            self.events.append(Event(self.night, node.name, stack, item.ended.action, item.ended.flaky))

    def of(self, *actions: str) -> list[tuple[int, str, str, str]]:
        return [event[:4] for event in self.events if event.action in actions]


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Story:
    """The nights are played once; each test asks for a part of what came of them."""
    import small_checkout as checkouts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stackcheck.files.atomic.os.fsync", lambda _file: None)
        folder: Path = tmp_path_factory.mktemp("nights")
        root = checkouts.make_checkout(folder, patch)
        nights = Nights(folder, root, patch, REAL_AMD)
        stacks = {name: resolve.load_stacks(root, (pattern,))[0] for name, pattern in PATTERNS.items()}
        told = Story(nights, stacks)
        told.digests.update(dict.fromkeys(("A1", "A2", "B1", "C1"), "none yet"))
        start = nights.clock.now
        for name, stack in stacks.items():
            told.publish(f"{name}1", stack)
        for night in range(1, 61):
            told.night = night
            nights.clock.now = start + dt.timedelta(days=night, hours=-6)
            told.happens()
            nights.clock.now = start + dt.timedelta(days=night)
            for node in (told.canary, told.main):
                told.play(node)
        yield told


def test_every_image_is_run_on_every_node_in_the_first_night(story):
    first = [event[1:4] for event in story.events if event.night == 1]
    assert first == [(node, stack, "renew") for node in ("canary", "main") for stack in "ABC"]


def test_an_image_that_regresses_is_revoked_once_and_its_tag_goes_back(story):
    assert story.of("revoke")[0] == (12, "canary", "A", "revoke")
    assert [event for event in story.of("renew") if event[2] == "A" and event[0] == 12] == [
        (
            12,
            "main",
            "A",
            "renew",
        )  # the tag names the image before it again, and that one is run the same night
    ]
    assert story.nights.verify(story.stacks["A"], GOOD).digest == story.digests["A1"]
    assert "names sha256:" in story.lines[12, "canary"]
    assert "again" in story.lines[12, "canary"]


def test_a_driver_that_breaks_one_stack_is_reported_each_night_and_revokes_nothing(story):
    assert story.of("warn") == [(night, "canary", "B", "warn") for night in (21, 22, 23, 24)]
    words = f"DO NOT ROLL OUT driver {OLD} -> {BAD}: {story.stacks['B'].id} fails {THROUGHPUT}"
    assert all(words in story.lines[night, "canary"] for night in (21, 22, 23, 24))
    with pytest.raises(CertificateError, match="not certified for this host"):
        story.nights.verify(story.stacks["B"], BAD)


def test_certificates_are_widened_to_the_drivers_on_which_the_images_pass(story):
    assert story.of("widen") == [
        (21, "canary", "A", "widen"),
        (21, "canary", "C", "widen"),
        (25, "canary", "A", "widen"),
        (25, "canary", "B", "widen"),
        (25, "canary", "C", "widen"),
    ]
    assert story.nights.verify(story.stacks["B"], GOOD).driver == GOOD


def test_nodes_that_get_a_driver_later_find_it_certified_and_renew(story):
    assert story.of("renew").count((28, "main", "B", "renew")) == 1
    assert [event[2] for event in story.events if event.night == 28] == ["A", "B", "C"]


def test_a_driver_that_is_installed_and_does_not_run_is_not_tested(story):
    assert not [event for event in story.events if event.night == 20 and event.node == "canary"]
    assert "REBOOT PENDING" in story.lines[20, "canary"]
    assert story.codes[20, "canary"] == 9


def test_an_unfit_machine_concludes_nothing_and_tries_again(story):
    assert story.of("nothing") == [(40, "main", "C", "nothing")]
    assert (41, "main", "C", "renew") in story.of("renew")


def test_the_only_image_of_a_stack_is_revoked_and_nothing_takes_its_place(story):
    assert story.of("revoke")[1:] == [(56, "canary", "C", "revoke")]  # due on its next turn after night 50
    with pytest.raises(CertificateError):
        story.nights.verify(story.stacks["C"], GOOD)
    assert "is removed, as no earlier image is certified" in story.lines[56, "canary"]


def test_a_failure_that_does_not_repeat_renews_and_is_named(story):
    assert [event for event in story.events if event.flaky] == [Event(48, "canary", "A", "renew", flaky=True)]
    assert f"failed once and passed twice: {GEMM}" in story.lines[48, "canary"]
    assert (49, "canary", "A", "renew") in story.of("renew")  # it is due again at once


def test_nights_end_with_an_error_exactly_when_something_is_wrong(story):
    bad = {place: code for place, code in story.codes.items() if code}
    assert bad == {
        (12, "canary"): 6,
        (20, "canary"): 9,
        **{(night, "canary"): 6 for night in (21, 22, 23, 24)},
        (40, "main"): 9,
        (56, "canary"): 6,
    }


def test_certificates_never_get_older_than_the_policy_says(story):
    """A stack is run again after 7 days: so no two verdicts on a driver in use are more than 8 days apart."""
    for stack in "AB":
        ran = {event.night for event in story.events if event.stack == stack}
        nights = sorted(ran | ({5} if stack == "A" else set()))  # its second image is certified then
        assert max(later - earlier for earlier, later in itertools.pairwise(nights)) <= 8


def test_each_run_is_in_the_history_of_its_node_once(story):
    kept = {node.name: open_history(node.root).runs(Query()) for node in (story.main, story.canary)}
    failed = {name: [run for run in runs if run.status == "FAILED"] for name, runs in kept.items()}
    # A on night 12 and C on night 56 twice, B twice on each of four nights, A once on night 48.
    assert {name: len(runs) for name, runs in failed.items()} == {"main": 0, "canary": 13}
    acted = {name: [e for e in story.events if e.node == name] for name in kept}
    others = {"main": len(story.digests), "canary": 2 + 4 + 2}  # the runs that published; repeats
    assert {name: len(runs) for name, runs in kept.items()} == {
        name: len(events) + others[name] for name, events in acted.items()
    }


def test_an_old_driver_that_no_node_runs_any_more_is_not_certified_for_ever(story):
    with pytest.raises(CertificateError, match="not certified for this host"):
        story.nights.verify(story.stacks["B"], OLD)
