"""Models by name: the table, what users add, and what a text finds."""

import dataclasses

import pytest
import yaml

from kt_kernel import folders, methods, settings
from kt_kernel.errors import UserError
from kt_kernel.plan import sizes
from kt_kernel.registry import user_models
from kt_kernel.registry.find import Found, UnknownModelError, find
from kt_kernel.registry.known import KNOWN, Known, known_models
from kt_kernel.registry.user_models import UserModel

# Billions of weights that the models' pages state; experts, attention and embeddings come out of the sizes.
STATED = {
    "DeepSeek-V3-0324": 671,
    "Kimi-K2-Thinking": 1026,
    "MiniMax-M2": 229,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "Qwen3-Coder-480B-A35B": 480,
    "Qwen3-Next-80B-A3B": 80,
    "GLM-4.5": 355,
    "GLM-4.5-Air": 106,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "Mixtral-8x7B": 46.7,
    "Mixtral-8x22B": 141,
    "OLMoE-1B-7B": 6.9,
    "DeepSeek-V4-Flash": 284,
}
ALIASES = {
    "dsv3": "DeepSeek-V3-0324",
    "r1": "DeepSeek-R1-0528",
    "v3.2": "DeepSeek-V3.2",
    "k2": "Kimi-K2-Thinking",
    "m2": "MiniMax-M2",
    "m2.1": "MiniMax-M2.1",
    "M2.1": "MiniMax-M2.1",
    "qwen3-30b": "Qwen3-30B-A3B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "GPT-OSS-20B": "gpt-oss-20b",
    "Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
}


@pytest.fixture(autouse=True)
def _home(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize("name", STATED)
def test_the_sizes_of_a_known_model_add_up_to_what_it_is_said_to_have(name):
    model = next(model for model in KNOWN if model.name == name)
    facts = model.facts
    total = facts.expert_weights + sizes.layer_weights(facts) + 2 * sizes.head_weights(facts)
    assert total / 1e9 == pytest.approx(STATED[name], rel=0.03)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("DeepSeek-V3-0324", 689), ("Kimi-K2-Thinking", 594), ("gpt-oss-120b", 65.2), ("Qwen3-30B-A3B", 61.1)],
)
def test_a_checkpoint_is_as_large_as_on_the_hub(name, gigabytes):
    model = next(model for model in KNOWN if model.name == name)
    assert sizes.checkpoint_bytes(model.facts) / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_no_two_known_models_share_a_name():
    names = [word.lower() for model in KNOWN for word in {model.name, *model.aliases}]
    assert len(names) == len(set(names))
    assert "demo" not in names


def test_methods_and_encodings_of_the_table_exist():
    for model in KNOWN:
        assert model.method is None or model.method in methods.NAMES, model.name
        if model.facts:
            assert {model.facts.encoding, model.facts.rest} <= set(methods.METHODS.values()), model.name
            assert model.facts.top_k <= model.facts.experts


@pytest.mark.parametrize(("text", "name"), ALIASES.items())
def test_names_and_aliases(text, name):
    found = find(text)
    assert (found.name, found.path, found.known.name) == (name, None, name)
    assert found.repo == found.known.repo


def test_demo_and_hub_ids():
    assert find("demo") == Found("demo")
    assert find("someone/Model-7B") == Found("Model-7B", None, "someone/Model-7B")
    assert find("minimaxai/minimax-m2").known.name == "MiniMax-M2"


@pytest.mark.parametrize(
    ("text", "hint"),
    [("qwen3-30", "did you mean qwen3-30b"), ("minimx-m2", "MiniMax-M2"), ("zzzzzz", "kt model list --all")],
)
def test_what_is_unknown_gets_the_nearest_names(text, hint):
    with pytest.raises(UnknownModelError) as error:
        find(text)
    assert f"no model is called '{text}'" in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize("text", ["./nothing", "/no/such/folder", "~/nothing", "a/b/c"])
def test_a_path_that_does_not_exist_is_no_hub_id(text):
    with pytest.raises(UserError, match="does not exist"):
        find(text)


def model_folder(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return path


def test_paths(home):
    folder = model_folder(home / "org" / "thing")
    for text in ("org/thing", "./org/thing", "~/org/thing", f"{folder}/", "./org/../org/thing"):
        assert find(text) == Found("thing", folder), text


def test_a_folder_that_is_called_as_on_the_hub_is_known(home):
    model_folder(home / "MiniMax-M2")
    assert find("./MiniMax-M2").known.name == "MiniMax-M2"


def test_a_word_is_a_name_first_and_a_folder_second(home):
    model_folder(home / "m2")
    model_folder(home / "mine")
    assert find("m2").known.name == "MiniMax-M2"
    assert find("./m2") == Found("m2", home / "m2")
    assert find("mine") == Found("mine", home / "mine")


@pytest.mark.parametrize("below", ["MiniMax-M2", "MiniMaxAI/MiniMax-M2"])
def test_a_known_model_is_found_in_the_folders_of_models(home, below):
    folder = model_folder(folders.data_folder() / "models" / below)
    assert find("m2").path == folder
    assert find("MiniMaxAI/MiniMax-M2").path == folder


def test_a_model_that_was_downloaded_elsewhere_is_found(home):
    settings.set("paths.models", str(home / "models"))
    assert find("olmoe").path is None
    cache = home / ".cache" / "huggingface" / "hub" / "models--allenai--OLMoE-1B-7B-0924-Instruct"
    folder = model_folder(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    assert find("olmoe").path == folder
    (folder / "model.safetensors").unlink()  # as libraries leave it that looked at config.json only
    assert find("olmoe").path is None


def test_users_models(home):
    folder = model_folder(home / "models" / "x")
    user_models.add(UserModel("Mine", str(folder), repo_id="minimaxai/MiniMax-M2"))
    found = find("mine")
    assert (found.name, found.path, found.known.name) == ("Mine", folder, "MiniMax-M2")
    assert find("m2").path == folder
    assert find(str(folder)).name == "Mine"
    with pytest.raises(UserError, match="a model is called 'mine' already"):
        user_models.add(UserModel("mine", "/x"))
    assert user_models.remove("MINE").name == "Mine"
    assert user_models.remove("mine") is None
    assert user_models.user_models() == []


@pytest.mark.parametrize("name", ["demo", "", "a/b", "-x", "two words", "."])
def test_names_that_could_not_be_typed_are_refused(name):
    with pytest.raises(UserError, match="a model cannot be called"):
        user_models.add(UserModel(name, "/x"))
    assert user_models.user_models() == []


def test_a_users_model_that_is_gone_is_told(home):
    user_models.add(UserModel("mine", str(home / "gone")))
    with pytest.raises(UserError, match=r"'mine' was in .*gone, which is gone: 'kt model remove mine'"):
        find("mine")


def test_files_of_earlier_versions_are_read_and_kept(home):
    entry = {"name": "old", "path": "/models/old", "format": "gguf", "id": "1", "gpu_model_ids": ["2"]}
    user_models.path().parent.mkdir(parents=True)
    user_models.path().write_text(yaml.safe_dump({"version": "1.0", "models": [entry]}))
    user_models.update("old", sha256_status="passed")
    written = yaml.safe_load(user_models.path().read_text())
    assert written["version"] == "1.0"
    assert written["models"][0] | entry == written["models"][0]
    assert written["models"][0]["sha256_status"] == "passed"
    assert dataclasses.asdict(user_models.get("OLD"))["others"] == {"gpu_model_ids": ["2"]}


@pytest.mark.parametrize("text", ["models: 3", "models: [3]", "models: [{name: x}]", "]"])
def test_a_damaged_list_of_models_is_named(text):
    user_models.path().parent.mkdir(parents=True)
    user_models.path().write_text(text)
    with pytest.raises(UserError, match=r"user_models\.yaml"):
        user_models.user_models()


def test_registry_yaml_adds_models_and_replaces_known_ones():
    path = folders.config_folder() / "registry.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "models:\n"
        "  Ours-1: {hf_repo: us/Ours-1, aliases: [ours], default_params: {kt-method: FP8, chunked-prefill-size: 8}}\n"
        "  MiniMax-M2: {hf_repo: us/M2}\n"
    )
    assert find("ours").known == Known("Ours-1", "us/Ours-1", ("ours",), "FP8", options={"chunked_prefill_size": 8})
    assert find("minimax-m2").repo == "us/M2"
    assert len(known_models()) == len(KNOWN) + 1
    path.write_text("models: {x: {}}")
    with pytest.raises(UserError, match=r"registry\.yaml: model 'x' needs hf_repo"):
        find("m2")
