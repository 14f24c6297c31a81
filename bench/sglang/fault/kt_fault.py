"""A plugin of SGLang that breaks kt_kernel on purpose: the expert KT_FAULT_DROP_EXPERT of every layer computes nothing.

A check that still passes then would not see a wrong expert.
"""

import os


def install() -> None:
    expert = os.environ.get("KT_FAULT_DROP_EXPERT")
    if expert is None:
        return
    from kt_kernel import KTMoEWrapper

    load_weights = KTMoEWrapper.load_weights

    def load_and_drop(self, *arguments, **options) -> None:
        load_weights(self, *arguments, **options)
        self.gpu_experts_mask[int(expert)] = True  # "on the GPU", where nobody computes it

    KTMoEWrapper.load_weights = load_and_drop
