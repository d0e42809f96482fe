"""One package for each agent framework. LangChain and AutoGen are extras, as in `pip install 'weft[langchain]'`."""

from __future__ import annotations

import importlib.util

from weft.core.errors import MissingPackageError


def require_packages(user: str, *packages: str, install: str) -> None:
    """Raise MissingPackageError if a package is not installed. The packages are not imported.

    Args:
        user: the integration that needs the packages.
        packages: their import names.
        install: the command, in backticks, that installs them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackageError(user, missing, install)
