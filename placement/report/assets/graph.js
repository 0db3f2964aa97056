// The graph in layers, left to right, every op in the colour of its device.

const drawing = {
  x: unpack(page.graph.x, Float32Array),
  y: unpack(page.graph.y, Float32Array),
  weight: unpack(page.graph.weight, Float32Array),
  members: unpack(page.graph.members, Uint32Array),
  op: unpack(page.graph.op, Uint32Array),
  source: unpack(page.graph.source, Uint32Array),
  target: unpack(page.graph.target, Uint32Array),
  device: page.graph.device.map((text) => unpack(text, Uint16Array)),
};
const graphCard = document.getElementById("graph");
const graphCanvas = graphCard.querySelector("canvas");
const extent = {
  x: drawing.x.reduce((a, b) => Math.max(a, b), 0) || 1,
  y: drawing.y.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 0.5,
};
const view = { zoom: 1, x: 0.5, y: 0, drag: null, hover: -1 }; // x, y: the point of the drawing in the middle

function graphPlace(width, height) {
  const spanX = ((width - 40) / extent.x) * view.zoom;
  const spanY = Math.min(((height - 40) / (2 * extent.y)), 26) * Math.max(1, view.zoom ** 0.75);
  return {
    spanX,
    spanY,
    x: (node) => width / 2 + (drawing.x[node] - view.x * extent.x) * spanX,
    y: (node) => height / 2 + (drawing.y[node] - view.y * extent.y) * spanY,
  };
}

function nodeRadii(place) {
  const heaviest = drawing.weight.reduce((a, b) => Math.max(a, b), 0) || 1;
  const largest = Math.min(14, Math.max(4.5, 2.2 * Math.min(place.spanX, place.spanY)));
  return Float32Array.from(drawing.weight, (weight) => Math.max(1.1, largest * Math.sqrt(weight / heaviest)));
}

function drawGraph(context, width, height, colours) {
  const device = drawing.device[state.shown];
  if (!device) return 0;
  const place = graphPlace(width, height);
  context.clearRect(0, 0, width, height);
  const strands = (choose, colour, alpha, line) => {
    context.strokeStyle = colour;
    context.globalAlpha = alpha;
    context.lineWidth = line;
    context.beginPath();
    for (let e = 0; e < drawing.source.length; e++) {
      if (!choose(drawing.source[e], drawing.target[e])) continue;
      const [x0, y0, x1, y1] = [place.x(drawing.source[e]), place.y(drawing.source[e]), place.x(drawing.target[e]), place.y(drawing.target[e])];
      if (x1 < -20 || x0 > width + 20) continue;
      const bend = (x1 - x0) / 2;
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    }
    context.stroke();
  };
  const crossing = drawing.source.reduce((count, a, e) => count + (device[a] !== device[drawing.target[e]]), 0);
  const strength = Math.max(0.14, Math.min(0.6, (400 / crossing) * Math.sqrt(view.zoom))); // many lines: fainter
  strands((a, b) => device[a] === device[b], colours.faint, 0.35, 0.7);
  devices.forEach((_, d) => strands((a, b) => device[a] === d && device[b] !== d, deviceColour(d), strength, 1.1));
  if (view.hover >= 0) strands((a, b) => a === view.hover || b === view.hover, colours.ink, 1, 1.8);
  context.globalAlpha = 1;
  const radius = nodeRadii(place);
  let marks = 0;
  devices.forEach((_, d) => {
    context.fillStyle = deviceColour(d);
    context.beginPath();
    for (let node = 0; node < device.length; node++) {
      const [x, y] = [place.x(node), place.y(node)];
      if (device[node] !== d || x < -20 || x > width + 20) continue;
      context.moveTo(x + radius[node], y);
      context.arc(x, y, radius[node], 0, 2 * Math.PI);
      marks++;
    }
    context.fill();
  });
  if (view.hover >= 0) {
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(place.x(view.hover), place.y(view.hover), radius[view.hover] + 3, 0, 2 * Math.PI);
    context.stroke();
  }
  return marks;
}

const redrawGraph = liveCanvas(graphCanvas, () => Math.min(520, Math.max(240, 60 + 2 * extent.y * 24)), drawGraph);

function zoomGraph(factor, at = 0.5) {
  const zoom = Math.min(400, Math.max(1, view.zoom * factor));
  // The point of the drawing under `at` (a fraction of the width) stays there.
  view.x += (at - 0.5) * (1 / view.zoom - 1 / zoom);
  view.zoom = zoom;
  keepInside();
}

function keepInside() {
  const half = 0.5 / view.zoom;
  view.x = Math.min(1 - half, Math.max(half, view.x));
  view.y = view.zoom === 1 ? 0 : Math.min(1, Math.max(-1, view.y));
  redrawGraph();
}

const wholeGraph = () => {
  Object.assign(view, { zoom: 1, x: 0.5, y: 0 });
  redrawGraph();
};
graphCard.querySelectorAll("[data-zoom]").forEach((button) => {
  const action = { in: () => zoomGraph(1.6), out: () => zoomGraph(1 / 1.6), reset: wholeGraph }[button.dataset.zoom];
  button.addEventListener("click", action);
});
graphCanvas.addEventListener("dblclick", wholeGraph);
graphCanvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoomGraph(0.9985 ** event.deltaY, event.offsetX / graphCanvas.clientWidth);
}, { passive: false });
graphCanvas.addEventListener("keydown", (event) => {
  const keys = { "+": () => zoomGraph(1.6), "=": () => zoomGraph(1.6), "-": () => zoomGraph(1 / 1.6), 0: wholeGraph,
    ArrowLeft: () => { view.x -= 0.15 / view.zoom; keepInside(); }, ArrowRight: () => { view.x += 0.15 / view.zoom; keepInside(); } };
  if (event.ctrlKey || event.metaKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
graphCanvas.addEventListener("pointerdown", (event) => {
  view.drag = { x: event.offsetX, y: event.offsetY, startX: view.x, startY: view.y };
  graphCanvas.setPointerCapture(event.pointerId);
});
graphCanvas.addEventListener("pointermove", (event) => {
  if (!view.drag) return hoverGraph(event);
  const place = graphPlace(graphCanvas.clientWidth, graphCanvas.clientHeight);
  view.x = view.drag.startX - (event.offsetX - view.drag.x) / (place.spanX * extent.x);
  view.y = view.drag.startY - (event.offsetY - view.drag.y) / (place.spanY * extent.y);
  hideTip();
  keepInside();
});
for (const type of ["pointerup", "pointercancel"]) graphCanvas.addEventListener(type, () => { view.drag = null; });
graphCanvas.addEventListener("pointerleave", () => { view.hover = -1; hideTip(); redrawGraph(); });

function hoverGraph(event) {
  const place = graphPlace(graphCanvas.clientWidth, graphCanvas.clientHeight);
  let [best, least] = [-1, 14 ** 2];
  for (let node = 0; node < drawing.x.length; node++) {
    const distance = (place.x(node) - event.offsetX) ** 2 + (place.y(node) - event.offsetY) ** 2;
    if (distance < least) [best, least] = [node, distance];
  }
  if (best !== view.hover) redrawGraph();
  view.hover = best;
  if (best < 0) return hideTip();
  const op = drawing.op[best];
  const members = drawing.members[best];
  const rows = [["kind", ops.kind(op)], ["module", ops.module(op) || "–"], ["device", devices[drawing.device[state.shown][best]].name],
    ["time", `${seconds(drawing.weight[best])} on average`]];
  if (members > 1) rows.splice(0, 1, ["ops", `${members} drawn as one`]);
  showTip(event, ops.names[op], rows);
}

function buildGraphLegend(schedule) {
  const count = schedule.op_counts;
  const entries = devices.map((device, d) => {
    const entry = element("span", count[d] ? "" : "off");
    entry.append(swatch(deviceColour(d)), ` ${device.name}: ${count[d].toLocaleString("en")} ops`);
    return entry;
  });
  document.getElementById("graph-legend").replaceChildren(...entries);
  const drawn = drawing.x.length < page.n_ops ? `${page.n_ops.toLocaleString("en")} ops drawn as ${drawing.x.length.toLocaleString("en")} groups` : "";
  document.getElementById("graph-note").textContent = drawn;
}

onShown(buildGraphLegend);
onShown(redrawGraph);
if (schedules.length) show(0);
else for (const card of document.querySelectorAll(".needs-schedule")) card.remove();
document.documentElement.dataset.ready = "true";
