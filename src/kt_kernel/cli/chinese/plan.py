"""kt plan, and what kt run says of its plan."""

TEXTS = {
    "Say what a model needs and how fast it will be here, before anything is loaded or downloaded.\n\n"
    "The first plan measures the machine, for ten seconds at most; later ones use what was measured.": (
        "在加载或下载之前，说明模型需要什么、在本机会有多快。\n\n第一次会测量本机，最多十秒；之后沿用测得的结果。"
    ),
    "A folder, a name or alias, a hub id, or 'demo'; it need not be here yet.": (
        "文件夹、名称或别名、hub 上的 id，或 'demo'；不必已下载。"
    ),
    "embedded or sglang (default: what kt run would take).": "embedded 或 sglang（默认：kt run 会选的引擎）。",
    "Of the experts (default: the first that fits).": "专家的方法（默认：第一个放得下的）。",
    "Tokens of prompt and answer.": "提示与回答的 token 数。",
    "Worker threads (default: physical cores).": "工作线程数（默认：物理核心数）。",
    "Experts of each layer on the GPU (default: what fits).": "每层放在 GPU 上的专家数（默认：放得下多少放多少）。",
    "Measure the machine again, whatever was measured before.": "重新测量本机，不用以前的结果。",
    "'{engine}' is not one of embedded, sglang": "'{engine}' 不是 embedded 或 sglang",
    "this would run on the embedded engine, without a GPU": "这会用内置引擎运行，不用 GPU",
    "measuring": "正在测量",
    "{name}: {layers} layers, {experts} experts of which a token takes {top_k}, {encoding} files": (
        "{name}：{layers} 层，{experts} 个专家，每个 token 用 {top_k} 个，文件为 {encoding}"
    ),
    "machine": "机器",
    "load": "加载",
    "decode": "解码",
    "prefill": "预填充",
    "other methods": "其他方法",
    "memory GB": "内存 GB",
    "fits": "放得下",
    "decode tokens/s": "解码 token/s",
    "prefill tokens/s": "预填充 token/s",
    "yes": "是",
    "no": "否",
    "{rate} tokens/s (ms of a token: {parts})": "{rate} token/s（每个 token 的毫秒数：{parts}）",
    "others used {busy} % of the CPUs while this was measured; 'kt plan --fresh' measures again": (
        "测量时其他进程占用了 {busy} % 的 CPU；用 'kt plan --fresh' 重新测量"
    ),
    "no GPU": "无 GPU",
    "{cpu}, {cores} cores ({variant}), {free} of {all} GB of memory free, {gpus}": (
        "{cpu}，{cores} 核（{variant}），内存 {all} GB 中空闲 {free} GB，{gpus}"
    ),
    "{needed} GB of {available}": "需要 {needed} GB，可用 {available} GB",
    "{needed} GB, but there are {available}: it does not fit": "需要 {needed} GB，但只有 {available} GB：放不下",
    "{memory} s from memory": "从内存 {memory} 秒",
    "{disk} s from the disk, {memory} s from memory": "从磁盘 {disk} 秒，从内存 {memory} 秒",
    "engine": "引擎",
    "method": "方法",
    "threads": "线程",
    "context": "上下文",
    "slots": "并发数",
    "GPU experts": "GPU 专家",
    "NUMA nodes": "NUMA 节点",
    "memory": "内存",
    "GPU memory": "显存",
    "disk": "磁盘",
    "experts": "专家",
    "linears": "线性层",
    "barriers and routing": "同步与路由",
    "norms and routing": "归一化与路由",
    "scheduling": "调度",
    "launches": "启动内核",
    "attention": "注意力",
    "sampling": "采样",
    "head": "输出层",
    "set in {source}": "由 {source} 设定",
    "asked for": "按要求",
    "SGLang is not installed: pip install sglang, or take --engine embedded": (
        "没有安装 SGLang：pip install sglang，或用 --engine embedded"
    ),
    "SGLang needs a GPU, and nvidia-smi lists none: take --engine embedded": (
        "SGLang 需要 GPU，而 nvidia-smi 没有列出：请用 --engine embedded"
    ),
    "SGLang is installed, and there is a GPU: {gpu}": "已安装 SGLang，且有 GPU：{gpu}",
    "{folder} holds GGUF files only: planning needs the config.json of the original model beside them": (
        "{folder} 里只有 GGUF 文件：规划需要旁边有原模型的 config.json"
    ),
    "SGLang is not installed": "没有安装 SGLang",
    "there is no GPU": "没有 GPU",
    "the cgroup gives the time of {quota} CPUs, fewer than the {cores} physical cores": (
        "cgroup 只给 {quota} 个 CPU 的时间，少于 {cores} 个物理核心"
    ),
    "one for each physical core that this process may use": "本进程可用的每个物理核心一个",
    "one for each physical core but one: the thread that drives the GPU needs it": (
        "每个物理核心一个，但留一个给驱动 GPU 的线程"
    ),
    "there is no NUMA node {node} with CPUs for this process; there are {nodes}": (
        "本进程在 NUMA 节点 {node} 上没有 CPU；有的是 {nodes}"
    ),
    "there is one": "只有一个",
    "a sub-pool for each, next to its memory": "每个节点一个线程池，靠近其内存",
    "what the registry has for this model": "注册表中该模型的方法",
    "keeps the experts as the files have them, and fits": "保持文件中的专家原样，且放得下",
    "the first that fits into {room} GB": "第一个能放进 {room} GB 的",
    "the smallest one, though it does not fit": "最小的一个，但仍放不下",
    "of all requests together": "所有请求合计",
    "SGLang takes what there is room for": "SGLang 按空间决定",
    "the least that is of use: no memory is left for more": "够用的最小值：没有更多内存",
    "all that the model was made for": "模型支持的全部",
    "half of the memory that is left: {gb} GB": "剩余内存的一半：{gb} GB",
    "requests at once, by the same memory": "同样按内存决定的并发请求数",
    "all of a layer: {free} GB of GPU memory hold them": "一层的全部：{free} GB 显存放得下",
    "of {experts} in each layer; what {free} GB of GPU memory hold beside the rest and {tokens} tokens": (
        "每层共 {experts} 个；{free} GB 显存除去其余部分和 {tokens} 个 token 之后能放下的"
    ),
    "{gb} GB of memory are missing": "缺少 {gb} GB 内存",
    "it fits with --method {method}{speed}": "用 --method {method} 放得下{speed}",
    "it fits with --context {tokens}": "用 --context {tokens} 放得下",
    "KT_KERNEL_SKIP_GPU_EXPERTS=1 keeps {gb} GB of experts that are on the GPU out of it": (
        "KT_KERNEL_SKIP_GPU_EXPERTS=1 可让 GPU 上的 {gb} GB 专家不占内存"
    ),
    "the smallest method needs {gb} GB: take a machine with more memory, or a smaller model": (
        "最小的方法也需要 {gb} GB：请用内存更大的机器，或更小的模型"
    ),
    "{gb} GB of memory are missing on each GPU": "每块 GPU 缺少 {gb} GB 显存",
    "it fits with --max-total-tokens {tokens}": "用 --max-total-tokens {tokens} 放得下",
    "it may fit with fewer --gpu-experts; without the option as many as fit are taken": (
        "减少 --gpu-experts 也许放得下；不给该选项时放得下多少放多少"
    ),
    "the part of the model beside its experts is too large: --engine embedded needs no GPU": (
        "模型除专家外的部分太大：--engine embedded 不需要 GPU"
    ),
    "{gb} GB are missing on the disk: 'kt config set paths.models FOLDER' names another": (
        "磁盘缺少 {gb} GB：用 'kt config set paths.models 文件夹' 指定别处"
    ),
    "--method {method} would decode {times} times as fast": "--method {method} 的解码速度是 {times} 倍",
    "each further expert of every layer on the GPU takes {gb} GB there and {share} % off the CPU's work": (
        "每层每多放一个专家到 GPU，占显存 {gb} GB，减少 CPU 工作的 {share} %"
    ),
    ", at {rate} tokens/s": "，速度 {rate} token/s",
    "{name} is not on this machine, and its sizes are not known: 'kt model download {repo}' brings it": (
        "本机没有 {name}，也不知道它的大小：'kt model download {repo}' 可下载"
    ),
}
