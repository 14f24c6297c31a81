"""Counters and histograms, and the text that Prometheus reads."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from kt_kernel.engine.api import Stats

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, help_text: str) -> Iterable[str]:
        yield f"# HELP {name} {help_text}"
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Written on the server's event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (endpoint, outcome)
        self.received_bytes = 0
        self.sent_bytes = 0
        self.first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.token = Histogram(_TOKEN_SECONDS)
        self.request = Histogram(_REQUEST_SECONDS)

    def text(self, stats: Stats) -> str:
        lines = ["# HELP kt_requests_total Requests by endpoint and outcome.", "# TYPE kt_requests_total counter"]
        for (endpoint, outcome), count in sorted(self.requests.items()):
            lines.append(f'kt_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}} {count}')
        lines += ["# HELP kt_answers_total Answers of the engine by how they ended.", "# TYPE kt_answers_total counter"]
        for finish, count in sorted(stats.finished.items()):
            lines.append(f'kt_answers_total{{finish="{finish}"}} {count}')
        for name, kind, value, help_text in self._values(stats):
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        lines += self.first_token.lines("kt_first_token_seconds", "From the end of a request to its first token.")
        lines += self.token.lines("kt_token_seconds", "Mean time between tokens of an answer, behind the first.")
        lines += self.request.lines("kt_request_seconds", "From the end of a request to the end of its answer.")
        return "\n".join(lines) + "\n"

    def _values(self, stats: Stats) -> Iterable[tuple[str, str, float, str]]:
        yield "kt_requests_running", "gauge", stats.running, "Requests that hold a slot."
        yield "kt_requests_waiting", "gauge", stats.waiting, "Requests in the queue."
        yield "kt_slots", "gauge", stats.slots, "Requests that can run at once."
        yield "kt_prompt_tokens_total", "counter", stats.prompt_tokens, "Tokens of prompts."
        yield (
            "kt_cached_tokens_total",
            "counter",
            stats.cached_tokens,
            "Tokens of prompts that were not computed again.",
        )
        yield "kt_completion_tokens_total", "counter", stats.completion_tokens, "Tokens of answers."
        yield "kt_prefill_seconds_total", "counter", round(stats.prefill_seconds, 6), "Time in prefill."
        yield "kt_decode_seconds_total", "counter", round(stats.decode_seconds, 6), "Time in decode."
        yield "kt_decode_steps_total", "counter", stats.decode_steps, "Decode steps, each of all running requests."
        yield "kt_http_received_bytes_total", "counter", self.received_bytes, "Bytes of bodies of requests."
        yield "kt_http_sent_bytes_total", "counter", self.sent_bytes, "Bytes of bodies of answers."
