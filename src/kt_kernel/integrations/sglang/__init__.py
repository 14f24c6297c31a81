"""The plugin for stock SGLang: what its own --kt options lack.

SGLang finds it by the entry point group ``sglang.srt.plugins`` and calls :func:`activate` in every process that it
starts. Without --kt-weight-path nothing of the engine behaves differently.

| Module | What |
|---|---|
| options | the options that are added, what they are checked for, and what they change in others |
| engine | what is used of SGLang: names that must exist, and where its versions differ |
| hooks | where SGLang is entered |
| plan | what holds for all layers: options, placement, room for long prompts |
| method | KTEPWrapperMethod: hot experts on the GPU, cold ones on the CPU, on a stream of their own |
| residents | which experts are on the GPU now, and which should be |
| prefill | long prompts: all experts of a layer to the GPU, then computed there |
| record | which experts were on the GPU in each pass, beside what SGLang's recorder writes |
| host_ring | memory that the CPU writes experts to and every rank's GPU copies them from |
"""


def activate() -> None:
    from kt_kernel.integrations.sglang.hooks import register

    register()
