"""What a request is known by across processes."""
from __future__ import annotations

import contextlib
from typing import Iterator

from kvmill import _native


@contextlib.contextmanager
def request(request_id: str = "", *, traceparent: str = "", tracestate: str = "") -> Iterator[None]:
    """Calls that begin within carry these: the daemon's log lines about them have them, and the nodes that it asks get them.

        with kvmill.request("4711", traceparent=headers.get("traceparent", "")):
            client.lookup(ns, keys)

    Of this thread, or of this asyncio task and those that it makes (a contextvars.ContextVar). One within another: the
    inner one's alone. What is not valid is left out: no call fails for it.

    Args:
        request_id: 1 to 64 letters, digits, and . _ - : / + = @
        traceparent: W3C trace context, "00-TRACE_ID-SPAN_ID-FLAGS" in lower-case hex: what OpenTelemetry's propagator
            injects.
        tracestate: Only with a traceparent.
    """
    texts = [request_id, traceparent, tracestate]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a {type(text).__name__}, want a str")
    # The C ABI ends texts at a zero character, and what is not ASCII cannot always be encoded; neither is valid.
    token = _native.request.set(tuple("" if "\0" in text or not text.isascii() else text for text in texts))
    try:
        yield
    finally:
        _native.request.reset(token)
