"""How a command ends other than well."""


class RefusedError(Exception):
    """Refused before any work: the message says why and what to do (exit status 2)."""


class BusyError(RefusedError):
    """Refused because another process, or a job, is at work on the output."""


class FailedError(Exception):
    """Failed on the way: the message says what, where, and how to go on (exit status 1)."""
