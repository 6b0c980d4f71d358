"""A browser for pages, and what a person does in it. Needs Chromium and its driver; skipped where there are none."""

import json
import shutil

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_CHROMIUM = [
    pytest.mark.ranks,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver"),
]
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1300,1100"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in [*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(argument)
    downloads = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(1000)
    driver.downloads = downloads
    driver.get("about:blank")  # the page Chromium begins with asks for files of its own
    yield driver
    driver.quit()


@pytest.fixture
def visit(browser, folder):
    """Open a page; afterwards the console must be empty, and nothing but the file asked for."""
    browser.get_log("performance")

    def open_page(name):
        browser.get((folder / name).as_uri())
        drawn(browser)
        return browser

    yield open_page
    assert_only_asked_for(browser, folder.as_uri(), "data:")


def assert_only_asked_for(browser, *starts):
    """The console is empty, and what was asked for since its log was read begins so."""
    assert browser.get_log("browser") == []
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    urls = [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    assert urls
    assert all(url.startswith(starts) for url in urls), urls


def drawn(browser):
    """Wait until what was done is drawn."""
    wait = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
    browser.execute_async_script(wait)


def place(browser, action, of="timeline"):
    """The middle of an action from the middle of its chart, in pixels."""
    return browser.execute_script(
        "const c = page.charts[0], b = c.record[arguments[1]].blocks.get(arguments[0]), r = c.rows[b.rank];"
        "const y = arguments[1] === 'predicted' ? r.predicted + PREDICTED_HEIGHT / 2 : c.topOf(b) + c.heightOf(b) / 2;"
        "c.host.scrollIntoView({block: 'center'});"
        "return [Math.round(c.x((b.start + b.end) / 2) - c.host.offsetWidth / 2), Math.round(y - c.host.offsetHeight / 2)]",
        action,
        of,
    )


def move_to(browser, x, y):
    chart = browser.find_element(By.CLASS_NAME, "chart")
    return ActionChains(browser, duration=20).move_to_element_with_offset(chart, x, y)


def tip(browser):
    drawn(browser)
    found = browser.find_element(By.ID, "tip")
    return found.text if found.is_displayed() else ""
