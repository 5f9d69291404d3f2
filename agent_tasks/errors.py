"""Errors of background tasks. Each says what happened, why, and what mends it."""


class TaskError(Exception):
    """A failure to show to a person. `fix` is the command or setting that mends it, or empty."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)
        self.message = message
        self.fix = fix


class UnknownTaskError(TaskError):
    """No task has the id that was asked for."""


class UnknownHunkError(TaskError):
    """The task's proposal has no hunk of that id."""


class WrongStateError(TaskError):
    """The task is not in a state that allows what was asked."""


class StoppedError(Exception):
    """Raised inside a task's coroutine when a person stopped it. Never shown."""
