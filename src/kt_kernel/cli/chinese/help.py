"""Words of typer in help pages, and its errors of usage."""

TEXTS = {
    "Usage: ": "用法：",
    "Options:": "选项：",
    "Arguments:": "参数：",
    "Commands:": "命令：",
    "Show this message and exit.": "显示此帮助并退出。",
    "default: ": "默认：",
    "required": "必填",
    "{message}; see '{command} --help'": "{message}；见 '{command} --help'",
}

# Regular expressions, one after the other: these messages have their values in them already.
USAGE = (
    (r"No such command '(.*?)'", r"没有命令 '\1'"),
    (r"\. Did you mean (.*)\?$", r"。是不是 \1？"),
    (r"No such option: (\S+)", r"没有选项 \1"),
    (r" ?\(Possible options: (.*)\)", r"（可能是 \1）"),
    (r"^Missing argument ", "缺少参数 "),
    (r"^Missing option ", "缺少选项 "),
    (r"^Invalid value for (.*?): ", r"\1 的值无效："),
    (r"Input should be a valid integer[^；]*", "应为整数"),
    (r"Input should be a valid number[^；]*", "应为数字"),
    (r"Input should be less than or equal to (\S+)", r"不能大于 \1"),
    (r"Input should be greater than or equal to (\S+)", r"不能小于 \1"),
    (r"^Option '(.*?)' requires an argument", r"选项 '\1' 需要一个值"),
    (r"^Option '(.*?)' does not take a value", r"选项 '\1' 不带值"),
    (r"^Got unexpected extra argument\(s\) \((.*)\)", r"多余的参数：\1"),
)
