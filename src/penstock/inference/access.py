"""What a request must pass before it is looked at: the token, and a body of bounded size.

Bodies must be declared as JSON: a web page of another origin can then not post one without the browser asking the
server first, which it refuses.
"""

import hmac
import json
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.inference.api_errors import ApiError


class BearerToken:
    """ASGI middleware: every path but ``/health`` needs ``Authorization: Bearer <token>``.

    Args:
        app: What is guarded.
        token: The token; compared in constant time.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = ApiError(401, "missing or wrong token in the Authorization header", code="invalid_api_key")
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def read_json(request: Request, max_bytes: int) -> Any:
    """Reads a JSON body of at most so many bytes.

    Raises:
        ApiError: 413 too large, 415 not declared as JSON, 400 not JSON.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise ApiError(415, f"content-type is {declared!r}: it must be application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
