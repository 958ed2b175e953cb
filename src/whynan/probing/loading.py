"""Find and call a factory: `package.module:factory` or `path/to/file.py:factory`."""

from __future__ import annotations

from whynan.addresses import found_at
from whynan.errors import UsageError, one_line
from whynan.probing.subject import Subject, subject_of


def load_subject(address: str) -> Subject:
    """Import the module, call the factory, and take what it returns. Raises `UsageError` with one line."""
    place, factory, name = found_at(address)
    if not callable(factory):
        return subject_of(factory, name)
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name}() of {place} raised {one_line(error)}") from error
    return subject_of(made, f"{name}()")
