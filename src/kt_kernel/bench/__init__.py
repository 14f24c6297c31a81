"""Measurements behind ``kt bench``: what this machine can do, what a MoE layer reaches of it, and what a peer reaches.

Whatever computes runs in a process of its own (``side``): the instruction set is chosen at import, and a peer's
threads must not live beside ours. The command's process only asks (``client``), counts (``figures``) and prints
(``report``).
"""
