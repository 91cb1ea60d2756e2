"""Loading by file name: a model, transport, policy or store is a module of its package, and its name is the file's.

Owns nothing but the lookup; the package decides what each of its modules must define. Modules whose name begins with
an underscore, and `base`, are not plug-ins. A plug-in is imported when it is first asked for, never by listing.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from runtime.errors import ConfigError

NOT_PLUGINS = frozenset({"base"})


def available(package: str) -> list[str]:
    """Names of the plug-ins in `package` ("engine.models"), sorted."""
    paths = importlib.import_module(package).__path__
    names = (module.name for module in pkgutil.iter_modules(paths) if not module.ispkg)
    return sorted(name for name in names if not name.startswith("_") and name not in NOT_PLUGINS)


def load(package: str, name: str, attribute: str) -> Any:
    """`attribute` of the plug-in `name`.

    ConfigError, naming those that exist, when there is no such plug-in. A plug-in without the attribute, or one that
    fails to import, is a bug and raises what Python raises.
    """
    names = available(package)
    if name not in names:
        raise ConfigError(f"{package}: {name!r} does not exist; available: {', '.join(names) or 'none'}")
    return getattr(importlib.import_module(f"{package}.{name}"), attribute)
