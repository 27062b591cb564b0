"""Sessions that clients of one process share because they were made from the same things.

Management clients with the same settings share connections and start-up calls; so do the clones of
a sampler that were unpickled here. When the last of them is dropped, so is the session.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

from tinsmith.client.forking import in_child
from tinsmith.client.lease import SessionLease
from tinsmith.client.session import Session
from tinsmith.client.settings import ClientSettings


class SharedLeases:
    """The leases of this process that whoever asks with the same settings holds too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: weakref.WeakValueDictionary[tuple[object, ...], SessionLease] = (
            weakref.WeakValueDictionary()
        )

    def lease(
        self,
        settings: ClientSettings,
        session_id: str | None = None,
        make: Callable[[ClientSettings], Session] = Session,
    ) -> SessionLease:
        """The lease for these settings, made if there is none.

        Args:
            settings: What it is made with.
            session_id: The session that it takes part in, if that is another's.
            make: Makes the session.
        """
        key = (session_id, *_values(settings))
        with self._lock:
            lease = self._leases.get(key)
            if lease is None:
                lease = self._leases[key] = SessionLease(make(settings))
            return lease

    def forget(self) -> None:
        """Begin anew: a forked child has none of its parent's connections."""
        self._lock = threading.Lock()
        self._leases = weakref.WeakValueDictionary()


def _values(settings: ClientSettings) -> Iterator[object]:
    """What every setting says: clients that were told different things share nothing."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        yield tuple(sorted(value.items())) if isinstance(value, dict) else value


shared_leases = SharedLeases()
in_child(shared_leases.forget)
