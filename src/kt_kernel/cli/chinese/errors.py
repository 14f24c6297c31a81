"""Errors of what commands share: settings, models, downloads."""

TEXTS = {
    # settings
    "a text": "文本",
    "a whole number": "整数",
    "a number": "数字",
    "yes or no": "yes 或 no",
    "a list, as in 'a,b'": "列表，例如 'a,b'",
    "names with values, as in '{A: 1, B: x}'": "名称和值，例如 '{A: 1, B: x}'",
    "one of {choices}": "{choices} 之一",
    "{kind} from {low} to {high}": "{low} 到 {high} 的{kind}",
    "no setting is called '{name}'; is it {near}?": "没有名为 '{name}' 的设置；是不是 {near}？",
    "no setting is called '{name}'; there are {names}": "没有名为 '{name}' 的设置；可用的有 {names}",
    "{name} cannot be '{text}': needed is {legal}": "{name} 不能是 '{text}'：应为{legal}",
    "{file}: {name} is {found}, needed is {legal}: correct it, or 'kt config reset {name}'": (
        "{file}：{name} 是 {found}，应为{legal}：请改正，或运行 'kt config reset {name}'"
    ),
    # files
    "cannot read {path}: {reason}": "无法读取 {path}：{reason}",
    "cannot write {path}: {reason}": "无法写入 {path}：{reason}",
    "{path} is no YAML ({reason}): correct it, or move it away": "{path} 不是 YAML（{reason}）：请改正或移走",
    "{path} holds no names with values: correct it, or move it away": "{path} 中没有名称和值：请改正或移走",
    "{path}: 'models' must hold names of models: correct it, or move it away": (
        "{path}：'models' 应包含模型名称：请改正或移走"
    ),
    "{path}: model '{name}' needs hf_repo, as in 'org/name'; aliases are a list, default_params a mapping": (
        "{path}：模型 '{name}' 需要 hf_repo，例如 'org/name'；aliases 是列表，default_params 是映射"
    ),
    "{path}: 'models' must be a list: correct it, or move it away": "{path}：'models' 应为列表：请改正或移走",
    "{path}: a model lacks name or path: correct it, or move it away": "{path}：有模型缺少名称或路径：请改正或移走",
    # models
    "no model is called '{name}'; {hint}": "没有名为 '{name}' 的模型；{hint}",
    "did you mean {names}?": "是不是 {names}？",
    "'kt model list --all' shows names; a folder, or a hub id (org/name), will do too": (
        "用 'kt model list --all' 查看名称；也可以给出目录或 hub 上的 id（org/name）"
    ),
    "'{name}' was in {path}, which is gone: 'kt model remove {name}', or bring it back": (
        "'{name}' 原在 {path}，现已不存在：请运行 'kt model remove {name}'，或恢复文件"
    ),
    "'{path}' does not exist: give the folder of a model, or a GGUF file": (
        "'{path}' 不存在：请给出模型的目录，或一个 GGUF 文件"
    ),
    "a model is called '{name}' already: give another name with --name, or 'kt model remove {name}'": (
        "已有名为 '{name}' 的模型：请用 --name 换一个名称，或运行 'kt model remove {name}'"
    ),
    "a model cannot be called '{name}': choose letters, digits, '.', '-', '_', '+'": (
        "模型不能叫 '{name}'：请用字母、数字、'.'、'-'、'_'、'+'"
    ),
    # downloads
    "downloads need huggingface_hub: pip install huggingface_hub": "下载需要 huggingface_hub：pip install huggingface_hub",
    "{folder} holds files that no download left there: choose another folder with --dir": (
        "{folder} 中有并非下载得到的文件：请用 --dir 选择其他目录"
    ),
    "huggingface_hub cannot download {repo}: {reason}": "huggingface_hub 无法下载 {repo}：{reason}",
    "{repo} has a file '{file}', outside of its folder": "{repo} 有文件 '{file}'，位于其目录之外",
    "{file} has {size} bytes, not {expected}: remove it, and download again": (
        "{file} 有 {size} 字节，应为 {expected}：请删除后重新下载"
    ),
    "{repo} has several GGUF models ({names}): choose with --include, as in --include '*Q4_K_M*'": (
        "{repo} 有多个 GGUF 模型（{names}）：请用 --include 选择，例如 --include '*Q4_K_M*'"
    ),
    "{repo} has no *.safetensors or *.gguf, or --include and --exclude leave none": (
        "{repo} 没有 *.safetensors 或 *.gguf，或被 --include 和 --exclude 全部排除"
    ),
    "{repo} needs {needed} GB more in {folder}, and its disk has {free} GB free: free some, or choose another folder "
    "with --dir": "{repo} 在 {folder} 还需要 {needed} GB，磁盘只剩 {free} GB：请腾出空间，或用 --dir 选择其他目录",
    "cannot write to {folder}: {reason}; choose another with --dir": (
        "无法写入 {folder}：{reason}；请用 --dir 选择其他目录"
    ),
    "another process downloads into {folder}: wait for it": "另一个进程正在下载到 {folder}：请等待",
    "{repo} asks for its licence to be accepted: do so on {address}/{repo}, then 'hf auth login'": (
        "{repo} 要求接受许可：请在 {address}/{repo} 接受，然后运行 'hf auth login'"
    ),
    "{repo} has no revision '{revision}' on {address}": "{repo} 在 {address} 上没有版本 '{revision}'",
    "{address} has no model '{repo}', or it is private: check the name, or 'hf auth login'": (
        "{address} 上没有模型 '{repo}'，或它是私有的：请检查名称，或运行 'hf auth login'"
    ),
    "'{repo}' is no id of a model, as in org/name ({reason})": "'{repo}' 不是模型 id，应如 org/name（{reason}）",
    "could not get {repo} from {address} ({reason}): check the network and run the same command again, which goes on "
    "with what is missing; 'kt config set download.mirror https://hf-mirror.com' takes a mirror": (
        "无法从 {address} 获取 {repo}（{reason}）：请检查网络后再运行同样的命令，会继续下载缺少的文件；"
        "用 'kt config set download.mirror https://hf-mirror.com' 使用镜像"
    ),
}
