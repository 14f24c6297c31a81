TEXTS = {
    "Convert the experts of a checkpoint (bf16, f16, FP8, GPTQ, AWQ, ...) to int8 or int4 for the CPU.\n\nA conversion "
    "that was interrupted goes on where it stopped, with the same command.": (
        "把模型的专家（bf16、f16、FP8、GPTQ、AWQ 等）转换为 CPU 使用的 int8 或 int4。\n\n"
        "转换中断后，用同样的命令从中断处继续。"
    ),
    "The folder of the model, one safetensors file, or a name.": "模型的目录、一个 safetensors 文件，或模型名称。",
    "The same, as an option.": "同上，以选项给出。",
    "Where the weights go (default: MODEL-METHOD in paths.weights, or beside MODEL).": "权重的输出目录（默认：paths.weights 中或 MODEL 旁边的 MODEL-METHOD）。",
    "Out of {names}.": "可选：{names}。",
    "Out of {names}; found by itself.": "可选：{names}；自动识别。",
    "searched for the least squared error, or of the largest weight.": (
        "searched：搜索平方误差最小的缩放；largest：取最大权重。"
    ),
    "Threads (default: every usable CPU).": "线程数（默认：全部可用 CPU）。",
    "Not needed: the files fit any number.": "不需要：文件适用于任何数量。",
    "Not needed: every layer is a file of its own.": "不需要：每层都是单独的文件。",
    "Leave the layers below this one as they are.": "不处理这一层之前的层。",
    "Not needed: no GPU is used.": "不需要：不使用 GPU。",
    "Begin anew in a folder that holds other converted weights.": "目录中已有其他转换结果时重新开始。",
    "Not needed: nothing is asked.": "不需要：不会询问。",
    "name the folder of the model, once": "请给出模型的目录，一次即可",
    "--threadpool-count: the files fit any number of sub-pools, so none is written into them": (
        "--threadpool-count：文件适用于任何数量的子线程池，因此不写入数量"
    ),
    "--no-merge-safetensor: every layer is a file of its own, and memory is bounded, without it too": (
        "--no-merge-safetensor：每层都是单独的文件，不加此选项内存也有上限"
    ),
    "--gpu: no GPU is needed or used": "--gpu：不需要也不使用 GPU",
    "{asked} threads were asked for; this process may use {cpus} CPUs: using {cpus}": (
        "要求 {asked} 个线程；本进程可用 {cpus} 个 CPU：使用 {cpus} 个"
    ),
    "interrupted; the same command goes on with what is left": "已中断；用同样的命令继续剩余部分",
    ", {count} were there": "，{count} 层已存在",
    ", {count} are missing": "，缺少 {count} 层",
    "{path}: {count} layers converted in {seconds} s{kept}{missing}; load them with method {method} (SGLang: "
    "--kt-weight-path {path} --kt-method {method}), any threadpool count": (
        "{path}：{count} 层已转换，用时 {seconds} 秒{kept}{missing}；用方法 {method} 加载（SGLang："
        "--kt-weight-path {path} --kt-method {method}），线程池数量不限"
    ),
}
