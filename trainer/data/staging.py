"""Where a `prepare` keeps what it has done so far, and how its files come to stand in the output folder.

Used by `prepare`. Everything is written into `<output>/prepare.partial`: shards by rename, then the place in
the input, in `state.json`. A killed run goes on from the last state, or starts anew if input or settings
differ. Only when all rows are done the shards move to the output folder, the report last; `find_interrupted`
tells a reader that a move did not finish. Must not know how chats become tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainer.data.digests import DIGEST_BYTES, DigestSet
from trainer.data.output_folder import (
    HELD_OUT_DIR,
    OWN_FILE,
    PARTIAL_DIR,
    PROMPTS,
    REPORT,
    check_folder,
)
from trainer.data.prepare_report import PrepareReport
from trainer.data.sources import import_pyarrow
from trainer.errors import ConfigError, DataError
from trainer.lifecycle.locks import MOST_TRIES, give_up, take_lock

_REMEDY = "remove its folder and run prepare again"

ROWS_PER_GROUP = 1024
TOKENS_PER_GROUP = 1_048_576


@dataclass(frozen=True, slots=True)
class PreparedSample:
    """One tokenized sample as it stands in a shard."""

    id: str
    domain: str | None
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]


@dataclass(slots=True)
class Progress:
    """How far a run has come: all rows of files before `file`, and the first `row` of that one."""

    file: int = 0
    row: int = 0


class Staging:
    """The work of one `prepare`, resumable at each `commit`.

    Args:
        output: folder for the result.
        identity: what must be equal for a run to go on with this work (settings, input files).
    """

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        self._output = output
        self._folder = output / PARTIAL_DIR
        self._identity = json.loads(json.dumps(identity))
        self.progress = Progress()
        self.report = PrepareReport()
        self.digests = DigestSet()
        self._shards = {"train": 0, "held_out": 0}
        self._sizes = {PROMPTS: 0, "digests.bin": 0}
        self._logs: dict[str, BinaryIO] = {}
        self._writers: dict[str, _ShardWriter] = {}

    def open(self) -> bool:
        """Take up former work of the same identity, else begin; whether there was some.

        Raises:
            DataError: the output folder cannot be written.
        """
        with _translated(self._output):
            state = _read_state(self._folder)
            if state is None or state.get("identity") != self._identity:
                if self._folder.exists():
                    shutil.rmtree(self._folder)
                self._folder.mkdir(parents=True)
                state = None
            else:
                self._restore(state)
            self._logs = {name: self._open_log(name) for name in self._sizes}
        return state is not None

    def add_digest(self, digest: bytes) -> bool:
        """Remember a chat; whether it is new."""
        if not self.digests.add(digest):
            return False
        with _translated(self._output):
            self._logs["digests.bin"].write(digest)
        return True

    def write(self, sample: PreparedSample, *, is_held_out: bool) -> None:
        """Add a sample to the open shard of its part."""
        part = "held_out" if is_held_out else "train"
        with _translated(self._output):
            if part not in self._writers:
                name = f"{part}-{self._shards[part]:05d}.parquet"
                self._writers[part] = _ShardWriter(self._folder / name)
            self._writers[part].write(sample)

    def write_prompt(self, entry: Mapping[str, Any]) -> None:
        """Add a held-out prompt for the evaluator."""
        line = json.dumps(entry, ensure_ascii=False, default=str) + "\n"
        with _translated(self._output):
            self._logs[PROMPTS].write(line.encode())

    def commit(self) -> None:
        """Make everything so far durable; a run that is killed later goes on from here."""
        with _translated(self._output):
            for part, writer in self._writers.items():
                writer.close()
                self._shards[part] += 1
            self._writers = {}
            for name, log in self._logs.items():
                log.flush()
                os.fsync(log.fileno())
                self._sizes[name] = log.tell()
            self._save("reading")

    def publish(self, summary: Mapping[str, Any]) -> None:
        """Replace what stands in the output folder by the finished shards, then write the report."""
        with _translated(self._output):
            for log in self._logs.values():
                log.close()
            self._save("clearing", summary)
            self._finish("clearing", summary)

    def finish_interrupted(self) -> tuple[bool, Mapping[str, Any] | None]:
        """Complete a move into place that was cut off, of whatever identity.

        Returns:
            Whether there was one, and its summary where it was this very work: then all is done.
        """
        state = _read_state(self._folder)
        if state is None or state["phase"] == "reading":
            return False, None
        unfinished = Staging(self._output, state["identity"])
        unfinished._shards = state["shards"]
        with _translated(self._output):
            unfinished._finish(state["phase"], state["summary"])
        return True, state["summary"] if state["identity"] == self._identity else None

    def discard(self) -> None:
        """Remove all work."""
        self._close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """End in the middle: what was committed stays for a later run, the rest goes."""
        self._close()
        if not (self._folder / "state.json").exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self) -> None:
        # on a full disk closing fails as well; what matters is that nothing stays open
        for writer in self._writers.values():
            writer.drop()
        for log in self._logs.values():
            with suppress(OSError):
                log.close()
        self._writers = {}

    def _finish(self, phase: str, summary: Mapping[str, Any]) -> None:
        held_out = self._output / HELD_OUT_DIR
        if phase == "clearing":
            (self._output / REPORT).unlink(missing_ok=True)
            _remove_own(self._output)
            _remove_own(held_out)
            self._save("moving", summary)
        if self._shards["held_out"]:
            held_out.mkdir(exist_ok=True)
            _move(self._folder / PROMPTS, held_out / PROMPTS)
        for part, folder in (("train", self._output), ("held_out", held_out)):
            for index in range(self._shards[part]):
                name = f"{part}-{index:05d}.parquet"
                _move(self._folder / name, folder / name)
        replace_file(self._output / REPORT, _as_json(summary))
        sync_path(self._output)
        shutil.rmtree(self._folder)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.progress = Progress(**state["progress"])
        self.report = PrepareReport.from_state(state["report"])
        self._shards, self._sizes = state["shards"], state["sizes"]
        with (self._folder / "digests.bin").open("rb") as stream:
            for _ in range(self._sizes["digests.bin"] // DIGEST_BYTES):
                self.digests.add(stream.read(DIGEST_BYTES))

    def _open_log(self, name: str) -> BinaryIO:
        stream = (self._folder / name).open("ab")
        stream.truncate(self._sizes[name])
        stream.seek(0, os.SEEK_END)
        return stream

    def _save(self, phase: str, summary: Mapping[str, Any] | None = None) -> None:
        state = {
            "phase": phase,
            "identity": self._identity,
            "progress": {"file": self.progress.file, "row": self.progress.row},
            "report": self.report.as_state(),
            "shards": self._shards,
            "sizes": self._sizes,
            "summary": summary,
        }
        replace_file(self._folder / "state.json", _as_json(state))


@contextmanager
def locked_output(directory: Path) -> Iterator[None]:
    """Hold the output folder, made if need be, against a second `prepare`.

    Raises:
        ConfigError: it is no folder, cannot be made, is in use, or holds data files of someone else.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    descriptor = _lock(directory)
    try:
        check_folder(directory, has_work=_read_state(directory / PARTIAL_DIR) is not None)
        yield
    except BaseException:
        # a folder that has nothing in it is of no use to anybody; rmdir leaves all others
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise
    finally:
        os.close(descriptor)


def _lock(directory: Path) -> int:
    for _ in range(MOST_TRIES):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another prepare removed the folder that it had made
            continue
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"--output is not a directory: {directory}") from error
        except OSError as error:
            raise ConfigError(f"--output cannot be made: {directory}: {error.strerror}") from error
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                has_it = take_lock(descriptor, directory)
            except BlockingIOError as error:
                raise ConfigError(f"another prepare writes to this output: {directory}") from error
            if has_it:
                stack.pop_all()
                return descriptor
    raise give_up(directory)


def has_unfinished_work(directory: Path) -> bool:
    """Whether a `prepare` reads its input, or was cut off at that, to replace the set of a folder.

    Raises:
        DataError: nobody can tell, see `_read_state`.
    """
    state = _read_state(_output_of(directory) / PARTIAL_DIR)
    return state is not None and state.get("phase") == "reading"


def find_interrupted(directory: Path) -> str | None:
    """Why the files in a folder are no whole data set, or None.

    Raises:
        DataError: nobody can tell, see `_read_state`.
    """
    state = _read_state(_output_of(directory) / PARTIAL_DIR)
    if state is None or state.get("phase") == "reading":
        return None
    return "prepare was cut off while it put its files in place, run it again"


def _output_of(directory: Path) -> Path:
    """The folder that `prepare` was given: held-out files are put in place together with the others."""
    return directory.parent if directory.name == HELD_OUT_DIR else directory


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.replace(path)


def sync_path(path: Path) -> None:
    """Make a file's or folder's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _ShardWriter:
    """Writes samples to one Parquet file, in groups; it appears under its name only when complete."""

    def __init__(self, path: Path) -> None:
        self._pa, pq = import_pyarrow("prepare")
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._rows: list[PreparedSample] = []
        self._tokens = 0
        pa = self._pa
        self._schema = pa.schema(
            [
                ("id", pa.string()),
                ("domain", pa.string()),
                ("input_ids", pa.list_(pa.int32())),
                ("loss_mask", pa.list_(pa.int8())),
            ]
        )
        self._writer = pq.ParquetWriter(self._temporary, self._schema, compression="zstd")

    def write(self, row: PreparedSample) -> None:
        self._rows.append(row)
        self._tokens += len(row.input_ids)
        if len(self._rows) >= ROWS_PER_GROUP or self._tokens >= TOKENS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()
        sync_path(self._temporary)
        self._temporary.replace(self._path)

    def drop(self) -> None:
        """Give the file up, whole or not."""
        if self._writer.is_open:
            with suppress(OSError):
                self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        columns = {name: [getattr(row, name) for row in self._rows] for name in self._schema.names}
        self._writer.write_table(self._pa.table(columns, schema=self._schema))
        self._rows.clear()
        self._tokens = 0


def _remove_own(directory: Path) -> None:
    if not directory.is_dir():
        return
    for path in list(directory.iterdir()):
        if OWN_FILE.fullmatch(path.name) or (directory.name == HELD_OUT_DIR and path.name == PROMPTS):
            path.unlink()


def _move(source: Path, destination: Path) -> None:
    # Already moved by the run that was cut off here.
    if source.exists():
        source.replace(destination)


def _read_state(folder: Path) -> dict[str, Any] | None:
    """Return what an interrupted run noted, or None without one.

    Raises:
        DataError: there is a note that cannot be read; what it stood for must not be taken for nothing.
    """
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"the note of an interrupted prepare cannot be read: {path} ({error}); {_REMEDY}"
        ) from error
    if not isinstance(state, dict) or "phase" not in state:
        raise DataError(f"the note of an interrupted prepare names no phase: {path}; {_REMEDY}")
    return state


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


@contextmanager
def _translated(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise DataError(
            f"cannot write to --output: {output}: {reason}; free space or name another folder, the same "
            "command goes on from its last commit"
        ) from error
