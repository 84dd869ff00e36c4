"""The page in a real Chromium: its contents, its controls, and its security."""

import base64
from dataclasses import replace
from pathlib import Path

import pytest

from tests.accessibility import find_violations
from tests.browser import Browser, Tab
from tests.predict.preflight.examples import (
    ALL,
    FITTING,
    HUGE,
    OP,
    OUT_OF_MEMORY,
    SMALL,
    TWO_SLICES,
)
from tests.predict.preflight.render.reading import column, numbers, press
from xlashard.analysis.explain.sections import read_causes
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.hlo.module import Frame
from xlashard.predict.preflight.render.preflight_sections import list_memory_parts
from xlashard.predict.preflight.report.comparison import compare, page
from xlashard.predict.preflight.report.preflight_report import PreflightReport

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent


@pytest.mark.parametrize("name", ALL)
def test_page_shows_every_report_without_network_requests(browser: Browser, name: str) -> None:
    report = ALL[name]
    with browser.page(report.to_html()) as tab:
        assert tab.requests() == []
        assert tab.complaints() == []
        assert tab.text(".verdict .badge") == ("✓ Fits" if report.fits else "✗ Out of memory")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert_numbers_are_those_of(report, tab)


def assert_numbers_are_those_of(report: PreflightReport, tab: Tab) -> None:
    memory, time = report.memory, report.time
    parts = {part.name: part.nbytes for part in list_memory_parts(memory)}
    parts["all together"] = memory.total_bytes
    parts["free" if memory.fits else "too much"] = abs(memory.spare_bytes)
    shown = zip(column(tab, "#memory", "what"), column(tab, "#memory", "bytes"), strict=True)
    assert {name: int(nbytes) for name, nbytes in shown} == parts
    bars = [float(seconds) for seconds in column(tab, "#time", "takes")]
    resources = [time.compute_seconds, time.hbm_seconds]
    for network, seconds in (("ici", time.ici_seconds), ("dcn", time.dcn_seconds)):
        traffic = [t.seconds for t in time.traffic if t.network == network]
        resources += [seconds, *traffic] if traffic else []
    assert bars == [*resources, time.seconds]
    assert tab.run("document.querySelector('#time .unasked').id") == f"time.{time.bound}"
    tiles = numbers(tab, ".tiles [data-figure]", "figure")
    assert tiles["step time"] == time.seconds
    assert tiles["memory"] == memory.total_bytes / memory.available_bytes
    if report.throughput is not None:
        assert tiles["tokens/s"] == report.throughput.tokens_per_second
        assert tiles["utilisation"] == report.throughput.utilisation
    if report.price is not None:
        assert tiles["price of a step"] == report.price.step
        assert tiles["10⁹ tokens"] == report.price.billion_tokens
    sent = [t.sent_bytes for t in report.traffic]
    assert [int(n) for n in column(tab, "#collectives", "sent")] == sent
    takes = [float(n or 0) for n in column(tab, "#collectives", "takes")]
    assert takes == [t.seconds for t in report.traffic]
    spills = [int(n) for n in column(tab, "#spills", "bytes")]
    assert spills == [spill.device_bytes for spill in report.spills]
    lines = time.lines
    assert [float(n) for n in column(tab, "#lines", "takes")] == [each.seconds for each in lines]
    exposed = [float(n or 0) for n in column(tab, "#lines", "exposed")]
    assert exposed == [each.exposed_seconds for each in lines]
    assert column(tab, "#arguments", "path") == [v.path for v in report.inputs]
    assert column(tab, "#arguments", "sharding") == [v.spec for v in report.inputs]
    held = [int(n) for n in column(tab, "#arguments", "each device")]
    assert held == [v.device_bytes for v in report.inputs]
    points = tab.run("[...document.querySelectorAll('[data-point]')].map(e => e.dataset.point)")
    slopes = tab.run("[...document.querySelectorAll('#roofline tbody tr')].map(r => r.id)")
    assert sorted(slopes) == sorted(f"roofline.{point}" for point in points)
    intensity = float(column(tab, "#roofline", "FLOP per byte")[0])
    matmul_flops = sum(flops for _, flops in time.flops_by_dtype)
    assert intensity == pytest.approx(matmul_flops / time.hbm_bytes)


def test_memory_bar_is_drawn_to_scale(browser: Browser) -> None:
    widths = (
        "Object.fromEntries([...document.querySelectorAll('.card .bar.memory .part')].map(e => "
        "[e.classList[1], e.getBoundingClientRect().width / e.parentNode.clientWidth]))"
    )
    with browser.page(FITTING.to_html()) as tab:
        drawn = tab.run(widths)
    memory = FITTING.memory
    assert drawn["temporaries"] == pytest.approx(
        memory.temporary_bytes / memory.available_bytes, abs=0.003
    )
    assert drawn["free"] == pytest.approx(memory.spare_bytes / memory.available_bytes, abs=0.003)
    with browser.page(OUT_OF_MEMORY.to_html()) as tab:
        drawn = tab.run(widths)
        line = tab.run(
            "(l => (l.getBoundingClientRect().x + 1.5 - l.parentNode.getBoundingClientRect().x) / "
            "l.parentNode.clientWidth)(document.querySelector('#memory .limit'))"
        )
        assert "41.0 GiB more than the 95.7 GiB" in tab.text(".verdict h2")
        assert "more than one iteration of 1 loop of unknown trip count" in tab.text("#time")
    memory = OUT_OF_MEMORY.memory
    assert "free" not in drawn
    assert line == pytest.approx(memory.available_bytes / memory.total_bytes, abs=0.003)


def test_timeline_zooms_and_is_navigable_by_keyboard(browser: Browser) -> None:
    whole = FITTING.time.seconds * (0.1 + 0.9 / 32)
    starts = (
        "Object.fromEntries([...document.querySelectorAll('.row .span')].map(e => "
        "[e.querySelector('title').textContent.split(' ')[0] + ' ' + "
        "e.closest('.row').dataset.track,"
        " (e.getBoundingClientRect().x - e.closest('.canvas').getBoundingClientRect().x) / "
        "e.closest('.canvas').clientWidth]))"
    )
    width = "document.querySelector('.canvas').clientWidth / "
    width += "document.querySelector('.scroller').clientWidth"
    with browser.page(FITTING.to_html()) as tab:
        drawn = tab.run(starts)
        body, layer = FITTING.time.seconds * 0.05, FITTING.time.seconds * 0.9 / 32
        expected = {
            "while.2 loops": body,
            "fusion.1 cores": 0.0,
            "fusion.4 cores": body,
            "fusion.5 cores": body + 0.6 * layer,
            "all-reduce.6 cores": body + 0.9 * layer,
            "all-reduce.6 along tensor": body + 0.9 * layer,
            "copy-start.3 HBM copies": body,
            "fusion.9 cores": body + layer,
        }
        assert drawn == pytest.approx({n: s / whole for n, s in expected.items()}, abs=0.003)
        assert "3 short operations are left out" in tab.text("#timeline .lead")
        assert "between 10.0 GiB and 19.0 GiB" in tab.text("#timeline .keys")
        tab.click("[data-zoom='2']")
        assert tab.run(width) == pytest.approx(2)
        tab.focus(".scroller")
        tab.press("ArrowRight")
        assert tab.text(".span-status").startswith("while.2 runs body 32 ×")
        tab.press("ArrowDown")
        tab.press("ArrowRight")
        status = tab.text(".span-status")
        assert status.startswith(("fusion.5 · product · blf,fd->bld", "all-reduce.6 · all-reduce"))
        assert "model.py:134" in status and "32 ×" in status
        tab.click("[data-zoom='0']")
        assert tab.run(width) == pytest.approx(1)


def test_page_of_a_rejected_program_shows_the_excess(
    browser: Browser,
) -> None:
    with browser.page(replace(FITTING, outcome="out of memory").to_html()) as tab:
        assert tab.text(".verdict h2").startswith(
            "Needs 19.3 GiB of HBM on each device, which the compiler could not fit into 95.7 GiB"
        )
        assert "The compiler rejected the program" in tab.text("#memory .lead")


def test_theme_follows_the_system_until_the_user_chooses(browser: Browser) -> None:
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    with browser.page(SMALL.to_html(), dark=True) as tab:
        dark = tab.run(paper)
        tab.click("[data-theme-choice=light]")
        light = tab.run(paper)
        assert light != dark
        assert tab.run("document.querySelector('[aria-pressed=true]').innerText") == "light"
        tab.go()
        assert tab.run(paper) == light, "the choice is kept"
        tab.focus("[data-theme-choice=auto]")
        tab.press("Enter")
        assert tab.run(paper) == dark
        tab.go()
        assert tab.run(paper) == dark
    with browser.page(SMALL.to_html()) as tab:
        assert tab.run(paper) == light
        tab.click("[data-theme-choice=dark]")
        assert tab.run(paper) == dark
        tab.click("[data-theme-choice=auto]")


@pytest.mark.parametrize("dark", [False, True])
def test_people_can_read_and_reach_a_page(browser: Browser, dark: bool) -> None:
    with browser.page(page([SMALL, TWO_SLICES]), dark=dark) as tab:
        assert find_violations(tab) == []


def test_every_text_has_sufficient_contrast(browser: Browser) -> None:
    script = (SCRIPTS / "contrast.js").read_text(encoding="utf-8")
    with browser.page(page([OUT_OF_MEMORY, SMALL])) as tab:
        for number, least in enumerate((30, 500, 150)):
            panel = f"document.querySelectorAll('.panel')[{number}]"
            tab.run(f"location.hash = {panel}.id")
            tab.until(f"!{panel}.hidden")
            tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
            for scheme in ("light", "dark"):
                tab.prefer(scheme)
                found = tab.run(script)
                assert found["looked_at"] > least
                assert found["too_faint"] == []


def test_page_fits_a_phone_screen(browser: Browser) -> None:
    wide_and_much = replace(OUT_OF_MEMORY, topology=HUGE.topology, mesh=HUGE.mesh)
    with browser.page(wide_and_much.to_html(), width=400, height=800) as tab:
        tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.run("document.documentElement.scrollWidth") <= 400
        wide = tab.run(
            "[...document.querySelectorAll('main *')].filter(e => e.checkVisibility() &&"
            " !e.closest('.unseen, .scrolls, .contents')"
            " && e.getBoundingClientRect().right > 400.5)"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        press(tab, "#collectives", "takes")
        seconds = [float(n) for n in column(tab, "#collectives", "takes")]
        assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("width", [375, 1300])
def test_names_of_5000_characters_wrap(browser: Browser, width: int) -> None:
    name = "k" * 5000
    source = SourceLine(f"/srv/{name}.py", 1, name, in_user_file=True)
    argument = replace(FITTING.inputs[0], path=f"state['{name}']")
    collective = replace(FITTING.traffic[0], argument=argument.path, source=source)
    lines = [replace(each, op_name=f"a/{name}", source=source) for each in FITTING.time.lines]
    report = replace(
        FITTING,
        name=name,
        inputs=(argument, *FITTING.inputs),
        traffic=(collective, *FITTING.traffic),
        time=replace(FITTING.time, lines=tuple(lines)),
    )
    with browser.page(report.to_html(), width=width) as tab:
        assert tab.run("document.documentElement.scrollWidth") == width
        most = "Math.max(...[...document.querySelectorAll('table')].map(e => e.scrollWidth))"
        assert tab.run(most) < max(width, 1500)


def test_page_is_readable_without_scripts(browser: Browser) -> None:
    with browser.page(TWO_SLICES.to_html(), scripts=False) as tab:
        snapshot = tab.call("DOMSnapshot.captureSnapshot", computedStyles=[])
        strings = snapshot["strings"]
        document = snapshot["documents"][0]
        laid_out = [strings[n] for n in document["layout"]["text"] if n >= 0]
        text = "\n".join(laid_out)
    assert "Scripts are off" in text
    assert "Download JSON" not in text
    assert "any kind" not in text
    for words in ("76.4 GiB (80%) to spare", "all-reduce", "Mesh on the torus", "config"):
        assert words in text
    assert text.count("state['params']") >= len(TWO_SLICES.inputs) // 4


def test_collective_leads_to_its_source_and_its_bar(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("a = 1\nb = '</code><script>'\nc = dot(a, b)\nd = 4\n")
    Path("secret.txt").write_text("secret\n")
    source = SourceLine(str(tmp_path / "model.py"), 3, "block", True)
    called = replace(source, callers=(Frame(source.file, 1, "step"),))
    odd = [
        called,
        replace(source, file=str(tmp_path / "secret.txt"), line=1),
        replace(source, file=pytest.__file__, line=2),
        replace(source, line=99),
        replace(source, file="gone\0.py"),
    ]
    traffic = [
        replace(FITTING.traffic[0], source=each, op_name=OP.format("blf,fd->bld")) for each in odd
    ]
    report = replace(
        FITTING, traffic=(*traffic, *FITTING.traffic[1:]), excerpts=read_causes(traffic)
    )
    assert [excerpt.line for excerpt in report.excerpts] == [3, 1]
    # The page is written where the files are others, or are gone.
    report = PreflightReport.from_json(report.to_json())
    Path("model.py").write_text("other = 1\n" * 9)
    assert "1  secret" not in report.to_html() and "dot(a, b)" not in str(report)
    with browser.page(report.to_html()) as tab:
        assert tab.texts(".source summary") == ["source"]
        tab.click(".source summary")
        own, caller = tab.text(".source pre").split("\nfrom ")
        assert own.splitlines()[0] == "model.py:3"
        assert own.splitlines()[2:4] == ["     2  b = '</code><script>'", "→    3  c = dot(a, b)"]
        assert "→    1  a = 1" in caller and tab.complaints() == []
        tab.point_at("#collectives tbody tr")
        lit = "[...document.querySelectorAll('.lit')].map(e => e.closest('.card').id)"
        assert tab.run(lit) == ["lines", "timeline", "timeline", *["collectives"] * 5]
        tab.point_at(".canvas .span.hbm[data-lights]")
        assert set(tab.run(lit)) == {"lines", "timeline"}


def test_drawing_is_coloured_by_the_selected_axis(browser: Browser) -> None:
    colours = "[...document.querySelectorAll('.chips g')].map(g => getComputedStyle(g).fill)"
    places = "[...document.querySelectorAll('.chips g')].map(g => g.dataset.mesh)"
    with browser.page(FITTING.to_html()) as tab:
        meshes = [tuple(map(int, place.split(","))) for place in tab.run(places)]
        assert len(set(meshes)) == FITTING.topology.chips
        for number, axis in enumerate(FITTING.mesh):
            tab.click(f".choices label:nth-of-type({number + 1})")
            fills = tab.run(colours)
            by_place = {mesh[number]: fill for mesh, fill in zip(meshes, fills, strict=True)}
            assert len(by_place) == len(set(by_place.values())) == axis.size
            assert all(by_place[m[number]] == f for m, f in zip(meshes, fills, strict=True))
            labels = tab.texts(".chips text")
            assert labels == [str(mesh[number]) for mesh in meshes]


def test_hovering_over_a_chip_shows_its_position(browser: Browser) -> None:
    with browser.page(TWO_SLICES.to_html()) as tab:
        tab.click(".choices label:nth-of-type(2)")
        tab.point_at(".chips g[data-at='1,2,0'][data-slice='1'] rect")
        words = "chip (1, 2, 0), slice 1: slice 1, fsdp 2, tensor 2. Its group along fsdp: 8"
        assert tab.text(".chip-status").startswith(words)
        assert tab.run("document.querySelectorAll('.chips .alike').length") == 8
        tab.point_at(".torus .choices legend")
        assert tab.text(".chip-status") == ""
        tab.focus(".slices")
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "PageDown"):
            tab.press(key)
        assert tab.text(".chip-status").startswith(
            "chip (1, 1, 1), slice 0: slice 0, fsdp 3, tensor 1"
        )


def test_page_of_the_largest_topology_stays_small(browser: Browser) -> None:
    html = HUGE.to_html()
    assert len(html) < 600_000
    with browser.page(html) as tab:
        assert tab.run("document.querySelectorAll('*').length") < 8_000
        assert "… 25 more planes …" in tab.texts(".planes .note")
        tab.point_at(".chips g[data-at='15,19,27'] rect")
        assert tab.text(".chip-status").startswith("chip (15, 19, 27): data 27, fsdp 19, tensor 15")


HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&\u202e'


def test_markup_in_names_of_the_program_is_escaped(browser: Browser) -> None:
    collective = FITTING.traffic[-1]
    assert collective.source is not None
    source = replace(collective.source, file=f"/srv/{HOSTILE}/שלום.py", function=HOSTILE)
    hostile = replace(
        FITTING,
        name=HOSTILE,
        title=f"configs/{HOSTILE}",
        mesh=(replace(FITTING.mesh[0], name=HOSTILE), *FITTING.mesh[1:]),
        inputs=(replace(FITTING.inputs[0], path=HOSTILE, spec=HOSTILE),),
        traffic=(
            replace(
                collective,
                suggestion=HOSTILE,
                op_name=HOSTILE,
                argument=HOSTILE,
                along=HOSTILE,
                source=source,
            ),
        ),
        versions=replace(FITTING.versions, flags=(("XLA_FLAGS", HOSTILE),)),
        repeated=(replace(FITTING.repeated[0], argument=HOSTILE, spec=HOSTILE, source=source),),
        unmet=(replace(FITTING.unmet[0], requested=HOSTILE, actual=HOSTILE, source=source),),
        forgotten=HOSTILE,
    )
    with browser.page(hostile.to_html()) as tab:
        assert tab.complaints() == []
        assert tab.requests() == []
        assert tab.run("document.images.length") == 0
        assert tab.run("document.title").startswith("configs/</script>")
        shown = HOSTILE.replace("\u202e", r"\u202e")
        assert tab.texts("#flags td") == ["XLA_FLAGS", shown]
        assert f"unknown: {shown}" in tab.texts(".verdict .note")
        assert tab.texts("#arguments td[data-label=path]") == [shown]
        assert tab.text("#collectives td[data-label=cause] .note") == f"Instead: {shown}"
        kept = tab.run("document.getElementById('json-1').textContent")
        assert PreflightReport.from_json(kept) == hostile
        tab.focus("#collectives input")
        tab.type(shown[:20])
        assert len(column(tab, "#collectives", "what")) == 1


def test_tab_key_reaches_controls_with_a_visible_focus(browser: Browser) -> None:
    focused = "(e => e.innerText || e.ariaLabel || e.type)(document.activeElement)"
    with browser.page(SMALL.to_html()) as tab:
        seen = []
        for _ in range(40):
            tab.press("Tab")
            seen.append(tab.run(focused))
            outline = tab.run("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid" or seen[-1] == "radio"
        themes, buttons = ["auto", "light", "dark"], ["Copy summary", "Download JSON"]
        assert seen[:7] == ["Skip to the report", *themes, *buttons, "Memory"]
        assert "radio" in seen


def test_printed_page_is_unfolded_and_has_no_controls(browser: Browser) -> None:
    with browser.page(FITTING.to_html(), print=True, dark=True) as tab:
        assert tab.texts(".filters, .actions, .chip-status") == []
        paper = tab.run("getComputedStyle(document.documentElement).backgroundColor")
        assert paper == "rgb(255, 255, 255)"
        tab.run(
            "addEventListener('beforeprint', () => "
            "window.open_ones = document.querySelectorAll('details[open]').length)"
        )
        pdf = tab.call("Page.printToPDF", printBackground=True)["data"]
        assert base64.b64decode(pdf).startswith(b"%PDF")
        all_of_them = tab.run("document.querySelectorAll('details').length")
        assert tab.run("window.open_ones") == all_of_them
        assert tab.run("document.querySelectorAll('details[open]').length") < all_of_them


def test_report_in_a_notebook_leaves_the_notebook_style_unchanged(browser: Browser) -> None:
    before = "<!DOCTYPE html><meta charset=utf-8><code>code</code><p class=note>note</p>"
    style = "(e => [getComputedStyle(e).font, getComputedStyle(e).color].join())"
    outside = (
        f"['body', 'body > code', 'body > .note'].map(s => {style}(document.querySelector(s)))"
    )
    with browser.page(before) as tab:
        plain = tab.run(outside)
    with browser.page(before + OUT_OF_MEMORY._repr_html_()) as tab:
        assert tab.complaints() == []
        assert tab.requests() == []
        assert tab.run(outside) == plain
        assert "41.0 GiB more" in tab.text(".xlashard-report h2")
        assert tab.run("document.querySelector('.bar.memory').clientHeight") == 40
        assert "rgb(238, 136, 102)" in tab.run(
            "getComputedStyle(document.querySelector('.bar .temporaries')).backgroundColor"
        )


def test_card_keeps_its_style_and_the_theme_of_jupyterlab(browser: Browser) -> None:
    # JupyterLab floats `dt`, aligns cells to the right and gives `code` the paper of its theme.
    theirs = (
        "<!DOCTYPE html><meta charset=utf-8><style>.jp-Common :is(dt, dd) { float: left }"
        ".jp-Common code { background: #eee } :not(.jp-Markdown).jp-Common td { text-align: right }"
        '</style><body data-jp-theme-light="true"><div class=jp-Common>'
    )
    card = compare(FITTING, OUT_OF_MEMORY)._repr_html_() + FITTING._repr_html_()
    styles = "(s, name) => getComputedStyle(document.querySelector(`.xlashard-report ${s}`))[name]"
    with browser.page(theirs + card, dark=True) as tab:
        assert tab.complaints() == []
        assert tab.run(f"({styles})('td', 'textAlign')") == "start"
        assert tab.run(f"({styles})('td.number', 'textAlign')") == "end"
        assert tab.run(f"({styles})('dt', 'float')") == "none"
        assert tab.run(f"({styles})('.subject code', 'backgroundColor')") == "rgba(0, 0, 0, 0)"
        assert tab.run(f"({styles})('.verdict', 'backgroundColor')") == "rgb(255, 255, 255)"
