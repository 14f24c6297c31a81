"""The language of ``kt``: English texts are in the code, and are the keys of their translations."""

from functools import lru_cache

from kt_kernel import env, settings
from kt_kernel.errors import Phrase, UserError

ENGLISH, CHINESE = "en", "zh"


def t(text: str, /, **values: object) -> str:
    """A literal text in the user's language, with its {names} replaced by `values`."""
    text = translated(text)
    return text.format(**values) if values else text


def say(phrase: Phrase) -> str:
    """In the user's language, with phrases inside it."""
    values = {name: say(value) if isinstance(value, Phrase) else value for name, value in phrase.values.items()}
    text = translated(phrase.text)
    return text.format(**values) if values else text


def translated(text: str) -> str:
    """Of texts that are in tables: help of options, meanings of settings."""
    if language() != CHINESE:
        return text
    from kt_kernel.cli.chinese import texts

    return texts().get(text, text)


@lru_cache(1)
def language() -> str:
    """KT_LANG, else the setting general.language, else that of the system; what has no translation is English."""
    chosen = env.language() or _of_settings() or env.system_language() or ENGLISH
    return CHINESE if chosen.lower().startswith(CHINESE) else ENGLISH


def _of_settings() -> str | None:
    try:
        chosen = settings.get("general.language")
    except UserError:  # commands that need settings say what is wrong
        return None
    return None if chosen == "auto" else chosen
