"""Element types by their GGML numbers; ``MOEConfig.hidden_type`` is one."""

import enum


class ggml_type(enum.IntEnum):  # noqa: N801  (clients import this name)
    FP32 = 0
    FP16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    FP64 = 28
    IQ1_M = 29
    BF16 = 30
