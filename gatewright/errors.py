"""The one exception that a user is meant to read.

`UserError` carries a single line that names the file, field or flag at fault and the
way out.  Commands print it to stderr and leave with exit code 2 (see `gatewright.cli`).
Everything else that goes wrong is a bug or the machine's fault and keeps its traceback.
"""


class UserError(Exception):
    """Bad input: one line that names what is wrong, where, and what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))
