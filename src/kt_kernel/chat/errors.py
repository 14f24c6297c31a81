from kt_kernel.errors import UserError


class ChatError(UserError):
    """Ends an answer or the chat."""
