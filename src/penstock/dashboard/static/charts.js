// Curves by uPlot; sparks, ribbons and intervals as SVG of our own.
import uPlot from "./uplot.js";
import { change, csv, h, num, parse, s, save, stateWords } from "./core.js";

const drawn = new Set();

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const PALETTE = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];

/** Ends the charts that are on no page any more. */
export function forget() {
  for (const chart of [...drawn]) {
    if (chart.box.isConnected) continue;
    chart.end();
    drawn.delete(chart);
  }
}

/** Draws all charts anew, for another theme. */
export function redraw() {
  for (const chart of [...drawn]) chart.draw();
}

/**
 * A card with curves over steps. `lines`: {name, x, y, low?, high?, points?, dash?, block?}; `marks`: [text, step].
 * A line whose points are means of `block` steps each is said to be that.
 * Dragging zooms and is written into the address (`from`, `to`); a double click shows all again.
 */
export function chart(title, lines, options = {}) {
  const box = h("div", { class: "plot" });
  const legend = h("ul", { class: "legend" });
  const shown = lines.filter((line) => line.x.length), block = Math.max(1, ...shown.map((line) => line.block || 1));
  const note = [options.note, block > 1 ? `each point is the mean of ${num(block)} updates${shown.some((line) => line.low) ? ", the band their least to greatest" : ""}` : ""].filter(Boolean).join("; ");
  const card = h("section", { class: "card chart", "aria-label": title },
    h("header", {}, h("h3", {}, title), !shown.length ? null :
      h("button", { class: "tool", type: "button", title: "Download these numbers as CSV", "aria-label": `Download ${title} as CSV`,
        onclick: () => download(title, lines, options) }, "CSV")),
    legend, note && shown.length ? h("p", { class: "note" }, note) : null, box);
  if (!shown.length) {
    box.append(h("p", { class: "empty" }, options.empty || "No numbers of this are recorded."));
    return card;
  }
  let plot = null;
  const values = [];
  shown.forEach((line, index) => {
    const last = line.y.findLast((value) => value !== null);
    const value = h("span", { class: "value" }, num(last));
    values.push([value, last]);
    legend.append(h("li", {}, h("i", { class: `swatch s${(line.hue ?? index) % PALETTE.length + 1}` }), line.name, " ", value));
  });
  const entry = {
    box,
    draw() {
      plot?.destroy();
      const width = box.clientWidth || 400;
      const data = joined(shown);
      plot = new uPlot(settings(shown, width, options, values, data), data, box);
    },
    end() {
      watch.disconnect();
      plot?.destroy();
    },
  };
  const watch = new ResizeObserver(() => {
    if (!plot) entry.draw();
    else if (box.clientWidth) plot.setSize({ width: box.clientWidth, height: options.height || 190 });
  });
  watch.observe(box);
  drawn.add(entry);
  return card;
}

/** One column of steps and a column per line, with low and high behind those that have them. */
function joined(lines) {
  const tables = lines.flatMap((line) => [[line.x, line.y], ...(line.low ? [[line.x, line.low], [line.x, line.high]] : [])]);
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

function settings(lines, width, options, values, data) {
  const series = [{}];
  const bands = [];
  lines.forEach((line, index) => {
    const stroke = color(PALETTE[(line.hue ?? index) % PALETTE.length]);
    series.push({
      stroke, width: line.points ? 0 : 1.6, dash: line.dash, spanGaps: true,
      points: { show: Boolean(line.points) || line.x.length === 1, size: 6, fill: stroke },
    });
    if (line.low) {
      const at = series.length;
      series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true },
        { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
      bands.push({ series: [at + 1, at], fill: stroke + "2e" });
    }
  });
  const positive = data.slice(1).every((column) => column.every((value) => value === null || value === undefined || value > 0));
  const axis = { stroke: color("quiet"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const x = data[0], log = options.log && positive, whole = x.every(Number.isInteger);
  const decades = (u, splits) => {
    const whole = splits.filter((split) => Math.abs(Math.log10(split) - Math.round(Math.log10(split))) < 1e-6);
    const every = Math.ceil(whole.length / 5);
    return splits.map((split) => (whole.indexOf(split) >= 0 && whole.indexOf(split) % every === 0 ? split : null));
  };
  return {
    width, height: options.height || 190, series, bands, legend: { show: false },
    padding: [8, 22, 0, 0],
    cursor: { sync: options.sync === false ? undefined : { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    scales: {
      x: { time: false, range: x.length === 1 ? [x[0] - 1, x[0] + 1] : undefined },
      y: log ? { distr: 3 } : { range: (u, low, high) => spread(low, high, options.zero) },
    },
    axes: [
      { ...axis, size: 26, gap: 4, values: (u, ticks) => ticks.map((tick) => (whole && !Number.isInteger(tick) ? "" : num(tick))) },
      { ...axis, size: 54, gap: 4, ...(log ? { filter: decades, grid: { ...axis.grid, filter: decades } } : {}), values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : log ? `1e${Math.round(Math.log10(tick))}`.replace("-", "−") : num(tick, told(ticks)))) },
    ],
    hooks: {
      draw: [(u) => marksOn(u, options.marks || []), (u) => lines.filter((line) => line.points && line.low).forEach((line) => whiskersOn(u, line, color(PALETTE[(line.hue ?? lines.indexOf(line)) % PALETTE.length])))],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const [low, high] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        if (options.zoom !== false) change({ from: Math.floor(low), to: Math.ceil(high) });
      }],
      setCursor: [(u) => values.forEach(([node, last], index) => {
        const at = columnOf(lines, index);
        const value = u.cursor.idx === null || u.cursor.idx === undefined ? null : u.data[at][u.cursor.idx];
        node.textContent = value === null || value === undefined ? num(last) : `${num(value)} @ ${num(u.data[0][u.cursor.idx])}`;
      })],
      ready: [(u) => u.over.addEventListener("dblclick", () => options.zoom !== false && change({ from: null, to: null }))],
    },
  };
}

function columnOf(lines, index) {
  return 1 + lines.slice(0, index).reduce((sum, line) => sum + (line.low ? 3 : 1), 0);
}

function spread(low, high, zero) {
  if (low === null || low === undefined || !Number.isFinite(low)) return [0, 1];
  if (zero) low = Math.min(0, low);
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

/** The interval of each point, which of a single one no band shows. */
function whiskersOn(u, line, stroke) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = stroke;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.beginPath();
  line.x.forEach((step, index) => {
    const x = u.valToPos(step, "x", true);
    ctx.moveTo(x, u.valToPos(line.low[index], "y", true));
    ctx.lineTo(x, u.valToPos(line.high[index], "y", true));
  });
  ctx.stroke();
  ctx.restore();
}

/** Events as thin upright lines with a letter at the top. */
function marksOn(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  let free = -Infinity;
  for (const [text, step, kind] of marks) {
    if (step < u.scales.x.min || step > u.scales.x.max) continue;
    const x = Math.round(u.valToPos(step, "x", true));
    ctx.strokeStyle = color(kind === "bad" ? "bad" : "mark");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const width = ctx.measureText(text).width;
    if (x > free && x + width < bbox.left + bbox.width) {
      ctx.fillStyle = color("quiet");
      ctx.fillText(text, x + 3 * devicePixelRatio, bbox.top + 9 * devicePixelRatio);
      free = x + width + 8 * devicePixelRatio;
    }
  }
  ctx.restore();
}

function download(title, lines, options) {
  const rows = lines.flatMap((line) => line.x.map((x, index) =>
    [line.name, x, line.y[index], line.low?.[index], line.high?.[index]]));
  save(`${title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv`, csv(["series", options.unit || "step", "value", "low", "high"], rows));
}

/** So many digits tell neighbouring ticks apart. */
function told(ticks) {
  const known = ticks.filter((tick) => tick !== null), largest = Math.max(...known.map(Math.abs));
  const apart = Math.abs(known[1] - known[0]);
  return apart > 0 ? Math.max(3, 1 + Math.floor(Math.log10(largest)) - Math.floor(Math.log10(apart) + 1e-9) + 1) : 3;
}

/** A small line without axes. */
export function spark(values, width = 96, height = 22) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return h("span", { class: "quiet" }, "–");
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const at = (value, index) => `${(index / (values.length - 1) * (width - 4) + 2).toFixed(1)},${(height - 3 - (value - low) / (high - low || 1) * (height - 6)).toFixed(1)}`;
  return s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `from ${num(values[0])} to ${num(values.at(-1))}` },
    s("polyline", { points: values.map(at).join(" ") }));
}

/** Rewards of a group as dots on one scale. */
export function dots(rewards, low, high, width = 90) {
  const known = rewards.filter((value) => value !== null);
  if (!known.length) return h("span", { class: "quiet" }, "–");
  const x = (value) => 4 + (value - low) / (high - low || 1) * (width - 8);
  return s("svg", { class: "dots", width, height: 14, viewBox: `0 0 ${width} 14`, role: "img", "aria-label": `rewards ${known.map((v) => num(v, 3)).join(", ")}` },
    s("line", { x1: 2, x2: width - 2, y1: 7, y2: 7 }),
    known.map((value) => s("circle", { cx: x(value).toFixed(1), cy: 7, r: 3 })));
}

/** Ribbons between columns of boxes. `flows`: [[names along the columns], size, link per gap]; widths add up. */
export function sankey(flows, unit, names, hrefs, width) {
  const total = flows.reduce((sum, flow) => sum + flow.size, 0);
  if (!total) return h("p", { class: "empty" }, `No ${unit} are recorded.`);
  const columns = names.map((_, column) => boxes(flows, column));
  const most = Math.max(...columns.map((column) => column.length));
  const gap = 16, height = Math.max(220, most * 54), scale = (height - gap * (most - 1)) / total;
  const bar = 10, room = (width - bar - 150) / (names.length - 1);
  columns.forEach((column, index) => place(column, index * room, scale, gap));
  const ribbons = [], labels = [];
  for (let index = 0; index + 1 < columns.length; index++) {
    for (const [from, to, size] of pairs(flows, index, columns)) ribbons.push(ribbon(from, to, size * scale, bar, hrefs(index, from.name, to.name), `${from.name} → ${to.name}: ${num(Math.round(size))} ${unit}`));
  }
  columns.forEach((column, index) => column.forEach((box) => labels.push(
    s("rect", { class: `box ${box.kind || ""}`, x: box.x, y: box.y, width: bar, height: Math.max(1.5, box.height) }),
    s("text", { x: box.x + bar + 6, y: box.y + Math.max(box.height / 2, 6), dy: "0.1em" }, stateWords(box.name),
      s("tspan", { class: "amount", x: box.x + bar + 6, dy: "1.2em" }, `${num(Math.round(box.size))} · ${(100 * box.size / total).toFixed(1)}%`)))));
  return s("svg", { class: "sankey", width, height: height + 24, viewBox: `0 -8 ${width} ${height + 24}`, role: "group", "aria-label": `Ledger in ${unit}` }, ribbons, labels);
}

function boxes(flows, column) {
  const found = new Map();
  for (const flow of flows) {
    const name = flow.path[column];
    const box = found.get(name) || { name, size: 0, in: 0, out: 0 };
    box.size += flow.size;
    found.set(name, box);
  }
  return [...found.values()].sort((a, b) => b.size - a.size);
}

function place(column, x, scale, gap) {
  let y = 0;
  for (const box of column) {
    Object.assign(box, { x, y, height: box.size * scale });
    y += box.height + gap;
  }
}

function pairs(flows, column, columns) {
  const found = new Map();
  for (const flow of flows) {
    const key = JSON.stringify([flow.path[column], flow.path[column + 1]]);
    found.set(key, (found.get(key) || 0) + flow.size);
  }
  const box = (index, name) => columns[index].find((each) => each.name === name);
  return [...found].map(([key, size]) => [box(column, JSON.parse(key)[0]), box(column + 1, JSON.parse(key)[1]), size])
    .sort((a, b) => a[0].y - b[0].y || a[1].y - b[1].y);
}

function ribbon(from, to, thickness, bar, href, title) {
  const [x1, x2] = [from.x + bar, to.x], middle = (x1 + x2) / 2;
  const [y1, y2] = [from.y + from.out, to.y + to.in];
  from.out += thickness;
  to.in += thickness;
  const path = `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2},${y2}V${y2 + thickness}C${middle},${y2 + thickness} ${middle},${y1 + thickness} ${x1},${y1 + thickness}Z`;
  return s("a", { href, "aria-label": title, class: `ribbon to-${String(to.name).replaceAll(/[^a-z]/g, "")}` }, s("path", { d: path }), s("title", {}, title));
}

/** Estimates of b minus a with their intervals, on a scale that holds zero. */
export function intervals(rows, a, b, width = 420) {
  const side = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);
  const known = rows.filter((row) => row.low !== null && row.high !== null);
  const reach = Math.max(...known.flatMap((row) => [Math.abs(row.low), Math.abs(row.high)]), 1e-9) * 1.1;
  const x = (value) => width / 2 + value / reach * (width / 2 - 8);
  return s("svg", { class: "intervals", width, height: rows.length * 34 + 18, viewBox: `0 0 ${width} ${rows.length * 34 + 18}`, role: "img", "aria-label": rows.map((row) => row.words).join(" ") },
    s("line", { class: "zero", x1: width / 2, x2: width / 2, y1: 0, y2: rows.length * 34 }),
    rows.map((row, index) => row.low === null || row.high === null ? null : [
      s("line", { class: `span ${row.verdict}`, x1: x(row.low), x2: x(row.high), y1: index * 34 + 17, y2: index * 34 + 17 }),
      s("circle", { class: row.verdict, cx: x(row.difference), cy: index * 34 + 17, r: 5 })]),
    s("text", { x: 4, y: rows.length * 34 + 13 }, `${side(a)} better, −${num(reach, 2)}`),
    s("text", { x: width - 4, y: rows.length * 34 + 13, "text-anchor": "end" }, `${side(b)} better, +${num(reach, 2)}`));
}

export function range() {
  const { words } = parse();
  return { from: words.from, to: words.to };
}
