// How much every device computes and holds, and how many bytes go where.

const MAX_LINKS = 8;

function buildLoad(schedule) {
  const grid = element("div", "loads");
  const headings = [["h", "device"], ["h", "computing"], ["h", ""], ["h memory", "peak memory"], ["h rest", ""]];
  grid.append(...headings.map(([className, text]) => element("span", className, text)));
  devices.forEach((device, d) => {
    const name = element("span", "name");
    name.append(swatch(deviceColour(d)), element("span", "", device.name));
    name.title = device.model || device.kind;
    const busy = schedule.busy_s[d] / schedule.span;
    const computing = element("span", "num");
    computing.append(element("b", "", percent(busy)), ` ${seconds(schedule.busy_s[d])}`);
    const peak = schedule.peak_bytes[d];
    const memory = element("span", "num");
    memory.append(element("b", "", bytes(peak)), device.capacity ? ` of ${bytes(device.capacity)}` : "");
    const used = device.capacity ? peak / device.capacity : peak / Math.max(1, ...schedule.peak_bytes);
    grid.append(name, meter("meter", busy, deviceColour(d)), computing, meter("meter memory", used, deviceColour(d)), memory);
  });
  const total = schedule.busy_s.reduce((a, b) => a + b, 0);
  const average = total / schedule.span;
  const note = `On average ${average.toFixed(2)} of ${devices.length} devices compute during the ${seconds(schedule.step_time_s)} step.`;
  document.querySelector("#load .body").replaceChildren(grid, element("p", "note", note), ...buildLinks(schedule));
}

function buildMatrix(schedule) {
  const n = devices.length;
  const grid = element("div", "matrix");
  grid.style.gridTemplateColumns = `max-content repeat(${n}, minmax(0, 1fr))`;
  grid.style.maxHeight = `${Math.max(420, 28 * (n + 1))}px`;
  const columns = devices.map((device, d) => {
    const heading = element("span", "h", n > 8 ? undefined : device.name);
    heading.title = device.name;
    if (n > 8) heading.append(swatch(deviceColour(d))); // too narrow for a name
    return heading;
  });
  grid.append(element("span", "h row", "from \\ to"), ...columns);
  const most = Math.max(...schedule.pair_bytes);
  devices.forEach((from, a) => {
    grid.append(element("span", "h row", from.name));
    devices.forEach((to, b) => {
      const sent = schedule.pair_bytes[a * n + b];
      const text = a === b ? "" : sent ? (n > 8 ? "" : bytes(sent)) : "–";
      const cell = element("span", a === b ? "self" : sent ? "" : "none", text);
      cell.title = `${from.name} to ${to.name}: ${bytes(sent)}`;
      if (sent) {
        const part = Math.round(12 + 68 * Math.sqrt(sent / most));
        cell.style.background = `color-mix(in srgb, var(--accent) ${part}%, var(--card))`;
        cell.style.color = part > 58 ? "var(--card)" : "var(--ink)";
      }
      grid.append(cell);
    });
  });
  return grid;
}

function buildLinks(schedule) {
  const busy = schedule.link_busy_s;
  const order = links.map((_, i) => i).filter((i) => busy[i] > 0).sort((a, b) => busy[b] - busy[a]);
  if (order.length === 0) return [];
  const grid = element("div", "links");
  const some = order.length > MAX_LINKS ? `link (${MAX_LINKS} busiest of ${order.length})` : "link";
  grid.append(element("span", "h", some), element("span", "h", "sending"), element("span"));
  for (const i of order.slice(0, MAX_LINKS)) {
    const text = element("span", "num");
    text.append(element("b", "", percent(busy[i] / schedule.span)), ` ${bytes(schedule.link_bytes[i])}`);
    grid.append(element("span", "", linkNames[i]), meter("meter", busy[i] / schedule.span), text);
  }
  return [grid];
}

function buildTraffic(schedule) {
  const sent = schedule.pair_bytes.reduce((a, b) => a + b, 0);
  const nothing = element("p", "empty", "Nothing is sent: every op runs where its inputs are.");
  const note = element("p", "note", `${bytes(sent)} in ${schedule.n_transfers.toLocaleString("en")} transfers; each tensor goes once to each device that needs it.`);
  document.querySelector("#traffic .body").replaceChildren(...(sent ? [buildMatrix(schedule), note] : [nothing]));
}

onShown(buildLoad);
onShown(buildTraffic);
