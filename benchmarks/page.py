"""How heavy the page of a step is, how soon it is drawn, how smoothly it moves, in Chromium; how soon the studio answers.

    python benchmarks/page.py                                    # 1f1b, 64 ranks, 135,168 actions: about half a minute
    python benchmarks/page.py --schedule zb-v --ranks 8 --microbatches 32
    python benchmarks/page.py --ranks 1024 --microbatches 256    # more actions than a page shows one by one: sums

Each number is the best of several, since other work goes on on most machines. Needs Debian's `chromium` and `chromium-driver`,
and `pip install selenium`.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from selenium import webdriver

from penstock.schedule import Costs, build, simulate
from penstock.view.html import page
from penstock.view.record import Record
from penstock.view.studio.answers import answer

QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,1000")
FRAMES = 40
LARGE = {"schedule": "interleaved-zb", "ranks": 16, "microbatches": 32, "stages_per_rank": 4}  # what the studio is asked
DRAWN = "return performance.getEntriesByName('drawn')[0]?.startTime"
MOVED = """
    const [move, count, done] = arguments, times = [];
    const next = (now) => {
        times.push(now);
        if (move === "pan") page.pan(2e-3 * page.duration); else page.zoom(times.length % 2 ? 0.9 : 1 / 0.9);
        if (times.length <= count) requestAnimationFrame(next); else done((times.at(-1) - times[0]) / count);
    };
    page.setView(0, page.duration / 2);
    requestAnimationFrame(next);
"""


@dataclass
class PageOptions:
    """Measure the page of a simulated step."""

    schedule: str = "1f1b"
    ranks: int = 64
    microbatches: int = 1056
    times: int = 5  # that the page is opened


def opened(driver: webdriver.Chrome, address: str) -> float:
    """Milliseconds from the request of the page to the first picture."""
    driver.get(address)
    while (drawn := driver.execute_script(DRAWN)) is None:
        time.sleep(0.05)
    return float(drawn)


def moved(driver: webdriver.Chrome, move: str) -> float:
    """Milliseconds of a frame while the chart is panned, or zoomed in and out."""
    return float(driver.execute_async_script(MOVED, move, FRAMES))


def answered() -> float:
    """Seconds that the studio takes to answer."""
    begin = time.perf_counter()
    answer(LARGE)
    return time.perf_counter() - begin


def main(options: PageOptions) -> None:
    """Make the page, open it, move it, ask the studio, print."""
    step = simulate(build(options.schedule, options.ranks, options.microbatches), Costs(send=0.1))
    begin = time.perf_counter()
    text = page([Record((step,))])
    made = time.perf_counter() - begin
    browser = webdriver.ChromeOptions()
    browser.binary_location = str(shutil.which("chromium"))
    with tempfile.TemporaryDirectory() as folder:
        for argument in (*QUIET, f"--user-data-dir={folder}/profile"):
            browser.add_argument(argument)
        file = Path(folder) / "page.html"
        file.write_text(text, encoding="utf-8")
        driver = webdriver.Chrome(options=browser, service=webdriver.ChromeService(shutil.which("chromedriver")))
        driver.set_script_timeout(100)
        try:
            first = min(opened(driver, file.as_uri()) for _ in range(options.times))
            frames = {move: min(moved(driver, move) for _ in range(options.times)) for move in ("pan", "zoom")}
        finally:
            driver.quit()
    print(f"{options.schedule}, {options.ranks} ranks, {options.microbatches} microbatches: {len(step.events):,} actions")
    print(f"made in {made:.1f} s, {len(text) / 1e6:.1f} MB; drawn {first / 1e3:.2f} s after it was asked for")
    print(", ".join(f"{move} {1e3 / frame:.0f} frames a second" for move, frame in frames.items()))
    print(f"the studio answers {' '.join(map(str, LARGE.values()))} in {min(answered() for _ in range(options.times)):.2f} s")


if __name__ == "__main__":
    main(tyro.cli(PageOptions))
