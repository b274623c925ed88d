"""What the nights leave on this host: the last fingerprint, and the plan of a night that is going on.

In: outcomes. Out: `build/nightly/validated.json` and `build/nightly/plan.json`, each written whole or not at
all, so that after a power cut the next call continues with the first step that is not finished.
"""

from __future__ import annotations

import datetime as dt  # pydantic reads annotations at run time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AwareDatetime, Field, JsonValue

from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import Closed, load_json
from stackcheck.nightly.decide import Certified, Decision, RunOutcome
from stackcheck.nightly.fingerprint import Fingerprint

LAST_NIGHT = "validated.json"
PLAN = "plan.json"


class LastNight(Closed):
    """The last night that came to its end.

    Attributes:
        unsettled: Digest of an image -> why it is due again: no verdict, or one that is not PASSED.
        foreign: Reference of an image from elsewhere -> the engine's id of what was published for it.
    """

    schema_: Literal[1] = Field(default=1, alias="schema")
    ended: AwareDatetime
    fingerprint: Fingerprint  # the host that it validated
    unsettled: Mapping[str, str] = Field(default_factory=dict)
    foreign: Mapping[str, str] = Field(default_factory=dict)


class Figure(Closed):
    """A judged figure of a certificate: check, metric, unit and conditions; its value; what is better."""

    key: tuple[str, str, str, str]
    value: float
    direction: Literal["min", "max"]


class JudgedStep(RunOutcome):
    """A run that was judged and recorded."""

    run_id: str
    record: str
    judged: AwareDatetime
    slow_words: tuple[str, ...] = ()  # what is in `slow`, in sentences
    warnings: tuple[str, ...] = ()  # what earlier nights say of the run; nothing follows from it


class Ended(Decision):
    """How one image's part of the night ended; `exit_code` is 0, or that of `stackcheck nightly`."""

    exit_code: int = 0


class Item(Certified):
    """One image of the night, what its nearest certificate says of this host, and its finished steps.

    Attributes:
        reference: By digest, so that a tag that moves during the night changes nothing; of an image that is
            not published yet, as `docker pull` takes it.
        accept_python: Digests of the files that may be its Python although no package owns them, as
            matrix.yaml has them; of a published image `python` says it.
    """

    tag: str
    reference: str
    digest: str = ""  # of the manifest; empty for an image that is not published yet
    image_id: str | None = None  # the engine's id of an image that is not published yet
    accept_python: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    stack_id: str | None = None
    config_digest: str = ""
    python: dict[str, JsonValue] | None = None  # the image's Python as this certificate states it
    figures: tuple[Figure, ...] = ()  # the judged figures that this certificate states
    runs: tuple[JudgedStep, ...] = ()
    ended: Ended | None = None  # the end; None while it is to do

    @property
    def key(self) -> str:
        """What `LastNight.unsettled` calls it."""
        return self.digest or self.reference


class NotRun(Closed):
    """An image that is not run tonight, and why."""

    tag: str
    why: str
    for_here: bool = False  # whether it is certified for hosts like this one
    postponed: str | None = None  # its digest, if it was due although it is not run; it stays due


class Plan(Closed):
    """A night: what it is about, and how far it got.

    Attributes:
        revoke_nodes: How many nodes have to agree before an image is revoked; None: no night revokes.
        foreign: As in `LastNight`; what this night publishes is added.
    """

    schema_: Literal[1] = Field(default=1, alias="schema")
    night: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    started: AwareDatetime
    target: str
    node: str  # anonymous id of the machine, as the history has it
    fingerprint: Fingerprint
    changes: tuple[str, ...] = ()  # what changed on the host since the last night
    notes: tuple[str, ...] = ()  # what a reader should know of the host
    revoke_nodes: int | None = 2
    reboot_pending: str | None = None  # what runs and what is installed, if these differ: then nothing is run
    items: tuple[Item, ...] = ()
    skipped: tuple[NotRun, ...] = ()
    foreign: Mapping[str, str] = Field(default_factory=dict)

    def with_item(self, item: Item) -> Plan:
        """The plan with one of its items further on."""
        items = tuple(item if other.reference == item.reference else other for other in self.items)
        return self.model_copy(update={"items": items})


_Kept = TypeVar("_Kept", LastNight, Plan)


def load_state(path: Path, kind: type[_Kept]) -> _Kept | None:
    """A file of the nights; `None` if it does not exist.

    Raises:
        ConfigurationError: It is damaged, or from a different version.
    """
    if not path.exists():
        return None
    return load_json(
        kind,
        path,
        "a file of the nightly validation is damaged, or from another version of stackcheck",
        next_step=f"remove it, so that the next night starts anew: rm {path}",
    )


def save(path: Path, value: LastNight | Plan) -> None:
    """Write a file of the nights."""
    write_atomically(path, (value.model_dump_json(indent=2, by_alias=True).encode(),))


def is_stale(plan: Plan, here: Fingerprint, target: str, now: dt.datetime) -> str | None:
    """Why an unfinished night is not continued; None if it is."""
    if plan.fingerprint != here:
        return "the host has changed since it began"
    if plan.target != target:
        return f"it was about {plan.target}"
    if now - plan.started > dt.timedelta(days=1):
        return "it began more than a day ago"
    return None
