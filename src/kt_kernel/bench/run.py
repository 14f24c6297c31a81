"""What a run is asked for, and what it finds out."""

from dataclasses import dataclass, field

from kt_kernel.bench.shapes import Shape


@dataclass
class Settings:
    variants: list[str | None]  # None: the best this CPU can run
    threads: int | None = None
    seconds: float = 1.0  # per point
    shapes: list[Shape] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def points(self) -> int:
        """Of one variant."""
        return len(self.shapes) * len(self.formats) * len(self.tokens)


@dataclass
class Findings:
    """Limits by variant, figures, and remarks that the reader has to know."""

    limits: dict[str, dict] = field(default_factory=dict)
    figures: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
