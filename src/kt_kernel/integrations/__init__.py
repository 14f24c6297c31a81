"""Plugins for other engines; each is loaded by its engine, and imports nothing of it before."""
