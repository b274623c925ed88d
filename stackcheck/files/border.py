"""What a model of a file, or of another program's answer, does with a key that it does not know.

Also: how a file of JSON is read as a model. In: a model, a path. Out: the model, or one error for a user.
"""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files import strictjson

AModel = TypeVar("AModel", bound=BaseModel)


class Closed(BaseModel):
    """An unknown key is an error: the file is written for this program, so the key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Open(BaseModel):
    """Unknown keys are left out: others may write more than this program needs."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def load_json(kind: type[AModel], path: Path, what: str, **more: str) -> AModel:
    """The model in a file.

    Raises:
        ConfigurationError: It is not there, or is another document; with `what` and `more`.
        OSError: It cannot be read, which says nothing of the document.
    """
    try:
        text = path.read_bytes()
        strictjson.check(text)
        return kind.model_validate_json(text)
    except (FileNotFoundError, ValueError, RecursionError) as error:  # pydantic's error is a ValueError
        raise ConfigurationError(what, where=str(path), got=first_problem(error), **more) from error


def first_problem(error: Exception) -> str:
    """What is wrong with a document, in one line; of several problems the first one, with its place."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return (str(error) or type(error).__name__).splitlines()[0]
