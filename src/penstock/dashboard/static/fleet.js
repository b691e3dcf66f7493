// What ran where: the lives of rollouts, lessons, components and simulators.
import { chart } from "./charts.js";
import { api, badge, bundle, change, duration, empty, fixed, h, legend, link, moment, num, parse, s, stagesOf, stateKind, table } from "./core.js";

const path = (run, page) => `runs/${encodeURIComponent(run)}/${page}`;

export async function timelinePage(main, run) {
  const { words } = parse();
  const page = await api(path(run, "timeline"), { from: words.from, to: words.to });
  const bars = page.bars.map((bar) => ({ ...bar, began: bar.began ?? bar.finished })).filter((bar) => bar.finished);
  const lives = bars.reduce((count, bar) => count + bar.lives.length, 0);
  const [first, last] = page.span, stages = stagesOf(page.simulators);
  const box = h("div", { class: "scroll timeline", tabindex: 0, role: "region", "aria-label": "Timeline" });
  const low = bars.length ? Math.min(...bars.map((b) => b.admitted ?? b.began)) : first;
  const high = bars.length ? Math.max(...bars.map((b) => b.ended ?? b.finished)) : last;
  const width = high - low;
  const move = (by, zoom = 1) => {
    const middle = (low + high) / 2 + by * width, half = width / 2 * zoom;
    change({ from: (middle - half).toFixed(3), to: (middle + half).toFixed(3) });
  };
  const button = (text, label, act) => h("button", { class: "button", type: "button", "aria-label": label, title: label, onclick: act }, text);
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, "Timeline"), h("p", { class: "sub" }, page.simulators ? "The life of each fragment: simulator and policy, then in the buffer until its update. Lanes by worker." : "The life of each rollout: waiting, being generated, scored, in the buffer until its update. Groups stand together, lanes by worker."),
      bundle ? null : h("div", { class: "tools" }, button("←", "Earlier", () => move(-0.5)), button("→", "Later", () => move(0.5)), button("+", "Closer", () => move(0, 0.5)), button("−", "Wider", () => move(0, 2)), button("latest", "The latest", () => change({ from: null, to: null })))),
    h("p", { class: "scale" }, stages.map(([, kind, text]) => h("span", {}, h("i", { class: `swatch ${kind}` }), text)), h("span", {}, h("i", { class: "swatch life-buffer" }), "in the buffer"), h("span", {}, h("i", { class: "swatch end-good" }), "trained"), h("span", {}, h("i", { class: "swatch end-bad" }), "thrown away"), h("span", {}, h("i", { class: "swatch swap" }), Object.keys(page.served).length ? "an engine's next version" : "an update")),
    h("section", { class: "card flush" }, box),
    h("p", { class: "note" }, `${page.simulators ? `${num(lives)} fragments` : `${num(lives)} rollouts of ${num(bars.length)} groups`}${lives >= page.most ? " (the latest of this stretch; come closer for all)" : ""}, ${moment(low)} to ${moment(high)} UTC. ${page.simulators ? "What a fragment's steps took of policy and simulator stands together; the rest it waited for others of its batch." : "Of several turns each stands where it was, in newer runs. What is left of generating is not told apart."} ${Object.keys(page.served).length ? "Above are the versions that each engine sampled with, from when it had them." : "When engines had a version is not stored: lines are updates."}`));
  if (!bars.length) box.append(empty("No rollout was finished in this stretch."));
  else box.append(lanes(bars, page, low, high, run, Math.max(760, box.clientWidth - 4)));
  return { keys: bundle ? {} : { h: () => move(-0.5), l: () => move(0.5), "+": () => move(0, 0.5), "-": () => move(0, 2) } };
}

const BAR = 5, PITCH = 6, BAND = 13;
const OF_TURN = ["rest", "wait", "prefill", "decode", "tool"];

/** Where a rollout's time went, stage and seconds one after the other; what its stages leave of generating is `rest`. */
function stretches(bar, index, over) {
  const [, time, seconds, waited, prefill, decode, tool, scored] = bar.lives[index].map((value) => value ?? 0);
  const began = time - seconds, from = bar.admitted ?? began, turns = bar.turns[index];
  const inside = turns ? turns.map((value, at) => [OF_TURN[at % OF_TURN.length], value]) : [["wait", waited], ["prefill", prefill], ["decode", decode], ["tool", tool]];
  const known = inside.reduce((sum, [, value]) => sum + value, 0), fit = known > seconds ? seconds / known : 1;
  const rest = ["rest", Math.max(0, seconds - known)], fitted = inside.map(([stage, value]) => [stage, value * fit]);
  return { from, pieces: [["wait", Math.max(0, began - from)], ...(turns ? [rest, ...fitted] : [...fitted, rest]), ["reward", scored], ["buffer", Math.max(0, over - time - scored)]] };
}

function summed(lives) {
  const sums = {};
  for (const [stage, seconds] of lives.flatMap((life) => life.pieces)) sums[stage] = (sums[stage] ?? 0) + seconds / lives.length;
  return sums;
}

function lanes(bars, page, low, high, run, width) {
  const left = 150, x = (time) => left + (time - low) / (high - low || 1) * (width - left - 12);
  const workers = new Map(), stages = stagesOf(page.simulators), served = Object.entries(page.served);
  for (const bar of bars.toSorted((a, b) => (a.admitted ?? a.began) - (b.admitted ?? b.began))) {
    const name = bar.worker ?? "not stored";
    const rows = workers.get(name) || [];
    const start = bar.admitted ?? bar.began, end = Math.max(bar.ended ?? high, start + (high - low) / 300);
    let row = 0;
    for (let free = 0; free < bar.lives.length; row++) free = (rows[row] ?? 0) <= start ? free + 1 : 0;
    bar.row = row - bar.lives.length;
    for (let at = bar.row; at < row; at++) rows[at] = end;
    workers.set(name, rows);
  }
  let y = 24;
  const tops = new Map(), labels = [], bands = [];
  const label = (name) => labels.push(s("text", { class: "lane", x: 4, y: y + 10 }, name.length > 22 ? name.slice(0, 21) + "…" : name, s("title", {}, name)));
  if (!page.simulators) for (const [name, versions] of served) {
    label(name);
    bands.push([name, versions, y, null]);
    y += BAND + 6;
  }
  for (const [name, rows] of workers) {
    label(name);
    const tall = Math.max(rows.length * PITCH, 10), own = page.simulators && page.served[name];
    if (own) bands.push([name, own, y, y + BAND + 3 + tall]);
    y += own ? BAND + 3 : 0;
    tops.set(name, y);
    y += tall + 12;
  }
  const drawn = bars.map((bar) => {
    const top = tops.get(bar.worker ?? "not stored") + bar.row * PITCH;
    const lives = bar.lives.map((life, index) => stretches(bar, index, life[8] ?? high));
    const words = `${bar.group_id}: ${told(summed(lives), stages)}${lives.length > 1 ? " on average" : ""}; ${bar.states.join(", ")}${bar.step === null ? "" : ` at update ${bar.step}`}, reward ${fixed(bar.reward)}`;
    return s("a", { href: link("group", run, { id: bar.group_id }), "aria-label": words },
      s("rect", { class: "hit", x: x(bar.admitted ?? bar.began).toFixed(1), y: top, width: Math.max(2, x(Math.max(bar.ended ?? high, bar.finished)) - x(bar.admitted ?? bar.began)).toFixed(1), height: lives.length * PITCH - 1 }),
      lives.map((life, index) => rollout(bar, index, life, top + index * PITCH, x, high, stages)));
  });
  const updates = served.length ? [] : page.updates.filter(([, time]) => time >= low && time <= high);
  const every = Math.max(1, Math.ceil(updates.length / 24));
  const swaps = updates.map(([step, time], index) => s("g", { class: "swap" }, s("line", { x1: x(time), x2: x(time), y1: 16, y2: y }), index % every ? null : s("text", { x: x(time) + 2, y: 12 }, num(step))));
  return s("svg", { width, height: y + 4, viewBox: `0 0 ${width} ${y + 4}`, role: "group", "aria-label": "Lives of rollouts" }, labels, bands.map(([name, versions, top, bottom]) => band(name, versions, top, bottom ?? y, x, low, high)), drawn, swaps);
}

/** The versions that an engine sampled with, from one swap to the next, and a line at each; those too close to be told apart stand together. */
function band(name, versions, top, bottom, x, low, high) {
  const shown = [];
  versions.forEach(([step, time], index) => {
    const start = x(Math.max(low, time)), stop = x(Math.min(high, versions[index + 1]?.[1] ?? high));
    const before = shown.at(-1);
    if (before && stop - before.start < 4) Object.assign(before, { stop, last: step });
    else if (stop > start) shown.push({ start, stop, first: step, last: step, time });
  });
  return shown.map(({ start, stop, first, last, time }, index) => {
    const text = first === last ? num(first) : `${num(first)}–${num(last)}`;
    return s("g", { class: "served" }, s("title", {}, `${name}: version${first === last ? "" : "s"} ${text}, from ${moment(time)}`),
      s("rect", { class: index % 2 ? "odd" : "even", x: start.toFixed(1), y: top, width: Math.max(0.6, stop - start).toFixed(1), height: BAND }),
      stop - start > 7 * text.length + 4 ? s("text", { x: start + 3, y: top + 10 }, text) : null,
      time < low ? null : s("line", { x1: start, x2: start, y1: top, y2: bottom }));
  });
}

const told = (sums, stages) => [...stages.map(([stage, , text]) => [stage, text]), ["buffer", "in the buffer"]].filter(([stage]) => sums[stage] > 0).map(([stage, text]) => `${text} ${duration(sums[stage])}`).join(", ");

function rollout(bar, index, life, top, x, high, stages) {
  const [position, , , , , , , , ended, reward] = bar.lives[index], fate = bar.fates[index];
  const end = stateKind(fate) === "bad" ? "end-bad" : ended ? "end-good" : "end-none";
  let at = life.from;
  return s("g", {}, s("title", {}, `${bar.group_id}/${position}: ${told(summed([life]), stages)}; ${fate}, reward ${fixed(reward)}`),
    life.pieces.map(([stage, seconds]) => {
      const start = at, wide = x(at += seconds) - x(start);
      return wide > 0.1 ? s("rect", { class: `life-${stage}`, x: x(start).toFixed(1), y: top, width: Math.max(0.6, wide).toFixed(1), height: BAR }) : null;
    }),
    s("rect", { class: end, x: (x(ended ?? high) - 1).toFixed(1), y: top, width: 2.5, height: BAR }));
}

export async function lessonsPage(main, run) {
  const page = await api(path(run, "lessons"));
  const shares = page.lessons.flatMap((l) => l.metrics.filter((m) => /^curriculum\/.*\/probability$/.test(m)));
  const success = page.lessons.flatMap((l) => l.metrics.filter((m) => /^(curriculum\/.*\/success|rollout\/.*\/success_rate|fleet\/.*\/reward_mean)$/.test(m)));
  const { words } = parse();
  const { curves } = shares.length + success.length ? await api(path(run, "curves"), { names: [...shares, ...success].join(","), points: 400, from: words.from, to: words.to }) : { curves: {} };
  const lines = (names) => names.map((name) => ({ name: legend(name).replace(/ probability$/, ""), x: curves[name].step, y: curves[name].mean }));
  const box = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Lessons and what they wait for" });
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, "Lessons"), h("p", { class: "sub" }, "Which lesson waits for which, how likely each is, and how its rollouts fared.")),
    h("section", { class: "card" }, box),
    h("section", { class: "card flush" }, table([
      ["lesson", (l) => h("a", { class: "strong", href: link("groups", run, { lesson: l.lesson }) }, l.lesson)], ["state", (l) => l.state || "–"], ["environment", (l) => h("code", {}, l.environment.split(".").at(-1))], ["needs", (l) => l.needs.join(", ") || "–"],
      ["rollouts", (l) => num(l.rollouts ?? null), "n"], ["trained", (l) => num(l.trained ?? null), "n"], ["thrown away", (l) => l.dropped ? h("a", { href: link("ledger", run) }, num(l.dropped)) : num(l.dropped ?? null), "n"], ["reward", (l) => fixed(l.reward), "n"], ["tokens", (l) => l.tokens === undefined || l.tokens === null ? "–" : num(Math.round(l.tokens)), "n"],
    ], page.lessons, "Lessons")),
    shares.length || success.length ? h("h2", { class: "unseen" }, "Curves") : null,
    h("div", { class: "grid" }, shares.length ? chart("Probability of each lesson", lines(shares), { zero: true }) : null, success.length ? chart("Success", lines(success), {}) : null),
    h("section", { class: "card" }, h("h2", {}, "What happened"), page.events.length ? table([["when", (e) => moment(e.time), "n"], ["update", (e) => num(e.step ?? null), "n"], ["event", (e) => e.event], ["lesson", (e) => e.lesson ?? e.lesson_id ?? "–"], ["why", (e) => e.reason ?? e.message ?? "–", "wide"]], page.events.toReversed(), "Events of lessons") : empty("No lesson was unlocked, graduated or fell back so far.")));
  box.append(graph(page.lessons, run));
}

/** Lessons from left to right, each behind those that it waits for. */
function graph(lessons, run) {
  const byName = new Map(lessons.map((l) => [l.lesson, l]));
  const depth = (name, seen = []) => seen.includes(name) ? 0 : 1 + Math.max(-1, ...(byName.get(name)?.needs || []).filter((n) => byName.has(n)).map((n) => depth(n, [...seen, name])));
  const columns = [];
  for (const lesson of lessons) (columns[depth(lesson.lesson)] ||= []).push(lesson);
  const at = new Map();
  columns.forEach((column, i) => column.forEach((lesson, j) => at.set(lesson.lesson, [12 + i * 230, 12 + j * 62])));
  const width = columns.length * 230 + 20, height = Math.max(...columns.map((c) => c.length)) * 62 + 16;
  const links = lessons.flatMap((l) => l.needs.filter((n) => at.has(n)).map((n) => {
    const [[x1, y1], [x2, y2]] = [at.get(n), at.get(l.lesson)];
    return s("path", { class: "edge", d: `M${x1 + 180},${y1 + 22}C${x1 + 205},${y1 + 22} ${x2 - 25},${y2 + 22} ${x2},${y2 + 22}` });
  }));
  const nodes = lessons.map((l) => {
    const [x, y] = at.get(l.lesson), name = l.lesson.length > 22 ? l.lesson.slice(0, 21) + "…" : l.lesson;
    return s("a", { href: link("groups", run, { lesson: l.lesson }), class: `node ${l.state.split(" ")[0]}` }, s("rect", { x, y, width: 180, height: 44, rx: 7 }), s("text", { x: x + 12, y: y + 19, class: "strong" }, name), s("text", { x: x + 12, y: y + 35, class: "amount" }, (l.state || "–").slice(0, 28)), s("title", {}, `${l.lesson}: ${l.state}`));
  });
  return s("svg", { class: "lessons", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Lessons" }, links, nodes);
}

const DOWN = ["failed", "quarantined"];

/** Of a simulator process: `bad` where it is down or failed before, `warn` after faults alone. */
function health(row, alive) {
  if (DOWN.includes(row.state) || row.failures) return "bad";
  return row.faults ? "warn" : alive && row.state === "live" ? "good" : "calm";
}

export async function fleetPage(main, run) {
  const page = await api(path(run, "fleet"));
  const { words } = parse();
  const patterns = [/^fleet\/(live|respawning|quarantined)$/, /^fleet\/(restarts|faults|abandoned|worker_restarts)$/, /^fleet\/steps_per_s$/, /^fleet\/(step|inference|wait)_p(50|99)_s$/, /^time\/idle\//, /^fleet\/[^/]+\/reward_(mean|min|max)$/, /^fleet\/[^/]+\/length_mean$/, /^fleet\/[^/]+\/(episodes|faulty_episodes|cut_episodes)$/];
  const titles = ["Simulators", "Faults so far", "Steps per second", "Seconds by stage", "Idle share", "Reward of the newest episodes", "Steps of an episode", "Episodes"];
  const groups = patterns.map((pattern) => page.metrics.filter((name) => pattern.test(name)));
  const { curves } = groups.flat().length ? await api(path(run, "curves"), { names: groups.flat().join(","), points: 400, from: words.from, to: words.to }) : { curves: {} };
  const search = (words.search || "").toLowerCase();
  const simulators = page.simulators.filter((row) => JSON.stringify(row).toLowerCase().includes(search));
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, "Fleet"), h("p", { class: "sub" }, page.alive ? "What runs now." : "What ran, as last known.")),
    h("section", { class: "card flush" }, page.components.length ? table([
      ["component", (c) => h("span", { class: "strong" }, c.name)], ["state", (c) => badge(page.alive ? c.state ?? c.phase ?? "unknown" : "ended", `last ${c.state ?? c.phase ?? "unknown"}`)], ["life", (c) => num(c.incarnation ?? 0), "n"], ["deaths", (c) => num(c.deaths ?? 0), "n"], ["weights", (c) => c.version ? num(c.version[1]) : "–", "n"], ["behind", (c) => num(c.lag_steps ?? null), "n"],
      ["idle", (c) => c.busy_s + c.idle_s > 0 ? `${Math.round(100 * c.idle_s / (c.busy_s + c.idle_s))}%` : "–", "n"], ["where", (c) => c.host ? `${c.host}:${c.pid}` : "–"], ["doing", (c) => [c.doing ?? "", c.last_death ? h("span", { class: "bad-text" }, ` last death: ${c.last_death}`) : ""], "wide"],
    ], page.components, "Components") : empty("status.json says nothing of components.")),
    page.simulators.length ? h("section", { class: "card" }, h("header", {}, h("h2", {}, `${num(page.simulators.length)} simulator processes`), h("input", { type: "search", id: "filter", placeholder: "Filter simulators", "aria-label": "Filter simulators", value: words.search || "", oninput: (event) => change({ search: event.target.value }, true) })),
      page.words ? h("p", {}, page.words) : null,
      h("div", { class: "wall", role: "img", "aria-label": `${page.simulators.filter((r) => r.failures + r.faults).length} of ${page.simulators.length} had failures or faults` }, simulators.map((row) => h("i", { class: `sim ${health(row, page.alive)}`, title: `${row.simulator}: ${row.state}, ${row.failures} failures, ${row.faults} faults` }))),
      h("ul", { class: "legend" }, [["bad", "down, or it failed"], ["warn", "faults in episodes only"], ["good", "live"], ["calm", "ended without trouble"]].map(([kind, text]) => h("li", {}, h("i", { class: `sim ${kind}` }), text))),
      h("p", { class: "note" }, "A failure ends the process, and each start is a life; a fault ends one episode, and the process goes on."),
      h("div", { class: "tall" }, table([["simulator", (r) => r.simulator], ["task", (r) => r.task ?? "–"], ["state", (r) => [badge(page.alive || r.state !== "live" ? r.state : "ended"), health(r, page.alive) === "bad" && !DOWN.includes(r.state) ? h("span", { class: "bad-text" }, ` failed ${r.failures === 1 ? "once" : `${num(r.failures)} times`}`) : ""]], ["lives", (r) => num(r.starts), "n"], ["failures", (r) => num(r.failures), "n"], ["faults", (r) => num(r.faults), "n"], ["slots", (r) => num(r.slots ?? null), "n"], ["started in", (r) => duration(r.seconds), "n"], ["last trouble", (r) => r.last || "–", "wide"]], simulators, "Simulators, the sickest first"))) : null,
    h("div", { class: "grid" }, groups.map((names, index) => names.length ? chart(titles[index], names.map((name) => ({ name: name.startsWith("fleet/") ? legend(name) : name.split("/").at(-1).replaceAll("_", " "), x: curves[name].step, y: curves[name].mean })), { zero: true }) : null)),
    Object.keys(page.account).length ? h("section", { class: "card" }, h("h2", {}, "Account of steps"), h("dl", { class: "facts" }, Object.entries(page.account).map(([name, count]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, num(count)))))) : null,
    page.films.length ? h("section", { class: "card" }, h("h2", {}, "Films of episodes"), bundle ? h("p", { class: "note" }, `${page.films.length} films are in the run's videos folder.`) : h("div", { class: "films" }, page.films.slice(0, 24).map((name) => h("figure", {}, h("video", { controls: true, preload: "none", src: `api/${path(run, "film")}?name=${encodeURIComponent(name)}` }), h("figcaption", {}, name))))) : null,
    page.events.length ? h("section", { class: "card" }, h("h2", {}, "Starts, deaths and ends"), h("div", { class: "tall" }, table([["when", (e) => moment(e.time), "n"], ["event", (e) => e.event.replaceAll("_", " ")], ["who", (e) => e.component ?? e.worker ?? "–"], ["why", (e) => e.reason ?? e.message ?? "–", "wide"]], page.events.toReversed(), "Events of components"))) : null);
}

