"""Which files of tests take long."""

# Files that take 20 s of CPU time or wait as long, longest first. They begin, so that no worker is left with one of
# them at the end; xdist by itself begins with the files that have the most tests.
LONG_FILES = (
    "test_server_demo.py",
    "test_bench_quality.py",
    "test_convert_smollm2.py",
    "test_terminal_run.py",
    "test_plan_accuracy.py",
    "test_layer_activation.py",
    "test_layer_semantics.py",
    "test_weights_memory.py",
    "test_hf_memory.py",
    "test_hf_architectures.py",
    "test_weights_families.py",
    "test_docs_blocks.py",
)
