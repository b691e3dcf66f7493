"""Components as Ray actors: the one package that imports Ray.

Each component is one actor, restarts by Ray off; supervision is the overseer's alone. Names of actors hold the
incarnation and a token of this launcher's life, so that nobody reaches a component of another life by chance. Ray's own
transport pickles what it carries: it stays inside a cluster that the user trusts.

What a component needs to know of a process in order to end it (its machine, its number) is known before the component
is made: one that could not tell has made nothing. A driver that dies takes its actors along: they belong to it, and on
each machine the system kills them with Ray's own daemon there, stopped ones too.
"""

# pyright: reportMissingImports=false
# Ray is an extra: type checking does without it.

from penstock.types import ConfigError

try:
    import ray as _ray  # noqa: F401  # before the modules below, which need it
except ModuleNotFoundError as missing:
    raise ConfigError('runtime: ray needs Ray, which is not installed: pip install "penstock[ray]"') from missing

from penstock.overseer.ray.actor import Life, Place
from penstock.overseer.ray.launcher import RayHandle, RayLauncher

__all__ = ["Life", "Place", "RayHandle", "RayLauncher"]
