"""The flow in a checkout of a few kilobytes, and what it signed and published there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import asked
import result_files
from small_checkout import CPU_STACK, FakeEngine
from small_images import tags_of
from stackcheck import flow
from stackcheck.certificate import keys, signing, verify
from stackcheck.certificate.statement import Statement
from stackcheck.matrix import resolve
from stackcheck.recipe import render


class Job:
    """One checkout, its engine, and where it publishes."""

    def __init__(self, root: Path, engine: FakeEngine) -> None:
        self.root = root
        self.engine = engine
        self.dist = root / "dist"
        self.lines: list[str] = []
        self.settings = flow.FlowSettings(
            root=root, target=f"oci:{self.dist}", key=root.parent / "stackcheck.key"
        )

    def stack(self, name: str = CPU_STACK) -> resolve.Stack:
        return resolve.load_stacks(self.root, (name,))[0]

    def set(self, setting: str) -> resolve.Stack:
        """Give the cpu stack one more line in matrix.yaml, and render; the stack that follows."""
        path = self.root / "matrix.yaml"
        path.write_text(
            path.read_text().replace("  - runtime: cpu\n", f"  - runtime: cpu\n    {setting}\n", 1)
        )
        stack = self.stack()
        render.write((stack,), self.root / "images")
        return stack

    def waive(self, check: str, **changes: str) -> dict[str, Any]:
        """Give every stack a waiver in matrix.yaml; the waiver as a certificate states it."""
        waiver = result_files.waiver(check, **changes)
        path = self.root / "matrix.yaml"
        path.write_text(
            path.read_text().replace("policy:\n", f"policy:\n  waivers: [{json.dumps(waiver)}]\n", 1)
        )
        return waiver

    def outcomes(self, *stacks: resolve.Stack, **changes: Any) -> list[flow.StackOutcome]:
        settings = dataclasses.replace(self.settings, **changes)
        engine: Any = self.engine
        return list(flow.images(stacks or (self.stack(),), engine, settings, self.lines.append))

    def outcome(self, *stacks: resolve.Stack, **changes: Any) -> flow.StackOutcome:
        (outcome,) = self.outcomes(*stacks, **changes)
        return outcome

    def verify(self, key: Path | None = None) -> verify.Verified:
        return asked.verified(
            f"oci:{self.dist}:{CPU_STACK}",
            public_key=keys.load_or_create(key or self.settings.key).public_key(),
        )

    def tags(self) -> dict[str, str]:
        return tags_of(self.dist)

    def signed(self, name: str = CPU_STACK) -> dict[str, Statement]:
        statements = [
            envelope.statement
            for envelope in signing.load_signed(
                self.settings.folder(name), self.settings.signer().public_key()
            )
        ]
        return {statement.predicate_type: statement for statement in statements}
