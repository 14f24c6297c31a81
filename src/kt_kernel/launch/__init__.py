"""How a model is served: what somebody wants, what is chosen for the rest, and the start of an engine."""
