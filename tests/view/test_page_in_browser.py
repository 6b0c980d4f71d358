"""The page in a browser, used by mouse and keyboard. Needs Chromium and its driver; skipped where there are none."""

# ruff: noqa: F811 (fixtures are imported, and are parameters)

from dataclasses import replace

import pytest
from browsing import NEEDS_CHROMIUM, browser, drawn, move_to, place, tip, visit, webdriver  # noqa: F401
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from test_colors import contrast
from timelines import COSTS, measured

from penstock.schedule import ActivationSize, Costs, Timeline, build, simulate, with_teacher
from penstock.view.html import page
from penstock.view.record import Record

pytestmark = NEEDS_CHROMIUM
PAINT = "return paintOf(page.charts[0].record.timeline.blocks.get(arguments[0]), page.options.hues)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The pages under test."""
    folder = tmp_path_factory.mktemp("pages")
    schedule = build("1f1b", ranks=4, microbatches=8)
    steps, predicted = tuple(measured(schedule, seed) for seed in range(3)), simulate(schedule, COSTS)
    (folder / "measured.html").write_text(page([Record(steps, predicted, "s")]))
    step = steps[0]
    rows = tuple(tuple(event._replace(sent=event.end + 1e-4) for event in row) for row in step.rows)
    known = replace(
        step,
        rows=rows,
        activation_sizes=(ActivationSize(1.5e6, 1e6),) * 4,
        memory_unit="bytes",
        between_steps=(0.02, 0.01, 0.01, 0.01),
    )
    weighed = replace(predicted, activation_sizes=known.activation_sizes, memory_unit="bytes")
    (folder / "weighed.html").write_text(page([Record((known,), weighed, "s")]))
    (folder / "weighed_or_not.html").write_text(page([Record((known,)), Record((step,))]))
    plan = simulate(schedule)
    (folder / "planned.html").write_text(page([Record((plan,))]))
    (folder / "teacher.html").write_text(page([Record((simulate(with_teacher(schedule, "V")),))]))
    (folder / "pair.html").write_text(page([Record((simulate(build("dualpipe-v", ranks=2, microbatches=6)),))]))
    other = simulate(build("zb-h1", ranks=4, microbatches=8))
    (folder / "compare.html").write_text(page([Record((plan,)), Record((other,))]))
    hostile = "</script><img src=x onerror=\"document.title='broken'\">"
    named = Timeline(hostile, plan.rows, plan.message_costs)
    (folder / "hostile.html").write_text(page([Record((named, named), labels=(hostile, hostile))]))
    large = build("interleaved-1f1b", ranks=16, microbatches=156, stages_per_rank=4)
    (folder / "large.html").write_text(page([Record((simulate(large, Costs(send=0.1)),))]))
    return folder


def view(browser):
    drawn(browser)
    return browser.execute_script("return [page.view.from, page.view.to]")


def test_hovering_over_an_action_tells_its_times_and_what_it_waited_for(visit):
    browser = visit("measured.html")
    move_to(browser, *place(browser, "1B0")).perform()
    text = tip(browser)
    assert text.startswith("1B0 backward\nstage 1, microbatch 0, rank 1\nmeasured\n")
    assert "predicted\n20 ms, from 82 ms to 102 ms\ndifference\n" in text
    assert "longer, starts" in text
    assert "of rank 2" in text.split("waited\n")[1]
    move_to(browser, *place(browser, "1B0", "predicted")).perform()
    assert tip(browser) == text  # the same action
    move_to(browser, -600, 0).perform()
    assert tip(browser) == ""


def test_hovering_over_idle_time_tells_its_cause(visit):
    browser = visit("planned.html")
    x, y = place(browser, "3F0")
    ahead = browser.execute_script("const c = page.charts[0]; return c.x(1.5) - c.x(3.5)")
    move_to(browser, round(x + ahead), y).perform()
    assert tip(browser).startswith("idle by fill\nbefore the rank's first backward")
    assert "3, from 0 to 3" in tip(browser)


def test_both_actions_of_a_pair_can_be_pointed_at(visit):
    browser = visit("pair.html")
    pair = browser.execute_script("return page.charts[0].record.timeline.data.overlaps[0]")
    for action in pair:
        move_to(browser, *place(browser, action)).perform()
        assert tip(browser).startswith(action)


def test_buttons_wheel_drag_and_double_click_zoom_and_pan(visit):
    browser = visit("planned.html")
    whole = view(browser)
    assert whole == [0, 33]
    browser.find_element(By.CSS_SELECTOR, "[aria-label='Zoom in']").click()
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.6 * 33)
    chart = browser.find_element(By.CLASS_NAME, "chart")
    ActionChains(browser, duration=20).drag_and_drop_by_offset(chart, 200, 0).perform()
    panned = view(browser)
    assert panned[0] < zoomed[0] - 1
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    wheel = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(chart)
    ActionChains(browser, duration=20).key_down(Keys.CONTROL).scroll_from_origin(wheel, 0, -200).key_up(Keys.CONTROL).perform()
    closer = view(browser)
    assert closer[1] - closer[0] < 0.9 * (panned[1] - panned[0])
    for _ in range(5):  # on a busy machine the second click may come too late to make a double one
        ActionChains(browser, duration=20).double_click(chart).perform()
        closest = view(browser)
        if closest != closer:
            break
    assert closest[1] - closest[0] < 0.6 * (closer[1] - closer[0])
    browser.find_element(By.CSS_SELECTOR, "[aria-label='Show all']").click()
    assert view(browser) == [0, 33]


def test_the_wheel_alone_scrolls_the_page_until_the_chart_is_clicked(visit):
    browser = visit("planned.html")
    chart = browser.find_element(By.CLASS_NAME, "chart")
    wheel = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(chart)
    ActionChains(browser, duration=20).scroll_from_origin(wheel, 0, -200).perform()
    assert view(browser) == [0, 33]
    chart.click()
    ActionChains(browser, duration=20).scroll_from_origin(wheel, 0, -200).perform()
    assert view(browser)[1] - view(browser)[0] < 30


def test_the_keyboard_walks_zooms_and_is_told_in_words(visit):
    browser = visit("planned.html")
    said = lambda: browser.find_element(By.ID, "announcement").get_attribute("textContent")  # noqa: E731

    def press(*keys):
        ActionChains(browser, duration=20).send_keys(*keys).perform()
        drawn(browser)
        return said().split(" ")[0]

    for _ in range(12):
        ActionChains(browser, duration=20).send_keys(Keys.TAB).perform()
        if browser.switch_to.active_element.get_attribute("role") == "application":
            break
    assert browser.switch_to.active_element.get_attribute("class") == "chart"
    outline = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    assert press(Keys.ARROW_RIGHT) == "0F0"
    assert press(Keys.ARROW_RIGHT) == "0F1"
    assert press(Keys.END) == "0B7"
    assert "waited 1 for 1B7 of rank 1" in said()
    assert press(Keys.ENTER) == "1B7"
    assert press(Keys.ARROW_DOWN, Keys.ARROW_DOWN) == "3B7"
    assert press(Keys.HOME) == "3F0"
    assert said() == (
        "3F0 forward, stage 3, microbatch 0, rank 3, planned 1, from 3 to 4, waited 3 for 2F0 of rank 2, critical path yes, "
        "slack none: if it takes longer, so does the step"
    )
    press("+")
    assert view(browser)[1] - view(browser)[0] == pytest.approx(0.7 * 33)
    press(Keys.PAGE_DOWN)
    assert view(browser)[1] == 33
    assert press(Keys.ARROW_LEFT) == "3F0"
    assert view(browser)[0] <= 3 <= 4 <= view(browser)[1]
    press("0")
    assert view(browser) == [0, 33]
    press(Keys.ESCAPE)
    assert tip(browser) == ""


def test_the_slider_goes_through_the_steps(visit):
    browser = visit("measured.html")
    slider = browser.find_element(By.ID, "step-0")
    makespan = lambda: browser.find_element(By.CSS_SELECTOR, ".figures dd").text  # noqa: E731
    before = makespan()
    assert browser.find_element(By.TAG_NAME, "output").text == "step 1"  # the middle one by its length
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.find_element(By.TAG_NAME, "output").text == "step 3"
    assert slider.get_attribute("aria-valuetext") == "step 3"
    assert makespan() != before


def test_the_table_has_the_largest_deviations_and_leads_to_them(visit):
    browser = visit("measured.html")
    rows = browser.find_elements(By.CSS_SELECTOR, "tbody tr")
    longer = [float(row.find_elements(By.TAG_NAME, "td")[4].text.split()[0]) for row in rows]
    assert len(rows) == 12
    assert longer == sorted(longer, reverse=True)
    button = rows[0].find_element(By.TAG_NAME, "button")
    action = button.text
    button.click()
    assert tip(browser).startswith(action)


def test_lanes_can_be_left_out_and_the_theme_changed(visit):
    browser = visit("measured.html")
    height = lambda: browser.execute_script("return page.charts[0].height")  # noqa: E731
    whole = height()
    browser.find_element(By.ID, "show-memory").click()
    assert height() == whole - 4 * 33
    browser.find_element(By.ID, "show-predicted").click()
    assert height() == whole - 4 * (33 + 17)
    color = lambda: browser.execute_script("return [getComputedStyle(document.body).backgroundColor, page.colors.panel]")  # noqa: E731
    light = color()
    browser.find_element(By.ID, "theme").click()
    assert all(one != other for one, other in zip(light, color(), strict=True))


def test_microbatches_may_have_a_hue_and_the_kinds_stay_as_light_as_they_were(visit):
    browser = visit("planned.html")
    paints = lambda *actions: [browser.execute_script(PAINT, action) for action in actions]  # noqa: E731
    assert paints("1F1", "1F2", "1B1") == ["F", "F", "B"]
    browser.find_element(By.ID, "show-hues").click()
    drawn(browser)
    assert paints("1F1", "1F2", "1B1") == ["F 1", "F 2", "B 1"]
    assert "microbatches, each in its hue" in browser.find_element(By.CSS_SELECTOR, ".legend").text
    hues = browser.execute_script("return Object.entries(page.paintColors)")
    letters = {"F": "#0b0f16", "B": "#ffffff", "I": "#ffffff", "W": "#0b0f16"}
    colors = {paint: "#{:02x}{:02x}{:02x}".format(*color) for paint, color in hues if paint[0] in letters and " " in paint}
    assert len(set(colors.values())) == 4 * 12
    for paint, color in colors.items():
        assert contrast(color, letters[paint[0]]) >= 4.5, paint


def test_two_records_share_one_time_axis_and_their_differences_are_listed(visit):
    browser = visit("compare.html")
    assert [heading.text for heading in browser.find_elements(By.TAG_NAME, "h2")] == ["1f1b", "zb-h1"]
    rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "tbody tr")]
    assert "These differ" not in browser.find_element(By.ID, "page").text
    assert rows[:3] == ["makespan 33 27 −18.2 %", "bubble 27.3 % 11.1 % −16.2 points", "memory, most on a rank 4 4 same"]
    browser.execute_script("page.zoom(0.5)")
    drawn(browser)
    assert browser.execute_script("return page.charts.map((chart) => chart.x(20)).every((x, _, all) => x === all[0])")


def test_a_hostile_name_is_a_name(visit):
    browser = visit("hostile.html")
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert "broken" not in browser.title.split("'")[0]
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("</script><img src=x")
    assert browser.find_element(By.TAG_NAME, "output").text.startswith("</script><img")


@pytest.mark.parametrize("width", [400, 1300])
def test_nothing_is_wider_than_the_window(visit, width):
    browser = visit("measured.html")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    drawn(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return page.charts[0].width") < width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


COUNTED = """
    const pen = CanvasRenderingContext2D.prototype;
    for (const name of ["fill", "fillRect", "fillText", "stroke", "drawImage", "putImageData"]) {
        const act = pen[name];
        pen[name] = function (...args) { window.count++; return act.apply(this, args); };
    }
"""
MOVED = """
    const done = arguments[0];
    performance.clearMarks();
    for (let i = 0; i < 100; i++) page.pan(page.view.to * 1e-4);
    requestAnimationFrame(() => setTimeout(() => done([performance.getEntriesByName("drawn").length, window.count])));
"""


def test_twenty_thousand_actions_are_drawn_by_few_calls_and_once_a_frame_however_often_they_are_moved(visit):
    browser = visit("large.html")
    assert browser.execute_script("return page.charts[0].record.timeline.blocks.size") == 19968
    browser.execute_script(COUNTED)
    for zoom in (1, 0.5, 0.1):
        browser.execute_script("page.zoom(arguments[0])", zoom)
        drawn(browser)
        browser.execute_script("window.count = 0")
        frames, calls = browser.execute_async_script(MOVED)
        print(zoom, calls)
        assert frames == 1
        assert calls < 3000


def test_memory_in_bytes_sending_and_the_time_between_steps_are_told(visit):
    browser = visit("weighed.html")
    figures = dict(
        zip(
            *[
                [e.text for e in browser.find_elements(By.CSS_SELECTOR, f".figures {tag}")]
                for tag in ("dt", "dd:not(.comparison)")
            ],
            strict=True,
        )
    )
    assert (figures["memory of activations, at most"], figures["between steps, before this one"]) == ("6 MB", "20 ms")
    legend = [element.text for element in browser.find_elements(By.CSS_SELECTOR, ".legend li")]
    assert any(label.startswith("between steps, of all time") for label in legend)
    assert legend[-1] == "memory of activations (dashed: predicted)"
    assert any(label.startswith("idle by sending") for label in legend)
    ActionChains(browser, duration=20).click(browser.find_element(By.CSS_SELECTOR, ".chart")).send_keys(
        Keys.ARROW_RIGHT
    ).perform()
    drawn(browser)
    assert "memory held 1.5 MB once it has ended" in browser.find_element(By.ID, "announcement").get_attribute("textContent")
    browser = visit("planned.html")
    assert "sending" not in browser.find_element(By.CSS_SELECTOR, ".legend").text
    rows = visit("weighed_or_not.html").find_element(By.CSS_SELECTOR, "table").text.splitlines()
    assert "memory, most on a rank 6 MB 4 –" in rows
    assert any(row.startswith("idle by sending") for row in rows)


def test_a_teachers_forwards_have_a_colour_of_their_own(visit):
    browser = visit("teacher.html")
    assert [browser.execute_script(PAINT, action) for action in ("3F0", "4F0", "11F7", "3B0")] == [
        "F",
        "teacher",
        "teacher",
        "B",
    ]
    assert "forward of the teacher" in browser.find_element(By.CSS_SELECTOR, ".legend").text
