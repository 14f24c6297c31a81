"""Where files go: the platform's folders, ~/.ktransformers where it is, or what KT_KERNEL_HOME names."""

from pathlib import Path

from kt_kernel.bench import wheel
from kt_kernel.folders import cache_folder, config_folder, data_folder


def test_the_folders_of_the_platform(home):
    assert config_folder() == home / ".config" / "kt-kernel"
    assert data_folder() == home / ".local" / "share" / "kt-kernel"
    assert cache_folder() == home / ".cache" / "kt-kernel"


def test_xdg_is_respected(home, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert wheel.cache_folder() == tmp_path / "kt-kernel" / "peers"


def test_the_folder_of_earlier_versions_is_honoured(home):
    earlier = home / ".ktransformers"
    earlier.mkdir()
    assert (config_folder(), data_folder(), cache_folder()) == (earlier, earlier, earlier / "cache")


def test_a_variable_names_one_folder_for_all(home, monkeypatch):
    (home / ".ktransformers").mkdir()
    monkeypatch.setenv("KT_KERNEL_HOME", "~/kt")
    assert (config_folder(), data_folder(), cache_folder()) == (home / "kt", home / "kt", home / "kt" / "cache")


def test_nothing_is_made_by_asking(home):
    config_folder(), data_folder(), cache_folder()
    assert list(Path(home).iterdir()) == []
