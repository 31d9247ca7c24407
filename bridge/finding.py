"""What `bridge check` says: one finding per fault."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    severity: str  # "error": the engine fails or misreads, or the directory is incomplete; "warning"; "note"
    where: str  # "config.json: KEY", a tensor's name, or "launch: --FLAG"
    found: str
    wanted: str
    fix: str


def field(severity: str, key: str, found: object, wanted: object, fix: str) -> Finding:
    """One of config.json."""
    return Finding(severity, f"config.json: {key}", str(found), str(wanted), fix)


def flag(severity: str, name: str, found: object, wanted: object, fix: str) -> Finding:
    """One of the launch line."""
    return Finding(severity, f"launch: {name}", str(found), str(wanted), fix)
