"""revoke, promote, renew and gc on a failing registry or disk, by hosts whose clocks differ.

In: a campaign, and the number of one schedule. Out: what it did, and each wrong outcome. After every one of
them the floating tag has to name a certified image, what was revoked has to stay so, whatever a publisher
with another clock does, and the same command has to complete.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import random
import shutil
import time
import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from fire.disturbed import disturbed, many_faults, one_fault
from fire.publishers import (
    CLIENT,
    KEY,
    PUBLIC,
    START,
    Campaign,
    WrongError,
    no_orphans,
    release,
    repository,
    verified,
)

from small_images import STACK_ID, certify, judged_run, quiet
from stackcheck.certificate import attachments, publish, renew, revoke
from stackcheck.errors import StackcheckError
from stackcheck.oci import layout
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stackcheck.oci.distribution import Repository

COMMANDS = ("revoke", "promote", "renew", "gc")
CLOCKS = [dt.timedelta(minutes=minutes) for minutes in (-10, -5, 0, 5, 10)]
STALL_S = 60.0
REQUESTS = 80  # of a command, about: which of them a single fault disturbs


@contextlib.contextmanager
def stores(**by_target: Any) -> Iterator[None]:
    """What `open_store` gives the commands."""

    def opened(target: str, **_: object) -> Any:
        return by_target[target]

    with contextlib.ExitStack() as patches:
        for module in (publish, renew, revoke):
            patches.enter_context(mock.patch.object(module, "open_store", opened))
        yield


class Commands(Campaign):
    """A campaign whose repositories hold two releases, of which the second has the floating tag."""

    def command(self, number: int) -> dict[str, Any]:
        """One command, disturbed, then again without a disturbance."""
        name = COMMANDS[number % len(COMMANDS)]
        chooser = random.Random(f"{self.seed} command {number}")
        if name == "gc":
            return self.collect(number, chooser)
        with self.target(f"command-{number}") as store:
            release(store, self.images["second"], self.signed["second"])
            work, off = getattr(self, name), chooser.choice(CLOCKS)  # a host keeps its clock
            begin = time.monotonic()
            with disturbed(self.host, self.plan(number, chooser)) as (host, seen):
                client = repository(host, store.repository, patience=Patience(120.0), **CLIENT)
                outcome = self.attempted(lambda: work(client, off))
            self.in_time(time.monotonic() - begin)
            self.judged(f"{name} before", lambda: self.sound(store))
            if name == "revoke" and outcome == "done":
                self.judged("revoke ended", lambda: self.revoked(store))
            begin = time.monotonic()
            self.judged(f"{name} again", lambda: work(store, off))
            recovery_s = time.monotonic() - begin
            self.judged(f"{name} after", lambda: self.completed(name, store, chooser))
        planted = {kind: count for kind, count in seen.items() if kind != "requests"}
        return {"outcome": f"{name}: {outcome}", "planted": planted, "recovery_s": recovery_s}

    def plan(self, number: int, chooser: random.Random) -> Any:
        single = number // len(COMMANDS) % 2
        return one_fault(chooser, REQUESTS) if single else many_faults(chooser)

    def attempted(self, work: Callable[[], object]) -> str:
        try:
            work()
        except StackcheckError as error:
            return f"refused: {error.what}"
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            self.wrong.append(traceback.format_exc())
            return "traceback"
        return "done"

    def in_time(self, seconds: float) -> None:
        if seconds > STALL_S:
            self.wrong.append(f"a stall of {seconds:.0f} s")

    # the commands

    def revoke(self, store: Repository, off: dt.timedelta) -> None:
        reference = f"{store.target}@{self.images['second'].manifest_digest}"
        moment = START + off
        with stores(**{store.target: store}):
            revoke.revoke(reference, reason="NaN", key=KEY, now=moment, report=quiet)

    def promote(self, store: Repository, off: dt.timedelta) -> None:
        """From a repository that nothing disturbs."""
        now = START + off
        source = repository(self.host, "campaign/start")
        with stores(**{store.target: store, source.target: source}):
            told: dict[str, Any] = {"public_key": PUBLIC, "report": quiet, "now": max(now, START)}
            publish.promote(f"{source.target}:{STACK_ID}", target=store.target, **told)

    def renew(self, store: Repository, off: dt.timedelta) -> None:
        image = self.images["second"]
        now = START + dt.timedelta(minutes=20) + off
        run, verdict = judged_run(image, now=now)
        subject: Any = SimpleNamespace(
            image=image, experimental=False, stack=None, known_issues=(), name=STACK_ID
        )
        with stores(**{store.target: store}):
            renew.renew(
                *(f"{store.target}@{image.manifest_digest}", subject, run, verdict),
                key=KEY,
                verified=now,
                now=now,
                report=quiet,
            )

    # what must hold

    def sound(self, store: Repository) -> None:
        """The tag names a certified image; or, until the command runs again, a revoked and refused one."""
        digest = store.read_manifest(STACK_ID).digest
        known = attachments.read_envelopes(store, digest, PUBLIC)
        if any(attachments._is_failed(item.statement) for item in known):
            self.refused(store, digest)
        else:
            verified(store, f":{STACK_ID}")
        verified(store, f"@{self.images['first'].manifest_digest}")

    def refused(self, store: Repository, digest: str) -> None:
        with contextlib.suppress(StackcheckError):
            verified(store, f"@{digest}")
            raise WrongError("a revocation was lost")

    def revoked(self, store: Repository) -> None:
        self.refused(store, self.images["second"].manifest_digest)
        if verified(store, f":{STACK_ID}") != self.images["first"].manifest_digest:
            raise WrongError("the tag is not on the image that is certified")

    def completed(self, name: str, store: Repository, chooser: random.Random) -> None:
        no_orphans(store, self.images["second"])
        if name != "revoke":
            verified(store, f":{STACK_ID}")
            verified(store, f"@{self.images['second'].manifest_digest}")
            return
        self.revoked(store)
        # A run that began a moment before, by a clock that differs: it lifts nothing.
        image, ended = self.images["second"], START + dt.timedelta(seconds=50) + chooser.choice(CLOCKS)
        with contextlib.suppress(StackcheckError):
            release(store, image, certify(image, KEY, now=ended))
            raise WrongError("a run from before the revocation lifted it")
        self.revoked(store)

    # a disk that fails while garbage is collected

    def collect(self, number: int, chooser: random.Random) -> dict[str, Any]:
        folder = self.folder / f"command-{number}"
        store: Any = OciLayout(folder)
        for name, image in self.images.items():
            release(store, image, self.signed[name])
        second = f"oci:{folder}@{self.images['second'].manifest_digest}"
        revoke.revoke(second, reason="NaN", key=KEY, now=START + chooser.choice(CLOCKS), report=quiet)
        (folder / "blobs/sha256" / ("0" * 64)).write_bytes(b"garbage")
        calls = self.failing(lambda: store.collect_garbage(quiet), at=0)
        (folder / "blobs/sha256" / ("1" * 64)).write_bytes(b"garbage")
        at, begin = chooser.randrange(1, calls + 1), time.monotonic()
        outcome = self.attempted(lambda: self.failing(lambda: store.collect_garbage(quiet), at=at))
        self.in_time(time.monotonic() - begin)
        self.judged("gc before", lambda: self.revoked(store))
        begin = time.monotonic()
        self.judged("gc again", lambda: store.collect_garbage(quiet))
        self.judged("gc after", lambda: self.revoked(store))
        if store.unreferenced():
            self.wrong.append("gc left garbage")
        shutil.rmtree(folder)
        return {"outcome": f"gc: {outcome}", "planted": {"EIO": 1}, "recovery_s": time.monotonic() - begin}

    def failing(self, work: Callable[[], object], *, at: int) -> int:
        """Do the work while the n-th file cannot be read; how many files were read."""
        count, real = 0, layout.open_regular

        def opened(path: Path, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise OSError(errno.EIO, "planted")
            return real(path, **options)

        def read(path: Path, limit: int, **options: Any) -> bytes:
            with opened(path, **options) as file:
                return bytes(file.read(limit))

        with (
            mock.patch.object(layout, "open_regular", opened),
            mock.patch.object(layout, "read_regular", read),
        ):
            work()
        return count
