"""Words of typer in help pages."""

TEXTS = {
    "Usage: ": "用法：",
    "Options": "选项",
    "Arguments": "参数",
    "Commands": "命令",
    "Show this message and exit.": "显示此帮助并退出。",
    "default: ": "默认：",
    "required": "必填",
}
