// One run: its state in words, its curves, its ledger, one of its updates.
import { chart, sankey } from "./charts.js";
import { ago, api, badge, big, change, copyable, duration, empty, fixed, h, legend, link, moment, num, parse, signed, stateWords, table } from "./core.js";
import { exportTable } from "./runs.js";

const path = (run, page) => `runs/${encodeURIComponent(run)}${page ? "/" + page : ""}`;

/** Which curves a run page has: title, metrics by pattern, options. The first that has any of its metrics is shown. */
const CHARTS = [
  ["Pace", [/^inference\/tokens_per_s$/, /^throughput\/learner_tokens_per_s$/, /^fleet\/steps_per_s$/, /^throughput\/steps_per_s$/], { zero: true }],
  ["Staleness in updates", [/^replay\/staleness_(mean|max)$/, /^train\/step_staleness_(mean|max)$/], { zero: true }],
  ["Parity of engine and learner (KL)", [/^train\/parity_kl$/, /^train\/staleness_kl$/, /^train\/mismatch_kl$/], { log: true }],
  ["Without signal (shares)", [/^train\/zero_variance_groups$/, /^rollout\/.*\/truncated_fraction$/], { zero: true }],
  ["Response length in tokens", [/^train\/response_tokens$/, /^eval\/.*\/response_tokens$/, /^fleet\/.*\/length_mean$/], { zero: true }],
  ["Entropy", [/^train\/entropy$/], {}],
  ["Loss", [/^train\/loss$/], {}],
  ["Gradient norm", [/^train\/grad_norm$/], { zero: true }],
  ["Idle share", [/^time\/idle\/[^/]+$/], { zero: true }],
  ["Seconds of an update", [/^time\/(update|wait_for_batch|forward_backward|optimise)$/], { zero: true }],
];

export async function runPage(main, run) {
  const page = await api(path(run));
  const { words } = parse();
  const chosen = (words.m || "").split(",").filter((name) => page.metrics.includes(name));
  const charts = CHARTS.map(([title, patterns, options]) => [title, page.metrics.filter((name) => patterns.some((pattern) => pattern.test(name))), options])
    .filter(([, names]) => names.length);
  const scores = page.metrics.filter((name) => /^(train\/reward_mean|fleet\/.*\/reward_mean)$/.test(name));
  const held = page.metrics.filter((name) => /^(eval|eval_report)\/.*\/(reward_mean|return_mean)$/.test(name));
  const names = [...new Set([...scores, ...held, ...charts.flatMap(([, each]) => each), ...chosen])];
  const { curves } = await api(path(run, "curves"), { names: names.join(","), points: 500, from: words.from, to: words.to });
  const marks = shownMarks(page.marks);
  const line = (name, options = {}) => ({ name: options.as || (name.startsWith("time/idle/") ? name.slice(10).replaceAll("_", " ") : legend(name)), x: curves[name]?.step || [], y: curves[name]?.mean || [], low: curves[name]?.low, high: curves[name]?.high, block: curves[name]?.block, hue: options.hue });
  const zoomed = words.from || words.to
    ? h("button", { class: "button", type: "button", onclick: () => change({ from: null, to: null }) }, `Updates ${words.from || 0} to ${words.to || "the last"}: show all`) : null;
  const draw = (reward, findings) => main.replaceChildren(
    headline(page, findings),
    h("div", { class: "head small" }, h("h2", {}, "Curves"), h("div", { class: "tools" }, zoomed, jump(run))),
    h("div", { class: "grid" },
      [rewardChart(page, reward, curves, scores, words, marks), heldOutChart(page, reward, curves, held, words, marks)],
      charts.map(([title, each, options]) => chart(title, each.map((name) => line(name)), { ...options, marks: marks.filter(([, , kind]) => kind === "bad") })),
      chosen.map((name) => chart(name, [line(name, { as: name })], { marks }))),
    metricPicker(page.metrics, chosen),
    eventList(page));
  if (!page.alive) draw(null, null);  // reward from metrics.jsonl: its intervals go through all rollouts
  const [reward, { findings }] = await Promise.all([api(path(run, "reward")), api(path(run, "findings"))]);
  draw(reward, findings);
}

function headline(page, findings) {
  const facts = [
    ["update", [num(page.step ?? null), page.steps ? h("span", { class: "quiet" }, ` of ${num(page.steps)}`) : ""]],
    ["reward", fixed(page.score)],
    ...Object.entries(page.held_out).map(([name, [score, step]]) => [`held out, ${name}`, [fixed(score), h("span", { class: "quiet" }, ` at ${num(step)}`)]]),
    [page.alive ? "cost so far" : "cost", duration(page.busy_s)],
    [page.unit === "steps" ? "steps simulated" : "tokens generated", big(page.generated)],
    ["lives", num(page.lives)],
  ];
  return h("section", { class: "card headline" },
    h("div", { class: "title" }, h("h1", {}, page.name), badge(page.state), h("span", { class: "quiet" }, page.alive ? `${page.phase}, ${ago(page.age_s)}` : page.ended_by || page.phase)),
    page.problem ? h("p", { class: "bad-text" }, page.problem) : null,
    page.progress && !page.problem ? h("p", { class: "note live-note" }, `${page.progress} …`) : null,
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("dl", { class: "sentences" },
      page.ledger.started ? sentence("Ledger", [Object.entries(page.ledger).filter(([, count]) => count).map(([name, count]) => `${stateWords(name)} ${num(count)}`).join(", "), " · ", h("a", { href: link("ledger", page.name) }, "where they went")]) : null,
      sentence("Bottleneck", page.bottleneck), sentence("Training", page.words), sentence("No signal", page.no_signal),
      sentence(page.alive ? "Waiting" : "Last waiting", ["dead", "failed"].includes(page.state) || page.alive ? page.waiting_for : ""),
      Object.entries(page.failures).map(([name, found]) => found.failed ? sentence("Failures", `${num(found.failed)} of ${name}; the last: ${found.last_failure}`) : null),
      findings?.map(({ name, words, links }) => sentence(name, [words, links.map(([text, to, asked]) => [" · ", h("a", { href: link(to, page.name, asked) }, text)])])),
      !findings || findings.length || page.troubles || page.problem || page.progress || page.alive ? null : sentence("Stands out", "nothing unusual found: no slow update, no jump of reward, nothing thrown away, no sick simulator"),
      Object.keys(page.index.damaged).length ? sentence("Cannot be read", Object.values(page.index.damaged).join("; ")) : null),
    h("p", { class: "commands" }, copyable(page.commands.status), copyable(page.commands.rollouts)));
}

function sentence(name, text) {
  return text ? h("div", {}, h("dt", {}, name), h("dd", {}, text)) : null;
}

function jump(run) {
  return h("form", { class: "jump", onsubmit: (event) => {
    event.preventDefault();
    const step = new FormData(event.target).get("step");
    if (step !== "") location.hash = link("update", run, { step });
  } }, h("label", {}, "update ", h("input", { name: "step", type: "number", min: 0, inputmode: "numeric" })), h("button", { class: "button", type: "submit" }, "Open"));
}

const LOUD = ["death", "failure", "interrupted", "regressed", "quarantined", "disk full", "no signal", "weights differ", "worker failed", "rewind"];

/** Checkpoints of a long run would cover it: of many marks of a kind only the last few stay. */
function shownMarks(marks) {
  const counts = {};
  return marks.filter(([text]) => text !== "end").reverse()
    .filter(([text]) => (counts[text] = (counts[text] || 0) + 1) <= (LOUD.includes(text) ? 40 : 6)).reverse()
    .map(([text, step]) => [text, step, LOUD.includes(text) ? "bad" : "good"]).sort((a, b) => a[1] - b[1]);
}

function within(words, step) {
  return (!words.from || step >= Number(words.from)) && (!words.to || step <= Number(words.to));
}

const READING = "Going through all rollouts …";

function rewardChart(page, reward, curves, scores, words, marks) {
  const rows = reward?.trained.filter(([step]) => within(words, step)) ?? [];
  if (page.kind === "language" && rows.length) {
    const pooled = reward.block > 1 ? `each point pools ${reward.block} updates` : "each point is an update";
    return chart("Reward of what was trained", [{ name: "mean with 95% interval", x: rows.map((r) => r[0]), y: rows.map((r) => r[1]), low: rows.map((r) => r[2] ?? r[1]), high: rows.map((r) => r[3] ?? r[1]) }],
      { marks, note: `${pooled}; groups are the independent draws` });
  }
  return chart("Reward", scores.map((name) => ({ name: legend(name), x: curves[name].step, y: curves[name].mean, low: curves[name].low, high: curves[name].high, block: curves[name].block })), { marks, empty: reward ? null : READING });
}

function heldOutChart(page, reward, curves, held, words, marks) {
  const rows = reward?.held_out.filter((row) => within(words, row.step)) ?? [];
  const apart = (lesson) => held.some((name) => name.startsWith(`eval_report/${lesson}/`));
  for (const row of rows) if (!["eval", "micro_eval"].includes(row.evaluation) && apart(row.lesson)) row.lesson += " (report)";
  const lessons = [...new Set(rows.map((row) => row.lesson))];
  if (lessons.length) {
    return chart("Held-out reward", lessons.map((lesson) => {
      const mine = new Map(rows.filter((row) => row.lesson === lesson).map((row) => [row.step, row]));
      const all = [...mine.values()].sort((a, b) => a.step - b.step);
      return { name: lesson, points: true, x: all.map((r) => r.step), y: all.map((r) => r.mean), low: all.map((r) => r.low ?? r.mean), high: all.map((r) => r.high ?? r.mean) };
    }), { marks: marks.filter(([, , kind]) => kind === "bad"), note: "95% interval by problems" });
  }
  return chart("Held-out reward", held.map((name) => ({ name: name.split("/").slice(1, -1).join("/") + (name.startsWith("eval_report/") ? " (report)" : ""), points: true, x: curves[name].step, y: curves[name].mean })), { empty: !reward ? READING : page.alive ? "Nothing was evaluated yet." : "Nothing was evaluated.", marks: [] });
}

function metricPicker(metrics, chosen) {
  const list = h("ul", { class: "metrics" });
  const draw = (text) => list.replaceChildren(...metrics.filter((name) => name.includes(text.toLowerCase())).slice(0, 300).map((name) =>
    h("li", {}, h("label", {}, h("input", { type: "checkbox", checked: chosen.includes(name), onchange: (event) =>
      change({ m: (event.target.checked ? [...chosen, name] : chosen.filter((each) => each !== name)).join(",") }) }), name))));
  draw("");
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, `All ${metrics.length} metrics`),
    h("input", { type: "search", id: "filter", placeholder: "Filter metrics", "aria-label": "Filter metrics", oninput: (event) => draw(event.target.value) })), list);
}

function eventList(page) {
  const rows = page.events.toReversed();
  const details = (event) => event.words ?? inWords(event, ["time", "event", "step"]);
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, "What happened"), exportTable(`${page.name}-events`, ["time", "step", "event", "details"], rows.map((e) => [e.time, e.step, e.event, details(e)]))),
    rows.length ? h("div", { class: "tall" }, table([["when", (e) => moment(e.time), "n"], ["update", (e) => num(e.step ?? null), "n"], ["event", (e) => String(e.event).replaceAll("_", " ")], ["", details, "wide"]], rows, "Events"))
      : empty("No events are recorded."));
}

/** Of an event's fields those that say something, by name. */
function inWords(fields, without = []) {
  return Object.entries(fields).filter(([name, value]) => !without.includes(name) && !(typeof value === "object" && Object.keys(value ?? {}).length === 0))
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? num(value) : Array.isArray(value) ? value.map((each) => typeof each === "object" ? JSON.stringify(each) : each).join(", ") : typeof value === "object" ? `(${inWords(value)})` : value}`).join(", ");
}

export async function ledgerPage(main, run) {
  const { words } = parse();
  const page = await api(path(run, "ledger"));
  const unit = ["rollouts", "tokens", "seconds"].includes(words.unit) ? words.unit : "rollouts";
  const flows = page.flows.map((flow) => ({ path: [flow.lesson ?? "unknown", flow.finish, flow.state], size: flow[unit] })).filter((flow) => flow.size > 0);
  const hrefs = (gap, from, to) => link("groups", run, gap === 0 ? { lesson: from === "unknown" ? null : from, finish: to === "stored" ? null : to } : { finish: from === "stored" ? null : from, state: to });
  const units = h("div", { class: "segmented", role: "group", "aria-label": "Counted in" }, ["rollouts", "tokens", "seconds"].map((name) =>
    h("button", { type: "button", "aria-pressed": String(name === unit), onclick: () => change({ unit: name }) }, name)));
  const box = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Where rollouts went" });
  const started = page.ledger.started;
  const trained = page.ages.reduce((sum, row) => sum + row.rollouts, 0);
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, "Ledger"), h("p", { class: "sub" }, "Where every rollout came from, how it ended, and what became of it. A ribbon opens its groups."), h("div", { class: "tools" }, units)),
    h("section", { class: "card" }, box, unit === "seconds" ? h("p", { class: "note" }, "Seconds from where a worker began a group to the end of each answer, summed: answers of one group are generated side by side.") : null,
      started ? h("p", { class: "note" }, "As status.json last counted:") : null,
      started ? h("dl", { class: "facts" }, Object.entries(page.ledger).filter(([, count]) => count).map(([name, count]) => h("div", {}, h("dt", {}, stateWords(name)), h("dd", {}, num(count))))) : null),
    h("section", { class: "card" }, h("h2", {}, "Thrown away, and why"), page.words.map((words) => h("p", {}, words)), page.reasons.length ? table([
      ["rollouts", (r) => num(r.rollouts), "n"], ["state", (r) => badge(r.state)], ["lesson", (r) => r.lesson ?? "–"], ["why", (r) => r.reason, "wide"],
      ["updates", (r) => r.first === r.last ? num(r.first) : `${num(r.first)}–${num(r.last)}`, "n"], ["for example", (r) => h("a", { href: link("group", run, { id: r.example }) }, r.example)],
    ], page.reasons, "Reasons") : empty("Nothing was thrown away.")),
    h("section", { class: "card compact" }, h("h2", {}, "Age when trained"), page.ages.length ? table([
      ["updates old", (r) => h("a", { href: link("groups", run, { state: "trained", min_staleness: r.age, order: "staleness" }) }, num(r.age)), "n"], ["rollouts", (r) => num(r.rollouts), "n"],
      ["share", (r) => h("meter", { min: 0, max: trained, value: r.rollouts, "aria-label": `${(100 * r.rollouts / trained).toFixed(1)}%` })], ["", (r) => `${(100 * r.rollouts / trained).toFixed(1)}%`, "n"],
    ], page.ages, "Age when trained") : empty("Nothing that was trained is recorded.")));
  box.append(sankey(flows, unit, ["lesson", "finish", "state"], hrefs, Math.max(560, Math.min(1240, box.clientWidth || 900))));
}

/** What `penstock replay` found of an update: stored and recomputed numbers, loss and gradient norm first. */
function replayCard(run, step, replay) {
  const exact = (value, digits = 9, plus = "") => (value === null ? "–" : (value > 0 ? plus : "") + String(Number(value.toPrecision(digits))).replaceAll("-", "−"));
  const differs = (r) => (r[1] === null || r[2] === null ? "–" : r[3] ? exact(r[2] - r[1], 3, "+") : "equal");
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, "Replayed ", h("span", { class: `badge ${replay.equal ? "good" : replay.as === "as it was" ? "bad" : "calm"}` }, replay.as)),
      exportTable(`${run}-replay-${step}`, ["metric", "stored", "recomputed", "equal"], replay.numbers.map((r) => [r[0], r[1], r[2], !r[3]]))),
    h("p", {}, replay.words, " ", h("span", { class: "quiet" }, moment(replay.time))),
    h("div", { class: "tall" }, table([["metric", (r) => r[0]], ["stored", (r) => exact(r[1]), "n"], ["recomputed", (r) => exact(r[2]), "n"], ["difference", differs, "n"]], replay.numbers, `Replayed ${replay.as}`)));
}

const MOVED = ["moved", "along", "gradient_norm", "inner_product", "staleness", "drift", "surprise", "reward", "advantage", "tokens"];
const percent = (share) => `${(100 * share).toFixed(1)}%`;

export async function updatePage(main, run) {
  const { words } = parse();
  const step = Number(words.step || 0);
  const page = await api(path(run, "update"), { step });
  const odd = Object.entries(page.numbers).map(([name, [value, mean, spread]]) => ({ name, value, mean, z: spread ? (value - mean) / spread : mean === null || value === mean ? null : Math.sign(value - mean) * Infinity }))
    .sort((a, b) => Math.abs(b.z ?? 0) - Math.abs(a.z ?? 0) || 0);
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, `Update ${num(step)}`), h("p", { class: "sub" }, "The update that led to this version, as in metrics.jsonl."),
      h("div", { class: "tools" }, h("a", { class: "button", id: "before", href: link("update", run, { step: Math.max(0, step - 1) }) }, "← before"), h("a", { class: "button", id: "after", href: link("update", run, { step: step + 1 }) }, "after →"), jump(run))),
    page.words.length ? h("section", { class: "card" }, h("h2", {}, "What happened at it"), page.words.map((words) => h("p", {}, words))) : null,
    page.moved.length ? h("section", { class: "card" }, h("header", {}, h("h2", {}, "What moved it"), exportTable(`${run}-moved-${step}`, ["rollout", ...MOVED], page.moved.map((r) => [r.rollout_id, ...MOVED.map((name) => r[name])]))),
      h("p", { class: "note" }, "As penstock why found: how much of the update would be another without the rollout, its share of the update's length, how much likelier its tokens had become before it (drift, nats per token), and how unlikely they were (surprise)."),
      h("div", { class: "tall" }, table([["rollout", (r) => h("a", { href: link("group", run, { id: r.group_id }) }, r.rollout_id)], ["moved", (r) => percent(r.moved), "n"], ["share", (r) => percent(r.along), "n"], ["reward", (r) => fixed(r.reward), "n"], ["advantage", (r) => signed(r.advantage), "n"], ["tokens", (r) => num(r.tokens), "n"], ["versions old", (r) => num(r.staleness), "n"], ["drift", (r) => signed(r.drift, 3), "n"], ["surprise", (r) => fixed(r.surprise, 2), "n"]], page.moved, "What moved it"))) : null,
    page.replays.map((replay) => replayCard(run, step, replay)),
    h("section", { class: "card" }, h("h2", {}, page.moved.length || page.replays.length ? "What else would explain it" : "What would explain it"), h("p", { class: "note" }, "Gradients are not stored. These commands make the update again from the run's files, and say what each rollout did to it, or what another loss would have done. Nothing is written into the run; afterwards this page shows what they found, and its groups' tokens have ratios and entropies."), page.commands.map(copyable)),
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Numbers that are unlike the updates around it"), exportTable(`${run}-update-${step}`, ["metric", "value", "mean around", "deviations"], odd.map((r) => [r.name, r.value, r.mean, r.z]))),
      odd.length ? h("div", { class: "tall" }, table([["metric", (r) => h("a", { href: link("run", run, { m: r.name, from: Math.max(0, step - 50), to: step + 50 }) }, r.name)], ["value", (r) => num(r.value), "n"], ["mean of ±20 updates", (r) => num(r.mean), "n"], ["standard deviations off", (r) => r.z === null ? "–" : Number.isFinite(r.z) ? signed(r.z, 1) : "they are all alike", "n"]], odd, "Numbers")) : empty("There are no metrics of this update.")),
    h("section", { class: "card" }, h("h2", {}, "What it trained"), page.groups.length ? h("div", { class: "tall" }, table([
      ["group", (g) => h("a", { href: link("group", run, { id: g.group_id }) }, g.group_id)], ["lesson", (g) => g.lesson], ["n", (g) => num(g.n), "n"], ["reward", (g) => fixed(g.reward), "n"], ["min", (g) => fixed(g.low), "n"], ["max", (g) => fixed(g.high), "n"],
      ["largest advantage", (g) => fixed(g.advantage), "n"], ["tokens", (g) => num(Math.round(g.tokens)), "n"], ["age", (g) => num(g.staleness), "n"],
    ], page.groups, "Groups of this update")) : empty("No group of this update is known: it is none of this run, or its files have expired.")),
    page.dropped.length ? h("section", { class: "card" }, h("h2", {}, "Thrown away at it"), table([["state", (d) => badge(d.state)], ["rollouts", (d) => h("a", { href: link("groups", run, { state: d.state, from_step: step, to_step: step }) }, num(d.rollouts)), "n"]], page.dropped, "Thrown away")) : null,
    page.events.length ? eventList({ name: `${run}-${step}`, events: page.events }) : null);
}
