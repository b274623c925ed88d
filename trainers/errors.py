"""The two ways in which a run is refused before it starts."""


class RefusedError(ValueError):
    """These arguments, this layout or this device cannot run; the message says what can. Exit code 2."""


class UnfitError(RuntimeError):
    """The machine failed its preflight: a job on it would measure the machine, not the
    software. Exit code 5.
    """
