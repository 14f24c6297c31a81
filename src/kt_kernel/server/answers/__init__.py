"""Answers taken apart while they come: reasoning, text and calls of tools, in the form that the model was taught."""
