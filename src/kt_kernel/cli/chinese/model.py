TEXTS = {
    "Find, add, download and check models.": "查找、添加、下载和检查模型。",
    "A name, an alias, a path or a hub id.": "名称、别名、路径或 hub 上的 id。",
    # list
    "List the models on this machine.\n\nThose that were added, those in the folders of models, and those in the cache "
    "of huggingface_hub.": "列出本机的模型。\n\n包括已添加的、模型目录中的，以及 huggingface_hub 缓存中的模型。",
    "Also known models that are not here.": "也列出本机没有的已知模型。",
    "Only those with, or without, experts.": "只列出有（或没有）专家的模型。",
    "Also why something could not be told.": "也显示无法判断的原因。",
    "no models in {folders}; 'kt model list --all' shows known ones": (
        "{folders} 中没有模型；用 'kt model list --all' 查看已知模型"
    ),
    "Name": "名称",
    "Format": "格式",
    "Experts": "专家",
    "Method": "方法",
    "GB": "大小（GB）",
    "State": "状态",
    "Path": "路径",
    "Known": "已知模型",
    "Aliases": "别名",
    "Hub": "Hub 地址",
    # info
    "Show what a model is, and where.": "显示模型的信息和位置。",
    "made by 'kt run demo'": "由 'kt run demo' 生成",
    "not here: kt model download {name}": "本机没有：kt model download {name}",
    "Layers": "层数",
    "Architecture": "架构",
    "Stored as": "存储类型",
    "Files": "文件数",
    "Note": "备注",
    "{all}, {some} at a time": "{all} 个，每次使用 {some} 个",
    # add, remove, scan
    "The folder of a model, or a GGUF file.": "模型的目录，或一个 GGUF 文件。",
    "What to call it (default: its folder).": "模型的名称（默认：目录名）。",
    "Where it is from, as in org/name.": "模型的来源，例如 org/name。",
    "Give a model that is here a name.": "给本机的模型起一个名称。",
    "{name} is {path}": "{name} 是 {path}",
    "The name that it was given.": "添加时的名称。",
    "Not needed: files are left alone.": "不需要：文件不会被删除。",
    "Take a name off the list. The files stay where they are.": "从列表中去掉一个名称。文件保留。",
    "no model was added as '{name}': 'kt model list' shows the names": (
        "没有添加过名为 '{name}' 的模型：用 'kt model list' 查看名称"
    ),
    "{name} is off the list; its files stay in {path}": "{name} 已从列表中去掉；文件仍在 {path}",
    "Where to look (default: the folders of models).": "要查找的目录（默认：模型目录）。",
    "GB that a model has at least.": "模型的最小大小（GB）。",
    "Folders below to look into.": "向下查找的目录层数。",
    "Give all that is found the names of their folders.": "用目录名添加找到的全部模型。",
    "Look for models that have no name yet.": "查找尚未添加的模型。",
    "{folder} is no folder": "{folder} 不是目录",
    "'kt model add PATH' names one, 'kt model scan --add' all": (
        "'kt model add PATH' 添加一个，'kt model scan --add' 添加全部"
    ),
    "nothing new was found": "没有找到新的模型",
    # path-list, path-add, path-remove
    "List the folders of models.\n\nModels are looked for there; downloads go into the first.": (
        "列出模型目录。\n\n在这些目录中查找模型；下载到第一个目录。"
    ),
    "A folder with models.": "存放模型的目录。",
    "Downloads go there.": "下载到这个目录。",
    "Also look for models in this folder.": "也在这个目录中查找模型。",
    "A folder of path-list.": "path-list 中的一个目录。",
    "No longer look for models in this folder. It stays as it is.": "不再在这个目录中查找模型。目录保持不变。",
    "{folder} is not on the list: kt model path-list": "{folder} 不在列表中：kt model path-list",
    # verify
    "Names, aliases or paths of models.": "模型的名称、别名或路径。",
    "All models that were added.": "全部已添加的模型。",
    "Headers and sizes only; read no weights.": "只检查文件头和大小，不读取权重。",
    "Every file, not only those that are wrong.": "显示每个文件，而不只是有错误的。",
    "Check the files of a model.\n\nHeaders, sizes and the index; checksums, where a conversion or a download left them.": (
        "检查模型的文件。\n\n检查文件头、大小和索引；转换或下载留有校验和时，也检查校验和。"
    ),
    "name models, or give --all": "请指定模型，或加上 --all",
    "as it was made": "与生成时一致",
    "the demo model is not here yet: 'kt run demo' makes it": "演示模型尚未生成：'kt run demo' 会生成它",
    "{name} is not here: kt model download {name}": "本机没有 {name}：kt model download {name}",
    "is missing": "缺失",
    "ok": "正常",
    "wrong": "错误",
    "{name}: {count} of {all} files are wrong: get them again": "{name}：{all} 个文件中有 {count} 个错误：请重新获取",
    "{name}: sound; {count} of {all} files by checksum": "{name}：完好；{all} 个文件中有 {count} 个经校验和确认",
    "{name}: sound by headers and sizes; nobody left checksums": "{name}：文件头和大小正常；没有可用的校验和",
    # download
    "A known name, an alias or a hub id.": "已知模型的名称、别名，或 hub 上的 id。",
    "Where it goes (default: below the first folder of models).": "下载位置（默认：第一个模型目录之下）。",
    "What to call it (default: as on the hub).": "模型的名称（默认：与 hub 相同）。",
    "A branch, a tag or a commit.": "分支、标签或提交。",
    "Only files like this, as in '*Q4_K_M*'; repeat for more.": "只下载匹配的文件，例如 '*Q4_K_M*'；可重复。",
    "No files like this; repeat for more.": "不下载匹配的文件；可重复。",
    "Compare checksums (default: download.verify).": "比较校验和（默认：download.verify）。",
    "Download a model from the hub.\n\nA download that was interrupted goes on where it stopped, by the same command.": (
        "从 hub 下载模型。\n\n下载中断后，用同样的命令从中断处继续。"
    ),
    "'{model}' is no model of the hub: give a known name, or org/name": (
        "'{model}' 不是 hub 上的模型：请给出已知名称，或 org/name"
    ),
    "interrupted; the same command goes on with what is missing": ("已中断；用同样的命令继续下载缺少的文件"),
    "{name} is in {path}": "{name} 在 {path}",
    "{repo}: {count} files, {size} GB, of which {missing} GB are missing, into {folder}": (
        "{repo}：{count} 个文件，{size} GB，其中缺少 {missing} GB，下载到 {folder}"
    ),
    "Download?": "下载？",
    "what came damaged was removed: the same command gets it again": "损坏的文件已删除：请再运行同样的命令重新获取",
}
