// All runs in a table, and two of them over each other.
import { chart, intervals, spark } from "./charts.js";
import { ago, api, badge, big, bundle, change, csv, duration, empty, fixed, h, link, moment, num, parse, save, signed, table } from "./core.js";

const RENEW_MS = 5000;

/** The list is drawn anew as runs begin and go on, unless somebody types, ticks or goes through it by keys. */
export async function runsPage(main) {
  let picked = draw(main, await api("runs"));
  if (bundle) return null;
  const busy = () => document.hidden || parse().page !== "runs" || picked.size || document.querySelector("tr.pick.at, #main :focus-visible, dialog[open]");
  const renewing = setInterval(async () => {
    if (busy()) return;
    const found = await api("runs").catch(() => null);
    if (busy()) return;
    document.getElementById("news").textContent = found ? "" : "no connection";
    if (found) picked = draw(main, found);
  }, RENEW_MS);
  return { end: () => clearInterval(renewing) };
}

/** Returns the names that are ticked, a set that lives on. */
function draw(main, found) {
  const runs = found.runs.sort((a, b) => (a.started || 0) - (b.started || 0));
  const { words } = parse();
  const search = (words.search || "").toLowerCase();
  const shown = runs.filter((run) => `${run.name} ${run.of} ${run.state}`.toLowerCase().includes(search))
    .sort((a, b) => b.alive - a.alive || (b.started || 0) - (a.started || 0));
  const box = h("input", { type: "search", id: "filter", placeholder: "Filter runs", "aria-label": "Filter runs", value: words.search || "",
    oninput: (event) => change({ search: event.target.value }, true) });
  const picked = new Set();
  const age = (name) => runs.findIndex((run) => run.name === name);
  const compare = h("a", { class: "button", href: "#/", hidden: true }, "Compare");
  const pick = (name, on) => {
    on ? picked.add(name) : picked.delete(name);
    const [a, b] = [...picked].sort((one, other) => age(one) - age(other));
    compare.hidden = picked.size !== 2;
    compare.href = link("compare", null, { a, b });
  };
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, "Runs"), h("p", { class: "sub" }, `${runs.length} here, ${runs.filter((run) => run.alive).length} of them live. Tick two to compare them.`),
      h("div", { class: "tools" }, box, compare)),
    shown.length ? h("div", { class: "card flush" }, table([
      ["", (run) => h("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, onchange: (event) => pick(run.name, event.target.checked) })],
      ["run", (run) => h("a", { href: link("run", run.name), class: "strong" }, run.name)],
      ["state", (run) => [badge(run.state, run.ended_by), run.troubles ? h("a", { class: "bad-text", href: link("run", run.name), title: "deaths, failures and faults: see what happened" }, ` ${num(run.troubles)} ${run.troubles === 1 ? "trouble" : "troubles"}`) : ""]],
      ["trains on", (run) => run.of || "–"],
      ["update", (run) => run.step === null || run.step === undefined ? "–" : [num(run.step), h("span", { class: "quiet" }, run.steps ? ` / ${num(run.steps)}` : "")], "n"],
      ["reward", (run) => fixed(run.score), "n"],
      ["its course", (run) => spark(run.spark)],
      ["held out", (run) => Object.values(run.held_out).length ? Object.values(run.held_out).map(([score]) => fixed(score)).join(" · ") : "–", "n"],
      ["cost", (run) => [duration(run.busy_s), h("span", { class: "quiet" }, run.generated ? `, ${big(run.generated)} ${run.unit}` : "")], "n"],
      ["started", (run) => moment(run.started), "n"],
      ["ended by", (run) => run.problem ? h("span", { class: "bad-text" }, run.problem) : run.alive ? h("span", { class: "quiet" }, ago(run.age_s)) : run.ended_by || "–", "wide"],
    ], shown, "Runs", (run) => ({ class: "pick", data: { href: link("run", run.name) } })))
      : empty(search ? "No run matches this filter." : "There is no run here."));
  return picked;
}

export async function comparePage(main) {
  const { runs } = await api("runs");
  const { words } = withTheOther(parse(), runs);
  const select = (name, label) => h("label", {}, label, h("select", { value: words[name] || "", onchange: (event) => change({ [name]: event.target.value, [`at_${name}`]: null }) },
    h("option", { value: "" }, "choose a run"), runs.map((run) => h("option", { value: run.name, selected: run.name === words[name] }, run.name))));
  const head = h("div", { class: "head" }, h("h1", {}, words.a && words.b ? `Is ${words.b} better than ${words.a}?` : "Is one run better than another?"), h("div", { class: "tools" }, select("a", "first "), select("b", "second ")));
  main.replaceChildren(head);
  if (!words.a || !words.b) {
    main.append(empty("Choose two runs: their last evaluations are compared problem by problem, their curves drawn over each other."));
    return null;
  }
  const found = await api("compare", { a: words.a, b: words.b, at_a: words.at_a, at_b: words.at_b });
  const at = (side) => h("label", {}, `${found[side]} at `, h("select", { onchange: (event) => change({ [`at_${side}`]: event.target.value }) },
    found.offered[side].map((each) => h("option", { value: each.name, selected: each.name === found.chosen[side] }, `${each.evaluation}, version ${each.step} (${fixed(each.reward)})`))));
  const verdicts = found.lessons.map((lesson) => h("li", { class: lesson.verdict }, lesson.words));
  main.append(
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Held-out reward, paired by problem"), h("div", { class: "tools" }, at("a"), at("b"))),
      found.unread.length ? h("p", { class: "note live-note" }, `Reading ${found.unread.join(" and ")} …`) : found.lessons.length ? [h("ul", { class: "verdicts" }, verdicts), found.same_recipe ? h("p", { class: "caution" }, found.caution) : null, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Differences with their intervals" }, intervals(found.lessons, found.a, found.b)),
        table([["lesson", (l) => l.lesson], [`${found.b} − ${found.a}`, (l) => signed(l.difference), "n"], ["95% from", (l) => signed(l.low), "n"], ["to", (l) => signed(l.high), "n"],
          ["problems", (l) => num(l.problems), "n"], ["without a pair", (l) => num(l.unpaired), "n"], ["by chance", (l) => l.chance < 0.001 ? "< 0.001" : fixed(l.chance), "n"]], found.lessons, "Differences by lesson"),
        h("p", { class: "note" }, "By chance: how probable a difference as large, either way, is between policies that are equal.")]
        : empty("The two have no lesson in common whose held-out rollouts are kept, so nothing can be said about which is better."),
      found.same_recipe ? null : h("p", { class: "note" }, found.caution)));
  await curvesOver(main, found);
  main.append(h("section", { class: "card" }, h("h2", {}, "Settings that differ"),
    found.settings.length ? table([["key", (row) => h("code", {}, row[0])], [found.a, (row) => row[1] ?? "–"], [found.b, (row) => row[2] ?? "–"]], found.settings, "Settings that differ")
      : empty("Their configurations are the same, seed included.")));
  if (!found.unread.length) return null;
  const again = setTimeout(() => dispatchEvent(new HashChangeEvent("hashchange")), 1000);
  return { end: () => clearTimeout(again) };
}

/** Where one run is chosen and there is exactly one other, that is chosen, too. */
function withTheOther(here, runs) {
  const { a, b } = here.words, others = runs.filter((run) => run.name !== (a || b));
  if (Boolean(a) === Boolean(b) || runs.length !== 2 || others.length !== 1) return here;
  history.replaceState(null, "", link("compare", null, { ...here.words, [a ? "b" : "a"]: others[0].name }));
  return parse();
}

const BY = { update: "update", tokens: "tokens trained", seconds: "seconds since the start" };

async function curvesOver(main, found) {
  const { words } = parse();
  const by = words.by in BY ? words.by : "update";
  const wanted = (words.m || "").split(",").filter((name) => found.metrics.includes(name));
  const first = ["train/reward_mean", ...found.metrics.filter((name) => /^(eval\/.*(reward_mean|return_mean)|fleet\/.*\/reward_mean)$/.test(name)), "replay/staleness_mean", "train/entropy"];
  const names = wanted.length ? wanted : first.filter((name) => found.metrics.includes(name)).slice(0, 4);
  const asked = [...names, "train/tokens", "train/steps"].join(",");
  const [a, b] = await Promise.all([found.a, found.b].map((run) => api(`runs/${encodeURIComponent(run)}/curves`, { names: asked, points: 600 })));
  const choose = h("label", {}, "by ", h("select", { id: "by", onchange: (event) => change({ by: event.target.value }) }, Object.keys(BY).map((name) => h("option", { value: name, selected: name === by }, name))));
  const add = h("label", {}, "curve ", h("select", { onchange: (event) => change({ m: [...names, event.target.value].slice(-6).join(",") }) },
    h("option", { value: "" }, "add one"), found.metrics.filter((name) => !names.includes(name)).map((name) => h("option", { value: name }, name))));
  main.append(h("div", { class: "head small" }, h("h2", {}, "Curves"), h("div", { class: "tools" }, choose, add)),
    h("div", { class: "grid" }, names.map((name) => chart(name, [
      { name: found.a, ...over(a.curves, name, by), hue: 0 }, { name: found.b, ...over(b.curves, name, by), hue: 1 },
    ], { zoom: false, unit: BY[by], sync: false, note: `by ${BY[by]}` }))));
}

/** A curve over updates, tokens trained or seconds; a reference curve is read off at the curve's own steps. */
function over(curves, name, by) {
  const curve = curves[name] || { step: [], mean: [], time: [] };
  if (by === "seconds") {
    const start = Math.min(...Object.values(curves).flatMap((each) => each.time.slice(0, 1)));
    return { x: curve.time.map((time) => time - start), y: curve.mean };
  }
  if (by === "update") return { x: curve.step, y: curve.mean, block: curve.block };
  const counts = curves["train/tokens"]?.step.length ? curves["train/tokens"] : curves["train/steps"];
  if (!counts?.step.length) return { x: [], y: [] };
  const sums = [];
  counts.mean.reduce((sum, value, index) => (sums[index] = sum + value * (counts.step[index] - (counts.step[index - 1] ?? 0))), 0);
  const at = (step) => {
    const index = counts.step.findLastIndex((each) => each <= step);
    return index < 0 ? 0 : sums[index];
  };
  const x = curve.step.map(at);
  const kept = x.map((value, index) => index === 0 || value > x[index - 1]);
  return { x: x.filter((_, index) => kept[index]), y: curve.mean.filter((_, index) => kept[index]) };
}

export function exportTable(name, columns, rows) {
  return h("button", { class: "tool", type: "button", onclick: () => save(`${name}.csv`, csv(columns, rows)) }, "CSV");
}
