// The operators' console: the views of one pool, live or in the past. The state is in the address.

import { cost, showTotals } from "./console/cost.js";
import { clock, element, keyed, setText } from "./console/elements.js";
import { overview, showNoReport, showPool } from "./console/overview.js";
import { quality, showTiers } from "./console/quality.js";
import { queue } from "./console/queue.js";
import { decisions, migrations } from "./console/records.js";
import { rangeOf, readRoute, routeHash, VIEWS } from "./console/route.js";
import { TimeForm } from "./console/time_form.js";
import { workers } from "./console/workers.js";
import { keepFocus } from "./focus.js";
import { KeyForm } from "./keys.js";
import { rememberedKey } from "./memory.js";
import { pageClient } from "./page_client.js";
import { inWords } from "./words.js";

const EVERY_MS = 1_000;
const RETRY_MS = 3_000;
/** How often a live view is read at most while its span passes, unless the view says otherwise. */
const READS_A_SPAN = 1_200;
const views = { overview, workers, migrations, decisions, queue, quality, cost };
const at = (id) => document.getElementById(id);

const client = pageClient();
const keyForm = new KeyForm(client, at("key-form"), () => {
  complain(null);
  refresh();
});
const timeForm = new TimeForm((part) => go(part));
let pools = [];
/** Id of the pool on the page, to which the page's orders go. */
let shown = null;
/** Whether the number of workers was typed and not sent yet: the next report must not replace it. */
let edited = false;
let route = readRoute(location.hash);
/** Raised by every change of what is shown: answers to earlier requests are dropped. */
let turn = 0;
let timer = null;
/** Pool and time that each view shows. */
const drawn = {};
/** When the newest report was read. */
let readAt = null;

function complain(problem) {
  if (problem?.status === 401) keyForm.ask(problem);
  write("message", problem?.status === 401 ? null : problem);
}

function write(name, problem) {
  at(name).hidden = !problem;
  if (problem) setText(at(name), inWords(problem));
}

// The pool and its state

function chosen() {
  const of = (id) => pools.find((pool) => pool.id === id);
  if (route.pool) return of(route.pool);
  // The pool on the page stays, so that a pool that reports later gets no order meant for this one.
  return of(shown) ?? pools[0];
}

function showPools(found) {
  pools = found;
  const pool = chosen();
  const ids = pools.map((one) => one.id);
  // The past of a pool that reports no more is read by its address.
  if (route.pool && !ids.includes(route.pool)) ids.push(route.pool);
  at("choice").hidden = ids.length < 2;
  keyed(at("pool"), ids, (id) => id, (id) => element("option", id, { value: id }));
  if (!pool) return showNoPool();
  document.body.dataset.pool = pool.id;
  if (shown !== pool.id) {
    edited = false;
    shown = pool.id;
    refresh();
  }
  at("pool").value = pool.id;
  const busy = pool.starting || pool.draining || pool.reason;
  document.body.dataset.mode = busy ? "waiting" : "live";
  const more = ["starting", "draining"].filter((name) => pool[name]).map((name) => `${pool[name]} ${name}`);
  setText(at("phase"), [`${pool.ready} ready`, ...more].join(", "));
  showPool(pool, { edited, isPast: route.to !== null });
  showTiers(pool);
}

function showNoPool() {
  shown = null;
  at("pool").value = route.pool ?? "";
  const lost = `Pool ${route.pool} has not reported lately. Its past can still be read.`;
  showNoReport(route.pool ? lost : "No pool has reported yet. Its autoscaler may still be starting.");
  setText(at("phase"), "no report");
  document.body.dataset.mode = "empty";
}

async function look() {
  // While a key is asked for: the server limits wrong keys.
  if (!keyForm.isOpen) await report();
  setTimeout(look, EVERY_MS);
}

async function report() {
  try {
    showPools((await client.request("GET", "v1/pools")).pools);
    readAt = Date.now();
    if (route.view === "cost") showTotals(await client.request("GET", "v1/cost", { query: { limit: 1 } }), shown);
    complain(null);
  } catch (problem) {
    setText(at("phase"), "no report");
    document.body.dataset.mode = "empty";
    complain(problem);
    if (readAt !== null) setText(at("message"), `${inWords(problem)} This is the state of ${clock(readAt)}.`);
  }
}

// The view

function show() {
  for (const name of VIEWS) at(`view-${name}`).hidden = name !== route.view;
  for (const link of at("views").querySelectorAll("a")) {
    const isHere = link.dataset.view === route.view;
    // Another view begins with its own span of time.
    link.hash = routeHash({ ...route, span: null, view: link.dataset.view });
    if (isHere) showHere(link);
    else link.removeAttribute("aria-current");
  }
  timeForm.show(route);
  refresh();
}

function showHere(link) {
  link.setAttribute("aria-current", "page");
  document.title = `${link.textContent} – Pool – TurboServe`;
  // On a phone, not all links fit.
  const [place, all] = [link.getBoundingClientRect(), at("views").getBoundingClientRect()];
  at("views").scrollLeft += place.left - all.left - (all.width - place.width) / 2;
}

function go(part) {
  route = { ...route, ...part };
  history.pushState(null, "", routeHash(route));
  show();
}

/** Read the view's past now, and then as often as the view wants. A past range is read once, a long one seldom. */
async function refresh() {
  clearTimeout(timer);
  turn += 1;
  const mine = turn;
  const pool = route.pool ?? shown;
  if (pool === null || keyForm.isOpen) return;
  const view = views[route.view];
  const range = rangeOf(route);
  const of = `${pool} ${route.to} ${range.spanS}`;
  let nextMs = range.live ? Math.max(view.everyMs, (range.spanS * 1_000) / (view.readsASpan ?? READS_A_SPAN)) : null;
  try {
    const found = await view.load(reader(pool, range), range);
    if (mine !== turn) return;
    view.show(found, range);
    write("view-message", null);
    drawn[route.view] = of;
    hideView(false);
    document.body.dataset.shows = route.view;
  } catch (problem) {
    if (mine !== turn) return;
    if (problem.status === 401) complain(problem);
    else showProblem(problem);
    // What was read before stays on the page, unless it is of another pool or time, or not this operator's to see.
    hideView(problem.status === 403 || drawn[route.view] !== of);
    nextMs = problem.status === 403 || problem.status === 422 ? null : RETRY_MS;
  }
  if (nextMs !== null) timer = setTimeout(refresh, nextMs);
}

function reader(pool, range) {
  const iso = (time) => new Date(time).toISOString();
  const times = { from: iso(range.since), to: iso(range.until) };
  const read = (name, query = {}) => {
    const of = name === "queue" ? query : { ...times, ...query };
    return client.request("GET", `v1/pools/${pool}/${name}`, { query: of });
  };
  return Object.assign(read, { pool });
}

function showProblem(problem) {
  // The reports, which are asked for every second, say so already.
  if (problem.code === "unreachable") return write("view-message", null);
  if (problem.status !== 403) return write("view-message", problem);
  at("view-message").hidden = false;
  setText(at("view-message"), "Only operators see the past of a pool: this API key lacks the scope pool:write.");
}

// The state of the pool now, in the overview, is for every tenant.
function hideView(isHidden) {
  at("view-data").hidden = isHidden && route.view !== "overview";
  at("overview-plots").hidden = isHidden && route.view === "overview";
}

// Orders

// A refusal stays until the next order: the reports that arrive every second do not replace it.
async function order(method, name, body) {
  const pool = shown;
  if (pool === null) return;
  write("refusal", null);
  try {
    await client.request(method, `v1/pools/${pool}/${name}`, { body });
    if (name === "override" && shown === pool) edited = false;
  } catch (problem) {
    if (problem.status === 401) complain(problem);
    else write("refusal", problem);
  }
}

at("override-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (at("workers").value !== "") order("PUT", "override", { workers: Number(at("workers").value) });
});
at("workers").addEventListener("input", () => {
  edited = true;
});
at("release").addEventListener("click", () => order("DELETE", "override"));
at("dry-run").addEventListener("change", () => order("PUT", "dry-run", { dry_run: at("dry-run").checked }));
at("pool").addEventListener("change", () => {
  go({ pool: at("pool").value });
  showPools(pools);
});
// Of the links, and of the browser's own buttons.
addEventListener("popstate", () => {
  route = readRoute(location.hash);
  show();
  showPools(pools);
});
keepFocus(["#views [aria-current]"]);
client.key = rememberedKey();
show();
look();
