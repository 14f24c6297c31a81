"""config.yaml: types, defaults, what is refused, and that nothing of others is lost."""

import multiprocessing

import pytest
import yaml

from kt_kernel import settings
from kt_kernel.errors import UserError
from kt_kernel.settings import SETTINGS, SettingsError


@pytest.fixture(autouse=True)
def _home(home):
    return home


def written() -> dict:
    return yaml.safe_load(settings.path().read_text())


def test_defaults_without_a_file():
    assert settings.get("server.host") == "127.0.0.1"
    assert settings.get("inference.cpu_threads") is None
    assert settings.everything().keys() == SETTINGS.keys()
    assert not settings.path().exists()


def test_every_default_is_what_the_table_allows():
    for name, setting in SETTINGS.items():
        if setting.default is not None:
            assert setting.kind.accepts(setting.default), name
            assert settings._in_range(setting, setting.default), name
        assert setting.about.endswith("."), name


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("server.port", "1", 1),
        ("general.color", "yes", True),
        ("general.color", "OFF", False),
        ("general.color", "0", False),
        ("inference.mem_fraction_static", "1", 1.0),
        ("inference.cpu_threads", "auto", None),
        ("server.host", "1", "1"),
        ("inference.served_model_name", "true", "true"),
        ("paths.models", "/a,/b c", ["/a", "/b c"]),
        ("paths.models", "[/a, /b]", ["/a", "/b"]),
        ("advanced.env", "{A: 1, B: x}", {"A": "1", "B": "x"}),
        ("advanced.sglang_args", "--a,1", ["--a", "1"]),
    ],
)
def test_text_becomes_what_the_table_says(name, text, value):
    assert settings.set(name, text) == value
    assert settings.get(name) == value
    assert type(settings.get(name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("server.port", "many", "server.port cannot be 'many': needed is a whole number from 0 to 65535"),
        ("server.port", "65536", "from 0 to 65535"),
        ("server.port", "1.5", "a whole number"),
        ("general.color", "maybe", "yes or no"),
        ("general.language", "de", "one of auto, en, zh"),
        ("advanced.env", "[1]", "names with values"),
        ("advanced.env", "{", "names with values"),
        ("inference.mem_fraction_static", "nan", "a number from 0.05 to 1"),
        ("server.prot", "1", "is it server.port, server.host?"),
        ("port", "1", "is it server.port?"),
        ("nothing.like.it", "1", "there are general.language, "),
        ("server", "1", "no setting is called 'server'"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name, text, message):
    with pytest.raises(SettingsError) as error:
        settings.set(name, text)
    assert message in str(error.value)
    assert not settings.path().exists()


def test_what_others_wrote_stays():
    settings.path().parent.mkdir(parents=True)
    settings.path().write_text("general: {_initialized: true}\nserver: {port: 30000}\ndependencies: {sglang: x}\n")
    settings.set("server.host", "0.0.0.0")
    assert written() == {
        "general": {"_initialized": True},
        "server": {"port": 30000, "host": "0.0.0.0"},
        "dependencies": {"sglang": "x"},
    }
    settings.reset("server.port")
    assert written()["server"] == {"host": "0.0.0.0"}
    settings.reset()
    assert written() == {"general": {"_initialized": True}, "dependencies": {"sglang": "x"}}
    assert settings.get("server.port") == SETTINGS["server.port"].default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {port: many}", "server.port is 'many', needed is a whole number from 0 to 65535"),
        ("server: {port: true}", "server.port is True"),
        ("server: {port: 99999}", "server.port is 99999"),
        ("server: [", "is no YAML"),
        ("- 1", "holds no names"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_way_out(text, message):
    settings.path().parent.mkdir(parents=True)
    settings.path().write_text(text)
    with pytest.raises(UserError) as error:
        settings.get("server.port")
    assert message in str(error.value)
    assert str(settings.path()) in str(error.value)
    assert "correct it" in str(error.value)


def test_one_path_of_models_may_be_a_text():
    settings.path().parent.mkdir(parents=True)
    settings.path().write_text("paths: {models: ~/models}")
    assert settings.get("paths.models") == ["~/models"]
    assert [str(folder) for folder in settings.model_folders()] == [str(settings.Path("~/models").expanduser())]


def test_a_link_to_the_file_stays_a_link(tmp_path):
    settings.path().parent.mkdir(parents=True)
    (tmp_path / "dotfile").write_text("server: {port: 1}\n")
    settings.path().symlink_to(tmp_path / "dotfile")
    settings.set("server.port", "2")
    assert settings.path().is_symlink()
    assert yaml.safe_load((tmp_path / "dotfile").read_text()) == {"server": {"port": 2}}


def test_a_folder_that_cannot_be_written_to_is_named(home):
    (home / ".config").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write .*config\.yaml"):
        settings.set("server.port", "2")


def _set(name: str) -> None:
    for number in range(20):
        settings.set(name, str(number + 1))


def test_changes_of_several_processes_do_not_get_lost():
    names = ["server.port", "inference.cpu_threads", "inference.numa_nodes"]
    processes = [multiprocessing.get_context("fork").Process(target=_set, args=[name]) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [settings.get(name) for name in names] == [20, 20, 20]
    assert [file.name for file in settings.path().parent.iterdir()] == [settings.FILE]


def test_what_is_given_out_can_be_changed_without_harm():
    settings.get("inference.env")["X"] = "1"
    assert "X" not in settings.get("inference.env")
