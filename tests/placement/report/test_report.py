"""The report page and the trace: figures agree with the simulator, and the page works in a real browser."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import re
import shutil
import subprocess
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opgraph_strategies import opgraphs

from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.resizing import resized
from env.simulation.simulator import Simulator
from graphs import generators
from graphs.formatting import format_seconds
from graphs.opgraph import Op, OpGraph, Phase, Tensor
from placement.comparing.cases import what_if
from placement.comparing.methods import Comparison, compare
from placement.comparing.rows import format_percent
from placement.comparing.seeds import compare_seeds
from placement.report import content, schedule_of, write_html, write_trace
from placement.report.content import MAX_MEMORY_STEPS, _modules, _steps, drawn_of, page_data, shown_schedules
from placement.report.layout import layered_layout, levels
from placement.report.page import render_html
from placement.results.result import Result

EVIL = '</script><script>window.hit = 1</script><img src=x onerror="window.hit = 2">&amp;"\u2028'
SCOPE = "among placements that split no op and overlap no steps"
METHODS = ("single_device", "heft", "expert", "round_robin", "sequential_fill")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _cluster(n: int = 3, bytes_per_s: float = 1e9, memory_bytes: int = 10**12) -> Cluster:
    devices = tuple(
        Device(f"gpu{i}", "gpu", memory_bytes, {"float32": 1e12}, 1e11, 1e-6, model="<b>V100</b>") for i in range(n)
    )
    links = tuple(link for d in devices for link in both_ways(d.name, "pcie", bytes_per_s, 1e-6))
    return Cluster("3x<i>gpu</i>", devices, links)


def _branches(n_branches: int = 6, length: int = 20, name: str = "net<br>") -> OpGraph:
    """Independent chains between a first and a last op, over two phases; the first op's name is hostile."""
    ops, tensors = [Op(EVIL, "aten.split", 1e6, 1e6)], []
    for b in range(n_branches):
        for k in range(length):
            phase = Phase.FORWARD if k < length // 2 else Phase.BACKWARD
            kind = f"aten.kind{(k + b) % 14}"
            ops.append(
                Op(f"b{b}.{k}", kind, 1e8 * (1 + b % 3), 1e6, 10_000, phase=phase, module=f"branch.{b}.layer{k}")
            )
            before = f"b{b}.{k - 1}" if k else EVIL
            tensors.append(Tensor(before, 20_000, (ops[-1].name,)))
    ops.append(Op("join", "aten.cat", 1e6, 1e6))
    tensors += [Tensor(f"b{b}.{length - 1}", 20_000, ("join",)) for b in range(n_branches)]
    first = Tensor(EVIL, 20_000, tuple(f"b{b}.0" for b in range(n_branches)))
    return OpGraph.build(ops, [first, *(t for t in tensors if t.producer != EVIL)], name=name)


def _with_infeasible(comparison: Comparison) -> Comparison:
    best = comparison.results[0]
    failed = dataclasses.replace(best, method="mite", chosen="mite", answer=None, reason=f"no room for {EVIL}")
    return dataclasses.replace(comparison, results=(*comparison.results, failed))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return _with_infeasible(compare(_branches(), _cluster(), METHODS, seed=3))


@pytest.fixture(scope="module")
def problem(comparison: Comparison) -> Problem:
    return Problem(comparison.graph, comparison.cluster)


# -- words ------------------------------------------------------------------------------------------------------


def test_headline_names_the_winner_and_the_distance(comparison: Comparison) -> None:
    best = comparison.best
    assert best is not None
    assert best.gap is not None
    speedup = comparison.speedup(best)
    assert speedup is not None
    assert speedup > 1.5
    gap = format_percent(best.gap)
    assert comparison.headline() == (
        f"{best.method} is {speedup:.2f}× faster than one device, at most {gap} from optimal {SCOPE}."
    )
    page = render_html(comparison, "placement compare")
    assert page.count(SCOPE) >= 2  # in the headline and beside the gap


def test_headline_says_when_one_device_is_best() -> None:
    chain = generators.layered(30, seed=0, ccr=50.0)
    joined = generators.fork_join(30, seed=1, ccr=50.0)  # no part of it stands alone
    everything = compare(joined, _cluster(bytes_per_s=1e3), evaluations=200)
    assert everything.headline() == f"One device is best: no method is faster, and it is proven optimal {SCOPE}."
    found = compare(chain, _cluster(bytes_per_s=1e3), METHODS)
    assert found.headline().startswith(
        "None of sequential_fill, heft, expert and round_robin is faster than one device"
    )
    without = compare(chain, _cluster(bytes_per_s=1e3), ["round_robin"])
    single_s = found.single_device_s
    assert single_s is not None
    gap = format_percent((single_s - found.lower_bound_s) / single_s)
    assert without.headline().endswith(f"it is at most {gap} from optimal {SCOPE}.")


def test_headline_without_one_device_or_without_anything(comparison: Comparison) -> None:
    alone = dataclasses.replace(comparison, single_device_s=None)
    assert alone.headline().startswith("One device is not enough in the orders tried; ")
    devices = tuple(dataclasses.replace(device, memory_bytes=1) for device in alone.cluster.devices)
    proved = dataclasses.replace(alone, cluster=dataclasses.replace(alone.cluster, devices=devices))
    assert proved.headline().startswith("One device is not enough; ")
    failed = tuple(r for r in comparison.results if not r.feasible)
    assert dataclasses.replace(comparison, results=failed).headline() == "No method found a placement that fits."


def test_headline_says_ties(comparison: Comparison) -> None:
    best = comparison.results[0]
    twin = dataclasses.replace(best, method="twin", chosen="twin")
    tied = dataclasses.replace(comparison, results=(best, twin, *comparison.results[1:]))
    assert tied.headline().startswith(f"{best.method} and twin tie, ")


@given(st.floats(0, 1))
def test_percent_never_understates(fraction: float) -> None:
    shown = float(format_percent(fraction).removesuffix(" %"))
    assert shown >= 100 * fraction - 1e-5
    assert shown <= 100 * fraction + 1


# -- layout -----------------------------------------------------------------------------------------------------


@given(opgraphs(max_ops=12))
def test_layout_follows_edges_and_keeps_its_distance(graph: OpGraph) -> None:
    layout = layered_layout(graph)
    assert np.array_equal(layout.node_of, np.arange(graph.n_ops))
    producer, consumer, _ = graph.edge_list
    assert np.all(layout.x[producer] < layout.x[consumer])
    assert {*zip(layout.source.tolist(), layout.target.tolist(), strict=True)} == {
        *zip(producer.tolist(), consumer.tolist(), strict=True)
    }
    for level in np.unique(layout.x):
        assert np.all(np.diff(np.sort(layout.y[layout.x == level])) > 1 - 1e-9)


def test_parallel_chains_are_drawn_as_parallel_lines() -> None:
    layout = layered_layout(_branches(4, 10))
    for b in range(4):
        rows = layout.y[1 + 10 * b : 1 + 10 * (b + 1)]
        assert np.ptp(rows) < 0.3
    assert np.all(np.diff(np.sort(layout.y[1:41:10])) > 0.9)


def test_an_op_without_inputs_is_drawn_next_to_its_consumer() -> None:
    ops = [Op(name) for name in ("a", "b", "c", "weight")]
    graph = OpGraph.build(ops, [Tensor("a", 1, ("b",)), Tensor("b", 1, ("c",)), Tensor("weight", 1, ("c",))])
    assert levels(graph).tolist() == [0, 1, 2, 1]


def test_a_large_graph_is_drawn_as_few_groups_of_its_ops() -> None:
    graph = _branches(10, 40)
    layout = layered_layout(graph, max_nodes=100)
    assert len(layout.x) <= 100
    assert set(layout.node_of.tolist()) == set(range(len(layout.x)))
    level = levels(graph)
    for node in range(len(layout.x)):
        assert np.ptp(level[layout.node_of == node]) <= 4  # near in level
    assert np.all(layout.source != layout.target)


# -- data -------------------------------------------------------------------------------------------------------


def _unpacked(text: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def test_schedules_of_the_page_are_the_recorded_results(comparison: Comparison, problem: Problem) -> None:
    shown = shown_schedules(problem, comparison)
    times = [one.score.step_time_s for one in shown]
    assert times == sorted(times)
    assert len({round(t, 12) for t in times}) == len(times)
    assert any(one.result.method == "single_device" for one in shown)
    assert all(one.score.step_time_s == one.result.step_time_s for one in shown)
    data = page_data(problem, shown, drawn_of(problem, shown), comparison.lower_bound_s)
    for one, packed in zip(shown, data["schedules"], strict=True):
        assert np.allclose(_unpacked(packed["start"], "<f4"), one.schedule.op_start_s, rtol=1e-6)
        assert np.array_equal(_unpacked(packed["device"], "<u2"), one.result.device_numbers())
        assert sum(packed["pair_bytes"]) == one.score.bytes_moved
        peaks = [_unpacked(m["bytes"], "<f8").max() for m in packed["memory"]]
        assert peaks == one.score.peak_bytes.tolist()


def test_a_tie_with_one_device_is_shown_as_one_device(comparison: Comparison, problem: Problem) -> None:
    assert comparison.ties == {"sequential_fill": "single_device"}
    methods = [one.result.method for one in shown_schedules(problem, comparison)]
    assert "sequential_fill" not in methods
    assert 'data-schedule="single_device"><th scope="row" data-v="sequential_fill">' in render_html(comparison)


def test_thinned_memory_keeps_the_peak() -> None:
    rng = np.random.default_rng(5)
    used = rng.integers(0, 1000, 50_000)
    used[31_234] = 5000
    thin = _steps(np.arange(50_000) / 50_000, used)
    assert len(_unpacked(thin["bytes"], "<f8")) == MAX_MEMORY_STEPS
    assert _unpacked(thin["bytes"], "<f8").max() == 5000


def _stacked(n_layers: int) -> OpGraph:
    """A language model as seen by its modules: an embedding, layers of two parts each, a head."""
    modules = [
        "model.embed",
        *(f"model.layers.{k}.{part}" for k in range(n_layers) for part in ("attn", "mlp")),
        "head",
    ]
    ops = [Op(f"op{i}", flops=1e6, module=module) for i, module in enumerate(modules)]
    return OpGraph.build(ops, [Tensor(a.name, 1, (b.name,)) for a, b in itertools.pairwise(ops)])


@pytest.mark.parametrize(("n_layers", "n_colours"), [(80, 82), (40, 42), (6, 14)])
def test_layers_have_colours_of_their_own(n_layers: int, n_colours: int) -> None:
    graph = _stacked(n_layers)
    names, of = _modules(graph, np.ones(graph.n_ops))
    assert len(names) == n_colours
    if n_layers > 6:
        assert names == ["model.embed", *(f"model.layers.{k}" for k in range(n_layers)), "head"]
    assert np.all(np.diff(of) >= 0)  # in the order in which they run: a gradient over the step


def test_very_many_layers_share_colours_with_their_neighbours() -> None:
    names, of = _modules(_stacked(1000), np.ones(2002))
    assert 80 < len(names) <= 160
    assert names[1] == "model.layers.0 to 6"
    assert np.all(np.diff(of) >= 0)


def test_notes_of_methods_are_on_the_page(comparison: Comparison) -> None:
    noted = [dataclasses.replace(r, note=f"as {EVIL} said") if k < 2 else r for k, r in enumerate(comparison.results)]
    text = render_html(dataclasses.replace(comparison, results=tuple(noted)))
    assert text.count("&lt;/script&gt;&lt;script&gt;window.hit = 1") >= 1
    found = re.search(r'<ul class="notes">(.*?)</ul>', text, re.DOTALL)
    assert found is not None
    assert found[1].count("<li>") == 1  # one sentence of two methods
    assert f"<code>{noted[0].method}</code>, <code>{noted[1].method}</code>" in found[1]
    assert '<ul class="notes">' not in render_html(comparison)


def test_colours_by_module_cover_every_op() -> None:
    graph = _branches()
    names, of = _modules(graph, np.ones(graph.n_ops))
    assert len(names) <= 160
    assert set(of.tolist()) == set(range(len(names)))
    for i, module in enumerate(graph.modules):
        assert names[of[i]] == "(no module)" or f"{module}.".startswith(f"{names[of[i]]}.")


# -- the page as text -------------------------------------------------------------------------------------------


def test_page_is_one_file_that_asks_nothing_of_a_network(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html(comparison, path, "placement compare x --seed 3")
    text = path.read_text(encoding="utf-8")
    assert "placement compare x --seed 3" in text
    assert comparison.graph.hash in text
    assert comparison.cluster.hash in text
    assert not re.search(r"<[^>]*\s(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", text)
    policy = re.search(r"Content-Security-Policy\" content=\"(default-src 'none'; [^\"]*)\"", text)
    assert policy is not None
    own = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    assert policy[1].partition("script-src ")[2] == " ".join(map(_digest, own))
    assert len(text) < 10e6


def _digest(script: str) -> str:
    """As a policy names a script that may run."""
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"


def test_names_are_escaped(comparison: Comparison) -> None:
    text = render_html(comparison)
    assert "<script>window.hit" not in text
    assert "<img src=x" not in text
    assert "3x&lt;i&gt;gpu&lt;/i&gt;" in text


def test_a_sweep_is_drawn_with_what_does_not_fit() -> None:
    box = _cluster(4, memory_bytes=70_000 * 20)
    graph = _branches(4, 10, name="sweep<br>")
    graph = dataclasses.replace(graph, parameter_bytes=np.full(graph.n_ops, 50_000))  # 42 x 50 kB: two devices at least
    found = what_if(graph, [resized(box, n) for n in (1, 2, 4)], ["expert", "m_topo"], sweep="devices")
    assert [case.objective_s is None for case in found.cases] == [True, False, False]
    text = render_html(dataclasses.replace(found, command="placement compare <b>"))
    assert "sweep&lt;br&gt;" in text
    assert "placement compare &lt;b&gt;" in text
    assert "At least 2 devices are needed." in text
    assert "<script" not in text
    assert not re.search(r"<[^>]*\s(src|href)\s*=|@import|url\(", text)
    (curves,) = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]  # no speed-up
    circles = [c for c in curves.iter("circle") if c.get("class") == "best"]
    shown = [str(c.findtext("title")) for c in circles]
    assert shown == [f"step time with {c.devices}: {format_seconds(c.objective_s or 0.0)}" for c in found.cases[1:]]
    heights = [float(c.get("cy", "nan")) for c in curves.iter("circle") if c.get("class") == "bound"]
    assert all(bound >= float(c.get("cy", "nan")) for bound, c in zip(heights, circles, strict=True))  # y goes down
    assert len([r for r in curves.iter("rect") if r.get("class") == "unfit"]) == 1
    assert text.count('class="infeasible"') == 1


def test_speed_up_and_efficiency_are_drawn() -> None:
    found = what_if(_branches(4, 10), [resized(_cluster(3), n) for n in (1, 2, 3)], ["heft"], sweep="devices")
    curves = re.findall(r"<svg.*?</svg>", render_html(found), re.DOTALL)
    assert len(curves) == 2
    texts = [str(t.text) for t in ElementTree.fromstring(curves[1]).iter("text") if t.get("class") == "beside"]
    assert texts == [f"{(case.speedup or 0) / case.devices:.0%}" for case in found.cases]


def test_clusters_are_drawn_as_bars() -> None:
    slow, fast = dataclasses.replace(_cluster(2, 1e6), name="slow<i>"), _cluster(3, 1e9)
    text = render_html(what_if(_branches(4, 10), [slow, fast], ["heft"]))
    (chart,) = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    bars = [bar for bar in chart.iter("rect") if bar.get("class") in ("best", "other")]
    titles = [str(bar.findtext("title")).partition(":")[0] for bar in bars]
    assert list(zip([bar.get("class") for bar in bars], titles, strict=True)) == [
        ("other", "slow<i>"),
        ("best", "3x<i>gpu</i>"),
    ]
    marks = [path.get("d", "") for path in chart.iter("path") if path.get("class") == "bound"]
    for bar, mark in zip(bars, marks, strict=True):
        at = float(mark.removeprefix("M").split()[0])
        assert at <= float(bar.get("x", "nan")) + float(bar.get("width", "nan")) + 0.1


def test_every_page_opens_with_a_sentence_a_number_and_a_picture(comparison: Comparison) -> None:
    graph, box = _branches(4, 10), _cluster(3)
    swept = what_if(graph, [resized(box, n) for n in (1, 2, 3)], ["heft"], sweep="devices")
    for found in (comparison, swept, compare_seeds(graph, box, ["heft", "hash"], seeds=(0, 1))):
        body = render_html(found).partition("<body>")[2]
        parts = ('class="headline"', 'class="tiles"', '<svg class="curves"', "<table>", 'class="replay"')
        places = [body.find(part) for part in parts if part != 'class="replay"' or found.command]
        assert -1 not in places
        assert places == sorted(places)


def test_a_failed_write_leaves_nothing(comparison: Comparison, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        write_html(comparison, tmp_path / "missing" / "report.html")
    assert list(tmp_path.iterdir()) == []


# -- the page in a browser --------------------------------------------------------------------------------------

PROBE = r"""
const seen = {};
const frame = () => new Promise((done) => setTimeout(done, 100));
const colours = (canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return new Set(new Uint32Array(copy.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
};
const order = () => [...document.querySelectorAll("#rows tbody tr")].map((row) => row.cells[0].dataset.v);
const at = (canvas, type, x, y) => {
  const box = canvas.getBoundingClientRect();
  const where = { clientX: box.left + x, clientY: box.top + y, button: 0, pointerId: 1, pointerType: "mouse" };
  canvas.dispatchEvent(new PointerEvent(type, { ...where, bubbles: true }));
};
(async () => {
  const [timelineChart, graphChart] = document.querySelectorAll(".chart canvas");
  timelineChart.setPointerCapture = graphChart.setPointerCapture = () => {}; // no real pointer to capture
  await frame();
  seen.methods = [...document.querySelectorAll("#picker button")].map((button) => button.firstChild.textContent);
  seen.views = [];
  for (const button of document.querySelectorAll("#picker button")) {
    button.click();
    await frame();
    seen.views.push({
      timeline: Number(timelineChart.dataset.marks), graph: Number(graphChart.dataset.marks),
      range: document.getElementById("timeline-range").textContent,
      colours: [colours(timelineChart), colours(graphChart)],
      load: document.querySelectorAll("#load .loads .name").length,
      traffic: document.querySelector("#traffic .body").textContent,
    });
  }
  document.querySelector("#picker button").click();
  const sorters = document.querySelectorAll("#rows thead button");
  sorters[0].click();
  seen.byName = order();
  sorters[1].click();
  seen.byTime = order();
  sorters[1].click();
  seen.byTimeDown = order();
  seen.choices = [...document.querySelectorAll("#colour option")].map((option) => option.value);
  for (const choice of seen.choices) {
    document.getElementById("colour").value = choice;
    document.getElementById("colour").dispatchEvent(new Event("change"));
    await frame();
  }
  await frame();
  const lane = timeline.lanes.find((l) => l.type === "device" && l.items.includes(0));
  at(timelineChart, "pointermove", plotArea(timelineChart.clientWidth).left + 0.5, lane.y + 3);
  seen.tip = document.getElementById("tip").textContent;
  at(timelineChart, "pointerdown", 400, 60);
  at(timelineChart, "pointermove", 500, 60);
  at(timelineChart, "pointerup", 500, 60);
  await frame();
  seen.zoomed = document.getElementById("timeline-range").textContent;
  seen.zoomedMarks = Number(timelineChart.dataset.marks);
  timelineChart.dispatchEvent(new MouseEvent("dblclick"));
  seen.whole = document.getElementById("timeline-range").textContent;
  document.querySelector("#graph [data-zoom=in]").click();
  await frame();
  seen.graphZoomed = Number(graphChart.dataset.marks);
  seen.more = !document.querySelector("#rows .more").hidden;
  const headBox = () => document.querySelector("#timeline .head").getBoundingClientRect();
  scrollTo(0, scrollY + headBox().top + 60); // into the timeline: its title would be above the screen
  await frame();
  seen.covered = headBox().top < document.getElementById("picker").getBoundingClientRect().bottom - 1;
  seen.barHeight = document.getElementById("picker").offsetHeight;
  seen.reason = document.querySelector(".infeasible .reason").textContent;
  seen.legend = document.getElementById("graph-legend").textContent;
  seen.hit = window.hit ?? null;
  seen.wide = document.documentElement.scrollWidth <= innerWidth;
  seen.done = true;
})().catch((error) => { seen.error = String(error.stack); }).finally(() => {
  document.documentElement.dataset.seen = btoa(unescape(encodeURIComponent(JSON.stringify(seen))));
});
"""


def _browse(page: str, tmp_path: Path, *flags: str, probe: str = PROBE) -> tuple[dict[str, Any], list[str]]:
    """Open a page with a script of ours at its end; what the script saw, and all the browser's console said."""
    assert CHROMIUM is not None
    path = tmp_path / "page.html"
    # With a virtual clock and nobody looking, Chromium draws next to no frames: let time alone make them.
    frames = "window.requestAnimationFrame = (draw) => setTimeout(draw, 16);"
    page = page.replace("script-src ", f"script-src {_digest(frames)} {_digest(probe)} ")
    # Behind the policy, which holds for these too.
    page = page.replace("</head>", f"<script>{frames}</script></head>")
    page = page.replace("</body>", f"<script>{probe}</script></body>")
    path.write_text(page, encoding="utf-8")
    arguments = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    arguments += "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=20000"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *arguments.split(), profile, *flags, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(base64.b64decode(found[1])), console


@pytest.fixture(scope="module")
def seen(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    page = render_html(comparison, "placement compare x")
    seen, console = _browse(page, tmp_path_factory.mktemp("browser"), "--window-size=1300,900")
    assert console == []
    assert "error" not in seen
    assert seen["done"]
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
class TestBrowser:
    def test_every_chart_is_drawn_for_every_schedule(self, seen: dict[str, Any], comparison: Comparison) -> None:
        assert len(seen["views"]) == len(seen["methods"]) >= 3
        for view in seen["views"]:
            assert view["timeline"] >= 10
            assert view["graph"] == comparison.graph.n_ops
            assert min(view["colours"]) > 20  # an empty canvas has one
            assert view["load"] == comparison.cluster.n_devices
            assert view["traffic"] != ""
        time_s = {r.method: r.step_time_s for r in comparison.results}
        assert [v["range"] for v in seen["views"]] == [format_seconds(time_s[m] or 0.0) for m in seen["methods"]]
        assert len({v["timeline"] for v in seen["views"]}) == len(seen["views"])

    def test_the_table_sorts_with_infeasible_rows_last(self, seen: dict[str, Any], comparison: Comparison) -> None:
        assert seen["byName"] == sorted(seen["byName"])
        time_s = {r.method: r.step_time_s for r in comparison.results}
        for order, down in ((seen["byTime"], False), (seen["byTimeDown"], True)):
            assert order[-1] == "mite"
            times = [time_s[method] for method in order[:-1]]
            assert times == sorted(times, reverse=down)

    def test_pointing_at_an_op_names_it_and_hostile_names_stay_text(self, seen: dict[str, Any]) -> None:
        assert EVIL in seen["tip"]
        assert "split" in seen["tip"]
        assert seen["reason"] == f"no room for {EVIL}"
        assert seen["hit"] is None

    def test_the_bar_of_schedules_covers_no_controls(self, seen: dict[str, Any]) -> None:
        assert not seen["covered"]
        assert not seen["more"]  # there is room for the whole table

    def test_zooming(self, seen: dict[str, Any], comparison: Comparison) -> None:
        assert " to " in seen["zoomed"]
        assert " to " not in seen["whole"]
        assert seen["zoomedMarks"] > 0
        assert 0 < seen["graphZoomed"] < comparison.graph.n_ops

    def test_colours(self, seen: dict[str, Any]) -> None:
        assert seen["choices"] == ["kind", "module", "phase"]

    def test_a_dark_and_narrow_screen(self, comparison: Comparison, tmp_path: Path) -> None:
        flags = ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")
        seen, console = _browse(render_html(comparison), tmp_path, *flags)
        assert console == []
        assert "error" not in seen
        assert seen["wide"]  # nothing sticks out sideways
        assert seen["more"]
        assert not seen["covered"]
        assert seen["barHeight"] < 60  # one line

    def test_a_page_without_any_schedule(self, comparison: Comparison, tmp_path: Path) -> None:
        failed = tuple(r for r in comparison.results if not r.feasible)
        page = render_html(dataclasses.replace(comparison, results=failed, single_device_s=None))
        probe = (
            "const seen = {cards: document.querySelectorAll('.card').length, text: document.body.innerText};"
            "document.documentElement.dataset.seen = btoa(unescape(encodeURIComponent(JSON.stringify(seen))));"
        )
        seen, console = _browse(page, tmp_path, probe=probe)
        assert console == []
        assert seen["cards"] == 3
        assert "No method found a placement that fits." in seen["text"]

    def test_a_very_large_problem(
        self, comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"MAX_OPS": 50, "MAX_BARS": 40, "MAX_TRANSFERS": 5, "MAX_DEVICES": 2}.items():
            monkeypatch.setattr(content, name, value)
        monkeypatch.setattr(content, "MAX_SCHEDULED_OPS", 150)
        seen, console = _browse(render_html(comparison), tmp_path)
        assert console == []
        assert "error" not in seen
        (view,) = seen["views"]
        assert view["load"] == 3  # two devices and all others
        assert view["timeline"] > 10
        assert view["graph"] == comparison.graph.n_ops
        assert "1 other device:" in seen["legend"]

    def test_a_step_of_no_time(self, tmp_path: Path) -> None:
        graph = OpGraph.build([Op("a", kernels=0), Op("b", kernels=0)], [Tensor("a", 0, ("b",))])
        page = render_html(compare(graph, _cluster(2), ["single_device"]))
        probe = "document.documentElement.dataset.seen = btoa(document.documentElement.dataset.ready);"
        seen, console = _browse(page, tmp_path, probe=probe)
        assert seen is True
        assert console == []


# -- trace ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[dict[str, Any]]]:
    result = comparison.results[0]
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(result, path)
    document = json.loads(path.read_text(encoding="utf-8"))
    return result, document["traceEvents"]


def test_trace_has_every_op_and_transfer_where_it_ran(
    traced: tuple[Result, list[dict[str, Any]]], problem: Problem
) -> None:
    result, events = traced
    score, schedule = schedule_of(problem, result)
    ops = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert {e["name"] for e in ops} == set(problem.graph.op_names)
    assert max(e["ts"] + e["dur"] for e in ops) == pytest.approx(score.step_time_s * 1e6)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for d, device in enumerate(problem.cluster.devices):
        mine = [e for e in ops if e["tid"] == d]
        assert sum(e["dur"] for e in mine) == pytest.approx(score.busy_s[d] * 1e6)
        assert tracks[1, d].startswith(device.name)
    sent: dict[int, float] = defaultdict(float)
    for e in events:
        if e["ph"] == "X" and e["pid"] == 2:
            sent[e["tid"]] += e["args"]["bytes"]
    assert [sent[link] for link in range(len(problem.cluster.links))] == score.link_bytes.tolist()
    arrows = [[e["id"] for e in events if e["ph"] == kind] for kind in ("s", "t", "f")]
    assert arrows == [list(range(len(schedule.transfer_tensor)))] * 3


def test_trace_tracks_never_overlap_and_memory_reaches_the_peak(
    traced: tuple[Result, list[dict[str, Any]]],
) -> None:
    result, events = traced
    tracks = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))
    peaks: dict[str, int] = defaultdict(int)
    for e in events:
        if e["ph"] == "C":
            peaks[e["name"].removeprefix("memory ")] = max(peaks[e["name"].removeprefix("memory ")], e["args"]["bytes"])
    assert peaks == result.peak_bytes


def test_schedule_of_repeats_the_result(comparison: Comparison, problem: Problem) -> None:
    for result in comparison.results[:-1]:
        score, schedule = schedule_of(problem, result)
        assert score.step_time_s == result.step_time_s
        again = Simulator(problem).score(Plan(schedule.device, result.order_numbers()))
        assert again.peak_bytes.tolist() == list((result.peak_bytes or {}).values())
