"""OpenAI's HTTP interface and a chat page, over any engine of ``kt_kernel.engine.api``. Needs the extra ``engine``."""

from kt_kernel.server.settings import Limits, Settings

__all__ = ["Limits", "Settings"]
