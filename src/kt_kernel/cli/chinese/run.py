"""kt run."""

TEXTS = {
    "Serve a model on this machine: OpenAI's interface and a chat page.\n\n"
    "Engine, method, threads, NUMA nodes and GPU experts are chosen from the machine and the model, and printed with\n"
    "their reasons. An option decides before config.yaml, that before the registry, and that before what is computed.\n"
    "Options that begin with 'Embedded' or 'SGLang' are of that engine only.": (
        "在本机运行模型：OpenAI 接口和聊天页面。\n\n"
        "引擎、方法、线程、NUMA 节点和 GPU 专家按机器和模型选择，并给出理由。选项优先于 config.yaml，其次是注册表，"
        "最后是计算出的值。以“内置”或“SGLang”开头的选项只属于该引擎。"
    ),
    "A folder, a name or alias, a hub id, or 'demo'. What kt does not know goes to SGLang.": (
        "文件夹、名称或别名、hub 上的 id，或 'demo'。kt 不认识的选项交给 SGLang。"
    ),
    "embedded, or sglang (default: sglang if it is here with a GPU).": (
        "embedded 或 sglang（默认：装有 SGLang 且有 GPU 时用 sglang）。"
    ),
    "Where to listen; 0.0.0.0 for every network (default: server.host).": (
        "监听地址；0.0.0.0 为所有网络（默认：server.host）。"
    ),
    "0 takes a free one (default: server.port).": "0 为任意空闲端口（默认：server.port）。",
    "MODEL, as an option.": "以选项形式给出 MODEL。",
    "Converted experts, or GGUF (default: those of the model).": "转换过的专家或 GGUF（默认：模型自带的）。",
    "How experts are packed: auto, BF16, AMXINT8, INT4G, ...": "专家权重的打包方式：auto、BF16、AMXINT8、INT4G 等。",
    "Worker threads (default: one for each physical core).": "工作线程数（默认：每个物理核心一个）。",
    "How many NUMA nodes; given more than once: their numbers.": "NUMA 节点数；多次给出时为节点编号。",
    "Answers at once (default: what fits).": "同时回答数（默认：放得下多少是多少）。",
    "What the model is called (default: its folder).": "模型的名称（默认：文件夹名）。",
    "Ask clients for this key (better: KT_KERNEL_API_KEY).": "向客户端要求此密钥（最好用 KT_KERNEL_API_KEY）。",
    "Run Python code that comes with the model.": "运行模型自带的 Python 代码。",
    "Download the model without a question.": "不询问，直接下载模型。",
    "Say first what to expect; refuse what does not fit into memory.": "先说明预期；内存放不下则拒绝。",
    "Print the command, and start nothing.": "只打印命令，不启动。",
    "Embedded: tokens of prompt and answer (default: what memory allows).": (
        "内置：提示与回答的 token 数（默认：按内存）。"
    ),
    "Embedded: how all other matrices are packed: auto, bf16, int8, int4, torch.": (
        "内置：其他矩阵的打包方式：auto、bf16、int8、int4、torch。"
    ),
    "Embedded: requests that may wait; more get 429.": "内置：可排队的请求数；超出的得到 429。",
    "Embedded: longest answer (default: up to the context).": "内置：回答的最大长度（默认：直到上下文结束）。",
    "Embedded: origin of a web page that may call; repeat for more; '*' is all.": (
        "内置：允许调用的网页来源；可重复；'*' 为全部。"
    ),
    "Embedded: another name under which clients call the server.": "内置：客户端访问服务器所用的其他名称。",
    "Embedded: refuse requests for other models instead of answering all.": "内置：拒绝其他模型名的请求。",
    "Embedded: seconds that running answers get when the server stops.": "内置：停止时留给未完成回答的秒数。",
    "Embedded: no line for each request.": "内置：不为每个请求打印一行。",
    "SGLang: experts of each layer on the GPU (default: fits).": "SGLang：每层放在 GPU 上的专家数（默认：放得下的）。",
    "SGLang: GPUs that share the model.": "SGLang：共享模型的 GPU 数。",
    "SGLang: prompts of so many tokens have all experts computed on the GPU.": (
        "SGLang：提示达到这么多 token 时，专家全部在 GPU 上计算。"
    ),
    "SGLang: triton, flashinfer, ...": "SGLang：triton、flashinfer 等注意力后端。",
    "SGLang: tokens of all requests together.": "SGLang：所有请求合计的 token 数。",
    "SGLang: tokens of a piece of a prompt.": "SGLang：提示每一段的 token 数。",
    "SGLang: share of GPU memory for weights and keys.": "SGLang：显存中用于权重和 KV 的比例。",
    "SGLang: seconds after which a step is given up.": "SGLang：一步超过多少秒即放弃。",
    "SGLang: shared experts with the others.": "SGLang：共享专家与其他专家合并。",
    "the model is named twice": "模型给出了两次",
    "put MODEL before {option}, which is passed on": "请把 MODEL 放在要转交的 {option} 之前",
    "goes with --dry-run": "要与 --dry-run 一起用",
    "'{value}' is not one of {legal}": "'{value}' 不在 {legal} 之中",
    "name a model, as in 'kt run demo'": "请给出模型，如 'kt run demo'",
    "Which model? A number, a name, or a folder": "哪个模型？编号、名称或文件夹",
    "{engine} does not know it; --engine takes another one": "{engine} 不认识它；用 --engine 换一个引擎",
    "the embedded engine needs Python 3.11 or newer, this is {found}": "内置引擎需要 Python 3.11 或更新版本，这里是 {found}",
    "{modules} not found: pip install 'kt-kernel[engine]'": "找不到 {modules}：pip install 'kt-kernel[engine]'",
    "{name} is not on this machine. Download {gb} GB to {folder}?": ("本机没有 {name}。下载 {gb} GB 到 {folder}？"),
    "{name} is not on this machine: 'kt model download {name}' brings it, or --yes": (
        "本机没有 {name}：'kt model download {name}' 可下载，或用 --yes"
    ),
    "{name} is not on this machine: 'kt model download {name}' brings it": (
        "本机没有 {name}：'kt model download {name}' 可下载"
    ),
    "cannot listen on {host}:{port} ({reason}); use --port or --host": (
        "无法监听 {host}:{port}（{reason}）；请用 --port 或 --host"
    ),
    "{name} needs {needed} GB of {what}, but there are {available}: 'kt plan {name}' says what would fit; "
    "--no-plan downloads it all the same": (
        "{name} 需要 {needed} GB {what}，但只有 {available} GB：'kt plan {name}' 说明怎样放得下；--no-plan 仍会下载"
    ),
    "no plan: {reason}": "没有规划：{reason}",
    "{name} does not fit: {reasons}; --no-plan tries": "{name} 放不下：{reasons}；--no-plan 会照样尝试",
    "expect decode at {promise}": "预计解码 {promise}",
    "expect prompts at {promise}": "预计读提示 {promise}",
    "reached: {rate} tokens/s of one answer, {share} % of what was promised": (
        "实际：单个回答 {rate} token/s，为预计的 {share} %"
    ),
    "'kt doctor' looks for the reason": "'kt doctor' 会查找原因",
    "{option} is left out: this SGLang does not know it": "省略 {option}：此 SGLang 不认识它",
    "{name} is up; Ctrl-C stops it": "{name} 已启动；Ctrl-C 停止",
    "the GPU holds all experts: SGLang computes them; --gpu-experts leaves some to the CPU": (
        "GPU 可容纳全部专家：由 SGLang 计算；--gpu-experts 可留一些给 CPU"
    ),
    "chat page": "聊天页面",
    "terminal": "终端",
    "API": "API 接口",
    "try": "试一试",
    "whoever reaches {host} may use the model; --api-key asks for a key": (
        "能访问 {host} 的人都可使用模型；--api-key 可要求密钥"
    ),
    "--numa-nodes {count}: this process has CPUs on {there} NUMA nodes": (
        "--numa-nodes {count}：本进程只在 {there} 个 NUMA 节点上有 CPU"
    ),
    "'{command}' gave no answer in {seconds} s": "'{command}' 在 {seconds} 秒内没有回答",
    "SGLang does not start: {reason}; 'kt doctor' tells which versions work": (
        "SGLang 无法启动：{reason}；'kt doctor' 会说明哪些版本可用"
    ),
    "where it listens": "监听处",
    "the model": "模型",
    "the model's own Python code may run": "允许运行模型自带的 Python 代码",
    "pieces of long prompts": "长提示分段",
    "more wait": "更多的请求排队",
    "seconds: experts take minutes to load": "秒：加载专家要几分钟",
    "answers go on while prompts are read": "读提示时回答继续",
    "whether GPUs reach each other's memory": "GPU 之间能否互访显存",
    "experts on the CPU are apart from shared ones": "CPU 上的专家与共享专家分开",
    "runs on every GPU with FP8": "可在所有支持 FP8 的 GPU 上运行",
    "clients are asked for it": "向客户端要求",
    "converted experts": "转换过的专家",
    "the experts of the model": "模型自带的专家",
    "NUMA nodes: {reason}": "NUMA 节点：{reason}",
    "no GPU is here to look at": "这里没有 GPU 可供参考",
    "longer prompts are computed on the GPU": "更长的提示在 GPU 上计算",
    "the experts that are used most go to the GPU": "用得最多的专家放到 GPU",
    "the GPUs that there are: {gpus}": "现有的 GPU：{gpus}",
    "the rest is for activations and CUDA graphs": "其余留给激活值和 CUDA graph",
    "others use a part of the GPU's memory": "其他进程占用了部分显存",
}
