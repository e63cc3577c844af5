// The operator's page: the state of one pool and its reasons, its orders and the cost. A choice if there are several.

import { KeyForm } from "./keys.js";
import { rememberedKey } from "./memory.js";
import { pageClient } from "./page_client.js";
import { inWords } from "./words.js";

const EVERY_MS = 1000;
const at = (id) => document.getElementById(id);

const client = pageClient();
const keyForm = new KeyForm(client, at("key-form"), () => complain(null));
let pools = [];
/** Id of the pool on the page, to which the page's orders go. */
let shown = null;
/** Whether the number of workers was typed and not sent yet: the next report must not replace it. */
let edited = false;

function complain(problem) {
  if (problem?.status === 401) keyForm.ask(problem);
  write("message", problem?.status === 401 ? null : problem);
}

function write(name, problem) {
  at(name).hidden = !problem;
  // The text changes only with the problem: a screen reader would read it again every second.
  const text = problem ? inWords(problem) : "";
  if (problem && at(name).textContent !== text) at(name).textContent = text;
}

function fill(list, items, make) {
  list.replaceChildren(...items.map(make));
}

function element(name, text, more = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  Object.assign(made, more);
  return made;
}

const clock = (time) => new Date(time).toLocaleTimeString([], { hour12: false });
const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

function playout(found) {
  const tiers = ["urgent", "normal", "relaxed"].filter((tier) => found[tier]).map((tier) => `${found[tier]} ${tier}`);
  const quality = found.quality === null ? "" : `, quality ${(found.quality * 100).toFixed(1)} %`;
  const lowered = found.lowered ? `, ${found.lowered} lowered` : "";
  const least = `least slack ${found.slack_s.toFixed(2)} s, credit ${found.credit_s.toFixed(2)} s`;
  return `${tiers.join(", ")}: ${least}${lowered}${quality}`;
}

function showMember(member) {
  const box = element("div", "", { className: "member" });
  box.dataset.phase = member.phase;
  box.setAttribute("role", "listitem");
  const title = element("b", "");
  title.append(element("span", member.member), element("span", member.phase.replace("_", " ")));
  const suspended = member.suspended ? `, ${member.suspended} suspended` : "";
  const holds = member.worker ? `${member.sessions} sessions${suspended}` : "";
  box.append(title, element("p", [holds, member.reason].filter(Boolean).join(" · ")));
  if (member.playout && member.playout.slack_s !== null) box.append(element("p", playout(member.playout)));
  return box;
}

function showLine(when, what, more) {
  const line = element("li", "");
  line.append(element("time", clock(when)), element("span", what), element("span", more, { className: "more" }));
  return line;
}

function chosen() {
  const of = (id) => pools.find((pool) => pool.id === id);
  // The pool on the page stays, so that a pool that reports later gets no order meant for this one.
  return of(location.hash.slice(1)) ?? of(shown) ?? pools[0];
}

function showPools(found) {
  pools = found;
  const pool = chosen();
  at("choice").hidden = pools.length < 2;
  const ids = pools.map((one) => one.id);
  const options = [...at("pool").options].map((option) => option.value);
  // Only when the pools change: replaced options would close the open list.
  if (ids.join() !== options.join()) fill(at("pool"), ids, (id) => element("option", id, { value: id }));
  if (pool) return showPool(pool);
  shown = null;
  at("summary").textContent = "No pool has reported yet.";
  at("phase").textContent = "no report";
  document.body.dataset.mode = "empty";
  for (const name of ["workers", "dry-run", "release"]) at(name).disabled = true;
}

function showPool(pool) {
  const scaling = pool.scaling;
  if (shown !== pool.id) edited = false;
  shown = pool.id;
  at("pool").value = pool.id;
  at("summary").textContent = pool.summary;
  const busy = pool.starting || pool.draining || pool.reason;
  document.body.dataset.mode = busy ? "waiting" : "live";
  const more = ["starting", "draining"].filter((name) => pool[name]).map((name) => `${pool[name]} ${name}`);
  at("phase").textContent = [`${pool.ready} ready`, ...more].join(", ");
  fill(at("members"), pool.members, showMember);
  fill(at("actions"), pool.actions.toReversed(), (a) =>
    showLine(a.at, [a.action, a.member].filter(Boolean).join(" "), a.reason ?? ""));
  at("r-startup").textContent = pool.start_up_s === null ? "–" : `${number(pool.start_up_s, 1)} s`;
  for (const name of ["workers", "dry-run", "release"]) at(name).disabled = !scaling;
  if (!scaling) return showUnmanaged();
  at("r-target").textContent = scaling.advice === scaling.target ? scaling.target : `${scaling.target} (${scaling.advice})`;
  at("r-limits").textContent = `${scaling.least}–${scaling.most}`;
  at("r-required").textContent = scaling.required ?? "–";
  at("r-rho").textContent = number(scaling.rho_max, 2);
  at("r-volatility").textContent = number(scaling.volatility, 2);
  at("r-basis").textContent = scaling.level === null ? `Learned, ${duration(scaling.learned_from_s)}` : `Profile, level ${scaling.level}`;
  at("r-target-rho").textContent = scaling.target_utilization;
  at("r-weight").textContent = scaling.latency_weight;
  at("workers").min = scaling.least;
  at("workers").max = scaling.most;
  if (!edited) at("workers").value = scaling.override ?? scaling.target;
  at("dry-run").checked = scaling.mode === "dry_run";
  at("table-of").textContent = scaling.level === null
    ? "Headroom: learned from this pool's own demand."
    : `Profile: ${scaling.profile?.source ?? "–"}`;
  fill(at("decisions"), scaling.decisions.toReversed(), (d) =>
    showLine(d.at, d.target === d.previous ? `${d.action} at ${d.target}` : `${d.action}: ${d.previous} → ${d.target}`, d.reason));
}

function showUnmanaged() {
  for (const name of ["target", "limits", "required", "rho", "volatility", "basis", "target-rho", "weight"]) {
    at(`r-${name}`).textContent = "–";
  }
  at("table-of").textContent = "Another system starts the workers of this pool.";
  at("workers").value = "";
  at("dry-run").checked = false;
  fill(at("decisions"), [], showLine);
}

function showCost(cost) {
  const money = new Intl.NumberFormat([], { style: "currency", currency: cost.currency, maximumFractionDigits: 4 });
  const amount = (one) => (one.money > 0 ? money.format(one.money) : duration(one.gpu_seconds));
  const own = cost.pools.find((one) => one.pool === shown);
  at("c-pool").textContent = own ? amount(own) : "–";
  at("c-total").textContent = amount(cost.total);
  at("c-used").textContent = amount(cost.used);
  at("c-idle").textContent = amount(cost.idle);
  at("no-price").hidden = cost.total.money > 0;
  fill(at("kinds"), cost.kinds, (kind) => {
    const line = element("li", "");
    const price = kind.price_per_gpu_hour;
    const starting = `${duration(kind.starting_gpu_seconds)} of them starting`;
    line.append(
      element("span", price > 0 ? `${kind.kind} at ${money.format(price)}/h` : kind.kind),
      element("span", `${duration(kind.gpu_seconds)}, ${starting}, ${kind.running} of ${kind.workers} running`),
    );
    return line;
  });
}

// Time that workers ran, on whatever device they have.
function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

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

async function look() {
  // While a key is asked for: the server limits wrong keys.
  if (!keyForm.isOpen) await report();
  setTimeout(look, EVERY_MS);
}

async function report() {
  try {
    showPools((await client.request("GET", "v1/pools")).pools);
    showCost(await client.request("GET", "v1/cost", { query: { limit: 1 } }));
    complain(null);
  } catch (problem) {
    at("phase").textContent = "no report";
    document.body.dataset.mode = "empty";
    complain(problem);
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
  const url = new URL(location.href);
  url.hash = at("pool").value;
  history.replaceState(null, "", url);
  showPools(pools);
});
addEventListener("hashchange", () => showPools(pools));
client.key = rememberedKey();
look();
