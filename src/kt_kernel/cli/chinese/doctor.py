"""Texts of kt doctor."""

TEXTS = {
    # The command.
    "Also what checks looked at.": "同时显示检查依据的细节。",
    "Measure nothing.": "不做任何测量。",
    "Look for what keeps this machine from its speed: what it costs, and the command that mends it.\n\n"
    "Measures the memory for a few seconds. Exit code 1 if something does not work.": (
        "查找拖慢本机的原因：代价多大，用什么命令解决。\n\n会用几秒钟测量内存。有功能无法工作时退出码为 1。"
    ),
    "Check": "检查项",
    "Status": "状态",
    "Value": "结果",
    "ok": "正常",
    "warning": "警告",
    "error": "错误",
    "costs": "代价",
    "fix": "解决",
    "errors: {errors}, warnings: {warnings}, ok: {ok}": "错误：{errors}，警告：{warnings}，正常：{ok}",
    "measuring the memory": "正在测量内存",
    "the memory could not be measured: {error}": "无法测量内存：{error}",
    "none": "无",
    # The processor.
    "CPU": "处理器",
    "{name} (sockets: {packages}, cores: {cores}, CPUs: {cpus})": (
        "{name}（{packages} 路，{cores} 个物理核，{cpus} 个逻辑 CPU）"
    ),
    "Instruction set": "指令集",
    "{variant}: emulated, no instruction set of this CPU is used": "{variant}：软件模拟，没有使用本 CPU 的指令集",
    "10 to 100 times slower than vector instructions": "比向量指令慢 10 到 100 倍",
    "a CPU with AVX2 is needed": "需要支持 AVX2 的 CPU",
    "{variant}, although {best} runs here": "{variant}，但本机可以运行 {best}",
    "prompts: a core does {now} operations on int8 a cycle, with {best} {then}; answers lose little": (
        "提示词处理：每核每周期 {now} 次 int8 运算，使用 {best} 为 {then} 次；生成速度损失很小"
    ),
    "{variant}: the system denied the registers of {best}": "{variant}：系统拒绝了 {best} 的寄存器",
    "Linux 5.16 or newer": "需要 Linux 5.16 或更新版本",
    "avx2: this CPU has no AVX-512 and no AMX": "avx2：本 CPU 没有 AVX-512 和 AMX",
    "Usable CPUs": "可用 CPU",
    "{usable} of {online}": "{online} 个中的 {usable} 个",
    "{usable} of {online}: a cpuset hides the others": "{online} 个中的 {usable} 个：其余被 cpuset 隐藏",
    "{usable} of {online}: an affinity mask hides the others": "{online} 个中的 {usable} 个：其余被亲和性掩码隐藏",
    "{share} of the machine's CPUs do nothing": "本机 {share} 的 CPU 闲置",
    "CPU quota": "CPU 配额",
    "time of {quota} CPUs for {cores} cores": "{cores} 个物理核只有 {quota} 个 CPU 的时间",
    "{share} of the cores' time; threads are stopped in the middle of a step": (
        "损失 {share} 的核时间；线程会在计算中途被暂停"
    ),
    "Threads": "线程",
    "inference.cpu_threads is {threads}, there are {cores} cores": (
        "inference.cpu_threads 为 {threads}，而物理核只有 {cores} 个"
    ),
    "threads that share a core wait for each other in every step; one for each core reads as fast": (
        "共用一个核的线程每一步都互相等待；每核一个线程读取速度相同"
    ),
    "{threads}, one for each core": "{threads} 个，每核一个",
    "{threads}; {siblings} SMT siblings are left alone": "{threads} 个；不使用 {siblings} 个超线程",
    "Clock governor": "频率策略",
    "{governor} on {count} of {cpus} CPUs": "{cpus} 个 CPU 中有 {count} 个为 {governor}",
    "clocks stay low: {now} of {most} GHz now": "频率偏低：当前 {now} GHz，最高 {most} GHz",
    "clocks stay low": "频率偏低",
    "Other processes": "其他进程",
    "{share} of the CPU time": "占用 {share} 的 CPU 时间",
    "a step ends with its slowest thread: one busy core slows down all": (
        "每一步都要等最慢的线程：一个繁忙的核会拖慢全部"
    ),
    # Memory.
    "Memory": "内存",
    "{total} GB, {available} GB available": "{total} GB，可用 {available} GB",
    "a model of 30 billion weights needs 17 GB in 4 bits, one of 235 billion 130 GB": (
        "300 亿参数的模型以 4 位需要 17 GB，2350 亿参数需要 130 GB"
    ),
    "Memory limit": "内存上限",
    "the cgroup allows {allowed} of {total} GB": "cgroup 只允许使用 {total} GB 中的 {allowed} GB",
    "a model that takes more is killed, without a word of its own": "超出上限的模型会被直接杀死，不会有任何提示",
    "Swap": "交换空间",
    "{used} of {total} GB in use": "已用 {used} GB，共 {total} GB",
    "a page of weights that was swapped out comes back in 0.1 ms or more, from memory it takes 0.3 us": (
        "被换出的一页权重需要 0.1 毫秒以上才能读回，从内存读取只需 0.3 微秒"
    ),
    "Huge pages": "大页",
    "transparent, {mode}": "透明大页，{mode}",
    "transparent huge pages are off": "透明大页已关闭",
    "this kernel has no transparent huge pages": "此内核没有透明大页",
    "about 8 % of the read bandwidth (measured on one core of Zen 3)": "约 8 % 的读带宽（在一个 Zen 3 核上测得）",
    "Reserved huge pages": "预留大页",
    "{idle} GB are reserved and unused": "预留了 {idle} GB，未被使用",
    "{idle} GB that no model can use": "{idle} GB 内存无法用于模型",
    "NUMA nodes": "NUMA 节点",
    "node {id}: {cores} cores, {memory} GB": "节点 {id}：{cores} 个物理核，{memory} GB",
    "{nodes}; node {id} has CPUs and no memory": "{nodes} 个；节点 {id} 有 CPU 但没有内存",
    "its cores read everything from another node": "它的核只能从其他节点读取",
    "put modules into its slots, or choose NPS1 (AMD), SNC off (Intel) in the BIOS": (
        "为该节点安装内存条，或在 BIOS 中选择 NPS1（AMD）、关闭 SNC（Intel）"
    ),
    "{nodes}; the kernel moves pages between them": "{nodes} 个；内核会在节点间迁移内存页",
    "page faults in every step: weights are where they belong already": "每一步都有缺页中断：权重本来就在正确的节点上",
    "Memory placement": "内存绑定",
    "allowed": "允许",
    "mbind is denied: {error}": "mbind 被拒绝：{error}",
    "allow the system call mbind (seccomp, or the service's SystemCallFilter=)": (
        "允许系统调用 mbind（seccomp，或服务的 SystemCallFilter=）"
    ),
    "weights lie on any node: up to {share} of the reads cross nodes": "权重可能在任意节点：最多 {share} 的读取跨节点",
    "weights lie on any node: up to {share} of the read bandwidth": "权重可能在任意节点：最多损失 {share} 的读带宽",
    "Memory modules": "内存条",
    "not known here; 'sudo dmidecode -t memory' lists them where the firmware tells": (
        "此处无法得知；固件提供信息时可用 'sudo dmidecode -t memory' 列出"
    ),
    "{count} x {kind} on {used} of {channels} channels": "{count} 条 {kind}，占用 {channels} 个通道中的 {used} 个",
    "{share} of the read bandwidth": "{share} 的读带宽",
    "put a module into every channel: {empty} have none": "每个通道都应有内存条：{empty} 为空",
    "{share} of the read bandwidth: they run at {speed}, and could at {rated}": (
        "{share} 的读带宽：运行在 {speed}，额定 {rated}"
    ),
    "one module for each channel, and the memory speed in the BIOS": "每个通道一条内存，并检查 BIOS 中的内存频率",
    "Read bandwidth": "读带宽",
    "{read} GB/s; what the channels could give is not known here": "{read} GB/s；此处无法得知通道的理论值",
    "{read} GB/s, {share} of the channels' {peak}": "{read} GB/s，为通道理论值 {peak} 的 {share}",
    "answers come at {share} of the speed that the memory allows": "生成速度只有内存所允许的 {share}",
    "first what costs bandwidth above: {causes}": "先解决上面影响带宽的问题：{causes}",
    "the memory settings of the BIOS: speed, interleaving, NPS or SNC": "检查 BIOS 的内存设置：频率、交织、NPS 或 SNC",
    "Reads across nodes": "跨节点读取",
    "another node is read at {share} of the speed of the own": "读取其他节点的速度为本节点的 {share}",
    "cores of node {cores} from memory of node {memory}: {rate} GB/s": (
        "节点 {cores} 的核读节点 {memory} 的内存：{rate} GB/s"
    ),
    # Software.
    "kt-kernel needs 3.10 or newer": "kt-kernel 需要 3.10 或更新版本",
    "Environment": "环境",
    "container": "容器",
    "of its own": "独立环境",
    "the Python of the system": "系统自带的 Python",
    "other programs' packages and ours change each other's versions": "会与其他程序的软件包版本互相影响",
    "not installed": "未安装",
    "kt-kernel does not work": "kt-kernel 无法工作",
    "{version}; {wanted} is needed": "{version}；需要 {wanted}",
    "{version}, as {other} wants it; the embedded engine needs {wanted}": (
        "{version}，正是 {other} 所要求的；内置引擎需要 {wanted}"
    ),
    "errors in {commands}": "{commands} 会出错",
    "{version} wants {other} {pinned}, {found} is installed": "{version} 要求 {other} {pinned}，已安装的是 {found}",
    "errors when it starts: it was built for that version": "启动时会出错：它是为该版本构建的",
    "{version}, newer than {tested}, which was tested": "{version}，比测试过的 {tested} 新",
    "Engine": "引擎",
    "none: neither SGLang nor transformers is installed": "无：SGLang 和 transformers 都未安装",
    "kt run cannot serve a model": "kt run 无法运行模型",
    "the embedded one": "内置引擎",
    "the embedded one; SGLang needs a GPU": "内置引擎；SGLang 需要 GPU",
    "the embedded one, although there is a GPU": "内置引擎，尽管有 GPU",
    "the GPU does nothing: attention and prompts run on the CPU": "GPU 闲置：注意力和提示词都在 CPU 上计算",
    "this SGLang has no --kt-* options": "此 SGLang 没有 --kt-* 选项",
    "it cannot put experts on the CPU": "无法把专家放到 CPU 上",
    # GPUs.
    "GPUs": "显卡",
    "none: everything runs on the CPU": "无：全部在 CPU 上运行",
    "a driver is loaded, but nvidia-smi shows no GPU": "驱动已加载，但 nvidia-smi 没有列出 GPU",
    "everything runs on the CPU": "全部在 CPU 上运行",
    "{names}: {free} of {total} GB free": "{names}：{total} GB 中空闲 {free} GB",
    "GPU {index}: {free} GB free, driver {driver}": "GPU {index}：空闲 {free} GB，驱动 {driver}",
    "{taken} GB that other processes hold": "其他进程占用 {taken} GB",
    "driver {driver}; this torch is built for the CPU": "驱动 {driver}；此 torch 是 CPU 版本",
    "no GPU can be used": "无法使用 GPU",
    "driver {driver}, torch built for CUDA {cuda}": "驱动 {driver}，torch 为 CUDA {cuda} 构建",
    "no GPU can be used: CUDA {cuda} needs driver {least} or newer": (
        "无法使用 GPU：CUDA {cuda} 需要驱动 {least} 或更新版本"
    ),
    "install driver {least} or newer, or a torch for an older CUDA": (
        "安装驱动 {least} 或更新版本，或使用较旧 CUDA 的 torch"
    ),
    # What is around.
    "Settings": "设置",
    "commands that need settings stop with this message": "需要设置的命令会以此信息终止",
    "Disk": "磁盘",
    "{free} GB free for {folder}": "{folder} 空闲 {free} GB",
    "large models do not fit: 4 bits of 235 billion weights are 130 GB": (
        "放不下大模型：2350 亿参数的 4 位权重为 130 GB"
    ),
    "Proxies": "代理",
    "{variables}, not for this machine": "{variables}，不用于本机",
    "also for this machine: {variables}": "对本机也生效：{variables}",
    "clients ask the proxy for the server on this machine, and get an error page": (
        "客户端会通过代理访问本机的服务，得到错误页面"
    ),
    "Port": "端口",
    "{port} on {host} is free": "{host} 的 {port} 空闲",
    "{port} on {host}: {error}": "{host} 的 {port}：{error}",
    "kt run needs another port, unless it is its server that runs there": (
        "kt run 需要另一个端口，除非占用它的就是 kt 的服务"
    ),
}
