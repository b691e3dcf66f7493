// All groups in a table that draws only what is seen, a box for SQL, and one group answer by answer.
import { dots } from "./charts.js";
import { api, badge, big, bundle, change, copyable, duration, empty, fixed, h, link, moment, num, parse, Refused, signed, STAGES, stagesOf, stateWords, table } from "./core.js";
import { exportTable } from "./runs.js";

const ROW = 30, PIECE = 100, TALLEST = 15_000_000;
const path = (run, page) => `runs/${encodeURIComponent(run)}/${page}`;

const COLUMNS = [
  ["update", (g) => num(g.step), "n"],
  ["group", (g) => g.group_id, "id"],
  ["lesson", (g) => g.lesson ?? "–", "hide2"],
  ["n", (g) => num(g.n), "n hide2"],
  ["reward", (g) => fixed(g.reward), "n strong"],
  ["rewards", (g, view) => dots(g.rewards, view.low, view.high), "hide1"],
  ["advantage", (g) => g.advantage_low === null ? "–" : `${signed(g.advantage_low, 2)} … ${signed(g.advantage_high, 2)}`, "n hide2"],
  ["tokens", (g) => g.tokens === null ? "–" : num(Math.round(g.tokens)), "n hide1"],
  ["weights", (g) => g.oldest === null ? "–" : g.oldest === g.newest ? num(g.oldest) : `${num(g.oldest)}–${num(g.newest)}`, "n hide2"],
  ["age", (g) => num(g.staleness), "n hide1"],
  ["time", (g) => duration(g.seconds), "n hide2"],
  ["state", (g) => g.states.map((state) => badge(state, g.reason)), ""],
];

const HINTS = { update: "that trained it, or that was next when it was thrown away", weights: "versions that sampled it, the oldest and the newest", age: "updates between its oldest weights and those of its update", time: "from where its worker began until its last answer ended" };

export async function groupsPage(main, run) {
  const { words } = parse();
  const found = await api(path(run, "choices"));
  const count = h("span", { class: "count", role: "status" }, "…");
  const list = h("div", { class: "virtual", tabindex: 0, role: "region", "aria-label": "Groups" });
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, "Groups"), count, h("div", { class: "tools" }, h("a", { class: "button", href: "#", onclick: (event) => { event.preventDefault(); location.hash = link("groups", run); } }, "Clear filters"))),
    filters(words, found),
    h("div", { class: "card flush" }, list),
    bundle ? h("p", { class: "note" }, "A bundle has no SQL: penstock dashboard has.") : sqlBox(run, words));
  return virtual(list, run, words, count);
}

function filters(words, found) {
  const select = (name, label, values, any = "any") => h("label", {}, label, h("select", { onchange: (event) => change({ [name]: event.target.value }) },
    any === null ? [] : h("option", { value: "" }, any), values.map((value) => h("option", { value, selected: value === words[name] }, stateWords(value)))));
  const number = (name, label) => h("label", {}, label, h("input", { type: "number", step: "any", value: words[name] || "", onchange: (event) => change({ [name]: event.target.value }) }));
  return h("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "group", h("input", { type: "search", id: "filter", placeholder: "part of its id", value: words.search || "", oninput: later((value) => change({ search: value }, true)) })),
    select("of", "of", ["train", "eval", "all"], null), select("lesson", "lesson", found.lessons), select("state", "state", found.states), select("finish", "ended by", found.finishes),
    found.workers.length > 1 ? select("worker", "worker", found.workers) : null,
    number("from_step", "update from"), number("to_step", "to"), number("min_reward", "reward from"), number("max_reward", "to"), number("min_tokens", "tokens from"), number("min_staleness", "age from"),
    select("order", "order", found.orders, null));
}

function later(act) {
  let timer = 0;
  return (event) => {
    const { value } = event.target;
    clearTimeout(timer);
    timer = setTimeout(() => act(value), 150);
  };
}

/** Rows that are seen, and a few around; the rest is asked for when it comes into view. */
function virtual(list, run, words, count) {
  const view = { pieces: new Map(), asked: new Set(), total: 0, at: Number(words.row || 0), low: 0, high: 1, ended: false };
  const head = h("div", { class: "vrow vhead" }, COLUMNS.map(([title, , kind]) => h("span", { class: kind, title: HINTS[title] }, title)));
  const space = h("div", { class: "vspace" });
  const pool = new Map();
  list.replaceChildren(head, space);

  const height = () => Math.min(view.total * ROW, TALLEST);
  const first = () => {
    const room = Math.max(1, height() - list.clientHeight + ROW);
    return view.total * ROW <= TALLEST ? list.scrollTop / ROW : list.scrollTop / room * Math.max(0, view.total - list.clientHeight / ROW);
  };

  async function ask(piece) {
    if (view.asked.has(piece)) return;
    view.asked.add(piece);
    const answer = await api(path(run, "groups"), { ...words, row: null, sql: null, offset: piece * PIECE, limit: PIECE });
    if (view.ended) return;
    view.total = answer.total;
    view.pieces.set(piece, answer.groups);
    for (const group of answer.groups) {
      view.low = Math.min(view.low, group.low ?? 0);
      view.high = Math.max(view.high, group.high ?? 0);
    }
    count.textContent = `${num(answer.total)} groups, ${num(answer.rollouts)} rollouts that match`;
    space.style.height = `${height()}px`;
    draw();
  }

  function draw() {
    if (!view.total) {
      space.replaceChildren(view.pieces.size ? empty("No group matches these filters.") : empty("Loading …"));
      return;
    }
    const start = Math.max(0, Math.floor(first()) - 6), stop = Math.min(view.total, start + Math.ceil(list.clientHeight / ROW) + 14);
    const base = list.scrollTop - (first() - start) * ROW;
    for (const [index, row] of pool) if (index < start || index >= stop) { row.remove(); pool.delete(index); }
    for (let index = start; index < stop; index++) {
      const group = view.pieces.get(Math.floor(index / PIECE))?.[index % PIECE];
      if (!group) { ask(Math.floor(index / PIECE)).catch(failed); continue; }
      let row = pool.get(index);
      if (!row) {
        row = h("a", { class: "vrow", tabindex: -1, href: link("group", run, { id: group.group_id }) },
          COLUMNS.map(([, cell, kind]) => h("span", { class: kind }, cell(group, view))));
        pool.set(index, row);
        space.append(row);
      }
      row.style.transform = `translateY(${view.total * ROW <= TALLEST ? index * ROW : base + (index - start) * ROW}px)`;
      row.classList.toggle("at", index === view.at);
    }
    for (const child of [...space.children]) if (!child.classList.contains("vrow")) child.remove();
  }

  const failed = (error) => { if (!view.ended) space.replaceChildren(h("p", { class: "bad-text" }, error instanceof Refused ? error.message : String(error))); };
  let framed = false;
  list.addEventListener("scroll", () => {
    if (framed) return;
    framed = true;
    requestAnimationFrame(() => { framed = false; draw(); });
  }, { passive: true });
  const watch = new ResizeObserver(() => draw());
  watch.observe(list);
  draw();
  const ready = ask(0).then(() => { if (words.row) go(0); }).catch(failed);

  function go(by) {
    view.at = Math.max(0, Math.min(view.total - 1, view.at + by));
    const top = view.at * ROW, low = list.scrollTop, room = list.clientHeight - 2 * ROW;
    if (view.total * ROW <= TALLEST) {
      if (top < low) list.scrollTop = top;
      if (top > low + room) list.scrollTop = top - room;
    }
    draw();
    if (by) change({ row: view.at || null }, true);
  }

  return {
    ready,
    quiet: ["row", "sql"],
    keys: {
      j: () => go(1), k: () => go(-1), ArrowDown: () => go(1), ArrowUp: () => go(-1), PageDown: () => go(20), PageUp: () => go(-20), Home: () => go(-view.total), End: () => go(view.total),
      Enter: () => { const group = view.pieces.get(Math.floor(view.at / PIECE))?.[view.at % PIECE]; if (group) location.hash = link("group", run, { id: group.group_id }); },
    },
    end() { view.ended = true; watch.disconnect(); },
  };
}

const EXAMPLES = [
  ["what became of them", "select state, count(*) as rollouts, avg(episode_reward) as reward\nfrom rollouts group by 1 order by 2 desc"],
  ["reward by update", "select trained_step + 1 as \"update\", avg(episode_reward) as reward, count(*) as rollouts\nfrom rollouts where trained_step is not null group by 1 order by 1 desc"],
  ["the best answers", "select group_id, episode_reward, turns[-1].content as said\nfrom rollouts order by episode_reward desc limit 20"],
  ["problems by reward", "select env_example_id as problem, count(*) as n, avg(episode_reward) as reward\nfrom rollouts group by 1 order by 3"],
];

function sqlBox(run, words) {
  const text = h("textarea", { id: "sql", rows: 4, spellcheck: "false", "aria-label": "SQL", value: words.sql || EXAMPLES[0][1] });
  const out = h("div", { "aria-live": "polite" });
  const go = async () => {
    out.replaceChildren(h("p", { class: "quiet" }, "Asking …"));
    const began = performance.now();
    try {
      const found = await api(path(run, "sql"), {}, { sql: text.value });
      const index = found.columns.findIndex((name) => name === "group_id");
      const cell = (value, column) => value === null ? "–" : column === index ? h("a", { href: link("group", run, { id: value }) }, value) : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? num(value) : String(value);
      out.replaceChildren(h("p", { class: "note" }, `${num(found.rows.length)} rows${found.more ? " (there are more)" : ""} in ${duration((performance.now() - began) / 1000)} `, exportTable(`${run}-query`, found.columns, found.rows.map((row) => row.map((v) => typeof v === "object" ? JSON.stringify(v) : v)))),
        h("div", { class: "tall" }, table(found.columns.map((name, column) => [name, (row) => cell(row[column], column), found.rows.every((row) => row[column] === null || typeof row[column] === "number") ? "n" : ""]), found.rows, "Answer")));
      change({ sql: text.value }, true);
    } catch (error) {
      out.replaceChildren(h("p", { class: "bad-text" }, error.message));
    }
  };
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(); } });
  if (words.sql) go();
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, "SQL"), h("div", { class: "tools" }, EXAMPLES.map(([name, sql]) => h("button", { class: "tool", type: "button", onclick: () => { text.value = sql; go(); } }, name)))),
    h("p", { class: "note" }, "One statement that reads, over the views rollouts, turns, evaluations, batches, uses, fragments, fates, tickets, metrics, events; as penstock rollouts --sql. Its steps name an update by the version before it: one less than these pages."),
    text, h("div", { class: "tools" }, h("button", { class: "button", type: "button", onclick: go }, "Ask (Ctrl+Enter)")), out);
}

// One group.

const COLORS = { logprob: [1, "log-probability"], advantage: [2, "advantage"], ratio: [5, "ratio then"], now: [6, "ratio now"], entropy: [7, "entropy"], version: [3, "weight version"], none: [0, "none"] };
const COMPUTED = ["ratio", "now", "entropy"];
const LOWEST = Math.log(1e-3);
const MOST_DRIFT = Math.log(2);

export async function groupPage(main, run) {
  const { words } = parse();
  const page = await api(path(run, "group"), { id: words.id });
  const by = words.color in COLORS ? words.color : "logprob";
  const members = page.members;
  const rewards = members.map((m) => m.reward).filter((v) => v !== null);
  const scale = scaleOf(members, by);
  const choose = h("label", {}, "tokens by ", h("select", { id: "color", onchange: (event) => change({ color: event.target.value }, true) },
    Object.entries(COLORS).map(([name, [, title]]) => h("option", { value: name, selected: name === by }, title))));
  const marks = h("label", {}, h("input", { type: "checkbox", id: "diff", checked: words.diff === "1", onchange: (event) => change({ diff: event.target.checked ? "1" : null }, true) }), " mark what differs from the first");
  const [before, after] = page.neighbours;
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, page.group_id), page.evaluation ? badge(page.evaluation) : null,
      h("p", { class: "sub" }, `${page.lesson ?? "unknown lesson"}, ${num(page.size)} ${page.size === 1 ? "answer" : "answers"}, reward ${fixed(rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null)}`),
      h("div", { class: "tools" }, before ? h("a", { class: "button", id: "before", href: link("group", run, { ...words, id: before }) }, "← before") : null, after ? h("a", { class: "button", id: "after", href: link("group", run, { ...words, id: after }) }, "after →") : null)),
    page.note ? h("p", { class: "note warn" }, page.note) : null,
    page.fragment ? fragment(page) : [
      h("div", { class: "head small" }, h("div", { class: "tools left" }, choose, marks), legend(by, scale, page)),
      COMPUTED.includes(by) ? computed(page, by) : null,
      prompt(members),
      h("div", { class: "answers" }, members.map((member, index) => answer(member, members[0], index, by, scale, words.diff === "1", run))),
      page.size > members.length ? h("p", { class: "note" }, `${page.size - members.length} more answers are not shown.`) : null,
      h("p", { class: "note" }, members.some((m) => m.rewards_by_function?.length) ? "Rewards by function are what each gave, before weights. " : null, members.some((m) => m.timings?.decode_s !== undefined) ? "Seconds of several turns are summed; waiting is for a slot of the engine, and reward came after the last turn. " : "How its seconds were spent is not stored. ", "Control and direction marks in what was said are shown by their escapes.")]);
}

function scaleOf(members, by) {
  const column = COLORS[by][0];
  const values = members.flatMap((m) => (m.turns || []).flatMap((t) => (t.pieces || []).map((p) => p[column]))).filter((v) => typeof v === "number");
  return { low: Math.min(...values), high: Math.max(...values), reach: Math.max(...values.map(Math.abs), 1e-9), known: values.length > 0 };
}

function ground(piece, by, scale) {
  const value = piece[COLORS[by][0]];
  if (by === "none" || typeof value !== "number" || piece.length < 2) return "";
  if (by === "logprob") return `rgb(var(--warm) / ${(0.85 * Math.min(1, value / LOWEST)).toFixed(3)})`;
  if (by === "advantage") return `rgb(var(${value > 0 ? "--cool" : "--warm"}) / ${(0.8 * Math.abs(value) / scale.reach).toFixed(3)})`;
  if (by === "ratio" || by === "now") return `rgb(var(${value > 0 ? "--cool" : "--warm"}) / ${(0.85 * Math.min(1, Math.abs(value) / MOST_DRIFT)).toFixed(3)})`;
  if (by === "entropy") return `rgb(var(--warm) / ${(0.85 * Math.min(1, Math.max(0, value) / Math.max(scale.high, 0.1))).toFixed(3)})`;
  return `rgb(var(--cool) / ${(0.1 + 0.7 * (scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 0)).toFixed(3)})`;
}

function legend(by, scale) {
  if (by === "none" || (!scale.known && COMPUTED.includes(by))) return null;
  if (!scale.known) return h("p", { class: "note" }, by === "advantage" ? "No batch holds this group, so it has no advantages." : "Not stored for this group.");
  const steps = by === "logprob" ? [1, 0.5, 0.1, 0.01, 0.001].map((p) => [p === 0.001 ? "≤0.001" : String(p), Math.log(p)])
    : by === "advantage" ? [-1, -0.5, 0, 0.5, 1].map((share) => [signed(share * scale.reach, 2), share * scale.reach])
    : by === "ratio" || by === "now" ? [0.5, 0.8, 1, 1.25, 2].map((ratio) => [`${ratio === 0.5 ? "≤" : ratio === 2 ? "≥" : ""}${ratio}`, Math.log(ratio)])
    : by === "entropy" ? [0, 0.25, 0.5, 1].map((share) => [fixed(share * Math.max(scale.high, 0.1), 2), share * Math.max(scale.high, 0.1)])
      : [...new Set([scale.low, Math.round((scale.low + scale.high) / 2), scale.high])].map((v) => [String(v), v]);
  return h("p", { class: "scale" }, by === "logprob" ? "probability " : `${COLORS[by][1]} `, steps.map(([text, value]) => {
    const piece = [];
    piece[COLORS[by][0]] = value;
    piece.length = 8;
    const node = h("span", { class: "tok" }, text);
    node.style.background = ground(piece, by, scale);
    return node;
  }));
}

/** What ratios and entropies are, or the commands that compute them. */
function computed(page, by) {
  const { newest, missing, commands } = page.explained ?? { newest: [], missing: false, commands: [] };
  if (!commands.length) return h("p", { class: "note" }, "No batch holds this group, so no update's ratios and entropies can be computed.");
  const means = {
    ratio: "Probability under the weights that its update began with, by that under which it was sampled.",
    now: `Probability under ${newest.length ? `the weights of version ${newest.map(num).join(" and ")}, the newest checkpoint when that was computed` : "the newest checkpoint's weights"}, by that under which it was sampled.`,
    entropy: "In nats, of what the token was drawn from, under the weights that its update began with.",
  };
  return h("div", { class: "computed" }, h("p", { class: "note" }, means[by], missing ? " It is not stored; this computes it, and the page shows it when it is loaded again:" : by === "now" ? " This computes it anew:" : ""),
    missing || by === "now" ? commands.map(copyable) : null);
}

/** What all answers have in common stands once. */
function prompt(members) {
  const first = members.find((m) => m.turns);
  if (!first) return null;
  const shared = sharedTurns(members);
  if (!shared) return null;
  return h("section", { class: "card prompt", "aria-label": "Prompt" }, h("h2", { class: "unseen" }, "Prompt"), first.turns.slice(0, shared).map((turn) => h("div", { class: "turn" }, h("h3", {}, turn.role), h("p", { class: "said", tabindex: turn.tokens > 200 ? 0 : null }, plain(turn)))),
    h("p", { class: "note" }, `problem ${first.problem}, environment ${first.environment}; temperature ${num(first.decoding.temperature)}, at most ${num(first.decoding.max_output_tokens)} tokens`));
}

function sharedTurns(members) {
  const all = members.filter((m) => m.turns).map((m) => m.turns);
  let count = 0;
  while (all.every((turns) => turns[count] && turns[count].role !== "assistant" && plain(turns[count]) === plain(all[0][count]))) count++;
  return count;
}

function plain(turn) {
  return turn.pieces ? turn.pieces.map((p) => p[0]).join("") : turn.text ?? "";
}

function answer(member, reference, index, by, scale, marked, run) {
  const facts = [
    member.advantage === null ? null : `advantage ${signed(member.advantage)}`, member.tokens === null ? null : `${num(member.tokens)} tokens`,
    member.weight_step === null ? null : `weights ${member.weight_step}${member.newest !== member.weight_step ? "–" + member.newest : ""}`,
    member.logprob === undefined || member.logprob === null ? null : `mean log-probability ${fixed(member.logprob, 2)}`, member.seconds === null ? null : duration(member.seconds), member.finish ? `ended by ${member.finish}` : null,
    member.step === null ? null : h("a", { href: link("update", run, { step: member.step }) }, `update ${num(member.step)}`),
  ].filter(Boolean);
  const turns = member.turns ? member.turns.slice(member.turns.length ? skipped(member) : 0) : null;
  const other = marked && index > 0 && reference.turns && turns ? new Set(differing(turns.flatMap(words), reference.turns.slice(skipped(reference)).flatMap(words))) : null;
  let position = 0;
  return h("article", { class: "card answer", "aria-label": `Answer ${member.position}`, tabindex: 0 },
    h("header", {}, h("h2", { class: "rank" }, `/${member.position}`), h("span", { class: "reward" }, fixed(member.reward)), badge(member.state, member.reason)),
    h("p", { class: "quiet facts-line" }, facts.flatMap((fact, at) => at ? [" · ", fact] : [fact])),
    spent(member.timings),
    member.rewards_by_function?.length ? h("dl", { class: "parts", "aria-label": "Reward by function" },
      member.rewards_by_function.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value === null ? "does not apply" : fixed(value))))) : null,
    member.reason ? h("p", { class: "note warn" }, member.reason) : null,
    turns ? turns.map((turn) => h("div", { class: turn.role === "assistant" ? "turn" : "turn given-turn" }, h("h3", {}, turn.role, h("span", { class: "quiet" }, ` ${num(turn.tokens)} tokens${took(turn)}`)),
      h("p", { class: "said", tabindex: turn.tokens > 200 ? 0 : null }, turn.pieces ? turn.pieces.map((piece) => token(piece, by, scale, other && other.has(position++))) : turn.text)))
      : empty(member.stored ? "Its tokens cannot be read." : "Not stored: it ended before it was sealed, or its part has expired."),
    member.cut ? h("p", { class: "note warn" }, "Only the first tokens are shown; penstock rollouts --show has all.") : null);
}

/** Where its seconds went, as far as they are stored. */
function spent(timings, stages = STAGES) {
  if (!timings || timings.decode_s === undefined) return null;
  const of = (stage) => timings[`${stage}_s`] ?? 0;
  const rest = timings.generate_s === undefined ? 0 : timings.generate_s - of("wait") - of("prefill") - of("decode") - of("tool");
  const shown = stages.map(([stage, kind, text]) => [kind, text, stage === "rest" ? rest : of(stage)]).filter(([, , seconds]) => seconds >= 0.0005);
  return h("dl", { class: "parts", "aria-label": "Seconds by stage" }, shown.map(([kind, text, seconds]) => h("div", {}, h("dt", {}, h("i", { class: `swatch ${kind}` }), text), h("dd", {}, duration(seconds)))));
}

/** What a turn took, where it is stored, which it is of conversations. */
function took(turn) {
  const names = { ...Object.fromEntries(STAGES.map(([stage, , text]) => [`${stage}_s`, text])), rest_s: "rest before it" };
  return Object.entries(turn.timings).filter(([stage, seconds]) => names[stage] && seconds >= 0.0005).map(([stage, seconds]) => ` · ${names[stage]} ${duration(seconds)}`).join("");
}

function skipped(member) {
  const at = member.turns.findIndex((turn) => turn.role === "assistant");
  return at < 0 ? 0 : at;
}

const words = (turn) => (turn.pieces || []).map((piece) => piece[0]);

function token(piece, by, scale, differs) {
  const [text, logprob, advantage, version, reward, then, now, entropy] = piece;
  const ratio = (name, value) => value === null || value === undefined ? null : `ratio ${name} ${fixed(Math.exp(value), 3)}`;
  const sampled = piece.length > 1;
  const node = h("span", { class: `tok${sampled ? "" : " given"}${differs ? " differs" : ""}` }, sampled ? text.replaceAll("\n", "↵\n") : text);
  if (sampled) {
    const color = ground(piece, by, scale);
    if (color) node.style.background = color;
    node.title = [`p ${num(Math.exp(logprob), 3)} (log ${fixed(logprob, 3)})`, advantage === null ? null : `advantage ${signed(advantage)}`, version === null ? null : `version ${version}`, ratio("then", then), ratio("now", now), entropy === null || entropy === undefined ? null : `entropy ${fixed(entropy, 3)}`].filter(Boolean).join(", ");
    if (reward) return [node, h("span", { class: "earned", title: "reward that fell at this token" }, signed(reward, 2))];
  }
  return node;
}

/** Positions in `mine` that a longest common subsequence with `theirs` leaves out; of long texts what lies between what is common at both ends. */
export function differing(mine, theirs) {
  let start = 0, end = 0;
  while (start < mine.length && start < theirs.length && mine[start] === theirs[start]) start++;
  while (end < mine.length - start && end < theirs.length - start && mine.at(-1 - end) === theirs.at(-1 - end)) end++;
  const [a, b] = [mine.slice(start, mine.length - end), theirs.slice(start, theirs.length - end)];
  if (a.length * b.length > 250_000) return a.map((_, index) => start + index);
  const rows = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) rows[i][j] = a[i] === b[j] ? rows[i + 1][j + 1] + 1 : Math.max(rows[i + 1][j], rows[i][j + 1]);
  const found = [];
  let i = 0, j = 0;
  while (i < a.length) {
    if (j < b.length && a[i] === b[j]) { i++; j++; } else if (j < b.length && rows[i][j + 1] >= rows[i + 1][j]) j++;
    else found.push(start + i++);
  }
  return found;
}

function fragment(page) {
  const { fragment: f, members: [m] } = page;
  const rows = f.rewards.map((reward, index) => ({ index, reward, end: f.terminated[index] ? "terminated" : f.truncated[index] ? "truncated" : "", fault: f.faults[index], logprob: f.logprobs?.[index], value: f.values?.[index], version: f.weight_steps?.[index], episode: f.episodes?.[index] }));
  return h("section", { class: "card" }, h("h2", {}, `A fragment of ${num(f.steps)} steps in ${f.env_name}, slot ${f.slot}`),
    h("p", { class: "note" }, `${badgeText(m)}, from ${m.worker} at ${moment(m.time)}; observations are in the part, for penstock rollouts --sql.`),
    f.timings ? spent({ generate_s: f.timings.generate_s, decode_s: f.timings.policy_s, tool_s: f.timings.simulate_s }, stagesOf(true)) : null,
    h("div", { class: "tall" }, table([["step", (r) => num(r.index), "n"], ["episode", (r) => num(r.episode), "n"], ["reward", (r) => num(r.reward), "n"], ["log-probability", (r) => fixed(r.logprob), "n"], ["value", (r) => fixed(r.value), "n"], ["weights", (r) => num(r.version), "n"], ["", (r) => [r.end ? badge(r.end) : "", r.fault ? badge("fault") : ""]]], rows, "Steps")));
}

function badgeText(member) {
  return `${member.state}${member.step === null ? "" : ` at update ${num(member.step)}`}, summed reward ${big(member.reward)}`;
}
