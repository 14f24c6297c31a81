"""Texts of kt itself."""

TEXTS = {
    "Examples:": "示例：",
    "Mixture-of-Experts layers on the CPU.": "在 CPU 上运行混合专家（MoE）模型。",
    "Print the version.": "显示版本。",
    "Install completion for the current shell.": "为当前 shell 安装命令补全。",
    "Show completion for the current shell, to copy it or customize the installation.": (
        "显示当前 shell 的命令补全脚本，可复制或自行安装。"
    ),
}
