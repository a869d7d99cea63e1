"""How weights get from the learner to inference: schemes by name, one file each, open to more.

``"shared_memory"``  the parameter buffer in the run's segment
``"multiprocess"``   pickled over the connection to the process, for state whose shapes change
``"none"``           nothing travels
"""

from __future__ import annotations

from shmcollect.errors import ConfigError
from shmcollect.weight_sync.base import Channel, Weights, WeightSyncScheme
from shmcollect.weight_sync.multiprocess import MultiProcessWeightSyncScheme
from shmcollect.weight_sync.none import NoWeightSyncScheme
from shmcollect.weight_sync.publisher import Publisher
from shmcollect.weight_sync.shared_memory import SharedMemWeightSyncScheme

__all__ = [
    "Channel",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "Publisher",
    "SharedMemWeightSyncScheme",
    "WeightSyncScheme",
    "Weights",
    "register_scheme",
    "scheme_class",
]

_SCHEMES: dict[str, type[WeightSyncScheme]] = {}


def register_scheme(scheme: type[WeightSyncScheme]) -> type[WeightSyncScheme]:
    """Makes a scheme known by its name; also as a decorator.

    Raises:
        ConfigError: The name is taken by another one.
    """
    if _SCHEMES.setdefault(scheme.name, scheme) is not scheme:
        raise ConfigError(f"the weight sync scheme {scheme.name!r} exists: {_SCHEMES[scheme.name].__qualname__}")
    return scheme


def scheme_class(name: str) -> type[WeightSyncScheme]:
    """The scheme of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _SCHEMES:
        raise ConfigError(f"weight_sync={name!r}: expected one of {', '.join(map(repr, _SCHEMES))}")
    return _SCHEMES[name]


for _scheme in (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, NoWeightSyncScheme):
    register_scheme(_scheme)
