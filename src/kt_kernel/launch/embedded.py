"""The embedded engine behind the server: loads the model, serves it until a signal comes, says what was reached."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kt_kernel.cli.language import t

if TYPE_CHECKING:
    import socket

    from kt_kernel.server.settings import Settings

_LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Serving:
    folder: str
    name: str | None  # under which it is served; None: the folder's
    options: dict[str, object] = field(default_factory=dict)  # of open_engine
    promised: float | None = None  # tokens per second of one answer


def serve(serving: Serving, bound: "socket.socket", settings: "Settings") -> None:
    from kt_kernel.engine.load import open_engine
    from kt_kernel.launch import reached
    from kt_kernel.server import serving as server

    engine = open_engine(serving.folder, name=serving.name, **serving.options)
    url = server.base_url(bound)

    def started() -> None:
        key = '-H "Authorization: Bearer $KT_KERNEL_API_KEY" ' if settings.api_key else ""
        body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
        print(t("{name} is up; Ctrl-C stops it", name=engine.name))
        print(f"  {t('chat page')}  {url}/")
        print(f"  {t('terminal')}   kt chat -H {url}")
        print(f"  {t('API')}        {url}/v1")
        request = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' {key}-d '{body}'"
        print(f"  {t('try')}        {request}", flush=True)
        if serving.promised:
            reached.watch(engine, lambda rate: reached.tell(rate, serving.promised))

    server.serve(engine, bound, settings, started)


def server_settings(
    host: str,
    api_key: str | None,
    cors: list[str] | None,
    allow_host: list[str] | None,
    strict_model: bool,
    grace: float,
) -> "Settings":
    from kt_kernel.server.serving import is_loopback
    from kt_kernel.server.settings import Settings

    hosts = tuple(allow_host or ())
    if is_loopback(host):
        hosts += (*_LOOPBACK_NAMES, host)
    elif api_key is None:
        line = t("whoever reaches {host} may use the model; --api-key asks for a key", host=host)
        print(f"kt run: {line}", file=sys.stderr)
    return Settings(
        api_key=api_key,
        cors=tuple(cors or ()),
        hosts=hosts,
        strict_model=strict_model,
        grace_seconds=grace,
    )
