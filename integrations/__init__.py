"""One package for each agent framework. The framework itself is not among the packages that Weft requires."""

from __future__ import annotations

from importlib.metadata import distributions as discover

from weft.core.errors import MissingPackageError, pip_install


def require_packages(user: str, *distributions: str) -> None:
    """Raise MissingPackageError if a package is not installed. The packages are not imported.

    Args:
        user: the integration that needs the packages.
        distributions: their names for pip.
    """
    missing = [name for name in distributions if not any(discover(name=name))]
    if missing:
        raise MissingPackageError(user, missing, f"`{pip_install(*missing)}`")
