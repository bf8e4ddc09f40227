"""The one error that is shown to the user as a sentence instead of a traceback."""


class InputError(ValueError):
    """Says what was given, what is allowed and what to do. The command line exits with code 2."""
