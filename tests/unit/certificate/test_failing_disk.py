"""publish, promote, renew, revoke and gc on a disk that is full, that fails, or that the process dies at.

Calls are those that open, sync, rename, remove or make a file: what a power cut, a full disk and a bad block
can hit. After each, the floating tag names a certified image or one that `verify` refuses, and the same
command completes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from small_images import NOW, STACK_ID, SmallImage, certify, judged_run, make_image, new_key, quiet
from stackcheck.certificate import attachments, for_host, publish, renew, revoke, verify
from stackcheck.errors import StackcheckError
from stackcheck.files.atomic import UNUSABLE
from stackcheck.oci.layout import OciLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Work = Callable[["Place", OciLayout], object]

KILL = "SIGKILL"
WAYS = (KILL, "ENOSPC", "EIO")
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")  # sys.addaudithook's names, with the path first
TRIED = 5  # calls of each command, spread over all that it makes
KEY = new_key()
PUBLIC = KEY.public_key()
MINUTE = dt.timedelta(minutes=1)
pytestmark = pytest.mark.usefixtures("no_disk_flushes")


@dataclass
class Calls:
    """The calls of one attempt, and at which of them it fails; 0: they are only counted."""

    folder: str
    at: int
    how: str
    count: int = 0

    def met(self, *, reads: bool) -> None:
        """Count one, and fail if it is the one. A full disk can still be read."""
        if reads and self.how == "ENOSPC":
            return
        self.count += 1
        if self.count == self.at:
            if self.how == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, self.how)
            raise OSError(number, os.strerror(number))


_now: list[Calls] = []
_hooked: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _now and event in EVENTS and str(arguments[0]).startswith(_now[0].folder):
        _now[0].met(reads=event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR))


@contextlib.contextmanager
def failing(folder: Path, *, at: int, how: str) -> Iterator[Calls]:
    """In the body the n-th call for this folder fails."""
    if not _hooked:
        sys.addaudithook(_hook)  # cannot be taken back; without `_now` it does nothing
        _hooked.append(True)
    _now[:] = [Calls(str(folder), at, how)]
    try:
        with mock.patch.object(os, "fsync", side_effect=lambda _file: _now[0].met(reads=False)):
            yield _now[0]
    finally:
        _now.clear()


@dataclass(frozen=True)
class Place:
    """Two certified images, the second of which has the floating tag where a command begins."""

    first: SmallImage
    second: SmallImage
    source: OciLayout  # what is promoted

    def release(self, store: OciLayout, image: SmallImage, now: dt.datetime = NOW) -> None:
        own = OciLayout(image.layout)
        told: dict[str, Any] = {"tag": STACK_ID, "public_key": PUBLIC, "report": quiet, "key": KEY}
        publish.copy_and_tag(own, own.only_manifest(), certify(image, KEY, now=now), store, **told)

    def publish(self, store: OciLayout) -> None:
        self.release(store, self.second)

    def promote(self, store: OciLayout) -> None:
        told: dict[str, Any] = {"public_key": PUBLIC, "report": quiet, "now": NOW}
        publish.promote(f"{self.source.target}:{STACK_ID}", target=store.target, **told)

    def renew(self, store: OciLayout) -> None:
        later = NOW + 20 * MINUTE
        run, verdict = judged_run(self.second, now=later)
        subject: Any = SimpleNamespace(
            image=self.second, experimental=False, stack=None, known_issues=(), name=STACK_ID
        )
        reference = f"{store.target}@{self.second.manifest_digest}"
        renew.renew(reference, subject, run, verdict, key=KEY, verified=later, now=later, report=quiet)

    def revoke(self, store: OciLayout) -> None:
        reference = f"{store.target}@{self.second.manifest_digest}"
        revoke.revoke(reference, reason="NaN", key=KEY, now=NOW + MINUTE, report=quiet)

    def gc(self, store: OciLayout) -> None:
        store.collect_garbage(quiet)


COMMANDS: dict[str, Work] = {
    "publish": Place.publish,
    "promote": Place.promote,
    "renew": Place.renew,
    "revoke": Place.revoke,
    "gc": Place.gc,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("images")
    first, second = (make_image(folder / name, name.encode() * 90) for name in ("first", "second"))
    found = Place(first, second, OciLayout(folder / "source"))
    found.release(found.source, second)
    return found


def prepared(name: str, place: Place, folder: Path) -> OciLayout:
    """The layout in which a command begins; for gc the second image is revoked, and a blob is of no image."""
    store = OciLayout(folder)
    for image in (place.first,) if name == "publish" else (place.first, place.second):
        place.release(store, image)
    if name == "gc":
        place.revoke(store)
        (folder / "blobs/sha256" / ("0" * 64)).write_bytes(b"garbage")
    return store


def verified(store: OciLayout, name: str) -> str:
    wanted, later = for_host.Wanted(device_model="CPU", driver=None), NOW + 60 * MINUTE
    return verify.verify(f"{store.target}{name}", wanted, public_key=PUBLIC, now=later).digest


def is_refused(store: OciLayout, image: SmallImage) -> bool:
    try:
        return not verified(store, f"@{image.manifest_digest}")
    except StackcheckError:
        return True


def attempted(work: Callable[[], object], folder: Path, at: int, how: str) -> None:
    """One command that fails at one call, as an error that a user is shown or by the end of its process."""
    if how != KILL:
        shown = (StackcheckError, OSError) if getattr(errno, how) in UNUSABLE else (StackcheckError,)
        with failing(folder, at=at, how=how), contextlib.suppress(*shown):
            work()
        return
    child = os.fork()
    if not child:
        with failing(folder, at=at, how=how), contextlib.suppress(BaseException):
            work()
        os._exit(0)
    os.waitpid(child, 0)


def require_sound(store: OciLayout, place: Place) -> None:
    """The tag names a certified image; or, until the command runs again, a revoked one that is refused."""
    named = store.read_manifest(STACK_ID).digest
    known = attachments.read_envelopes(store, named, PUBLIC)
    if any(attachments._is_failed(item.statement) for item in known):
        assert is_refused(store, place.second)
    else:
        assert verified(store, f":{STACK_ID}") == named
    assert verified(store, f"@{place.first.manifest_digest}") == place.first.manifest_digest


def require_complete(name: str, store: OciLayout, place: Place) -> None:
    prefix = f"cert-{place.second.manifest_digest[7:19]}-"
    tagged = {store.read_manifest(tag).digest for tag in store.tags() if tag.startswith(prefix)}
    listed = {item.digest for item in attachments.bundles_of(store, place.second.manifest_digest)}
    assert tagged == listed, "no bundle is left that no reader finds"
    if name in {"revoke", "gc"}:
        assert is_refused(store, place.second)
        assert verified(store, f":{STACK_ID}") == place.first.manifest_digest
        assert name != "gc" or not store.unreferenced()
    else:
        assert verified(store, f":{STACK_ID}") == place.second.manifest_digest


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_a_disk_ends_leaves_what_verifies_and_completes_when_repeated(
    name: str, how: str, place: Place, tmp_path: Path
) -> None:
    prepared(name, place, tmp_path / "counted")
    with failing(tmp_path / "counted", at=0, how=how) as calls:
        COMMANDS[name](place, OciLayout(tmp_path / "counted"))
    assert calls.count > (2 if name == "gc" else 10)
    for at in range(1, calls.count + 1, max(1, calls.count // TRIED)):
        folder = tmp_path / str(at)
        store = prepared(name, place, folder)
        attempted(lambda folder=folder: COMMANDS[name](place, OciLayout(folder)), folder, at, how)  # type: ignore[misc]
        require_sound(store, place)
        COMMANDS[name](place, OciLayout(folder))
        require_complete(name, OciLayout(folder), place)
        shutil.rmtree(folder)
