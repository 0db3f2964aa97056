// The timeline under the hand: zooming, moving, what is under the pointer, and the choice of colours.

// -- zooming and moving ----------------------------------------------------------------------------------------

function setRange(from, to) {
  const total = schedules[state.shown].span;
  const span = Math.min(total, Math.max(to - from, total * 1e-6));
  timeline.from = Math.min(Math.max(0, from), total - span);
  timeline.to = timeline.from + span;
  const whole = span >= total * 0.9999;
  const text = whole ? seconds(total) : `${seconds(timeline.from)} to ${seconds(timeline.to)} of ${seconds(total)}`;
  document.getElementById("timeline-range").textContent = text;
  redrawTimeline();
}

function zoomTimeline(factor, at = (timeline.from + timeline.to) / 2) {
  setRange(at - (at - timeline.from) * factor, at + (timeline.to - at) * factor);
}

function moveTimeline(fraction) {
  const shift = fraction * (timeline.to - timeline.from);
  setRange(timeline.from + shift, timeline.to + shift);
}

function timeAt(x) {
  const area = plotArea(timelineCanvas.clientWidth);
  const fraction = Math.min(1, Math.max(0, (x - area.left) / area.width));
  return timeline.from + fraction * (timeline.to - timeline.from);
}

const wholeStep = () => setRange(0, schedules[state.shown].span);
const timelineKeys = {
  "+": () => zoomTimeline(0.5), "=": () => zoomTimeline(0.5), "-": () => zoomTimeline(2), 0: wholeStep,
  ArrowLeft: () => moveTimeline(-0.2), ArrowRight: () => moveTimeline(0.2),
};

timelineCanvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || !timelineKeys[event.key]) return;
  event.preventDefault();
  timelineKeys[event.key]();
});
timelineCard.querySelectorAll("[data-zoom]").forEach((button) => {
  const action = { in: timelineKeys["+"], out: timelineKeys["-"], reset: wholeStep }[button.dataset.zoom];
  button.addEventListener("click", action);
});
timelineCanvas.addEventListener("dblclick", wholeStep);
timelineCanvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) zoomTimeline(1.0015 ** event.deltaY, timeAt(event.offsetX));
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) moveTimeline((event.deltaX || event.deltaY) / 900);
  else return;
  event.preventDefault();
}, { passive: false });

timelineCanvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  const select = event.pointerType === "mouse" && !event.shiftKey;
  timeline.drag = { select, x0: event.offsetX, x1: event.offsetX, from: timeline.from, to: timeline.to };
  timelineCanvas.setPointerCapture(event.pointerId);
});
timelineCanvas.addEventListener("pointermove", (event) => {
  const { drag } = timeline;
  if (!drag) return hoverTimeline(event);
  drag.x1 = event.offsetX;
  hideTip();
  if (drag.select) return redrawTimeline();
  const shift = ((drag.x0 - drag.x1) / plotArea(timelineCanvas.clientWidth).width) * (drag.to - drag.from);
  setRange(drag.from + shift, drag.to + shift);
});
timelineCanvas.addEventListener("pointerup", () => {
  const { drag } = timeline;
  timeline.drag = null;
  if (drag && drag.select && Math.abs(drag.x1 - drag.x0) > 4) {
    const [from, to] = [timeAt(drag.x0), timeAt(drag.x1)].sort((a, b) => a - b);
    setRange(from, to);
  } else redrawTimeline();
});
timelineCanvas.addEventListener("pointercancel", () => { timeline.drag = null; redrawTimeline(); });
timelineCanvas.addEventListener("pointerleave", () => { timeline.hover = null; hideTip(); redrawTimeline(); });

// -- what is under the pointer ------------------------------------------------------------------------------------

function hoverTimeline(event) {
  const before = timeline.hover;
  timeline.hover = null;
  const lane = timeline.lanes.find((l) => l.type !== "heading" && event.offsetY >= l.y - 1 && event.offsetY <= l.y + l.height + 1);
  const inside = lane && event.offsetX >= plotArea(timelineCanvas.clientWidth).left;
  if (inside && lane.type === "memory") tellMemory(event, lane);
  else if (inside) timeline.hover = tellItem(event, lane);
  else hideTip();
  if (before?.item !== timeline.hover?.item || before?.lane !== timeline.hover?.lane) redrawTimeline();
}

function tellMemory(event, lane) {
  const { time, bytes: used } = schedules[state.shown].memory[lane.d];
  const at = timeAt(event.offsetX);
  let k = 0;
  while (k + 1 < time.length && time[k + 1] <= at) k++;
  const capacity = devices[lane.d].capacity;
  const part = capacity ? ` (${percent(used[k] / capacity)} of ${bytes(capacity)})` : "";
  showTip(event, `${devices[lane.d].name} memory`, [["at", seconds(at)], ["in use", bytes(used[k]) + part]]);
}

function tellItem(event, lane) {
  const pixel = (timeline.to - timeline.from) / plotArea(timelineCanvas.clientWidth).width;
  const at = timeAt(event.offsetX);
  const near = [];
  for (let k = firstEndingAfter(lane, at - 2 * pixel); k < lane.items.length && lane.start[lane.items[k]] <= at + 2 * pixel; k++) {
    near.push(lane.items[k]);
  }
  const hit = near.find((item) => lane.start[item] <= at && lane.end[item] >= at && lane.end[item] - lane.start[item] >= pixel);
  const length = (item) => lane.end[item] - lane.start[item];
  const item = hit ?? near.reduce((best, other) => (best === undefined || length(other) > length(best) ? other : best), undefined);
  if (item === undefined) {
    hideTip();
    return null;
  }
  const rows = lane.type === "device" ? opRows(lane, item) : transferRows(lane, item);
  const others = hit === undefined ? near.length - 1 : 0;
  if (others > 0) rows.push(["and", `${others} more within 2 pixels: zoom in`]);
  const title = lane.type === "device" ? ops.names[item] : `output of ${ops.names[schedules[state.shown].producer[item]]}`;
  showTip(event, title, rows);
  return { lane, item };
}

function opRows(lane, op) {
  const rows = [["kind", ops.kind(op)]];
  if (ops.module(op)) rows.push(["module", ops.module(op)]);
  if (colourGroups.phase.names.length > 1) rows.push(["phase", colourGroups.phase.names[colourGroups.phase.of[op]]]);
  rows.push(["device", devices[lane.d].name], ["start", seconds(lane.start[op])], ["duration", seconds(lane.end[op] - lane.start[op])]);
  return rows;
}

function transferRows(lane, x) {
  const schedule = schedules[state.shown];
  const route = `${devices[schedule.source[x]].name} → ${devices[schedule.target[x]].name}`;
  const duration = lane.end[x] - lane.start[x];
  const size = schedule.bytes[x];
  return [["route", route], ["size", bytes(size)], ["start", seconds(lane.start[x])], ["duration", seconds(duration)],
    ["rate", `${bytes(size / duration)}/s`]];
}

// -- legend and colours ---------------------------------------------------------------------------------------------

function buildLegend() {
  const legend = document.getElementById("legend");
  const { names } = colourGroups[timeline.colour];
  const palette = groupColours(timeline.colour);
  if (timeline.colour === "module" && names.length > 12) {
    const ramp = element("span", "ramp");
    const bar = element("i");
    bar.style.background = `linear-gradient(to right, ${RAMP.join(", ")})`;
    ramp.append(element("span", "", names[0]), bar, element("span", "", `${names[names.length - 1]} (${names.length} modules)`));
    legend.replaceChildren(ramp);
    return;
  }
  legend.replaceChildren(...names.map((name, group) => {
    const button = element("button", timeline.focus >= 0 && timeline.focus !== group ? "off" : "");
    button.type = "button";
    button.title = "show only these";
    button.setAttribute("aria-pressed", String(timeline.focus === group));
    button.append(swatch(palette[group]), element("span", "", name));
    button.addEventListener("click", () => {
      timeline.focus = timeline.focus === group ? -1 : group;
      buildLegend();
      redrawTimeline();
    });
    return button;
  }));
}

function buildColourChoice() {
  const select = document.getElementById("colour");
  const labels = { kind: "kind of op", module: "module", phase: "phase" };
  for (const [key, group] of Object.entries(colourGroups)) {
    if (group.names.length < 2 && key !== "kind") continue;
    const option = element("option", "", labels[key]);
    option.value = key;
    select.append(option);
  }
  timeline.colour = colourGroups.module.names.length > 1 ? "module" : "kind";
  select.value = timeline.colour;
  select.addEventListener("change", () => {
    timeline.colour = select.value;
    timeline.focus = -1;
    buildLegend();
    redrawTimeline();
  });
}

buildColourChoice();
buildLegend();
onShown((schedule) => {
  const { lanes, height } = lanesOf(schedule);
  timeline.lanes = lanes;
  timelineHeight = height;
  timeline.hover = null;
  wholeStep();
});
