"""What the two clients have in common."""
from __future__ import annotations

import atexit
import os
import weakref
from typing import Any, Optional, Union

from kvmill import _calls, _native
from kvmill._engine import DeviceHandle
from kvmill._types import DataPath, EncodeIn, Tls, WhenAway

_open: "weakref.WeakSet[Base]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Threads of the library that outlive the interpreter would report into nothing.
    for client in list(_open):
        client._native.close()  # pylint: disable=protected-access


class Base:
    def __init__(self, address: str, timeout: float, path: Union[DataPath, str], plaintext: bool, encode_in: EncodeIn,
                 encode_threads: int, device: Optional[str], tls: Optional[Tls], token: str, when_away: WhenAway) -> None:
        self._events = _native.Queue()  # Of the session.
        self._native = _native.Client(address, _calls.milliseconds(timeout), _calls.data_path(path), plaintext, encode_in, encode_threads,
                                      device, _calls.identity(tls, token), int(when_away), self._events)
        self._device = device
        self._address = address
        self._pid = os.getpid()
        _open.add(self)

    @property
    def boot_id(self) -> str:
        """Boot id (lower-case hex) that the daemon last showed; empty before the first answer. Another one than before
        means that the daemon was restarted."""
        return self._native.boot_id

    @property
    def ucx_transport(self) -> str:
        """What UCX negotiated for the connection that is open now, as "tcp/eth0"; empty: there is none."""
        return self._native.ucx_transport

    @property
    def device(self) -> Optional[str]:
        """As it was given."""
        return self._device

    @property
    def closed(self) -> bool:
        return self._native.closed

    def export_memory(self, address: int, nbytes: int) -> DeviceHandle:
        """Names memory of the client's device that this process allocated with cudaMalloc, or a library of its did (that of
        a torch tensor: `tensor.data_ptr()`). InvalidArgumentError for other memory; FailedPreconditionError without a
        device."""
        return _calls.export_memory(self._native, address, nbytes)

    def ready_pages(self, request: int, layers: int) -> None:
        """Layers of the model below `layers` have their values in the pages, for all running `store_pages` of the request.
        Of memory of a GPU: the work that writes them has ended there. Waits for nobody."""
        self._native.ready_pages(request, layers)

    def __repr__(self) -> str:
        return f"<kvmill.{type(self).__name__} {self._address!r}{' closed' if self.closed else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to its process: pass the address and make one in each")

    def _closed(self) -> None:
        _open.discard(self)
