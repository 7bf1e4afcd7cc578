"""The lock on an output: one command at a time, without a moment in which two believe that they have it.

Used by `runfolder` (`train`, `import`), `data.staging` (`prepare`) and `data.completions` (`generate`). A
lock is the kernel's, on an open file or folder, so it ends with its process; a command that fails may remove
what it made, the locked file too. Whoever opened that just before must not take it for the one at the path.
Must not know what is locked.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from trainer.errors import ConfigError

MOST_TRIES = 100
"""Each one more is another command that removed its output between our opening and our locking it."""
_flock = fcntl.flock


def take_lock(descriptor: int, path: Path) -> bool:
    """Lock an open file or folder for this process alone, without waiting.

    Returns:
        False when the path leads to another one by now, or to none: it must be opened again.

    Raises:
        BlockingIOError: another process has it.
        ConfigError: there are no locks there.
    """
    try:
        _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except BlockingIOError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(
            f"the output cannot be locked: {path} ({error.strerror or error}); name one on another "
            "file system"
        ) from error


def give_up(path: Path) -> ConfigError:
    """Return the error for an output that was removed each time that it was opened."""
    return ConfigError(f"other commands keep making and removing this output: {path}; name another")
