"""python bandwidth.py THREADS: what this machine's memory gives to so many readers, in GB/s."""

import sys

from kt_kernel import _core
from kt_kernel.bench import layer

print(f"{_core.measure_read_bandwidth(layer.open_pool(int(sys.argv[1])), 2.0, 0.5):.1f}")
