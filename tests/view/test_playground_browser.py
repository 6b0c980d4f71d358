"""The playground in a browser. Needs Chromium and its driver, and npm to bring Pyodide once; skipped where they are not."""

import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browsing import NEEDS_CHROMIUM, assert_only_asked_for, browser  # noqa: F401
from test_playground import FUNCTION, playground, pyodide

from penstock.view.studio.answers import answer

ROOT = Path(__file__).parents[2]
pytestmark = NEEDS_CHROMIUM


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def home(tmp_path):
    """The address of a playground, served as any server of files does."""
    try:
        playground.build(tmp_path / "playground", ROOT / "build")
    except pyodide.Missing as missing:
        pytest.skip(str(missing))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=tmp_path)) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/playground/"
        serving.shutdown()
        thread.join()


@pytest.mark.slow
def test_python_in_the_browser_answers_as_the_studio_does(browser, home):  # noqa: F811
    def wait_for_text(name, text):
        while not browser.find_element("id", name).get_attribute("textContent").startswith(text):
            time.sleep(0.05)

    def write(text):
        for field, value in (("source", text), ("written-ranks", 2), ("written-microbatches", 4)):
            browser.execute_script("document.getElementById(arguments[0]).value = arguments[1]", field, value)
        browser.find_element("id", "show-written").click()

    browser.get_log("performance")
    browser.get(f"{home}?schedule=zb-v&ranks=16&microbatches=64#written")
    expected = answer({"schedule": "zb-v", "ranks": 16, "microbatches": 64})
    wait_for_text("proof", expected["proof"]["text"])
    assert browser.execute_script("return studio.answer.timeline.makespan") == expected["timeline"]["makespan"]
    wait_for_text("python", "Python runs in this browser (12.")
    cycle = "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"
    write(cycle)
    wait_for_text("proof", answer({"csv": cycle, "file": "your table"})["proof"]["text"])
    wait_for_text("proof", "your table deadlocks: rank 0 waits for ")
    write(FUNCTION)
    wait_for_text("proof", "proved: your schedule over 2 ranks, 2 stages, 4 microbatches")
    browser.execute_script("studio.improve()")
    wait_for_text("proof", "proved: your schedule (searched)")
    write("def schedule(rank, ranks, microbatches):\n    yield '0Z0'")
    wait_for_text("problem", "your schedule: ")
    write("while True: pass")
    write(FUNCTION)  # for which Python starts anew
    wait_for_text("proof", "proved: your schedule over")
    assert_only_asked_for(browser, home, "data:")
