"""Errors of the inference side. Each says what happened, why, and what mends it; the command line prints them as they are."""


class QuadjetError(Exception):
    """A failure to show to a person. `fix` is the command or setting that mends it, or empty."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)
        self.message = message
        self.fix = fix


class ModelFileError(QuadjetError):
    """A model file that is damaged, hostile, or of a kind that is not supported."""


class EngineError(QuadjetError):
    """The engine process failed, or refused a request."""


class EngineDiedError(EngineError):
    """The engine process ended by itself, was killed, or hung and was ended. Another one can go on where it was."""
