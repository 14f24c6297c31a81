"""Where kt-kernel keeps its files: the folders of the platform, or one folder for everything.

One folder is used where KT_KERNEL_HOME names it, and where ~/.ktransformers is, which earlier versions of kt made.
    config  settings (config.yaml), models that were added (user_models.yaml, registry.yaml)
    data    downloaded models, histories of chats
    cache   what can be made again
"""

from pathlib import Path

import platformdirs

from kt_kernel import env

_APP = "kt-kernel"
_EARLIER = ".ktransformers"


def config_folder() -> Path:
    return _one_folder() or Path(platformdirs.user_config_dir(_APP, appauthor=False))


def data_folder() -> Path:
    return _one_folder() or Path(platformdirs.user_data_dir(_APP, appauthor=False))


def cache_folder() -> Path:
    one = _one_folder()
    return one / "cache" if one else Path(platformdirs.user_cache_dir(_APP, appauthor=False))


def _one_folder() -> Path | None:
    if named := env.home():
        return Path(named).expanduser().absolute()
    try:
        earlier = Path.home() / _EARLIER
    except RuntimeError:  # no home at all: platformdirs has an answer
        return None
    return earlier if earlier.is_dir() else None
