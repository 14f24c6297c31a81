TEXTS = {
    "Packages, and instruction sets of this CPU.": "显示软件包和本机 CPU 的指令集。",
    "Show what is installed.\n\nkt-kernel with its CPU variant, Python, CUDA and SGLang.": (
        "显示已安装的版本。\n\nkt-kernel 及其 CPU 变体、Python、CUDA 和 SGLang。"
    ),
    "not found": "未找到",
    "variant {name}": "变体 {name}",
    "runs here": "本机可用",
    "module": "模块",
}
