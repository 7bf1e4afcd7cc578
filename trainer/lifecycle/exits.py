"""From the error that ended the process to its exit code and one line for the log.

Called by `trainer.__main__` only. Must not decide anything about retries: that is the supervisor's.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.errors import OutOfMemoryError, TrainerError

EXIT_UNKNOWN = 1


def translate(error: BaseException) -> BaseException:
    """Turn an out-of-memory error anywhere in the chain of causes into ours; others pass unchanged."""
    for link in _causes(error):
        # torch's class is recognised by name, so that --help and wrong flags need no torch
        if isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError":
            if isinstance(link, OutOfMemoryError):
                return link
            text = " ".join(str(link).split())[:300]
            return OutOfMemoryError(
                f"memory exhausted: {text or 'host memory'}; "
                "lower --token-budget, --max-anchors or --hs-max-bytes"
            )
    return error


def exit_code(error: BaseException) -> int:
    """Return what the process ends with."""
    return error.exit_code if isinstance(error, TrainerError) else EXIT_UNKNOWN


def describe(error: BaseException) -> str:
    """Return one line: class, message and the notes (such as the thread's name)."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {' '.join(str(error).split())}{notes}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
