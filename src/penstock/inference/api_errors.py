"""Failures of an API request, in OpenAI's form."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

LONGEST_MESSAGE = 1000
"""In characters: an error repeats what a client sent, but not all of it."""

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: What is wrong and what to do.
        param: The parameter at fault.
        code: A short name of the failure.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def response(self) -> JSONResponse:
        """``{"error": {"message", "type", "param", "code"}}``."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": _encodable(self.message),
            "type": KINDS.get(self.status, default),
            "param": None if self.param is None else _encodable(self.param),
            "code": self.code,
        }
        return JSONResponse({"error": error}, status_code=self.status)


def _encodable(text: str) -> str:
    """What a client sent may hold half of a surrogate pair, and an error repeats it: shown by its escape."""
    return text[:LONGEST_MESSAGE].encode("utf-8", "backslashreplace").decode()


async def respond(_: Request, error: Exception) -> JSONResponse:
    """The exception handler of the application; what is unexpected is also logged with its traceback."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail)
    if not isinstance(error, ApiError):
        error = ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
    return error.response()
