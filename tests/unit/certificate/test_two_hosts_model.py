"""All interleavings of two publishers and a revocation, in a model of `attachments`, `publish` and `revoke`.

The repository holds the good image and the current one; R revokes the current one. A and B renew its
certificate, or B publishes a newer image. Every read and every write of a tag is one step, and steps of
different hosts come in every order. With `late` a client gives up on one write, which arrives later.
All states are visited once. `test_two_hosts.py` holds the real functions to the same ends.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = pytest.mark.skipif(
    "STACKCHECK_WHOLE_MODEL" not in os.environ,
    reason="visits millions of states: STACKCHECK_WHOLE_MODEL=1 (docs/reference/reliability.md)",
)
# Statements about the current image, as bits: its certificate, the renewals of A and B, and FAILED.
P1, PA, PB, FAILED = 1, 2, 4, 8
GOOD, CURRENT, NEWER = "good", "current", "newer"


class Store(NamedTuple):
    """The tags that several hosts write: `.att`, fallback index, `cert-…`, `.revoked`, and the images'."""

    att: int = P1
    index: int = P1
    certs: int = P1
    mark: int = 0
    floating: str = CURRENT
    newer: bool = False  # whether the unique tag of the newer image is there

    def accepted(self) -> bool:
        """What `stackcheck verify` says of the current image."""
        return not (self.att | self.index | self.mark) & FAILED


class Local(NamedTuple):
    """A host: the next step, what it has read and not used yet, and which writes it still has to do."""

    step: str
    att: int = 0
    index: int = 0
    certs: int = 0
    wanted: int = 0
    plan: tuple[str, ...] = ()
    wrote: bool = False
    looks: bool = False  # whether the tag has been written: the last look
    moved: str = ""


END = Local("end")
Outcome = tuple[Local, Store]


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What the hosts do; without these three the protocol is that of before."""

    mark: bool = True
    union: bool = True
    last_look: bool = True


class Publisher:
    """`publish.copy_and_tag` of a renewed certificate.

    The looks before the tag is written only end a publication early; without them more can go wrong.
    """

    def __init__(self, own: int, protocol: Protocol) -> None:
        self.own, self.protocol = own, protocol
        self.start = Local("read_index")

    def step(self, me: Local, store: Store) -> Outcome:
        return getattr(self, me.step)(me, store)  # type: ignore[no-any-return]

    # `attachments._look`
    def read_index(self, me: Local, store: Store) -> Outcome:
        return me._replace(step="read_certs", index=store.index, wrote=False), store

    def read_certs(self, me: Local, store: Store) -> Outcome:
        return me._replace(step="read_att", certs=store.certs), store

    def read_att(self, me: Local, store: Store) -> Outcome:
        return me._replace(step="read_mark", att=store.att), store

    def read_mark(self, me: Local, store: Store) -> Outcome:
        """The last thing that is read: now it is known what is missing where."""
        everything = me.att | me.index | me.certs | store.mark | self.own
        wanted = everything if self.protocol.union else self.own
        missing = {
            "write_mark": self.protocol.mark and wanted & FAILED & ~store.mark,
            "write_att": wanted & ~me.att,
            "write_certs": wanted & ~me.certs,
            "reread_index": wanted & ~me.index,
        }
        plan = tuple(step for step, what in missing.items() if what)
        att = 0 if self.protocol.union else me.att  # what is wanted holds it
        told = Local("", att=att, index=wanted & ~me.index, wanted=wanted, looks=me.looks, moved=me.moved)
        return self.next(told, plan, wrote=bool(plan)), store

    # `attachments._repair`
    def next(self, me: Local, plan: tuple[str, ...], *, wrote: bool = True) -> Local:
        if plan:
            return me._replace(step=plan[0], plan=plan[1:])
        if wrote:  # look again until there is nothing to do
            return Local("read_index", looks=me.looks, moved=me.moved)
        return self.attached(me)

    def attached(self, me: Local) -> Local:
        return Local("admit_att") if me.looks else Local("write_floating")

    def write_mark(self, me: Local, store: Store) -> Outcome:
        return self.next(me, me.plan), store._replace(mark=FAILED)

    def write_att(self, me: Local, store: Store) -> Outcome:
        return self.next(me._replace(att=0), me.plan), store._replace(att=me.att | me.wanted)

    def write_certs(self, me: Local, store: Store) -> Outcome:
        """Each bundle has a tag of its own, which nobody else writes."""
        return self.next(me, me.plan), store._replace(certs=store.certs | me.wanted)

    def reread_index(self, me: Local, store: Store) -> Outcome:
        told = Local("write_index", index=store.index | me.index, looks=me.looks, moved=me.moved)
        return told, store

    def write_index(self, me: Local, store: Store) -> Outcome:
        return self.next(me, ()), store._replace(index=me.index)

    # `policy.admit`, by all forms
    def admit_att(self, _me: Local, store: Store) -> Outcome:
        return Local("read_floating" if store.att & FAILED else "admit_mark"), store

    def admit_mark(self, _me: Local, store: Store) -> Outcome:
        return Local("read_floating" if store.mark & FAILED else "admit_index"), store

    def admit_index(self, _me: Local, store: Store) -> Outcome:
        return (Local("read_floating") if store.index & FAILED else END), store

    def write_floating(self, _me: Local, store: Store) -> Outcome:
        after = Local("read_index", looks=True) if self.protocol.last_look else END
        return after, store._replace(floating=CURRENT)

    # `floating.move_back`: the newest certified image by its unique tag is the newer one, or the good one.
    def read_floating(self, me: Local, store: Store) -> Outcome:
        if store.floating not in {CURRENT, me.moved}:
            return self.moved_back(me), store
        return me._replace(step="read_unique", wanted=int(store.floating == CURRENT)), store

    def read_unique(self, me: Local, store: Store) -> Outcome:
        best = NEWER if store.newer else GOOD
        if best == me.moved and not me.wanted:
            return self.moved_back(me), store
        return Local("move", moved=best), store

    def move(self, me: Local, store: Store) -> Outcome:
        again = Local("read_floating", moved=me.moved) if self.protocol.last_look else self.moved_back(me)
        return again, store._replace(floating=me.moved)

    def moved_back(self, _me: Local) -> Local:
        return END


class Revoker(Publisher):
    """`revoke.revoke`: attach FAILED, move the tags back, attach again."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(FAILED, protocol)

    def attached(self, me: Local) -> Local:
        return END if me.looks else Local("read_floating")

    def moved_back(self, _me: Local) -> Local:
        return Local("read_index", looks=True) if self.protocol.last_look else END


class Newer(Publisher):
    """A publisher of a newer image: nobody else writes its statements, so only its tags matter."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(0, protocol)
        self.start = Local("write_unique")

    def write_unique(self, _me: Local, store: Store) -> Outcome:
        return Local("write_newer"), store._replace(newer=True)

    def write_newer(self, _me: Local, store: Store) -> Outcome:
        return END, store._replace(floating=NEWER)


class Attacher(Publisher):
    """A host that only attaches: `attachments.attach` alone."""

    def attached(self, _me: Local) -> Local:
        return END


class World(NamedTuple):
    """A state: the store, the hosts, and at most one late write of each (as the fields that it sets)."""

    store: Store
    hosts: tuple[Local, ...]
    late: tuple[tuple[tuple[str, object], ...], ...]


Actors = tuple[Publisher, ...]  # the last of them revokes


def following(world: World, actors: Actors, *, late: bool) -> Iterator[World]:
    for number, (actor, me) in enumerate(zip(actors, world.hosts, strict=True)):
        waiting = world.late[number]
        if waiting:  # it arrives, now or at any later time
            arrived = world.store._replace(**dict(waiting))  # type: ignore[arg-type]
            yield World(arrived, world.hosts, put(world.late, number, ()))
        if me == END:
            continue
        after, store = actor.step(me, world.store)
        yield World(store, put(world.hosts, number, after), world.late)
        changes = tuple(
            (name, new)
            for name, new, old in zip(Store._fields, store, world.store, strict=True)
            if new != old and name != "certs"  # a late tag of its own adds, and takes nothing away
        )
        if late and changes and actor is not actors[-1]:  # a revocation that was given up was not made
            yield World(world.store, put(world.hosts, number, END), put(world.late, number, changes))


def put(items: tuple[object, ...], number: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:number], item, *items[number + 1 :])


@dataclasses.dataclass
class Explored:
    """What all interleavings lead to."""

    faults: set[str] = dataclasses.field(default_factory=set)
    ends: int = 0
    states: int = 0


def explore(actors: Actors, *, late: bool = False, newer: bool = False) -> Explored:
    """Visit every state once."""
    first = World(Store(), tuple(actor.start for actor in actors), ((),) * len(actors))
    known, todo, found = {first}, [first], Explored()
    while todo:
        world = todo.pop()
        if world.hosts[-1] == END and world.store.accepted():
            found.faults.add("the revoked image is accepted")
        if set(world.hosts) == {END} and not any(world.late):
            found.ends += 1
            found.faults |= faults(world.store, newer=newer)
        for after in following(world, actors, late=late):
            if after not in known:
                known.add(after)
                todo.append(after)
    found.states = len(known)
    return found


def faults(store: Store, *, newer: bool) -> set[str]:
    """What is wrong when all is over."""
    told = {
        "cosign 2 accepts the revoked image": not store.att & FAILED,
        "cosign 3 accepts the revoked image": not store.index & FAILED,
        "the floating tag is on the revoked image": store.floating == CURRENT,
        "a newer release was moved back": newer and store.newer and store.floating == GOOD,
        "a certificate was lost": not P1 & store.att & store.index,
    }
    return {name for name, is_so in told.items() if is_so}


def newer_release(protocol: Protocol) -> Actors:
    return Publisher(PA, protocol), Newer(protocol), Revoker(protocol)


def two_renewals(protocol: Protocol) -> Actors:
    return Publisher(PA, protocol), Publisher(PB, protocol), Revoker(protocol)


def three_attach(protocol: Protocol) -> Actors:
    return Attacher(PA, protocol), Attacher(PB, protocol), Attacher(FAILED, protocol)


STATEMENTS = {"cosign 2 accepts the revoked image", "cosign 3 accepts the revoked image"}
TAG = {"the floating tag is on the revoked image"}
MOVED = {"a newer release was moved back"}


def test_no_interleaving_with_a_renewal_and_a_newer_release_ends_wrong() -> None:
    found = explore(newer_release(Protocol()), newer=True)
    assert found.faults == set()
    assert found.states > 10_000


@WHOLE
def test_no_interleaving_of_three_hosts_that_attach_loses_a_statement() -> None:
    found = explore(three_attach(Protocol()))
    assert found.faults - TAG == set()  # nobody moves a tag here
    assert found.states > 10_000


@WHOLE
def test_no_interleaving_of_two_renewals_and_a_revocation_ends_wrong() -> None:
    found = explore(two_renewals(Protocol()))
    assert found.faults == set()
    assert found.states > 1_000_000


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (Protocol(union=False), STATEMENTS),
        (Protocol(last_look=False), MOVED | TAG),
        (Protocol(mark=False, union=False, last_look=False), STATEMENTS | MOVED | TAG),
    ],
)
def test_the_model_finds_what_each_part_of_the_protocol_is_for(
    protocol: Protocol, expected: set[str]
) -> None:
    found = explore(newer_release(protocol), newer=True).faults
    assert expected <= found


@WHOLE
def test_without_the_mark_a_revoked_image_is_accepted_until_a_host_repairs_it() -> None:
    assert "the revoked image is accepted" in explore(three_attach(Protocol(mark=False))).faults


def test_what_stays_possible_with_writes_that_arrive_late_is_what_the_docs_name() -> None:
    """`verify` never accepts the revoked image. Tags can be set back until the next command repairs them."""
    found = explore(newer_release(Protocol()), late=True, newer=True)
    assert found.faults == STATEMENTS | MOVED | TAG
    text = (Path(__file__).parents[3] / "docs" / "guides" / "certificates.md").read_text(encoding="utf-8")
    assert all(fault in " ".join(text.split()) for fault in found.faults)
