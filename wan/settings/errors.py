"""The error that a user sees as one sentence instead of a traceback."""


class InputError(ValueError):
    """Says what was given, what is allowed and what to do. The command line exits with code 2.

    Messages name settings as the command line does (`--frame_num`); `wan.api` turns them into the
    keywords of its methods.
    """
