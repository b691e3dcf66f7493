// What all pages share: elements, numbers in words, the address, the server's answers.
// Text of a run is only ever set as text, never as markup.

/** An element: properties by name, `on…` as listeners, `data` as data attributes; strings become text nodes. */
export function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  fill(node, properties, children);
  return node;
}

/** Likewise an element of SVG. */
export function s(tag, properties, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, properties, children);
  return node;
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A number as people read it: thousands apart, four significant digits. */
export function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replaceAll("-", "−");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(places, 6) }).replace("-", "−");
}

/** A fixed number of decimals, so that a column lines up. */
export function fixed(value, places = 3) {
  if (value === null || value === undefined) return "–";
  return value.toFixed(places).replace("-", "−");
}

export function signed(value, places = 3) {
  return value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + fixed(value, places);
}

export function big(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)}${unit}`;
  }
  return num(Math.round(value));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${num(seconds * 1000, 3)} ms`;
  if (seconds < 120) return `${num(seconds, 3)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${num(seconds / 3600, 3)} h`;
  return `${num(seconds / 86400, 3)} d`;
}

export function moment(time) {
  if (!time) return "–";
  const at = new Date(time * 1000);
  return Number.isNaN(at.getTime()) ? "–" : at.toISOString().replace("T", " ").slice(0, 19);
}

export function ago(seconds) {
  return seconds === null || seconds === undefined ? "" : `${duration(Math.max(0, seconds))} ago`;
}

/** The address: `#/run/NAME/PAGE?words`; it is the whole state of what is shown. */
export function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const words = Object.fromEntries(new URLSearchParams(query || ""));
  if (parts[0] === "run") return { page: parts[2] || "run", run: parts[1], words };
  return { page: parts[0] || "runs", run: null, words };
}

export function link(page, run, words = {}) {
  const given = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = given.length ? "?" + new URLSearchParams(given) : "";
  if (!run) return `#/${page === "runs" ? "" : page}${query}`;
  return `#/run/${encodeURIComponent(run)}${page === "run" ? "" : "/" + page}${query}`;
}

/** Changes words of the address; nothing is kept of those that are null. `quiet` leaves no step in the history. */
export function change(words, quiet = false) {
  const here = parse();
  const next = link(here.page, here.run, { ...here.words, ...words });
  if (next === location.hash) return;
  if (quiet) {
    history.replaceState(null, "", next);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = next;
}

/** The bundle's answers, where the page was opened from a folder. */
export const bundle = globalThis.PENSTOCK_BUNDLE || null;

/** A metric in a legend: of `rollout/maths/easy/success_rate` "maths/easy success rate", since a lesson may be named so. */
export function legend(name) {
  const [first, ...rest] = name.split("/"), last = (rest.pop() ?? "").replaceAll("_", " ");
  return `${rest.join("/") || first} ${last}`.trim();
}

export class Refused extends Error {}

/** An answer of the server. */
export async function api(path, words = {}, body = null) {
  if (bundle) return fromBundle(path, words);
  const query = new URLSearchParams(Object.entries(words).filter(([, value]) => value !== "" && value != null));
  const address = `api/${path}${[...query].length ? "?" + query : ""}`;
  const options = body === null ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new Refused("The dashboard does not answer: it has ended, or the connection to it is gone.");
  }
  const kind = answer.headers.get("content-type") || "";
  if (!kind.startsWith("application/json")) throw new Refused(await answer.text());
  const found = await answer.json();
  if (!answer.ok) throw new Refused(found.error?.message || found.error || `status ${answer.status}`);
  return found;
}

function fromBundle(path, words) {
  const part = path.split("/").map(decodeURIComponent);
  const run = part[0] === "runs" && part[1] ? bundle.runs[part[1]] : null;
  if (path === "runs") return bundle.list;
  if (path === "compare") return found(bundle.compare[`${words.a}\n${words.b}`], "comparison of these two");
  if (!run) throw new Refused(`There is no run ${part[1]} in this bundle.`);
  const page = part[2] || "page";
  if (page === "curves") {
    const names = (words.names || "").split(",").filter(Boolean);
    return { curves: Object.fromEntries(names.map((name) => [name, cut(run.curves[name], words)])) };
  }
  if (page === "groups") return filtered(run, words);
  if (page === "group") return found(run.groups[words.id], "tokens of this group (the bundle says how many it holds)");
  if (page === "update") return found(run.updates[words.step], "update of this number");
  return found(run[page], `page ${page}`);
}

function found(value, what) {
  if (value === undefined) throw new Refused(`This bundle has no ${what}: open the run with penstock dashboard.`);
  return value;
}

function cut(curve, words) {
  if (!curve) return { block: 1, step: [], time: [], mean: [] };
  const low = words.from ? Number(words.from) : -Infinity;
  const high = words.to ? Number(words.to) : Infinity;
  const kept = curve.step.map((step) => step >= low && step <= high);
  const all = Object.entries(curve).map(([name, values]) =>
    [name, Array.isArray(values) ? values.filter((_, index) => kept[index]) : values]);
  return Object.fromEntries(all);
}

const SORTS = {
  newest: (g) => -(g.time || 0), oldest: (g) => g.time || Infinity, step: (g) => -(g.step ?? -1),
  reward: (g) => -(g.reward ?? -Infinity), reward_low: (g) => g.reward ?? Infinity,
  spread: (g) => -((g.high ?? 0) - (g.low ?? 0)), tokens: (g) => -(g.tokens ?? -1),
  staleness: (g) => -(g.staleness ?? -1), seconds: (g) => -(g.seconds ?? -1),
};

/** The bundle's list of groups, filtered here: by whole groups, where the server goes by rollouts. */
function filtered(run, words) {
  const of = words.of || "train";
  const number = (name, pass) => !words[name] || pass(Number(words[name]));
  const groups = run.list.filter((g) =>
    (of === "all" || (of === "eval") === Boolean(g.evaluation))
    && (!words.lesson || g.lesson === words.lesson)
    && (!words.state || g.states.includes(words.state))
    && (!words.worker || g.worker === words.worker)
    && (!words.search || g.group_id.toLowerCase().includes(words.search.toLowerCase()))
    && number("from_step", (v) => g.step !== null && g.step >= v)
    && number("to_step", (v) => g.step !== null && g.step <= v)
    && number("min_reward", (v) => g.high >= v) && number("max_reward", (v) => g.low <= v)
    && number("min_tokens", (v) => g.tokens >= v) && number("max_tokens", (v) => g.tokens <= v)
    && number("min_staleness", (v) => g.staleness !== null && g.staleness >= v));
  const key = SORTS[words.order || "newest"];
  groups.sort((a, b) => key(a) - key(b));
  const offset = Number(words.offset || 0);
  return {
    total: groups.length, rollouts: groups.reduce((sum, g) => sum + g.n, 0), offset,
    groups: groups.slice(offset, offset + Number(words.limit || 100)),
  };
}

/** Hands a text to the browser as a file. */
export function save(name, text, kind = "text/csv") {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  const anchor = h("a", { href: address, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

export function csv(columns, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) || /^[=+@]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/** What a state means for the eye. */
/** Stages of a rollout until it is scored: key, class of its colour, and words. */
export const STAGES = [["wait", "life-wait", "waiting"], ["prefill", "life-prefill", "prefill"], ["decode", "life-decode", "decode"], ["tool", "life-tool", "tools"], ["rest", "life-rest", "rest of generating"], ["reward", "life-reward", "reward"]];

/** Of a fragment of simulator steps, or of a rollout. */
export const stagesOf = (simulators) => simulators ? [["decode", "life-decode", "policy"], ["tool", "life-tool", "simulator"], ["rest", "life-rest", "waiting for others"]] : STAGES;

export function stateKind(state) {
  if (["running", "starting"].includes(state)) return "live";
  if (["trained", "finished", "live", "active"].some((word) => String(state).startsWith(word))) return "good";
  if (["waiting", "training", "stopped", "in_flight", "locked", "drained", "ended"].includes(state)) return "calm";
  if (["eval", "micro_eval", "untrained", "before", "after", "report"].includes(state)) return "eval";
  return "bad";
}

const STATES = { stale_step: "weights too old", stale_time: "finished too long ago" };
const MEANS = { stale_step: "its weights were more updates old than replay allows (stale_step)", stale_time: "it was finished more seconds ago than replay allows (stale_time)" };

/** A state, fate or count of them in words. */
export function stateWords(state) {
  return STATES[state] ?? String(state).replaceAll("_", " ");
}

export function badge(state, title) {
  return h("span", { class: `badge ${stateKind(state)}`, title: title ?? MEANS[state] }, stateWords(state));
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}

export function copyable(command) {
  return h("button", {
    class: "command", type: "button", title: "Copy this command",
    onclick: (event) => {
      navigator.clipboard?.writeText(command);
      event.currentTarget.classList.add("copied");
    },
  }, command);
}

/** A table: columns are [title, cell of a row, kind], kind `n` for numbers. */
export function table(columns, rows, caption, onrow) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([title, , kind]) => title ? h("th", { class: kind, scope: "col" }, title) : h("td")))),
      h("tbody", {}, rows.map((row) =>
        h("tr", onrow ? onrow(row) : {}, columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row) ?? "–")))))));
}
