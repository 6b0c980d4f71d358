"""The studio in a browser, used by mouse and keyboard. Needs Chromium and its driver; skipped where there are none."""

# ruff: noqa: F811 (fixtures are imported, and are parameters)

from functools import partial

import pytest
from browsing import NEEDS_CHROMIUM, assert_only_asked_for, browser  # noqa: F401
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from studios import run_of, served
from waiting import wait_until

from penstock.commands.source import question_of
from penstock.schedule import Costs, build, simulate, with_teacher
from penstock.view.studio.studio_server import OpenedFile

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def port():
    with served() as number:
        yield number


@pytest.fixture
def studio(browser, port):
    """The page, opened anew; afterwards the console must be empty, and nothing asked of anybody else."""
    browser.get("about:blank")
    browser.get_log("performance")
    home = f"http://127.0.0.1:{port}/"
    browser.get(home)
    settle(browser)
    yield browser
    assert_only_asked_for(browser, home, "data:", f"blob:{home}")


def settle(browser):
    """Wait until the last answer is shown."""
    wait_until(lambda: not browser.execute_script("return 'busy' in document.body.dataset"))
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));")


def slide(browser, name, value):
    browser.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: true}))",
        name,
        value,
    )
    settle(browser)


def proof(browser):
    return browser.find_element("id", "proof").text


def makespan(browser):
    return float(browser.find_element("css selector", ".figures dd").text)


def row(browser, rank):
    return browser.execute_script("return studio.answer.rows[arguments[0]].join(' ')", rank)


def cell(browser, name):
    found = browser.find_element("css selector", f'.cell[data-names="{name}"]')
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def picture(browser):
    settle(browser)
    return browser.execute_script("return document.querySelector('.chart canvas').toDataURL()")


def test_sliders_change_picture_figures_and_proof(studio):
    seen = {picture(studio)}
    sizes, costs = {"ranks": 4, "microbatches": 8}, {"forward": 1.0, "send": 0.0}
    for name, value in (("ranks", 6), ("microbatches", 12), ("forward", 2), ("send", 1)):
        slide(studio, name, value)
        seen.add(picture(studio))
        (sizes if name in sizes else costs)[name] = value
        assert makespan(studio) == simulate(build("1f1b", **sizes), Costs(**costs)).makespan
    assert len(seen) == 5
    slide(studio, "schedule", "zb-v")
    assert proof(studio).startswith("proved: zb-v over 6 ranks, 12 stages")
    slide(studio, "max_in_flight", 3)
    assert proof(studio) == "rank 0 holds 12 activations in flight, max_in_flight allows 3"
    slide(studio, "max_in_flight", 0)
    assert proof(studio).startswith("proved: zb-v")


@pytest.mark.slow
def test_a_file_it_was_opened_with_is_shown_again_when_it_has_changed(browser, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n")
    with served(OpenedFile(path, partial(question_of, str(path), 4, 8))) as own:
        browser.get(f"http://127.0.0.1:{own}/")
        for text, shown in (("0F0,0B0\n", "0F0 0B0"), ("0F0,0F1,0B0,0B1\n", "0F0 0F1 0B0 0B1")):
            path.write_text(text)
            wait_until(lambda shown=shown: row(browser, 0) == shown)
        path.write_text("0F0,0B1\n0Z0\n")
        wait_until(lambda: "0Z0" in browser.find_element("id", "problem").text)
        assert row(browser, 0) == "0F0 0F1 0B0 0B1"
        browser.get("about:blank")


def test_one_stage_may_have_its_own_cost_and_one_microbatch_its_own_size(studio):
    studio.execute_script("document.getElementById('own').open = true")
    field = studio.find_element("css selector", '[data-stage="2"][data-cost="forward"]')
    field.send_keys("4")
    settle(studio)
    costs = Costs([1, 1, 4, 1], 1, 1)
    assert makespan(studio) == simulate(build("1f1b", ranks=4, microbatches=8), costs).makespan

    studio.execute_script("document.getElementById('sizes').open = true")
    studio.find_element("css selector", '#sizes [data-index="2"]').send_keys("3")
    settle(studio)
    costs = Costs([1, 1, 4, 1], 1, 1, microbatch_factors=[1, 1, 3, 1, 1, 1, 1, 1])
    assert makespan(studio) == simulate(build("1f1b", ranks=4, microbatches=8), costs).makespan


@pytest.mark.slow
def test_dragging_an_action_makes_a_deadlock_that_is_told_and_marked_and_undone(studio):
    before = row(studio, 0)
    source, target = cell(studio, "0F2"), cell(studio, "0B0")
    ActionChains(studio, duration=40).click_and_hold(source).move_to_element_with_offset(target, 12, 0).release().perform()
    settle(studio)
    assert row(studio, 0).startswith("0F0 0F1 0F3 0B0 0F2 0F4")
    assert "deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0; rank 1 waits for" in proof(studio)
    wrong = {element.text for element in studio.find_elements("css selector", ".cell.wrong")}
    assert wrong == {"1B0", "0B0", "0F2", "1F2"}
    assert len(studio.find_elements("css selector", ".wait-arrows path")) == 4  # two arrows, line and tip
    studio.find_element("id", "undo").click()
    settle(studio)
    assert proof(studio).startswith("proved: 1f1b")
    assert row(studio, 0) == before
    assert not studio.find_elements("css selector", ".cell.wrong")


def in_picture(browser, name, side=0.5):
    """Where an action stands in the picture, from the middle of the chart; `side` is 0 at its left end, 1 at its right."""
    return browser.execute_script(
        "const [name, side] = arguments, box = studio.chartEditor.box(name), host = page.charts[0].host;"
        "host.scrollIntoView({block: 'center'}); const {offsetWidth, offsetHeight} = host;"
        "return [box.left + side * box.width - offsetWidth / 2, box.top + box.height / 2 - offsetHeight / 2].map(Math.round)",
        name,
        side,
    )


def drag_in_picture(browser, source, target, side, keys=""):
    chart = browser.find_element("css selector", ".chart")
    begin, end = in_picture(browser, source), in_picture(browser, target, side)
    chain = ActionChains(browser, duration=40).move_to_element_with_offset(chart, *begin).click_and_hold()
    chain.move_to_element_with_offset(chart, *end).send_keys(keys).release().perform()
    settle(browser)


def test_dragging_in_the_picture_makes_the_same_deadlock_and_its_cycle_is_drawn_there(studio):
    before, view = row(studio, 0), studio.execute_script("return page.view")
    drag_in_picture(studio, "0F2", "0B0", 0.8)
    assert row(studio, 0).startswith("0F0 0F1 0F3 0B0 0F2 0F4")
    assert "deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0" in proof(studio)
    assert studio.execute_script(
        "return studio.chartEditor.answer.proof.waits.flat().every((name) => studio.chartEditor.stuck.has(name))"
    )
    red = """
        const {canvas} = page.charts[0], {width, height} = canvas;
        const copy = Object.assign(document.createElement("canvas"), {width, height});
        const context = copy.getContext("2d", {willReadFrequently: true});
        context.drawImage(canvas, 0, 0);
        const {data} = context.getImageData(0, 0, width, height);
        return data.filter((value, i) => i % 4 === 0 && value === 0xd1 && data[i + 1] === 0x3a && data[i + 2] === 0x30).length;
    """
    assert studio.execute_script(red) > 200  # outlines and arrows
    drag_in_picture(studio, "0F2", "0B0", 0.1)  # back, from where it never runs
    assert row(studio, 0).startswith("0F0 0F1 0F3 0F2 0B0")
    assert proof(studio).startswith("proved: 1f1b (edited)")
    assert studio.execute_script(red) == 0
    studio.find_element("id", "reset").click()
    settle(studio)
    assert row(studio, 0) == before
    assert studio.execute_script("return page.view") == view


@pytest.mark.slow
def test_a_drag_in_the_picture_can_be_given_up_and_beside_the_actions_it_pans(studio):
    before = row(studio, 0)
    drag_in_picture(studio, "0F2", "0B0", 0.8, Keys.ESCAPE)
    drag_in_picture(studio, "0F2", "0F2", 0.9)
    assert row(studio, 0) == before
    studio.execute_script("page.zoom(0.5, 0)")
    settle(studio)
    chart, (x, y) = studio.find_element("css selector", ".chart"), in_picture(studio, "0F3")
    ActionChains(studio, duration=40).move_to_element_with_offset(chart, x + 150, y).click_and_hold().move_by_offset(
        -60, 0
    ).release().perform()
    settle(studio)
    assert row(studio, 0) == before
    assert studio.execute_script("return page.view.from") > 0


def load_run(studio, folder):
    (folder / "timeline.json").write_text(run_of())
    studio.find_element("id", "load-run-file").send_keys(str(folder / "timeline.json"))
    wait_until(lambda: studio.execute_script("return page.records[0].predicted !== null"))
    settle(studio)


@pytest.mark.slow
def test_over_a_measured_run_the_predicted_row_is_dragged(studio, tmp_path):
    load_run(studio, tmp_path)
    before = row(studio, 0).split()
    drag_in_picture(studio, before[1], before[0], 0.1)
    assert row(studio, 0).split()[:2] == [before[1], before[0]]


def test_the_keyboard_selects_moves_and_undoes(studio):
    studio.execute_script(
        "window.told = []; const said = document.getElementById('announcement');"
        "new MutationObserver(() => told.push(said.textContent)).observe(said, {childList: true, characterData: true});"
        "studio.table.current.focus()"
    )
    ActionChains(studio).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    ActionChains(studio).key_down(Keys.ALT).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).key_up(Keys.ALT).perform()
    settle(studio)
    assert row(studio, 0).startswith("0F0 0F1 0F3 0B0 0F2")
    assert "deadlocks" in proof(studio)
    assert studio.execute_script("return document.activeElement.textContent") == "0F2"
    assert "0F2 is at place 5 of rank 0" in studio.execute_script("return told")
    ActionChains(studio).key_down(Keys.CONTROL).send_keys("z").key_up(Keys.CONTROL).perform()
    settle(studio)
    assert row(studio, 0).startswith("0F0 0F1 0F3 0F2 0B0")
    assert proof(studio).startswith("proved: 1f1b (edited)")
    studio.find_element("id", "reset").click()
    settle(studio)
    assert row(studio, 0).startswith("0F0 0F1 0F2 0F3 0B0")


def test_a_table_is_saved_and_loaded(studio):
    slide(studio, "schedule", "dualpipe-v")
    before = [row(studio, rank) for rank in range(4)]
    color = "return [...document.querySelectorAll('.cell span')].map((half) => [half.className, getComputedStyle(half).color])"
    halves = {tuple(half) for half in studio.execute_script(color)}
    assert halves == {("paint-F", "rgb(11, 15, 22)"), ("paint-B", "rgb(255, 255, 255)")}  # which test_colors.py weighs
    studio.find_element("id", "save-csv").click()
    saved = studio.downloads / "dualpipe-v.csv"
    wait_until(lambda: saved.exists() and saved.stat().st_size)
    slide(studio, "schedule", "gpipe")
    studio.find_element("id", "load-csv-file").send_keys(str(saved))
    wait_until(lambda: "dualpipe" in proof(studio))
    assert proof(studio).startswith("proved: dualpipe-v.csv over 4 ranks")
    assert [row(studio, rank) for rank in range(4)] == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [
        build("1f1b", ranks=2, microbatches=2, slices=2).csv_rows(),
        [["0FROZEN", "0F0", "0F1"], ["1F0", "1B0", "1F1", "1B1"]],
        with_teacher(build("1f1b", ranks=2, microbatches=2)).csv_rows(),
        with_teacher(build("1f1b", ranks=2, microbatches=2), ahead=False).csv_rows(),
    ],
    ids=["slices", "frozen", "teacher ahead", "teacher"],
)
def test_a_link_has_the_slices_the_frozen_stages_and_the_teacher_of_a_table(studio, tmp_path, rows):
    (tmp_path / "mine.csv").write_text("\n".join(map(",".join, rows)))
    studio.find_element("id", "load-csv-file").send_keys(str(tmp_path / "mine.csv"))
    wait_until(lambda: proof(studio).startswith("proved: mine.csv"))
    before = [proof(studio), *(row(studio, rank) for rank in range(2))]
    studio.get(studio.current_url)
    wait_until(lambda: proof(studio))
    settle(studio)
    assert [proof(studio), *(row(studio, rank) for rank in range(2))] == before


def test_a_measured_run_is_laid_over_what_is_predicted(studio, tmp_path):
    load_run(studio, tmp_path)
    assert studio.find_element("id", "forward").get_attribute("value") != "1"
    assert "predicted" in studio.find_element("css selector", ".figures").text
    before = picture(studio)
    slide(studio, "schedule", "gpipe")
    assert picture(studio) != before
    studio.find_element("id", "remove-run").click()
    settle(studio)
    assert studio.execute_script("return page.records[0].predicted") is None
    assert studio.find_element("id", "forward").get_attribute("value") == "1"


def test_a_run_of_other_sizes_is_not_drawn_beside_and_its_stages_are_priced_together(studio, tmp_path):
    load_run(studio, tmp_path)
    slide(studio, "schedule", "zb-v")
    said = studio.find_element("id", "run").text
    assert said.startswith("At the run's costs zb-v takes ")
    assert said.endswith("%.")
    slide(studio, "ranks", 3)
    assert "The run had 2 ranks and 4 microbatches, this table has 3 and 4" in studio.find_element("id", "run").text
    assert studio.execute_script("return page.records[0].predicted") is None
    slide(studio, "forward", 30)  # twice the mean
    stages = studio.execute_script("return studio.state.costs.stages")
    assert [round(stages[stage]["forward"]) for stage in "01"] == [20, 40]


def undone(browser, key, shift=False):
    chain = ActionChains(browser).key_down(Keys.CONTROL)
    (chain.key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT) if shift else chain.send_keys(key)).key_up(
        Keys.CONTROL
    ).perform()
    settle(browser)


@pytest.mark.slow
def test_changes_are_undone_and_redone_and_the_address_has_them_all(studio):
    slide(studio, "schedule", "dualpipe-v")
    slide(studio, "forward", 2)
    studio.execute_script("studio.table.move(0, 0, 1)")
    settle(studio)
    edited, took = row(studio, 0), proof(studio)
    studio.find_element("id", "keep").click()
    settle(studio)
    studio.get(studio.current_url)
    settle(studio)
    settle(studio)
    assert (row(studio, 0), proof(studio)) == (edited, took)
    assert studio.execute_script("return studio.state.costs.forward") == 2
    assert "Differences" in studio.find_element("css selector", "#against .scroll").get_attribute("aria-label")
    slide(studio, "schedule", "gpipe")
    slide(studio, "send", 1)
    undone(studio, "z")
    undone(studio, "z")
    assert row(studio, 0) == edited
    undone(studio, "y")
    assert proof(studio).startswith("proved: gpipe")
    undone(studio, "z", shift=True)
    assert studio.execute_script("return studio.state.costs.send") == 1
    assert studio.find_element("id", "redo").get_attribute("disabled")


def test_two_schedules_of_the_same_model_are_held_against_each_other(studio):
    studio.find_element("id", "keep").click()
    settle(studio)
    slide(studio, "schedule", "looped-bfs")
    slide(studio, "forward", 3)
    differences = studio.find_element("id", "against").text.split("\n")
    first = simulate(build("1f1b", ranks=4, microbatches=8), Costs(6, 2, 2)).makespan  # its stages are twice as large
    second = simulate(build("looped-bfs", ranks=4, microbatches=8), Costs(3, 1, 1)).makespan
    assert any(line.startswith(f"makespan {first:g} {second:g} ") for line in differences)
    assert studio.execute_script("return page.charts[0].alternative.name") == "1f1b"


def typed(browser, name, value):
    """Write a number into the field beside a slider."""
    field = browser.find_element("css selector", f"#{name} + input")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(value)
    return field


def shown(browser, name):
    return browser.find_element("id", name).is_displayed()


@pytest.mark.slow
def test_sixty_four_ranks_are_typed_and_only_the_cells_in_sight_are_there(studio):
    typed(studio, "ranks", "64")
    typed(studio, "microbatches", "80")
    wait_until(lambda: studio.find_element("id", "subtitle").text.endswith("80 microbatches · 10240 actions"))
    settle(studio)
    assert len(studio.find_elements("css selector", ".cell")) < 1500
    studio.execute_script("studio.table.goTo(63, 0)")
    ActionChains(studio).send_keys(Keys.END).perform()
    assert studio.execute_script("return document.activeElement.textContent") == "63B79"
    field = typed(studio, "microbatches", Keys.BACKSPACE)
    field.send_keys(Keys.TAB)
    assert field.get_attribute("value") == "80"  # it is used


@pytest.mark.slow
def test_what_takes_long_is_told_and_ends_with_the_next_change_or_by_stop(studio):
    huge = "Object.assign(studio.state, {ranks: 64, microbatches: 512, stages_per_rank: 4, schedule: 'interleaved-zb'});"
    before = proof(studio)
    studio.execute_script(f"{huge} studio.changed('table')")
    wait_until(lambda: shown(studio, "working"))
    assert studio.find_element("id", "working").text.startswith("Computing: ")
    studio.find_element("id", "stop").click()
    settle(studio)
    assert (proof(studio), shown(studio, "working")) == (before, False)
    studio.execute_script(f"{huge} studio.changed('table')")
    wait_until(lambda: shown(studio, "working"))
    studio.execute_script("Object.assign(studio.state, {ranks: 3, microbatches: 5})")
    slide(studio, "schedule", "gpipe")
    assert proof(studio).startswith("proved: gpipe over 3 ranks")


@pytest.mark.slow
def test_a_better_table_is_found_by_a_tap_held_against_the_old_one_and_taken_back(studio, port):
    studio.get(f"http://127.0.0.1:{port}/?name=mine&rows=0F0.0F1.0B0.0B1&placement=0&max_in_flight=1")
    settle(studio)
    assert proof(studio) == "rank 0 holds 2 activations in flight, max_in_flight allows 1"
    studio.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    tap(studio, studio.find_element("id", "fit-limit"))
    wait_until(lambda: proof(studio).startswith("proved: mine (searched)"))
    settle(studio)
    assert studio.find_element("id", "found").text.startswith(
        "The best that was found with 1 in flight on a rank takes 6. No table is shorter: "
    )
    assert "makespan" in studio.find_element("id", "against").text
    assert shown(studio, "better")
    assert not shown(studio, "fit-limit")
    tap(studio, cell(studio, "0F0"))
    tap(studio, studio.find_element("id", "later"))
    wait_until(lambda: "deadlocks" in proof(studio))
    studio.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    undone(studio, "z")
    undone(studio, "z")
    assert row(studio, 0) == "0F0 0F1 0B0 0B1"
    assert studio.find_element("id", "against").text == ""


def tap(browser, element):
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    box = browser.execute_script(
        "const {left, top, width, height} = arguments[0].getBoundingClientRect(); return [left + width / 2, top + height / 2]",
        element,
    )
    browser.execute_cdp_cmd(
        "Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [dict(zip("xy", box, strict=True))]}
    )
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_the_wheel_is_the_pages_again_after_escape(studio):
    chart = studio.find_element("css selector", ".chart")
    x, y = in_picture(studio, "0F1")
    ActionChains(studio, duration=20).move_to_element_with_offset(chart, x, y).click().perform()
    assert studio.execute_script("return document.activeElement === page.charts[0].host")
    assert "until Escape" in studio.find_element("css selector", ".hint").text
    ActionChains(studio).send_keys(Keys.ESCAPE).perform()
    assert studio.execute_script("return document.activeElement === document.body")


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "-3", "abc", "2.5"])
def test_a_number_that_cannot_be_is_told(studio, value):
    typed(studio, "microbatches", value)
    settle(studio)
    shown = repr(value) if value == "abc" else value
    message = f"microbatches is {shown}: the studio takes a whole number from 1 to 512"
    assert studio.find_element("id", "problem").text == message


def test_no_file_of_another_kind_is_taken(studio, tmp_path):
    (tmp_path / "broken.json").write_text("{<b>")
    studio.find_element("id", "load-run-file").send_keys(str(tmp_path / "broken.json"))
    wait_until(lambda: "broken.json is not a timeline that Penstock wrote" in studio.find_element("id", "problem").text)


def test_the_page_fits_400_pixels(studio):
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    studio.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    settle(studio)
    assert studio.execute_script("return document.documentElement.scrollWidth") <= 400
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    parts = ".chart", "#controls", ".slot-figures", "#editor"
    tops = [studio.execute_script(top, css) for css in parts]
    assert tops == sorted(tops)
    studio.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
