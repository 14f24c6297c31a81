"""Errors in OpenAI's form: {"error": {message, type, param, code}}."""


class ApiError(Exception):
    """Ends a request with this status and body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after: int | None = None,
        allowed: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after = retry_after
        self.allowed = allowed

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.allowed is not None:
            headers["allow"] = self.allowed
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str) -> ApiError:
    # The time that an answer takes is unknown; a second keeps clients from hammering and costs them little.
    return ApiError(429, message, code="queue_full", kind="rate_limit_error", retry_after=1)


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping", retry_after=5)
