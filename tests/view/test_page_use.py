"""What a person asks of a page, by mouse, keyboard and touch: each answer is what Python says."""

# ruff: noqa: F811 (fixtures are imported, and are parameters)

import json
import re
from dataclasses import replace

import pytest
from browsing import NEEDS_CHROMIUM, browser, drawn, move_to, place, tip, visit  # noqa: F401
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from slow_cases import slow_except
from timelines import COSTS, measured

from penstock.schedule import Costs, build, simulate
from penstock.view import terminal
from penstock.view.data import sums
from penstock.view.data.timeline_data import timeline_data
from penstock.view.html import page
from penstock.view.reading import load, read
from penstock.view.record import Record, save
from penstock.view.studio.answers import answer
from penstock.view.terminal import summary

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose rank 1 is slow."""
    schedule, file = build("1f1b", ranks=4, microbatches=8), tmp_path_factory.mktemp("run") / "timeline.json"
    save([measured(schedule, seed, slow=1) for seed in range(3)], simulate(schedule, COSTS), file)
    return load(file)


@pytest.fixture(scope="module")
def dense():
    """A step of which a column of pixels has several actions."""
    return simulate(build("1f1b", 4, 1200), Costs(1, 1, 2, send=0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run, dense):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "run.html").write_text(page([run]))
    (folder / "many.html").write_text(page([Record((simulate(build("1f1b", 64, 48)),))]))
    (folder / "dense.html").write_text(page([Record((dense,))]))
    return folder


@pytest.fixture
def opened(browser, folder):
    """The page of the run, in whatever state the test before has left it."""
    if browser.current_url.partition("#")[0] != (folder / "run.html").as_uri():
        browser.get((folder / "run.html").as_uri())
        drawn(browser)
    yield browser
    assert browser.get_log("browser") == []


def ask(browser, words):
    """Type into the field; what it says."""
    field = browser.find_element(By.ID, "find")
    field.clear()
    field.send_keys(words, Keys.ENTER)
    drawn(browser)
    return browser.find_element(By.CSS_SELECTOR, ".answer").text


def focus(browser):
    browser.execute_script("page.charts[0].host.focus()")


def press(browser, *keys):
    ActionChains(browser, duration=20).send_keys(*keys).perform()
    drawn(browser)


# ---- ten questions, each from a fresh page


def click(css):
    return lambda browser: browser.find_element(By.CSS_SELECTOR, css).click()


def write(words):
    return lambda browser: browser.find_element(By.ID, "find").send_keys(words)


def click_on_the_gap(browser):
    x, y = browser.execute_script(
        "const c = page.charts[0], isBetween = ([, , cause]) => ['order', 'imbalance'].includes(cause);"
        "const gaps = c.record.timeline.ranks[2].idle.filter(isBetween);"
        "const [from, to] = gaps[1]; return [c.x((from + to) / 2) - c.width / 2, c.rows[2].main + 10 - c.height / 2]"
    )
    move_to(browser, round(x), round(y)).click().perform()


def drag_over_all_ranks(browser):
    x, y = place(browser, "0B0")
    drag = move_to(browser, x, y).key_down(Keys.SHIFT).click_and_hold().move_by_offset(200, 310)
    drag.release().key_up(Keys.SHIFT).perform()


def why_rank_2_waits(run):
    data = timeline_data(run.usual)["ranks"]
    gap = [end for _, end, cause in data[2]["idle"] if cause in ("order", "imbalance")][1]
    event = next(event for event in data[2]["events"] if event["start"] >= gap)
    home = next(rank for rank, row in enumerate(data) if event["waited_for"] in [event["action"] for event in row["events"]])
    return f"next\n{event['action']} .*\nwaits for\n{event['waited_for']} of rank {home}, which ends at "


def idlest(run):
    shares = {rank: 1 - busy / run.usual.makespan for rank, busy in enumerate(run.usual.busy)}
    return "idle, of the step: " + ", ".join(
        f"rank {rank} {100 * shares[rank]:.1f} %" for rank in sorted(shares, key=lambda rank: -shares[rank])
    )


ANSWER, TIP, SELECTED, ENTER = ".answer", "#tip", "[aria-label=Selection]", write(Keys.ENTER)
TEN = {  # question: what a person does; where the answer is; what it says, word for word or as a pattern
    "Which rank slows the step, and what does it cost?": (
        [],
        ".finding",
        lambda run: run.explanation.verdict[0].text,
    ),
    "Would zb-v help?": ([write("zb-v"), ENTER], ANSWER, lambda run: run.explanation.alternative_texts["zb-v"]),
    "Why does rank 2 wait here?": ([click_on_the_gap], TIP, why_rank_2_waits),
    "What may 2B3 cost before it matters?": (
        [write("2B3"), ENTER],
        TIP,
        lambda run: r"slack\n[\d.]+ ms: how much longer it may take before the step does",
    ),
    "What if 2F3 were as fast as the others?": (
        [write("2F3 as fast as the others"), ENTER],
        ANSWER,
        lambda run: r"2F3 as fast as the others \([\d.]+ ms\): the step takes ",
    ),
    "What would faster links bring?": (
        [write("no send cost"), ENTER],
        ANSWER,
        lambda run: r"messages that cost nothing: the step takes [\d.]+ ms less \([\d.]+ %\): [\d.]+ ms",
    ),
    "Where does microbatch 5 spend its time?": (
        [write("m5")],
        ANSWER,
        lambda run: r"m5: 8 actions, from [\d.]+ ms to [\d.]+ ms; they take [\d.]+ ms, and for [\d.]+ ms none of them ran",
    ),
    "What happened here, on all ranks?": ([drag_over_all_ranks], SELECTED, lambda run: r"Selected: [\d.]+ ms, .*, ranks 0-3"),
    "What makes the step as long as it is?": ([], ".path", lambda run: r"The critical path is backward \("),
    "Which ranks are idle most?": ([click("#sort"), click("#sort option[value=idle]")], ANSWER, idlest),
}


@pytest.mark.slow
@pytest.mark.parametrize("question", TEN)
def test_a_question_is_answered_from_a_fresh_page_in_two_actions_at_most(visit, run, question):
    actions, where, answer = TEN[question]
    assert len(actions) <= 2
    browser = visit("run.html")
    for does in actions:
        does(browser)
        drawn(browser)
    shown, result = browser.find_element(By.CSS_SELECTOR, where).text, answer(run)
    assert result in shown or re.search(result, shown), shown


@pytest.mark.slow
def test_each_sentence_of_the_verdict_lights_up_what_it_is_about_and_draws_the_step_without_it(visit, run):
    browser, verdict = visit("run.html"), run.explanation.verdict
    sentences = browser.find_elements(By.CSS_SELECTOR, ".finding")
    assert [sentence.text for sentence in sentences] == [finding.text for finding in verdict]
    assert sentences[0].text.startswith("rank 1 is slow: ")
    shown = "const c = page.charts[0], a = c.alternative; return a && [a.timeline.data.makespan, c.rows[0].predictedHeight > 0]"
    for sentence, finding in zip(sentences, verdict, strict=True):
        sentence.click()
        drawn(browser)
        assert browser.execute_script(shown) == [pytest.approx(finding.timeline.makespan), True]
    sentences[0].click()
    lit = "return page.charts[0].record.timeline.ranks.map(({blocks}) => blocks.every(page.isHighlighted))"
    assert browser.execute_script(lit) == [False, True, False, False]
    sentences[0].click()
    assert browser.execute_script(f"{shown.replace('return', 'return page.isHighlighted ||')}") is None


def test_sixty_four_ranks_are_in_sight_and_can_be_sorted_folded_and_pinned(visit):
    browser = visit("many.html")
    state = (
        "const c = page.charts[0]; return {height5: c.rows[5].height, height: c.height, order: c.order, label: c.rows[7].main}"
    )
    before = browser.execute_script(state)
    assert before["height5"] >= 5
    assert browser.execute_script("return page.charts[0].host.getBoundingClientRect().bottom <= innerHeight")
    assert before["order"] == list(range(64))
    browser.execute_script("const s = document.getElementById('sort'); s.value = 'idle'; s.dispatchEvent(new Event('change'))")
    assert browser.execute_script(state)["order"][:2] == [0, 1]  # all are idle for as long: by number
    x, y = browser.execute_script("const c = page.charts[0]; return [20 - c.width / 2, c.rows[8].main + 2 - c.height / 2]")
    move_to(browser, round(x), round(y)).click().key_down(Keys.SHIFT).click().key_up(Keys.SHIFT).perform()
    drawn(browser)
    folded, pinned = browser.execute_script("const c = page.charts[0]; return [[...c.folded], [...c.pinned]]")
    assert folded == [8]
    assert len(pinned) == 1
    assert browser.execute_script(state)["order"][0] == pinned[0]


def test_where_blocks_are_denser_than_pixels_their_proportions_are_drawn(visit, dense):
    browser = visit("dense.html")
    pixels = """
        const c = page.charts[0], {context, pixelRatio, gutter, rows, page: {paintColors}} = c, found = {};
        const {main, height} = rows[1], left = Math.round((gutter + 100) * pixelRatio), wide = Math.round(600 * pixelRatio);
        const {data} = context.getImageData(left, Math.round(main * pixelRatio), wide, Math.round(height * pixelRatio));
        const near = (i) => [...Object.keys(KIND_NAMES), ...Object.keys(CAUSE_TEXTS)].reduce((best, paint) => {
            const far = Math.hypot(...paintColors[paint].map((part, k) => part - data[i + k]));
            return far < best[0] ? [far, paint] : best;
        }, [Infinity, null])[1];
        for (let i = 0; i < data.length; i += 4) found[near(i)] = (found[near(i)] || 0) + 1 / (data.length / 4);
        return [found, [left, left + wide].map((x) => c.timeAt(x / pixelRatio))];
    """
    browser.execute_script("document.getElementById('show-path').click()")
    drawn(browser)
    shown, (begin, end) = browser.execute_script(pixels)
    took = {"F": 0.0, "B": 0.0}
    for event in dense.rows[1]:
        took[event.action.kind.value] += max(0.0, min(end, event.end) - max(begin, event.start)) / (end - begin)
    assert shown["F"] == pytest.approx(took["F"], abs=0.02)
    assert shown["B"] == pytest.approx(took["B"], abs=0.02)
    idle = sum(share for paint, share in shown.items() if paint not in took)
    assert idle == pytest.approx(1 - sum(took.values()), abs=0.02)


def test_a_microbatch_that_is_typed_lights_up_with_its_messages_until_escape(visit):
    browser = visit("run.html")
    browser.find_element(By.ID, "find").send_keys("m5")
    drawn(browser)
    lit = (
        "return [...page.charts[0].record.timeline.blocks.values()].filter(page.isHighlighted).map((block) => block.microbatch)"
    )
    assert browser.execute_script(lit) == [5] * 8
    assert browser.find_element(By.CSS_SELECTOR, ".answer").text.startswith("m5: 8 actions, from ")
    browser.find_element(By.ID, "find").send_keys(Keys.ESCAPE)
    assert browser.execute_script("return [page.isHighlighted, page.followedMicrobatch]") == [None, None]
    focus(browser)
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, "f")
    assert browser.execute_script("return page.followedMicrobatch") == 1


def test_the_keys_of_perfetto_zoom_pan_mark_and_find_and_escape_leaves(visit):
    browser = visit("run.html")
    view = lambda: browser.execute_script("return [page.view.from, page.view.to]")  # noqa: E731
    focus(browser)
    whole = view()
    press(browser, "w", "w")
    closer = view()
    assert closer[1] - closer[0] == pytest.approx(0.49 * (whole[1] - whole[0]))
    press(browser, "d")
    assert view()[0] > closer[0]
    press(browser, "a", "s", "s")
    assert view() == pytest.approx(whole)
    press(browser, Keys.ARROW_RIGHT, "m")
    assert browser.execute_script("return [page.selection.ranks, page.selection.from]") == [[0], 0]
    press(browser, "/")
    assert browser.execute_script("return document.activeElement.id") == "find"
    focus(browser)
    press(browser, Keys.ESCAPE)
    left = browser.execute_script("return [page.selection, page.charts[0].selected, document.activeElement === document.body]")
    assert left == [None, None, True]


def test_what_is_searched_is_found(visit):
    browser = visit("run.html")
    ask(browser, "2f3")
    assert browser.execute_script("return page.charts[0].selected.text") == "2F3"
    assert tip(browser).startswith("2F3 forward")
    ask(browser, "rank 2")
    assert browser.execute_script("return page.selection.ranks") == [2]
    assert "is none of 2F3, m5, rank 7" in ask(browser, "hello")


def test_shift_and_drag_selects_time_and_ranks_and_the_address_brings_it_back(visit, folder):
    browser = visit("run.html")
    x, y = place(browser, "1B0")
    move_to(browser, x, y).key_down(Keys.SHIFT).click_and_hold().move_by_offset(220, 95).release().key_up(Keys.SHIFT).perform()
    drawn(browser)
    chosen = browser.execute_script("return page.selection")
    assert sorted(chosen["ranks"]) == [1, 2]
    table = browser.find_element(By.CSS_SELECTOR, "[aria-label=Selection]").text
    assert table.startswith("Selected: ")
    assert "ranks 1-2" in table
    address = browser.current_url
    assert address.endswith("&ranks=1-2")
    browser.get("about:blank")
    browser.get(address)
    drawn(browser)
    again = browser.execute_script("return page.selection")
    assert again["ranks"] == [1, 2]
    assert again["from"] == pytest.approx(chosen["from"], rel=1e-4)
    assert browser.find_element(By.CSS_SELECTOR, "[aria-label=Selection]").text.startswith("Selected: ")
    whole = "{from: 0, to: timeline.data.makespan, ranks: [0, 1, 2, 3]}"
    script = f"const {{timeline}} = page.records[0]; return summarizeRanks(timeline, {whole}).map((row) => row.busy)"
    result = browser.execute_script(script)
    assert result == pytest.approx(browser.execute_script("return page.records[0].timeline.data.busy"), rel=1e-6)


def test_the_critical_path_is_unrolled_below_and_told_in_sums(visit, run):
    browser = visit("run.html")
    path = run.steps[-1].critical_path
    x, y = browser.execute_script(
        "const c = page.charts[0], {top, height} = c.pathRow; c.host.scrollIntoView({block: 'center'});"
        "return [c.x(c.record.timeline.path[3].start) + 3 - c.width / 2, top + height / 2 - c.height / 2]"
    )
    move_to(browser, round(x), round(y)).perform()
    assert tip(browser).startswith(str(path[3].action))
    result = browser.find_element(By.CSS_SELECTOR, ".path").text
    assert result.startswith("The critical path is backward ")
    assert "messages" in result
    assert "Its actions are on rank 1 " in result


@pytest.mark.parametrize(
    ("name", "slow"), slow_except([("1f1b", 0)], [("1f1b", 0), ("1f1b", 1), ("1f1b", None), ("zb-v", None)])
)
def test_idle_and_bubble_have_one_value_and_one_name_wherever_they_are_told(visit, folder, name, slow):
    step = measured(build(name, ranks=4, microbatches=4), 1, slow=slow)
    text = json.dumps(Record((step,), None, "s").data())
    record = read(text, "a run")
    (folder / "words.html").write_text(page([record]))
    data, summary_text = record.data()["steps"][0]["timeline"], summary(step, "s")
    browser = visit("words.html")
    cards = [element.text.split("\n") for element in browser.find_elements(By.CSS_SELECTOR, ".figures > div")]
    shown = {name: value for name, value, *_ in cards}
    assert shown["idle, of all ranks' time"] == f"{100 * data['idle_share']:.1f} %"
    assert shown["bubble, idle of the busiest rank"] == f"{100 * data['bubble']:.1f} %"
    assert shown["makespan"] == terminal.format_time(data["makespan"], "s") == terminal.format_time(record.usual.makespan, "s")
    assert summary_text.startswith(f"makespan {shown['makespan']}, ")
    assert (
        shown["in flight, most at once"] == "/".join(map(str, data["peak_in_flight"])) or len(set(data["peak_in_flight"])) == 1
    )
    assert f"idle {data['idle_share']:.1%}" in summary_text
    assert f"bubble {data['bubble']:.1%}" in summary_text
    assert browser.find_element(By.CSS_SELECTOR, ".shares h3").text.endswith(f"idle {shown[cards[1][0]]}")
    assert answer({"run": text})["measured"]["steps"][0]["timeline"]["idle_share"] == data["idle_share"]
    closing, legend = str(record.explanation), browser.find_element(By.CSS_SELECTOR, ".legend").text
    assert f"  idle   {data['idle_share']:6.1%}  " in closing
    for cause, share in data["causes"].items():
        assert share == 0 or f"{cause} {share:.1%}" in closing
        assert share == 0 or f"idle by {cause}{100 * share:.1f} %" in legend.replace("\n", "")
        assert share == 0 or f"{cause} {share:.1%}" in summary_text


def test_numbers_are_told_alike_by_the_page_and_the_terminal(opened):
    shares = [0, 1 / 16, 3 / 16, 5 / 16, 1 / 8, 1 / 3, 0.0125, 0.00049, 0.9999, 1]
    result = opened.execute_script("return arguments[0].map(percent)", shares)
    assert result == [f"{share:.1%}".replace("%", " %") for share in shares]
    numbers = [15357, 15360.4, 0.1 + 0.2, 12.345678, 0.012345678, 12345678]
    for unit, scales in (("", [1]), ("s", [1, 1e-3, 1e-6])):
        times = [number * scale / 100 for number in numbers[:5] for scale in scales] + numbers[-1:] * (not unit)
        record = "new TimelineRecord({unit: arguments[0], steps: []})"
        found = opened.execute_script(
            f"const record = {record}; return arguments[1].map((each) => record.formatTime(each))", unit, times
        )
        assert found == [terminal.format_time(time, unit) for time in times]
    sizes = [0, 1, 999, 1000, 1.5e6, 123456789, 2.5e9]
    for unit in ("", "bytes"):
        found = opened.execute_script("return arguments[0].map((each) => formatMemory(each, arguments[1]))", sizes, unit)
        assert found == [terminal.format_memory(size, unit) for size in sizes]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("2B99", "there is no 2B99"),
        ("2B99 = 3", "there is no 2B99"),
        ("m99", "there is no microbatch 99"),
        ("rank 9", "there is no rank 9"),
        ("rank 9 at the mean", "there is no rank 9"),
        ("2B3 = -1 ms", "-1 is no time"),
        ("2B3 = 1.2.3 ms", "1.2.3 is no time"),
        ("2B3 = 1e999", "1e999 is no time"),
        ("constructor", "“constructor” is none of 2F3, "),
        ("<b>" + 90 * "x", "“<b>" + 37 * "x" + "…” is none of 2F3, "),
        (" 2b3 = 20MS ", "2B3 at 20 ms: the step takes "),
        ("2B3 = 1e-2 s", "2B3 at 10 ms: the step takes "),
        ("Zero bubble", "“Zero bubble” is none of 2F3, "),
        ("ZB-V", "zb-v (2 stages a rank): "),
    ],
)
def test_what_cannot_be_answered_is_told_in_a_sentence(opened, words, message):
    assert ask(opened, words).startswith(message)


# ---- what if


def asked(browser, record, words):
    """The makespan that the page works out for a question."""
    script = "return whatIf(new TimelineRecord(JSON.parse(arguments[0])), arguments[1])"
    answer = browser.execute_script(f"{script}.makespan", json.dumps(record.data()), words)
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    "name", slow_except(["zb-v", "dualpipe-v"], ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v"])
)
def test_what_if_is_what_the_simulator_says(opened, name):
    table = build(name, ranks=4, microbatches=8)
    forward = [1.0 + 0.25 * (stage % 3) for stage in range(table.stages)]
    costs = Costs(forward, 1, 1.5, send=0.3, size=2, bandwidth=8)
    record = Record((simulate(table, costs),))
    as_it_was = "return new TimelineRecord(JSON.parse(arguments[0])).timeline.replay.run().makespan"
    assert opened.execute_script(as_it_was, json.dumps(record.data())) == pytest.approx(record.steps[0].makespan)
    ragged = Record((simulate(table, replace(costs, microbatch_factors=[1 + place % 3 for place in range(8)])),))
    assert opened.execute_script(as_it_was, json.dumps(ragged.data())) == pytest.approx(ragged.steps[0].makespan)
    silent = simulate(table, replace(costs, send=0, size=0)).makespan
    assert asked(opened, record, "no send cost") == pytest.approx(silent)
    if not table.overlaps:
        for time in (0.5, 4):
            slower = [*forward[:2], time, *forward[3:]]
            expected = simulate(table, replace(costs, forward=slower)).makespan
            assert asked(opened, record, f"2F = {time}") == pytest.approx(expected)


def test_the_slack_of_an_action_is_how_much_longer_it_may_take_in_the_simulator(opened):
    table = build("zb-h1", ranks=4, microbatches=1)
    costs = Costs([1, 2, 1, 1], [1, 3, 1, 2], [1, 1, 1, 4], send=0.5)
    whole = simulate(table, costs)
    slack = "const {replay, blocks} = new TimelineRecord(JSON.parse(arguments[0])).timeline;"
    slack += "return [...blocks.values()].map((block) => [block.text, replay.slack.get(block)])"
    found = dict(opened.execute_script(slack, json.dumps(Record((whole,)).data())))
    assert found["0W0"] == pytest.approx(whole.makespan - whole.rows[0][-1].end)
    names = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
    for action, room in found.items():
        stage, kind = int(action[0]), action[1]
        was = getattr(costs, names[kind])
        for more, same in ((room, True), (room + 0.25, False)):
            longer = replace(costs, **{names[kind]: [time + more * (here == stage) for here, time in enumerate(was)]})
            assert (simulate(table, longer).makespan == pytest.approx(whole.makespan)) is same, (action, room)


def test_in_a_measured_step_what_a_rank_spent_between_two_actions_is_no_message(opened, run):
    at = {str(event.action): event for event in run.usual.events}
    found = opened.execute_script(
        "const {replay, blocks} = page.records[0].timeline; return replay.slack.get(blocks.get('2B3'))"
    )
    assert "1B3" in map(str, [event.action for event in run.usual.critical_path])
    assert found == pytest.approx(at["1B3"].start - at["2B3"].end - 0.0004, abs=2e-5)  # what a message takes, and the engine


def test_a_step_of_too_many_actions_answers_with_its_sums(visit, folder, monkeypatch):
    monkeypatch.setattr(sums, "MAX_PAGE_ACTIONS", 10)
    step = simulate(build("1f1b", 4, 8))
    (folder / "sums.html").write_text(page([Record((step,))]))
    browser = visit("sums.html")
    assert "too many to show one by one" in browser.find_element(By.ID, "subtitle").text
    assert "has the sums of the step, not its actions" in ask(browser, "2F3")
    ask(browser, "rank 1")
    row = browser.find_element(By.CSS_SELECTOR, "[aria-label=Selection] tbody tr").text
    assert row.startswith(f"rank 1 {100 * step.busy[1] / step.makespan:.1f} % ")


def test_a_question_in_words_is_answered_in_a_sentence_and_drawn_below(visit, run):
    browser = visit("run.html")
    now = browser.execute_script("return page.records[0].timeline.data.makespan")
    assert browser.execute_script("return page.records[0].timeline.replay.run().makespan") == pytest.approx(now)
    result = ask(browser, "rank 1 at the mean")
    assert result.startswith("rank 1 as fast as the mean of the others: the step takes ")
    assert " less (" in result
    ghost = browser.execute_script("return page.charts[0].alternative.timeline.data.makespan")
    assert ghost < now
    assert ask(browser, "1B3 as fast as the others").startswith("1B3 as fast as the others (")
    assert "there is no 9F9" in ask(browser, "9F9 = 3 ms")


def test_the_end_of_a_block_is_pulled_to_ask_what_if_it_took_longer(visit):
    browser = visit("run.html")
    x, y = place(browser, "1B2")
    half = browser.execute_script(
        "const c = page.charts[0], b = c.record.timeline.blocks.get('1B2'); return (c.x(b.end) - c.x(b.start)) / 2"
    )
    view = browser.execute_script("return page.view")
    move_to(browser, x + round(half) - 3, y).click_and_hold().move_by_offset(40, 0).release().perform()
    drawn(browser)
    assert browser.find_element(By.CSS_SELECTOR, ".answer").text.startswith("1B2 at ")
    assert browser.execute_script(
        "return page.charts[0].alternative.timeline.data.makespan > page.records[0].timeline.data.makespan"
    )
    assert browser.execute_script("return page.view") == view
    whole = browser.execute_script("return page.duration")
    focus(browser)
    press(browser, Keys.ESCAPE)
    assert browser.execute_script("return page.charts[0].alternative") is None
    assert browser.execute_script("return page.duration") < whole


# ---- a phone, and paper


def test_on_a_phone_the_first_screen_has_the_chart_and_a_tap_tells(visit):
    browser = visit("run.html")
    size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        drawn(browser)
        top = "return page.charts[0].host.getBoundingClientRect().top + scrollY"
        assert browser.execute_script(top) < 500
        x, y = browser.execute_script(
            "const c = page.charts[0], b = c.record.timeline.blocks.get('1B2'), {left, top} = c.host.getBoundingClientRect();"
            "return [left + c.x((b.start + b.end) / 2), top + c.topOf(b) + 10]"
        )
        point = [{"x": x, "y": y}]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": point})
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        drawn(browser)
        assert tip(browser).startswith("1B2 backward")
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_on_paper_all_ranks_are_on_one_page(visit):
    browser = visit("many.html")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    height, pixelRatio = browser.execute_script("return [page.charts[0].height, page.charts[0].pixelRatio]")
    assert height < 720
    assert pixelRatio == 3
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return page.printing") is False
