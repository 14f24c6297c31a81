"""A chat with an OpenAI-compatible server in the terminal, behind ``kt chat``."""
