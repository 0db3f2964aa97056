// What every chart needs: the data, colours, number formats, the tooltip, and which schedule is shown.
// Every name comes from the user's model: it is only ever set as text, never as markup.

const page = JSON.parse(document.getElementById("data").textContent);

function unpack(text, Type) {
  return new Type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}

const ops = {
  names: page.ops.names,
  kind: (i) => page.ops.kinds[opKind[i]],
  module: (i) => page.ops.modules[opModule[i]],
};
const opKind = unpack(page.ops.kind, Uint32Array);
const opModule = unpack(page.ops.module, Uint32Array);
const colourGroups = Object.fromEntries(
  Object.entries(page.ops.colours).map(([key, group]) => [key, { names: group.names, of: unpack(group.of, Uint8Array) }]),
);
const schedules = page.schedules.map((s) => ({
  ...s,
  span: s.step_time_s || 1, // a step of no time still gets an axis
  device: unpack(s.device, Uint16Array),
  start: unpack(s.start, Float32Array),
  end: unpack(s.end, Float32Array),
  producer: unpack(s.producer, Uint32Array), // of the tensor each transfer carries
  bytes: unpack(s.bytes, Float32Array),
  source: unpack(s.source, Uint16Array),
  target: unpack(s.target, Uint16Array),
  sent: unpack(s.sent, Float32Array),
  arrived: unpack(s.arrived, Float32Array),
  memory: s.memory.map((m) => ({ time: unpack(m.time, Float32Array), bytes: unpack(m.bytes, Float64Array) })),
}));
const devices = page.devices;
const links = page.links;

// -- which schedule is shown -----------------------------------------------------------------------------

const state = { shown: 0, listeners: [] };

function onShown(listener) {
  state.listeners.push(listener);
}

function show(index) {
  state.shown = index;
  for (const listener of state.listeners) listener(schedules[index]);
}

// "host0/gpu0 → nvswitch": what both ends share is said once.
const linkNames = links.map(({ source, target }) => {
  const shared = source.slice(0, source.lastIndexOf("/") + 1);
  return `${source} → ${shared && target.startsWith(shared) ? target.slice(shared.length) : target}`;
});

// -- colours ---------------------------------------------------------------------------------------------

const DEVICE_COLOURS = ["#4a72f5", "#f07b2c", "#12a67c", "#d9438f", "#8b5cf0", "#d9a400", "#11a3c7", "#a3572b"];
const KIND_COLOURS = ["#5b8ff9", "#f2a33a", "#4fc38f", "#e8684a", "#9a6fdc", "#35b6cf", "#d66ba0", "#9cb23c", "#7a86c8", "#a8754f"];
const PHASE_COLOURS = { forward: "#5b8ff9", backward: "#f2a33a", update: "#4fc38f" };
const OTHER_COLOUR = "#98a1b3";
const RAMP = ["#5b3fd6", "#3276e8", "#14a3b8", "#3dba70", "#b5c72f", "#f3a324", "#e5503c"];

function deviceColour(d) {
  if (devices.length <= DEVICE_COLOURS.length) return DEVICE_COLOURS[d];
  return `hsl(${(d * 360) / devices.length} ${d % 2 ? 55 : 75}% ${d % 2 ? 62 : 50}%)`;
}

function rampColour(fraction) {
  const place = fraction * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  const part = (k) => {
    const [a, b] = [RAMP[low], RAMP[low + 1]].map((hex) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16));
    return Math.round(a + (b - a) * (place - low));
  };
  return `rgb(${part(0)} ${part(1)} ${part(2)})`;
}

function groupColours(key) {
  const names = colourGroups[key].names;
  if (key === "phase") return names.map((name) => PHASE_COLOURS[name]);
  if (key === "module") return names.map((_, i) => rampColour(names.length > 1 ? i / (names.length - 1) : 0));
  return names.map((name, i) => (name === "other" ? OTHER_COLOUR : KIND_COLOURS[i % KIND_COLOURS.length]));
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(["card", "ink", "soft", "faint", "line", "lane", "accent", "bound", "bad"].map((n) => [n, read(n)]));
}

// -- numbers ---------------------------------------------------------------------------------------------

// Three significant figures, as graphs/formatting.py writes them.
function scaled(value, units) {
  const [unit, size] = units.find(([, scale]) => value / scale < 999.5) || units[units.length - 1];
  const short = value / size;
  return `${short >= 1000 ? short.toFixed(0) : Number(short.toPrecision(3))} ${unit}`;
}

function seconds(value) {
  return value === 0 ? "0 s" : scaled(value, [["ns", 1e-9], ["us", 1e-6], ["ms", 1e-3], ["s", 1]]);
}

function bytes(value) {
  if (value < 1000) return `${value.toFixed(0)} bytes`;
  return scaled(value, [["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12], ["PB", 1e15]]);
}

function percent(fraction) {
  const points = 100 * fraction;
  return `${points < 9.95 && points > 0 ? points.toFixed(1) : points.toFixed(0)} %`;
}

// -- elements and the tooltip ------------------------------------------------------------------------------

function element(tag, className, text) {
  const result = document.createElement(tag);
  if (className) result.className = className;
  if (text !== undefined) result.textContent = text;
  return result;
}

function swatch(colour) {
  const result = element("i", "swatch");
  result.style.background = colour;
  return result;
}

function meter(className, fraction, colour) {
  const result = element("span", className);
  const fill = element("span");
  fill.style.width = `${100 * Math.min(1, fraction)}%`;
  if (colour) fill.style.background = colour;
  result.append(fill);
  return result;
}

const tip = document.getElementById("tip");

function showTip(event, title, rows) {
  const list = element("dl");
  for (const [label, value] of rows) list.append(element("dt", "", label), element("dd", "", value));
  tip.replaceChildren(element("strong", "", title), list);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  const top = Math.min(event.clientY + 14, innerHeight - box.height - 8);
  tip.style.transform = `translate(${Math.max(6, left)}px, ${Math.max(6, top)}px)`;
}

function hideTip() {
  tip.hidden = true;
}

// A canvas that is as sharp as the screen, redrawn at most once a frame, on resize and on a change of theme.
function liveCanvas(canvas, height, draw) {
  let waiting = false;
  const paint = () => {
    waiting = false;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const tall = height();
    canvas.style.height = `${tall}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    canvas.dataset.marks = draw(context, width, tall, theme());
  };
  const redraw = () => {
    if (!waiting) requestAnimationFrame(paint);
    waiting = true;
  };
  new ResizeObserver(redraw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return redraw;
}
