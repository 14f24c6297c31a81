"""Texts of kt verify."""

TEXTS = {
    "A folder, a name or 'demo': also compares a layer of it, and its answers.": (
        "模型目录、名称或 'demo'：同时比对其中一层以及它的输出。"
    ),
    "How experts are packed: auto, BF16, AMXINT8, INT4G, ...": "专家权重的打包方式：auto、BF16、AMXINT8、INT4G 等。",
    "The layer to compare (default: one in the middle).": "要比对的层（默认：中间的一层）。",
    "Tokens of the text that the model reads.": "模型读取的文本的 token 数。",
    "Only these formats of weights, separated by commas (default: all).": (
        "只检查这些权重格式，用逗号分隔（默认：全部）。"
    ),
    "Only these instruction sets, separated by commas (default: all that run here).": (
        "只检查这些指令集，用逗号分隔（默认：本机能运行的全部）。"
    ),
    "Only the instruction set in use, one shape, a shorter text: seconds.": (
        "只检查正在使用的指令集、一种形状和较短的文本：几秒即可。"
    ),
    "Worker threads for the model (default: one for each core).": "模型的工作线程数（默认：每个物理核一个）。",
    "Run Python code that comes with the model.": "运行模型自带的 Python 代码。",
    "Compare the kernels with a reference in fp64, a layer of a model with torch, and its answers with bf16.\n\n"
    "Exit code 1 if anything is further off than rounding allows.": (
        "将内核与 fp64 参考结果比对，将模型的一层与 torch 比对，并将其输出与 bf16 比对。\n\n"
        "任何误差超出舍入允许的范围时退出码为 1。"
    ),
    "'{name}' is not one of {legal}": "'{name}' 不在可选值中：{legal}",
    "'{name}' is not on this machine: 'kt model download {repo}' fetches it": (
        "本机没有 '{name}'：可用 'kt model download {repo}' 下载"
    ),
    "Format": "格式",
    "Relative error of layers against fp64": "各层相对 fp64 的误差",
    "Right: {calls} calls of kernels in {seconds} s.": "正确：{seconds} 秒内完成 {calls} 次内核调用。",
    "NOT PROVEN RIGHT: do not trust this machine's output before the lines on stderr are gone.": (
        "未能证明正确：在标准错误中的各行消失之前，请勿相信本机的输出。"
    ),
    "FAILED": "失败",
    "Slices for {ranks} GPUs, byte by byte: {names}": "为 {ranks} 个 GPU 切分，逐字节比对：{names}",
    "nothing to compare its weights with": "没有可比对的原始权重",
    "Layer {layer}, {method} ({format}), {count} experts, against torch: {error} (limit {limit})": (
        "第 {layer} 层，{method}（{format}），{count} 个专家，与 torch 比对：{error}（上限 {limit}）"
    ),
    "Whole model: not measured ({reason})": "整个模型：未测量（{reason}）",
    "Whole model, {tokens} tokens: divergence {divergence} from bf16 (limit {limit}), perplexity {perplexity} beside "
    "{reference}, {same} same tokens": (
        "整个模型，{tokens} 个 token：与 bf16 的散度 {divergence}（上限 {limit}），困惑度 {perplexity}，"
        "参考 {reference}，相同 token {same}"
    ),
}
