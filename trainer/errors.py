"""The trainer's error tree and the exit code of each branch.

Owned by the trainer alone; `trainer.__main__` maps an error to its exit code, the supervisor only ever
sees the code (it never imports this module).

    TrainerError                     exit
    ├ ConfigError                    2   a flag, key or combination that cannot work
    ├ DataError                      3   no usable sample, unreadable data
    ├ CheckpointError                4   nothing that verifies, or a checkpoint of another run
    ├ NonFiniteError                 5   too many steps with NaN or Inf
    ├ OutOfMemoryError               6   CUDA or host memory exhausted
    ├ PipelineError                  7   a worker thread died or stalled
    │ ├ WorkerDiedError
    │ └ StalledError
    └ DependencyError                8   a required package is missing or unusable

0 = finished, 9 = stopped on request. 2, 3, 4 and 8 mean "cannot boot": never restarted in a loop.
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_STOPPED = 9


class TrainerError(Exception):
    """Base of everything the trainer raises on purpose; `exit_code` is what the process ends with."""

    exit_code = 1


class ConfigError(TrainerError):
    """A flag, key or combination that cannot work; the message names it, its value and the way out."""

    exit_code = 2


class DataError(TrainerError):
    """The data set is unreadable or holds no usable sample."""

    exit_code = 3


class CheckpointError(TrainerError):
    """A checkpoint is missing, damaged, or belongs to something else."""

    exit_code = 4


class NonFiniteError(TrainerError):
    """More consecutive non-finite steps than allowed; the last good checkpoint is kept."""

    exit_code = 5


class OutOfMemoryError(TrainerError):
    """Memory ran out; the message says on which device and what to lower."""

    exit_code = 6


class PipelineError(TrainerError):
    """A worker thread ended the run."""

    exit_code = 7


class WorkerDiedError(PipelineError):
    """A worker raised; the original error is the cause and the thread's name is in the message."""


class StalledError(PipelineError):
    """Nothing moved for longer than the stall limit."""


class DependencyError(TrainerError):
    """A package that this configuration requires is missing or unusable."""

    exit_code = 8
