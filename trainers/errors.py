"""What the trainer refuses to run, before it starts."""


class RefusedError(ValueError):
    """These arguments, this layout or this device cannot run; the message says what would. Exit code 2."""
