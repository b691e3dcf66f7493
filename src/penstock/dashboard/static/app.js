// Which page is shown, the keys, the theme, and news of runs that go on.
import { forget, redraw } from "./charts.js";
import { api, bundle, h, link, parse } from "./core.js";
import { fleetPage, lessonsPage, timelinePage } from "./fleet.js";
import { groupPage, groupsPage } from "./rollouts.js";
import { ledgerPage, runPage, updatePage } from "./run.js";
import { comparePage, runsPage } from "./runs.js";

const PAGES = { runs: runsPage, compare: comparePage, run: runPage, ledger: ledgerPage, groups: groupsPage, group: groupPage, timeline: timelinePage, lessons: lessonsPage, fleet: fleetPage, update: updatePage };
const TABS = [["run", "Run"], ["ledger", "Ledger"], ["groups", "Groups"], ["timeline", "Timeline"], ["lessons", "Lessons"], ["fleet", "Fleet"]];
const KEYS = [["j / k", "next or previous row, group, answer or update"], ["Enter", "open the row"], ["/", "go to the filter"], ["g then r, l, g, t, s, f", "run, ledger, groups, timeline, lessons, fleet"], ["c", "compare"], ["u", "one level up"], ["h / l, + / −", "timeline: move, zoom"], ["Esc", "leave a field, close this"], ["?", "this help"]];
const main = document.getElementById("main");
let current = null, drawing = 0, source = null, listened = null, last = null, pending = "";

/** Draws the page of the address; the field that had the keyboard has it again. */
async function show(soft = false) {
  const here = parse();
  if (last && here.page === last.page && here.run === last.run && !soft && current?.quiet?.length) {
    const changed = [...new Set([...Object.keys(here.words), ...Object.keys(last.words)])].filter((name) => here.words[name] !== last.words[name]);
    last = here;
    if (changed.every((name) => current.quiet.includes(name))) return;
  }
  const moved = !last || here.page !== last.page || here.run !== last.run;
  last = here;
  const mine = ++drawing, field = document.activeElement, scroll = scrollY;
  const at = field?.id && main.contains(field) ? [field.id, field.selectionStart] : null;
  header(here);
  const stage = document.createElement("div");
  let next = null, failure = null;
  const draw = PAGES[here.page];
  try {
    if (!draw) throw new Error(`There is no page ${here.page}.`);
    main.setAttribute("aria-busy", "true");
    if (moved) main.classList.add("turning");
    next = await draw(staged(stage, mine), here.run);
  } catch (error) {
    failure = error;
  }
  if (mine !== drawing) { next?.end?.(); return; }
  if (failure) main.replaceChildren(h("div", { class: "card" }, h("h1", {}, "That did not work"), h("p", { class: "bad-text" }, failure.message), h("p", {}, h("a", { href: "#/" }, "All runs"))));
  main.removeAttribute("aria-busy");
  main.classList.remove("turning");
  current = next || {};
  document.title = [here.run, here.page === "run" ? null : here.page, "Penstock"].filter(Boolean).join(" · ");
  if (at) {
    const again = document.getElementById(at[0]);
    again?.focus();
    if (at[1] !== null && at[1] !== undefined && again?.type !== "number") again?.setSelectionRange?.(at[1], at[1]);
  }
  if (moved) { scrollTo(0, 0); if (!at) main.focus({ preventScroll: true }); } else scrollTo(0, scroll);
  listen(here.run);
}

/** What a page draws on: the real main, as long as no newer page is being drawn. */
function staged(stage, mine) {
  let fresh = true;
  const put = (how) => (...nodes) => {
    const mayDraw = mine === drawing;
    if (mayDraw && fresh) { current?.end?.(); current = null; fresh = false; }
    (mayDraw ? main : stage)[how](...nodes.flat(3).filter(Boolean));
    if (mayDraw) forget();
  };
  return { replaceChildren: put("replaceChildren"), append: put("append") };
}

function header(here) {
  const tabs = here.run ? TABS.map(([page, title]) => h("a", { href: link(page, here.run), "aria-current": page === here.page || (page === "groups" && here.page === "group") || (page === "run" && here.page === "update") ? "page" : null }, title)) : [];
  document.getElementById("top").replaceChildren(...[
    h("a", { class: "brand", href: "#/" }, "Penstock"),
    here.run ? h("span", { class: "crumb" }, h("span", { "aria-hidden": "true" }, "/ "), h("a", { href: link("run", here.run) }, here.run)) : null,
    h("nav", { "aria-label": "Pages" }, tabs, h("a", { href: here.run ? link("compare", null, { b: here.run }) : "#/compare", "aria-current": here.page === "compare" ? "page" : null }, "Compare")),
    h("span", { id: "news", role: "status" }, bundle ? h("span", { class: "quiet" }, `written ${bundle.written}`) : pending),
    h("button", { class: "icon", type: "button", id: "theme", title: "Light or dark", "aria-label": "Light or dark", onclick: theme }, "◐"),
    h("button", { class: "icon", type: "button", id: "help", title: "Keys (?)", "aria-label": "Keys", onclick: help }, "?")].filter(Boolean));
}

/** News of a run that goes on: the page is drawn anew, unless somebody is typing or reading a group. */
function listen(run) {
  if (bundle || run === listened) return;
  source?.close();
  listened = run;
  source = null;
  if (!run) return;
  source = new EventSource(`api/runs/${encodeURIComponent(run)}/stream`);
  let seen = null;
  source.onmessage = (event) => {
    const news = JSON.parse(event.data);
    const fresh = seen && ["version", "state", "renewals"].some((name) => news[name] !== seen[name]);
    seen = news;
    const node = document.getElementById("news");
    pending = news.state === "running" ? `live, update ${news.step ?? "–"}` : "";
    if (node) node.textContent = pending;
    const { page } = parse();
    const typing = main.contains(document.activeElement) && document.activeElement.matches("input, textarea, select");
    const scrolled = document.querySelector(".virtual")?.scrollTop > 0;
    if (fresh && !typing && !scrolled && !["group", "update", "compare"].includes(page) && !document.hidden && !document.querySelector("dialog[open]")) refresh();
  };
  source.onerror = () => {
    const node = document.getElementById("news");
    if (node) node.textContent = "no connection";
  };
}

let waiting = 0;

/** At most once in two seconds. */
function refresh() {
  if (waiting) return;
  waiting = setTimeout(() => { waiting = 0; show(true); }, 2000);
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("penstock-theme", root.dataset.theme); } catch { /* a page of a folder has no storage */ }
  redraw();
}

function help() {
  const dialog = h("dialog", { "aria-label": "Keys", onclose: (event) => event.target.remove() }, h("h2", {}, "Keys"), h("dl", { class: "keys" }, KEYS.map(([key, what]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)))),
    h("p", { class: "note" }, "The address is all of what is shown: copy it to hand a view on."), h("form", { method: "dialog" }, h("button", { class: "button", type: "submit" }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

let prefix = false;

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.closest?.("input, textarea, select");
  if (event.key === "Escape") { field?.blur(); return; }
  if (field) return;
  const { page, run } = parse();
  const go = { r: "run", l: "ledger", g: "groups", t: "timeline", s: "lessons", f: "fleet" };
  if (prefix) {
    prefix = false;
    if (run && go[event.key]) { event.preventDefault(); location.hash = link(go[event.key], run); }
    return;
  }
  const act = current?.keys?.[event.key] || own(event, page, run);
  if (act) { event.preventDefault(); act(); }
}

function own(event, page, run) {
  switch (event.key) {
    case "g": return () => { prefix = true; };
    case "/": return () => document.getElementById("filter")?.focus();
    case "?": return help;
    case "c": return () => { location.hash = run ? link("compare", null, { b: run }) : "#/compare"; };
    case "u": return () => { location.hash = page === "group" ? link("groups", run) : page === "update" ? link("run", run) : run && page !== "run" ? link("run", run) : "#/"; };
    case "j": return () => step(1);
    case "k": return () => step(-1);
    case "Enter": return chosen() ? () => { location.hash = chosen().dataset.href; } : null;
    default: return null;
  }
}

const chosen = () => document.querySelector("tr.pick.at");

/** The next row of a table, or the next group or update. */
function step(by) {
  const rows = [...document.querySelectorAll("tr.pick")];
  if (!rows.length) { document.getElementById(by > 0 ? "after" : "before")?.click(); return; }
  const at = rows.findIndex((row) => row.classList.contains("at"));
  rows.forEach((row) => row.classList.remove("at"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest" });
}

try { const kept = localStorage.getItem("penstock-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* likewise */ }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("hashchange", () => show());
addEventListener("keydown", key);

/** A dashboard of one run begins with that run. */
async function begin() {
  if (!location.hash) {
    const { runs } = await api("runs").catch(() => ({ runs: [] }));
    if (runs.length === 1) history.replaceState(null, "", link("run", runs[0].name));
  }
  await show();
}

begin();
