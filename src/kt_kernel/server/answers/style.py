"""Which form the answers of a model have: read from the text of its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass

from kt_kernel.server.answers.harmony import Harmony
from kt_kernel.server.answers.parts import Parser, Plain, Schemas
from kt_kernel.server.answers.tagged import Tagged
from kt_kernel.server.answers.tool_forms import TOOL_FORMS, ToolForm

# Marks around reasoning, and whether they are special tokens.
THINKING = (
    ("<think>", "</think>", False),
    ("<seed:think>", "</seed:think>", False),
    ("<|channel>thought", "<channel|>", True),
    ("[THINK]", "[/THINK]", True),
    ("<|START_THINKING|>", "<|END_THINKING|>", True),
)


@dataclass(frozen=True)
class Style:
    thinking: tuple[str, str] | None = None
    form: ToolForm | None = None
    harmony: bool = False
    thinking_is_special: bool = False
    knows_developer: bool = False

    @property
    def knows_tools(self) -> bool:
        return self.harmony or self.form is not None

    def special_text(self, with_tools: bool) -> bool:
        """Whether the marks come only if special tokens become text."""
        special_form = with_tools and self.form is not None and self.form.special
        return self.harmony or self.thinking_is_special or special_form

    def parser(self, prompt_end: str, schemas: Schemas) -> Parser:
        """For one answer; ``prompt_end`` is the end of the prompt as text."""
        if self.harmony:
            return Harmony(with_tools=bool(schemas))
        form = self.form if schemas else None
        if self.thinking is None and form is None:
            return Plain()
        inside = self.thinking is not None and prompt_end.rstrip().endswith(self.thinking[0])
        return Tagged(self.thinking, form, schemas, inside=inside)


def style_of(template: str | None) -> Style:
    """The style of the models with this template; text as it is where there is none."""
    if not template:
        return Style()
    developer = "developer" in template
    if _all_in(("<|channel|>", "<|message|>"), template):
        return Style(harmony=True, knows_developer=developer)
    thinking = next((row for row in THINKING if row[0] in template or row[1] in template), None)
    form = next((form for form in TOOL_FORMS if _all_in(form.probe, template)), None)
    return Style(
        thinking=thinking[:2] if thinking else None,
        form=form,
        thinking_is_special=bool(thinking and thinking[2]),
        knows_developer=developer,
    )


def _all_in(probe: Sequence[str], template: str) -> bool:
    return all(text in template for text in probe)
