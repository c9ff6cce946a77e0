"""Everything that Poros raises on purpose.

::

    PorosError
    ├── ConfigError            a setting is unknown, of the wrong type, or outside its limits
    ├── DataError              the training data cannot be used as it is
    ├── CheckpointError        the model's files are missing, corrupt or incomplete
    ├── UnsupportedModelError  the architecture, or what was asked of it, is not supported
    ├── ResultError            a file of result rows cannot be read, or is not one
    └── ResidencyError         a prepared model was used in a way that streaming cannot honour
        └── ChecksumError      a recompute did not reproduce its forward (debug mode)

Every message says what was wrong, the value, the limit, and the way out. The command line prints it without a
traceback and exits with status 2.
"""


class PorosError(Exception):
    """Base of all errors that Poros raises on purpose."""


class ConfigError(PorosError):
    """A setting is unknown, of the wrong type, or outside its limits."""


class DataError(PorosError):
    """The training data cannot be used as it is."""


class CheckpointError(PorosError):
    """The model's files are missing, corrupt or incomplete."""


class UnsupportedModelError(PorosError):
    """The architecture, or what was asked of it, is not supported."""


class ResultError(PorosError):
    """A file of result rows cannot be read, or is not one."""


class ResidencyError(PorosError):
    """A prepared model was used in a way that streaming cannot honour."""


class ChecksumError(ResidencyError):
    """A layer's recompute did not reproduce its forward (debug mode)."""
