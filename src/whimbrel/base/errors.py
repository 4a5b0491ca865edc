"""Every error that Whimbrel raises on purpose.

WhimbrelError
├── ConfigError(ValueError)          a setting, flag or argument that cannot be used
│   └── MissingExtraError(ImportError)   an optional package that the request needs
├── DataError(ValueError)            a source, shard or manifest that is not what it claims
├── CacheError(ValueError)           keys and values, or an operation, that a cache cannot take; nothing was changed
│   └── CacheIndexError(IndexError)      a layer or a row that a cache does not have
├── CheckpointError(RuntimeError)    a checkpoint or model directory that is damaged, foreign or incomplete
├── ParallelError(RuntimeError)      ranks that disagree
├── PrecisionError(ValueError)       a precision recipe that this model or machine cannot run
├── OptimizerError(ValueError)       an optimizer setting or gradient that cannot be used
│   └── NoSparseGradientError(RuntimeError)   a sparse gradient, which most optimizers cannot take
├── RequestError(ValueError)         a generation or server request that cannot be served
├── TrainingError(RuntimeError)      a run that cannot go on (a loss that is not finite)
└── WriteError(OSError)              a file that could not be written (a full disk); nothing was left behind

A message is one line: what was given, what is allowed, what to do. The command line prints it and exits with 2.
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "CacheIndexError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MissingExtraError",
    "NoSparseGradientError",
    "OptimizerError",
    "ParallelError",
    "PrecisionError",
    "RequestError",
    "TrainingError",
    "WhimbrelError",
    "WriteError",
]


class WhimbrelError(Exception):
    """Root of the tree: catch this to catch all of them."""


class ConfigError(WhimbrelError, ValueError):
    """A setting, flag or argument that cannot be used."""


class MissingExtraError(ConfigError, ImportError):
    """An optional package that the request needs is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the package '{package}': pip install 'whimbrel[{extra}]'")


class DataError(WhimbrelError, ValueError):
    """A source, shard or manifest that is not what it claims to be."""


class CacheError(WhimbrelError, ValueError):
    """Keys and values, or an operation, that a cache cannot take; nothing was changed."""


class CacheIndexError(CacheError, IndexError):
    """A layer or a row that a cache does not have."""


class CheckpointError(WhimbrelError, RuntimeError):
    """A checkpoint or model directory that is damaged, foreign or incomplete."""


class ParallelError(WhimbrelError, RuntimeError):
    """Ranks that disagree."""


class PrecisionError(WhimbrelError, ValueError):
    """A precision recipe that this model or machine cannot run."""


class OptimizerError(WhimbrelError, ValueError):
    """An optimizer setting or gradient that cannot be used."""


class NoSparseGradientError(OptimizerError, RuntimeError):
    """A sparse gradient was given to an optimizer that takes dense ones."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(
            f"{optimizer} takes dense gradients and was given a sparse one: build the embedding with sparse=False, "
            "or move it by torch.optim.SparseAdam"
        )


class RequestError(WhimbrelError, ValueError):
    """A generation or server request that cannot be served; `field` is what of it is at fault, where that is one."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TrainingError(WhimbrelError, RuntimeError):
    """A run that cannot go on."""


class WriteError(WhimbrelError, OSError):
    """A file that could not be written; nothing half-written was left behind."""
