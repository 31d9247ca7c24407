"""The report of a run: in a real browser, against the run's own files; and of runs that lack nearly everything."""

import itertools
import json
import os
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from eagle3_jax import cli, commands
from eagle3_jax.data import prepare
from eagle3_jax.decode import evaluate
from eagle3_jax.report import chart, page
from eagle3_jax.train import checkpoint, metrics, setup
from eagle3_jax.train.loop import train

REQUIRED = "EAGLE3_REQUIRE_BROWSER"
SECTIONS = ["summary", "missing", "curves", "evaluation", "during", "manifest", "data", "preview", "config"]
HOSTILE = "</script><img src=http://example.com/x onerror=alert(1)>"


@pytest.fixture(scope="module")
def whole(root):
    """A real run of the tiny target, with evaluations whose numbers the real code counted."""
    run = train(tiny.config(root, "train.steps=6", "train.save_every=3"))
    for name, step, luck in (("evaluate_untrained.json", 0, 0.05), ("evaluate.json", 6, 0.6)):
        commands.save_json(run / name, evaluated(step, luck))
    lines = [
        dict(
            step=step, epoch=step / 4, seconds=2.0 * step, accept_length=1.05 + step / 10, chain="3-1-4", prompts=4,
            interval=[1.0 + step / 10, 1.15 + step / 10], verify_forwards=80, accepted_drafts=4 + 8 * step,
            acceptance_by_position=[0.05 * step, 0.02 * step, 0.01 * step],
            held_out=dict(loss=7 - step / 9, losses=[4.0, 3.0], accuracy=[0.05 * step, 0.02], conditional=[0.1, 0.2]),
        )
        for step in (0, 2, 4, 6)
    ]  # fmt: skip
    del lines[1]["held_out"], lines[2]["accept_length"], lines[2]["interval"]
    (run / metrics.EVALUATIONS).write_text("".join(json.dumps(x) + "\n" for x in lines))
    return run


def evaluated(step: int, luck: float) -> dict:
    rng = np.random.default_rng(step)
    answers = []
    for _ in range(12):
        accepted = [int(np.argmin([*(rng.random(3) < luck), False])) for _ in range(20)]
        rounds = [SimpleNamespace(accepted=a) for a in accepted]
        answers.append(SimpleNamespace(tokens=range(24 + sum(accepted)), rounds=rounds))
    prompts = [{"category": (HOSTILE, "math", "roleplay")[i % 3]} for i in range(12)]
    settings = dict(
        chain="3-1-4", steps=3, topk=1, tokens=4, temperature=0, prompts=12, max_new_tokens=96, dtype="f"
    )
    about = dict(
        step=step, settings=settings, definition=evaluate.DEFINITION, greedy=dict(tokens=9, near_ties=[])
    )
    return evaluate.summary(prompts, answers, 3) | about


@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        text = "no Chromium; `apt-get install -y --no-install-recommends chromium` brings it"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1: {text}", pytrace=False)
        pytest.skip(text)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(whole):
    return commands.report(whole)


@pytest.fixture(scope="module")
def opened(report, browser):
    """The page, 1400 wide, and what it asked for and complained of."""
    tab, said = browser.new_page(viewport=dict(width=1400, height=1000)), []
    tab.on("request", lambda r: said.append(r.url))
    tab.on("console", lambda m: said.append(m.text))
    tab.on("pageerror", lambda e: said.append(str(e)))
    tab.goto(report.as_uri())
    return tab, said


def cells(tab, table: str) -> list[list[str]]:
    return tab.locator(f"#{table} tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))"
    )


def result(whole, name="evaluate.json"):
    return json.loads((whole / name).read_text())


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_asks_for_nothing_complains_of_nothing_and_fits(report, browser, width, scheme):
    tab, said = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme), []
    tab.on("request", lambda r: said.append(r.url))
    tab.on("console", lambda m: said.append(m.text))
    tab.on("pageerror", lambda e: said.append(str(e)))
    tab.goto(report.as_uri())
    assert said == [report.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate("performance.getEntriesByType('resource').length") == 0
    shown = [tab.locator(f"#{s}").is_visible() for s in SECTIONS if s != "missing"]
    assert all(shown) and tab.locator(".plot").count() == 9
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
    tab.close()


def test_the_evaluation_on_the_page_is_that_of_the_file(opened, whole):
    tab, _ = opened
    now, before = result(whole), result(whole, "evaluate_untrained.json")
    assert now["accept_length"] > before["accept_length"] > 1
    text = lambda name: tab.locator(f"#{name}").inner_text()  # noqa: E731
    assert text("accept-length") == f"{now['accept_length']:.3f}"
    assert text("interval") == "{:.3f} .. {:.3f}".format(*now["interval"])
    assert text("untrained") == f"{before['accept_length']:.3f}"
    assert text("sglang-request") == f"{now['sglang_request']:.3f}" != f"{now['sglang_server']:.3f}"
    assert text("sglang-server") == f"{now['sglang_server']:.3f}"
    categories = {row[0]: row[1:3] for row in cells(tab, "categories")[1:]}
    for name, value in now["by_category"].items():
        assert categories[name] == [f"{value:.3f}", f"{before['by_category'][name]:.3f}"]
    positions = [row[1] for row in cells(tab, "positions")[1:]]
    assert positions == [f"{x:.1%}" for x in now["acceptance_by_position"]]
    assert [row[1] for row in cells(tab, "histogram")[1:]] == [f"{x:,}" for x in now["histogram"]]
    assert tab.locator("img").count() == 0  # HOSTILE is a text


def test_what_was_measured_while_training_is_in_the_table_and_the_best_is_marked(opened, whole):
    tab, _ = opened
    rows = cells(tab, "evaluations")[1:]
    lines = metrics.read_evaluations(whole)
    assert [int(row[0]) for row in rows] == [x["step"] for x in lines]
    lengths = [f"{x['accept_length']:.3f}" if "accept_length" in x else page.NOTHING for x in lines]
    assert [row[2] for row in rows] == lengths
    losses = [f"{x['held_out']['loss']:.3f}" if "held_out" in x else page.NOTHING for x in lines]
    assert [row[6] for row in rows] == losses
    assert tab.locator("#evaluations .best th").inner_text() == "6"
    assert tab.locator("#best").inner_text() == f"{lines[-1]['accept_length']:.3f}"


def test_training_figures_and_manifest_are_those_of_the_files(opened, whole):
    tab, _ = opened
    lines, meta = metrics.read(whole), checkpoint.read_meta(whole)
    assert tab.locator("#loss").inner_text() == f"{lines[-1]['loss']:.3f}"
    assert (
        tab.locator("#step").inner_text() == "6"
        and "6 of 6, finished" in tab.locator("#summary").inner_text()
    )
    per_step = [
        meta["config"]["train"]["batch"] * 192 / (b["seconds"] - a["seconds"])
        for a, b in itertools.pairwise(lines)
    ]
    assert tab.locator("#speed").inner_text() == f"{np.median(per_step):,.0f}"
    assert tab.locator("#verdict").inner_text() == "sound"
    rows = {row[0]: row for row in cells(tab, "leaves")[1:]}
    leaves = meta["manifest"]["leaves"]
    assert rows.keys() == leaves.keys()
    for path, leaf in leaves.items():
        assert rows[path][6] == leaf["digest"] and rows[path][4] == leaf["origin"]
        since = (
            "same bits"
            if leaf["label"] == "frozen"
            else f"moved {leaf['moved']:.3g} ({leaf['relative']:.2%})"
        )
        assert rows[path][3] == since


def test_the_coloured_text_is_the_supervised_tokens(opened, whole):
    tab, _ = opened
    config = tiny.config(whole.parent)
    tokens, tokenizer = prepare.load(config.data.prepared), setup.tokenizer(setup.find_target(config))
    shown = tab.locator("pre.conversation")
    assert shown.count() == 3
    for i in range(3):
        a, b = tokens.offsets[i : i + 2]
        ids, span = tokens.ids[a:b], tokens.span[a:b]
        answers = [tokenizer.decode(ids[span == n].tolist()) for n in range(1, span.max() + 1)]
        assert shown.nth(i).locator("mark").all_text_contents() == answers and answers
        assert shown.nth(i).text_content() == tokenizer.decode(ids.tolist())
    card = tab.locator("#card").inner_text()
    assert f"{tokens.card['tokens']:,}, supervised {tokens.card['supervised']:,}" in card
    assert tokens.card["fingerprint"] in card


READ = """plot => {
  const at = (t, name) => [Number(t.getAttribute(name)), parseFloat(t.textContent.replace(/[,%]/g, ""))];
  const ticks = (kind, name) => [...plot.querySelectorAll("text." + kind)].map(t => at(t, name));
  const marks = [...plot.querySelectorAll("circle")];
  return {x: ticks("x:not(.minutes)", "x"), y: ticks("y", "y"), minutes: ticks("minutes", "x"),
    marks: marks.map(m => ["cx", "cy"].map(n => Number(m.getAttribute(n))).concat(m.getAttribute("class")))};
}"""


def test_marks_stand_where_the_axes_say(opened, whole):
    """Read as a person reads them: between the ticks on either side."""
    tab, _ = opened
    drawn = tab.locator(".chart", has_text="Accept length").first.locator(".plot").evaluate(READ)
    across, up = np.array(drawn["x"]), np.array(sorted((t[0] - 3.5, t[1]) for t in drawn["y"]))
    line = np.polynomial.Polynomial.fit
    step, length = line(*across.T, 1), line(*up.T, 1)
    found = sorted((float(step(x)), float(length(y))) for x, y, _ in drawn["marks"])
    told = [*metrics.read_evaluations(whole), result(whole), result(whole, "evaluate_untrained.json")]
    wanted = sorted((x["step"], x["accept_length"]) for x in told if "accept_length" in x)
    np.testing.assert_allclose(found, wanted, atol=0.005)
    seconds = {x["step"]: x["seconds"] for x in metrics.read(whole)}
    for at, minutes in drawn["minutes"][1:]:
        assert minutes == pytest.approx(seconds[round(float(step(at)))] / 60, abs=0.051)


def test_the_value_under_the_pointer_is_that_of_the_file(opened, whole):
    tab, _ = opened
    plot = tab.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box, lines = plot.bounding_box(), metrics.read(whole)
    scale = box["width"] / chart.WIDTH
    for line in (lines[1], lines[4]):
        x = chart.LEFT + (chart.RIGHT - chart.LEFT) * line["step"] / 6
        tab.mouse.move(box["x"] + x * scale, box["y"] + 100 * scale)
        shown = tab.locator("#tip").inner_text().splitlines()
        assert shown[0] == f"step {line['step']}, {line['seconds'] / 60:.1f} min"
        assert shown[1] == f"loss {line['loss']:.4g}"
    tab.mouse.move(1, 1)
    assert not tab.locator("#tip").is_visible()


class Text(HTMLParser):
    """The texts of a page outside script and style."""

    def __init__(self, html: str):
        super().__init__()
        self.inside, self.parts = "", []
        self.feed(html)

    def handle_starttag(self, tag, _):
        self.inside = tag

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.parts.append(data)

    def __str__(self):
        return " ".join(" ".join(self.parts).split())


def bare(whole, tmp_path, *lines: dict):
    """The run with these lines alone, never evaluated."""
    run = tmp_path / "run"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("*.json", "*.jsonl", "*.html", "tensorboard"))
    for name in ("start", "steps"):  # those hold JSON, too
        shutil.rmtree(run / name)
        shutil.copytree(whole / name, run / name)
    if lines:
        (run / metrics.FILE).write_text("".join(json.dumps(x) + "\n" for x in lines))
    return run


def test_a_run_that_was_never_evaluated_says_what_would_bring_it(whole, tmp_path):
    run = bare(whole, tmp_path, *metrics.read(whole)[:4])
    with open(run / metrics.FILE, "a") as file:
        file.write('{"step": 5, "lo')  # a line that is being written
    text = str(Text(page.render(run)))
    assert "Step 4 of 6," not in text and "Step 6 of 6, finished" in text  # step 6 is saved
    shutil.rmtree(run / "steps" / "6")
    text = str(Text(page.render(run)))
    assert "Step 4 of 6, newest checkpoint 3" in text
    assert f"to measure the accept length: eagle3 evaluate {run}" in text
    assert "set train.evaluate_every" in text and "data.held_out" in text


def test_one_line_or_none_or_values_that_are_not_finite_make_a_report(whole, tmp_path):
    run = bare(whole, tmp_path)
    assert "no step is logged yet" in str(Text(page.render(run)))
    line = metrics.read(whole)[0]
    for values in ({}, dict(loss=float("nan"), grad_norm=float("inf"), accuracy=[float("nan")] * 2)):
        (run / metrics.FILE).write_text(json.dumps(line | values) + "\n")
        html = page.render(run)
        assert ("Not finite at step 1" in html) == bool(values)
        points = json.loads(html.split('id="points">')[1].split("</script>")[0], parse_constant=pytest.fail)
        assert len(points["charts"][0]["lines"]) == (not values)


def test_data_that_is_gone_or_another_is_said_and_the_manifest_speaks_for_it(whole, tmp_path, monkeypatch):
    run = bare(whole, tmp_path)
    tokens = prepare.load(whole.parent / "data")
    other = tokens._replace(card=tokens.card | {"fingerprint": "0" * 64})
    monkeypatch.setattr(prepare, "load", lambda directory: other)
    assert "now holds other data than the run was trained on" in str(Text(page.render(run)))
    monkeypatch.undo()
    (whole.parent / "data").rename(whole.parent / "away")
    try:
        text = str(Text(page.render(run)))
    finally:
        (whole.parent / "away").rename(whole.parent / "data")
    assert "data: not a prepared data set" in text
    facts = checkpoint.read_meta(run)["manifest"]["facts"]
    assert facts["data"]["fingerprint"] in text and f"{facts['data']['tokens']:,}" in text
    (whole.parent / "target").rename(whole.parent / "moved")
    try:
        text = str(Text(page.render(run)))
    finally:
        (whole.parent / "moved").rename(whole.parent / "target")
    assert "target: target not found, so that tokens cannot be shown" in text


@pytest.mark.parametrize("broken", ["{", '{"accept_length": 1.25, "by_category": {"\\ud800": 1.2}}'])
def test_an_evaluation_that_is_damaged_or_of_another_version_stops_nothing(whole, tmp_path, broken):
    run = bare(whole, tmp_path)
    (run / "evaluate.json").write_text(broken)
    html = commands.report(run).read_text(encoding="utf-8")
    assert ("evaluate.json: not JSON" in html) == (broken == "{") != ("1.250" in html)


def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys, whole):
    for arguments, text in (
        ([tmp_path], "no start/ in it; a run directory, as `eagle3 train` writes it, is wanted"),
        ([whole, "--out", tmp_path], "a directory, a file is wanted"),
        ([whole, "--out", tmp_path / "no/r.html"], "No such file or directory"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.run(cli.app, "eagle3", ["report", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert end.value.code == 2 and out == "" and text in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_where_it_is_and_how_large(whole, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(cli.app, "eagle3", ["report", str(whole), "--out", str(tmp_path / "r.html")])
    size = (tmp_path / "r.html").stat().st_size
    assert (
        end.value.code == 0 and capsys.readouterr().out == f"{tmp_path / 'r.html'}: {size / 1024:,.0f} kB\n"
    )
