"""Texts of kt itself."""

TEXTS = {
    "Examples:": "示例：",
    "Mixture-of-Experts layers on the CPU.": "在 CPU 上运行混合专家（MoE）模型。",
    "Print the version.": "显示版本。",
    "'{name}' is not one of {names}": "'{name}' 不在 {names} 之中",
    "'{name}' does not run here ({reason}); these do: {names}": "'{name}' 在本机不能运行（{reason}）；可用：{names}",
    "{count} is more than the {cpus} CPUs that this process may use; legal: 1 to {cpus}": (
        "{count} 超过本进程可用的 {cpus} 个 CPU；可用 1 到 {cpus}"
    ),
    "Install completion for the current shell.": "为当前 shell 安装命令补全。",
    "Show completion for the current shell, to copy it or customize the installation.": (
        "显示当前 shell 的命令补全脚本，可复制或自行安装。"
    ),
}
