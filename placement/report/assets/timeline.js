// One time axis for ops on devices, transfers on links and memory: what happens when, and what waits for what.

const MAX_LINK_LANES = 16;
const AXIS = 24;
const WIDE_GUTTER = 150; // room for names of lanes and figures
const timeline = { from: 0, to: 1, colour: "kind", focus: -1, lanes: [], hover: null, drag: null };
const timelineCard = document.getElementById("timeline");
const timelineCanvas = timelineCard.querySelector("canvas");

// -- lanes -------------------------------------------------------------------------------------------------

function byStart(items, start, end) {
  return items.sort((a, b) => start[a] - start[b] || end[a] - end[b]);
}

function linkItems(schedule) {
  const result = links.map(() => []);
  for (let x = 0; x < schedule.sent.length; x++) {
    for (const link of page.routes[schedule.source[x] * devices.length + schedule.target[x]]) result[link].push(x);
  }
  return result.map((items) => byStart(items, schedule.sent, schedule.arrived));
}

function lanesOf(schedule) {
  const [opHeight, memoryHeight] = devices.length <= 8 ? [30, 50] : devices.length <= 16 ? [20, 30] : [12, 18];
  const perDevice = devices.map(() => []);
  schedule.device.forEach((d, op) => { if (schedule.end[op] > schedule.start[op]) perDevice[d].push(op); });
  const busy = linkItems(schedule).map((items, link) => ({ link, items, bytes: schedule.link_bytes[link] }));
  const used = busy.filter((lane) => lane.items.length > 0);
  const limit = [...used].sort((a, b) => b.bytes - a.bytes)[MAX_LINK_LANES - 1]?.bytes ?? 0;
  const kept = used.filter((lane) => lane.bytes >= limit).slice(0, MAX_LINK_LANES);
  const lanes = [];
  let y = AXIS + 6;
  const heading = (text, ...notes) => { // the first note that there is room for
    lanes.push({ type: "heading", text, notes, y, height: 18 });
    y += 22;
  };
  const lane = (fields, height, gap) => {
    lanes.push({ ...fields, y, height });
    y += height + gap;
  };
  heading("devices");
  devices.forEach((device, d) => {
    const items = byStart(perDevice[d], schedule.start, schedule.end);
    lane({ type: "device", d, items, start: schedule.start, end: schedule.end, label: device.name }, opHeight, 4);
  });
  y += 8;
  if (kept.length) {
    const some = kept.length < used.length ? `, the ${kept.length} with the most bytes of ${used.length}` : "";
    heading("links", `in the colour of the sender${some}`, "in the colour of the sender");
    for (const { link, items } of kept) {
      lane({ type: "link", items, start: schedule.sent, end: schedule.arrived, label: linkNames[link] }, 13, 3);
    }
    y += 8;
  }
  heading("memory");
  const peak = Math.max(...schedule.peak_bytes);
  const capacity = Math.max(...devices.map((device) => device.capacity ?? 0));
  const top = capacity && peak > 0.4 * capacity ? Math.max(capacity, peak) * 1.06 : peak * 1.25 || 1;
  devices.forEach((device, d) => lane({ type: "memory", d, top, label: device.name }, memoryHeight, 6));
  return { lanes, height: y + 2 };
}

// -- drawing -----------------------------------------------------------------------------------------------

function plotArea(width) {
  const left = width < 620 ? 84 : WIDE_GUTTER;
  return { left, right: width - 12, width: width - 12 - left };
}

function firstEndingAfter(lane, time) {
  let low = 0;
  let high = lane.items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.end[lane.items[middle]] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Items at least a pixel wide are boxes. Narrower ones share a pixel column: its colour is that of the group with the
// largest part of it, its strength the part of it that is busy.
function drawItems(context, lane, area, groupOf, colours, labelOf, focus) {
  const { from, to } = timeline;
  const scale = area.width / (to - from);
  const { items, start, end, y, height } = lane;
  let drawn = 0;
  let column = -1;
  let weights = new Map();
  const flush = () => {
    if (column < 0) return;
    let total = 0;
    let best = -1;
    for (const [group, weight] of weights) {
      total += weight;
      if (best < 0 || weight > weights.get(best)) best = group;
    }
    context.globalAlpha = Math.max(0.15, Math.min(1, total)) * (focus >= 0 && best !== focus ? 0.15 : 1);
    context.fillStyle = colours[best];
    context.fillRect(column, y, 1, height);
    drawn++;
    weights = new Map();
    column = -1;
  };
  const labels = [];
  for (let k = firstEndingAfter(lane, from); k < items.length && start[items[k]] < to; k++) {
    const item = items[k];
    const left = area.left + (start[item] - from) * scale;
    const right = area.left + (end[item] - from) * scale;
    const group = groupOf(item);
    if (right - left < 1) {
      const at = Math.max(area.left, Math.floor((left + right) / 2));
      if (at !== column) flush();
      column = at;
      weights.set(group, (weights.get(group) || 0) + (right - left));
      continue;
    }
    const a = Math.max(left, area.left - 2);
    const b = Math.min(right, area.right + 2);
    const gap = b - a > 5 ? 1 : b - a > 2 ? 0.4 : 0;
    context.globalAlpha = focus >= 0 && group !== focus ? 0.15 : 1;
    context.fillStyle = colours[group];
    if (b - a > 9) {
      context.beginPath();
      context.roundRect(a, y, b - a - gap, height, Math.min(2.5, height / 8));
      context.fill();
    } else {
      context.fillRect(a, y, b - a - gap, height);
    }
    drawn++;
    if (labelOf && height >= 18 && b - a > 46) labels.push([item, a, b]);
  }
  flush();
  context.globalAlpha = 1;
  context.fillStyle = "#fff";
  context.font = "11px system-ui, sans-serif";
  for (const [item, a, b] of labels) {
    const text = clipped(context, labelOf(item), b - a - 10);
    if (text) context.fillText(text, a + 5, y + height / 2);
  }
  return drawn;
}

function clipped(context, text, width) {
  const full = context.measureText(text).width;
  if (full <= width) return text;
  const characters = Math.floor((text.length * width) / full) - 1;
  return characters >= 3 ? `${text.slice(0, characters)}…` : "";
}

function drawMemory(context, lane, area, schedule, colours) {
  const { time, bytes: used } = schedule.memory[lane.d];
  const { from, to } = timeline;
  const scale = area.width / (to - from);
  const level = (value) => lane.y + lane.height - (value / lane.top) * lane.height;
  const colour = deviceColour(lane.d);
  context.save();
  context.beginPath();
  context.rect(area.left, lane.y - 1, area.width, lane.height + 2);
  context.clip();
  const line = new Path2D();
  let drawn = 0;
  let column = -1;
  let previous = 0;
  let high = 0;
  const until = Math.min(to, schedule.span);
  for (let k = 0; k < time.length && time[k] <= until; k++) {
    const next = k + 1 < time.length ? time[k + 1] : schedule.span;
    if (next < from) continue;
    const x = area.left + (Math.max(time[k], from) - from) * scale;
    if (drawn === 0) line.moveTo(x, level(used[k]));
    // Several steps within a pixel: draw up to the highest, so that no peak is lost.
    if (Math.floor(x) === column) {
      if (used[k] > high) line.lineTo(x, level(used[k]));
      high = Math.max(high, used[k]);
    } else {
      line.lineTo(x, level(previous));
      line.lineTo(x, level(used[k]));
      column = Math.floor(x);
      high = used[k];
    }
    previous = used[k];
    drawn++;
  }
  const end = area.left + (until - from) * scale;
  line.lineTo(end, level(previous));
  const filled = new Path2D(line);
  filled.lineTo(end, lane.y + lane.height);
  filled.lineTo(area.left + (Math.max(0, from) - from) * scale, lane.y + lane.height);
  context.globalAlpha = 0.22;
  context.fillStyle = colour;
  context.fill(filled);
  context.globalAlpha = 1;
  context.strokeStyle = colour;
  context.lineWidth = 1.3;
  context.stroke(line);
  context.restore();
  const capacity = devices[lane.d].capacity;
  if (capacity && capacity <= lane.top) {
    const y = Math.round(level(capacity)) + 0.5;
    context.strokeStyle = colours.bad;
    context.lineWidth = 1;
    context.setLineDash([5, 3]);
    strokeLine(context, area.left, y, area.right, y);
    context.setLineDash([]);
  }
  const text = !capacity ? "" : capacity <= lane.top ? `capacity ${bytes(capacity)}` : `↑ capacity ${bytes(capacity)}`;
  context.font = "10.5px system-ui, sans-serif";
  const width = context.measureText(text).width;
  // On the side where the line of the bound is not.
  const bound = area.left + (page.lower_bound_s - from) * scale;
  const x = bound > area.left + area.width / 2 || bound < area.left ? area.left + 5 : area.right - 5 - width;
  const y = capacity <= lane.top ? level(capacity) + 8 : lane.y + 7;
  context.globalAlpha = 0.75;
  context.fillStyle = colours.lane;
  if (text) context.fillRect(x - 2, y - 6, width + 4, 12);
  context.globalAlpha = 1;
  context.fillStyle = colours.bad;
  context.fillText(text, x, y);
  return drawn;
}

function strokeLine(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function niceStep(span, count) {
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= raw);
}

function drawAxis(context, area, height, colours) {
  const { from, to } = timeline;
  const step = niceStep(to - from, Math.max(2, area.width / 110));
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]].find(([, s]) => to >= s) || ["ns", 1e-9];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  context.font = "11.5px system-ui, sans-serif";
  context.textAlign = "center";
  for (let tick = Math.ceil(from / step - 1e-9) * step; tick <= to * (1 + 1e-12); tick += step) {
    const x = area.left + ((tick - from) / (to - from)) * area.width;
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    strokeLine(context, Math.round(x) + 0.5, AXIS - 4, Math.round(x) + 0.5, height);
    context.fillStyle = colours.soft;
    const text = `${(tick / size).toFixed(digits)} ${unit}`;
    if (x > area.left - 8 && x < area.right - 14) context.fillText(text, x, 10);
  }
  context.textAlign = "left";
}

function drawMark(context, area, height, time, colour, text) {
  const x = area.left + ((time - timeline.from) / (timeline.to - timeline.from)) * area.width;
  if (x < area.left || x > area.right + 1) return;
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.setLineDash([2, 3]);
  strokeLine(context, x, AXIS - 2, x, height);
  context.setLineDash([]);
  context.font = "600 11px system-ui, sans-serif";
  const width = context.measureText(text).width + 8;
  const left = Math.min(Math.max(x - width / 2, area.left), area.right - width);
  context.fillStyle = theme().card;
  context.fillRect(left, AXIS - 3, width, 15);
  context.fillStyle = colour;
  context.fillText(text, left + 4, AXIS + 5);
}

function drawLabel(context, lane, area, schedule, colours) {
  const middle = lane.y + lane.height / 2;
  const x = lane.d === undefined ? 2 : 16;
  if (lane.d !== undefined) {
    context.fillStyle = deviceColour(lane.d);
    context.beginPath();
    context.roundRect(2, middle - 4.5, 9, 9, 3);
    context.fill();
  }
  const details = {
    device: () => percent(schedule.busy_s[lane.d] / schedule.span),
    link: () => "",
    memory: () => bytes(schedule.peak_bytes[lane.d]),
  };
  const detail = area.left < WIDE_GUTTER ? "" : details[lane.type]();
  context.font = "11px system-ui, sans-serif";
  const room = detail ? context.measureText(detail).width + 14 : 8;
  context.fillStyle = colours.soft;
  context.textAlign = "right";
  if (detail) context.fillText(detail, area.left - 8, middle);
  context.textAlign = "left";
  context.fillStyle = lane.type === "link" ? colours.soft : colours.ink;
  context.font = lane.type === "link" ? "11px system-ui, sans-serif" : "500 12.5px system-ui, sans-serif";
  context.fillText(clipped(context, lane.label, area.left - x - room), x, middle);
}

function drawTimeline(context, width, height, colours) {
  const schedule = schedules[state.shown];
  if (!schedule) return 0;
  const area = plotArea(width);
  const groups = colourGroups[timeline.colour];
  const groupPalette = groupColours(timeline.colour);
  const devicePalette = devices.map((_, d) => deviceColour(d));
  context.clearRect(0, 0, width, height);
  context.textBaseline = "middle";
  for (const lane of timeline.lanes) {
    if (lane.type === "heading") continue;
    context.fillStyle = colours.lane;
    context.fillRect(area.left, lane.y, area.width, lane.height);
  }
  drawAxis(context, area, height, colours);
  let marks = 0;
  for (const lane of timeline.lanes) {
    if (lane.type === "heading") {
      context.fillStyle = colours.faint;
      context.font = "600 11px system-ui, sans-serif";
      context.fillText(lane.text.toUpperCase(), 2, lane.y + 9);
      context.font = "11px system-ui, sans-serif";
      const note = lane.notes.find((text) => context.measureText(text).width <= area.width);
      if (note) context.fillText(note, area.left, lane.y + 9);
      continue;
    }
    drawLabel(context, lane, area, schedule, colours);
    context.save();
    context.beginPath();
    context.rect(area.left, lane.y - 2, area.width, lane.height + 4);
    context.clip();
    if (lane.type === "device") {
      const shortName = (op) => ops.names[op].split(/[./]/).pop();
      marks += drawItems(context, lane, area, (op) => groups.of[op], groupPalette, shortName, timeline.focus);
    } else if (lane.type === "link") {
      marks += drawItems(context, lane, area, (x) => schedule.source[x], devicePalette, null, -1);
    }
    context.restore();
    if (lane.type === "memory") marks += drawMemory(context, lane, area, schedule, colours);
  }
  drawMark(context, area, height, page.lower_bound_s, colours.bound, "lower bound");
  if (timeline.hover) outline(context, area, timeline.hover, colours);
  if (timeline.drag && timeline.drag.select) {
    const [a, b] = [timeline.drag.x0, timeline.drag.x1].sort((p, q) => p - q);
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.16;
    context.fillRect(a, AXIS, b - a, height - AXIS);
    context.globalAlpha = 1;
  }
  return marks;
}

function outline(context, area, { lane, item }, colours) {
  const place = (time) => area.left + ((time - timeline.from) / (timeline.to - timeline.from)) * area.width;
  const left = Math.max(area.left, place(lane.start[item]));
  const right = Math.min(area.right, place(lane.end[item]));
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.6;
  context.strokeRect(left - 1, lane.y - 1, Math.max(2, right - left) + 1, lane.height + 2);
}

let timelineHeight = 200;
const redrawTimeline = liveCanvas(timelineCanvas, () => timelineHeight, drawTimeline);
