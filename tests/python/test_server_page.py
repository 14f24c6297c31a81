"""The chat page in a real browser."""

from dataclasses import replace

import pytest
import webdriver
from scripted_engine import ScriptedEngine
from server_cases import QUICK, running
from webdriver import ENTER, ESCAPE

pytestmark = pytest.mark.skipif(webdriver.missing() is not None, reason=f"no browser: {webdriver.missing()}")

# Every kind of block and span, and text that would be markup if anything took it as such.
ANSWER = (
    "## Title\\n\\nSome **bold**, *lean*, `code` and a [link](https://example.com/x).\\n\\n- one\\n- two\\n\\n"
    "```python\\nprint('<b>hi</b>')\\n```\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\n"
    "<img src=x onerror=alert(1)><script>alert(2)</script> [bad](javascript:alert(3))"
)


@pytest.fixture(scope="module")
def served():
    with running(ScriptedEngine(step_seconds=0.005, template="<think> </think>")) as found:
        yield found


@pytest.fixture(scope="module")
def page(served):
    with webdriver.browser() as found:
        yield found


@pytest.fixture(autouse=True)
def _fresh(request):
    """Each test begins with an empty chat, and none may leave an error in the console."""
    if "page" not in request.fixturenames:
        yield
        return
    page, served = request.getfixturevalue("page"), request.getfixturevalue("served")
    page.open(served.url)
    page.run("sessionStorage.clear()")
    page.open(served.url)
    page.wait(lambda: page.text("#model") == "scripted")
    yield
    assert [entry["message"] for entry in page.log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def ask(page, text: str) -> None:
    page.type("#text", text)
    page.type("#text", ENTER)


def finished(page) -> bool:
    return page.count(".assistant[aria-busy=false]") > 0 and page.count("#stop[hidden]") == 1


def test_a_message_is_answered_as_it_comes(page, served):
    ask(page, "words please")
    page.wait(lambda: page.count(".assistant[aria-busy=true] .answer p") == 1)
    early = page.text(".assistant .answer")
    assert page.text(".user") == "words please"
    page.wait(lambda: finished(page))
    answer = page.text(".assistant .answer")
    assert answer.startswith(early)
    assert len(answer) > len(early)
    facts = page.text(".facts")
    assert "tokens/s" in facts
    assert "first after" in facts
    assert page.run("return document.activeElement.id") == "text"


def test_the_model_is_sent_the_conversation(page, served):
    for i, text in enumerate(["SAY first", "SAY second"]):
        ask(page, text)
        page.wait(lambda i=i: page.count(".assistant[aria-busy=false]") == i + 1)
    roles = [message["role"] for message in served.engine.text.calls[-1][0]]
    assert roles == ["user", "assistant", "user"]
    page.click("#new")
    assert page.count(".message") == 0
    ask(page, "SAY third")
    page.wait(lambda: finished(page))
    assert len(served.engine.text.calls[-1][0]) == 1


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_in_the_middle_keeps_what_came_and_frees_the_slot(page, served, how):
    ask(page, "SLOW words")
    page.wait(lambda: page.count(".assistant .answer p") == 1)
    if how == "button":
        page.click("#stop")
    else:
        page.type("#text", ESCAPE)
    page.wait(lambda: finished(page))
    assert "stopped" in page.text(".facts")
    assert page.text(".assistant .answer") != ""
    assert served.settle(served.idle)
    assert served.engine.stats().finished["cancelled"] >= 1
    assert page.count(".error") == 0


def test_a_new_chat_in_the_middle_of_an_answer(page, served):
    ask(page, "SLOW words")
    page.wait(lambda: page.count(".assistant .answer p") == 1)
    page.click("#new")
    page.wait(lambda: page.count("#stop[hidden]") == 1)
    assert page.count(".message") == 0
    ask(page, "SAY x")
    page.wait(lambda: finished(page))
    assert len(served.engine.text.calls[-1][0]) == 1


def test_markdown_is_drawn_and_markup_is_not(page):
    ask(page, f"SAY {ANSWER}")
    page.wait(lambda: finished(page))
    for selector in ("h4", "strong", "em", "ul li:nth-child(2)", "figure.code pre code", "figure.code button", "td"):
        assert page.count(f".answer {selector}") >= 1, selector
    assert page.text(".answer figure.code code") == "print('<b>hi</b>')"
    assert page.count(".answer img, .answer script, .answer b") == 0
    assert page.run("return [...document.querySelectorAll('.answer a')].map((a) => a.href)") == [
        "https://example.com/x"
    ]
    assert "<img src=x onerror=alert(1)>" in page.text(".answer")


def test_blocks_that_are_complete_are_not_drawn_again(page):
    ask(page, "SAY first paragraph\\n\\n" + "and a second that comes slowly " * 20)
    page.wait(lambda: page.count(".answer > div") == 2)
    page.run("document.querySelector('.answer > div').dataset.mark = 'kept'")
    page.wait(lambda: finished(page))
    assert page.run("return document.querySelector('.answer > div').dataset.mark") == "kept"


def test_reasoning_is_folded(page):
    ask(page, "SAY <think>Hm, well.</think>Yes.")
    page.wait(lambda: finished(page))
    assert page.text(".answer") == "Yes."
    assert page.run("return document.querySelector('details.reasoning').open") is False
    page.click("details.reasoning summary")
    assert page.text("details.reasoning div") == "Hm, well."


def test_settings_reach_the_server_and_survive_a_reload(page, served):
    page.click("#open-settings")
    for field, value in {"#system": "Be short.", "#temperature": "0.5", "#max-tokens": "2"}.items():
        page.type(field, value)
    page.click("#close-settings")
    page.open(served.url)
    ask(page, "words")
    page.wait(lambda: finished(page))
    request = served.engine.submitted[-1]
    assert (request.sampling.temperature, request.max_tokens) == (0.5, 2)
    assert served.engine.text.calls[-1][0][0] == {"role": "system", "content": "Be short."}
    assert "cut off" in page.text(".facts")


def test_errors_are_shown_and_the_chat_goes_on(page, served):
    ask(page, "FAIL")
    page.wait(lambda: page.count(".error") == 1)
    assert "the script says to fail" in page.text(".error")
    ask(page, "SAY fine")
    page.wait(lambda: page.count(".assistant[aria-busy=false]") == 2)
    assert "fine" in page.text("#log")


def test_nothing_is_asked_of_other_hosts(page, served):
    page.requested()
    page.open(served.url)
    page.wait(lambda: page.text("#model") == "scripted")
    asked = page.requested()
    assert f"{served.url}/chat.js" in asked
    assert [url for url in asked if not url.startswith((served.url, "data:"))] == []


def test_every_field_has_a_label_and_the_page_is_guarded(page, served):
    unlabelled = (
        "return [...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length).length"
    )
    assert page.run(unlabelled) == 0
    assert page.run("return [...document.querySelectorAll('button')].filter((b) => !b.textContent.trim()).length") == 0
    policy = served.raw("GET", "/")[1]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_an_api_key_is_asked_for():
    with running(settings=replace(QUICK, api_key="secret")) as served, webdriver.browser(width=380, dark=True) as page:
        page.open(served.url)
        page.wait(lambda: page.run("return document.getElementById('settings').open"))
        page.type("#key", "secret")
        page.type("#key", ENTER)
        page.wait(lambda: page.text("#model") == "scripted")
        ask(page, "SAY hello")
        page.wait(lambda: finished(page))
        assert page.text(".answer") == "hello"
        # A narrow dark screen: nothing sticks out, and the text is lighter than its background.
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
        colours = page.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
        ink, back = (sum(map(int, colour[4:-1].split(","))) for colour in colours)
        assert ink > back
