"""How many requests run at once and how long they may be, from the memory that is left."""

# Of the memory that is available once the model is loaded; the rest is for activations and for others.
MEMORY_SHARE = 0.5
MIN_SLOTS, MAX_SLOTS = 4, 16
# A context that serves most requests: with more memory there are more slots first, then a longer context.
USUAL_CONTEXT = 32768
SHORT_CONTEXT = 4096
MIN_CONTEXT = 16  # the text that a model is tried with


def check_sizes(slots: int | None, context: int | None, model_context: int) -> None:
    """Before the model is loaded. ValueError: what no memory would make possible."""
    for name, given, least in (("slots", slots, 1), ("context", context, MIN_CONTEXT)):
        if given is not None and given < least:
            raise ValueError(f"{name} is {given}: it must be at least {least}")
    if context is not None and context > model_context:
        raise ValueError(f"context is {context}: the model was made for {model_context} tokens at most")


def choose_sizes(
    slots: int | None, context: int | None, model_context: int, bytes_per_token: int, available_bytes: int
) -> tuple[int, int]:
    """(slots, context). What is given, and was checked, is kept; ValueError if it needs more than there is."""
    tokens = int(available_bytes * MEMORY_SHARE) // max(bytes_per_token, 1)
    if slots is None:
        slots = _fitting_slots(tokens, context or min(model_context, USUAL_CONTEXT), context is not None)
    if context is None:
        context = min(model_context, max(tokens // slots, MIN_CONTEXT))
    needed_bytes = slots * context * bytes_per_token
    if needed_bytes > available_bytes:
        raise ValueError(
            f"{slots} slots of {context} tokens need {needed_bytes / 1e9:.1f} GB for keys and values, and "
            f"{available_bytes / 1e9:.1f} GB are available: lower slots or context"
        )
    return slots, context


def _fitting_slots(tokens: int, context: int, context_is_given: bool) -> int:
    slots = min(MAX_SLOTS, max(1 if context_is_given else MIN_SLOTS, tokens // context))
    while slots > 1 and tokens // slots < min(context, SHORT_CONTEXT):
        slots -= 1
    return slots
