"""Proof of right output on this machine: what ``kt verify`` compares, with what, and how far apart they may be."""
