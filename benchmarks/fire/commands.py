"""revoke, promote, renew and gc that are killed, or meet a failing registry or disk, with clocks that differ.

In: a campaign, and the number of one schedule. Out: what it did, and each wrong outcome. After every one of
them the floating tag has to name a certified image, what was revoked has to stay so, whatever a publisher
with another clock does, and the same command has to complete.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import shutil
import time
import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from fire.disk import KILL, WAYS, failing
from fire.disturbed import disturbed, many_faults, one_fault
from fire.publishers import (
    CLIENT,
    KEY,
    PUBLIC,
    START,
    Campaign,
    Counting,
    WrongError,
    no_orphans,
    release,
    repository,
    verified,
)

from small_images import STACK_ID, certify, judged_run, quiet
from stackcheck.certificate import attachments, publish, renew, revoke
from stackcheck.errors import StackcheckError
from stackcheck.files.atomic import UNUSABLE
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stackcheck.oci.distribution import Repository
    from stackcheck.oci.store import Store

COMMANDS = ("revoke", "promote", "renew")
ON_DISK = (*COMMANDS, "publish", "gc")
CLOCKS = [dt.timedelta(minutes=minutes) for minutes in (-10, -5, 0, 5, 10)]
STALL_S = 60.0
REQUESTS = 80  # of a command, about: which of them a single fault disturbs
CALLS = 60  # to the store, about: at which of them a command is killed


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
        """One command on a registry, disturbed or killed, then again without a disturbance."""
        name, turn = COMMANDS[number % len(COMMANDS)], number // len(COMMANDS) % 3
        chooser = random.Random(f"{self.seed} command {number}")
        with self.target(f"command-{number}") as store:
            release(store, self.images["second"], self.signed["second"])
            work, off = getattr(self, name), chooser.choice(CLOCKS)  # a host keeps its clock
            if turn == 2:
                at = chooser.randrange(1, CALLS)
                killed = self.in_child(lambda: work(Counting(store, at), off))
                outcome, planted = "killed" if killed else "done", {KILL: int(killed)}
            else:
                plan = one_fault(chooser, REQUESTS) if turn else many_faults(chooser)
                with disturbed(self.host, plan) as (host, seen):
                    client = repository(host, store.repository, patience=Patience(120.0), **CLIENT)
                    outcome = self.attempted(lambda: work(client, off))
                planted = {kind: count for kind, count in seen.items() if kind != "requests"}
            recovery_s = self.repeated(name, store, outcome, chooser, lambda: work(store, off))
        return {"outcome": f"{name}: {outcome}", "planted": planted, "recovery_s": recovery_s}

    def disk(self, number: int) -> dict[str, Any]:
        """One command on a layout that fails, or that kills it, at one call to the disk; then again."""
        name, how = ON_DISK[number % len(ON_DISK)], WAYS[number // len(ON_DISK) % len(WAYS)]
        chooser = random.Random(f"{self.seed} disk {number}")
        folder, off = self.folder / f"disk-{number}", chooser.choice(CLOCKS)
        store, work = self.prepared(name, folder), getattr(self, name)
        counted = self.folder / f"disk-{number}-counted"
        shutil.copytree(folder, counted)
        with failing(counted, at=0, how=how) as calls:
            work(OciLayout(counted), off)
        shutil.rmtree(counted)
        at = chooser.randint(1, calls.count)
        if how == KILL:
            planted = self.in_child(lambda: self.on_disk(work, folder, off, at))
            outcome = "killed" if planted else "done"
        else:
            with failing(folder, at=at, how=how) as calls:
                outcome = self.attempted(lambda: work(OciLayout(folder), off))
            planted = not calls.at
        recovery_s = self.repeated(name, store, outcome, chooser, lambda: work(OciLayout(folder), off))
        shutil.rmtree(folder)
        return {"outcome": f"{name}: {outcome}", "planted": {how: int(planted)}, "recovery_s": recovery_s}

    def on_disk(self, work: Callable[..., object], folder: Path, off: dt.timedelta, at: int) -> None:
        with failing(folder, at=at, how=KILL):
            work(OciLayout(folder), off)

    def prepared(self, name: str, folder: Path) -> Any:
        """A layout of two releases; for gc, the second is revoked and a blob is of no image."""
        store: Any = OciLayout(folder)
        for each in ("first",) if name == "publish" else ("first", "second"):
            release(store, self.images[each], self.signed[each])
        if name == "gc":
            self.revoke(store, dt.timedelta())
            (folder / "blobs/sha256" / ("0" * 64)).write_bytes(b"garbage")
        return store

    def repeated(
        self, name: str, store: Any, outcome: str, chooser: random.Random, again: Callable[[], object]
    ) -> float:
        """Judge what a disturbed command left, repeat it, and judge again; the seconds that this took."""
        self.judged(f"{name} before", lambda: self.sound(store))
        if name == "gc" or (name == "revoke" and outcome == "done"):
            self.judged(f"{name} ended", lambda: self.revoked(store))
        begin = time.monotonic()
        self.judged(f"{name} again", again)
        recovery_s = time.monotonic() - begin
        self.in_time(recovery_s)
        self.judged(f"{name} after", lambda: self.completed(name, store, chooser))
        return recovery_s

    def attempted(self, work: Callable[[], object]) -> str:
        begin = time.monotonic()
        try:
            work()
        except StackcheckError as error:
            return f"refused: {error.what}"
        except Exception as error:  # noqa: BLE001  # a traceback is wrong, and the campaign goes on
            if isinstance(error, OSError) and error.errno in UNUSABLE:  # which the command line reports
                return f"refused: {error.strerror}"
            self.wrong.append(traceback.format_exc())
            return "traceback"
        finally:
            self.in_time(time.monotonic() - begin)
        return "done"

    def in_time(self, seconds: float) -> None:
        if seconds > STALL_S:
            self.wrong.append(f"a stall of {seconds:.0f} s")

    # the commands

    def revoke(self, store: Store | Counting, off: dt.timedelta) -> None:
        reference = f"{store.target}@{self.images['second'].manifest_digest}"
        moment = START + off
        with stores(**{store.target: store}):
            revoke.revoke(reference, reason="NaN", key=KEY, now=moment, report=quiet)

    def promote(self, store: Store | Counting, off: dt.timedelta) -> None:
        """From a repository that nothing disturbs."""
        now = START + off
        source = repository(self.host, "campaign/start")
        with stores(**{store.target: store, source.target: source}):
            told: dict[str, Any] = {"public_key": PUBLIC, "report": quiet, "now": max(now, START)}
            publish.promote(f"{source.target}:{STACK_ID}", target=store.target, **told)

    def renew(self, store: Store | Counting, off: dt.timedelta) -> None:
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

    def publish(self, store: Any, _off: dt.timedelta) -> None:
        release(store, self.images["second"], self.signed["second"])

    def gc(self, store: Any, _off: dt.timedelta) -> None:
        store.collect_garbage(quiet)

    # what must hold

    def sound(self, store: Any) -> None:
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
        if name == "gc" and store.unreferenced():
            self.wrong.append("gc left garbage")
        if name not in {"revoke", "gc"}:
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
