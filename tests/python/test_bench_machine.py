import pytest

from kt_kernel.bench import machine
from kt_kernel.machine import system


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-avx2"),
        ("Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "intel-xeon-platinum-8480-avx2"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "amd-ryzen-9-7950x-avx2"),
        ("", "cpu-avx2"),
    ],
)
def test_slug(cpu, name):
    assert machine.slug(cpu, "avx2") == name


def test_facts_are_of_this_machine():
    facts = machine.facts()
    assert facts["cpus"] >= facts["cores"] >= 1
    assert facts["memory_bytes"] > system.available_bytes() > 0
