"""What a model of a file, or of another program's answer, does with a key that it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Closed(BaseModel):
    """An unknown key is an error: the file is written for this program, so the key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Open(BaseModel):
    """Unknown keys are left out: others may write more than this program needs."""

    model_config = ConfigDict(extra="ignore", frozen=True)
