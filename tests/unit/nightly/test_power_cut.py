"""A night that is killed after any of its writes ends like one that is not, when it is called again."""

import datetime as dt
import os
import pathlib
import shutil
import signal
from collections.abc import Iterator

import pytest

import small_checkout as checkouts
from nights import Nights, Node
from stackcheck.certificate import attachments, keys
from stackcheck.certificate.statement import VSA, status
from stackcheck.history.history import open_history
from stackcheck.history.runs import Query
from stackcheck.matrix import resolve
from stackcheck.nightly import night, state, summary
from stackcheck.oci.stores import open_store
from stackcheck.vendors import amd

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_disk_flushes")]

REAL_AMD = {name: getattr(amd, name) for name in ("devices", "driver", "present")}
GEMM = "test_kernels.py::test_gemm"
STACK = "rocm7.1.0-torch2.10.0-*"


class Cuts:
    """One node with two published images of a stack, and its state before the night."""

    def __init__(self, folder: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
        root = checkouts.make_checkout(folder, patch)
        self.nights = Nights(folder, root, patch, REAL_AMD)
        self.node: Node = self.nights.node("one")
        (self.stack,) = resolve.load_stacks(root, (STACK,))
        self.first = self.nights.publish(self.node, self.stack, "first")
        self.second = self.nights.publish(self.node, self.stack, "second")
        self.published = self.verified()
        self.places = (folder / "dist", self.node.root / "build")
        self.kept = folder / "kept"
        for place in self.places:
            shutil.copytree(place, self.kept / place.name)

    def restore(self) -> None:
        for place in self.places:
            shutil.rmtree(place)
            shutil.copytree(self.kept / place.name, place)

    def killed_after(self, writes: int, patch: pytest.MonkeyPatch) -> bool:
        """Play the night in a process that is killed after so many writes; False if it ended before."""
        child = os.fork()
        if child == 0:
            self._die_after(writes, patch)
            self.nights.play(self.node)
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        assert os.WIFSIGNALED(ended) or os.WEXITSTATUS(ended) == 0
        return os.WIFSIGNALED(ended)

    @staticmethod
    def _die_after(writes: int, patch: pytest.MonkeyPatch) -> None:
        real, done = pathlib.Path.replace, 0

        def replace(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
            nonlocal done
            found = real(path, target)
            done += 1
            if done == writes:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        patch.setattr(pathlib.Path, "replace", replace)

    def verdicts(self, digest: str) -> list[str]:
        """The verdicts on an image, oldest first."""
        public = keys.load_or_create(self.nights.key).public_key()
        envelopes = attachments.read_envelopes(open_store(self.nights.target), digest, public)
        return [status(item.statement) for item in envelopes if item.statement.predicate_type == VSA]

    def verified(self) -> dt.datetime:
        return self.nights.verify(self.stack, "6.14.5").verified_at

    def tag(self) -> str:
        return open_store(self.nights.target).read_manifest(self.stack.id).digest

    def runs(self) -> list[str]:
        """The verdicts in the history, oldest first, without those of the two images that were published."""
        runs = open_history(self.node.root).runs(Query(newest_first=False))
        assert [run.status for run in runs[:2]] == ["PASSED", "PASSED"]
        return [run.status for run in runs[2:]]


@pytest.fixture(scope="module")
def cuts(tmp_path_factory) -> Iterator[Cuts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stackcheck.files.atomic.os.fsync", lambda _file: None)
        yield Cuts(tmp_path_factory.mktemp("cuts"), patch)


def every_cut(cuts: Cuts, patch: pytest.MonkeyPatch) -> Iterator[int]:
    """Kill the night after its first write, after its second, …; then call it again, and yield."""
    for writes in range(1, 200):
        cuts.restore()
        killed = cuts.killed_after(writes, patch)
        cuts.nights.clock.now += dt.timedelta(minutes=20)  # the clock of the killed process went on
        plan = cuts.nights.play(cuts.node)
        left = night.folder_of(cuts.node.root)
        assert not (left / state.PLAN).exists()
        assert (left / state.LAST_NIGHT).exists()
        assert summary.exit_code(plan) in {0, 6}
        yield writes
        if not killed:
            return
    raise AssertionError("the night never ended")


def test_a_renewal_survives_a_power_cut_after_any_write(cuts, monkeypatch):
    cuts.nights.finds = lambda _digest, _driver, _run: {}
    for writes in every_cut(cuts, monkeypatch):
        assert cuts.verdicts(cuts.second) == ["PASSED"], writes  # the new one, which covers the one before
        assert cuts.verified() > cuts.published, writes
        assert cuts.runs() == ["PASSED"], writes
        assert cuts.tag() == cuts.second, writes
    assert writes > 15


def test_a_revocation_survives_a_power_cut_after_any_write(cuts, monkeypatch):
    cuts.nights.finds = lambda digest, _driver, _run: {GEMM: "failed"} if digest == cuts.second else {}
    for writes in every_cut(cuts, monkeypatch):
        assert cuts.verdicts(cuts.second) == ["PASSED", "FAILED"], writes
        assert cuts.tag() == cuts.first, writes
        # The night that is called again after its end is another night: the image before is run then.
        assert cuts.runs()[:2] == ["FAILED", "FAILED"], writes
        assert cuts.runs()[2:] in ([], ["PASSED"]), writes
    assert writes > 15
