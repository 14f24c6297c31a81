TEXTS = {
    "Measure this machine, our kernels on it, and other implementations beside them.": (
        "测量本机、kt-kernel 的计算核，以及其他实现。"
    ),
    "Worker threads (default: every usable CPU).": "工作线程数（默认：全部可用 CPU）。",
    "Instruction sets, separated by commas (default: the best one).": "指令集，用逗号分隔（默认：最好的一个）。",
    "Time spent on each point.": "每个测量点的秒数。",
    "{names}, all, or E,K,H,I; several separated by spaces.": "{names}、all，或 E,K,H,I；多个用空格分隔。",
    "Token counts, 1 to 16384, separated by commas.": "token 数，1 到 16384，用逗号分隔。",
    "JSON on stdout instead of tables.": "在标准输出打印 JSON，而不是表格。",
    "Write a roofline plot to this PNG.": "把 roofline 图写入这个 PNG 文件。",
    "Merge the figures into bench/results/<machine>.json.": "把结果合并到 bench/results/<machine>.json。",
    "File name for --save (default: CPU model and variant).": "--save 的文件名（默认：CPU 型号和变体）。",
    "Read bandwidth and arithmetic peaks of this machine.": "本机的读带宽和算力峰值。",
    "One MoE layer: GB/s, TFLOPS, and what share of the limits that is.": (
        "一个 MoE 层：GB/s、TFLOPS，以及占极限的比例。"
    ),
    "One MoE layer beside a GPU: shares of the limits, overlap, and what submit and sync cost. Needs a GPU.": (
        "与 GPU 并行的一个 MoE 层：占极限的比例、重叠程度、submit 和 sync 的开销。需要 GPU。"
    ),
    "The released kt-kernel (GGUF types: llama.cpp) and us, in turns, each with its best thread count.": (
        "与已发布的 kt-kernel（GGUF 类型：llama.cpp）轮流比较，各用最佳线程数。"
    ),
    "For both sides (default: the best of a few, for each).": "双方的线程数（默认：各自从几个值中取最佳）。",
    "Instruction sets (default: avx2 and the best one).": "指令集（默认：avx2 和最好的一个）。",
    "An unpacked {wheel} wheel, instead of a download.": "已解压的 {wheel} wheel，代替下载。",
    "One of our own formats instead: {names}; --formats out of them too.": (
        "改为与我们自己的一种格式比较：{names}；--formats 也从中选择。"
    ),
    "Whole models: the demo model beside transformers and llama.cpp, the engine's overhead, large models.": (
        "整个模型：演示模型与 transformers、llama.cpp 比较，引擎开销，以及大模型。"
    ),
    "Turns of each side.": "双方的轮数。",
    "Tokens of each answer in a turn.": "每轮每个回答的 token 数。",
    "Out of demo,http,overhead,large,latent.": "可选：demo,http,overhead,large,latent。",
    "Of the large model (default: what fits).": "大模型的层数（默认：内存放得下的）。",
    "GB for the large model.": "大模型可用的内存（GB）。",
    "What each method costs the demo model in perplexity.": "各方法使演示模型的困惑度增加多少。",
    "Out of BF16, AMXINT8, ..., separated by commas (default: all).": "可选：BF16、AMXINT8 等，用逗号分隔（默认：全部）。",
    "Of the text (default: all).": "文本的 token 数（默认：全部）。",
    "Write the table as Markdown to this file.": "把表格以 Markdown 写入这个文件。",
    "options go behind '{command}'": "选项应放在 '{command}' 之后",
    "'{path}' holds no kt_kernel folder: unpack the wheel there": "'{path}' 中没有 kt_kernel 目录：请在那里解压 wheel",
    "other processes used {share} of the CPUs at the start: times and ratios suffer, peers' most": (
        "开始时其他进程占用了 {share} 的 CPU：时间和比值会受影响，与其他实现的比较影响最大"
    ),
    "wrote {path}": "已写入 {path}",
    "is empty; legal: {names}, all, or E,K,H,I": "为空；可用：{names}、all，或 E,K,H,I",
    "'{text}' is not a number from 1 to {most}; give one or several, separated by commas": (
        "'{text}' 不是 1 到 {most} 的数；请给出一个或多个，用逗号分隔"
    ),
    "'{name}' is not a file name; legal: letters, digits, '-', '_' and '.'": (
        "'{name}' 不是文件名；可用字母、数字、'-'、'_' 和 '.'"
    ),
}
