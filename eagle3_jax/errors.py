"""What a person can fix. The commands print `prog: message` and exit 2; any other exception is a bug."""


class UserError(ValueError):
    """Says what was found, what was wanted, and which key, file or tensor."""


class ConfigError(UserError):
    """A run configuration that cannot be used."""


class DataError(UserError):
    """Conversations, tokens or features that cannot be trained on."""


class CheckpointError(UserError):
    """A checkpoint or run directory that this version, or this config, cannot use."""


class Stopped(Exception):  # noqa: N818
    """Asked to end and did, with everything saved: no fault. The commands exit with CODE."""

    CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command, given again, goes on


class WeightError(UserError):
    """Tensors that do not fit the model they are meant for."""
