import pytest

from kt_kernel.bench import machine


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


def test_cpu_model_is_the_first_one():
    assert machine.cpu_model("processor : 0\nmodel name\t: Some CPU \nmodel name\t: Other\n") == "Some CPU"


def test_facts_are_of_this_machine():
    facts = machine.facts()
    assert facts["cpus"] >= facts["cores"] >= 1
    assert facts["memory_bytes"] > machine.available_bytes() > 0
