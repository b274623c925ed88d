"""What the trainer refuses to run, before it starts."""


class RefusedError(ValueError):
    """These arguments, this layout or this device cannot run; the message says what would. Exit code 2."""


class UnfitError(RuntimeError):
    """The machine failed its preflight: a job on it would say nothing of the software. Exit code 5."""
