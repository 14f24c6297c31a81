#!/usr/bin/env python3
"""Quantises the routed experts of a model for the GPU; see kt_kernel/convert/gpu_weights.py."""

import sys

from kt_kernel.convert.gpu_weights import main

if __name__ == "__main__":
    sys.exit(main())
