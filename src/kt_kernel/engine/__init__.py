"""The embedded engine: transformers for everything but the experts, our kernels for them, many requests at once."""
