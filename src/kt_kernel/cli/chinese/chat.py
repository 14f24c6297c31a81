"""``kt chat``."""

TEXTS = {
    # Help
    """Talk to a running server.

It may be one of 'kt run', or any other that is OpenAI-compatible. On a terminal it is a conversation; /help lists
its commands. Otherwise all of stdin is one question, and stdout gets the answer alone.""": """\
与运行中的服务对话。

可以是 'kt run' 启动的服务，或任何兼容 OpenAI 接口的服务。在终端中是连续对话，/help 列出命令；否则把整个标准输入\
当作一个问题，标准输出只有回答。""",
    "Name, address or URL of the server (default: server.host).": "服务的名称、地址或 URL（默认：server.host）。",
    "Its port (default: server.port).": "服务的端口（默认：server.port）。",
    "Which model to ask (default: the first one).": "使用哪个模型（默认：第一个）。",
    "0 for the likeliest words; more for variety.": "0 取最可能的词；越大越多样。",
    "Longest answer.": "回答的最大长度。",
    "What the model is told beforehand.": "系统提示词。",
    "Keep it in a file (default: on a terminal).": "把对话保存到文件（默认：在终端中保存）。",
    "Which file; if it is there, the conversation goes on.": "保存到哪个文件；若已存在，则接着其中的对话。",
    "Show answers while they are written.": "边生成边显示回答。",
    "Key for the server (better: KT_KERNEL_API_KEY).": "服务的密钥（最好用环境变量 KT_KERNEL_API_KEY）。",
    # The conversation
    "{model} at {url}": "{model}，位于 {url}",
    "/help lists the commands, Ctrl-D leaves": "/help 列出命令，Ctrl-D 退出",
    "Ctrl-C once more, or Ctrl-D, leaves": "再按一次 Ctrl-C 或按 Ctrl-D 退出",
    "stopped": "已停止",
    "waiting for the first token": "正在等待第一个词元",
    "Total {seconds} s": "总计 {seconds} 秒",
    "TTFT {seconds} s": "TTFT {seconds} 秒",
    "TPOT {milliseconds} ms ({rate} tokens/s)": "TPOT {milliseconds} 毫秒（{rate} 词元/秒）",
    "In {tokens}": "输入 {tokens}",
    "Out {tokens}": "输出 {tokens}",
    "Out about {tokens}": "输出约 {tokens}",
    "the answer was cut off; --max-tokens is {count}": "回答被截断；--max-tokens 为 {count}",
    # Commands
    "list the commands": "列出命令",
    "leave": "退出",
    "forget what was said": "清空对话",
    "show what was said": "显示对话",
    "server, model and settings": "服务、模型和设置",
    "ask the last question again": "重新提出上一个问题",
    "what the model is told beforehand": "系统提示词",
    "write the conversation to a file": "把对话写入文件",
    "go on with the conversation of a file": "接着文件中的对话",
    "Alt-Enter begins a new line; Ctrl-C stops an answer; Ctrl-D leaves": (
        "Alt-Enter 换行；Ctrl-C 停止回答；Ctrl-D 退出"
    ),
    "a new conversation": "新的对话",
    "System": "系统",
    "You": "你",
    "Model": "模型",
    "nothing was said yet": "还没有对话",
    "server": "服务",
    "model": "模型",
    "temperature": "温度",
    "longest answer": "最长回答",
    "{count} tokens": "{count} 个词元",
    "messages": "消息数",
    "kept in": "保存于",
    "no file": "不保存",
    "System: {prompt}": "系统：{prompt}",
    "nothing": "无",
    "saved to {path}": "已保存到 {path}",
    "{count} messages from {path}": "从 {path} 读入 {count} 条消息",
    # Errors
    "did you mean {name}?": "是想用 {name} 吗？",
    "/help lists them": "用 /help 列出命令",
    "there is no command {name}; {hint}": "没有命令 {name}；{hint}",
    "there is no question to ask again": "没有可以重新提出的问题",
    "name a file: {command}": "请给出文件名：{command}",
    'stdin holds no question: use a terminal, or echo "..." | kt chat': (
        '标准输入中没有问题：请在终端中使用，或 echo "..." | kt chat'
    ),
    "{url} names no model: give one with --model": "{url} 没有列出模型：请用 --model 指定",
    "cannot read {path}: {reason}": "无法读取 {path}：{reason}",
    "cannot write {path}: {reason}": "无法写入 {path}：{reason}",
    "{path} is no history of a chat: it is not JSON": "{path} 不是对话记录：不是 JSON",
    "{path} is no history of a chat: it has no list of messages": "{path} 不是对话记录：其中没有消息列表",
    "'{host}' is no http or https address": "'{host}' 不是 http 或 https 地址",
    "nothing listens at {url}: start a server with 'kt run', or see --host and --port": (
        "{url} 没有服务：请用 'kt run' 启动一个，或检查 --host 和 --port"
    ),
    "the server at {url} does not answer: see --host and --port": "{url} 的服务没有响应：请检查 --host 和 --port",
    "the server at {url} went away in the middle of the answer": "{url} 的服务在回答中途断开了",
    "{url} cannot be reached ({reason}): see --host and --port": "无法连接 {url}（{reason}）：请检查 --host 和 --port",
    "{url} does not answer as OpenAI-compatible servers do": "{url} 的应答不符合 OpenAI 接口",
    "{url} has moved to {location}: give that to --host": "{url} 已移至 {location}：请用 --host 指定新地址",
    "the server failed: {message}": "服务出错：{message}",
    "the server at {url} asks for a key: give it with --api-key or KT_KERNEL_API_KEY": (
        "{url} 的服务需要密钥：请用 --api-key 或 KT_KERNEL_API_KEY 给出"
    ),
    "the server at {url} does not accept this key: see --api-key": "{url} 的服务不接受此密钥：请检查 --api-key",
}
